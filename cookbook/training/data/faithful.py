"""Check that a chat template writes what a row says: each text of a chat, in order, once, and trained if it should be.

A chat is rendered a second time with every text replaced by a word of its own. Where the words stand tells where the
texts must; what stands between them is the template's, and must be the same around the texts.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

from cookbook.config.sections import TextPart
from cookbook.rows.messages import Chat
from cookbook.training.data.chat_template import ChatRequest, Span

_CORE = re.compile(r"\S(?:.*\S)?", re.DOTALL)

END_OF_THOUGHT = "</think>"
OTHER_BEGINNING = "does not begin a turn with its"
OF_PARAMETER = "a parameter's description"
AS_PYTHON = "writes Python in the place of JSON for"
MARKS_NEXT = "marks as the assistant's the beginning of the next"
NOT_MARKED = "does not mark as the assistant's all that follows its"


class Leaf(NamedTuple):
    """A text of a chat."""

    part: TextPart
    message: int | None
    """Index of the message; None for tools."""
    key: str
    """The key that has it, for messages."""
    detail: str
    """Name of the text among several of one key, for messages."""
    text: str


class Problem(NamedTuple):
    """A text of a chat that a template does not write as it should."""

    part: TextPart
    message: int | None
    key: str
    detail: str = ""
    how: str = "leaves out"

    @property
    def place(self) -> str:
        """The place of the text, for messages."""
        role = {"system": " (system)", "tool_results": " (tool)"}.get(self.part, "")
        message = "" if self.message is None else f"message {self.message + 1}{role}"
        return ", ".join(filter(None, (message, self.detail))) or "the row"

    def is_meant(self, asked: ChatRequest) -> bool:
        """Return whether templates do so on purpose, and no label is lost.

        They do it to a turn that a user's message follows, and to the descriptions of parameters.
        """
        if self.part == "tools":
            return self.detail.startswith(OF_PARAMETER)
        if self.message is None or all(later["role"] != "user" for later in asked.chat[self.message + 1 :]):
            return False
        return self.how == OTHER_BEGINNING or (self.part == "reasoning" and self.message not in asked.trained)

    @property
    def remark(self) -> str:
        """The remark about a problem that `is_meant`."""
        if self.part == "tools":
            return "with descriptions of tools' parameters that the chat template leaves out"
        if self.part == "generation_prompt":
            return (
                "with an earlier turn that begins otherwise than generation is asked for it (objective.train_on: last"
                " trains on the last turn alone)"
            )
        return "with reasoning in an earlier turn, without loss, that the chat template leaves out"

    @property
    def remedy(self) -> str:
        """Another thing that the user can do, for messages."""
        return "train on the last turn alone with objective.train_on: last, " if self.part == "reasoning" else ""


@dataclass
class Words:
    """Replaces the texts of a chat by words of their own."""

    tested: Sequence[str] = ()
    """Texts that the template looks for, which stay."""
    leaves: dict[str, Leaf] = field(default_factory=dict)
    """The leaf that each word stands for."""
    scalars: list[tuple[str, Any]] = field(default_factory=list)
    """The word of an argument's name, and the argument, which is no text."""
    begin: str = "zq"
    """Begins each word, and stands nowhere in the chat."""

    @classmethod
    def of(cls, asked: ChatRequest, tested: Sequence[str]) -> "Words":
        """Words for a chat, none of which it has itself."""
        said = repr(asked)
        return cls(tested, begin=next(word for i in count() if (word := f"zq{'x' * i}q") not in said))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(self.begin + r"\d{4}qz")

    def word(self, part: TextPart, message: int | None, key: str, text: str, detail: str = "") -> str:
        word = f"{self.begin}{len(self.leaves):04d}qz"
        self.leaves[word] = Leaf(part, message, key, detail, text)
        return word

    def text(self, part: TextPart, message: int | None, key: str, text: str, detail: str = "") -> str:
        """The text with words for its stretches between texts that the template looks for; white space stays around."""
        pieces = re.split("(" + "|".join(map(re.escape, self.tested)) + ")", text) if self.tested else [text]
        # Of an answer's content, what stands before the end of a thought is one.
        for i in range(0, len(pieces), 2):
            is_thought = part == "content" and pieces[i + 1 : i + 2] == [END_OF_THOUGHT]
            if core := _CORE.search(pieces[i]):
                word = self.word("reasoning" if is_thought else part, message, key, core[0], detail)
                pieces[i] = pieces[i][: core.start()] + word + pieces[i][core.end() :]
        return "".join(pieces)

    def value(self, message: int, detail: str, value: Any) -> Any:
        """Arguments of a call, with words for names and texts."""
        if isinstance(value, str):
            return self.text("tool_calls", message, "`tool_calls`", value, detail)
        if isinstance(value, list):
            return [self.value(message, detail, item) for item in value]
        if isinstance(value, dict):
            # Words sort as their names do, for a template that sorts.
            names = {
                key: self.word("tool_calls", message, "`tool_calls`", key, detail)
                for key in sorted(value, key=str.lower)
            }
            replaced = {}
            for key, item in value.items():
                word = names[key]
                if not isinstance(item, str | list | dict):
                    self.scalars.append((word, item))
                replaced[word] = self.value(message, detail, item)
            return replaced
        return value

    def tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """A tool with a word for its name."""
        function = _function_of(tool)
        name = function.get("name")
        if not isinstance(name, str):
            return tool
        named = function | {"name": self.word("tools", None, "`tools`", name, f"tool {name!a}")}
        return named if function is tool else tool | {"function": named}

    def replace_texts(self, asked: ChatRequest) -> ChatRequest:
        """The chat with words in the place of its texts."""
        tools = None if asked.tools is None else [self.tool(tool) for tool in asked.tools]
        chat: Chat = []
        for k, message in enumerate(asked.chat):
            role, new = message["role"], dict(message)
            part: TextPart = {"system": "system", "tool": "tool_results"}.get(role, "content")  # type: ignore[assignment]
            if "name" in message and role != "tool":
                new["name"] = self.word("name", k, "`name`", message["name"])
            if "reasoning_content" in message:
                new["reasoning_content"] = self.text(
                    "reasoning", k, "`reasoning_content`", message["reasoning_content"]
                )
            if "instruction" in message:
                parts = {key: self.text("content", k, f"`{key}`", message[key]) for key in ("instruction", "input")}
                new |= parts | {"content": "\n\n".join(parts.values())}
            elif message["content"]:
                new["content"] = self.text(part, k, "`content`", message["content"])
            if "tool_calls" in message:
                new["tool_calls"] = [self._call(k, n, call) for n, call in enumerate(message["tool_calls"], start=1)]
            chat.append(new)
        return asked._replace(chat=chat, tools=tools)

    def _call(self, message: int, number: int, call: dict[str, Any]) -> dict[str, Any]:
        function, detail = call["function"], f"call {number} of {call['function']['name']!a}"
        named = self.word("tool_calls", message, "`tool_calls`", function["name"], detail)
        return call | {"function": {"name": named, "arguments": self.value(message, detail, function["arguments"])}}


