"""Rows through all of reading and tokenizing, and back as text: what a test sees of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from cookbook.commands.preview.sample_page import mark_text
from cookbook.config.objectives import Objective
from cookbook.config.sections import DataSection
from cookbook.system.files import RecipeError
from cookbook.training.data.sets import read_data, tokenize_data

Row = dict[str, Any]
Labelled = list[tuple[int, bool]]
"""Each token with whether it is trained."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of some rows: their samples and the notes on them, or the words of a refusal."""

    texts: list[str] = field(default_factory=list)
    """Each sequence as `preview` shows it, trained stretches in [[ ]]."""
    samples: list[Labelled] = field(default_factory=list)
    notes: str = ""
    refused: str = ""


def read_back(
    source: Sequence[Row] | Path,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    objective: dict[str, Any] | None = None,
    **data: Any,
) -> Outcome:
    """Reads and tokenizes rows, or a file of them, with these keys of `data`, as `preview` does."""
    path = source if isinstance(source, Path) else folder / "rows.jsonl"
    if not isinstance(source, Path):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in source), encoding="utf-8")
    try:
        section = DataSection.model_validate({"train": str(path), "max_length": 4096} | data)
        chosen = Objective.of(**{"name": "sft", **(objective or {})})
        sets = tokenize_data(read_data(section, chosen), tokenizer, section, chosen, cache=folder / "cache")
    except (RecipeError, ValidationError) as error:
        return Outcome(refused=str(error))
    tokens = sets.train
    count = len(tokens.offsets) - 1
    ends = [slice(tokens.offsets[i], tokens.offsets[i + 1]) for i in range(count)]
    return Outcome(
        texts=[mark_text(tokens, i, tokenizer, "[[{}]]".format) for i in range(count)],
        samples=[list(zip(tokens.ids[span].tolist(), map(bool, tokens.is_label[span]), strict=True)) for span in ends],
        notes="\n".join(sets.notes),
    )


def trained_tokens(sample: Labelled, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return tokenizer.convert_ids_to_tokens([token for token, is_trained in sample if is_trained])


def ids_of(sample: Labelled) -> list[int]:
    return [token for token, _ in sample]
