"""Kinds of rows: what a row of each must be, and which sequences it becomes. No torch.

A kind is registered with what tells its rows from others, a check, and its texts or chats; reading, tokenizing, errors
and rehearsals ask it.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cookbook import registry

Chat = list[dict[str, str]]
Row = dict[str, Any]

# What a message may carry that changes its meaning and is not served: without it, half a turn would be trained.
UNSERVED = ("tool_calls", "function_call", "reasoning_content", "thinking")


class BadRow(ValueError):
    """Why a row cannot be trained on: a reason to count, and what was seen."""

    def __init__(self, reason: str, seen: str = "") -> None:
        self.reason, self.seen = reason, seen
        super().__init__(f"{reason}: {seen}" if seen else reason)

    def __reduce__(self) -> tuple[type["BadRow"], tuple[str, str]]:
        return BadRow, (self.reason, self.seen)


@dataclass(frozen=True, kw_only=True)
class RowKind:
    """Rows of one shape. Of `texts` and `chats`, one is given."""

    family: ClassVar[str] = "row"
    name: str
    keys: tuple[str, ...]
    """What such a row must have."""
    check: Callable[[Row], Row]
    """From a row with those keys to what is kept of it, which passes again; raises BadRow."""
    made_up: Callable[["MadeUp"], Row]
    """A row for a rehearsal without network."""
    texts: Callable[[Row], tuple[str | None, tuple[str, ...]]] | None = None
    """The prompt, if there is one, and the text that follows it in each sequence. Both are tokenized as they are."""
    chats: Callable[[Row], list[tuple[Chat, int]]] | None = None
    """The chat of each sequence, for the chat template, and how many assistant turns at its beginning carry no loss."""
    prompt_may_train: bool = False
    """Whether the objective decides if prompts, or all tokens of a chat, carry loss."""
    value: Callable[[Row], float] | None = None
    """A number of each row that the objective finds in `batch["values"]`."""
    other_keys: tuple[str, ...] = ()
    """What such a row may have besides."""
    matches: Callable[[Row], bool] = lambda row: True
    """Of two kinds with the same keys, which one a row is of."""
    form: str = ""
    """What tells it from kinds with the same keys, in words."""

    @property
    def keys_in_words(self) -> str:
        """For a message."""
        return " and ".join(f"`{key}`" for key in self.keys)

    @property
    def words(self) -> str:
        """Its keys and their form, for a message."""
        return self.keys_in_words + self.form


@dataclass(frozen=True)
class MadeUp:
    """Random texts."""

    chance: random.Random
    vocabulary: list[str]

    def text(self) -> str:
        """A few words."""
        return " ".join(self.chance.choice(self.vocabulary) for _ in range(self.chance.randint(2, 10)))

    def chat(self, *roles: str) -> Chat:
        """A message for each role."""
        return [{"role": role, "content": self.text()} for role in roles]


def kinds() -> Mapping[str, RowKind]:
    """All kinds by name."""
    return registry.known("row")


def columns() -> list[str]:
    """Keys of rows that any kind reads."""
    return list(dict.fromkeys(key for kind in kinds().values() for key in (*kind.keys, *kind.other_keys)))


def shapes() -> str:
    """The keys of every kind, for a message."""
    *some, last = dict.fromkeys(kind.keys_in_words for kind in kinds().values())
    return f"{', '.join(some)}, or {last}"


def texts_in(row: Row) -> Iterator[str]:
    """Every text of a checked row."""
    for value in row.values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (message["content"] for message in value)


# What a row must be.


def check_messages(messages: Any, name: str = "") -> Chat:
    """The messages with role and content only; `name` is the key's, where it is not `messages`."""
    if not isinstance(messages, list):
        raise BadRow("messages not a list", f"{name and f'`{name}` is '}a {type(messages).__name__}")
    if not messages:
        raise BadRow("messages empty", f"`{name}`" if name else "")
    checked: Chat = []
    for number, message in enumerate(messages, start=1):
        which = f"message {number}" + (f" of `{name}`" if name else "")
        if not isinstance(message, dict):
            raise BadRow("message not an object", f"{which} is a {type(message).__name__}")
        before = checked[-1]["role"] if checked else None
        allowed = {None: ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user",)}[
            before
        ]
        role = message.get("role")
        if role not in allowed:
            hint = " (tool calls are not served)" if role == "tool" else ""
            raise BadRow("wrong role", f"{which} has {ascii(role)[:40]}; expected {' or '.join(allowed)}{hint}")
        for key in UNSERVED:
            if message.get(key):
                raise BadRow("message with more than text", f"{which} has `{key}`, which is not served")
        checked.append({"role": role, "content": check_text(message.get("content"), f"{which} content")})
    if all(message["role"] != "assistant" for message in checked):
        raise BadRow("no assistant turn", f"`{name}`" if name else "")
    return checked


