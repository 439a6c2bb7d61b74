"""A tokenizer's chat template: renders a chat as transformers does, and finds the characters of each assistant turn."""

import json
import re
from datetime import date
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateSyntaxError, meta, nodes

from cookbook.config.chat_templates import is_marked
from cookbook.rows.messages import Chat
from cookbook.system.files import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read the reasoning of a message."""
THINKING = ({"enable_thinking": False}, {"enable_thinking": True}, {"thinking": False}, {"thinking": True})
"""Variables by which templates choose how an answer is prompted for."""
RANDOM = ("random", "lipsum")
"""Filters and functions of Jinja that give something else each time."""


class MissingDate(Exception):
    """A template prints today's date."""


class TemplateRefusal(Exception):
    """A template does not take a chat."""


Span = tuple[int, int]
"""First character of a stretch, and the one after its last."""


class ChatRequest(NamedTuple):
    """A chat to render, and what goes into the template besides."""

    chat: Chat
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    trained: tuple[int, ...]
    """The messages with loss."""
    where: str
    """The row, for messages."""


class ChatTemplate:
    """Renders chats through the template of a tokenizer.

    Args:
        today: the day that a template is given if it asks for the date; without one, such a template is refused.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", today: date | None = None) -> None:
        self.tokenizer, self.today = tokenizer, today
        self._special = dict(tokenizer.special_tokens_map)
        self._text_form: dict[bool, bool] = {}
        self._has_markers: dict[bool, bool] = {}
        self._reads: dict[str, bool] = {}

    def text(self, tools: Any = None) -> str:
        """The template itself: of several, the one for tools if there are some.

        Raises:
            ValueError: there is none.
        """
        return self.tokenizer.get_chat_template(tools=tools)

    def has_markers(self, tools: Any = None) -> bool:
        """Return whether the template marks the assistant's tokens."""
        if (tools is None) not in self._has_markers:
            self._has_markers[tools is None] = is_marked(self.text(tools))
        return self._has_markers[tools is None]

    def render(self, asked: ChatRequest, end: int | None = None, *, prompt: bool = False, **variables: Any) -> str:
        """The text of the first `end` messages; with `prompt`, also the generation prompt for the next one.

        Raises:
            TemplateRefusal: the template does not take the chat.
            MissingDate: the template asks for the date, and there is none.
        """
        return self._render_with_spans(asked, end, prompt, variables)[0]

    def render_marked(self, asked: ChatRequest) -> tuple[str, list[Span]]:
        """The text of the chat, and the stretches between the template's markers: those that touch as one, and none
        that is empty."""
        text, marked = self._render_with_spans(asked, None, False, {})
        spans: list[Span] = []
        for start, end in marked:
            if spans and start == spans[-1][1]:
                spans[-1] = spans[-1][0], end
            elif start < end:
                spans.append((start, end))
        return text, spans

    def _render_with_spans(
        self, asked: ChatRequest, end: int | None, prompt: bool, more: dict[str, Any]
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import _render_with_assistant_indices

        compiled = _compile(self.text(asked.tools))
        values = {**self._special, "strftime_now": self._strftime, **asked.variables, **more}
        messages = [self._to_template_form(message, asked.tools) for message in asked.chat[:end]]
        # The function behind apply_chat_template, which takes no date (transformers/utils/chat_template_utils.py,
        # render_jinja_template).
        try:
            return _render_with_assistant_indices(compiled, messages, asked.tools, None, prompt, **values)
        except MissingDate:
            raise
        except Exception as error:  # its own, or any of Python's: it is a program
            raise TemplateRefusal(str(error)) from None

    def _to_template_form(self, message: dict[str, Any], tools: Any) -> dict[str, Any]:
        """A message in the form that the template reads."""
        if len(message) == 2:  # most have a role and a content alone
            return message
        given = {key: value for key, value in message.items() if key != "train"}
        if "reasoning_content" in message:
            given |= dict.fromkeys(REASONING_NAMES, message["reasoning_content"])
        if "tool_calls" in message and self._wants_text(tools is not None):
            given["tool_calls"] = calls_as_text(message["tool_calls"])
        return given

    def _strftime(self, form: str) -> str:
        if self.today is None:
            raise MissingDate
        return self.today.strftime(form)

    def _wants_text(self, with_tools: bool) -> bool:
        """Return whether the template takes the arguments of calls as a JSON text.

        It joins them to text, or prints an object as Python does.
        """
        if with_tools not in self._text_form:
            arguments = {"probe": True}
            as_object, as_text = (self._probe(with_tools, form) for form in (arguments, _as_text(arguments)))
            fails = "probe" not in as_object or "'probe'" in as_object
            self._text_form[with_tools] = fails and "probe" in as_text and '\\"probe' not in as_text
        return self._text_form[with_tools]

    def _probe(self, with_tools: bool, arguments: Any) -> str:
        """A call with these arguments as the template writes it; empty if it refuses the call."""
        call = {"id": "a" * 9, "type": "function", "function": {"name": "f", "arguments": arguments}}
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        template = _compile(self.text(True if with_tools else None))
        try:
            return template.render(messages=chat, tools=None, **self._special, strftime_now=lambda form: "")
        except Exception:  # as above
            return ""

    def reads(self, key: str) -> bool:
        """Return whether the text of a chat depends on a key of its messages, as none of this project's."""
        if key not in self._reads:
            chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            chats = [chat, [{"role": "system", "content": "c"}, *chat]]
            self._reads[key] = any(
                self._text(chat) != self._text([message | {key: value} for message in chat])
                for chat in chats
                for value in ("probe", True)
            )
        return self._reads[key]

    def _text(self, chat: Chat) -> str | None:
        """A chat as the template writes it; None if it refuses that."""
        try:
            return _compile(self.text()).render(
                messages=chat, tools=None, **self._special, strftime_now=lambda form: ""
            )
        except Exception:  # as above
            return None

    def variables(self, tools: Any = None) -> set[str]:
        """The names that it reads."""
        return set(_variables(self.text(tools)))

    def mistake(self) -> str:
        """Describe why the template cannot be read; empty if it can."""
        templates = self.tokenizer.chat_template
        try:
            for template in templates.values() if isinstance(templates, dict) else [templates]:
                _tree(template)
        except TemplateSyntaxError as error:
            return f"line {error.lineno}: {error.message}"
        except Exception as error:  # of jinja2's parser or of Python's, as RecursionError where it is nested too deeply
            return f"{type(error).__name__}: {first_line(error)}"
        return ""

    def is_random(self) -> bool:
        """Return whether the template writes something else each time."""
        templates = self.tokenizer.chat_template
        for template in templates.values() if isinstance(templates, dict) else [templates]:
            tree = _tree(template)
            if any(getattr(node, "name", "") in RANDOM for node in tree.find_all((nodes.Filter, nodes.Name))):
                return True
        return False

    @cached_property
    def tested_texts(self) -> tuple[str, ...]:
        """Texts that the template looks for in those of a chat, such as `</think>`."""
        templates = self.tokenizer.chat_template
        constants: set[str] = set()
        for template in templates.values() if isinstance(templates, dict) else [templates]:
            for node in _tree(template).find_all((nodes.Compare, nodes.Call, nodes.Filter)):
                constants |= {
                    constant.value for constant in node.find_all(nodes.Const) if isinstance(constant.value, str)
                }
        marks = {text.strip() for text in constants}
        return tuple(sorted((mark for mark in marks if len(mark) > 1 and re.search(r"[<\[|]", mark)), key=len)[::-1])


def calls_as_text(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls with their arguments as JSON text, as some templates want them."""
    functions = [call["function"] for call in calls]
    texts = [function | {"arguments": _as_text(function["arguments"])} for function in functions]
    return [call | {"function": function} for call, function in zip(calls, texts, strict=True)]


def _as_text(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


@lru_cache(maxsize=32)
def _tree(template: str) -> nodes.Template:
    """A template's syntax, for readers that leave it as it is."""
    return _compile(template).environment.parse(template)


@lru_cache(maxsize=32)
def _variables(template: str) -> frozenset[str]:
    """The names that a template reads, found in a tree of its own, in which Jinja computes what is constant."""
    return frozenset(meta.find_undeclared_variables(_compile(template).environment.parse(template)))


def _compile(template: str) -> Any:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(template)
