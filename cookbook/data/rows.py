"""Reads a source into checked rows of one kind; every bad row is named with its file and line."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from cookbook.data.sources import COLUMNS, MAX_ROW_BYTES, SHAPES, BadRow, raw_rows
from cookbook.files import RecipeError
from cookbook.recipe import Source

MAX_NAMED = 20

Kind = Literal["messages", "completion", "text", "preference", "chat_preference"]
Objective = Literal["sft", "cpt", "dpo"]
OnBadRow = Literal["error", "drop"]
Chat = list[dict[str, str]]

# What a row of a kind must have; of both kinds of preference, `prompt` is a matter of their form.
KEYS: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
    "chat_preference": ("chosen", "rejected"),
}
KINDS_OF: dict[Objective, tuple[Kind, ...]] = {
    "sft": ("messages", "completion", "text"),
    "cpt": ("text",),
    "dpo": ("preference",),
}
# What a message may carry that changes its meaning and is not served: without it, half a turn would be trained.
UNSERVED = ("tool_calls", "function_call", "reasoning_content", "thinking")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Good rows of one kind, with the keys of that kind only."""

    kind: Kind
    rows: list[dict[str, Any]]
    """`{"messages": [{"role", "content"}, ...]}`, `{"prompt", "completion"}` or `{"text"}`. A preference is
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


def read_rows(source: Source, on_bad_row: OnBadRow, objective: Objective = "sft", *, place: str = "data.train") -> Rows:
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
        for value in row.values():
            if isinstance(value, str):
                yield value
            else:
                yield from (message["content"] for message in value)


def row_bytes(row: dict[str, Any]) -> bytes:
    """The content of a row, as what is hashed."""
    return json.dumps(row, ensure_ascii=False).encode()


def _good_rows(
    source: Source, objective: Objective, bad_rows: BadRows, *, streaming: bool = False
) -> Iterator[tuple[Kind, dict[str, Any]]]:
    kind: Kind | None = None
    num_good = 0
    for place, raw in raw_rows(source, streaming=streaming):
        try:
            row_kind, row = _check_row(raw, objective, place)
            if kind is not None and row_kind != kind:
                raise BadRow("another kind of row", f"{_keys(row_kind)}, where the rows before have {_keys(kind)}")
        except BadRow as bad:
            bad_rows.add(place, bad)
            continue
        kind = row_kind
        yield kind, row
        num_good += 1
        if num_good == source.max_rows:
            return


def _keys(kind: Kind) -> str:
    as_messages = " of messages" if kind == "chat_preference" else ""
    return " and ".join(f"`{key}`" for key in KEYS[kind]) + as_messages


# What a row must be.


def _check_row(raw: Any, objective: Objective, place: str) -> tuple[Kind, dict[str, Any]]:
    """The kind, and the row with the keys of that kind only.

    Raises:
        BadRow: the first thing that is wrong with it.
        RecipeError: nothing is, but the objective does not train on such rows.
    """
    if isinstance(raw, BadRow):
        raise raw
    if not isinstance(raw, dict):
        raise BadRow("not an object", f"a {type(raw).__name__}; a row is an object with {SHAPES}")
    kind = _kind(raw, objective, place)
    if kind == "preference":
        kind, row = _check_preference(raw)
    elif kind == "messages":
        row = {"messages": _check_messages(raw["messages"])}
    else:
        row = {key: _check_text(raw[key], f"`{key}`") for key in KEYS[kind]}
    if sum(len(text.encode()) for text in texts(Rows(kind=kind, rows=[row]))) > MAX_ROW_BYTES:
        raise BadRow(f"row larger than {MAX_ROW_BYTES:,} bytes")
    return kind, row


def _kind(raw: dict[str, Any], objective: Objective, place: str) -> Kind:
    # A parquet file of mixed rows fills the columns that a row lacks with null.
    present = {key for key in COLUMNS if raw.get(key) is not None}
    kinds: list[Kind] = [kind for kind in KEYS if kind != "chat_preference" and present.issuperset(KEYS[kind])]
    served = [kind for kind in kinds if kind in KINDS_OF[objective]]
    if not kinds:
        nulls = [key for key in COLUMNS if key in raw and raw[key] is None]
        if nulls:
            raise BadRow("empty text", f"`{nulls[0]}` is null")
        raise BadRow("missing keys", f"found {', '.join(map(ascii, raw))[:200] or 'none'}; a row must have {SHAPES}")
    if not served:
        others = [name for name, trained in KINDS_OF.items() if kinds[0] in trained]
        mistake = (
            f"{place}: a row with {_keys(kinds[0])}, but objective.name is {objective}, which trains on"
            f" {', or '.join(map(_keys, KINDS_OF[objective]))}; use other rows, or objective.name:"
            f" {' or '.join(others)}"
        )
        raise RecipeError([mistake])
    if len(served) > 1:
        raise BadRow("two kinds in one row", f"{' as well as '.join(map(_keys, served))}; keep the one to train on")
    return served[0]


def _check_messages(messages: Any, name: str = "") -> Chat:
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
        checked.append({"role": role, "content": _check_text(message.get("content"), f"{which} content")})
    if all(message["role"] != "assistant" for message in checked):
        raise BadRow("no assistant turn", f"`{name}`" if name else "")
    return checked


def _check_text(text: Any, name: str) -> str:
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


def _check_preference(raw: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """Texts stay texts, without a chat template, as `prompt` and `completion` do; messages become what both share and
    the two ends that differ."""
    prompt, chosen, rejected = raw.get("prompt"), raw["chosen"], raw["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        seen = f"`chosen` is a {type(chosen).__name__}, `rejected` a {type(rejected).__name__}"
        raise BadRow("chosen and rejected of different form", seen)
    row: dict[str, Any]
    if isinstance(chosen, str):
        row = {key: _check_text(raw.get(key), f"`{key}`") for key in ("prompt", "chosen", "rejected")}
        if chosen == rejected:
            raise BadRow("chosen and rejected are the same")
        return "preference", row
    chosen, rejected = (_conversation(prompt, raw[key], key) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise BadRow("chosen and rejected are the same")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    ends = chosen[shared:], rejected[shared:]
    if not all(end and end[0]["role"] == "assistant" for end in ends):
        seen = "the first message in which they differ must be the assistant's in both"
        raise BadRow("chosen and rejected do not answer the same prompt", f"message {shared + 1}; {seen}")
    return "chat_preference", {"prompt": chosen[:shared], "chosen": ends[0], "rejected": ends[1]}


def _conversation(prompt: Any, answer: Any, name: str) -> Chat:
    """The whole conversation, from a prompt (a text, messages or none) and an answer that may repeat it."""
    is_answer_only = isinstance(answer, list) and bool(answer) and _role(answer[0]) == "assistant"
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": _check_text(prompt, "`prompt`")}]
        if not is_answer_only:
            whole = _check_messages(answer, name)
            if prompt[0] not in whole:  # a system message, or earlier turns, may stand before it
                raise BadRow("prompt is not in the conversation", f"no user message of `{name}` is the `prompt`")
            return whole
    if prompt is None:
        return _check_messages(answer, name)
    if not isinstance(prompt, list):
        raise BadRow("messages not a list", f"`prompt` is a {type(prompt).__name__}")
    if is_answer_only:
        return _check_messages([*prompt, *answer], f"prompt, {name}")
    whole = _check_messages(answer, name)
    start = [{"role": _role(one), "content": one.get("content")} if isinstance(one, dict) else one for one in prompt]
    if whole[: len(prompt)] != start:
        raise BadRow("prompt is not in the conversation", f"`{name}` does not begin with the messages of `prompt`")
    return whole


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None
