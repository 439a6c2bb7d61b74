"""Fate of rows in the formats that other projects document: what is trained of each, or why it is refused.

    python benchmarks/foreign_formats.py

Writes docs/data.md, in seconds; a test compares the page with what the code does now. One example row of each format
goes through the reading and tokenizing of a run, with recipes/chat_templates/chatml_tools.jinja.
"""

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "data.md"
TEMPLATE = ROOT / "recipes" / "chat_templates" / "chatml_tools.jinja"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format that a project documents, with an example row."""

    project: str
    name: str
    row: Row
    objective: str = "sft"
    data: dict[str, Any] = field(default_factory=dict)
    """Keys of `data` that these rows need."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Samples of the example row with notes, or its refusal."""

    kind: str = ""
    """Name of the kind that it was read as."""
    texts: Sequence[str] = ()
    """Its sequences, trained stretches in marks."""
    notes: Sequence[str] = ()
    refused: str = ""


# The formats.


def user(text: Any = "What colour is the sky?", **more: Any) -> Row:
    return {"role": "user", "content": text, **more}


def assistant(text: Any = "Blue.", **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


def human(text: str = "What colour is the sky?", **more: Any) -> Row:
    return {"from": "human", "value": text, **more}


def gpt(text: str = "Blue.", **more: Any) -> Row:
    return {"from": "gpt", "value": text, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
ARGUMENTS = {"room": "hall"}
TOOL = {
    "type": "function",
    "function": {
        "name": "light",
        "parameters": {"type": "object", "properties": {"room": {"type": "string"}}},
    },
}


def called(arguments: Any, **more: Any) -> list[Row]:
    call = {"id": "call_1", "type": "function", "function": {"name": "light", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "on"}
    return [user("Light in the hall!"), assistant(None, tool_calls=[call], **more), result, assistant("Done.")]


TWICE = [user(), assistant("Red."), user("Sure?"), assistant("Blue.")]


def formats_of(project: str, *formats: tuple[Any, ...]) -> list[Format]:
    """Each with its name, an example row, the objective if it is not sft, and the keys of `data` that it needs."""
    return [
        Format(project=project, **dict(zip(("name", "row", "objective", "data"), values, strict=False)))
        for values in formats
    ]


FORMATS = [
    *formats_of(
        "TRL",
        ("language modelling", {"text": "The sky is blue."}, "cpt"),
        ("language modelling, conversational", {"messages": [user(), assistant()]}),
        ("prompt and completion", {"prompt": "The sky is", "completion": " blue."}),
        ("prompt and completion, conversational", {"prompt": [user()], "completion": [assistant()]}),
        ("prompt only", {"prompt": [user()]}),
        ("preference", {"prompt": "The sky is", "chosen": " blue.", "rejected": " red."}, "dpo"),
        ("preference with an implicit prompt", {"chosen": "The sky is blue.", "rejected": "The sky is red."}, "dpo"),
        (
            "preference, conversational",
            {"prompt": [user()], "chosen": [assistant()], "rejected": [assistant("Red.")]},
            "dpo",
        ),
        (
            "preference, conversational, with an implicit prompt",
            {"chosen": [user(), assistant()], "rejected": [user(), assistant("Red.")]},
            "dpo",
        ),
        ("unpaired preference", {"prompt": "The sky is", "completion": " blue.", "label": True}, "kto_zero"),
        (
            "unpaired preference, conversational",
            {"prompt": [user()], "completion": [assistant("Red.")], "label": False},
            "kto_zero",
        ),
        (
            "stepwise supervision",
            {"prompt": "2 + 2 * 2?", "completions": ["2 * 2 = 4.", "So 6."], "labels": [True, True]},
        ),
        ("tools and tool calls", {"messages": called(ARGUMENTS), "tools": [TOOL]}),
        ("reasoning (`thinking`)", {"messages": [user(), assistant(thinking="Think of noon.")]}),
        (
            "keywords of the template",
            {"messages": [user(), assistant()], "chat_template_kwargs": {"enable_thinking": False}},
        ),
        ("pictures", {"images": ["sky.png"], "messages": [user("<image>What colour?"), assistant()]}),
    ),
    *formats_of(
        "axolotl",
        ("`chat_template`", {"conversations": [user(), assistant()]}),
        ("`sharegpt`", {"conversations": [human(), gpt()]}),
        ("`pygmalion`", {"conversations": [{"role": "user", "value": "Hi"}, {"role": "assistant", "value": "Hello."}]}),
        (
            "`pygmalion`, with the columns named",
            {"conversations": [{"role": "user", "value": "Hi"}, {"role": "assistant", "value": "Hello."}]},
            "sft",
            {"columns": {"messages": "conversations", "content": "value"}},
        ),
        (
            "`message_field_training`",
            {"conversations": [human(), gpt("Red.", train=False), human("Sure?"), gpt("Blue.", train=True)]},
        ),
        (
            "`message_field_training_detail`",
            {
                "conversations": [
                    human(),
                    gpt("Well, blue.", train_detail=[{"begin_offset": 0, "end_offset": 5, "train": False}]),
                ]
            },
        ),
        ("`alpaca`", {"instruction": "Translate.", "input": "Ciel", "output": "Sky"}),
        ("`jeopardy`", {"question": "What colour is the sky?", "category": "NATURE", "answer": "Blue."}),
        ("`gpteacher`", {"instruction": "Translate.", "input": "Ciel", "response": "Sky"}),
        (
            "`alpaca_w_system.load_open_orca`",
            {"system_prompt": "Be brief.", "question": "What colour is the sky?", "response": "Blue."},
        ),
        ("`context_qa.load_v2`", {"context": "The sky is blue.", "question": "Which colour?", "answer": "Blue."}),
        ("`context_qa`", {"article": "The sky is blue.", "question": "Which colour?", "answer": "Blue."}),
        ("`summarizetldr`", {"article": "The sky is blue today.", "summary": "Blue sky."}),
        (
            "`summarizetldr`, with the columns named",
            {"article": "The sky is blue today.", "summary": "Blue sky."},
            "sft",
            {"columns": {"user": "article", "assistant": "summary"}},
        ),
        ("`reflection`", {"instruction": "Which colour?", "output": "Red.", "reflection": "No.", "corrected": "Blue."}),
        ("`metharme`", {"prompt": "Which colour?", "generation": "Blue."}),
        ("`completion`", {"text": "The sky is blue."}, "cpt"),
        (
            "`input_output` (template-free)",
            {"segments": [{"label": False, "text": "The sky is"}, {"label": True, "text": " blue."}]},
        ),
        ("pre-tokenized", {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, 6, 7]}),
        (
            "`chatml.argilla`",
            {
                "system": "Be brief.",
                "instruction": "Which colour?",
                "chosen_response": "Blue.",
                "rejected_response": "Red.",
            },
            "dpo",
        ),
        (
            "`chatml.intel`",
            {"system": "Be brief.", "question": "Which colour?", "chosen": "Blue.", "rejected": "Red."},
            "dpo",
        ),
        (
            "`chatml.ultra`",
            {
                "system": "Be brief.",
                "prompt": "Which colour?",
                "chosen": [user("Which colour?"), assistant()],
                "rejected": [user("Which colour?"), assistant("Red.")],
            },
            "dpo",
        ),
        (
            "`chat_template.default` (DPO)",
            {"messages": [SYSTEM, user()], "chosen": assistant(), "rejected": assistant("Red.")},
            "dpo",
        ),
        (
            "`zephyr.nectar`",
            {"prompt": "Which colour?", "answers": [{"answer": "Blue.", "rank": 1}, {"answer": "Red.", "rank": 2}]},
            "dpo",
        ),
        (
            "`user_defined.default` (KTO)",
            {"system": "Be brief.", "prompt": "Which colour?", "completion": "Blue.", "label": "true"},
            "kto_zero",
        ),
    ),
    *formats_of(
        "LLaMA-Factory",
        (
            "alpaca, with `system` and `history`",
            {
                "instruction": "And at night?",
                "input": "",
                "output": "Black.",
                "system": "Be brief.",
                "history": [["What colour is the sky?", "Blue."]],
            },
        ),
        (
            "alpaca, preference",
            {"instruction": "Which colour?", "input": "At noon.", "chosen": "Blue.", "rejected": "Red."},
            "dpo",
        ),
        ("alpaca, KTO", {"instruction": "Which colour?", "input": "", "output": "Blue.", "kto_tag": True}, "kto_zero"),
        (
            "alpaca, KTO, with the columns named",
            {"instruction": "Which colour?", "input": "", "output": "Blue.", "kto_tag": True},
            "kto_zero",
            {"columns": {"prompt": "instruction", "completion": "output", "label": "kto_tag"}},
        ),
        ("alpaca, pictures", {"instruction": "Which colour?", "input": "", "output": "Blue.", "images": ["sky.png"]}),
        (
            "sharegpt, with `system` and `tools`",
            {
                "conversations": [
                    human("Light in the hall!"),
                    {"from": "function_call", "value": json.dumps({"name": "light", "arguments": ARGUMENTS})},
                    {"from": "observation", "value": "on"},
                    gpt("Done."),
                ],
                "system": "Be brief.",
                "tools": json.dumps([TOOL["function"]]),
            },
        ),
        ("sharegpt, preference", {"conversations": [human()], "chosen": gpt(), "rejected": gpt("Red.")}, "dpo"),
        ("sharegpt, KTO", {"conversations": [human(), gpt()], "kto_tag": True}, "kto_zero"),
        (
            "sharegpt, KTO, with the columns named",
            {"conversations": [human(), gpt()], "kto_tag": True},
            "kto_zero",
            {"columns": {"messages": "conversations", "label": "kto_tag"}},
        ),
        ("KTO of messages", {"messages": [user(), assistant("Red.")], "label": False}, "kto_zero"),
        ("KTO of messages, under sft", {"messages": [user(), assistant("Red.")], "label": False}),
        ("openai", {"messages": [SYSTEM, user(), assistant()]}),
        (
            "v1, parts with `loss_weight`",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "value": "Which colour?"}], "loss_weight": 0.0},
                    {"role": "assistant", "content": [{"type": "text", "value": "Blue."}], "loss_weight": 1.0},
                ]
            },
        ),
    ),
    *formats_of(
        "Unsloth",
        ("raw corpus", {"text": "The sky is blue."}, "cpt"),
        ("Alpaca", {"Instruction": "Translate.", "Input": "Ciel", "Output": "Sky"}),
        (
            "Alpaca, with the columns named",
            {"Instruction": "Translate.", "Input": "Ciel", "Output": "Sky"},
            "sft",
            {"columns": {"user": "Instruction", "context": "Input", "assistant": "Output"}},
        ),
        ("ShareGPT", {"conversations": [human(), gpt(), human("Sure?"), gpt("Yes.")]}),
        ("ChatML", {"messages": [user(), assistant(), user("Sure?"), assistant("Yes.")]}),
        (
            "vision",
            {
                "messages": [
                    user([{"type": "text", "text": "Which colour?"}, {"type": "image", "image": "sky.png"}]),
                    assistant([{"type": "text", "text": "Blue."}]),
                ]
            },
        ),
        (
            "`text` beside the columns it was made of",
            {"instruction": "Which colour?", "output": "Blue.", "text": "### Which colour?\nBlue."},
        ),
    ),
    *formats_of(
        "OpenAI",
        ("chat", {"messages": [SYSTEM, user(), assistant()]}),
        ("`weight`", {"messages": [TWICE[0], TWICE[1] | {"weight": 0}, TWICE[2], TWICE[3] | {"weight": 1}]}),
        (
            "`tools`, arguments as text",
            {"messages": called(json.dumps(ARGUMENTS)), "tools": [TOOL], "parallel_tool_calls": False},
        ),
        (
            "`functions` and `function_call` (older)",
            {
                "messages": [
                    user("Light in the hall!"),
                    assistant(None, function_call={"name": "light", "arguments": json.dumps(ARGUMENTS)}),
                    {"role": "function", "name": "light", "content": "on"},
                    assistant("Done."),
                ],
                "functions": [TOOL["function"]],
            },
        ),
        (
            "names and a developer",
            {"messages": [{"role": "developer", "content": "Be brief."}, user(name="ann"), assistant()]},
        ),
        (
            "content as parts",
            {
                "messages": [
                    user([{"type": "text", "text": "Which colour?"}]),
                    assistant([{"type": "text", "text": "Blue."}]),
                ]
            },
        ),
        (
            "picture",
            {"messages": [user([{"type": "image_url", "image_url": {"url": "https://x/sky.png"}}]), assistant()]},
        ),
        (
            "refusal",
            {
                "messages": [
                    user("How to pick a lock?"),
                    {"role": "assistant", "content": None, "refusal": "I can't help."},
                ]
            },
        ),
        (
            "preference",
            {
                "input": {"messages": [user()], "tools": [], "parallel_tool_calls": True},
                "preferred_output": [assistant()],
                "non_preferred_output": [assistant("Red.")],
            },
            "dpo",
        ),
        ("prompt and completion (older)", {"prompt": "The sky is", "completion": " blue."}),
    ),
]


