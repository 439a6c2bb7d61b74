"""The training set and the evaluation sets of a recipe: their rows, and then their tokens.

In two functions, since a new model's tokenizer is trained on the rows.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cookbook.config.objectives import Objective, TooLong
from cookbook.config.sections import BUILTIN_SOURCE, DataSection, Source, eval_key
from cookbook.system.files import RecipeError, gather_mistakes, refuse
from cookbook.training.data.passes import Passes
from cookbook.training.data.rows import BadRows, Rows, place_of, read_rows, row_bytes, texts
from cookbook.training.data.sources import unread_note
from cookbook.training.data.stream import Stream
from cookbook.training.data.tokens import Remark, TokenSet, cached_tokens, ids_beyond

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HOLDOUT = "holdout"
"""Name of the evaluation set that data.holdout splits off."""


@dataclass(frozen=True, kw_only=True)
class RowSets:
    """The rows of a recipe, each set by source."""

    train: list[Rows]
    """With data.streaming, the first block only."""
    eval: dict[str, list[Rows]]
    """Held-out rows by name; "" if the recipe has only one."""

    def texts(self) -> Iterator[str]:
        """Every text of the training rows, for training a tokenizer."""
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
    """Held-out tokens by name; "" if the recipe has only one, and "holdout" for the rows of data.holdout."""
    notes: list[str]
    """For the user: rows dropped, samples truncated, the shares of a mixture."""

    def fingerprint(self, cache: Path) -> str:
        """SHA-256 of the training tokens, or of a stream's sources and settings. For `cache` see `sha256_of`."""
        if isinstance(self.train, Stream):
            text = self.train.fingerprint(cache)
        else:
            text = f"{self.train.fingerprint} {self.train.weights}"
        return hashlib.sha256(text.encode()).hexdigest()

    def closing_notes(self) -> list[str]:
        """Notes on a stream that are known only after reading: how the rows of the first pass were read, which were
        dropped, and samples truncated."""
        if not isinstance(self.train, Stream):
            return []
        counts, how = self.train.first_pass, self.train.objective.long_rows(self.train.data.too_long)
        return [
            *(note for notes in counts.reading.values() for note in notes if note not in self.notes),
            *_dropped_notes("data.train", counts.num_dropped),
            *_remarks("data.train", counts.remarks.values()),
            *_long_note("data.train", counts.num_long, counts.num_rows, self.train.data.max_length, how),
        ]


def read_data(data: DataSection, objective: Objective) -> RowSets:
    """The rows of all sources, without those that data.holdout takes from the training set.

    Raises:
        RecipeError: the mistakes of all sources together, or a holdout of no row or all rows.
    """
    mistakes: list[str] = []

    def read(source: Source, place: str) -> list[Rows]:
        if mistakes and source.path == BUILTIN_SOURCE:
            return []  # takes seconds, and can have no mistake
        with gather_mistakes(mistakes):
            return [read_rows(source, data.on_bad_row, objective, place=place)]
        return []

    if data.streaming:
        bad_rows = BadRows()
        train = next(Passes(data, objective).blocks(bad_rows), [])
        if not train:
            raise RecipeError(["data.train: no row left to train on", *bad_rows.mistakes()])
    else:
        places = (place_of("data.train", data.train, i) for i in range(len(data.train)))
        train = [rows for source, place in zip(data.train, places, strict=True) for rows in read(source, place)]
    evals = {name: read(source, eval_key(name)) for name, source in data.eval.items()}
    refuse(mistakes)
    if data.holdout:
        train, evals[HOLDOUT] = hold_out(train, data.holdout)
    return RowSets(train=train, eval=evals)


def read_eval(data: DataSection, objective: Objective) -> dict[str, list[Rows]]:
    """The held-out rows alone, as `read_data` has them; data.train is read only for data.holdout.

    Raises:
        RecipeError: as `read_data`, for the first source with mistakes.
    """
    if data.holdout:
        return read_data(data, objective).eval
    return {
        name: [read_rows(source, data.on_bad_row, objective, place=eval_key(name))]
        for name, source in data.eval.items()
    }


