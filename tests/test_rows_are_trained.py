"""Random rows through shipped and hostile templates and tokenizers of every kind: what a row says is what is trained.

Either the row is refused, or its sample decodes to what transformers renders of it, each of its texts is there once and
in order, the labels are the trained texts and their ends, and what generation will be prompted with comes before each.
The oracle is transformers' own rendering and a search for words; it shares nothing with the encoder.

Run alone: python -m pytest -q tests/test_rows_are_trained.py
"""

import functools
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from read_back import Labelled, Outcome, ids_of, read_back
from row_files import WRITERS, write_json_lines
from small_data import chat as small_chat
from tiny_templates import tags
from tiny_tokenizers import KINDS, LOSSLESS, TEMPLATES, tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from cookbook.config.objectives import Objective
from cookbook.config.sections import DataSection
from cookbook.training.data.sets import read_data
from tests.turns import others_by_turn

Row = dict[str, Any]
Chat = list[dict[str, Any]]

TOOLS = (TEMPLATES / "chatml_tools.jinja").read_text(encoding="utf-8")
END = "<|im_end|>"
DAY = date(2026, 1, 31)


# Templates.


def in_json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Template:
    text: str
    arguments: Callable[[dict[str, Any]], Any] = lambda value: value
    """The form in which it writes the arguments of a call as JSON."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    """Keys of a recipe's data."""