def shape_of(asked: ChatRequest, tested: Sequence[str]) -> tuple[Any, ...]:
    """Return what a template may tell chats apart by, but their words: roles, keys, number of calls."""
    messages = tuple([_features(message, tested) for message in asked.chat])
    return messages, asked.trained, asked.tools is None, tuple(map(repr, asked.variables.items()))


def _features(message: dict[str, Any], tested: Sequence[str]) -> tuple[Any, ...]:
    content = message["content"]
    plain = message["role"], bool(content), *[mark for mark in tested if mark in content]
    if len(message) == 2:  # most have a role and a content alone
        return plain
    return *plain, "reasoning_content" in message, len(message.get("tool_calls", ())), "name" in message


def problems_of_shape(asked: ChatRequest, words: Words, text: str, spans: Sequence[Span] | None) -> list[Problem]:
    """The problems of a chat with words for its texts, as rendered.

    Args:
        asked: the chat itself.
        words: the words in `text`.
        spans: the characters of each message of `asked.trained`; None if all carry loss.
    """
    matches = [*words.pattern.finditer(text)]
    places = [(words.leaves[match[0]], match.start()) for match in matches]
    # By word: two texts of a message may be alike.
    times = Counter(match[0] for match in matches)
    faults = [(leaf, "leaves out") for word, leaf in words.leaves.items() if not times[word]]
    # A name may stand beside a call and beside its result.
    once = [word for word, leaf in words.leaves.items() if leaf.part not in ("tools", "name", "tool_calls")]
    faults += [(words.leaves[word], "writes more than once") for word in once if times[word] > 1]
    first = dict(reversed(places))
    places = [(leaf, place) for leaf, place in places if leaf.part != "tool_calls" or first[leaf] == place]
    faults += [(leaf, "writes after a later message") for leaf in _out_of_order(places)]
    faults += _as_python(words, text)
    for leaf, place in places if spans is not None else ():
        is_trained = any(start <= place < end for start, end in spans or ())
        if is_trained and leaf.message not in asked.trained:
            faults.append((leaf, "writes into a turn that carries loss"))
        elif leaf.message in asked.trained and leaf.part != "name" and not is_trained:
            faults.append((leaf, "writes outside of the assistant's turn"))
    problems = [Problem(leaf.part, leaf.message, leaf.key, leaf.detail, how) for leaf, how in faults]
    return list(dict.fromkeys([*problems, *problems_of_tools(asked, text)]))


