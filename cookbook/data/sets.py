"""The training set and the evaluation sets of a recipe: first their rows, then their tokens.

Between the two stands the tokenizer, which a new model trains on the rows.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cookbook.data.rows import BadRows, Rows, place_of, read_rows, row_blocks, row_bytes, texts
from cookbook.data.stream import Stream
from cookbook.data.tokens import TokenSet, cached_tokens
from cookbook.files import RecipeError
from cookbook.objectives import Objective
from cookbook.recipe import BUILTIN_SOURCE, DataSection, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HOLDOUT = "holdout"
"""Name of the evaluation set that data.holdout takes."""


@dataclass(frozen=True, kw_only=True)
class RowSets:
    """The rows of a recipe, each set by source."""

    train: list[Rows]
    """Under data.streaming the first block only."""
    eval: dict[str, list[Rows]]
    """By name; "" where the recipe names none."""

    def texts(self) -> Iterator[str]:
        """Every text of the training rows, to train a tokenizer on."""
        for rows in self.train:
            yield from texts(rows)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the training rows."""
        return hashlib.sha256("".join(rows.fingerprint for rows in self.train).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TokenSets:
    """The tokens of a recipe."""

    train: TokenSet | Stream
    eval: dict[str, TokenSet]
    """By name; "" where the recipe names none, and "holdout" for the rows of data.holdout."""
    notes: list[str]
    """What a user should know of: rows dropped, samples cut, the shares of a mixture."""

    def fingerprint(self, cache: Path) -> str:
        """SHA-256 of what is trained on; of a stream, of what it is read from and with. `cache` as for `sha256_of`."""
        if isinstance(self.train, Stream):
            text = self.train.fingerprint(cache)
        else:
            text = f"{self.train.fingerprint} {self.train.weights}"
        return hashlib.sha256(text.encode()).hexdigest()

    def closing_notes(self) -> list[str]:
        """What is known of a stream only when it was read: rows dropped and samples cut in the first pass."""
        if not isinstance(self.train, Stream):
            return []
        found = self.train.first_pass
        return _row_notes("data.train", found.num_dropped, found.num_cut, found.num_samples, self.train.objective)


def read_data(data: DataSection, objective: Objective) -> RowSets:
    """The rows of all sources, less those that data.holdout takes from the training set.

    Raises:
        RecipeError: the mistakes of all sources together, or a holdout that takes no row or all.
    """
    mistakes: list[str] = []

    def read(source: Source, place: str) -> list[Rows]:
        if mistakes and source.path == BUILTIN_SOURCE:
            return []  # seconds of work, in which there is no mistake to be found
        try:
            return [read_rows(source, data.on_bad_row, objective, place=place)]
        except RecipeError as error:
            mistakes.extend(error.mistakes)
            return []

    if data.streaming:
        bad_rows = BadRows()
        train = next(row_blocks(data.train, data.shuffle_rows, data.on_bad_row, objective, bad_rows), [])
        if not train:
            raise RecipeError(["data.train: no row left to train on", *bad_rows.mistakes()])
    else:
        places = (place_of("data.train", data.train, i) for i in range(len(data.train)))
        train = [rows for source, place in zip(data.train, places, strict=True) for rows in read(source, place)]
    evals = {name: read(source, _eval_place(name)) for name, source in data.eval.items()}
    if mistakes:
        raise RecipeError(list(dict.fromkeys(mistakes)))
    if data.holdout:
        train, evals[HOLDOUT] = _hold_out(train, data.holdout)
    return RowSets(train=train, eval=evals)


def _eval_place(name: str) -> str:
    return f"data.eval.{name}" if name else "data.eval"


def _hold_out(train: list[Rows], share: float) -> tuple[list[Rows], list[Rows]]:
    kept, held_out = [], []
    for rows in train:
        is_held_out = [_is_held_out(row, share) for row in rows.rows]
        kept.append(_select(rows, [i for i, out in enumerate(is_held_out) if not out]))
        held_out.append(replace(_select(rows, [i for i, out in enumerate(is_held_out) if out]), num_dropped={}))
    num_rows, num_kept = (sum(len(rows.rows) for rows in side) for side in (train, kept))
    if num_kept in (0, num_rows):
        taken = "none" if num_kept else "all"
        raise RecipeError([f"data.holdout is {share}: it takes {taken} of the {num_rows} rows of data.train"])
    return kept, [rows for rows in held_out if rows.rows]


def _select(rows: Rows, positions: list[int]) -> Rows:
    return replace(rows, rows=[rows.rows[i] for i in positions], numbers=[i + 1 for i in positions])


def _is_held_out(row: dict[str, Any], share: float) -> bool:
    digest = hashlib.sha256(row_bytes(row)).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def tokenize_data(
    rows: RowSets, tokenizer: "PreTrainedTokenizerBase", data: DataSection, objective: Objective, *, cache: Path
) -> TokenSets:
    """The tokens of all sets, cached by content (see `cached_tokens`).

    Raises:
        RecipeError: a tokenizer or template that cannot be trained with, or rows that have nothing to train on.
    """
    notes: list[str] = []

    def tokens_of(parts: list[Rows], place: str) -> TokenSet:
        tokens, dropped = cached_tokens(
            parts,
            tokenizer,
            cache=cache,
            max_length=data.max_length,
            objective=objective,
            on_bad_row=data.on_bad_row,
            place=place,
        )
        counts = sum((Counter(part.num_dropped) for part in parts), Counter(dropped))
        notes.extend(_row_notes(place, counts, tokens.num_cut, len(tokens), objective))
        return tokens

    train: TokenSet | Stream
    if data.streaming:
        train = Stream(data=data, objective=objective, tokenizer=tokenizer)
    else:
        train = tokens_of(rows.train, "data.train")
        weights = tuple(source.weight or 1.0 for source in data.train)
        if any(weight != 1 for weight in weights):
            train = replace(train, weights=weights)
        if len(weights) > 1 or train.weights:
            notes.append(f"data.train: {_shares_note(train, data)}")
    evals = {}
    for name, parts in rows.eval.items():
        evals[name] = tokens_of(parts, "data.holdout" if name == HOLDOUT and data.holdout else _eval_place(name))
    return TokenSets(train=train, eval=evals, notes=notes)


def _row_notes(
    place: str, num_dropped: Counter[str], num_cut: int, num_samples: int, objective: Objective
) -> list[str]:
    notes = [f"{place}: dropped {count} rows: {reason}" for reason, count in num_dropped.items()]
    if num_cut and objective.splits_rows:
        notes.append(f"{place}: {num_cut} texts are longer than data.max_length and become several samples")
    elif num_cut:
        notes.append(f"{place}: {num_cut} of {num_samples} samples reach data.max_length and are cut there")
    return notes


def _shares_note(tokens: TokenSet, data: DataSection) -> str:
    """What each source contributes to an epoch, in samples and in trained tokens."""
    num_samples = tokens.epoch_sizes
    ends = np.cumsum(tokens.part_sizes)
    targets = tokens.num_targets.reshape(-1, tokens.group_size).sum(1)
    trained = [
        targets[end - size : end].sum() * (count / size if size else 0)
        for end, size, count in zip(ends, tokens.part_sizes, num_samples, strict=True)
    ]
    shares = (
        f"{source.path} {count:,} samples ({100 * tokens_of_source / sum(trained):.0f} % of the trained tokens)"
        for source, count, tokens_of_source in zip(data.train, num_samples, trained, strict=True)
    )
    return f"an epoch has {sum(num_samples):,} samples: {', '.join(shares)}"
