"""Finds the shipped chat template that renders what a tokenizer's own template renders, and marks the assistant's part.

By rendering a few chats with both, so that a template is known by what it does, whatever its text.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from cookbook.config.chat_templates import CHATML, known_templates, template_path
from cookbook.training.data.chat_template import calls_as_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A template that asks the clock is compared on the day that Llama 3.1's writes.
_DATE = """{%- macro strftime_now(pattern) -%}
    {{- {"%Y-%m-%d": "2024-07-26", "%d %b %Y": "26 Jul 2024"}.get(pattern, "") -}}
{%- endmacro %}"""
_BEFORE_A_CALL = "ponder"
_END = re.compile(r"<\S{1,40}>")


class _Chat(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    kwargs: Mapping[str, Any] = MappingProxyType({})
    prompted: bool = True


def _says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _chats() -> Iterator[_Chat]:
    """Chats as they stand at inference, before a turn of the assistant, and one with its last turn."""
    system, question, follow_up = _says("system", "s"), _says("user", "a"), _says("user", "b")
    answer = _says("assistant", "c")
    thought = answer | {"reasoning_content": "r"}
    calls: list[dict[str, Any]] = [
        {"id": f"call0000{name[0]}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in (("dig", {"depth": 3, "fast": True}), ("fly", {"to": ["x", "\u00e4"]}))
    ]
    results = [_says("tool", "d", name=call["function"]["name"], tool_call_id=call["id"]) for call in calls]
    schema = {"type": "object", "properties": {"depth": {"type": "integer", "description": "m"}}, "required": ["depth"]}
    tools = [{"type": "function", "function": {"name": "dig", "description": "Digs", "parameters": schema}}]
    calling = answer | {"content": "", "reasoning_content": _BEFORE_A_CALL, "tool_calls": calls[:1]}
    yield _Chat([question, answer, follow_up])
    yield _Chat([question, answer], prompted=False)
    yield _Chat([system, question, thought, follow_up], kwargs={"enable_thinking": False})
    yield _Chat([question], tools)
    yield _Chat([system, question, thought, follow_up, calling, results[0]], tools)
    yield _Chat([question, _says("assistant", "", tool_calls=calls), *results, answer, follow_up], tools)


CHATS = tuple(_chats())


def own_template(tokenizer: "PreTrainedTokenizerBase", *, has_tools: bool = False) -> str | None:
    """The template that a tokenizer writes chats with; None if there is none.

    Of several, chats with tools have `tool_use`, others `default`, as in transformers; and any have the only one.
    """
    own = tokenizer.chat_template
    if not isinstance(own, dict):
        return own or None
    names = [*(["tool_use"] if has_tools else []), "default", *(own if len(own) == 1 else ())]
    return next((own[name] for name in names if name in own), None)


def twin_of(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """The name of the shipped template that renders what the tokenizer's own renders; None if none does."""
    plain, with_tools = own_template(tokenizer), own_template(tokenizer, has_tools=True)
    if plain is None or with_tools is None:
        return None
    return _twin(plain, with_tools, json.dumps(tokenizer.special_tokens_map))


def offer(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Suggest a replacement for a template that cannot be trained with, for messages."""
    twin = twin_of(tokenizer)
    if twin is None:
        return f"give one with markers in data.chat_template, such as {CHATML} (docs/recipes.md, Chat templates)"
    return f"data.chat_template: {twin} renders the same and marks the assistant's tokens"


@cache
def _twin(plain: str, with_tools: str, special_tokens: str) -> str | None:
    specials = json.loads(special_tokens)
    own = [_render(with_tools if chat.tools else plain, chat, specials) for chat in CHATS]
    if own[0] is None:
        return None
    names = known_templates()
    # First those that agree in all; then those that write of tool calls what the own template leaves out.
    for skips in (False, True):
        compared = [
            (chat, text)
            for chat, text in zip(CHATS, own, strict=True)
            if text is not None and not (skips and _leaves_out(chat, text))
        ]
        for name in names:
            template = Path(template_path(name)).read_text(encoding="utf-8")
            if all(_agree(_render(template, chat, specials), text) for chat, text in compared):
                return name
    return None


def _agree(ours: str | None, own: str) -> bool:
    """Return whether two renderings are the same, but for an end token that a family writes with the next message."""
    return ours is not None and ours.startswith(own) and (ours == own or _END.fullmatch(ours[len(own) :]) is not None)


def _leaves_out(chat: _Chat, text: str) -> bool:
    """Return whether a call is missing in a rendering, or the reasoning before it."""
    calling = [message for message in chat.messages if "tool_calls" in message]
    words = [call["function"]["name"] for message in calling for call in message["tool_calls"]]
    words += [message["reasoning_content"] for message in calling if "reasoning_content" in message]
    return any(word not in text for word in words)


def _render(template: str, chat: _Chat, specials: dict[str, Any]) -> str | None:
    """The text, or None if the template refuses the chat."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with_texts = [
        message | {"tool_calls": calls_as_text(message["tool_calls"])} if "tool_calls" in message else message
        for message in chat.messages
    ]
    for messages in (chat.messages, with_texts):
        try:
            (text,), _ = render_jinja_template(
                [messages],
                tools=chat.tools,
                chat_template=_DATE + template,
                add_generation_prompt=chat.prompted,
                **specials,
                **chat.kwargs,
            )
        except Exception:  # noqa: S112  a template may raise anything
            continue
        return text
    return None