def problems_of_tools(asked: ChatRequest, text: str) -> list[Problem]:
    """The parameters and descriptions of tools that do not stand in the rendered text."""
    problems = []
    for tool in asked.tools or ():
        for kind, description in _texts_of_schema(_function_of(tool), "description"):
            if not any(form in text for form in _forms(description.strip())):
                problems.append(Problem("tools", None, "`tools`", f"{kind} {description[:60]!a}"))
    return problems


def _texts_of_schema(value: Any, description: str = OF_PARAMETER) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        for item in value:
            yield from _texts_of_schema(item)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if key == "description" and isinstance(item, str):
            yield description, item
        elif key == "properties" and isinstance(item, dict):
            for name, schema in item.items():
                yield "parameter", str(name)
                yield from _texts_of_schema(schema)
        elif key not in ("default", "enum", "example", "examples"):  # values, no schemas
            yield from _texts_of_schema(item)


class Look(NamedTuple):
    """The arrangement of a rendered chat around its texts.

    Chats of one shape look alike, unless a template treats one of the texts in a way of its own.
    """

    missing: tuple[tuple[int, str], ...]
    """The texts that are not there in their order, by message and key."""
    num_between: int = 0
    """Characters that belong to no text."""
    num_between_trained: int = 0
    """Characters between the texts in the turns with loss."""


def look_at(asked: ChatRequest, text: str, spans: Sequence[Span]) -> Look:
    """A look at a rendered chat, a few microseconds long."""
    place, missing, has_calls = 0, [], asked.tools is not None
    num_between, num_between_trained = len(text), sum(end - start for start, end in spans)
    for k, message in enumerate(asked.chat):
        keys, role = ("content",), message["role"]
        if len(message) > 2:
            of_content = ("instruction", "input") if "instruction" in message else keys
            keys = tuple(key for key in ("name", "reasoning_content", *of_content) if key in message)
            if "tool_calls" in message or role == "tool":
                has_calls = True
                values = [value for call in message.get("tool_calls", ()) for value in _values(call["function"])]
                missing += [(k, "tool_calls") for value in values if not _stands_in(text, value)]
        is_moved = role == "system"  # some templates write it before the last turn
        for key in keys:
            content = message[key]
            begin = text.find(content, 0 if is_moved else place)
            if begin < 0 and (begin := text.find(content := content.strip(), 0 if is_moved else place)) < 0:
                if role != "tool" or not _stands_in(text, content):
                    missing.append((k, key))
                continue
            num_between -= len(content)
            if k in asked.trained:
                num_between_trained -= len(content)
            if not is_moved:
                place = begin + len(content)
    # Arguments, schemas and results in JSON are of any length.
    return Look(tuple(missing)) if has_calls else Look(tuple(missing), num_between, num_between_trained)


