"""Kinds of rows: how a row of each is recognized, checked and turned into sequences. No torch.

Reading, tokenizing, error messages and rehearsals all use the registered kinds.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple

from cookbook.config import registry
from cookbook.config.messages import (
    FOREIGN_KEYS,
    BadRow,
    Chat,
    check_messages,
    check_text,
    check_tools,
    from_json,
    is_foreign,
    own_names,
)
from cookbook.system.files import closest, kind_in_words

__all__ = ["BadRow", "Chat", "check_messages", "check_text"]  # for plugins

Row = dict[str, Any]


class Naming(NamedTuple):
    """Names under which other projects store the keys of a kind."""

    columns: Mapping[str, str]
    """A kind's key -> column. Columns of optional keys may be absent."""
    name: str = ""
    """What the field calls rows of this shape."""


@dataclass(frozen=True, kw_only=True)
class RowKind:
    """Rows of one shape, with exactly one of `texts` and `chats`."""

    family: ClassVar[str] = "row"
    name: str
    keys: tuple[str, ...]
    """Required keys."""
    check: Callable[[Row], Row]
    """Validates a row with these keys and returns what is kept of it (a valid row again); raises BadRow."""
    made_up: Callable[["MadeUp"], Row]
    """Generates a row for a rehearsal without network."""
    texts: Callable[[Row], tuple[str | None, tuple[str, ...]]] | None = None
    """The prompt, if any, and the text that follows it in each sequence; tokenized without a template."""
    chats: Callable[[Row], list[tuple[Chat, int]]] | None = None
    """The chat of each sequence, for the chat template, and the number of leading assistant turns without loss."""
    prompt_may_train: bool = False
    """Whether the objective decides if prompts, or all tokens of a chat, carry loss."""
    value: Callable[[Row], float] | None = None
    """A number per row that the objective finds in `batch["values"]`."""
    other_keys: tuple[str, ...] = ()
    """Optional keys."""
    namings: tuple[Naming, ...] = ()
    """Other names of the keys. Rows with a kind's own names are read by these alone."""
    yields: bool = False
    """Whether its own names count like other names, since rows of other kinds may have them too."""
    matches: Callable[[Row], bool] = lambda row: True
    """Distinguishes kinds with the same keys."""
    form: str = ""
    """The same distinction in words, for messages."""

    @property
    def keys_in_words(self) -> str:
        """The required keys, for messages."""
        return " and ".join(f"`{key}`" for key in self.keys)

    @property
    def words(self) -> str:
        """The required keys and their form, for messages."""
        return self.keys_in_words + self.form


@dataclass(frozen=True)
class MadeUp:
    """A generator of random texts."""

    chance: random.Random
    vocabulary: list[str]

    def text(self) -> str:
        """A few words."""
        return " ".join(self.chance.choice(self.vocabulary) for _ in range(self.chance.randint(2, 10)))

    def chat(self, *roles: str) -> Chat:
        """One message per role."""
        return [{"role": role, "content": self.text()} for role in roles]


def kinds() -> Mapping[str, RowKind]:
    return registry.known("row")


def columns() -> list[str]:
    """All columns that any kind reads, its own keys first."""
    named = (column for kind in kinds().values() for naming in kind.namings for column in naming.columns.values())
    return list(dict.fromkeys([*own_keys(), *named]))


def own_keys() -> list[str]:
    """All keys of all kinds."""
    return list(dict.fromkeys(key for kind in kinds().values() for key in (*kind.keys, *kind.other_keys)))


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
        row = {key: _rename_messages(value, in_messages) for key, value in row.items()}
    return row


