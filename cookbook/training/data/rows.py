"""Reads a source into checked rows of one kind; every bad row is reported with its file and line."""

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from cookbook.config.objectives import Objective
from cookbook.config.sections import Source
from cookbook.rows.doubts import Doubts
from cookbook.rows.json_text import NO_JSON, BadRow, from_json
from cookbook.rows.messages import IN_MESSAGES, READ_KEYS, unread_keys, unread_of_answers
from cookbook.rows.row_checks import (
    FOR_TEMPLATE,
    are_messages,
    has_calls,
    is_empty,
    is_rating,
    refuse_printed,
    texts_in,
)
from cookbook.rows.row_columns import (
    MEANT,
    MESSAGE_KEYS,
    NEVER_READ,
    OTHER_NAMES,
    RATING,
    Reading,
    asks_for_something,
    drop_columns,
    keys_in_messages,
    kinds_of,
    overwritten_keys,
    prefer_own_names,
    readings,
    rename,
)
from cookbook.rows.row_kinds import RowKind, TextGenerator, kinds, shapes
from cookbook.rows.suggestions import find_misspelt, is_prose, suggestions
from cookbook.system.files import RecipeError, closest, dump_yaml, gather_mistakes, in_flow, kind_in_words, refuse
from cookbook.system.registry import members
from cookbook.training.data.readers import MAX_ROW_BYTES
from cookbook.training.data.sources import raw_rows

MAX_SHOWN = 20
MAX_NAMES = 12

OnBadRow = Literal["error", "drop"]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Good rows of one kind, with the keys of that kind only."""

    kind: str
    """Name of the kind, see `cookbook.rows.row_kinds`."""
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
    """The renaming of columns of another project's shape, in words; empty for rows in a shape of this one."""
    unread: str = ""
    """Columns and keys of messages that nothing reads, in words; empty if there are none."""
    untold: str = ""
    """Calls of tools that their rows do not describe, in words; empty if there are none."""
    unread_keys: Sequence[str] = ()
    """The keys of messages in `unread`, which a chat template may want."""

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how they were read."""
        return [f"{self.place}: {words}" for words in (self.renamed, self.unread, self.untold) if words]

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

    def move_to(self, other: "BadRows") -> None:
        """Count these in `other`, and no longer here."""
        other.num_by_reason += self.num_by_reason
        other.shown += self.shown[: MAX_SHOWN - len(other.shown)]
        other.num_good += self.num_good
        self.num_by_reason, self.shown, self.num_good = Counter(), [], 0

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

    Columns that its kind does not have are named in `Rows.unread`, or refused if they have a meaning. With `max_rows`
    reading stops after that many good rows.

    Args:
        place: name of the source in later error messages.

    Raises:
        RecipeError: bad rows under on_bad_row "error", no row left, rows of a kind that the objective does not train
            on, a source that cannot be read, or a name in its columns or ignore that no row has.
    """
    bad_rows, reader = BadRows(), Reader(source, objective)
    rows = list(good_rows(reader, bad_rows))
    mistakes: list[str] = []
    with gather_mistakes(mistakes):
        bad_rows.stop_if(on_bad_row)
    with gather_mistakes(mistakes):
        reader.ask()
    refuse(mistakes)
    if not rows:
        raise RecipeError([f"{source.path}: no row left to train on", *bad_rows.mistakes()])
    return Rows(
        kind=reader.kind,
        rows=rows,
        num_dropped=dict(bad_rows.num_by_reason),
        place=place,
        renamed=reader.renamed,
        unread=reader.unread,
        untold=reader.untold,
        unread_keys=reader.unread_keys,
    )


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