def _values(value: Any) -> Iterator[Any]:
    """The names and values in a call but its own keys."""
    if isinstance(value, dict):
        yield from (key for key in value if key not in ("name", "arguments"))
        for item in value.values():
            yield from _values(item)
    elif isinstance(value, list):
        for item in value:
            yield from _values(item)
    else:
        yield value


def _stands_in(text: str, value: Any) -> bool:
    if isinstance(value, str):
        return value in text or any(form in text for form in _forms(value))
    return json.dumps(value) in text or str(value) in text


def find_left_out(words: Words, text: str) -> list[Problem]:
    """The texts of a chat that do not stand in the rendered text, of a template that does not take the words."""
    leaves = [leaf for leaf in words.leaves.values() if not any(form in text for form in _forms_of(leaf))]
    return [Problem(leaf.part, leaf.message, leaf.key, leaf.detail) for leaf in leaves]


def _function_of(tool: dict[str, Any]) -> dict[str, Any]:
    """The function of a tool, or the tool itself if it is one."""
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


def _out_of_order(places: Iterable[tuple[Leaf, int]]) -> Iterator[Leaf]:
    highest = 0
    for leaf, _ in places:
        if leaf.message is None or leaf.part in ("system", "name"):  # some templates write these before the last turn
            continue
        if leaf.message < highest:
            yield leaf
        highest = max(highest, leaf.message)


def _as_python(words: Words, text: str) -> list[tuple[Leaf, str]]:
    """Tools and arguments that are written as Python prints an object, and arguments that are not written at all."""
    faults = []
    for word, leaf in words.leaves.items():
        if leaf.part == "tool_calls" and f"'{word}'" in text and f'"{word}"' not in text:
            faults.append((leaf, AS_PYTHON))
        if leaf.part == "tools" and f"'name': '{word}'" in text:
            faults.append((leaf, AS_PYTHON))
    for word, value in words.scalars:
        rest = words.pattern.split(text[text.find(word) + len(word) :])[0] if word in text else ""
        # A template that writes no JSON may write an argument by itself as Python prints it.
        if json.dumps(value) not in rest and str(value) not in rest:
            faults.append((words.leaves[word], "leaves out an argument of"))
    return faults


def find_changed_text(words: Words, marked: str, text: str) -> Leaf | None:
    """The first text that stands in `text`, the rendered chat, otherwise than its word stands in `marked`; None if each
    text stands in the place of its word, and between them is what is between the words.
    """
    position, last, end = 0, None, 0
    for match in words.pattern.finditer(marked):
        between = marked[end : match.start()]
        if not text.startswith(between, position):
            return last or words.leaves[match[0]]
        position += len(between)
        last, end = words.leaves[match[0]], match.end()
        form = next((form for form in _forms_of(last) if text.startswith(form, position)), None)
        if form is None:
            return last
        position += len(form)
    return last if text[position:] != marked[end:] else None


def _forms_of(leaf: Leaf) -> list[str]:
    return [leaf.text] if leaf.part in ("system", "content", "reasoning") else _forms(leaf.text)


def _forms(text: str) -> list[str]:
    """A text as a template may write it: as it is, or within JSON."""
    forms = [text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]]
    return sorted(dict.fromkeys(forms), key=len, reverse=True)