# The page.


def outcome(form: Format, tokenizer: Any, folder: Path) -> Outcome:
    """Outcome of the example row in a run."""
    from pydantic import ValidationError

    from cookbook.commands.preview.sample_page import MARK, mark_text
    from cookbook.config.objectives import Objective
    from cookbook.config.sections import DataSection
    from cookbook.system.files import RecipeError
    from cookbook.training.data.sets import read_data, tokenize_data
    from cookbook.training.data.tokens import TokenSet

    path = folder / "rows.jsonl"
    path.write_text(json.dumps(form.row) + "\n", encoding="utf-8")
    data = DataSection.model_validate({"train": str(path), "max_length": 1024} | form.data)
    objective = Objective.of(name=form.objective)
    try:
        rows = read_data(data, objective)
        sets = tokenize_data(rows, tokenizer, data, objective, cache=folder / "cache")
    except (RecipeError, ValidationError) as error:
        return Outcome(refused=str(error).replace(str(path), path.name).replace(str(ROOT) + "/", ""))
    tokens = sets.train
    assert isinstance(tokens, TokenSet)
    texts = [mark_text(tokens, i, tokenizer, MARK.format) for i in range(tokens.group_size)]
    return Outcome(kind=rows.train[0].kind, texts=texts, notes=[note.partition(": ")[2] for note in sets.notes])


