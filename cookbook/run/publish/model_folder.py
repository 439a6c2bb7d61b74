"""Folder `model/` of a run, with all that an export needs but weights; written when the run starts."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from cookbook.config.sections import ModelSection
from cookbook.facts.language_part import with_rows
from cookbook.facts.score_head import ScoreHead
from cookbook.training.adapters.base_model import BASE_RECORD, Base
from cookbook.training.checkpoint.tower import Tower, copy_processors
from cookbook.training.checkpoint.write_model import (
    BUFFERS,
    building,
    write_generation_config,
)
from cookbook.training.models import model_source, tokenizer_files

MODEL_FILES = "model"


def write_model_files(
    run: Path,
    name: str,
    model: ModelSection,
    *,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    digest: str,
    new_tokens: Mapping[str, int] | None = None,
    head: ScoreHead | None = None,
    buffers: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write `model/` in a run's folder: everything that an export needs but weights. Rank 0 calls.

    Args:
        name: the model's folder, see `model_source.resolve_model`.
        tokenizer: with the chat template of the run.
        digest: `model_source.weights_digest` of that folder.
        new_tokens: those that the run added to the tokenizer, with their ids.
        head: that for sequences, if the run trains one.
        buffers: see `saved_buffers`; None if an adapter is trained, whose export needs no weights of the model.
    """
    is_new = model.from_scratch is not None
    revision = model.revision or model_source.revision_of(name)
    place = model.name_or_path or name
    if Path(place).is_dir():
        place = os.path.abspath(place)  # an export is opened in other working folders too
    base = Base(place, revision, digest, is_new, dict(new_tokens or {}), head)
    tower = Tower.of(Path(name))
    with building(run / MODEL_FILES) as build:
        if tower is None:
            config.save_pretrained(build)
        else:
            values = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
            values = with_rows(values, config.vocab_size) if new_tokens else values
            (build / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            copy_processors(Path(name), build)
            if buffers is not None:
                tower.keep(build)
        if buffers:
            save_file(buffers, build / BUFFERS)
        tokenizer.save_pretrained(build)
        if head is None:
            write_generation_config(build, like=Path(name), end_of_turn=tokenizer_files.end_of_turn(tokenizer))
        base.write(build)


def has_model_files(run: Path) -> bool:
    """True if `write_model_files` has finished in a run's folder."""
    return (run / MODEL_FILES / BASE_RECORD).is_file()