def _not_json(value: Any) -> None:
    raise BadRow(NO_JSON, kind_in_words(value))


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def good_rows(reader: "Reader", bad_rows: BadRows, *, streaming: bool = False) -> Iterator[dict[str, Any]]:
    num_good = 0
    for place, raw in raw_rows(reader.source, streaming=streaming, unread=reader.in_schema):
        try:
            row = reader.read(raw, place)
        except BadRow as bad:
            bad_rows.add(place, bad)
            if not bad_rows.remedy and bad_rows.num_by_reason.total() <= MAX_SHOWN:
                bad_rows.remedy = reader.remedy(raw, bad)
            continue
        bad_rows.num_good += 1
        yield row
        num_good += 1
        if num_good == reader.source.max_rows:
            return
    if num_good and not streaming:  # a run of days does not end for a name
        reader.check_names()


@dataclass
class _Shape:
    """Rows with a value in the same columns."""

    readings: list[Reading]
    num_rows: int = 0
    """Good ones so far."""
    left: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    """Kind -> the columns that it does not read: those that may ask for something, and metadata."""
    unread: tuple[str, ...] = ()
    """The metadata of the kind that is read."""
    empty: tuple[str, ...] = ()
    """Unread columns that had no value so far."""


class Reader:
    """Reads the rows of a source; the first good one decides their kind."""

    def __init__(self, source: Source, objective: Objective) -> None:
        self.source, self.objective = source, objective
        self.kind, self.renamed = "", ""
        self.in_schema: set[str] = set()
        """Columns of the files that the rows do not have, since nothing reads them."""
        self._columns, self._ignored = source.columns or {}, source.ignore or []
        self._shapes: dict[frozenset[str], _Shape] = {}
        self._is_whole = False
        """True if all rows were read."""
        self._keys_unread: set[str] = set()
        """Keys of messages that nothing reads."""
        self._doubts = Doubts(is_chosen=bool(self._columns))
        self._num_untold = 0
        """Rows with calls and without tools."""
        # Names of the recipe that no row had so far.
        of_messages = {f"{IN_MESSAGES}{column}" for key, column in self._columns.items() if key in MESSAGE_KEYS}
        of_rows = {column for key, column in self._columns.items() if key not in MESSAGE_KEYS}
        self._sought = {*self._ignored, *of_messages, *of_rows}

    def read(self, raw: Any, place: str) -> dict[str, Any]:
        """The row with the keys of its kind only.

        Raises:
            BadRow: the first problem of the row.
            RecipeError: the row is good, but the objective does not train on its kind, or the recipe names a column for
                a key that its kind does not have.
        """
        if isinstance(raw, BadRow):
            raise raw
        if not isinstance(raw, dict):
            raise BadRow("not an object", f"{kind_in_words(raw)}; a row is an object with {self._shapes_known}")
        if self._sought:
            self._sought -= raw.keys()
            if any(name.startswith(IN_MESSAGES) for name in self._sought):
                self._sought -= keys_in_messages(raw)
        if self._ignored:
            raw = drop_columns(raw, self._ignored)
        # A parquet file of mixed rows has null in the columns that a row lacks.
        present = frozenset(key for key, value in raw.items() if value is not None)
        named = rename(raw, self._columns)
        shape = self._shapes.get(present)
        if shape is None:
            known_as = rename(dict.fromkeys(present), self._columns).keys()
            shape = self._shapes[present] = _Shape(readings(known_as, self.objective.rows))
        reading = self._reading_of(shape, named, raw, place)
        self._refuse_meant(reading, shape, raw)
        of_kind = reading.of(named)
        try:
            refuse_printed(of_kind)
            row = self.objective.check_row(reading.kind.check(of_kind))
        except BadRow as bad:
            raise self._in_words_of_the_row(bad, reading) from None
        try:
            num_bytes = sum(len(text.encode()) for text in texts_in(row))
        except TypeError:  # within calls, tools or kwargs, of a column that JSON has no type for
            json.dumps(row, default=_not_json)
            raise
        except UnicodeEncodeError:  # `check_text` names the others
            raise BadRow("lone surrogate", "in a tool, a call or a name; not valid in text") from None
        if num_bytes > MAX_ROW_BYTES:
            raise BadRow(f"row larger than {MAX_ROW_BYTES:,} bytes")
        if self.kind and reading.kind.name != self.kind:
            raise self._mixed_kinds(reading.kind)
        if reading.kind.chats is not None:
            if self._columns:
                self._keys_unread |= overwritten_keys(raw, self._columns)
            for key, value in of_kind.items():
                if key not in FOR_TEMPLATE and isinstance(value, list | dict | str):
                    if key == "system":
                        value = {"role": key, "content": value}
                    if isinstance(value, dict) and "messages" in value:  # a request to a model
                        value = value["messages"]
                    value = from_json(value) if key == "messages" else value
                    self._keys_unread.update(unread_keys(value))
                    for message, unread in unread_of_answers(value):
                        self._doubts.add_answer(message, unread)
            self._num_untold += "tools" not in row and has_calls(row)
        if not self.kind:
            self._check_columns(reading.kind, place)
            self.kind, self.renamed = reading.kind.name, reading.words(named)
        shape.num_rows += 1
        if shape.empty:
            shape.empty = tuple(column for column in shape.empty if is_empty(raw[column]))
        self._doubts.add_row(raw, shape.unread, reading)
        return row

    def ask(self) -> None:
        """Raise RecipeError if something in the rows so far may be meant and is not read."""
        refuse([f"{self.source.path}: {question}" for question in self._doubts.questions(self.in_schema)])

    def check_names(self) -> None:
        """Raise RecipeError if the source, whose rows are all read, names columns that no row had."""
        self._is_whole = True
        own = self.source.model_fields_set
        mistakes = [f"{self.source.path}: {words}" for key, words in self._absent_names() if key in own]
        refuse(mistakes)

    @property
    def unread(self) -> str:
        """Names in the rows so far that were not read, in words."""
        counts: Counter[str] = Counter()
        for shape in self._shapes.values():
            counts.update(dict.fromkeys({*shape.unread} - {*shape.empty}, shape.num_rows))
        num_rows = sum(shape.num_rows for shape in self._shapes.values())
        names = {*counts, *self._keys_unread, *self.in_schema} - {*self._ignored}
        names = {name or "a column without a name" for name in names}
        counts = Counter({name: count for name, count in counts.items() if name not in self.in_schema})
        few = {name: f" ({count:,} of {num_rows:,} rows)" for name, count in counts.items() if count < num_rows}
        passed_over = [name for name in self._ignored if name not in self._names_not_seen]
        notes = [f"not read: {_join_names([name + few.get(name, '') for name in sorted(names)])}"] if names else []
        notes += [f"passed over by data.ignore: {_join_names(passed_over)}"] if passed_over else []
        return "; ".join([*notes, *(words for _, words in self._absent_names())])

    @property
    def unread_keys(self) -> list[str]:
        """Keys of messages in the rows so far that were not read, and that the user does not pass over."""
        names = self._keys_unread - {*self._ignored}
        return sorted({name.removeprefix(IN_MESSAGES) for name in names} - READ_KEYS)

    @property
    def untold(self) -> str:
        """The number of rows so far with calls of tools that they do not describe, in words."""
        if not self._num_untold:
            return ""
        rows = "1 row has" if self._num_untold == 1 else f"{self._num_untold:,} rows have"
        return f"{rows} tool calls and no `tools`, so the samples do not say what can be called"

    @property
    def _names_not_seen(self) -> set[str]:
        return self._sought - self.in_schema - self._keys_unread

    def _absent_names(self) -> list[tuple[str, str]]:
        """Names of the recipe that no row had, each with its key and in words."""
        named = [("ignore", name, name) for name in self._ignored]
        for key, column in self._columns.items():
            named.append(("columns", column, f"{IN_MESSAGES}{column}" if key in MESSAGE_KEYS else column))
        never_seen, so_far = self._names_not_seen, "" if self._is_whole else " so far"
        absent = [(key, name) for key, name, place in named if place in never_seen]
        return [(key, f"{key} has {name!a}, which no row has{so_far}") for key, name in absent]

    def _refuse_meant(self, reading: Reading, shape: _Shape, raw: dict[str, Any]) -> None:
        """Raise BadRow if a column that the kind does not read has a meaning, and a value that asks for something."""
        # Whoever names the columns leaves others out, as whoever rendered a text has; what is never read may surprise.
        meant = NEVER_READ if self._columns or reading.kind.is_rendered else MEANT
        if reading.kind.name not in shape.left:
            read = {self._columns.get(column, column) for column in reading.columns.values()}
            left = sorted(key for key, value in raw.items() if value is not None and key not in read)
            shape.left[reading.kind.name] = (
                tuple(column for column in left if column in meant or column == RATING),
                tuple(column for column in left if column not in meant),
            )
            shape.empty = shape.left[reading.kind.name][1]
        asking, shape.unread = shape.left[reading.kind.name]
        for column in asking:
            value = raw[column]
            if column == RATING:
                is_rated = any(RATING in way.columns for way in shape.readings)
                if not is_rated or not is_rating(value):
                    continue
                why = f"objective.name {self.objective.name} would train bad answers as good ones"
            elif not asks_for_something(column, value):
                continue
            else:
                other = reading.columns.get(OTHER_NAMES.get(column, ""))
                why = f"the row has `{self._columns.get(other, other)}` too" if other else meant[column]
                if (
                    meant[column] == MEANT["reasoning"]
                    and "reasoning_content" in reading.kind.other_keys
                    and is_prose(value)
                ):
                    columns = in_flow(reading.columns | {"reasoning_content": column})
                    why = f"if it is the answer's reasoning, write data.columns: {columns}"
            seen = f"it is {kind_in_words(value)}; {why}. To pass it over: data.ignore: [{column}]"
            raise BadRow(f"`{column}` is not read", seen)

    def _check_columns(self, kind: RowKind, place: str) -> None:
        """Raise if the recipe names columns for keys that the kind of the rows does not have."""
        has_messages = any(
            isinstance(value, list) for value in kind.made_up(TextGenerator(random.Random(0), ["a"])).values()
        )
        keys = [*kind.keys, *kind.other_keys, *(MESSAGE_KEYS if has_messages else ())]
        for key, column in self._columns.items():
            if key not in keys:
                what = f"columns has {key}: {column}, but a row with {kind.keys_in_words} has no `{key}`"
                raise RecipeError(f"{place}: {what}; its keys are {', '.join(keys)}")

    def _in_words_of_the_row(self, bad: BadRow, reading: Reading) -> BadRow:
        """The problem with the row's own columns in the place of the kind's keys."""
        names = {key: self._columns.get(column, column) for key, column in reading.columns.items()}

        def rename_keys(text: str) -> str:
            return re.sub(r"`(\w+)`", lambda match: f"`{names.get(match[1], match[1])}`", text)

        return BadRow(rename_keys(bad.reason), rename_keys(bad.seen))

    def remedy(self, raw: Any, bad: BadRow) -> str:
        """The lines of a recipe that may make a bad row a good one; empty if its columns are not the problem."""
        if not isinstance(raw, dict) or self.source.columns or bad.reason not in ("missing keys", "wrong role"):
            return ""
        ways = [way.columns for way in suggestions(raw, self.objective.rows)]
        ways = [columns for columns in ways if bad.reason != "wrong role" or "role" in columns]
        if not ways:
            return ""
        advice = "If these are the columns to train on, name them in the recipe:"
        lines = dump_yaml({"data": {"columns": ways[0]}}).splitlines()
        if len(ways) > 1:
            advice = "Which columns are to be trained on? Name them in the recipe, as one of:"
            lines = ["data:", *(f"  columns: {in_flow(columns)}" for columns in ways)]
        return "\n".join([advice, *(f"  {line}" for line in lines)])

    def _reading_of(self, shape: _Shape, row: dict[str, Any], raw: dict[str, Any], place: str) -> Reading:
        matching = [reading for reading in shape.readings if reading.kind.matches(reading.of(row))]
        served = [reading for reading in matching if reading.kind.name in self.objective.rows]
        if not matching:
            raise self._missing_keys(row, raw)
        if not served:
            self._refuse_without_label(row)
        if not served and self.kind:
            raise self._mixed_kinds(matching[0].kind)
        if not served:
            raise RecipeError(f"{place}: {self._wrong_objective(matching[0].kind)}")
        served = prefer_own_names(served)
        used = [set(reading.columns.values()) for reading in served]
        served = [reading for reading, own in zip(served, used, strict=True) if not any(own < other for other in used)]
        if len(served) > 1:
            named = [reading.in_words for reading in served]
            if len({*named}) < len(named):
                named = [" and ".join(f"`{column}`" for column in reading.columns.values()) for reading in served]
            words = " as well as ".join(named)
            choice = ", ".join(f"{key}: {column}" for key, column in served[0].columns.items())
            advice = f"choose with data.columns, as in {{{choice}}}, or pass columns over with data.ignore"
            raise BadRow("two kinds in one row", f"{words}; {advice}")
        return served[0]

    @property
    def _shapes_known(self) -> str:
        return shapes(self.objective.rows)

    def _refuse_without_label(self, row: dict[str, Any]) -> None:
        """Raise BadRow if the row lacks nothing but the label that the objective needs."""
        present = {key for key, value in row.items() if value is not None} | {RATING}
        for reading in readings(present, self.objective.rows):
            if reading.kind.is_asked_for and reading.kind.name in self.objective.rows and row.get(RATING) is None:
                name = self._columns.get(RATING, RATING)
                seen = "null" if RATING in row else f"missing beside {', '.join(map(ascii, row))[:200]}"
                raise BadRow("no label", f"`{name}` is {seen}; {self.objective.name} needs a label for each row")

    def _missing_keys(self, row: dict[str, Any], raw: dict[str, Any]) -> BadRow:
        """The problem of a row that no kind can read, with what may have been meant."""
        seen = ", ".join(map(ascii, raw))[:200] or "none"
        needed = [
            [reading.columns[key] for key in reading.kind.keys] for reading in readings(row.keys(), self.objective.rows)
        ]
        nulls = [[column for column in some if row[column] is None] for some in needed]
        if nulls := [columns for columns in nulls if columns]:
            return BadRow("empty text", f"`{min(nulls, key=len)[0]}` is null")
        if self.source.columns:
            given = ", ".join(f"{key}: {column}" for key, column in self.source.columns.items())
            absent = [column for column in self.source.columns.values() if column not in raw]
            for column in absent:
                meant = closest(column, raw)
                seen += f" (did you mean {meant!a}, not {column!a}?)" if meant else ""
            if len(kinds_of(raw)) == 1:
                seen += ", which would be read without data.columns"
            return BadRow(
                "missing keys", f"with columns {{{given}}} it has {seen}; a row must have {self._shapes_known}"
            )
        if near := find_misspelt(raw):
            seen += f" (did you mean `{near[1]}`, not {near[0]!a}?)"
        objects = ((column, value) for column, value in raw.items() if isinstance(value, dict))
        inner = [f"{column}.{key}" for column, value in objects for key in value if are_messages(value[key])]
        if inner:
            seen += f" (with messages in {' and '.join(inner)}, which no column is; write them as one)"
        return BadRow("missing keys", f"found {seen}; a row must have {self._shapes_known}")

    def _mixed_kinds(self, kind: RowKind) -> BadRow:
        words = f"{kind.words}, where the rows before have {kinds()[self.kind].words}"
        return BadRow("another kind of row", words)

    def _wrong_objective(self, kind: RowKind) -> str:
        others = [name for name, other in members("objective").items() if kind.name in other.rows]
        instead = f"; use other rows, or objective.name: {' or '.join(others)}" if others else "; use other rows"
        trained = dict.fromkeys(kinds()[name].keys_in_words for name in self.objective.rows)
        return (
            f"a row with {kind.keys_in_words}, but objective.name is {self.objective.name}, which trains on"
            f" {', or '.join(trained)}{instead}"
        )
