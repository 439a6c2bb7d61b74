"""Protects the shipped chat templates: each renders what a model's own renders, and marks the assistant's part.

python -m pytest -q tests/test_shipped_templates.py
"""

import ast
import itertools
import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import jinja2
import pytest
from jinja2.ext import Extension
from needs import need_trl
from small_data import CHATML, make_tokenizer, marked, rows_of, run_tokenize
from tokenizers import pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from cookbook.rows.row_columns import readings
from cookbook.training.data.twin import offer, own_template, twin_of
from cookbook.training.models.tokenizer_files import end_of_turn
from tests.turns import TEMPLATES, others_by_turn

SHIPPED = {path.stem: path for path in CHATML.parent.glob("*.jinja")}
TWINS = {
    "qwen2_5": ["qwen2_5"],
    "qwen3": ["qwen3"],
    "qwen3_2507": ["qwen3_instruct_2507"],
    "qwen3_5": ["qwen3_5_think"],
    "qwen3_5_nothink": ["qwen3_5_nothink"],
    "qwen3_6": ["qwen3_6"],
    "deepseek_r1": ["deepseekv3", "deepseek_r1_distill"],
    "deepseek_v3": ["deepseekv3, without a thought"],
    "glm4_moe": ["glm4moe"],
    "phi3": ["phi3", "phi3_5"],
    "gemma3": ["gemma3", "gemma"],
    "gpt_oss": ["gptoss"],
    "nemotron3": ["nemotron_3_super", "nemotron_3_nano"],
    "nemotron3_ultra": ["nemotron_3_ultra", "nemotron_3_5_lightning"],
    "gemma4": ["gemma4_v5"],
    "lfm2_5": ["lfm2_2_5_v2"],
    "llama3": ["llama3"],
    "llama3_1": ["llama3_1", "llama3_2"],
}
"""Our template -> the models' own that it renders alike, by their names in TRL."""


