"""Protects the shipped chat templates: they render what the models' own templates render, and mark the assistant's part.

python -m pytest -q tests/test_shipped_templates.py
"""

import itertools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from needs import need_trl
from small_data import CHATML, make_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

SHIPPED = {path.stem: path for path in CHATML.parent.glob("*.jinja")}
TWINS = {
    "qwen2_5": ["qwen2_5"],
    "qwen3": ["qwen3"],
    "qwen3_2507": ["qwen3_instruct_2507"],
    "qwen3_5": ["qwen3_5_think"],
    "qwen3_5_nothink": ["qwen3_5_nothink"],
    "qwen3_6": ["qwen3_6"],
    "deepseek_r1": ["deepseekv3", "deepseek_r1_distill"],
    "glm4_moe": ["glm4moe"],
    "phi3": ["phi3", "phi3_5"],
    "gemma3": ["gemma3", "gemma"],
    "gpt_oss": ["gptoss"],
    "nemotron3": ["nemotron_3_nano", "nemotron_3_super"],
    "nemotron3_ultra": ["nemotron_3_ultra", "nemotron_3_5_lightning"],
    "gemma4": ["gemma4_v5"],
    "llama3": ["llama3"],
    "llama3_1": ["llama3_1", "llama3_2"],
}
"""Our template -> the models' own that it renders alike, by their names in TRL."""


class Row(NamedTuple):
    messages: list
    tools: list | None = None
    kwargs: dict = {}


def says(role, content, **more):
    if "reasoning" in more:  # under all names that templates read, as the encoder gives it
        more |= {"reasoning_content": more["reasoning"], "thinking": more["reasoning"]}
    return {"role": role, "content": content, **more}


def call(name, number=0, **arguments):
    return {"id": f"call{number}aa", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content, name="dig", number=0):
    return says("tool", content, name=name, tool_call_id=f"call{number}aa")


DEPTH = {"type": "integer", "description": "Metres; more than 0"}
PLACE = {"type": "string", "description": "Where", "enum": ["here", "there"], "default": "here"}
STOPS = {"type": "array", "items": {"type": "string"}, "description": "On the way"}
POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x"]}
DIG = {"type": "object", "properties": {"depth": DEPTH, "where": PLACE}, "required": ["depth"]}
FLY = {"type": "object", "properties": {"city": {"type": "string"}, "stops": STOPS, "to": POINT}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
    for name, text, schema in [
        ("dig", "Digs a hole \u2013 \u201cdeep\u201d", DIG),
        ("fly", "Flies.", FLY),
        ("rest", "Rests.", {"type": "object", "properties": {}}),
    ]
]
SYSTEM = says("system", "Be brief.")
Q1, Q2 = says("user", "One?"), says("user", "Two?")
A1, A2 = says("assistant", "Answer one."), says("assistant", "Answer two.")
R1, R2 = (says("assistant", f"Answer {n}.", reasoning=f"Thought {n}.") for n in ("one", "two"))
T1 = says("assistant", "<think>\nThought one.\n</think>\n\nAnswer one.")
T2 = says("assistant", "<think>\nThought two.\n</think>\n\nAnswer two.")
CALLING = says("assistant", "", tool_calls=[call("dig", depth=3, where="here")])
SAYING = says("assistant", "I dig.", tool_calls=[call("dig", depth=3)])
THINKING = says("assistant", "", tool_calls=[call("dig", depth=3)], reasoning="Dig first.")
ODD_CALL = call(
    "fly", 1, city="K\u00f6ln \u2013 \u201cDom\u201d\n", stops=["a", "\u00df"], to={"x": 1.5, "y": None}, fast=True
)
BOTH = says("assistant", "", tool_calls=[call("dig", depth=3), ODD_CALL])
BOTH_SAID = says("assistant", "Both.", tool_calls=[call("dig", depth=3), ODD_CALL])