def check_text(text: Any, name: str) -> str:
    if text is None:
        raise BadRow("empty text", f"{name} is null or missing")
    if not isinstance(text, str):
        raise BadRow("not text", f"{name} is a {type(text).__name__}")
    if not text.strip():
        raise BadRow("empty text", f"{name} is {'empty' if not text else 'only whitespace'}")
    if "\0" in text:
        raise BadRow("NUL character", f"{name} at character {text.index(chr(0)) + 1}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("lone surrogate", f"{name} at character {error.start + 1}; no text has it") from None
    return text


def _check_texts(*keys: str) -> Callable[[Row], Row]:
    return lambda raw: {key: check_text(raw.get(key), f"`{key}`") for key in keys}


def _check_preference(raw: Row) -> Row:
    """Texts stay texts, without a chat template, as `prompt` and `completion` do."""
    if not isinstance(raw["rejected"], str):
        seen = f"`chosen` is a {type(raw['chosen']).__name__}, `rejected` a {type(raw['rejected']).__name__}"
        raise BadRow("chosen and rejected of different form", seen)
    row = _check_texts("prompt", "chosen", "rejected")(raw)
    if row["chosen"] == row["rejected"]:
        raise BadRow("chosen and rejected are the same")
    return row


def _check_chat_preference(raw: Row) -> Row:
    """Messages become what both share and the two ends that differ."""
    if isinstance(raw["rejected"], str):
        raise BadRow(
            "chosen and rejected of different form", f"`chosen` is a {type(raw['chosen']).__name__}, `rejected` a str"
        )
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
    if not isinstance(raw["label"], bool):
        raise BadRow("label is not true or false", f"`label` is {ascii(raw['label'])[:40]}")
    return raw["label"]


def _check_judgement(raw: Row) -> Row:
    return _check_texts("prompt", "completion")(raw) | {"label": _check_label(raw)}


def _check_chat_judgement(raw: Row) -> Row:
    label, answer = _check_label(raw), raw["completion"]
    if not isinstance(answer, list) or not answer or _role(answer[0]) != "assistant":
        raise BadRow("completion is no answer", "its first message must be the assistant's")
    whole = _conversation(raw["prompt"], answer, "completion")
    return {"prompt": whole[: -len(answer)], "completion": whole[-len(answer) :], "label": label}


def _conversation(prompt: Any, answer: Any, name: str) -> Chat:
    """The whole conversation, from a prompt (a text, messages or none) and an answer that may repeat it."""
    is_answer_only = isinstance(answer, list) and bool(answer) and _role(answer[0]) == "assistant"
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": check_text(prompt, "`prompt`")}]
        if not is_answer_only:
            whole = check_messages(answer, name)
            if prompt[0] not in whole:  # a system message, or earlier turns, may stand before it
                raise BadRow("prompt is not in the conversation", f"no user message of `{name}` is the `prompt`")
            return whole
    if prompt is None:
        return check_messages(answer, name)
    if not isinstance(prompt, list):
        raise BadRow("messages not a list", f"`prompt` is a {type(prompt).__name__}")
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
    """Of the assistant."""
    return sum(message["role"] == "assistant" for message in chat)


# The kinds.

for _kind in (
    RowKind(
        name="messages",
        keys=("messages",),
        check=lambda raw: {"messages": check_messages(raw["messages"])},
        chats=lambda row: [(row["messages"], 0)],
        prompt_may_train=True,
        made_up=lambda some: {"messages": some.chat("user", "assistant") * some.chance.randint(1, 2)},
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
        check=_check_judgement,
        texts=lambda row: (row["prompt"], (row["completion"],)),
        value=lambda row: float(row["label"]),
        made_up=lambda some: {"prompt": some.text(), "completion": some.text(), "label": some.chance.random() < 0.5},
    ),
):
    registry.register(_kind)
