"""The columns of a row: the kinds that they can be read as, and which of them have a meaning otherwise. No torch."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from cookbook.rows.json_text import BadRow, from_json
from cookbook.rows.messages import FOREIGN_KEYS, IN_MESSAGES, ONLY_TEXT, is_foreign
from cookbook.rows.row_checks import FOR_TEMPLATE, Row, is_empty, is_rating
from cookbook.rows.row_kinds import Naming, RowKind, kinds

OTHER_NAMES = {"system_prompt": "system", "system_message": "system", "article": "context"}
"""Columns that hold an optional key under another name."""
NOT_TEXT = dict.fromkeys(
    (
        *("image", "images", "image_url", "image_urls", "pixel_values"),
        *("audio", "audios", "video", "videos", "documents"),
    ),
    ONLY_TEXT,
)
MADE_BEFORE = dict.fromkeys(
    ("input_ids", "completion_mask", "assistant_masks"), "rows are tokenized here, from their texts"
)
WEIGHTS = {
    **dict.fromkeys(("weight", "loss_weight", "sample_weight"), "rows weigh alike (`weight` of a source does not)"),
    **dict.fromkeys(("train", "training"), "leave rows without loss out of the file"),
}
TEXTS = ("system", *OTHER_NAMES, "context")
"""Columns with a meaning whose values are texts."""
NEVER_READ = NOT_TEXT | MADE_BEFORE | WEIGHTS
"""Columns that a known format gives a meaning, and why nothing reads them."""
SOMETIMES_READ = {
    **dict.fromkeys(
        ("system", "system_prompt", "system_message"), "there is no chat to begin with it; write `messages`"
    ),
    "reasoning_content": "it goes with one answer, or in a message",
    # Some sets have a switch or a category in them.
    **dict.fromkeys(
        ("reasoning", "thinking", "thought"),
        "if it is the answer's reasoning, name it in data.columns as reasoning_content, and the others with it",
    ),
    **dict.fromkeys(("tools", "functions"), "there is no chat template to write them; write `messages`"),
    "chat_template_kwargs": "there is no chat template to give them to; write `messages`",
    "history": "there is no chat to begin with it; write `messages`",
    **dict.fromkeys(("context", "article"), "there is no prompt that it could follow"),
    **dict.fromkeys(("reflection", "corrected"), "they come after the answer; write `messages`"),
    **dict.fromkeys(("loss_mask", "mask"), "it goes with `messages`, a value for each"),
    "kto_tag": "name it in data.columns, as label, and the others with it",
}
"""Columns that a known format gives a meaning beside others, and why a kind without such a key does not read them."""
MEANT = NEVER_READ | SOMETIMES_READ
RATING = "label"
"""A column that says whether an answer is good, beside what could be read as a judged answer."""

MESSAGE_KEYS = ("role", "content")
"""Keys of a message that a recipe's columns may rename."""


def rename(row: Row, columns: Mapping[str, str]) -> Row:
    """The row under its kind's own names.

    Args:
        columns: key -> column, or key of a message. Where it names a column, the row's other columns are left out.
    """
    in_messages = {columns[key]: key for key in MESSAGE_KEYS if key in columns}
    of_row = {key: column for key, column in columns.items() if key not in MESSAGE_KEYS}
    if of_row:
        row = {key: row[column] for key, column in of_row.items() if column in row}
    if in_messages:
        row = {
            key: value if key in FOR_TEMPLATE else _rename_messages(value, in_messages) for key, value in row.items()
        }
    return row


def _rename_messages(value: Any, names: Mapping[str, str]) -> Any:
    """Messages with other names for their keys; a message's key that has such a name already is left out."""
    items = _items(value)
    if not any(isinstance(item, dict) and names.keys() & item.keys() for item in items):
        return value
    return [_rename_keys(item, names) if isinstance(item, dict) else item for item in items]


def _rename_keys(message: Row, names: Mapping[str, str]) -> Row:
    renamed = {names[key]: item for key, item in message.items() if key in names}
    return {key: item for key, item in message.items() if key not in names and key not in renamed} | renamed


def overwritten_keys(row: Row, columns: Mapping[str, str]) -> set[str]:
    """The keys of messages that `rename` leaves out, each as `messages.KEY`."""
    others = {f"{IN_MESSAGES}{key}" for key in MESSAGE_KEYS if columns.get(key, key) != key}
    others -= {f"{IN_MESSAGES}{column}" for column in columns.values()}
    return others & keys_in_messages(row) if others else set()


def asks_for_something(column: str, value: Any) -> bool:
    """Return whether a column with a meaning has a value that would be missed."""
    value = value if column in TEXTS else from_json(value)  # "[]" in a cell of a table
    return not is_empty(value) and not (column in WEIGHTS and value == 1)


