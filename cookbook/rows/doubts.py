"""Doubts about rows: values beside those that are read which may be meant, by value and place. No torch.

A name that is known is read or refused by `cookbook.rows.row_columns` and `cookbook.rows.messages`; here, what nothing
reads becomes a question to the user if it looks like a mark of rows or messages without loss, an answer, tools, or the
roles of messages.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from cookbook.rows.json_text import BadRow, from_json
from cookbook.rows.messages import IN_MESSAGES, ROLES
from cookbook.rows.row_checks import LABELS
from cookbook.rows.row_columns import Reading
from cookbook.rows.suggestions import is_name_of, is_prose
from cookbook.system.files import in_flow

NUM_LOOKED_AT = 32
"""Rows of which every column is looked at, also in tables, of which later rows have those with a known name and those
of numbers."""
PANDAS_INDEX = re.compile(r"__index_level_\d+__")
"""The name that pandas gives to the numbers of a table's rows."""
MIN_WORDS = 5
"""Average of an unread column that may be an answer though its name says nothing."""


class _Flags:
    """Values by name that are all true or false, 1 or 0, on whatever carries them."""

    def __init__(self) -> None:
        self.num_carriers = 0
        self._counts: dict[str, list[int]] = {}
        self._booleans: set[str] = set()
        self._others: set[str] = set()

    def add(self, values: Mapping[str, Any], names: Iterable[str]) -> None:
        self.num_carriers += 1
        for name in names:
            if name in self._others:
                continue
            value = values[name]
            kind = type(value)
            if kind is str:
                mark = LABELS.get(value.strip().lower()) if len(value) < 8 else None
            else:
                mark = bool(value) if kind is bool or (kind in (int, float) and value in (0, 1)) else None
            if mark is None:
                self._others.add(name)
                self._counts.pop(name, None)
                continue
            self._counts.setdefault(name, [0, 0])[mark] += 1
            if kind is bool:
                self._booleans.add(name)

    @property
    def marks(self) -> list[str]:
        """The names whose values tell carriers from one another: some are false, or some have none."""
        return [
            name
            for name, (num_false, num_true) in self._counts.items()
            if self.num_carriers not in (num_false, num_true) and (num_false or name in self._booleans)
            if not PANDAS_INDEX.fullmatch(name)
        ]