class Row(NamedTuple):
    messages: list
    tools: list | None = None
    kwargs: dict = {}  # noqa: RUF012 (never changed)


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
    "unicode": [
        says("user", "\u00c4 \u20ac \U0001f600 \u4f60\u597d <b>&amp;</b>"),
        says("assistant", "\u00df\u200d \U0001f44d"),
    ],
    "white space": [
        says("user", " \n q \n\n"),
        says("assistant", "\n\n  a  \n"),
        Q2,
        says("assistant", "  b\n\tc\n\n"),
    ],
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
    "reasoning of line ends": [
        Q1,
        says("assistant", "a", reasoning="\n"),
        Q2,
        says("assistant", "\nb", reasoning="\n r \n"),
    ],
    "reasoning alone": [Q1, says("assistant", "", reasoning="Thought.")],
    "tags in the content": [Q1, T1, Q2, T2],
    "tags among line ends": [
        Q1,
        says("assistant", "\n\n<think>\n\nx\n\n</think>\n\n\na"),
        Q2,
        says("assistant", "<think>y</think>b"),
    ],
    "empty tags in the content": [Q1, says("assistant", "<think>\n\n</think>\n\na")],
    "open tag in the content": [Q1, says("assistant", "<think>a"), Q2, says("assistant", "b</think>")],
    "tags in a question": [says("user", "What is <think>x</think>?"), A1],
    "call": [Q1, CALLING, result("5")],
    "call and answer": [Q1, CALLING, result("5"), A1],
    "call beside text": [Q1, SAYING, result("5"), A1],
    "call after thought": [Q1, THINKING, result("5"), R1],
    "call after thought in an earlier turn": [SYSTEM, Q1, THINKING, result("5"), R1, Q2, A2],
    "call after thought, without answer": [Q1, THINKING, result("5")],
    "empty tags beside a call": [Q1, CALLING | {"content": "<think>\n\n</think>\n\n"}, result("5"), A1],
    "open tags beside a call": [Q1, CALLING | {"content": "a<think>b"}, result("5"), A1, Q2, A2],
    "closed tags beside a call": [Q1, CALLING | {"content": "a</think>b"}, result("5"), A1, Q2, A2],
    "call, then a question": [Q1, CALLING, result("5"), Q2, A2],
    "call without result, then a question": [Q1, CALLING, Q2, A2],
    "calls after calls": [Q1, CALLING, result("5"), SAYING, result("6"), A1],
    "two calls": [Q1, BOTH, result("5"), result("\u00e4 \u2013\n", "fly", 1), A1],
    "two calls beside text": [Q1, BOTH_SAID, result("5"), result("6", "fly", 1), A1],
    "two calls, then two more": [
        Q1,
        BOTH,
        result("5"),
        result("6", "fly", 1),
        BOTH,
        result("5"),
        result("6", "fly", 1),
        A1,
        Q2,
        A2,
    ],
    "call without arguments": [Q1, says("assistant", "", tool_calls=[call("rest")]), result("ok", "rest"), A1],
    "call last": [Q1, A1, Q2, CALLING],
    "result beside a question": [Q1, THINKING, says("user", "<tool_response>\n5\n</tool_response> Now?"), R1],
    "question before a result": [Q1, THINKING, says("user", "Now? <tool_response>\n5\n</tool_response>"), R1],
    "channels in the content": [Q1, says("assistant", "<|channel|>analysis<|message|>a"), Q2, A2],
    "channels in the reasoning": [Q1, says("assistant", "a", reasoning="<|channel|>final<|message|>b")],
    "results in a question": [Q1, THINKING, says("user", "<tool_response>\n5\n</tool_response>"), R1],
    "result of JSON": [Q1, CALLING, result('{"depth": 3, "ok": true}'), A1],
}
KWARGS = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"preserve_thinking": True},
    {"truncate_history_thinking": False},
    {"low_effort": True, "medium_effort": True, "reasoning_effort": "high", "tools_in_user_message": False},
]
SCHEMAS = {
    "types": {kind: {"type": kind} for kind in ("string", "number", "integer", "boolean", "array", "object", "null")},
    "words": {
        "a": {"type": "string", "description": "A\n\u2013 b", "title": "T"},
        "b": {"description": "any"},
        "c": {},
    },
    "choices": {
        "a": {"type": "string", "enum": ["x", "y"], "default": "x"},
        "b": {"type": "integer", "enum": [1, 2]},
        "c": {"enum": ["x"]},
    },
    "defaults": {"a": {"type": "integer", "default": 3}, "b": {"type": "array", "default": [1, None]}},
    "optional": {
        "a": {"type": "string", "nullable": True},
        "b": {"type": ["string", "null"]},
        "c": {"type": ["object"]},
    },
    "lists": {
        kind: {"type": "array", "items": {"type": kind, "description": "one"}, "nullable": kind == "string"}
        for kind in ("string", "number", "integer", "boolean", "object", "null")
    },
    "list of objects": {"a": {"type": "array", "items": POINT | {"description": "P"}, "description": "Several"}},
    "list of either": {"a": {"type": "array", "items": {"type": ["object", "object"]}}},
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
    for name, properties in SCHEMAS.items():
        schema = {"type": "object", "properties": properties}
        yield f"schema of {name}", Row([Q1, A1], [tool("f", schema), tool("g", schema | {"required": ["a", "string"]})])
    bare = {"type": "function", "function": {"name": "f", "description": "F"}}
    yield "schema missing", Row([Q1, A1], [bare])
    yield (
        "schema of more",
        Row([SYSTEM, Q1, A1], [tool("f", {"type": "object", "properties": {}, "$defs": {}}, strict=True)]),
    )
    for (name, chat), tools, kwargs in itertools.product(CHATS.items(), (None, TOOLS), KWARGS):
        words = [name, *["tools"] * bool(tools), *(f"{key}={value}" for key, value in kwargs.items())]
        yield ", ".join(words), Row(chat, tools, kwargs)


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
    name, is_plain, _ = name.partition(", without a thought")
    text = (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    if is_plain:  # V3's own writes as R1's does, and does not prompt for a thought
        assert text.count("<think>") == 1
        text = text.replace("<think>\\n", "")
    return text


def rendered(template, row, prompted=False, marks=False, **more):
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
            **more,
        )
    except (jinja2.TemplateError, TypeError):
        return None
    return (texts[0], stretches[0]) if marks else texts[0]


def wants_text(template):
    """True if a template joins a call's arguments as a text, as OpenAI's format has them."""
    return "+ tool['function']['arguments'] +" in template


def as_text(messages):
    return [
        message
        | {
            "tool_calls": [
                call
                | {
                    "function": call["function"]
                    | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
                }
                for call in message["tool_calls"]
            ]
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]


class Otherwise(NamedTuple):
    """Rows that a template of ours renders otherwise than the model's own."""

    ours: str
    theirs: tuple
    reason: str
    applies: object
    """True if it is about a row, with or without generation prompt."""
    expected: object = None
    """Right text there, from the own rendering; None: nothing is compared."""


def trains_last(row, prompted):
    return row.messages[-1]["role"] == "assistant" and not prompted


def reasons_last(row, prompted):
    last = row.messages[-1]
    return trains_last(row, prompted) and (last.get("reasoning_content") or "</think>" in last["content"])


def with_reasoning(row, text):
    last, end = row.messages[-1], "<\uff5cend\u2581of\u2581sentence\uff5c>"
    if row.messages[-2]["role"] == "tool":
        return text
    reasoning = last.get("reasoning_content")
    before, header, _ = text.rpartition("<\uff5cAssistant\uff5c>")
    return before + header + (f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "") + last["content"] + end


def systems(row):
    return [message["content"] for message in row.messages if message["role"] == "system"]


OTHERWISE = [
    Otherwise(
        "glm4_moe",
        ("glm4moe",),
        "the token at which generation stops, which the own template writes with the next message, ends the last turn",
        trains_last,
        lambda row, text: text + ("<|observation|>" if "tool_calls" in row.messages[-1] else "<|user|>"),
    ),
    Otherwise(
        "deepseek_r1",
        ("deepseekv3", "deepseek_r1_distill"),
        "the last turn has its reasoning, as it is generated; the own template leaves it out",
        reasons_last,
        with_reasoning,
    ),
    Otherwise(
        "deepseek_r1",
        ("deepseek_r1_distill",),
        "the own template leaves out tool calls beside a content, even an empty one",
        lambda row, prompted: any("tool_calls" in message for message in row.messages),
    ),
    Otherwise(
        "deepseek_r1",
        ("deepseek_r1_distill",),
        "the own template keeps the last system message alone",
        lambda row, prompted: len(systems(row)) > 1,
    ),
    Otherwise(
        "phi3",
        ("phi3",),
        "Phi-3.5 writes no empty system message, Phi-3 does",
        lambda row, prompted: "" in systems(row),
    ),
    Otherwise("gemma3", ("gemma",), "Gemma 1 and 2 refuse a system message", lambda row, prompted: bool(systems(row))),
    Otherwise(
        "nemotron3", ("nemotron_3_nano",), "Nano does not know it", lambda row, prompted: "low_effort" in row.kwargs
    ),
    Otherwise(
        "nemotron3_ultra",
        ("nemotron_3_5_lightning",),
        "Nemotron 3.5 does not know it",
        lambda row, prompted: "medium_effort" in row.kwargs,
    ),
]


@cache
def own_renderings(name):
    template = own(name)
    return {(which, prompted): rendered(template, ROWS[which], prompted) for which, prompted in EACH}


EACH = [*itertools.product(ROWS, (False, True))]
"""The rows, without and with generation prompt."""


def differences(ours, template, theirs, used=None, rows=EACH, **more):
    """Rows that a template does not render as the model's own, with both renderings."""
    num_compared = 0
    for name, prompted in rows:
        row = ROWS[name]
        own, other = rendered(template, row, prompted, **more), own_renderings(theirs)[name, prompted]
        known = [
            rule for rule in OTHERWISE if rule.ours == ours and theirs in rule.theirs and rule.applies(row, prompted)
        ]
        for rule in known:
            if used is not None and own != other:
                used.add(rule.reason)
            other = rule.expected(row, other) if rule.expected and other is not None else own
        num_compared += not known and None not in (own, other)
        if own != other:
            yield (name, prompted), own, other
    assert num_compared >= 400 or rows is not EACH, num_compared


PAIRS = {f"{ours}-{theirs}": (ours, theirs) for ours, names in TWINS.items() for theirs in names}


@pytest.mark.parametrize(
    "pair", others_by_turn(PAIRS, ["gemma3-gemma3", "gpt_oss-gptoss", "qwen2_5-qwen2_5", "qwen3_5-qwen3_5_think"])
)
def test_a_twin_renders_what_the_models_own_template_renders(pair):
    ours, theirs = PAIRS[pair]
    used = set()
    different = list(differences(ours, SHIPPED[ours].read_text(encoding="utf-8"), theirs, used))
    assert not different, f"{len(different)} of {2 * len(ROWS)}; the first: {different[0]}"
    assert used == {rule.reason for rule in OTHERWISE if rule.ours == ours and theirs in rule.theirs}


class Generation(Extension):
    """Lets jinja2 read the markers."""

    tags = {"generation"}  # noqa: RUF012 (never changed)


def literals(template):
    """Place and text of the string literals that a template writes, or looks for in texts; less those of `given`, which
    only say where the prompt ends and the assistant's part begins."""
    tokens = list(jinja2.Environment(extensions=[Generation]).lexer.tokeniter(template, None))
    place, stretches = 0, []
    for i, (_, kind, text) in enumerate(tokens):
        start = template.index(text, place)
        place = start + len(text)
        is_error = [word for _, _, word in tokens[max(0, i - 2) : i]] == ["raise_exception", "("]
        is_given = "given = " in template[:start].rpartition("\n")[2]
        if kind == "string" and re.search(r"[ <>]|\\n", text) and not is_error and not is_given:
            stretches.append((start, text))
    return stretches


@pytest.mark.parametrize("ours", others_by_turn(TWINS, ["qwen2_5"]))
def test_control_a_changed_byte_is_found(ours):
    """The literals go into the template as a list, so that it is compiled once."""
    template, theirs, missed, telling = SHIPPED[ours].read_text(encoding="utf-8"), TWINS[ours][0], [], []
    writes = literals(template)
    for i, (start, text) in reversed([*enumerate(writes)]):
        template = f"{template[:start]}literals[{i}]{template[start + len(text) :]}"
    texts = [ast.literal_eval(text) for _, text in writes]
    for i, text in enumerate(texts):
        changed = [*texts[:i], f"~{text[1:]}", *texts[i + 1 :]]
        if difference := next(differences(ours, template, theirs, rows=[*telling, *EACH], literals=changed), None):
            telling.insert(0, difference[0])  # the same row often tells of the next literal
        else:
            missed.append(text)
    assert len(writes) >= 4
    assert not missed
    assert not [*differences(ours, template, theirs, rows=telling, literals=texts)]


CALLED = '<tool_call>\n{"name": "dig", "arguments": {"depth": 3, "where": "here"}}\n</tool_call>'
IN_TAGS = (
    "<tool_call>\n<function=dig>\n<parameter=depth>\n3\n</parameter>\n<parameter=where>\nhere\n</parameter>\n"
    "</function>\n</tool_call>"
)
IN_GLM = (
    "\n<tool_call>dig\n<arg_key>depth</arg_key>\n<arg_value>3</arg_value>\n<arg_key>where</arg_key>\n"
    "<arg_value>here</arg_value>\n</tool_call><|observation|>"
)
IN_LLAMA = '{"name": "dig", "parameters": {"depth": 3, "where": "here"}}'
IN_HARMONY = ' to=functions.dig<|channel|>commentary json<|message|>{"depth": 3, "where": "here"}<|call|>'
IN_GEMMA = '<|tool_call>call:dig{depth:3,where:<|"|>here<|"|>}<tool_call|><|tool_response>'
DEEP_ENDS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
STRETCHES = {
    "alpaca": ["Answer one.</s>", "Answer two.</s>"],
    "chatml": ["Answer one.<|im_end|>", "Answer two.<|im_end|>"],
    "chatml_tools": [f"{CALLED}<|im_end|>", "<think>\nThought two.\n</think>\nAnswer two.<|im_end|>"],
    "deepseek_r1": [f"Answer one.{DEEP_ENDS}", f"Thought two.\n</think>\n\nAnswer two.{DEEP_ENDS}"],
    "deepseek_v3": [f"Answer one.{DEEP_ENDS}", f"Answer two.{DEEP_ENDS}"],
    "gemma3": ["Answer one.<end_of_turn>", "Answer two.<end_of_turn>"],
    "gemma4": [IN_GEMMA, "<|channel>thought\nThought two.\n<channel|>Answer two.<turn|>"],
    "glm4_moe": [f"\n<think></think>{IN_GLM}", "\n<think>Thought two.</think>\nAnswer two.<|user|>"],
    "gpt_oss": [
        IN_HARMONY,
        "<|channel|>analysis<|message|>Thought two.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Answer two.<|return|>",
    ],
    "lfm2_5": [
        "<|tool_call_start|>[dig(depth=3, where='here')]<|tool_call_end|><|im_end|>",
        "<think>Thought two.</think>Answer two.<|im_end|>",
    ],
    "llama3": ["Answer one.<|eot_id|>", "Answer two.<|eot_id|>"],
    "llama3_1": [f"{IN_LLAMA}<|eot_id|>", "Answer two.<|eot_id|>"],
    "nemotron3": [f"\n{IN_TAGS}\n<|im_end|>", "Thought two.\n</think>\nAnswer two.<|im_end|>"],
    "nemotron3_ultra": [f"\n{IN_TAGS}\n<|im_end|>", "Thought two.</think>Answer two.<|im_end|>"],
    "phi3": ["Answer one.<|end|>", "Answer two.<|end|>"],
    "qwen2_5": [f"{CALLED}<|im_end|>", "Answer two.<|im_end|>"],
    "qwen3": [f"{CALLED}<|im_end|>", "<think>\nThought two.\n</think>\n\nAnswer two.<|im_end|>"],
    "qwen3_2507": [f"{CALLED}<|im_end|>", "Answer two.<|im_end|>"],
    "qwen3_5": ["\n</think>\n\n" + IN_TAGS + "<|im_end|>", "Thought two.\n</think>\n\nAnswer two.<|im_end|>"],
    "qwen3_5_nothink": [IN_TAGS + "<|im_end|>", "Thought two.\n</think>\n\nAnswer two.<|im_end|>"],
    "qwen3_6": ["\n</think>\n\n" + IN_TAGS + "<|im_end|>", "Thought two.\n</think>\n\nAnswer two.<|im_end|>"],
    "tulu": ["Answer one.</s>", "Answer two.</s>"],
}
"""Marked stretches of a call and an answer with reasoning, or of two answers where the template writes no calls."""
NO_CALLS = {"alpaca", "chatml", "gemma3", "llama3", "phi3", "tulu"}
ONE_CALL = {"deepseek_r1", "deepseek_v3"}
"""Here by a chat without it: the turn of calls is in the test of all rows."""
ENDS = {
    "alpaca": ["</s>"],
    "chatml": ["<|im_end|>"],
    "deepseek_r1": [DEEP_ENDS],
    "deepseek_v3": [DEEP_ENDS],
    "gemma3": ["<end_of_turn>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "glm4_moe": ["<|user|>", "<|observation|>", "<|system|>"],
    "gpt_oss": ["<|return|>", "<|end|>", "<|call|>"],
    "llama3": ["<|eot_id|>"],
    "llama3_1": ["<|eot_id|>"],
    "phi3": ["<|end|>"],
    "tulu": ["</s>"],
}
"""Tokens that end a family's turns; those that are not here have ChatML's."""


def test_every_shipped_template_is_looked_at():
    assert set(SHIPPED) == set(STRETCHES) and set(TWINS) == set(SHIPPED) - {"alpaca", "chatml", "chatml_tools", "tulu"}


def test_the_page_has_a_row_for_every_shipped_template():
    page = (CHATML.parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    section = page.partition("### Chat templates")[2].partition("\n### ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(SHIPPED)


@pytest.mark.parametrize("name", others_by_turn(STRETCHES, TEMPLATES))
def test_the_assistants_part_is_marked(name):
    calls = [Q1, CALLING, result("5"), R2] if name not in NO_CALLS | ONE_CALL else [Q1, A1, Q2, R2]
    text, stretches = rendered(SHIPPED[name].read_text(encoding="utf-8"), Row(calls, TOOLS), marks=True)
    assert [text[start:end] for start, end in stretches] == STRETCHES[name]


@pytest.mark.parametrize("name", others_by_turn(STRETCHES, TEMPLATES))
def test_each_turn_is_one_stretch_that_ends_with_its_end_token(name):
    """In tokens, of a tokenizer that has the family's special ones."""
    template, ends = SHIPPED[name].read_text(encoding="utf-8"), ENDS.get(name, ENDS["chatml"])
    tokenizer = make_tokenizer(template, specials=[end for end in ends if end != "<|im_end|>"])
    num_turns, seen = 0, []
    for label, row in ROWS.items():
        written = rendered(template, row, marks=True)
        if (written, row.messages) in seen:  # with other keys for the template
            continue
        seen.append((written, row.messages))
        # An answer after an answer has no end in these families; Llama's tools stand in the first message, whose ever.
        if written is None or (name in ("glm4_moe", "gemma4") and "two answers in a row" in label):
            continue
        if name == "llama3_1" and label.startswith("assistant first, tools") and len(written[1]) == 1:
            continue
        text, stretches = written
        turns = [message for message in row.messages if message["role"] == "assistant"]
        assert len(stretches) == len(turns), label
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for (start, end), message in zip(stretches, turns, strict=True):
            ids = [
                token
                for token, (first, after) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
                if first >= start and after <= end
            ]
            assert tokenizer.decode(ids) == text[start:end], label
            assert tokenizer.decode(ids[-1:]) in ends, label
            if "tool_calls" not in message and "think" not in message["content"] and "<|" not in message["content"]:
                answer = text[start:end].removesuffix(tokenizer.decode(ids[-1:]))
                assert answer.strip().endswith(message["content"].strip()), label
            num_turns += 1
        unmarked = "".join(
            text[after:start]
            for after, start in zip(
                [0, *[e for _, e in stretches]], [*[s for s, _ in stretches], len(text)], strict=True
            )
        )
        assert "Answer" not in unmarked and "Thought" not in unmarked, label
    assert num_turns >= 40


@pytest.mark.parametrize("name", others_by_turn(STRETCHES, TEMPLATES))
def test_generation_stops_at_the_token_that_ends_a_turn(name):
    ends = ENDS.get(name, ENDS["chatml"])
    tokenizer = make_tokenizer(SHIPPED[name].read_text(encoding="utf-8"), specials={*ends, "</s>"} - {"<|im_end|>"})
    tokenizer.eos_token = "</s>"
    assert tokenizer.decode(end_of_turn(tokenizer)) == ends[0]


FITTING = {
    "one turn": [Q1, A1],
    "two turns": [SYSTEM, Q1, A1, Q2, A2],
    "reasoning": [Q1, R1],
    "reasoning in all turns": [Q1, R1, Q2, R2],
    "call": [Q1, CALLING],
    "call, reasoning": [Q1, THINKING, result("5"), R1],
}
KEEPS_TURNS = {
    "alpaca",
    "chatml",
    "chatml_tools",
    "gemma3",
    "llama3",
    "llama3_1",
    "phi3",
    "qwen2_5",
    "qwen3_2507",
    "tulu",
}
"""Templates under which every turn starts as generation is prompted for it; under the others the last does."""


@pytest.mark.parametrize("name", others_by_turn(STRETCHES, TEMPLATES))
def test_the_marked_part_is_what_follows_the_generation_prompt(name):
    template, num_turns = SHIPPED[name].read_text(encoding="utf-8"), 0
    for label, chat in FITTING.items():
        thinks = bool(chat[-1].get("reasoning_content"))
        row = Row(chat, TOOLS, {"enable_thinking": thinks})
        if name == "deepseek_r1" and not thinks:
            continue  # it is prompted to reason, whatever the row has
        if name == "gpt_oss" and label == "call, reasoning":
            continue  # what it thought before a call is gone from the chat once there is an answer
        written = rendered(template, row, marks=True)
        if written is None:
            continue
        text, stretches = written
        turns = [k for k, message in enumerate(chat) if message["role"] == "assistant"]
        for k, (start, _) in list(zip(turns, stretches, strict=True))[0 if name in KEEPS_TURNS else -1 :]:
            prompt = rendered(template, Row(chat[:k], TOOLS, row.kwargs), prompted=True)
            assert text[:start] == prompt, label
            num_turns += 1
    assert num_turns >= (2 if name == "deepseek_r1" else 4)


@pytest.mark.parametrize("name", sorted(KEEPS_TURNS))
def test_the_ids_of_the_generation_prompt_begin_the_chat(name):
    """For every turn, also where two line ends are one token."""
    template = SHIPPED[name].read_text(encoding="utf-8")
    tokenizer = make_tokenizer(
        template, merges=["\n\n", "\n\n\n"] * 9, specials=[*{*ENDS.get(name, [])} - {"<|im_end|>"}]
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert len(tokenizer("\n\nA")["input_ids"]) == 2
    num_turns, seen = 0, set()
    for label, row in ROWS.items():
        text = rendered(template, row)
        if text is None or "white space" in label or "line ends" in label:  # a text that starts with one
            continue
        ids = None
        for k in [k for k, message in enumerate(row.messages) if message["role"] == "assistant"]:
            prompt = rendered(template, Row(row.messages[:k], row.tools, row.kwargs), prompted=True)
            if prompt is not None and (text, prompt) not in seen:
                seen.add((text, prompt))
                ids = ids or tokenizer(text)["input_ids"]
                prompted = tokenizer(prompt)["input_ids"]
                assert ids[: len(prompted)] == prompted, label
                num_turns += 1
    assert num_turns >= 30


FIRST = "Below is an instruction that describes a task"
PAIRED = ", paired with an input that provides further context"
REQUEST = ". Write a response that appropriately completes the request.\n\n### Instruction:\n"


def test_alpacas_prompt_has_the_input_in_a_part_of_its_own():
    tokenizer = make_tokenizer(SHIPPED["alpaca"].read_text(encoding="utf-8"), bos="<s>")
    alpaca = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    wants = [
        (alpaca, f"<s>{FIRST}{PAIRED}{REQUEST}Add.\n\n### Input:\n1, 2\n\n### Response:\n[3<|im_end|>]"),
        (alpaca | {"input": ""}, f"<s>{FIRST}{REQUEST}Add.\n\n### Response:\n[3<|im_end|>]"),
        (
            alpaca | {"system": "Be brief."},
            "<s>Be brief.\n\n### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n[3<|im_end|>]",
        ),
    ]
    for raw, wanted in wants:
        (reading,) = [reading for reading in readings(raw.keys()) if reading.kind.matches(reading.of(raw))]
        rows = rows_of(reading.kind.name, [reading.kind.check(reading.of(raw))])
        assert marked(run_tokenize(rows, tokenizer)[0], 0, tokenizer) == wanted
        assert run_tokenize(rows, tokenizer, train_on="all")[0].is_label.all()


def test_alpacas_later_turns_are_prompted_for_again():
    row = Row([Q1, A1, Q2, A2])
    text = rendered(SHIPPED["alpaca"].read_text(encoding="utf-8"), row)
    answers = "One?\n\n### Response:\nAnswer one.</s>\n\n### Instruction:\nTwo?\n\n### Response:\nAnswer two.</s>"
    assert text == f"<s>{FIRST}{REQUEST}{answers}"


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.values())
def test_a_twin_is_found_by_what_it_renders(ours, theirs):
    tokenizer = make_tokenizer(own(theirs), bos="<s>")
    assert twin_of(tokenizer) == ours
    assert offer(tokenizer) == f"data.chat_template: {ours} renders the same and marks the assistant's tokens"


OTHERS = ["cohere", "cohere2", "gemma4_v2", "lfm2", "idefics3", "llava_next", "qwen3_8", "smolvlm"]


@pytest.mark.parametrize("theirs", OTHERS)
def test_a_template_of_another_family_has_no_twin(theirs):
    tokenizer = make_tokenizer(own(theirs), bos="<s>")
    assert twin_of(tokenizer) is None
    assert "such as chatml" in offer(tokenizer)


@pytest.mark.parametrize(
    "template",
    ["{{ 1 / 0 }}", "{{ messages[9].content }}", "{% for m in messages %}x{% endfor %}", "{{ no.such }}", ""],
)
def test_an_odd_template_has_no_twin(template):
    assert twin_of(make_tokenizer(template)) is None


def test_of_several_templates_the_one_that_transformers_takes_has_the_twin():
    qwen3, chatml = (SHIPPED[name].read_text(encoding="utf-8") for name in ("qwen3", "chatml"))
    with_tools = "{#- tools -#}" + qwen3
    tokenizer = make_tokenizer({"default": qwen3, "tool_use": with_tools, "rag": chatml})
    assert (own_template(tokenizer), own_template(tokenizer, has_tools=True)) == (qwen3, with_tools)
    assert twin_of(tokenizer) == "qwen3"
    tokenizer.chat_template = {"tool_use": chatml}
    assert own_template(tokenizer) == chatml and twin_of(tokenizer) == "chatml"
    tokenizer.chat_template = {"rag": chatml, "other": chatml}
    assert own_template(tokenizer) is None and twin_of(tokenizer) is None
