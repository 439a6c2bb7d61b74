"""Reads a source into checked rows of one kind; every bad row is named with its file and line."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from cookbook.data.sources import MAX_ROW_BYTES, raw_rows
from cookbook.files import RecipeError
from cookbook.objectives import Objective
from cookbook.recipe import Source
from cookbook.registry import known
from cookbook.row_kinds import BadRow, RowKind, columns, kinds, shapes, texts_in

MAX_NAMED = 20

OnBadRow = Literal["error", "drop"]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Good rows of one kind, with the keys of that kind only."""

    kind: str
    """Its name, see `cookbook.row_kinds`."""
    rows: list[dict[str, Any]]
    """As the kind's check gave them: `{"messages": [{"role", "content"}, ...]}`, say. A preference is
    `{"prompt", "chosen", "rejected"}`: texts, or (chat_preference) messages, the prompt being all that both share."""
    num_dropped: dict[str, int] = field(default_factory=dict)
    """Bad rows by reason."""
    place: str = "data.train"
    """How mistakes name the source."""
    numbers: Sequence[int] | None = None
    """Of each row among the good rows of its source, from 1; None if all are here."""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of kind and rows; the same whatever file format they came from."""
        digest = hashlib.sha256(self.kind.encode())
        for row in self.rows:
            digest.update(b"\n" + row_bytes(row))
        return digest.hexdigest()

    def where(self, position: int) -> str:
        return f"{self.place}: row {self.numbers[position] if self.numbers is not None else position + 1}"


@dataclass
class BadRows:
    """Bad rows so far: counted by reason, the first ones worded."""

    num_by_reason: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)

    def add(self, place: str, bad: BadRow) -> None:
        self.num_by_reason[bad.reason] += 1
        if len(self.named) < MAX_NAMED:
            self.named.append(f"{place}: {bad}")

    def mistakes(self) -> list[str]:
        unnamed = self.num_by_reason.total() - len(self.named)
        return self.named + ([f"... and {unnamed} more"] if unnamed else [])

    def stop_if(self, on_bad_row: OnBadRow) -> None:
        """Raises RecipeError if there is a bad row and the recipe does not drop them."""
        if self.named and on_bad_row == "error":
            raise RecipeError([*self.mistakes(), "Mend these rows, or leave them out with data.on_bad_row: drop"])


def read_rows(source: Source, on_bad_row: OnBadRow, objective: Objective, *, place: str = "data.train") -> Rows:
    """The good rows of a source, in its order; the first good row decides the kind.

    Keys of a row that its kind does not have (ids, scores) are ignored. With `max_rows` nothing is read, or checked,
    after that many good rows.

    Args:
        place: how later mistakes name the source.

    Raises:
        RecipeError: bad rows under on_bad_row "error", no row left, rows of a kind that the objective does not train
            on, or a source that cannot be read.
    """
    bad_rows = BadRows()
    found = list(_good_rows(source, objective, bad_rows))
    bad_rows.stop_if(on_bad_row)
    if not found:
        raise RecipeError([f"{source.path}: no row left to train on", *bad_rows.mistakes()])
    num_dropped = dict(bad_rows.num_by_reason)
    return Rows(kind=found[0][0], rows=[row for _, row in found], num_dropped=num_dropped, place=place)


def row_blocks(
    sources: Sequence[Source], size: int, on_bad_row: OnBadRow, objective: Objective, bad_rows: BadRows
) -> Iterator[list[Rows]]:
    """One pass over the sources, in their order, by blocks of `size` good rows (the last may have fewer), each as one
    `Rows` per source that it touches. Holds one block.

    Raises:
        RecipeError: as `read_rows`, when the block with the bad row is full or the pass ends.
    """
    parts: list[Rows] = []
    room = size
    for i, source in enumerate(sources):
        good, number = _good_rows(source, objective, bad_rows, streaming=True), 1
        while found := list(islice(good, room)):
            numbers = range(number, number + len(found))
            kind, place = found[0][0], place_of("data.train", sources, i)
            parts.append(Rows(kind=kind, rows=[row for _, row in found], place=place, numbers=numbers))
            room, number = room - len(found), number + len(found)
            if not room:
                bad_rows.stop_if(on_bad_row)
                yield parts
                parts, room = [], size
    bad_rows.stop_if(on_bad_row)
    if parts:
        yield parts


def place_of(key: str, sources: Sequence[Source], i: int) -> str:
    """How mistakes name source `i`: by the key alone where there is one."""
    return key if len(sources) == 1 else f"{key}.{i} ({sources[i].path})"


def texts(rows: Rows) -> Iterator[str]:
    """Every text of the rows, to train a tokenizer on."""
    for row in rows.rows:
        yield from texts_in(row)


def row_bytes(row: dict[str, Any]) -> bytes:
    """The content of a row, as what is hashed."""
    return json.dumps(row, ensure_ascii=False).encode()


def _good_rows(
    source: Source, objective: Objective, bad_rows: BadRows, *, streaming: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    kind: str | None = None
    num_good = 0
    for place, raw in raw_rows(source, streaming=streaming):
        try:
            row_kind, row = _check_row(raw, objective, place)
            if kind is not None and row_kind != kind:
                raise BadRow(
                    "another kind of row",
                    f"{kinds()[row_kind].words}, where the rows before have {kinds()[kind].words}",
                )
        except BadRow as bad:
            bad_rows.add(place, bad)
            continue
        kind = row_kind
        yield kind, row
        num_good += 1
        if num_good == source.max_rows:
            return


# What a row must be.


def _check_row(raw: Any, objective: Objective, place: str) -> tuple[str, dict[str, Any]]:
    """The name of its kind, and the row with the keys of that kind only.

    Raises:
        BadRow: the first thing that is wrong with it.
        RecipeError: nothing is, but the objective does not train on such rows.
    """
    if isinstance(raw, BadRow):
        raise raw
    if not isinstance(raw, dict):
        raise BadRow("not an object", f"a {type(raw).__name__}; a row is an object with {shapes()}")
    kind = _kind(raw, objective, place)
    row = kind.check(raw)
    if sum(len(text.encode()) for text in texts_in(row)) > MAX_ROW_BYTES:
        raise BadRow(f"row larger than {MAX_ROW_BYTES:,} bytes")
    return kind.name, row


def _kind(raw: dict[str, Any], objective: Objective, place: str) -> RowKind:
    # A parquet file of mixed rows fills the columns that a row lacks with null.
    present = {key for key, value in raw.items() if value is not None}
    found = [kind for kind in kinds().values() if present.issuperset(kind.keys) and kind.matches(raw)]
    served = [kind for kind in found if kind.name in objective.rows]
    if not found:
        nulls = [key for key in columns() if key in raw and raw[key] is None]
        if nulls:
            raise BadRow("empty text", f"`{nulls[0]}` is null")
        raise BadRow("missing keys", f"found {', '.join(map(ascii, raw))[:200] or 'none'}; a row must have {shapes()}")
    if not served:
        others = [name for name, other in known("objective").items() if found[0].name in other.rows]
        instead = f"; use other rows, or objective.name: {' or '.join(others)}" if others else "; use other rows"
        trained = dict.fromkeys(kinds()[name].keys_in_words for name in objective.rows)
        mistake = (
            f"{place}: a row with {found[0].keys_in_words}, but objective.name is {objective.name}, which trains on"
            f" {', or '.join(trained)}{instead}"
        )
        raise RecipeError([mistake])
    if len(served) > 1:
        words = " as well as ".join(kind.words for kind in served)
        raise BadRow("two kinds in one row", f"{words}; keep the one to train on")
    return served[0]