CHATS = {
    "one turn": [Q1, A1],
    "two turns": [Q1, A1, Q2, A2],
    "system": [SYSTEM, Q1, A1],
    "system, two turns": [SYSTEM, Q1, A1, Q2, A2],
    "empty system": [says("system", ""), Q1, A1],
    "second system": [SYSTEM, Q1, A1, says("system", "Be long."), Q2, A2],
    "unicode": [says("user", "\u00c4 \u20ac \U0001f600 \u4f60\u597d <b>&amp;</b>"), says("assistant", "\u00df\u200d \U0001f44d")],
    "white space": [says("user", " \n q \n\n"), says("assistant", "\n\n  a  \n"), Q2, says("assistant", "  b\n\tc\n\n")],
    "empty answer": [Q1, says("assistant", ""), Q2, A2],
    "last answer empty": [Q1, A1, Q2, says("assistant", "")],
    "a question last": [Q1, A1, Q2],
    "two questions in a row": [Q1, Q2, A1],
    "two answers in a row": [Q1, A1, A2, Q2, A2],
    "assistant first": [A1, Q1, A2],
    "reasoning": [Q1, R1],
    "reasoning in the last turn": [Q1, A1, Q2, R2],
    "reasoning in the earlier turn": [Q1, R1, Q2, A2],
    "reasoning in all turns": [SYSTEM, Q1, R1, Q2, R2],
    "empty reasoning": [Q1, says("assistant", "a", reasoning=""), Q2, says("assistant", "b", reasoning="")],
    "reasoning of line ends": [Q1, says("assistant", "a", reasoning="\n"), Q2, says("assistant", "\nb", reasoning="\n r \n")],
    "reasoning alone": [Q1, says("assistant", "", reasoning="Thought.")],
    "tags in the content": [Q1, T1, Q2, T2],
    "empty tags in the content": [Q1, says("assistant", "<think>\n\n</think>\n\na")],
    "open tag in the content": [Q1, says("assistant", "<think>a"), Q2, says("assistant", "b</think>")],
    "tags in a question": [says("user", "What is <think>x</think>?"), A1],
    "call": [Q1, CALLING, result("5")],
    "call and answer": [Q1, CALLING, result("5"), A1],
    "call beside text": [Q1, SAYING, result("5"), A1],
    "call after thought": [Q1, THINKING, result("5"), R1],
    "call after thought in an earlier turn": [SYSTEM, Q1, THINKING, result("5"), R1, Q2, A2],
    "calls after calls": [Q1, CALLING, result("5"), SAYING, result("6"), A1],
    "two calls": [Q1, BOTH, result("5"), result("\u00e4 \u2013\n", "fly", 1), A1],
    "two calls beside text": [Q1, BOTH_SAID, result("5"), result("6", "fly", 1), A1],
    "two calls, then two more": [Q1, BOTH, result("5"), result("6", "fly", 1), BOTH, result("5"), result("6", "fly", 1), A1, Q2, A2],
    "call without arguments": [Q1, says("assistant", "", tool_calls=[call("rest")]), result("ok", "rest"), A1],
    "call last": [Q1, A1, Q2, CALLING],
    "results in a question": [Q1, CALLING, says("user", "<tool_response>\n5\n</tool_response>"), R1],
    "result of JSON": [Q1, CALLING, result('{"depth": 3, "ok": true}'), A1],
}
KWARGS = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"preserve_thinking": True},
    {"truncate_history_thinking": False},
    {"low_effort": True, "medium_effort": True, "reasoning_effort": "high"},
]
SCHEMAS = {
    "types": {kind: {"type": kind} for kind in ("string", "number", "integer", "boolean", "array", "object", "null")},
    "words": {"a": {"type": "string", "description": "A\n\u2013 b", "title": "T"}, "b": {"description": "any"}, "c": {}},
    "choices": {
        "a": {"type": "string", "enum": ["x", "y"], "default": "x"},
        "b": {"type": "integer", "enum": [1, 2]},
        "c": {"enum": ["x"]},
    },
    "defaults": {"a": {"type": "integer", "default": 3}, "b": {"type": "array", "default": [1, None]}},
    "optional": {"a": {"type": "string", "nullable": True}, "b": {"type": ["string", "null"]}, "c": {"type": ["object"]}},
    "lists": {
        kind: {"type": "array", "items": {"type": kind, "description": "one"}, "nullable": kind == "string"}
        for kind in ("string", "number", "integer", "boolean", "object", "null")
    },
    "list of objects": {"a": {"type": "array", "items": POINT | {"description": "P"}, "description": "Several"}},
    "list of one of": {"a": {"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "number"}]}}},
    "list of lists": {"a": {"type": "array", "items": {"type": "array", "items": {"type": ["string", "null"]}}}},
    "one of": {
        "a": {"oneOf": [{"type": "string", "description": "S"}, {"type": "integer", "default": 1}]},
        "b": {"oneOf": [{"type": "object"}, {"type": "string"}], "default": "x"},
        "c": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "objects": {
        "a": POINT | {"description": "P"},
        "B": {"type": "object", "additionalProperties": False},
        "c": {"type": "object", "properties": {"d": {"type": "object", "properties": {"e": {"type": "string"}}}}},
    },
}
"""Properties of a function, to see how each template writes schemas."""


def tool(name, schema, **more):
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema, **more}}


def grid():
    for (name, chat), tools, kwargs in itertools.product(CHATS.items(), (None, TOOLS), KWARGS):
        words = [name, *["tools"] * bool(tools), *(f"{key}={value}" for key, value in kwargs.items())]
        yield ", ".join(words), Row(chat, tools, kwargs)
    for name, properties in SCHEMAS.items():
        schema = {"type": "object", "properties": properties}
        yield f"schema of {name}", Row([Q1, A1], [tool("f", schema), tool("g", schema | {"required": ["a", "string"]})])
    bare = {"type": "function", "function": {"name": "f", "description": "F"}}
    yield "schema missing", Row([Q1, A1], [bare])
    yield "schema of more", Row([SYSTEM, Q1, A1], [tool("f", {"type": "object", "properties": {}, "$defs": {}}, strict=True)])


ROWS = dict(grid())


DATE = """{%- macro strftime_now(pattern) -%}
    {{- {"%Y-%m-%d": "2024-07-26", "%d %b %Y": "26 Jul 2024"}[pattern] -}}
{%- endmacro %}"""
"""Takes the place of the clock that a template may ask."""


def own(name):
    """A model's own template, as TRL keeps it."""
    need_trl()
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def rendered(template, row, prompted=False, marks=False):
    """The text, and the assistant's stretches with `marks`; None if the template refuses the row."""
    try:
        texts, stretches = render_jinja_template(
            [as_text(row.messages) if wants_text(template) else row.messages],
            tools=row.tools,
            chat_template=DATE + template,
            add_generation_prompt=prompted,
            return_assistant_tokens_mask=marks,
            bos_token="<s>",
            eos_token="</s>",
            **row.kwargs,
        )
    except Exception as error:
        assert type(error).__name__ in ("TemplateError", "UndefinedError", "TypeError", "SecurityError"), repr(error)
        return None
    return (texts[0], stretches[0]) if marks else texts[0]


def wants_text(template):
    """Whether a template joins a call's arguments as a text, as OpenAI's format has them."""
    return "+ tool['function']['arguments'] +" in template


def as_text(messages):
    return [
        message
        | {
            "tool_calls": [
                one | {"function": one["function"] | {"arguments": json.dumps(one["function"]["arguments"], ensure_ascii=False)}}
                for one in message["tool_calls"]
            ]
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]


def differences(ours, theirs, rows):
    """Of each row, its name and both renderings where they are not the same; and the number of rows that both accept."""
    found, num_compared = [], 0
    for (name, row), prompted in itertools.product(rows.items(), (False, True)):
        one, other = rendered(ours, row, prompted), rendered(theirs, row, prompted)
        num_compared += None not in (one, other)
        if one != other:
            found.append((f"{name}, prompted" if prompted else name, one, other))
    return found, num_compared


PAIRS = [(ours, theirs) for ours, names in TWINS.items() for theirs in names]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_twin_renders_what_the_models_own_template_renders(ours, theirs):
    found, num_compared = differences(SHIPPED[ours].read_text(encoding="utf-8"), own(theirs), ROWS)
    assert not found, f"{len(found)} of {2 * len(ROWS)}; the first: {found[0]}"
    assert num_compared >= 20