def keys_in_messages(row: Row) -> set[str]:
    """The keys of a row's messages, in whatever column they are, each as `messages.KEY`."""
    messages = (item for value in row.values() for item in _items(value) if isinstance(item, dict))
    return {f"{IN_MESSAGES}{key}" for message in messages for key in message}


def _items(value: Any) -> list[Any]:
    if isinstance(value, str) and value.startswith("[{"):  # a cell of a table
        try:
            value = from_json(value)
        except BadRow:  # found by whoever reads it as messages
            return []
    return value if isinstance(value, list) else []


def drop_columns(row: Row, ignored: Sequence[str]) -> Row:
    """The row without these columns; `messages.KEY` is a key of messages, in whatever column they are."""
    in_messages = {name.removeprefix(IN_MESSAGES) for name in ignored if name.startswith(IN_MESSAGES)}
    row = {column: value for column, value in row.items() if column not in ignored}
    for column, value in row.items() if in_messages else ():
        items = _items(value)
        if any(in_messages & message.keys() for message in items if isinstance(message, dict)):
            row[column] = [
                {key: item for key, item in message.items() if key not in in_messages}
                if isinstance(message, dict)
                else message
                for message in items
            ]
    return row


class Reading(NamedTuple):
    """One way to read a row."""

    kind: RowKind
    columns: dict[str, str]
    """The kind's key -> column, for columns that the row has."""
    name: str

    @property
    def is_own(self) -> bool:
        """True if the row has the kind's own names for all required keys, and no other kind comes first."""
        return not self.kind.yields and all(self.columns[key] == key for key in self.kind.keys)

    @property
    def in_words(self) -> str:
        """The columns of the required keys, for messages."""
        return " and ".join(f"`{self.columns[key]}`" for key in self.kind.keys) + self.kind.form

    def of(self, raw: Row) -> Row:
        """The row under the kind's own names."""
        return {key: raw[column] for key, column in self.columns.items()}

    def words(self, raw: Row) -> str:
        """List the columns that are renamed in a row, for the user; empty if none is."""
        renamed = [f"{column} -> {key}" for key, column in self.columns.items() if column != key]
        name = self.name
        if any(is_foreign(raw[column]) for column in self.columns.values()):
            name, renamed = "ShareGPT", renamed + [f"{foreign} -> {own}" for foreign, own in FOREIGN_KEYS.items()]
        return f"rows look like {name or 'this'}: {', '.join(renamed)}" if renamed else ""


def readings(present: Set[str], asked_for: Sequence[str] = ()) -> list[Reading]:
    """The ways to read rows that have these columns, by kind; a way that another one extends is left out.

    Args:
        asked_for: kinds of the objective; others of `RowKind.is_asked_for` are left out.
    """
    kept = []
    for kind in kinds().values():
        if kind.is_asked_for and kind.name not in asked_for:
            continue
        ways: list[Reading] = []
        for naming in (Naming({}), *kind.namings):
            if naming.renames_beside(present, kind) or naming.columns.get("prompt", "prompt") not in {
                *present,
                "prompt",
            }:
                continue
            own = {key: key for key in (*kind.keys, *kind.other_keys) if key not in naming.columns}
            named = {**naming.columns, **own}
            used = {key: column for key, column in named.items() if column in present}
            for column, key in OTHER_NAMES.items():
                if column in present and key in kind.other_keys and key not in used:
                    used[key] = column
            if used.keys() >= set(kind.keys) and all(used != way.columns for way in ways):
                ways.append(Reading(kind, used, naming.name))
        taken = [{*way.columns.values()} for way in ways]
        kept += [way for way, columns in zip(ways, taken, strict=True) if not any(columns < other for other in taken)]
    return kept


def kinds_of(raw: Row, asked_for: Sequence[str] = ()) -> set[str]:
    """The kinds that a row may be read as: by this project's own names, else by others.

    Args:
        asked_for: as of `readings`.
    """
    candidates = readings({key for key, value in raw.items() if value is not None}, asked_for)
    candidates = [reading for reading in candidates if reading.kind.matches(reading.of(raw))]
    rated_so = [
        reading
        for reading in candidates
        if reading.kind.is_asked_for or RATING not in reading.columns or is_rating(raw[reading.columns[RATING]])
    ]
    return {reading.kind.name for reading in prefer_own_names(rated_so or candidates)}


def prefer_own_names(choices: Iterable[Reading]) -> list[Reading]:
    """The ways to read a row by this project's own names, if these decide it; else all.

    A row in a shape of this project is read by it, whatever other columns it has.
    """
    choices = list(choices)
    own = [reading for reading in choices if reading.is_own]
    return own if any(not reading.kind.is_rendered for reading in own) else choices
