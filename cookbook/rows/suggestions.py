"""Suggestions of columns for rows that no kind reads, each of which makes a good row of them. No torch."""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

from cookbook.rows.json_text import BadRow
from cookbook.rows.messages import REASONING_KEYS, ROLES, role_of
from cookbook.rows.row_checks import Row, is_empty
from cookbook.rows.row_columns import MEANT, OTHER_NAMES, readings, rename
from cookbook.rows.row_kinds import RowKind, TextGenerator, columns, kinds
from cookbook.system.files import closest

MAX_SUGGESTED = 4
MAX_TRIED = 200


class Suggestion(NamedTuple):
    """Columns that make a good row of one."""

    columns: dict[str, str]
    """A key of the kind, or of its messages -> column."""
    is_named: bool
    """True if each required key has a column with a name for it, and nothing else could be meant."""


def is_prose(value: Any) -> bool:
    """Return whether a value is a text of several words, and no list or object that was written as one."""
    if not isinstance(value, str) or len(value.split(maxsplit=2)) < 2:
        return False
    text = value.strip()
    return text[0] + text[-1] not in ("[]", "{}")


def suggestions(row: Row, names: Sequence[str]) -> list[Suggestion]:
    """Columns under which a row, which no kind reads as it is, would be a good one of these kinds.

    By names that are almost right, in their case or a letter; else by a name for each key alone; else, in the order of
    the columns, those whose values are of the right type. A column with a name for one key is never used for another,
    and optional keys are kept. Each was tried.
    """
    if ways := _of_known_names(row, names):
        return _suggest(row, ways, are_named=True)
    for name in names:
        kind = kinds()[name]
        ways = [choice for choice in islice(_choices(row, kind), MAX_TRIED) if _is_good(row, kind, choice)]
        named = [way for way in ways if all(is_name_of(way[key], kind, key) for key in kind.keys)]
        if ways:
            others = [way for way in ways if way not in named]
            return _suggest(row, [*named, *others], are_named=bool(named) and len(ways) == 1)
    return []


def _suggest(row: Row, ways: list[dict[str, str]], *, are_named: bool) -> list[Suggestion]:
    first = ways[0]
    left = [column for column, value in row.items() if column not in first.values() and is_prose(value)]
    left = [column for column in left if not _has_name(column)]
    if left and "assistant" in first and "reasoning_content" not in first:
        ways = [first, first | {"reasoning_content": left[0]}, *ways[1:]]
    return [Suggestion(way, are_named and len(ways) == 1 and not left) for way in ways[:MAX_SUGGESTED]]


def find_misspelt(row: Row) -> tuple[str, str] | None:
    """A column that would make the row readable under the nearest known name, and that name."""
    known = columns()
    nearest = {column: closest(column, known, 0.6) for column in row if column not in known}
    for column, near in nearest.items():
        if near is not None and near not in row and [*nearest.values()].count(near) == 1:
            renamed = _rename_columns(row, {column: near})
            if any(_is_read(renamed, reading) for reading in readings(renamed.keys())):
                return column, near
    return None


def _of_known_names(row: Row, names: Sequence[str]) -> list[dict[str, str]]:
    """The columns of readings that the row has if a column's case, or a letter, is another."""
    known = {*columns(), *OTHER_NAMES}
    by_case = {column: column.lower() for column in row if column not in known and column.lower() in known - row.keys()}
    for changed in (by_case, dict([find_misspelt(row) or ("", "")])):
        originals = {name: column for column, name in changed.items()}
        renamed = _rename_columns(row, changed)
        ways = [
            {key: originals.get(column, column) for key, column in reading.columns.items()}
            for reading in (readings(renamed.keys(), names) if changed else ())
            if reading.kind.name in names and _is_read(renamed, reading)
        ]
        if ways:
            return ways
    return []


def _rename_columns(row: Row, changed: Mapping[str, str]) -> Row:
    return {changed.get(column, column): value for column, value in row.items() if value is not None}


def _is_read(row: Row, reading: Any) -> bool:
    return reading.kind.matches(reading.of(row)) and _is_checked(reading.kind, reading.of(row))


def _is_checked(kind: RowKind, row: Row) -> bool:
    try:
        kind.check(row)
    except BadRow:
        return False
    return True


def _is_good(row: Row, kind: RowKind, chosen: Mapping[str, str]) -> bool:
    renamed = rename(row, chosen)
    return kind.matches(renamed) and _is_checked(kind, renamed)


def _names_of_keys(kind: RowKind) -> dict[str, set[str]]:
    """The names of columns for each key of a kind."""
    names = {key: {key} for key in (*kind.keys, *kind.other_keys)}
    for naming in kind.namings:
        for key, column in naming.columns.items():
            names[key].add(column)
    for column, key in OTHER_NAMES.items():
        if key in names:
            names[key].add(column)
    if "reasoning_content" in names:
        names["reasoning_content"] |= {*REASONING_KEYS}
    return names


def _has_name(column: str) -> bool:
    return column.lower() in {*columns(), *MEANT, *OTHER_NAMES}


def is_name_of(column: str, kind: RowKind, key: str) -> bool:
    """Return whether a column is called as one of a key's names, in small letters or not."""
    return column.lower() in _names_of_keys(kind)[key]


def _choices(row: Row, kind: RowKind) -> Iterator[dict[str, str]]:
    """Columns for the keys of a kind: those with a name for it, else of its type, each after that of the key before."""
    present = [column for column, value in row.items() if not is_empty(value)]
    names = _names_of_keys(kind)
    example = kind.made_up(TextGenerator(random.Random(0), ["a"]))
    fitting: list[list[str]] = []
    for key in kind.keys:
        named = [column for column in present if column.lower() in names[key]]
        free = [column for column in present if not _has_name(column) and _is_of_type(row[column], example[key])]
        fitting.append(named if named and key != kind.keys[-1] else named + free)
    if kind.keys == ("text",) and (len(fitting[0]) > 1 or any(map(_has_name, present))):
        return  # a text that stands alone is one, and no other
    for picked in product(*fitting):
        if len({*picked}) < len(picked) or not _in_order(picked, present):
            continue
        chosen = dict(zip(kind.keys, picked, strict=True))
        for key in kind.other_keys:
            mine = (c for c in present if c.lower() in names[key] and c not in chosen.values())
            if (column := next(mine, None)) is not None and _is_of_key(key, row[column]):
                chosen[key] = column
        yield chosen | _message_keys(row[picked[0]])


def _in_order(picked: Sequence[str], present: Sequence[str]) -> bool:
    """Return whether each column without a name comes after those of the keys before."""
    places = [present.index(column) for column in picked]
    return all(
        _has_name(column) or all(before < places[number] for before in places[:number])
        for number, column in enumerate(picked)
    )


def _is_of_type(value: Any, example: Any) -> bool:
    return is_prose(value) if isinstance(example, str) else type(value) is type(example)


def _is_of_key(key: str, value: Any) -> bool:
    """Return whether an optional key can have the value: a switch or a category is no reasoning."""
    return key != "reasoning_content" or is_prose(value)


def _message_keys(messages: Any) -> dict[str, str]:
    first = messages[0] if isinstance(messages, list) and messages else None
    if not isinstance(first, dict) or role_of(first) is not None:
        return {}
    by_length = sorted((key for key, value in first.items() if isinstance(value, str)), key=lambda key: len(first[key]))
    roles = [key for key in by_length if first[key].strip().lower() in ROLES]
    left = [key for key in by_length if key not in roles]
    return {"role": roles[0], "content": left[-1]} if roles and left else {}