def hold_out(train: list[Rows], share: float) -> tuple[list[Rows], list[Rows]]:
    """The rows that stay, and those that `data.holdout` takes.

    Raises:
        RecipeError: one of the two has no row.
    """
    kept, held_out = [], []
    for rows in train:
        # By content: a row stays in its set however the file changes around it, and equal rows are on one side.
        digests = (hashlib.sha256(row_bytes(row)).digest() for row in rows.rows)
        is_held_out = [int.from_bytes(digest[:8], "big") < share * 2**64 for digest in digests]
        kept.append(_select(rows, [i for i, out in enumerate(is_held_out) if not out]))
        held_out.append(replace(_select(rows, [i for i, out in enumerate(is_held_out) if out]), num_dropped={}))
    num_rows, num_kept = (sum(len(rows.rows) for rows in side) for side in (train, kept))
    if num_kept in (0, num_rows):
        taken = "none" if num_kept else "all"
        why = "rows that are equal stay together; take it out, or write data.eval"
        raise RecipeError(f"data.holdout is {share}: it takes {taken} of the {num_rows} rows of data.train; {why}")
    return kept, [rows for rows in held_out if rows.rows]


def _select(rows: Rows, positions: list[int]) -> Rows:
    return replace(rows, rows=[rows.rows[i] for i in positions], numbers=[i + 1 for i in positions])


def tokenize_data(
    rows: RowSets,
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSection,
    objective: Objective,
    *,
    cache: Path,
    num_embeddings: int | None = None,
) -> TokenSets:
    """The tokens of all sets, cached by content (see `cached_tokens`).

    Args:
        num_embeddings: of the model, where it is known.

    Raises:
        RecipeError: a tokenizer or template that cannot be trained with, rows that have nothing to train on, or tokens
            beyond the embedding.
    """
    mistakes: list[str] = []
    notes = [*filter(None, map(unread_note, [*data.train, *data.eval.values()])), *_renamed_notes(rows.train)]
    train: TokenSet | Stream
    if data.streaming:
        train = Stream(data=data, objective=objective, tokenizer=tokenizer, num_embeddings=num_embeddings)
        if data.is_streamed_mixture:
            counts = [source.rows_per_epoch or 0 for source in data.train]
            shares = (
                f"{source.path} {count:,} ({count / sum(counts):.0%})"
                for source, count in zip(data.train, counts, strict=True)
            )
            notes.append(f"data.train: an epoch has {sum(counts):,} rows: {', '.join(shares)}")
    else:
        train = _tokens_of(rows.train, "data.train", tokenizer, data, objective, cache, notes)
        mistakes += ids_beyond(train, num_embeddings, tokenizer, "data.train")
        notes.extend(_alike_note("data.train", train.values))
        weights = tuple(
            source.rows_per_epoch / len(part.rows) if source.rows_per_epoch else source.weight or 1.0
            for source, part in zip(data.train, rows.train, strict=True)
        )
        if any(weight != 1 for weight in weights):
            train = replace(train, weights=weights)
        if len(weights) > 1 or train.weights:
            notes.append(f"data.train: {_shares_note(train, data)}")
    with gather_mistakes(mistakes):
        evals, eval_notes = tokenize_eval(
            rows.eval, tokenizer, data, objective, cache=cache, num_embeddings=num_embeddings
        )
    refuse(mistakes)
    return TokenSets(train=train, eval=evals, notes=list(dict.fromkeys(notes + eval_notes)))


def tokenize_eval(
    evals: dict[str, list[Rows]],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSection,
    objective: Objective,
    *,
    cache: Path,
    num_embeddings: int | None = None,
) -> tuple[dict[str, TokenSet], list[str]]:
    """The tokens of the held-out sets, and notes for the user; raises as `tokenize_data`."""
    notes = _renamed_notes(chain(*evals.values()))
    sets, mistakes = {}, []
    for name, parts in evals.items():
        place = "data.holdout" if name == HOLDOUT and data.holdout else eval_key(name)
        sets[name] = _tokens_of(parts, place, tokenizer, data, objective, cache, notes)
        mistakes += ids_beyond(sets[name], num_embeddings, tokenizer, place)
    refuse(mistakes)
    return sets, notes