PLAIN_USER = "{{ open ~ m.role ~ line ~ m.content ~ end }}"
HOSTILE = {
    "writes all": Template(tags()),
    "writes all, without markers": Template(tags(marks=False)),
    "drops the second call": Template(tags(calls="(m.tool_calls or [])[:1]")),
    "drops a system message": Template(tags(if_system="")),
    "drops results": Template(tags(result="{{ open ~ 'tool' ~ end }}")),
    "drops tools": Template(tags(of_tools="")),
    "drops the text beside calls": Template(tags(content="{{ '' if m.tool_calls else m.content }}")),
    "drops the names of calls": Template(tags(call="{{ '<call>' ~ (c.function.arguments | tojson) ~ '</call>' }}")),
    "drops reasoning": Template(tags(thought="")),
    "drops earlier reasoning": Template(
        tags(thought="{%- if m.reasoning_content and loop.last -%}{{ m.reasoning_content }}{%- endif -%}")
    ),
    "drops earlier reasoning, without markers": Template(
        tags(thought="{%- if m.reasoning_content and loop.last -%}{{ m.reasoning_content }}{%- endif -%}", marks=False)
    ),
    "strips thoughts": Template(tags(content="{{ m.content.split('</think>')[-1] }}")),
    "strips earlier thoughts": Template(
        tags(content="{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
    ),
    "strips thoughts of the user": Template(tags(of_user="{{ open ~ m.role ~ line ~ m.content.split('<')[0] ~ end }}")),
    "trims": Template(
        tags(content="{{ m.content | trim }}", of_user="{{ open ~ m.role ~ line ~ m.content | trim ~ end }}")
    ),
    "cuts": Template(tags(of_user="{{ open ~ m.role ~ line ~ m.content[:4] ~ end }}")),
    "cuts long texts": Template(tags(of_user="{{ open ~ m.role ~ line ~ m.content[:24] ~ end }}")),
    "adds to some texts": Template(tags(content="{{ m.content }}{{ ' SURE' if '.' in m.content }}")),
    "writes before its marker": Template(tags().replace("{% generation -%}", "{{ 'Answer: ' }}{% generation -%}")),
    "cuts calls": Template(tags(call="{{ '<call>' ~ (c.function | tojson)[:90] ~ '</call>' }}")),
    "prints tools": Template(tags(of_tools="{{ open ~ 'tools' ~ line ~ tools ~ end }}")),
    "lowers": Template(tags(of_user="{{ open ~ m.role ~ line ~ m.content | upper ~ end }}")),
    "escapes": Template(tags(of_user="{{ open ~ m.role ~ line ~ m.content | e ~ end }}")),
    "dates": Template(tags(before="{{ strftime_now('%d %b %Y') }}")),
    "prompts with a thought": Template(tags(prompt="{{ open ~ 'assistant' ~ line ~ '<think>' ~ line }}")),
    "prompts with a thought, without markers": Template(
        tags(prompt="{{ open ~ 'assistant' ~ line ~ '<think>' ~ line }}", marks=False)
    ),
    "prompts without a line end": Template(tags(prompt="{{ open ~ 'assistant' }}")),
    "has no prompt": Template(tags(prompt="")),
    "prints calls": Template(
        tags(call="{{ '<call>' ~ c.function.name ~ ' ' ~ c.function.arguments ~ '</call>' }}"), in_json
    ),
    "adds calls up": Template(
        tags(call="{{ '<call>' + c.function.name + ' ' + c.function.arguments + '</call>' }}"), in_json
    ),
    "iterates parts": Template(
        tags(
            content="{%- for p in m.content -%}{{ p.text }}{%- endfor -%}",
            of_user="{{ open ~ m.role ~ line }}{%- for p in m.content -%}{{ p.text }}{%- endfor -%}{{ end }}",
        )
    ),
    "writes the user twice": Template(tags(of_user=PLAIN_USER * 2)),
    "writes answers twice": Template(tags(content="{{ m.content ~ m.content }}")),
    "swaps": Template(tags(messages="messages | reverse")),
    "doubles the begin token": Template(tags(before="{{ bos_token ~ bos_token }}"), tokenizer={"bos": "<s>"}),
    "begins": Template(tags(before="{{ bos_token }}"), tokenizer={"bos": "<s>", "adds_bos": True}),
    "marks the header": Template(
        tags()
        .replace("{{ open ~ 'assistant' ~ line }}{% gen", "{% gen")
        .replace("-%}{%- if m.reas", "-%}{{ open ~ 'assistant' ~ line }}{%- if m.reas", 1)
    ),
    "marks without the end": Template(
        tags().replace("<|im_end|>{%- endgeneration %}", "{%- endgeneration %}<|im_end|>")
    ),
    "marks the user": Template(
        tags(of_user="{% generation %}{{ open ~ m.role ~ line ~ m.content ~ end }}{% endgeneration %}")
    ),
    "marks the last turn alone": Template(
        tags(marks=False).replace(
            "<|im_end|>",
            "{% if loop.last %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
            "{% else %}<|im_end|>{% endif %}",
            1,
        )
    ),
    "counts": Template(tags(before="{{ open ~ 'system' ~ line ~ (messages | length) ~ ' messages' ~ end }}")),
    "merges the system message into the user's": Template(
        tags(
            if_system="",
            of_user="{{ open ~ m.role ~ line }}{%- if messages[0].role == 'system' and loop.index == 2 -%}"
            "{{ messages[0].content ~ line ~ line }}{%- endif -%}{{ m.content ~ end }}",
        )
    ),
    "has tools before the last user's turn": Template(
        tags(
            of_tools="",
            of_user="{%- if tools and (messages | selectattr('role', 'equalto', 'user') | list)[-1] == m -%}"
            "{{ '<tools>' ~ (tools | tojson) ~ '</tools>' }}{%- endif -%}{{ open ~ m.role ~ line ~ m.content ~ end }}",
        )
    ),
    "refuses an order": Template(
        tags(
            before="{%- for m in messages -%}{%- if loop.first and m.role == 'assistant' -%}{{ raise_exception('no') }}"
            "{%- endif -%}{%- endfor -%}"
        )
    ),
    "speaks for a silent user": Template(tags(messages="[{'role': 'user', 'content': 'Go on.'}] + messages")),
}
SHIPPED = {
    path.stem: Template(text, tokenizer={"bos": "<s>"}, data={"template_date": DAY} if "strftime_now" in text else {})
    for path, text in ((path, path.read_text(encoding="utf-8")) for path in TEMPLATES.glob("*.jinja"))
}
ALL = HOSTILE | dict(sorted(SHIPPED.items()))
FAITHFUL = ("writes all", "writes all, without markers", "begins", "trims", "chatml", "chatml_tools", "tulu")
"""Never refuse a plain chat."""


# Rows.


@dataclass
class Writer:
    """Random rows, in which each text has words of its own."""

    chance: random.Random
    simple: bool = False
    """Letters of the alphabet and single spaces alone, and nothing of the templates."""
    counter: Iterator[int] = field(default_factory=itertools.count)

    def word(self) -> str:
        letters = "bcdfghjklmnprtvwxz"
        number, word = next(self.counter) + 400, ""
        while number:
            number, digit = divmod(number, len(letters))
            word += letters[digit] + self.chance.choice("aeiou")
        return word

    def text(self, *, of_assistant: bool = False) -> str:
        word, other = self.word(), self.word()
        forms = [word, f"{word} {other}", f"{word}, {other}."]
        if not self.simple:
            forms += [f" {word}", f"{word} ", f"\n{word}", f"{word}\n\n{other}", f"{word}  {other}", f"\n\n{word}\n"]
            forms += [
                f"é漢 {word}",
                f"{{{{ {word} }}}}",
                f'{{"a": "{word}"}}',
                f"<b>{word}</b> & {other}",
                f"{word}\\n",
            ]
            forms += [f"<think>{word}</think>{other}", f"<think>\n{word}\n</think>\n\n{other}"] * (1 + of_assistant)
            forms += [f"{word}<|im_end|>{other}"]
        return self.chance.choice(forms)

    def flip(self, share: float = 0.5) -> bool:
        return not self.simple and self.chance.random() < share

    def value(self) -> Any:
        return self.chance.choice([self.word(), 7, True, None, [self.word()], {self.word(): self.word()}, 1.5, "é"])

    def call(self) -> dict[str, Any]:
        arguments: Any = {self.word(): self.value() for _ in range(self.chance.randint(0, 2))}
        if self.flip():
            arguments = json.dumps(arguments)
        function = {"name": self.word(), "arguments": arguments}
        return {"id": self.word(), "type": "function", "function": function}

    def answer(self) -> Chat:
        """A turn of the assistant, with its calls and their results."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.text(of_assistant=True)}
        results: Chat = []
        if self.flip(0.4):
            turn[self.chance.choice(["reasoning", "reasoning_content", "thinking"])] = self.text()
        if self.flip(0.3):
            turn["tool_calls"] = [self.call() for _ in range(self.chance.randint(1, 2))]
            turn["content"] = self.chance.choice([turn["content"], "", None])
            results = [
                {"role": "tool", "content": self.text(), "tool_call_id": call["id"]} for call in turn["tool_calls"]
            ]
        if self.flip(0.2):
            turn |= self.chance.choice([{"train": False}, {"weight": 0}, {"loss": False}])
        return [turn, *results, *(self.answer() if results else [])]

    def row(self) -> Row:
        messages: Chat = []
        if self.flip(0.3):
            messages.append({"role": "system", "content": self.text()})
        if self.flip(0.1):
            messages += self.answer()
        for _ in range(self.chance.randint(1, 3)):
            messages += [{"role": "user", "content": self.text()} for _ in range(1 + self.flip(0.1))]
            messages += self.answer()
        if self.flip(0.1):
            messages.append({"role": "user", "content": self.text()})
        row: Row = {"messages": messages}
        if self.flip(0.3):
            parameters = {"type": "object", "properties": {self.word(): {"type": "string"}}}
            row["tools"] = [
                {
                    "type": "function",
                    "function": {"name": self.word(), "description": self.text(), "parameters": parameters},
                }
            ]
        return row


# The oracle.

MARKS = [*("<|im_start|>", END, "<s>", "</s>")]
REASONING = ("reasoning", "reasoning_content", "thinking")


def loaded(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def for_template(row: Row, template: Template) -> Chat:
    """The messages as a template is meant to get them."""
    chat = []
    for message in row["messages"]:
        given = {key: value for key, value in message.items() if key not in (*REASONING, "weight", "loss", "train")}
        given["content"] = message["content"] or ""
        if thought := next((message[key] for key in REASONING if key in message), None):
            given |= dict.fromkeys(REASONING, thought)
        if "tool_calls" in message:
            given["tool_calls"] = [
                call
                | {
                    "function": call["function"]
                    | {"arguments": template.arguments(loaded(call["function"]["arguments"]))}
                }
                for call in message["tool_calls"]
            ]
        chat.append(given)
    return chat


def leaves(value: Any) -> Iterator[str]:
    """The texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    for part in value if isinstance(value, list) else ():
        yield from leaves(part)
    for key, part in value.items() if isinstance(value, dict) else ():
        yield key
        yield from leaves(part)


def tool_texts(tools: list[Any] | None) -> list[str]:
    """Texts that must be written of tools in any form of a schema."""
    return [
        text
        for function in (tool["function"] for tool in tools or [])
        for text in (function["name"], *pieces(function["description"]), *function["parameters"]["properties"])
    ]


def pieces(text: str) -> list[str]:
    """The parts of a text between tags of reasoning, around which templates change white space."""
    return [piece for piece in re.split(r"\s*</?think>\s*", text) if piece.strip()]


def texts_of(message: dict[str, Any]) -> dict[str, list[str]]:
    """Texts that must be written of a message."""
    parts = {key: pieces(message[key]) for key in ("content", *REASONING) if message.get(key)}
    made = [
        [call["function"]["name"], *leaves(loaded(call["function"]["arguments"]))]
        for call in message.get("tool_calls", [])
    ]
    return parts | ({"tool_calls": list(itertools.chain(*made))} if made else {})


def rendered(tokenizer: PreTrainedTokenizerBase, chat: Chat, **options: Any) -> str:
    """Text that transformers writes, on the day of the recipe."""
    template = re.sub(
        r"strftime_now\((['\"])(.*?)\1\)", lambda match: repr(DAY.strftime(match[2])), tokenizer.chat_template
    )
    return tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, **options)


