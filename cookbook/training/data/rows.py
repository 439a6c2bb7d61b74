"""Reads a source into checked rows of one kind; every bad row is reported with its file and line."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from cookbook.config.objectives import Objective
from cookbook.config.registry import known
from cookbook.config.row_kinds import (
    BadRow,
    Reading,
    RowKind,
    kinds,
    kinds_of,
    misspelt,
    readings,
    rename,
    shapes,
    suggested_columns,
    texts_in,
)
from cookbook.config.sections import DataSection, Source
from cookbook.system.files import RecipeError, closest, dump_yaml, kind_in_words
from cookbook.training.data.readers import MAX_ROW_BYTES
from cookbook.training.data.sources import raw_rows

MAX_SHOWN = 20

OnBadRow = Literal["error", "drop"]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Good rows of one kind, with the keys of that kind only."""

    kind: str
    """Name of the kind, see `cookbook.config.row_kinds`."""
    rows: Sequence[dict[str, Any]]
    """Normalized by the kind's check: `{"messages": [{"role", "content"}, ...]}`, for example. A preference is
    `{"prompt", "chosen", "rejected"}`: texts, or (chat_preference) messages, the prompt being all that both share."""
    num_dropped: dict[str, int] = field(default_factory=dict)
    """Bad rows by reason."""
    place: str = "data.train"
    """Name of the source in error messages."""
    numbers: Sequence[int] | None = None
    """Index of each row among the good rows of its source, from 1; None if all are here."""
    renamed: str = ""
    """How columns of another project's shape were read, in words; empty for rows in a shape of this one."""

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
    """Bad rows so far: counts by reason, and messages for the first ones."""

    num_by_reason: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)
    num_good: int = 0
    """Rows that were not bad."""
    remedy: str = ""
    """Advice for rows that are all bad."""

    def add(self, place: str, bad: BadRow) -> None:
        self.num_by_reason[bad.reason] += 1
        if len(self.shown) < MAX_SHOWN:
            self.shown.append(f"{place}: {bad}")

    def mistakes(self) -> list[str]:
        """The first bad rows, or one if all rows are bad for one reason, and what may help."""
        shown, count = self.shown, self.num_by_reason.total()
        is_alike = not self.num_good and len(self.num_by_reason) == 1
        if is_alike:
            shown = shown[:1]
        if num_more := count - len(shown):
            alike = f" row{'s' if num_more > 1 else ''} with the same mistake" if is_alike else ""
            shown = [*shown, f"... and {num_more} more{alike}"]
        advice = self.remedy if not self.num_good else "Fix these rows, or skip them with data.on_bad_row: drop"
        return [*shown, advice] if advice else shown

    def stop_if(self, on_bad_row: OnBadRow) -> None:
        """Raise RecipeError if there is a bad row and the recipe does not drop them."""
        if self.shown and on_bad_row == "error":
            raise RecipeError(self.mistakes())


def read_rows(source: Source, on_bad_row: OnBadRow, objective: Objective, *, place: str = "data.train") -> Rows:
    """The good rows of a source, in order; the first good row decides the kind.

    Keys of a row that its kind does not have (ids, scores) are ignored. With `max_rows` reading stops after that many
    good rows.

    Args:
        place: name of the source in later error messages.

    Raises:
        RecipeError: bad rows under on_bad_row "error", no row left, rows of a kind that the objective does not train
            on, or a source that cannot be read.
    """
    bad_rows, reader = BadRows(), _Reader(source, objective)
    rows = list(_good_rows(reader, bad_rows))
    bad_rows.stop_if(on_bad_row)
    if not rows:
        raise RecipeError([f"{source.path}: no row left to train on", *bad_rows.mistakes()])
    num_dropped = dict(bad_rows.num_by_reason)
    return Rows(kind=reader.kind, rows=rows, num_dropped=num_dropped, place=place, renamed=reader.renamed)


def row_blocks(data: DataSection, objective: Objective, bad_rows: BadRows) -> Iterator[list[Rows]]:
    """One pass over data.train, in order, in blocks of data.shuffle_rows good rows (the last may have fewer), each as
    one `Rows` per source in it. Holds one block in memory.

    Raises:
        RecipeError: as `read_rows`, when the block with the bad row is full or the pass ends.
    """
    parts: list[Rows] = []
    room = data.shuffle_rows
    for i, source in enumerate(data.train):
        reader, number = _Reader(source, objective), 1
        good, place = _good_rows(reader, bad_rows, streaming=True), place_of("data.train", data.train, i)
        while rows := list(islice(good, room)):
            numbers = range(number, number + len(rows))
            parts.append(Rows(kind=reader.kind, rows=rows, place=place, numbers=numbers, renamed=reader.renamed))
            room, number = room - len(rows), number + len(rows)
            if not room:
                bad_rows.stop_if(data.on_bad_row)
                yield parts
                parts, room = [], data.shuffle_rows
    bad_rows.stop_if(data.on_bad_row)
    if parts:
        yield parts


def place_of(key: str, sources: Sequence[Source], i: int) -> str:
    """Name of source `i` in error messages: the key alone if there is only one source."""
    return key if len(sources) == 1 else f"{key}.{i} ({sources[i].path})"


def texts(rows: Rows) -> Iterator[str]:
    """Every text of the rows, for training a tokenizer."""
    for row in rows.rows:
        yield from texts_in(row)


