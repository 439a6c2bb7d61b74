"""Kinds of rows: the keys of each, their other names, and how a row becomes sequences. No torch.

Reading, tokenizing, error messages and rehearsals all use the registered kinds; `cookbook.rows.row_columns` finds the
kind of a row.
"""

import random
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from cookbook.rows.json_text import BadRow
from cookbook.rows.messages import Chat, check_messages, check_text
from cookbook.rows.row_checks import (
    CHAT_KEYS,
    ENDED,
    LOGPROBS,
    MASK,
    TOKENS,
    Row,
    are_messages,
    chat_of_exchange,
    check_asked,
    check_chat,
    check_chat_completion,
    check_chat_group,
    check_chat_judgement,
    check_chat_preference,
    check_class,
    check_exchange,
    check_label,
    check_labelled_chat,
    check_preference,
    check_sampled,
    check_sampled_group,
    check_text_group,
    check_texts,
    is_chat_completion,
    is_chat_group,
    is_chat_preference,
    num_turns,
)
from cookbook.system import registry

__all__ = ["BadRow", "Chat", "check_messages", "check_text"]  # for plugins


class Naming(NamedTuple):
    """Names under which other projects store the keys of a kind."""

    columns: Mapping[str, str]
    """A kind's key -> column. Keys that are not here have their own names; columns of optional keys may be absent."""
    name: str = ""
    """Usual name of rows of this shape, such as Alpaca."""

    def renames_beside(self, present: Set[str], kind: "RowKind") -> bool:
        """Return whether it reads an optional key that the rows have from another column.

        Only a naming with the kind's own names for all required keys does.
        """
        is_own = all(self.columns.get(key, key) == key for key in kind.keys)
        return is_own and any(key != column and key in present for key, column in self.columns.items())


@dataclass(frozen=True, kw_only=True)
class RowKind:
    """Rows of one shape, with exactly one of `texts`, `chats` and `tokens`."""

    family: ClassVar[str] = "row"
    name: str
    keys: tuple[str, ...]
    """Required keys."""
    check: Callable[[Row], Row]
    """Validates a row with these keys and returns what is kept of it (a valid row again); raises BadRow."""
    made_up: Callable[["TextGenerator"], Row]
    """Generates a row for a rehearsal without network."""
    texts: Callable[[Row], tuple[str | None, tuple[str, ...]]] | None = None
    """The prompt, if any, and the text that follows it in each sequence; tokenized without a template."""
    chats: Callable[[Row], list[tuple[Chat, int]]] | None = None
    """The chat of each sequence, for the chat template, and the number of leading assistant turns without loss."""
    tokens: Callable[[Row], tuple[list[int], list[list[int]]]] | None = None
    """The token ids of the prompt, without loss, and those that follow it in each sequence; nothing is added."""
    masks: Callable[[Row], list[list[int]] | None] = lambda row: None
    """For each sequence 1 for a token with loss, for rows of tokens; None: all but the prompt's."""
    prompt_may_train: bool = False
    """True if the objective decides whether prompts, or all tokens of a chat, carry loss."""
    value: Callable[[Row], float] | None = None
    """A number per row that the objective finds in `batch["values"]`."""
    values: Callable[[Row], Sequence[float]] | None = None
    """A number per sequence, for rows of any number of sequences, each of which is a sample."""
    logps: tuple[str, ...] = ()
    """Keys of `LOGPROBS` that its rows may have: a list for the labelled tokens of each of these sequences."""
    other_keys: tuple[str, ...] = ()
    """Optional keys."""
    namings: tuple[Naming, ...] = ()
    """Other names of the keys. Rows with a kind's own names are read by these alone."""
    is_rendered: bool = False
    """True if its rows may be what another project rendered from their other columns. Rows in another shape besides are
    then a question to the user, even if they have this kind's own names."""
    is_asked_for: bool = False
    """True if only an objective that trains on this kind sees it; for others its rows are of the kind that they are
    without the keys that it adds."""
    has_end: bool = True
    """True if an end-of-sequence token is added to a text."""
    yields: bool = False
    """True if its own names count like other names, since rows of other kinds may have them too."""
    matches: Callable[[Row], bool] = lambda row: True
    """Distinguishes kinds with the same keys."""
    form: str = ""
    """The distinction of `matches` in words, for messages."""

    @property
    def keys_in_words(self) -> str:
        """The required keys, for messages."""
        return " and ".join(f"`{key}`" for key in self.keys)

    @property
    def words(self) -> str:
        """The required keys and their form, for messages."""
        return self.keys_in_words + self.form


@dataclass(frozen=True)
class TextGenerator:
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
    return registry.members("row")


def columns() -> list[str]:
    """All columns that any kind reads, its own keys first."""
    named = (column for kind in kinds().values() for naming in kind.namings for column in naming.columns.values())
    return list(dict.fromkeys([*own_keys(), *named]))


def own_keys() -> list[str]:
    """All keys of all kinds."""
    return list(dict.fromkeys(key for kind in kinds().values() for key in (*kind.keys, *kind.other_keys)))