@cache
def outcomes() -> list[tuple[Format, Outcome]]:
    from cookbook.training.models.tokenizer_files import train_tokenizer

    tokenizer = train_tokenizer(["a"], 300)
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="foreign-formats-") as folder:
        return [(form, outcome(form, tokenizer, Path(folder))) for form in FORMATS]


HEAD = """\
# Formats of other projects

What becomes of a row in the formats that TRL, axolotl, LLaMA-Factory, Unsloth and OpenAI document: what it is read as,
and which tokens are trained (between {begin} and {end}), or with which words it is refused. Nothing is converted
beforehand: `data.train` names the file. Shapes and columns are explained in [recipes](recipes.md#your-data).

Written by `python benchmarks/foreign_formats.py` with `recipes/chat_templates/chatml_tools.jinja`; a test compares the
page with what the code does. Of {count} formats {read} are read and {refused} are refused.
"""


def keys_of(row: Row) -> str:
    """The columns, and the keys of messages beyond role and content."""
    beyond = {
        key
        for value in row.values()
        for message in (value if isinstance(value, list) else ())
        if isinstance(message, dict)
        for key in message
    } - {"role", "content", "type", "function"}
    shown = [f"`{key}`" for key in row]
    if "messages" in row or "conversations" in row:
        shown += [f"`{key}` in messages" for key in sorted(beyond)]
    return ", ".join(shown)