def as_written(text: str, key: str, see: Callable[[str], str]) -> str:
    """A text as it must be found: as it is, but for white space around it, or as JSON in a call."""
    return see(json.dumps(text, ensure_ascii=False)[1:-1] if key in ("tool_calls", "tools") else text.strip())


def shown(text: str, kind: str, marks: re.Pattern[str]) -> str:
    """Part of a text that a tokenizer of a kind can show: all, or all but spaces after marks, or but white space."""
    text = text.replace("▁", " ")
    if kind in ("words", "t5"):
        return re.sub(r"\s", "", text)
    return text if kind in LOSSLESS else re.sub(rf"(^|{marks.pattern}) *", r"\1", text)


OF_TEMPLATES = re.compile(
    r"[Nn]ull|None|[Tt]rue|[Ff]alse|thought|tool_?calls?|tool_sep|call|name|arguments|arg_key|arg_value|think|functions?|parameters?|type|id"
    r"|commentary|final|analysis|channel|message|json|constrain|to|start|end|assistant|return|é|[\W\d_]"
)
"""Text that templates write in a turn of the assistant, and values of arguments."""


def is_trained(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and not any(
        message.get(key) in (False, 0) for key in ("train", "weight", "loss")
    )


def faults(
    row: Row, template: Template, kind: str, tokenizer: PreTrainedTokenizerBase, sample: Labelled, notes: str = ""
) -> list[str]:
    """Faults of the sample of a row that has these notes."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    shown_as = {form for token in added for form in (token, token.replace("▁", " "), token.replace("▁", ""))}
    marks = re.compile("|".join(map(re.escape, sorted(shown_as, key=len, reverse=True))))
    see: Callable[[str], str] = functools.partial(shown, kind=kind, marks=marks)
    chat, tools, ids = for_template(row, template), row.get("tools"), ids_of(sample)
    problems = []
    whole = see(rendered(tokenizer, chat, tools=tools))
    text = see(tokenizer.decode(ids))
    if text != whole:
        problems.append(f"the sample is {text!r}, the template writes {whole!r}")
    if "twice" not in notes and (ids[0] == ids[1] or (ids[0] == tokenizer.bos_token_id and ids[0] in ids[1:])):
        problems.append(f"it begins twice: {text[:20]!r}")
    place = 0
    for number, message in enumerate(row["messages"], start=1):
        ends = [place]
        for key, texts in texts_of(message).items():
            dropped = "reasoning" in notes and not is_trained(message)
            if key in REASONING and dropped:
                continue
            for piece in texts:
                if dropped and piece in (message["content"] or "").rpartition("</think>")[0]:
                    continue
                forms = (key, "tools") if message["role"] == "tool" else (key,)  # gpt-oss has results in JSON
                word = next((w for form in forms if (w := as_written(piece, form, see)) in text[place:]), piece)
                at = text.find(word, place)
                if at < 0:
                    problems.append(f"message {number}: {key} {word!r} is not there, or not in its order")
                elif key != "tool_calls" and len(word) > 3 and text.count(word) > 1:
                    problems.append(f"message {number}: {key} {word!r} is there {text.count(word)} times")
                ends.append(at + len(word))
        place = max(ends)
    problems += [
        f"tools: {part!r} is not there"
        for part in tool_texts(tools)
        if not any(as_written(part, form, see) in text for form in ("tools", "content"))
    ]
    of_prompts = prompt_faults(row, chat, tools, tokenizer, sample, see, marks)
    if "generation is asked for" in notes:
        users = [k for k, message in enumerate(row["messages"]) if message["role"] == "user"]
        of_prompts = {k: problem for k, problem in of_prompts.items() if k < 0 or k > max(users, default=-1)}
    asked_for = prompts(row, chat, tools, tokenizer)
    return [*problems, *of_prompts.values(), *label_faults(row, see, marks, asked_for, tokenizer, sample)]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def without_marks(text: str) -> str:
    """The text with other letters in the place of special tokens, as many."""
    return re.sub("|".join(map(re.escape, MARKS)), lambda match: "=" * len(match[0]), text)


def prompt_faults(
    row: Row,
    chat: Chat,
    tools: list[Any] | None,
    tokenizer: PreTrainedTokenizerBase,
    sample: Labelled,
    see: Callable[[str], str],
    marks: re.Pattern[str],
) -> dict[int, str]:
    """Faults of the tokens before a trained message, by its index, and -1 for the special tokens of all.

    Before it stands the text of its prompt; since the last special token, which is at the end of an earlier turn or
    later, also the prompt's very tokens, and none of them carries loss.
    """
    problems, ids = {}, ids_of(sample)
    if any(mark in json.dumps(row) for mark in MARKS):  # which are text there, and tokens to transformers
        chat, tools = json.loads(without_marks(json.dumps([chat, tools])))
    special = special_ids(tokenizer)
    whole = tokenizer(rendered(tokenizer, chat, tools=tools), add_special_tokens=False)["input_ids"]
    if [token for token in ids if token in special] != [token for token in whole if token in special]:
        problems[-1] = f"the special tokens are those of {tokenizer.decode(ids)!r}"
    places = [i for i, token in enumerate(ids) if token in special]
    for k, texts in prompts(row, chat, tools, tokenizer).items():
        if without_marks(END) in re.split(marks.pattern, texts[0])[-1]:
            continue  # a text that is another here
        for text in texts:
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            of_prompt = [i for i, token in enumerate(prompt) if token in special]
            tail = prompt[of_prompt[-1] if of_prompt else 0 :]
            border = places[len(of_prompt) - 1] if 0 < len(of_prompt) <= len(places) else 0
            before = see(tokenizer.decode(ids[:border] + tail))
            if ids[border:][: len(tail)] == tail and without_marks(before) == without_marks(see(text)):
                if any(is_label for _, is_label in sample[border + 1 : border + len(tail)]):
                    problems[k] = f"message {k + 1}: the end of its prompt is trained: {tokenizer.decode(tail)!r}"
                break
        else:
            written = tokenizer.decode(ids[: border + len(tail)])
            problems[k] = f"message {k + 1} comes after {written!r}, its prompt is {text!r}"
    return problems


def stretches(sample: Labelled, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, int]]:
    """Each labelled stretch as text, with its last token; spaces stand where they stand in the whole."""
    ids, place, out = ids_of(sample), 0, []
    for is_label, run in itertools.groupby(sample, key=lambda pair: pair[1]):
        end = place + len(list(run))
        if is_label:
            text = tokenizer.decode(ids[:end])[len(tokenizer.decode(ids[:place])) :]
            last = [token for token in ids[place:end] if tokenizer.decode([token]).strip()]
            out.append((text, last[-1] if last else -1))
        place = end
    return out


ASKED: tuple[dict[str, bool], ...] = (
    {},
    *({key: value} for key in ("enable_thinking", "thinking") for value in (False, True)),
)
"""Variables by which templates choose how an answer is asked for."""


def prompts(row: Row, chat: Chat, tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase) -> dict[int, list[str]]:
    """Prompts that generation may have before each trained message; none where the template refuses that."""
    texts: dict[int, list[str]] = {}
    for k in [k for k, message in enumerate(row["messages"]) if is_trained(message)]:
        for variables in ASKED:
            with suppress(Exception):
                text = rendered(tokenizer, chat[:k], tools=tools, add_generation_prompt=True, **variables)
                texts.setdefault(k, []).append(text)
    return texts


def label_faults(
    row: Row,
    see: Callable[[str], str],
    marks: re.Pattern[str],
    prompts: dict[int, list[str]],
    tokenizer: PreTrainedTokenizerBase,
    sample: Labelled,
) -> list[str]:
    trained = [k for k, message in enumerate(row["messages"]) if is_trained(message)]
    labelled = stretches(sample, tokenizer)
    if len(labelled) != len(trained):
        return [f"{len(labelled)} trained stretches for {len(trained)} trained turns: {labelled}"]
    problems = []
    special = special_ids(tokenizer)
    for k, (text, last) in zip(trained, labelled, strict=True):
        if last not in special:
            problems.append(f"message {k + 1}: {text!r} does not end with an end token")
        rest = see(text)
        for key, texts in texts_of(row["messages"][k]).items():
            for part in texts:
                word = as_written(part, key, see)
                if word not in rest:  # its beginning may be the end of the prompt
                    asked = [see(text) for text in prompts.get(k, [])]
                    word = word[max(n for n in range(len(word)) if not n or any(a.endswith(word[:n]) for a in asked)) :]
                if word not in rest:
                    problems.append(f"message {k + 1}: {key} {word!r} is not trained in {rest!r}")
                rest = rest.replace(word, "", 1)
        rest = OF_TEMPLATES.sub("", marks.sub("", rest))
        if rest:
            problems.append(f"message {k + 1}: trained besides: {rest!r} in {text!r}")
    return problems


# The claims.


def rows_for(name: str, kind: str, count: int) -> list[Row]:
    writer = Writer(random.Random(f"{name} {kind}"), simple=kind == "words")
    return [writer.row() for _ in range(count)]


def outcome(row: Row, template: Template, kind: str, folder: Path) -> tuple[Outcome, PreTrainedTokenizerBase]:
    tokenizer = tiny_tokenizer(kind, template.text, **template.tokenizer)
    return read_back([row], tokenizer, folder, **template.data), tokenizer


ROWS_EACH = 2
TOKENIZERS = [kind for kind in KINDS if kind != "unknown_letters"]


@pytest.mark.parametrize("name", others_by_turn(ALL, [*list(HOSTILE)[::3], "chatml", "gpt_oss", "qwen3_5"]))
def test_a_row_is_refused_or_trained_as_it_is(name: str, tmp_path: Path):
    template, wrong, num_trained = ALL[name], [], 0
    for kind in TOKENIZERS:
        for row in rows_for(name, kind, ROWS_EACH):
            result, tokenizer = outcome(row, template, kind, tmp_path)
            if result.refused:
                continue
            num_trained += 1
            problems = faults(row, template, kind, tokenizer, result.samples[0], result.notes)
            if any(mark in json.dumps(row) for mark in MARKS) and "special token" not in result.notes:
                problems.append(f"no note of special tokens, but {result.notes!r}")
            wrong += [f"{kind}: {json.dumps(row, ensure_ascii=False)}: {problem}" for problem in problems]
    assert wrong[:3] == [], len(wrong)
    assert name not in SHIPPED or num_trained > 2


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", [name for name in FAITHFUL if name in ALL])
def test_a_plain_chat_is_not_refused(name: str, kind: str, tmp_path: Path):
    writer = Writer(random.Random(name), simple=True)
    for row in [writer.row() for _ in range(3)]:
        result, tokenizer = outcome(row, ALL[name], kind, tmp_path)
        assert not result.refused
        # Two of them have no token for a line's end.
        assert ("decode to another text" in result.notes) == bool(result.notes) == (kind in ("t5", "words"))
        assert faults(row, ALL[name], kind, tokenizer, result.samples[0]) == []


# That the oracle can see.


def shifted(sample: Labelled, **_: Any) -> Labelled:
    labels = [is_label for _, is_label in sample]
    return [(token, label) for (token, _), label in zip(sample, [False, *labels[:-1]], strict=True)]


def without_a_text(sample: Labelled, tokenizer: PreTrainedTokenizerBase, word: str) -> Labelled:
    ids = ids_of(sample)
    for start, end in itertools.combinations(range(len(ids)), 2):
        if tokenizer.decode(ids[start:end]).strip() == word:
            return sample[:start] + sample[end:]
    raise AssertionError(f"{word!r} is not there")


def with_a_space(sample: Labelled, tokenizer: PreTrainedTokenizerBase, **_: Any) -> Labelled:
    """A space before the first label, as a dummy prefix is."""
    first = [is_label for _, is_label in sample].index(True)
    (space,) = tokenizer(" ", add_special_tokens=False)["input_ids"][-1:]
    return [*sample[:first], (space, True), *sample[first:]]


def with_the_user(sample: Labelled, **_: Any) -> Labelled:
    return [(token, is_label or 2 < i < 8) for i, (token, is_label) in enumerate(sample)]


def without_the_end(sample: Labelled, **_: Any) -> Labelled:
    last = max(i for i, (_, is_label) in enumerate(sample) if is_label)
    return [(token, is_label and i != last) for i, (token, is_label) in enumerate(sample)]


def begun_twice(sample: Labelled, **_: Any) -> Labelled:
    return [sample[0], *sample]


def whole_turn_lost(sample: Labelled, **_: Any) -> Labelled:
    first = [is_label for _, is_label in sample].index(True)
    last = next(i for i in range(first, len(sample)) if not sample[i][1])
    return [(token, is_label and not first <= i < last) for i, (token, is_label) in enumerate(sample)]


MISTAKES = (shifted, without_a_text, with_a_space, with_the_user, without_the_end, begun_twice, whole_turn_lost)


@pytest.mark.parametrize("kind", ["bytes", "metaspace_always", "gemma"])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_wrong_encoder_is_seen(mistake: Callable[..., Labelled], kind: str, tmp_path: Path):
    row = small_chat("first question", "first answer", "second question", "second answer")
    template = SHIPPED["chatml"]
    result, tokenizer = outcome(row, template, kind, tmp_path)
    assert faults(row, template, kind, tokenizer, result.samples[0]) == []
    for word in ("first question", "second answer") if mistake is without_a_text else ("",):
        broken = mistake(result.samples[0], tokenizer=tokenizer, word=word)
        assert faults(row, template, kind, tokenizer, broken) != []


def test_most_hostile_templates_are_met_by_a_row_that_shows_it():
    """Each takes something away or adds something for a row that the test above has."""
    keys = [key for name in HOSTILE for kind in TOKENIZERS for row in rows_for(name, kind, ROWS_EACH) for key in row]
    assert keys.count("tools") > 50
    turns = [turn for name in HOSTILE for row in rows_for(name, "bytes", ROWS_EACH) for turn in row["messages"]]
    for has in (
        lambda turn: len(turn.get("tool_calls", [])) > 1,
        lambda turn: turn.get("tool_calls") and turn["content"],
        lambda turn: turn["role"] == "system",
        lambda turn: any(key in turn for key in REASONING),
        lambda turn: "</think>" in (turn["content"] or ""),
        lambda turn: not is_trained(turn) and turn["role"] == "assistant",
        lambda turn: END in (turn["content"] or ""),
    ):
        assert sum(map(bool, map(has, turns))) > 5


# The same rows in every format.


def as_texts(row: Row) -> Row:
    """The row with its arguments as text, since an Arrow table takes no values of several types."""
    for message in row["messages"]:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(loaded(call["function"]["arguments"]))
    return row


def test_the_same_rows_have_one_fingerprint_in_every_format(tmp_path: Path):
    writer, objective = Writer(random.Random(1)), Objective.of(name="sft")
    rows = [as_texts(writer.row()) for _ in range(30)]
    digests = {}
    for write in (write_json_lines, *(WRITERS[form] for form in ("json", "csv", "parquet", "arrow file"))):
        path = str(write(tmp_path, rows))
        for streaming in (False, True):
            data = DataSection.model_validate({"train": path, "streaming": streaming, "on_bad_row": "drop"})
            (part,) = read_data(data, objective).train
            assert len(part.rows) > 20
            digests[path, streaming] = part.fingerprint
    assert len(set(digests.values())) == 1, digests