def shapes(asked_for: Sequence[str] = ()) -> str:
    """The required keys of all kinds, for messages.

    Args:
        asked_for: kinds of the objective.
    """
    seen = [kind for kind in kinds().values() if not kind.is_asked_for or kind.name in asked_for]
    *some, last = dict.fromkeys(kind.keys_in_words for kind in seen)
    return f"{', '.join(some)}, or {last}"


def _make_up_group(some: "TextGenerator", prompt: Any, answer: Callable[[], Any]) -> Row:
    count = some.chance.randint(2, 4)
    rewards = [some.chance.random() for _ in range(count)]
    ended = [True] * (count - 1) + [False]
    return {"prompt": prompt, "completions": [answer() for _ in range(count)], "rewards": rewards, ENDED: ended}


def _make_up_tokens(some: "TextGenerator") -> Row:
    def ids() -> list[int]:
        return [some.chance.randrange(100) for _ in range(some.chance.randint(2, 10))]

    group = _make_up_group(some, ids(), ids)
    return {"prompt_ids": group.pop("prompt"), "completion_ids": group.pop("completions"), **group}


def _exchange(user: str, assistant: str, name: str = "", context: str = "context") -> Naming:
    return Naming({"user": user, "context": context, "assistant": assistant}, name)


EXCHANGES = (
    ("question", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
    ("instruction", "completion"),
    ("input", "output"),
    ("problem", "solution"),
)
"""Columns of a question and its answer, without an established name."""
PROMPTS = ("instruction", "question", "query", "input")
"""Columns that hold the prompt of a preference."""
CHAT_PROMPTS = ("conversations", "messages", *PROMPTS)
"""Columns that hold the prompt of a preference whose answers are messages."""
CHOSEN_RESPONSE = {"chosen": "chosen_response", "rejected": "rejected_response"}
CHATS = ("conversations", "conversation", "dialogue", "dialog")
"""Columns that hold messages."""

for _kind in (
    RowKind(
        name="messages",
        keys=("messages",),
        namings=tuple(Naming({"messages": name}) for name in CHATS),
        other_keys=(*CHAT_KEYS, "loss_mask", "mask"),
        check=check_chat,
        chats=lambda row: [(row["messages"], 0)],
        prompt_may_train=True,
        made_up=lambda some: {"messages": some.chat("user", "assistant") * some.chance.randint(1, 2)},
    ),
    RowKind(
        name="exchange",
        keys=("user", "assistant"),
        yields=True,
        other_keys=("context", "reasoning_content", *CHAT_KEYS),
        namings=(
            _exchange("instruction", "output", "Alpaca", context="input"),
            _exchange("instruction", "response", "Dolly"),
            _exchange("instruction", "response", context="input"),
            *(_exchange(*names) for names in EXCHANGES),
        ),
        matches=lambda raw: not are_messages(raw["user"]) and not are_messages(raw["assistant"]),
        check=check_exchange,
        chats=lambda row: [(chat_of_exchange(row), 0)],
        prompt_may_train=True,
        made_up=lambda some: {"user": some.text(), "assistant": some.text()},
    ),
    RowKind(
        name="completion",
        keys=("prompt", "completion"),
        other_keys=("context",),
        matches=lambda raw: not is_chat_completion(raw),
        check=lambda raw: check_asked(raw, "completion"),
        texts=lambda row: (row["prompt"], (row["completion"],)),
        prompt_may_train=True,
        made_up=lambda some: {"prompt": some.text(), "completion": some.text()},
    ),
    RowKind(
        name="chat_completion",
        keys=("prompt", "completion"),
        other_keys=("context", *CHAT_KEYS),
        namings=tuple(Naming({"prompt": asked, "completion": answer}) for asked, answer in EXCHANGES),
        matches=is_chat_completion,
        form=" of messages",
        check=check_chat_completion,
        chats=lambda row: [(row["prompt"] + row["completion"], num_turns(row["prompt"]))],
        prompt_may_train=True,
        made_up=lambda some: {"prompt": some.chat("user"), "completion": some.chat("assistant")},
    ),
    RowKind(
        name="text",
        keys=("text",),
        is_rendered=True,
        check=check_texts("text"),
        texts=lambda row: (None, (row["text"],)),
        made_up=lambda some: {"text": some.text()},
    ),
    RowKind(
        name="chat_preference",
        keys=("chosen", "rejected"),
        other_keys=("prompt", "context", *CHAT_KEYS),
        matches=is_chat_preference,
        form=" of messages",
        namings=(
            *(Naming({"prompt": prompt}) for prompt in CHAT_PROMPTS),
            Naming({"chosen": "chosen_messages", "rejected": "rejected_messages"}),
            Naming({"prompt": "input", "chosen": "preferred_output", "rejected": "non_preferred_output"}, "OpenAI"),
        ),
        check=check_chat_preference,
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
        other_keys=("prompt", "context"),
        matches=lambda raw: not is_chat_preference(raw),
        namings=(
            Naming({"prompt": "instruction", "context": "input"}),
            *(Naming({"prompt": prompt}) for prompt in PROMPTS),
            Naming({"prompt": "instruction", "context": "input"} | CHOSEN_RESPONSE),
            *(Naming({"prompt": prompt} | CHOSEN_RESPONSE) for prompt in ("prompt", *PROMPTS)),
        ),
        check=check_preference,
        texts=lambda row: (row["prompt"], (row["chosen"], row["rejected"])),
        made_up=lambda some: {"prompt": some.text(), "chosen": some.text(), "rejected": some.text()},
    ),
    RowKind(
        name="chat_judgement",
        keys=("prompt", "completion", "label"),
        other_keys=("context", *CHAT_KEYS),
        namings=tuple(Naming({"prompt": asked, "completion": answer, "label": "label"}) for asked, answer in EXCHANGES),
        matches=is_chat_completion,
        form=" of messages",
        check=check_chat_judgement,
        chats=lambda row: [(row["prompt"] + row["completion"], num_turns(row["prompt"]))],
        value=lambda row: float(row["label"]),
        made_up=lambda some: {
            "prompt": some.chat("user"),
            "completion": some.chat("assistant"),
            "label": some.chance.random() < 0.5,
        },
    ),
    RowKind(
        name="judged_chat",
        keys=("messages", "label"),
        namings=tuple(Naming({"messages": name}) for name in CHATS),
        other_keys=CHAT_KEYS,
        check=lambda raw: {**check_chat(raw), "label": check_label(raw)},
        chats=lambda row: [(row["messages"], num_turns(row["messages"]) - 1)],
        value=lambda row: float(row["label"]),
        made_up=lambda some: {"messages": some.chat("user", "assistant"), "label": some.chance.random() < 0.5},
    ),
    RowKind(
        name="judgement",
        keys=("prompt", "completion", "label"),
        other_keys=("context",),
        matches=lambda raw: not is_chat_completion(raw),
        namings=(
            Naming({"prompt": "instruction", "context": "input", "completion": "output"}, "Alpaca"),
            Naming({"prompt": "instruction", "completion": "response"}, "Dolly"),
            *(
                Naming({"prompt": prompt, "completion": completion})
                for prompt, completion in (("prompt", "text"), *EXCHANGES)
            ),
        ),
        check=lambda raw: check_asked(raw, "completion") | {"label": check_label(raw)},
        texts=lambda row: (row["prompt"], (row["completion"],)),
        value=lambda row: float(row["label"]),
        made_up=lambda some: {"prompt": some.text(), "completion": some.text(), "label": some.chance.random() < 0.5},
    ),
    RowKind(
        name="labelled_text",
        keys=("text", "label"),
        is_asked_for=True,
        has_end=False,
        check=lambda raw: {**check_texts("text")(raw), "label": check_class(raw)},
        texts=lambda row: (None, (row["text"],)),
        value=lambda row: float(row["label"]),
        made_up=lambda some: {"text": some.text(), "label": some.chance.randrange(2)},
    ),
    RowKind(
        name="labelled_chat",
        keys=("messages", "label"),
        is_asked_for=True,
        namings=tuple(Naming({"messages": name}) for name in CHATS),
        other_keys=CHAT_KEYS,
        check=check_labelled_chat,
        chats=lambda row: [(row["messages"], 0)],
        value=lambda row: float(row["label"]),
        made_up=lambda some: {"messages": some.chat("user", "assistant"), "label": some.chance.randrange(2)},
    ),
    RowKind(
        name="chat_group",
        keys=("prompt", "completions", "rewards"),
        other_keys=(*LOGPROBS, ENDED, "context", *CHAT_KEYS),
        matches=is_chat_group,
        form=" of messages",
        check=check_chat_group,
        chats=lambda row: [(row["prompt"] + answer, num_turns(row["prompt"])) for answer in row["completions"]],
        values=lambda row: row["rewards"],
        logps=tuple(LOGPROBS),
        made_up=lambda some: _make_up_group(some, some.chat("user"), lambda: some.chat("assistant")),
    ),
    RowKind(
        name="group",
        keys=("prompt", "completions", "rewards"),
        other_keys=(*LOGPROBS, ENDED, "context"),
        matches=lambda raw: not is_chat_group(raw),
        check=check_text_group,
        texts=lambda row: (row["prompt"], tuple(row["completions"])),
        values=lambda row: row["rewards"],
        logps=tuple(LOGPROBS),
        made_up=lambda some: _make_up_group(some, some.text(), some.text),
    ),
    RowKind(
        name="sampled_group",
        keys=(*TOKENS, "rewards"),
        other_keys=(*LOGPROBS, MASK, ENDED),
        check=check_sampled_group,
        tokens=lambda row: (row["prompt_ids"], row["completion_ids"]),
        masks=lambda row: row.get(MASK),
        values=lambda row: row["rewards"],
        logps=tuple(LOGPROBS),
        made_up=_make_up_tokens,
    ),
    RowKind(
        name="sampled",
        keys=TOKENS,
        matches=lambda raw: "rewards" not in raw,
        check=check_sampled,
        tokens=lambda row: (row["prompt_ids"], row["completion_ids"]),
        made_up=lambda some: {key: _make_up_tokens(some)[key] for key in TOKENS},
    ),
):
    registry.register(_kind)