def anchor(heading: str) -> str:
    """The fragment of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def summary(form: Format, result: Outcome) -> str:
    if result.refused:
        return "refused"
    return f"`{result.kind}`" + (f" under `{form.objective}`" if form.objective != "sft" else "")


def page() -> str:
    """docs/data.md, from what the code does."""
    from cookbook.commands.preview.sample_page import MARK

    results, begin, end = outcomes(), *MARK.split("{}")
    num_refused = sum(bool(result.refused) for _, result in results)
    lines = [
        HEAD.format(begin=begin, end=end, count=len(results), read=len(results) - num_refused, refused=num_refused)
    ]
    lines += ["| project | format | keys | read as |", "|---|---|---|---|"]
    for form, what in results:
        link = f"[{form.name}](#{anchor(f'{form.project}: {form.name}')})"
        lines.append(f"| {form.project} | {link} | {keys_of(form.row)} | {summary(form, what)} |")
    for form, what in results:
        lines += [f"\n## {form.project}: {form.name}\n", "```json", json.dumps(form.row, ensure_ascii=False), "```\n"]
        keys = "".join(f", with `data.{key}: {flow(value)}`" for key, value in form.data.items())
        under = f"objective `{form.objective}`{keys}"
        if what.refused:
            lines += [f"Refused under {under}:\n", "```text", what.refused, "```"]
            continue
        lines += [
            f"Read as `{what.kind}` under {under}:\n",
            "```text",
            *(text.rstrip("\n") for text in what.texts),
            "```",
        ]
        lines += [f"\nNote: {note}." for note in what.notes]
    return "\n".join(lines) + "\n"


def flow(value: Row) -> str:
    """A mapping as a recipe has it in one line."""
    return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