def _tokens_of(
    parts: list[Rows],
    place: str,
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSection,
    objective: Objective,
    cache: Path,
    notes: list[str],
) -> TokenSet:
    """The tokens of one set; adds its notes for the user."""
    tokens, dropped = cached_tokens(parts, tokenizer, data, objective, cache=cache, place=place)
    counts = sum((Counter(part.num_dropped) for part in parts), Counter(dropped))
    notes.extend(_dropped_notes(place, counts))
    notes.extend(_remarks(place, tokens.remarks))
    lengths, how = tokens.row_lengths, objective.long_rows(data.too_long)
    if lengths is not None:
        enough = int(np.quantile(lengths, SHARE_TO_KEEP, method="higher"))
        num_long = int(np.count_nonzero(lengths > data.max_length))
        notes.extend(_long_note(place, num_long, len(lengths), data.max_length, how, enough))
    return tokens


def _renamed_notes(parts: Iterable[Rows]) -> list[str]:
    return list(dict.fromkeys(note for part in parts for note in part.notes))


def _dropped_notes(place: str, num_dropped: Counter[str]) -> list[str]:
    return [f"{place}: dropped {count} row{'s' * (count > 1)}: {reason}" for reason, count in num_dropped.items()]


def _remarks(place: str, remarks: Iterable[Remark]) -> list[str]:
    def words(remark: Remark) -> str:
        rows = f"{remark.num_rows:,} row{'s' * (remark.num_rows > 1)}"
        return f"{place}: {rows} {remark.words}; first: {remark.first.removeprefix(place + ': ')}"

    return list(map(words, remarks))


SHARE_TO_KEEP = 0.99
LONG_ROWS = {"cut": "are cut there", "drop": "are left out", "split": "become several samples", "error": "are bad rows"}


def _long_note(
    place: str, num_long: int, num_rows: int, max_length: int, how: TooLong, enough: int | None = None
) -> list[str]:
    """At most one note. `enough`: the length that SHARE_TO_KEEP of the rows do not exceed."""
    if not num_long:
        return []
    limit = f"data.max_length {max_length:,}"
    what = f"{num_long:,} of {num_rows:,} rows ({num_long / num_rows:.1%}) are longer than {limit}"
    keep = ""
    if enough is not None and enough > max_length and how != "split":  # splitting loses nothing
        keep = f"; {enough:,} would keep {SHARE_TO_KEEP:.0%} whole"
    return [f"{place}: {what} and {LONG_ROWS[how]}{keep}"]


def _alike_note(place: str, values: np.ndarray | None) -> list[str]:
    """At most one note: a judgement that is the same for all samples is no reason to prefer any answer."""
    if values is None or len(values) < 2 or values.min() != values.max():
        return []
    return [
        f"{place}: all {len(values):,} samples have the same label or advantage, {values[0]:g}: nothing sets them apart"
    ]


def _shares_note(tokens: TokenSet, data: DataSection) -> str:
    """Contribution of each source to an epoch, in samples and trained tokens."""
    num_samples = tokens.epoch_sizes
    ends = np.cumsum(tokens.part_sizes)
    targets = tokens.num_targets.reshape(-1, tokens.group_size).sum(1)
    trained = [
        targets[end - size : end].sum() * (count / size if size else 0)
        for end, size, count in zip(ends, tokens.part_sizes, num_samples, strict=True)
    ]
    shares = (
        f"{source.path} {count:,} samples ({count / sum(num_samples):.0%} of them,"
        f" {tokens_of_source / sum(trained):.0%} of the trained tokens)"
        for source, count, tokens_of_source in zip(data.train, num_samples, trained, strict=True)
    )
    return f"an epoch has {sum(num_samples):,} samples: {', '.join(shares)}"