def _rename_messages(value: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(value, list):
        return value
    return [{names.get(key, key): item for key, item in one.items()} if isinstance(one, dict) else one for one in value]


def suggested_columns(row: Row, names: Sequence[str]) -> dict[str, str]:
    """A guess: columns that make a row one of these kinds; empty if there are none.

    By a name that is almost right (`ouput`) if one is, else by the types of the values.
    """
    if found := misspelt(row):
        column, near = found
        renamed = {near if key == column else key: value for key, value in row.items()}
        for one in readings(renamed.keys()):
            if one.kind.name in names and one.kind.matches(one.of(renamed)):
                return {key: column if own == near else own for key, own in one.columns.items()}
    for name in names:
        kind = kinds()[name]
        chosen: dict[str, str] = {}
        example = kind.made_up(MadeUp(random.Random(0), ["a"]))
        for key in kind.keys:
            left = [column for column, value in row.items() if column not in chosen.values() and value is not None]
            fitting = [column for column in left if type(row[column]) is type(example[key])]
            # A text of several words before a name or an id.
            fitting.sort(key=lambda column: isinstance(row[column], str) and len(row[column].split()) < 2)
            chosen |= {key: fitting[0]} if fitting else {}
        if len(chosen) == len(kind.keys):
            return chosen | _suggested_message_keys(row[chosen[kind.keys[0]]])
    return {}


def misspelt(row: Row) -> tuple[str, str] | None:
    """A column that would make the row readable under the nearest known name, and that name."""
    known = columns()
    for column in row:
        near = None if column in known else closest(column, known)
        if near is not None and near not in row and readings({*row, near} - {column}):
            return column, near
    return None


def _suggested_message_keys(messages: Any) -> dict[str, str]:
    first = messages[0] if isinstance(messages, list) and messages else None
    if not isinstance(first, dict) or "role" in own_names(first)[0]:
        return {}
    by_length = sorted((key for key, value in first.items() if isinstance(value, str)), key=lambda key: len(first[key]))
    return {"role": by_length[0], "content": by_length[-1]} if len(by_length) > 1 else {}


class Reading(NamedTuple):
    """One way to read a row."""

    kind: RowKind
    columns: dict[str, str]
    """The kind's key -> column, for columns that the row has."""
    name: str

    @property
    def is_own(self) -> bool:
        """Whether the row has the kind's own names for all required keys, and no other kind comes first."""
        return not self.kind.yields and all(self.columns[key] == key for key in self.kind.keys)

    @property
    def in_words(self) -> str:
        """The columns of the required keys, for messages."""
        return " and ".join(f"`{self.columns[key]}`" for key in self.kind.keys) + self.kind.form

    def of(self, raw: Row) -> Row:
        """The row under the kind's own names."""
        return {key: raw[column] for key, column in self.columns.items()}

    def words(self, raw: Row) -> str:
        """What was renamed in a row, for the user; empty if nothing was."""
        renamed = [f"{column} -> {key}" for key, column in self.columns.items() if column != key]
        name = self.name
        if any(is_foreign(raw[column]) for column in self.columns.values()):
            name, renamed = "ShareGPT", renamed + [f"{theirs} -> {own}" for theirs, own in FOREIGN_KEYS.items()]
        return f"rows look like {name or 'this'}: {', '.join(renamed)}" if renamed else ""


def readings(present: Set[str]) -> list[Reading]:
    """The ways to read rows that have these columns, by kind; a way that another one extends is left out."""
    found = []
    for kind in kinds().values():
        own = Naming({key: key for key in (*kind.keys, *kind.other_keys)})
        ways: list[Reading] = []
        for naming in (own, *kind.namings):
            used = {key: column for key, column in naming.columns.items() if column in present}
            if used.keys() >= set(kind.keys) and all(used != way.columns for way in ways):
                ways.append(Reading(kind, used, naming.name))
        found += [
            way for way in ways if not any(set(way.columns.values()) < set(other.columns.values()) for other in ways)
        ]
    return found


def kinds_of(raw: Row) -> set[str]:
    """The kinds that a row may be read as: by this project's own names, else by others."""
    found = readings({key for key, value in raw.items() if value is not None})
    found = [one for one in found if one.kind.matches(one.of(raw))]
    return {one.kind.name for one in [one for one in found if one.is_own] or found}


def shapes() -> str:
    """The required keys of all kinds, for messages."""
    *some, last = dict.fromkeys(kind.keys_in_words for kind in kinds().values())
    return f"{', '.join(some)}, or {last}"


def texts_in(row: Row) -> Iterator[str]:
    """Every text of a checked row."""
    for value in row.values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            for message in value:
                yield message.get("content", "")
                if more := {key: item for key, item in message.items() if key not in ("role", "content", "train")}:
                    yield json.dumps(more, ensure_ascii=False)


def _check_texts(*keys: str) -> Callable[[Row], Row]:
    return lambda raw: {key: check_text(raw.get(key), f"`{key}`") for key in keys}


def _check_same_form(raw: Row) -> None:
    if isinstance(raw["rejected"], str) != isinstance(raw["chosen"], str):
        seen = f"`chosen` is {kind_in_words(raw['chosen'])}, `rejected` {kind_in_words(raw['rejected'])}"
        raise BadRow("chosen and rejected of different form", seen)


def _check_preference(raw: Row) -> Row:
    """Plain texts, used without a chat template like `prompt` and `completion`."""
    _check_same_form(raw)
    if raw.get("prompt") is None:
        raw = _split_prompt(*(check_text(raw[key], f"`{key}`") for key in ("chosen", "rejected")))
    row = _check_texts("prompt", "chosen", "rejected")(raw)
    if row["chosen"] == row["rejected"]:
        raise BadRow("chosen and rejected are the same")
    return row


def _split_prompt(chosen: str, rejected: str) -> Row:
    """The beginning that both texts share, up to the last white space in it, and the two ends."""
    # The white space goes to the ends, as most tokenizers join it to the word after it.
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    shared = re.match(r"(.*\S)\s", chosen[:num_shared], re.DOTALL)
    if shared is None:
        raise BadRow("no prompt", "`prompt` is missing, and `chosen` and `rejected` share no beginning")
    end = len(shared[1])
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _check_chat(raw: Row) -> Row:
    messages = own_names(from_json(raw["messages"]))
    if raw.get("system") and isinstance(messages, list):
        messages = [{"role": "system", "content": raw["system"]}, *messages]
    return {"messages": check_messages(messages)} | ({"tools": check_tools(raw["tools"])} if raw.get("tools") else {})


def _check_exchange(raw: Row) -> Row:
    """A single exchange, whose texts become the messages of a chat; optional texts may be empty."""
    optional = {key for key in ("system", "context") if raw.get(key) is None or not str(raw[key]).strip()}
    return _check_texts(*(key for key in ("system", "user", "context", "assistant") if key not in optional))(raw)


def _chat_of_exchange(row: Row) -> Chat:
    asked = "\n\n".join(row[key] for key in ("user", "context") if key in row)
    system = [{"role": "system", "content": row["system"]}] if "system" in row else []
    # For a template that writes them apart, as Alpaca's does.
    parts = {"instruction": row["user"], "input": row["context"]} if "context" in row else {}
    question = {"role": "user", "content": asked, **parts}
    return [*system, question, {"role": "assistant", "content": row["assistant"]}]


def _check_chat_preference(raw: Row) -> Row:
    """Splits two conversations into their common beginning and the two ends that differ."""
    _check_same_form(raw)
    raw = {key: own_names(value) for key, value in raw.items()}
    chosen, rejected = (_conversation(raw.get("prompt"), raw[key], key) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise BadRow("chosen and rejected are the same")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    ends = chosen[shared:], rejected[shared:]
    if not all(end and end[0]["role"] == "assistant" for end in ends):
        seen = "the first message in which they differ must be the assistant's in both"
        raise BadRow("chosen and rejected do not answer the same prompt", f"message {shared + 1}; {seen}")
    return {"prompt": chosen[:shared], "chosen": ends[0], "rejected": ends[1]}


def _check_label(raw: Row) -> bool:
    label = str(raw["label"]).strip().lower()
    if label not in LABELS:
        raise BadRow("label is not true or false", f"`label` is {ascii(raw['label'])[:40]}")
    return LABELS[label]


def _check_chat_judgement(raw: Row) -> Row:
    raw = {key: own_names(value) for key, value in raw.items()}
    label, answer = _check_label(raw), raw["completion"]
    if not isinstance(answer, list) or not answer or _role(answer[0]) != "assistant":
        raise BadRow("completion is not an answer", "its first message must be the assistant's")
    whole = _conversation(raw["prompt"], answer, "completion")
    return {"prompt": whole[: -len(answer)], "completion": whole[-len(answer) :], "label": label}


def _conversation(prompt: Any, answer: Any, name: str) -> Chat:
    """The whole conversation of a prompt (a text, messages or None) and an answer that may repeat the prompt."""
    is_answer_only = isinstance(answer, list) and bool(answer) and _role(answer[0]) == "assistant"
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": check_text(prompt, "`prompt`")}]
        if not is_answer_only:
            whole = check_messages(answer, name)
            if prompt[0] not in whole:  # a system message or earlier turns may precede it
                raise BadRow("prompt is not in the conversation", f"no user message of `{name}` is the `prompt`")
            return whole
    if prompt is None:
        return check_messages(answer, name)
    if not isinstance(prompt, list):
        raise BadRow("messages not a list", f"`prompt` is {kind_in_words(prompt)}")
    if is_answer_only:
        return check_messages([*prompt, *answer], f"prompt, {name}")
    whole = check_messages(answer, name)
    start = [{"role": _role(one), "content": one.get("content")} if isinstance(one, dict) else one for one in prompt]
    if whole[: len(prompt)] != start:
        raise BadRow("prompt is not in the conversation", f"`{name}` does not begin with the messages of `prompt`")
    return whole


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def num_turns(chat: Chat) -> int:
    """Number of assistant turns."""
    return sum(message["role"] == "assistant" for message in chat)


def _exchange(user: str, assistant: str, name: str = "", context: str = "context", system: str = "system") -> Naming:
    return Naming({"system": system, "user": user, "context": context, "assistant": assistant}, name)


EXCHANGES = (
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("prompt", "response"),
    ("instruction", "completion"),
    ("input", "output"),
    ("problem", "solution"),
)
"""Columns of a question and its answer, without an established name."""
LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
PROMPTS = ("instruction", "question", "query", "input")
"""Columns that hold the prompt of a preference."""

for _kind in (
    RowKind(
        name="messages",
        keys=("messages",),
        namings=tuple(
            Naming({"system": "system", "messages": name, "tools": "tools"})
            for name in ("conversations", "conversation", "dialogue", "dialog")
        ),
        other_keys=("tools",),
        check=_check_chat,
        chats=lambda row: [(row["messages"], 0)],
        prompt_may_train=True,
        made_up=lambda some: {"messages": some.chat("user", "assistant") * some.chance.randint(1, 2)},
    ),
    RowKind(
        name="exchange",
        keys=("user", "assistant"),
        yields=True,
        other_keys=("context", "system"),
        namings=(
            _exchange("instruction", "output", "Alpaca", context="input"),
            _exchange("instruction", "response", "Dolly"),
            _exchange("question", "response", system="system_prompt"),
            *(_exchange(*names) for names in EXCHANGES),
        ),
        check=_check_exchange,
        chats=lambda row: [(_chat_of_exchange(row), 0)],
        prompt_may_train=True,
        made_up=lambda some: {"user": some.text(), "assistant": some.text()},
    ),
    RowKind(
        name="completion",
        keys=("prompt", "completion"),
        check=_check_texts("prompt", "completion"),
        texts=lambda row: (row["prompt"], (row["completion"],)),
        prompt_may_train=True,
        made_up=lambda some: {"prompt": some.text(), "completion": some.text()},
    ),
    RowKind(
        name="text",
        keys=("text",),
        check=_check_texts("text"),
        texts=lambda row: (None, (row["text"],)),
        made_up=lambda some: {"text": some.text()},
    ),
    RowKind(
        name="chat_preference",
        keys=("chosen", "rejected"),
        other_keys=("prompt",),
        matches=lambda raw: not isinstance(raw["chosen"], str),
        form=" of messages",
        namings=(Naming({"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"}),),
        check=_check_chat_preference,
        chats=lambda row: [(row["prompt"] + row[key], num_turns(row["prompt"])) for key in ("chosen", "rejected")],
        made_up=lambda some: {
            "prompt": some.chat("user"),
            "chosen": some.chat("assistant"),
            "rejected": some.chat("assistant"),
        },
    ),
    RowKind(
        name="preference",
        keys=("chosen", "rejected"),
        other_keys=("prompt",),
        matches=lambda raw: isinstance(raw["chosen"], str),
        namings=(
            *(Naming({"prompt": prompt, "chosen": "chosen", "rejected": "rejected"}) for prompt in PROMPTS),
            *(
                Naming({"prompt": prompt, "chosen": "chosen_response", "rejected": "rejected_response"})
                for prompt in ("prompt", *PROMPTS)
            ),
        ),
        check=_check_preference,
        texts=lambda row: (row["prompt"], (row["chosen"], row["rejected"])),
        made_up=lambda some: {"prompt": some.text(), "chosen": some.text(), "rejected": some.text()},
    ),
    RowKind(
        name="chat_judgement",
        keys=("prompt", "completion", "label"),
        matches=lambda raw: not isinstance(raw["completion"], str),
        form=" of messages",
        check=_check_chat_judgement,
        chats=lambda row: [(row["prompt"] + row["completion"], num_turns(row["prompt"]))],
        value=lambda row: float(row["label"]),
        made_up=lambda some: {
            "prompt": some.chat("user"),
            "completion": some.chat("assistant"),
            "label": some.chance.random() < 0.5,
        },
    ),
    RowKind(
        name="judgement",
        keys=("prompt", "completion", "label"),
        matches=lambda raw: isinstance(raw["completion"], str),
        namings=tuple(
            Naming({"prompt": prompt, "completion": completion, "label": "label"})
            for prompt, completion in (("prompt", "text"), *EXCHANGES)
        ),
        check=lambda raw: _check_texts("prompt", "completion")(raw) | {"label": _check_label(raw)},
        texts=lambda row: (row["prompt"], (row["completion"],)),
        value=lambda row: float(row["label"]),
        made_up=lambda some: {"prompt": some.text(), "completion": some.text(), "label": some.chance.random() < 0.5},
    ),
):
    registry.register(_kind)
