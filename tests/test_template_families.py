"""Templates that behave like those of the families in use: what is trained of three rows, or why each is refused.

None is a copy: each has its family's habits (where the system message goes, what it trims or cuts, how a turn ends,
where tools stand), in as few words as show them. Run alone: python -m pytest -q tests/test_template_families.py
"""

import re
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from read_back import Outcome, read_back
from tiny_tokenizers import tiny_tokenizer

CALLS = [
    {"id": "callid00" + str(i), "type": "function", "function": {"name": name, "arguments": {"x": i}}}
    for i, name in enumerate(("ONE", "TWO"))
]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("ONE", "TWO")]
PLAIN = [
    {"role": "system", "content": "SYS"},
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "U2"},
    {"role": "assistant", "content": "A2"},
]
THOUGHT = [
    *PLAIN[:2],
    PLAIN[2] | {"reasoning_content": "R1"},
    PLAIN[3],
    PLAIN[4] | {"reasoning_content": "R2"},
]
WHOLE = [
    *THOUGHT[:4],
    {"role": "assistant", "content": "", "tool_calls": CALLS, "reasoning_content": "RC"},
    *(
        {"role": "tool", "content": f"T{i}", "tool_call_id": call["id"], "name": call["function"]["name"]}
        for i, call in enumerate(CALLS)
    ),
    THOUGHT[4],
]
ROWS: dict[str, dict[str, Any]] = {
    "plain": {"messages": PLAIN},
    "thought": {"messages": THOUGHT},
    "whole": {"messages": WHOLE, "tools": TOOLS},
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template with what is trained of each row: the stretches, or the pattern of a refusal."""

    text: str
    tokenizer: dict[str, Any] = field(default_factory=dict)
    kind: str = "bytes"
    plain: list[str] | str
    """The chat of two turns with a system message."""
    last: list[str] | str
    """That chat with train_on last."""
    thought: list[str] | str
    """With reasoning in both turns."""
    whole: list[str] | str
    """With tools, parallel calls, their results and reasoning."""
    shows: str = ""
    """Beginning of the plain sample."""
    data: dict[str, Any] = field(default_factory=dict)


def each(
    system: str, user: str, assistant: str, prompt: str, *, before: str = "", tool: str = "", after: str = ""
) -> str:
    """A template that writes the content c of each message m by its role."""
    return (
        f"{before}{{%- for m in messages -%}}{{%- set c = m.content -%}}{{%- if m.role == 'system' -%}}{system}"
        f"{{%- elif m.role == 'user' -%}}{user}{{%- elif m.role == 'assistant' -%}}{assistant}"
        f"{{%- else -%}}{tool}{{%- endif -%}}{{%- endfor -%}}{after}"
        f"{{%- if add_generation_prompt -%}}{prompt}{{%- endif -%}}"
    )


def out(*parts: str) -> str:
    """Writes parts of Jinja one after another."""
    return "{{ " + " ~ ".join(parts) + " }}"


def chatml(assistant: str, *, system: str | None = None, before: str = "", prompt: str = "", tool: str = "") -> str:
    turn = out("'<|im_start|>' ", "m.role", "'\\n'", "c", "'<|im_end|>\\n'")
    begun = out("'<|im_start|>assistant\\n'")
    return each(
        system if system is not None else turn,
        turn,
        begun + assistant + out("'<|im_end|>\\n'"),
        begun + prompt,
        before=before,
        tool=tool,
    )


DEFAULT_SYSTEM = "{%- if messages[0].role != 'system' -%}<|im_start|>system\nBe good.<|im_end|>\n{%- endif -%}"
XML_CALLS = (
    "{%- for one in m.tool_calls or [] -%}{{ '\\n' if c or not loop.first }}{{ '<tool_call>\\n' ~ "
    "(one.function | tojson) ~"
    " '\\n</tool_call>' }}{%- endfor -%}"
)
XML_RESULTS = (
    "{%- if loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}{{ '\\n<tool_response>\\n' ~ c ~"
    " '\\n</tool_response>' }}{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}"
)
XML_TOOLS = (
    "{%- if tools -%}{{ '<|im_start|>system\\n' ~ (messages[0].content if messages[0].role == "
    "'system') ~ (tools | tojson) ~ '<|im_end|>\\n' }}{%- endif -%}"
)
NOT_FIRST = "{%- if not (tools and loop.first) -%}{{ '<|im_start|>system\\n' ~ c ~ '<|im_end|>\\n' }}{%- endif -%}"
LAST_USER = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set "
    "ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
THINK = "{%- if m.reasoning_content -%}{{ '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}{%- endif -%}"

NO_REASONING = "reasoning"
NO_TOOLS = "tools|tool_calls|reasoning"
NO_PREFIX = "generation prompt|prompted for"

LLAMA = each(
    out("'<|start_header_id|>system<|end_header_id|>\\n\\n'", "c | trim", "'<|eot_id|>'"),
    out("'<|start_header_id|>user<|end_header_id|>\\n\\n'", "c | trim", "'<|eot_id|>'"),
    out("'<|start_header_id|>assistant<|end_header_id|>\\n\\n'")
    + "{%- if m.tool_calls and m.tool_calls | length > 1 -%}{{ raise_exception('one call at a time') }}{%- endif -%}"
    + out("c | trim", "'<|eot_id|>'"),
    out("'<|start_header_id|>assistant<|end_header_id|>\\n\\n'"),
    before="{{ bos_token }}",
    tool=out("'<|start_header_id|>ipython<|end_header_id|>\\n\\n'", "c", "'<|eot_id|>'"),
)
LLAMA_TOKENS = {"bos": "<s>", "adds_bos": True, "eos": "<|eot_id|>"}
DATED = "{{ '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' ~ strftime_now('%d %b %Y') ~ '<|eot_id|>' }}"
INST = (
    "{{ bos_token }}{%- if messages[0].role == 'system' -%}{%- set s = '<<SYS>>\\n' ~ messages[0].content ~ "
    "'\\n<</SYS>>"
    "\\n\\n' -%}{%- set ms = messages[1:] -%}{%- else -%}{%- set s = '' -%}{%- set ms = messages -%}{%- endif -%}"
    "{%- for m in ms -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles "
    "must alternate')"
    " }}{%- endif -%}{%- if m.role == 'user' -%}{{ '[INST] ' ~ (s if loop.first) ~ m.content ~ ' [/INST]' "
    "}}{%- else -%}"
    "{{ ' ' ~ m.content ~ ' ' ~ eos_token }}{%- endif -%}{%- endfor -%}"
)
MISTRAL = (
    "{{ bos_token }}{%- set s = '' -%}{%- if messages[0].role == 'system' -%}{%- set s = messages[0].content "
    "~ '\\n\\n' -%}"
    "{%- set messages = messages[1:] -%}{%- endif -%}{%- set last = (messages | selectattr('role', 'equalto', 'user') |"
    " list)[-1] -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- if tools and m == last -%}{{ "
    "'[AVAILABLE_TOOLS]"
    "' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{%- endif -%}{{ '[INST]' ~ (s if m == last) ~ m.content ~ "
    "'[/INST]' }}"
    "{%- elif m.tool_calls -%}{{ '[TOOL_CALLS]' ~ (m.tool_calls | map(attribute='function') | list | tojson) "
    "~ eos_token }}"
    "{%- elif m.role == 'tool' -%}{{ '[TOOL_RESULTS]' ~ ({'content': m.content, 'call_id': m.tool_call_id} | tojson) ~"
    " '[/TOOL_RESULTS]' }}{%- else -%}{{ m.content ~ eos_token }}{%- endif -%}{%- endfor -%}"
)
MISTRAL_7 = each(
    out("'[SYSTEM_PROMPT]'", "c", "'[/SYSTEM_PROMPT]'"),
    out("'[INST]'", "c", "'[/INST]'"),
    out("c") + "{%- for one in m.tool_calls or [] -%}{{ '[TOOL_CALLS]' ~ one.function.name ~ '[ARGS]' ~ "
    "(one.function.arguments |"
    " tojson) }}{%- endfor -%}{{ eos_token }}",
    "",
    before=(
        "{{ bos_token }}{%- if tools -%}{{ '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' "
        "}}{%- endif -%}"
    ),
    tool=out("'[TOOL_RESULTS]'", "c", "'[/TOOL_RESULTS]'"),
)
S_TOKENS = {"bos": "<s>", "adds_bos": True, "eos": "</s>"}
QWEN3_TURN = (
    "{%- set thought = m.reasoning_content or '' -%}{%- if loop.index0 > ns.last and (loop.last or thought) "
    "-%}{{ '<think>"
    "\\n' ~ thought ~ '\\n</think>\\n\\n' }}{%- endif -%}" + out("c") + XML_CALLS
)
GEMMA_TURN = out(
    "'<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role)", "'\\n'", "c | trim", "'<end_of_turn>\\n'"
)
GEMMA = each(
    "{{ raise_exception('no system message') }}",
    GEMMA_TURN,
    GEMMA_TURN,
    out("'<start_of_turn>model\\n'"),
    before="{{ bos_token }}",
)
GEMMA3 = each(
    "",
    out(
        "'<start_of_turn>user\\n'",
        "(messages[0].content ~ '\\n\\n' if loop.index0 == 1 and messages[0].role == 'system' else '')",
        "c | trim",
        "'<end_of_turn>\\n'",
    ),
    GEMMA_TURN,
    out("'<start_of_turn>model\\n'"),
    before="{{ bos_token }}",
)
GEMMA_TOKENS = {"bos": "<s>", "adds_bos": True, "eos": "</s>"}
PHI3_TURN = out("'<|' ~ m.role ~ '|>\\n'", "c", "'<|end|>\\n'")
PHI3 = each(
    PHI3_TURN,
    PHI3_TURN,
    PHI3_TURN,
    out("'<|assistant|>\\n'"),
    after="{%- if not add_generation_prompt -%}{{ eos_token }}{%- endif -%}",
)
PHI4_TURN = out("'<|im_start|>' ~ m.role ~ '<|im_sep|>'", "c", "'<|im_end|>'")
PHI4 = each(PHI4_TURN, PHI4_TURN, PHI4_TURN, out("'<|im_start|>assistant<|im_sep|>'"))
DEEPSEEK = each(
    out("c"),
    out("'<|User|>'", "c"),
    out("'<|Assistant|>'")
    + "{%- if m.tool_calls -%}{{ '<|calls|>' }}{%- for one in m.tool_calls -%}{{ one.function.name ~ '<|sep|>' ~"
    " (one.function.arguments | tojson) }}{%- endfor -%}{%- endif -%}"
    + out("c.split('</think>')[-1]", "'<|end_of_sentence|>'"),
    out("'<|Assistant|>'"),
    before="{{ bos_token }}{%- if tools -%}{{ tools | tojson }}{%- endif -%}",
    tool=out("'<|result|>'", "c"),
)
R1 = DEEPSEEK.replace("{{ '<|Assistant|>' }}{%- endif -%}", "{{ '<|Assistant|><think>\\n' }}{%- endif -%}")
GLM_TURN = out("'<|' ~ m.role ~ '|>\\n'", "c")
GLM = each(GLM_TURN, GLM_TURN, GLM_TURN, out("'<|assistant|>\\n'"), before="[gMASK]<sop>")
OSS = "{{ '<|start|>system<|message|>' ~ strftime_now('%Y-%m-%d') ~ '<|end|>' }}" + each(
    out("'<|start|>developer<|message|>'", "c", "'<|end|>'"),
    out("'<|start|>user<|message|>'", "c", "'<|end|>'"),
    "{%- if m.reasoning_content and loop.last -%}{{ '<|start|>assistant<|channel|>analysis<|message|>' ~"
    " m.reasoning_content ~ '<|end|>' }}{%- endif -%}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' ~ c ~ ('<|return|>' if loop.last else '<|end|>') }}",
    out("'<|start|>assistant'"),
)
PLAIN_TAGS = each(
    out("'<|system|>\\n'", "c", "'\\n'"),
    out("'<|user|>\\n'", "c", "'\\n'"),
    out("'<|assistant|>\\n'", "c", "eos_token", "('' if loop.last else '\\n')"),
    out("'<|assistant|>\\n'"),
    before="{{ bos_token }}",
)
ZEPHYR = each(
    *[out(f"'<|{role}|>\\n'", "c", "eos_token", "'\\n'") for role in ("system", "user", "assistant")],
    out("'<|assistant|>\\n'"),
)
VICUNA = each(out("c", "' '"), out("'USER: '", "c", "' '"), out("'ASSISTANT: '", "c", "eos_token"), out("'ASSISTANT:'"))
ALPACA = each(
    out("c", "'\\n\\n'"),
    out("'### Instruction:\\n'", "c", "'\\n\\n'"),
    out("'### Response:\\n'", "c", "eos_token", "'\\n\\n'"),
    out("'### Response:\\n'"),
)
COHERE_TURN = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>"
COHERE = each(
    *[out(f"'{COHERE_TURN.format(role)}'", "c", "'<|END_OF_TURN_TOKEN|>'") for role in ("SYSTEM", "USER", "CHATBOT")],
    out(f"'{COHERE_TURN.format('CHATBOT')}'"),
    before="{{ bos_token }}",
)
GRANITE_TURN = out("'<|start_of_role|>' ~ m.role ~ '<|end_of_role|>'", "c", "'<|end_of_text|>\\n'")
GRANITE = each(GRANITE_TURN, GRANITE_TURN, GRANITE_TURN, out("'<|start_of_role|>assistant<|end_of_role|>'"))
EXAONE = each(
    out("'[|system|]'", "c", "'[|endofturn|]\\n'"),
    out("'[|user|]'", "c", "'\\n'"),
    out("'[|assistant|]'", "(c.split('</think>')[-1] | trim)", "'[|endofturn|]\\n'"),
    out("'[|assistant|]'"),
)
EXAONE_TOKENS = {"eos": "[|endofturn|]", "more": ["[|endofturn|]"]}
KIMI_TURN = out("'<|im_' ~ m.role ~ '|>' ~ m.role ~ '<|im_middle|>'", "c", "'<|im_end|>'")
KIMI = each(KIMI_TURN, KIMI_TURN, KIMI_TURN, out("'<|im_assistant|>assistant<|im_middle|>'"))
SEED_TURN = out("bos_token ~ m.role ~ '\\n'", "c", "eos_token")
SEED = each(SEED_TURN, SEED_TURN, SEED_TURN, out("bos_token ~ 'assistant\\n'"))
BOTH = ["A1<|im_end|>", "A2<|im_end|>"]


def ends(end: str) -> dict[str, list[str]]:
    return {"plain": [f"A1{end}", f"A2{end}"], "last": [f"A2{end}"]}


def refused(words: str) -> dict[str, str]:
    return dict.fromkeys(("plain", "last", "thought", "whole"), words)


NEITHER: dict[str, Any] = {"thought": NO_REASONING, "whole": NO_TOOLS}
FAMILIES = {
    "Llama 3": Family(
        text=LLAMA, tokenizer=LLAMA_TOKENS, **ends("<|eot_id|>"), thought=NO_REASONING, whole="one call at a time"
    ),
    "Llama 3.1, with a date": Family(
        text=LLAMA.replace("{{ bos_token }}", "{{ bos_token }}" + DATED),
        tokenizer=LLAMA_TOKENS,
        **refused("template_date"),
    ),
    "Llama 3.1, with the recipe's date": Family(
        text=LLAMA.replace("{{ bos_token }}", "{{ bos_token }}" + DATED),
        tokenizer=LLAMA_TOKENS,
        data={"template_date": date(2024, 7, 26)},
        shows="<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024<|eot_id|>",
        **ends("<|eot_id|>"),
        thought=NO_REASONING,
        whole="one call at a time",
    ),
    "Llama 2": Family(
        text=INST,
        tokenizer=S_TOKENS,
        shows="<s>[INST] <<SYS>>\nSYS\n<</SYS>>\n\nU1 [/INST]",
        plain=[" A1 </s>", " A2 </s>"],
        last=[" A2 </s>"],
        thought=NO_REASONING,
        whole="roles must alternate",
    ),
    "Mistral 0.3": Family(
        text=MISTRAL,
        tokenizer=S_TOKENS,
        plain=NO_PREFIX,
        last=["A2</s>"],
        thought=f"{NO_PREFIX}|reasoning",
        whole=f"{NO_PREFIX}|tool",
    ),
    "Mistral Small 3": Family(
        text=MISTRAL_7,
        tokenizer=S_TOKENS,
        shows="<s>[SYSTEM_PROMPT]SYS[/SYSTEM_PROMPT][INST]U1[/INST]",
        **ends("</s>"),
        **NEITHER,
    ),
    "Mistral Small 3, reasoning accepted": Family(
        text=MISTRAL_7,
        tokenizer=S_TOKENS,
        data={"accept": ["reasoning", "name"]},
        **ends("</s>"),
        thought=["A1</s>", "A2</s>"],
        whole=["A1</s>", '[TOOL_CALLS]ONE[ARGS]{"x": 0}[TOOL_CALLS]TWO[ARGS]{"x": 1}</s>', "A2</s>"],
    ),
    "Qwen2.5, OLMo-hybrid, SmolLM2": Family(
        text=chatml(out("c") + XML_CALLS, system=NOT_FIRST, before=DEFAULT_SYSTEM + XML_TOOLS, tool=XML_RESULTS),
        shows="<|im_start|>system\nSYS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n",
        **ends("<|im_end|>"),
        **NEITHER,
    ),
    "Qwen2.5, reasoning accepted": Family(
        text=chatml(out("c") + XML_CALLS, system=NOT_FIRST, before=DEFAULT_SYSTEM + XML_TOOLS, tool=XML_RESULTS),
        data={"accept": ["reasoning", "name"]},
        **ends("<|im_end|>"),
        thought=BOTH,
        whole=[
            "A1<|im_end|>",
            '<tool_call>\n{"name": "ONE", "arguments": {"x": 0}}\n</tool_call>\n'
            '<tool_call>\n{"name": "TWO", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
            "A2<|im_end|>",
        ],
    ),
    "Qwen3": Family(
        text=chatml(QWEN3_TURN, system=NOT_FIRST, before=LAST_USER + XML_TOOLS, tool=XML_RESULTS),
        plain=NO_PREFIX,
        last=["<think>\n\n</think>\n\nA2<|im_end|>"],
        thought=f"{NO_PREFIX}|reasoning",
        whole=f"{NO_PREFIX}|reasoning",
    ),
    "SmolLM3, LFM2, keeping all": Family(
        text=chatml(THINK + out("c"), tool=out("'<|im_start|>tool\\n'", "c", "'<|im_end|>\\n'")),
        **ends("<|im_end|>"),
        thought=[f"<think>\nR{i}\n</think>\n\nA{i}<|im_end|>" for i in (1, 2)],
        whole=NO_TOOLS,
    ),
    "LFM2, dropping earlier thoughts": Family(
        text=chatml("{%- if loop.last -%}" + THINK + "{%- endif -%}" + out("c")),
        plain=BOTH,
        last=BOTH[1:],
        thought=f"{NO_PREFIX}|reasoning",
        whole=f"{NO_PREFIX}|tool|reasoning",
    ),
    "a prompt that thinks (Qwen3-Thinking, Nemotron)": Family(
        text=chatml(out("c"), prompt="{{ '<think>\\n' }}"),
        plain=NO_PREFIX,
        last=NO_PREFIX,
        thought=f"{NO_PREFIX}|reasoning",
        whole=f"{NO_PREFIX}|tool|reasoning",
    ),
    "Gemma 2": Family(
        text=GEMMA,
        tokenizer=GEMMA_TOKENS,
        kind="gemma",
        **refused("no system message"),
    ),
    "Gemma 3": Family(
        text=GEMMA3,
        tokenizer=GEMMA_TOKENS,
        kind="gemma",
        shows="<s><start_of_turn>user\nSYS\n\nU1<end_of_turn>\n",
        **ends("<end_of_turn>"),
        **NEITHER,
    ),
    "Phi 3": Family(
        text=PHI3,
        tokenizer={"eos": "<|endoftext|>", "more": ["<|endoftext|>"]},
        plain=NO_PREFIX,
        last=["A2<|end|>\n<|endoftext|>"],
        thought=f"{NO_PREFIX}|reasoning",
        whole=f"{NO_PREFIX}|tool|reasoning",
    ),
    "Phi 4": Family(text=PHI4, **ends("<|im_end|>"), **NEITHER),
    "DeepSeek V3": Family(
        text=DEEPSEEK, tokenizer={"bos": "<s>", "eos": "<|end_of_sentence|>"}, **ends("<|end_of_sentence|>"), **NEITHER
    ),
    "DeepSeek R1": Family(
        text=R1,
        tokenizer={"bos": "<s>", "eos": "<|end_of_sentence|>"},
        plain=NO_PREFIX,
        last=NO_PREFIX,
        thought=f"{NO_PREFIX}|reasoning",
        whole=f"{NO_PREFIX}|reasoning",
    ),
    "GLM 4": Family(
        text=GLM,
        tokenizer={"eos": "<|user|>"},
        plain="stop",
        last="stop",
        thought="stop|reasoning",
        whole=f"stop|{NO_PREFIX}",
    ),
    "gpt-oss": Family(
        text=OSS,
        tokenizer={"eos": "<|return|>"},
        **refused("template_date"),
    ),
    "gpt-oss, with a date": Family(
        text=OSS,
        tokenizer={"eos": "<|return|>"},
        data={"template_date": date(2025, 8, 5)},
        plain=NO_PREFIX,
        last=["<|channel|>final<|message|>A2<|return|>"],
        thought=f"{NO_PREFIX}|reasoning",
        whole=f"{NO_PREFIX}|tool|reasoning",
    ),
    "OLMo 2, OLMoE, Tulu": Family(text=PLAIN_TAGS, tokenizer=S_TOKENS, **ends("</s>"), **NEITHER),
    "Zephyr, StableLM": Family(text=ZEPHYR, tokenizer={"eos": "</s>"}, kind="llama2", **ends("</s>"), **NEITHER),
    "Vicuna": Family(
        text=VICUNA, tokenizer={"eos": "</s>"}, kind="llama2", plain=[" A1</s>", " A2</s>"], last=[" A2</s>"], **NEITHER
    ),
    "Alpaca": Family(text=ALPACA, tokenizer={"eos": "</s>"}, kind="metaspace_first", **ends("</s>"), **NEITHER),
    "Command R": Family(
        text=COHERE,
        tokenizer={"bos": "<s>", "eos": "<|END_OF_TURN_TOKEN|>"},
        **ends("<|END_OF_TURN_TOKEN|>"),
        **NEITHER,
    ),
    "Granite 3": Family(text=GRANITE, tokenizer={"eos": "<|end_of_text|>"}, **ends("<|end_of_text|>"), **NEITHER),
    "EXAONE 4": Family(text=EXAONE, tokenizer=EXAONE_TOKENS, **ends("[|endofturn|]"), **NEITHER),
    "Kimi K2": Family(text=KIMI, **ends("<|im_end|>"), **NEITHER),
    "Seed-OSS, with a begin token a turn": Family(
        text=SEED, tokenizer={"bos": "<s>", "eos": "</s>"}, **ends("</s>"), **NEITHER
    ),
}


def trained(outcome: Outcome) -> list[str]:
    """The trained stretches, without white space at their ends."""
    return [text.rstrip() for text in re.findall(r"\[\[(?!\|?[a-z]+\|?\])(.*?)\]\](?!\])", outcome.texts[0], re.DOTALL)]


@pytest.mark.parametrize("row", [*ROWS, "last"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_trained_as_its_family_writes_it(name: str, row: str, tmp_path: Path):
    family = FAMILIES[name]
    right = getattr(family, row)
    objective = {"train_on": "last" if row == "last" else "assistant"}
    tokenizer = tiny_tokenizer(family.kind, family.text, **family.tokenizer)
    outcome = read_back([ROWS.get(row, ROWS["plain"])], tokenizer, tmp_path, objective=objective, **family.data)
    if isinstance(right, str):
        assert re.search(right, outcome.refused, re.DOTALL), outcome
    else:
        assert outcome.refused == ""
        assert trained(outcome) == right
        assert row != "plain" or outcome.texts[0].startswith(family.shows)