def row_bytes(row: dict[str, Any]) -> bytes:
    """The content of a row, for hashing."""
    return json.dumps(row, ensure_ascii=False).encode()


def _refuse(value: Any) -> None:
    raise BadRow("not JSON", kind_in_words(value))


def _good_rows(reader: "_Reader", bad_rows: BadRows, *, streaming: bool = False) -> Iterator[dict[str, Any]]:
    num_good = 0
    for place, raw in raw_rows(reader.source, streaming=streaming):
        try:
            row = reader.read(raw, place)
        except BadRow as bad:
            bad_rows.add(place, bad)
            bad_rows.remedy = bad_rows.remedy or reader.remedy(raw, bad)
            continue
        bad_rows.num_good += 1
        yield row
        num_good += 1
        if num_good == reader.source.max_rows:
            return


class _Reader:
    """Reads the rows of a source; the first good one decides their kind."""

    def __init__(self, source: Source, objective: Objective) -> None:
        self.source, self.objective = source, objective
        self.kind, self.renamed = "", ""
        self._readings: dict[frozenset[str], list[Reading]] = {}

    def read(self, raw: Any, place: str) -> dict[str, Any]:
        """The row with the keys of its kind only.

        Raises:
            BadRow: the first problem of the row.
            RecipeError: the row is good, but the objective does not train on its kind.
        """
        if isinstance(raw, BadRow):
            raise raw
        if not isinstance(raw, dict):
            raise BadRow("not an object", f"{kind_in_words(raw)}; a row is an object with {shapes()}")
        named = rename(raw, self.source.columns or {})
        reading = self._reading_of(named, raw, place)
        row = reading.kind.check(reading.of(named))
        try:
            num_bytes = sum(len(text.encode()) for text in texts_in(row))
        except TypeError:  # within calls or tools, of a column that JSON has no type for
            json.dumps(row, default=_refuse)
            raise
        if num_bytes > MAX_ROW_BYTES:
            raise BadRow(f"row larger than {MAX_ROW_BYTES:,} bytes")
        if self.kind and reading.kind.name != self.kind:
            words = f"{reading.kind.words}, where the rows before have {kinds()[self.kind].words}"
            raise BadRow("another kind of row", words)
        if not self.kind:
            self.kind, self.renamed = reading.kind.name, reading.words(named)
        return row

    def remedy(self, raw: Any, bad: BadRow) -> str:
        """The lines of a recipe that may make a bad row a good one; empty if its columns are not the problem."""
        if not isinstance(raw, dict) or self.source.columns or bad.reason not in ("missing keys", "wrong role"):
            return ""
        columns = suggested_columns(raw, self.objective.rows)
        if not columns or (bad.reason == "wrong role" and "role" not in columns):
            return ""
        lines = dump_yaml({"data": {"columns": columns}}).splitlines()
        return "\n".join(["If these are the columns to train on, name them in the recipe:", *(f"  {x}" for x in lines)])

    def _reading_of(self, row: dict[str, Any], raw: dict[str, Any], place: str) -> Reading:
        # A parquet file of mixed rows has null in the columns that a row lacks.
        present = frozenset(key for key, value in row.items() if value is not None)
        if present not in self._readings:
            self._readings[present] = readings(present)
        found = [one for one in self._readings[present] if one.kind.matches(one.of(row))]
        served = [one for one in found if one.kind.name in self.objective.rows]
        if not found:
            seen = ", ".join(map(ascii, raw))[:200] or "none"
            needed = [[one.columns[key] for key in one.kind.keys] for one in readings(row.keys())]
            nulls = [[column for column in some if row[column] is None] for some in needed]
            if nulls := [columns for columns in nulls if columns]:
                raise BadRow("empty text", f"`{min(nulls, key=len)[0]}` is null")
            if self.source.columns:
                given = ", ".join(f"{key}: {column}" for key, column in self.source.columns.items())
                absent = [column for column in self.source.columns.values() if column not in raw]
                for column in absent:
                    meant = closest(column, raw)
                    seen += f" (did you mean {meant!a}, not {column!a}?)" if meant else ""
                if len(kinds_of(raw)) == 1:
                    seen += ", which would be read without data.columns"
                raise BadRow("missing keys", f"with columns {{{given}}} it has {seen}; a row must have {shapes()}")
            if near := misspelt(raw):
                seen += f" (did you mean `{near[1]}`, not {near[0]!a}?)"
            raise BadRow("missing keys", f"found {seen}; a row must have {shapes()}")
        if not served:
            raise RecipeError(f"{place}: {self._unserved(found[0].kind)}")
        # A row in a shape of this project is read by it, whatever other columns it has.
        served = [one for one in served if one.is_own] or served
        if len(served) > 1:
            words = " as well as ".join(one.in_words for one in served)
            choice = ", ".join(f"{key}: {column}" for key, column in served[0].columns.items())
            raise BadRow("two kinds in one row", f"{words}; choose with data.columns, as in {{{choice}}}")
        return served[0]

    def _unserved(self, kind: RowKind) -> str:
        others = [name for name, other in known("objective").items() if kind.name in other.rows]
        instead = f"; use other rows, or objective.name: {' or '.join(others)}" if others else "; use other rows"
        trained = dict.fromkeys(kinds()[name].keys_in_words for name in self.objective.rows)
        return (
            f"a row with {kind.keys_in_words}, but objective.name is {self.objective.name}, which trains on"
            f" {', or '.join(trained)}{instead}"
        )