class Doubts:
    """Values in the rows of a source that are not read and may be meant."""

    def __init__(self, *, is_chosen: bool) -> None:
        """
        Args:
            is_chosen: the user named the columns to read.
        """
        self._is_chosen = is_chosen
        self._rows, self._answers = _Flags(), _Flags()
        self._sizes: Counter[str] = Counter()
        """Characters of each unread column of prose, and of the answer ("")."""
        self._words: Counter[str] = Counter()
        self._num_tools: Counter[str] = Counter()
        self._roles: dict[str, set[str]] = {}
        self._reading: Reading | None = None

    def add_row(self, raw: Mapping[str, Any], unread: Iterable[str], reading: Reading) -> None:
        """Look at the columns of a good row that are metadata by their names."""
        if self._is_chosen:
            return
        if self._rows.num_carriers < NUM_LOOKED_AT:
            self._look_at(raw, unread, reading)
        self._rows.add(raw, unread)

    def add_answer(self, message: Mapping[str, Any], unread: Iterable[str]) -> None:
        """Look at the keys of an assistant's message that are metadata by their names."""
        self._answers.add(message, unread)

    def _look_at(self, raw: Mapping[str, Any], unread: Iterable[str], reading: Reading) -> None:
        self._reading = reading
        if (answer := self._answer) is not None and isinstance(raw[answer], str):
            self._sizes[""] += len(raw[answer])
        for column in unread:
            value = raw[column]
            if isinstance(value, str):
                if is_prose(value):
                    self._sizes[column] += len(value)
                    self._words[column] += len(value.split())
                self._roles.setdefault(column, set()).add(ROLES.get(value.strip().lower(), ""))
            if not {"tools", "functions"} & reading.columns.keys() and are_tools(value):
                self._num_tools[column] += 1

    @property
    def _answer(self) -> str | None:
        """The column of the answer, if other columns could be it."""
        if self._reading is None or self._reading.is_own:
            return None
        return next(
            (self._reading.columns[key] for key in ("assistant", "completion") if key in self._reading.columns), None
        )

    def questions(self, unseen: Collection[str] = ()) -> list[str]:
        """Questions to the user, each with the ways out.

        Args:
            unseen: columns that later rows have and were not read of them.
        """
        asked = self._about_answers() + self._about_tools() + self._about_roles()
        if marks := [name for name in self._rows.marks if name not in unseen]:
            names = ", ".join(map(_quote_name, marks))
            asked.append(
                f"{names} {'differs' if len(marks) == 1 else 'differ'} from row to row and may say which rows are"
                " trained on: leave those without loss out of the file, or pass it over with data.ignore:"
                f" {in_flow(marks)}"
            )
        if marks := [f"{IN_MESSAGES}{name}" for name in self._answers.marks]:
            names = ", ".join(map(_quote_name, marks))
            asked.append(
                f"{names} {'differs' if len(marks) == 1 else 'differ'} from one of the assistant's messages to another"
                " and may say which are trained on: call it `train` (true or false) if so, or pass it over with"
                f" data.ignore: {in_flow(marks)}"
            )
        return asked

    def _about_answers(self) -> list[str]:
        answer, reading = self._answer, self._reading
        if answer is None or reading is None:
            return []
        key = next(key for key, column in reading.columns.items() if column == answer)
        asked = []
        for column, size in self._sizes.items():
            of_answer = is_name_of(column, reading.kind, key)
            num_words = self._words[column] / min(self._rows.num_carriers, NUM_LOOKED_AT)
            if column and size > self._sizes[""] and (of_answer or num_words >= MIN_WORDS):
                ways = [reading.columns | {key: column}]
                if "reasoning_content" in reading.kind.other_keys:
                    ways.append(reading.columns | {"reasoning_content": column})
                named = " or ".join(f"data.columns: {in_flow(way)}" for way in ways)
                asked.append(
                    f"{_quote_name(column)} is not read and longer than the answer that is, {_quote_name(answer)};"
                    f" if it is (a part of) the answer, write {named}, else pass it over with data.ignore:"
                    f" {in_flow([column])}"
                )
        return asked

    def _about_tools(self) -> list[str]:
        reading = self._reading
        if reading is None or "tools" not in reading.kind.other_keys:
            return []
        return [
            f"{_quote_name(column)} holds tools that no chat is given; write data.columns:"
            f" {in_flow(reading.columns | {'tools': column})}, or pass it over with data.ignore: {in_flow([column])}"
            for column in self._num_tools
        ]

    def _about_roles(self) -> list[str]:
        reading = self._reading
        if reading is None or "text" not in reading.columns:
            return []
        columns = [column for column, roles in self._roles.items() if "" not in roles and len(roles) > 1]
        return [
            f"{_quote_name(column)} names the speaker of each row, so rows are messages of conversations; write each"
            " conversation as the `messages` of one row, or take each text on its own with data.columns:"
            f" {in_flow(reading.columns)}"
            for column in columns
        ]


def are_tools(value: Any) -> bool:
    """Return whether a value is a list of tools, or its JSON text."""
    try:
        items = from_json(value) if isinstance(value, str) and value.startswith("[") else value
        items = [from_json(item) for item in items] if isinstance(items, list) else []
    except BadRow:
        return False
    return bool(items) and all(isinstance(item, dict) and _is_tool(item) for item in items)


def _is_tool(item: Mapping[str, Any]) -> bool:
    function = item.get("function", item)
    return isinstance(function, dict) and "name" in function and isinstance(function.get("parameters"), dict)


def _quote_name(name: str) -> str:
    return f"`{name}`"
