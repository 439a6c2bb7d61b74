"""Protects which tokens carry loss, how long samples are cut or split, and the cache of what was tokenised.

python -m pytest -q tests/test_data_tokens.py
"""

import itertools
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from small_data import CHATML, ROOT, chat, make_tokenizer, marked, rows_of, run_tokenize, token_set
from tiny_tokenizers import tiny_tokenizer
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from cookbook.config.chat_templates import CHATML_TOOLS, template_path
from cookbook.config.objectives import Objective
from cookbook.config.sections import DataSection, Source
from cookbook.system.files import RecipeError
from cookbook.training.data import tokens as tokens_module
from cookbook.training.data.borders import Pieces
from cookbook.training.data.encode import TextKeys
from cookbook.training.data.rows import Rows, read_rows
from cookbook.training.data.stream import Stream
from cookbook.training.data.tokens import cached_tokens, ids_beyond, take
from cookbook.training.models.new_tokens import add_tokens


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_chat_labels_are_the_answers_with_their_end_of_turn(tokenizer):
    system = {"messages": [{"role": "system", "content": "s"}, *chat("hi", "ho", "a", "b c")["messages"]]}
    tokens, num_dropped = run_tokenize(rows_of("messages", [chat("hi", "\u00e4\n"), system]), tokenizer)
    assert marked(tokens, 0, tokenizer) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[\u00e4\n<|im_end|>]\n"
    )
    assert marked(tokens, 1, tokenizer) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[ho<|im_end|>]\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b c<|im_end|>]\n"
    )
    # One token per byte: the umlaut's two, the line end and the end of turn; "ho" and "b c" with one each.
    assert tokens.num_targets.tolist() == [4, 3 + 4]
    assert num_dropped == {}
    assert (tokens.ids.dtype, tokens.is_label.dtype, tokens.offsets.dtype) == (np.int32, np.bool_, np.int64)


def test_a_stretch_of_text_has_all_tokens_of_its_characters(tokenizer):
    """The smiley has four, the umlaut two."""
    text = "h\U0001f600i\u00e4"
    encoding, ids = tokenizer(text).encodings[0], tokenizer(text).input_ids
    assert len(ids) == 8
    for start, end in itertools.combinations(range(len(text) + 1), 2):
        first, last = Pieces(tokenizer).range_of(encoding, ids, text, start, end)
        assert tokenizer.decode(ids[first:last]) == text[start:end]


def test_shipped_template_writes_what_generation_is_prompted_with(tokenizer):
    prompt = tokenizer.apply_chat_template(chat("hi")["messages"], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    whole = tokenizer.apply_chat_template(chat("hi", "ho")["messages"], tokenize=False)
    assert whole == prompt + "ho<|im_end|>\n"


# A small template with the markers in the right place (the control), and three with them in a wrong one.
TURNS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}ANSWER{% endif %}{% endfor %}"
ANSWERS = {
    "control": ("{% generation %}{{ m.content + eos_token }}{% endgeneration %}", None),
    "line end after the end of turn": ("{% generation %}{{ m.content + eos_token + '\n' }}{% endgeneration %}", None),
    "no markers": ("{{ m.content + eos_token }}", None),
    "no markers, no end of turn": (
        "{{ m.content }}",
        "row 1: the trained part of an assistant turn ends with 'b' and no special token, so the model would never",
    ),
    "no markers, turn without words": (
        "",
        r"row 1: the chat template has no generation markers, and does not write message 2 .* objective.train_on: all",
    ),
    "no markers, earlier answers left out": (
        "{% if loop.last %}{{ m.content + eos_token }}{% endif %}",
        "row 1: the chat template has no generation markers, and does not write message 2 as it would be prompted",
    ),
    "end of turn outside": (
        "{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}",
        "row 1: the trained part of an assistant turn ends with 'b' and no special token, so the model would never",
    ),
    "markers around nothing": (
        "{% generation %}{% endgeneration %}{{ m.content + eos_token }}",
        "row 1: the chat template marks 0 stretches of assistant tokens for 2 assistant turns",
    ),
    "two markers that touch": (
        "{% generation %}{{ m.content }}{% endgeneration %}{% generation %}{{ eos_token }}{% endgeneration %}",
        None,
    ),
    "first turn only": (
        "{% if loop.first or loop.index == 2 %}"
        "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endif %}",
        "row 1: the chat template marks 1 stretches of assistant tokens for 2 assistant turns",
    ),
}


@pytest.mark.parametrize(("answer", "message"), ANSWERS.values(), ids=ANSWERS.keys())
def test_template_that_cannot_teach_is_refused(answer, message):
    rows, tokenizer = rows_of("messages", [chat("a", "b", "c", "d")]), make_tokenizer(TURNS.replace("ANSWER", answer))
    if message is None:
        assert run_tokenize(rows, tokenizer)[0].num_targets.tolist() in ([4], [6])
        return
    with pytest.raises(RecipeError, match=message):
        run_tokenize(rows, tokenizer)


def test_a_template_whose_end_of_turn_the_tokenizer_lacks_names_the_key_that_adds_it():
    answer = "{% generation %}{{ m.content + '<|ends|>' }}{% endgeneration %}"
    rows, tokenizer = rows_of("messages", [chat("a", "b")]), make_tokenizer(TURNS.replace("ANSWER", answer))
    with pytest.raises(RecipeError, match=r'write model.new_tokens: \["<\|ends\|>"\]$'):
        run_tokenize(rows, tokenizer)
    add_tokens(tokenizer, ["<|ends|>"])
    assert marked(run_tokenize(rows, tokenizer)[0], 0, tokenizer) == "a[b<|ends|>]"


@pytest.mark.parametrize(
    ("expression", "key"),
    [
        ("{{ m.mood }}", "mood"),
        ("{% if m['is_final'] is true %}!{% endif %}", "is_final"),
        ("{% if m.get('level', 0) > 1 %}!{% endif %}", "level"),
        ("{% for c in m.id or [] %}{{ c }}{% endfor %}", None),
        ("{{ m.mood if m.role == 'system' }}", "mood"),
    ],
)
def test_a_key_of_messages_that_the_template_reads_is_not_left_out_in_silence(expression, key, tmp_path):
    """transformers hands whole messages on to it, and here it gets those keys that are known."""
    turn = "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    template = TURNS.replace("{% for m in messages %}", "{% for m in messages %}" + expression)
    tokenizer = make_tokenizer(template.replace("ANSWER", turn))
    more = {"mood": "sad", "is_final": True, "level": 2}
    rows = [{"messages": [message | more for message in chat("a", "b")["messages"]]}]

    def read(ignore: list[str]) -> Rows:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_rows(Source(path=str(tmp_path / "rows.jsonl"), ignore=ignore), "error", Objective.of())

    # What was tokenized of the same rows without the keys is not taken for these.
    plain, asking = read(["messages.mood", "messages.is_final", "messages.level"]), read([])
    assert plain.rows == asking.rows and asking.unread == "not read: messages.is_final, messages.level, messages.mood"
    assert run_cached(tmp_path, plain, tokenizer)[0].num_targets.tolist() == [2]
    if key is None:
        assert run_cached(tmp_path, asking, tokenizer)[0].num_targets.tolist() == [2]
        return
    told = rf"the chat template reads messages\.{key}, which it is not given; .* data.ignore: \[messages.{key}\]"
    with pytest.raises(RecipeError, match=told):
        run_cached(tmp_path, asking, tokenizer)


def test_template_without_markers_serves_train_on_all():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    tokenizer = make_tokenizer(template)
    tokens, _ = run_tokenize(rows_of("messages", [chat("ab", "c")]), tokenizer, train_on="all")
    assert marked(tokens, 0, tokenizer) == "[abc<|im_end|>]"


def test_missing_template_names_the_shipped_one():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RecipeError, match=r"data.chat_template: chatml"):
        run_tokenize(rows_of("messages", [chat("a", "b")]), tokenizer)
    assert CHATML.is_file()


def test_chat_that_the_template_refuses_is_a_bad_row():
    template = CHATML.read_text().replace(
        "{%- for",
        "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}{%- for",
        1,
    )
    system = {"messages": [{"role": "system", "content": "s"}, *chat("a", "b")["messages"]]}
    rows = rows_of("messages", [chat("a", "b"), system, chat("c", "d")])
    tokens, num_dropped = run_tokenize(rows, make_tokenizer(template), on_bad_row="drop")
    assert len(tokens) == 2 and num_dropped == {"refused by the chat template": 1}
    with pytest.raises(RecipeError, match=r"data\.train: row 2: refused by the chat template: no system role"):
        run_tokenize(rows, make_tokenizer(template))


@pytest.mark.parametrize(
    ("kind", "row", "train_on", "bos", "expected"),
    [
        ("completion", {"prompt": "ab", "completion": "cd"}, "assistant", None, "ab[cd<|im_end|>]"),
        ("completion", {"prompt": "ab", "completion": "cd<|im_end|>"}, "assistant", None, "ab[cd<|im_end|>]"),
        ("completion", {"prompt": "ab", "completion": "cd"}, "all", None, "[abcd<|im_end|>]"),
        ("completion", {"prompt": "ab", "completion": "cd"}, "assistant", "<s>", "<s>ab[cd<|im_end|>]"),
        ("text", {"text": "ab"}, "assistant", None, "[ab<|im_end|>]"),
        ("text", {"text": "ab"}, "all", "<s>", "[<s>ab<|im_end|>]"),
    ],
)
def test_completion_and_text_labels(kind, row, train_on, bos, expected):
    tokenizer = make_tokenizer(bos=bos)
    tokens, _ = run_tokenize(rows_of(kind, [row]), tokenizer, train_on=train_on)
    assert marked(tokens, 0, tokenizer) == expected
    # A label at the first position has nothing before it that could predict it.
    assert tokens.num_targets.tolist() == [int(tokens.is_label[1:].sum())]


def test_a_begin_token_that_the_tokenizer_has_and_does_not_write_is_not_added():
    tokenizer = make_tokenizer(specials=["<s>"])
    tokenizer.bos_token = "<s>"  # as GPT-2's
    tokens, _ = run_tokenize(rows_of("text", [{"text": "ab"}]), tokenizer, train_on="all")
    assert marked(tokens, 0, tokenizer) == "[ab<|im_end|>]"
    tokens, _ = run_tokenize(rows_of("completion", [{"prompt": "ab", "completion": "cd"}]), tokenizer)
    assert marked(tokens, 0, tokenizer) == "ab[cd<|im_end|>]"


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_what_the_tokenizer_puts_before_a_text_is_there_whatever_it_is_called(train_on):
    """GLM-4's puts two tokens there, and has no begin token; the control is one that puts none."""
    plain, glm = (make_tokenizer(specials=["[gMASK]", "<sop>"]) for _ in range(2))
    marks = [(token, glm.convert_tokens_to_ids(token)) for token in ("[gMASK]", "<sop>")]
    glm.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=marks
    )
    row = {"prompt": "ab", "completion": "cd"}
    asked = glm("ab")["input_ids"]  # as at inference
    for tokenizer, before in ((plain, ""), (glm, "[gMASK]<sop>")):
        tokens, _ = run_tokenize(rows_of("completion", [row]), tokenizer, train_on=train_on)
        assert (tokens.ids[: len(asked)].tolist() == asked) == (tokenizer is glm)
        assert tokenizer.decode(tokens.ids) == f"{before}abcd<|im_end|>" and not tokens.remarks
        for text in ("ab", f"{before}ab"):
            tokens, _ = run_tokenize(rows_of("text", [{"text": text}]), tokenizer, train_on=train_on)
            assert tokenizer.decode(tokens.ids) == f"{before}ab<|im_end|>"
    tokens, _ = run_tokenize(rows_of("text", [{"text": "ab"}]), glm, train_on=train_on)
    assert tokens.num_targets.tolist() == [3], "a, b and the end, not what is always there"


def test_a_begin_token_is_there_where_the_vocabulary_has_no_letter_a():
    backend = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "C": 2, "G": 3}, []))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokens, _ = run_tokenize(rows_of("text", [{"text": "CG"}]), tokenizer)
    assert tokens.ids.tolist() == [0, 2, 3, 1]


def test_a_completion_has_no_space_that_the_tokenizer_puts_before_a_text():
    tokenizer = tiny_tokenizer("llama2")
    tokens, _ = run_tokenize(rows_of("completion", [{"prompt": "ab", "completion": "cd"}]), tokenizer)
    assert tokenizer.convert_ids_to_tokens(tokens.ids.tolist()) == ["\u2581a", "b", "c", "d", "<|im_end|>"]
    assert tokens.is_label.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize(("special_tokens", "count"), [("text", 0), ("tokens", 2), (None, 2)])
def test_a_mark_in_a_plain_text_is_the_token_unless_the_recipe_reads_it_as_text(tokenizer, special_tokens, count):
    rows = rows_of("completion", [{"prompt": "a<|im_end|>b", "completion": "<|im_start|>c"}])
    tokens, _ = run_tokenize(rows, tokenizer, keys=TextKeys(special_tokens))
    marks = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert np.isin(tokens.ids[:-1], marks).sum() == count and tokens.ids[-1] == marks[1]
    assert tokenizer.decode(tokens.ids) == "a<|im_end|>b<|im_start|>c<|im_end|>"


def test_a_token_beyond_the_last_row_of_the_embedding_is_a_mistake(tokenizer):
    tokens = token_set([4, 3])  # ids 1 to 7
    assert ids_beyond(tokens, 8, tokenizer, "data.train") == []
    (mistake,) = ids_beyond(tokens, 7, tokenizer, "data.train")
    assert mistake.startswith("data.train: sample 1 has token 7 ")


def test_samples_are_cut_at_the_end(tokenizer):
    rows = rows_of("completion", [{"prompt": "abc", "completion": "defg"}, {"prompt": "abcdef", "completion": "g"}])
    with pytest.raises(RecipeError, match=r"data\.train: row 2: no trained token after truncation: .*max_length 5"):
        run_tokenize(rows, tokenizer, max_length=5)
    tokens, num_dropped = run_tokenize(rows, tokenizer, max_length=5, on_bad_row="drop")
    assert marked(tokens, 0, tokenizer) == "abc[de]" and len(tokens) == 1
    assert num_dropped == {"no trained token after truncation": 1}
    assert tokens.num_cut == 1
    tokens, num_dropped = run_tokenize(rows, tokenizer, max_length=2, on_bad_row="drop")
    assert tokens is None and num_dropped == {"no trained token after truncation": 2}
    assert run_tokenize(rows, tokenizer, max_length=8)[0].num_cut == 0


def test_a_label_at_the_first_position_alone_trains_nothing(tokenizer):
    with pytest.raises(RecipeError, match="row 1: no trained token"):
        run_tokenize(rows_of("text", [{"text": "ab"}]), tokenizer, max_length=1)


# Templates without markers.

LLAMA3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n\n' + m.content | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
MERGES = ["ab [/INST] ho", "    indented", "d e", "\n\n", "  x"] * 5
ODD_CHATS = [
    chat("hi", "ho"),
    chat("a", "b", "c", "d e", "f", "    indented\n\ttab\n"),
    chat("\u00e4\u00f6", "\u20ac <|im_start|> \U0001f600", "  ", "x"),
    {"messages": [{"role": "system", "content": "s"}, *chat("q", "a\n\n", "last question")["messages"]]},
]


def without_markers(template):
    return re.sub(r"\{%-? (end)?generation -?%\}", "", template)


TEMPLATES = [CHATML.with_stem(name) for name in ("alpaca", "chatml", "chatml_tools", "llama3", "tulu")]
"""Templates that write each turn alike however the chat goes on."""


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_prefix_rendering_agrees_with_the_markers_of_a_shipped_template(path):
    template = path.read_text()
    specials = sorted(set(re.findall(r"<\|\w+\|>", template)) - {"<|im_start|>", "<|im_end|>"})
    plain = without_markers(template)
    assert plain.count("generation ") < template.count("generation ")
    rows = rows_of("messages", ODD_CHATS)
    tokenizers = [make_tokenizer(text, bos="<s>", merges=MERGES, specials=specials) for text in (template, plain)]
    marked, other = (run_tokenize(rows, tokenizer)[0] for tokenizer in tokenizers)
    assert_same_tokens(marked, other)
    assert 0 < marked.num_targets.sum() < run_tokenize(rows, tokenizers[0], train_on="all")[0].num_targets.sum()


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize(
    "template", [LLAMA3, MISTRAL, without_markers(CHATML.read_text())], ids=["llama", "mistral", "chatml"]
)
def test_prefix_rendering_labels_what_each_turn_adds(template, trims):
    """Against each turn rendered for itself: its labels are what the model has to write there, to the end of turn."""
    tokenizer = make_tokenizer(template, merges=MERGES)
    if trims:  # offsets then leave out leading spaces, as those of Llama 3 do
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    rows = rows_of("messages", ODD_CHATS)
    tokens, _ = run_tokenize(rows, tokenizer)
    for i, row in enumerate(rows.rows):
        ids = tokens.ids[tokens.offsets[i] : tokens.offsets[i + 1]].tolist()
        is_label = tokens.is_label[tokens.offsets[i] : tokens.offsets[i + 1]]
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(row["messages"], tokenize=False)
        stretches = [list(run) for key, run in itertools.groupby(range(len(ids)), key=lambda j: is_label[j]) if key]
        answers = [j for j, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        for j, stretch in zip(answers, stretches, strict=True):
            prompt = tokenizer.apply_chat_template(row["messages"][:j], tokenize=False, add_generation_prompt=True)
            until = tokenizer.apply_chat_template(row["messages"][: j + 1], tokenize=False)
            assert tokenizer.decode(ids[: stretch[-1] + 1]) == until.rstrip("\n")
            assert tokenizer.decode(ids[: stretch[0]]) == prompt
            assert ids[stretch[-1]] == tokenizer.eos_token_id


def test_no_token_spans_the_border_of_a_turn():
    """Generation begins with a new token; the control is that the whole text has one over the border."""
    template = "{% for m in messages %}{{ m.content + (eos_token if m.role == 'assistant' else '') }}{% endfor %}"
    tokenizer = make_tokenizer(template, merges=["x ab"] * 9)
    tokens, _ = run_tokenize(rows_of("messages", [chat("x a", "b")]), tokenizer)
    assert marked(tokens, 0, tokenizer) == "x a[b<|im_end|>]"
    assert [tokenizer.decode([i]) for i in tokenizer("x ab")["input_ids"]] == ["x", " ab"]


def test_template_that_rewrites_earlier_turns_is_refused_with_the_row():
    thinking = LLAMA3.replace(
        "m.content | trim", "('<think>' if loop.last and m.role == 'assistant' else '') + m.content"
    )
    rows = rows_of("messages", [chat("a", "b"), chat("a", "b", "c", "d")])
    with pytest.raises(RecipeError, match=r"data\.train: row 2: .* does not write message 2 .*data\.chat_template"):
        run_tokenize(rows, make_tokenizer(thinking))
    assert run_tokenize(rows, make_tokenizer(thinking), train_on="all")[0].num_targets.all()


# Preferences.


# Tool calls, reasoning and turns without loss. Like Qwen3's, this template drops the reasoning of earlier turns.
CALLS = """{% for t in tools or [] %}<|im_start|>tools {{ t['name'] }}<|im_end|>{% endfor -%}
{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['reasoning_content'] and loop.last %}<{{ m['reasoning_content'] }}>{% endif %}{{ m['content'] -}}
{% for c in m['tool_calls'] %}!{{ c['function']['name'] }}{{ c['function']['arguments'] | tojson }}{% endfor -%}
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
USER = {"role": "user", "content": "q"}
CALLING = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two"},
]


def by_turns(messages, trained, tokenizer, tools=None):
    """The text of a chat, each trained turn in [ ]: what rendering one message more adds after the prompt for it."""
    text = ""
    for k in trained:
        before = tokenizer.apply_chat_template(messages[:k], tools=tools, tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(messages[: k + 1], tools=tools, tokenize=False)
        text += f"{before[len(text.replace('[', '').replace(']', '')) :]}[{after[len(before) :].rstrip()}]\n"
    return text


def test_tool_calls_are_what_the_template_writes_turn_by_turn():
    tokenizer = make_tokenizer(CALLS)
    rows = rows_of("messages", [{"messages": CALLING, "tools": [{"name": "add"}]}, chat("a", "b")])
    tokens, _ = run_tokenize(rows, tokenizer)
    expected = by_turns(CALLING, [1, 3], tokenizer, [{"name": "add"}])
    assert marked(tokens, 0, tokenizer) == expected
    assert '[!add{"a": 1}<|im_end|>]' in expected and "[two<|im_end|>]" in expected and "tools add" in expected
    assert "tools" not in marked(tokens, 1, tokenizer)


def test_a_template_that_joins_arguments_to_text_is_given_their_json():
    tokenizer = make_tokenizer(CALLS.replace("['arguments'] | tojson", "['arguments']"))
    tokens, _ = run_tokenize(rows_of("messages", [{"messages": CALLING}]), tokenizer)
    assert '[!add{"a": 1}<|im_end|>]' in marked(tokens, 0, tokenizer)


def test_turns_with_train_false_carry_no_loss():
    tokenizer = make_tokenizer(CALLS)
    turns = [*CALLING[:1], CALLING[1] | {"train": False}, *CALLING[2:]]
    tokens, _ = run_tokenize(rows_of("messages", [{"messages": turns}]), tokenizer)
    assert marked(tokens, 0, tokenizer) == by_turns(CALLING, [3], tokenizer) != by_turns(CALLING, [1, 3], tokenizer)
    with pytest.raises(RecipeError, match=r"train: false under objective\.train_on: all"):
        run_tokenize(rows_of("messages", [{"messages": turns}]), tokenizer, train_on="all")


@pytest.mark.parametrize("template", [None, CALLS], ids=["markers", "prefix"])
def test_only_the_last_turn_may_carry_loss(template):
    tokenizer = make_tokenizer(template)
    row = chat("a", "b", "c", "d")
    tokens, _ = run_tokenize(rows_of("messages", [row]), tokenizer, train_on="last")
    assert marked(tokens, 0, tokenizer) == by_turns(row["messages"], [3], tokenizer)


def test_reasoning_is_trained_in_the_last_turn_where_the_template_drops_earlier_ones():
    tokenizer = make_tokenizer(CALLS)
    first, last = ({"role": "assistant", "content": text, "reasoning_content": "why"} for text in "xy")
    turns = [USER, first, USER, last]
    tokens, _ = run_tokenize(rows_of("messages", [{"messages": turns}]), tokenizer, train_on="last")
    assert marked(tokens, 0, tokenizer).endswith("[<why>y<|im_end|>]\n") and "<why>x" not in marked(
        tokens, 0, tokenizer
    )
    with pytest.raises(RecipeError, match="does not write message 2 as it would be prompted for"):
        run_tokenize(rows_of("messages", [{"messages": turns}]), tokenizer)


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"messages": CALLING}, "tool_calls"),
        ({"messages": chat("a", "b")["messages"], "tools": [{"name": "add"}]}, "tools"),
        ({"messages": [USER, {"role": "assistant", "content": "b", "reasoning_content": "why"}]}, "reasoning_content"),
    ],
)
def test_what_a_template_would_drop_is_a_bad_row(tokenizer, row, key):
    with pytest.raises(RecipeError, match=f"row 2: the chat template leaves out `{key}`: .*name another"):
        run_tokenize(rows_of("messages", [chat("a", "b"), row]), tokenizer)


def test_the_shipped_template_for_tools_writes_all_that_others_leave_out():
    with_tools = make_tokenizer((ROOT / template_path(CHATML_TOOLS)).read_text())
    thought = {"role": "assistant", "content": "b", "reasoning_content": "why"}
    rows = [{"messages": CALLING, "tools": [{"name": "add"}]}, {"messages": [USER, thought, USER, thought]}]
    tokens, _ = run_tokenize(rows_of("messages", rows), with_tools)
    start = '<|im_start|>system\n<tools>\n{"name": "add"}\n</tools><|im_end|>\n<|im_start|>user\nq<|im_end|>\n'
    call = json.dumps(CALL["function"])
    assert marked(tokens, 0, with_tools) == (
        f"{start}<|im_start|>assistant\n[<tool_call>\n{call}\n</tool_call><|im_end|>]\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n[two<|im_end|>]\n"
    )
    turn = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[<think>\nwhy\n</think>\nb<|im_end|>]\n"
    assert marked(tokens, 1, with_tools) == turn * 2


def preference(prompt, chosen, rejected):
    *shared, question = prompt
    chats = [chat(*shared, question, answer)["messages"] for answer in (chosen, rejected)]
    return {"prompt": chats[0][:-1], "chosen": chats[0][-1:], "rejected": chats[1][-1:]}


@pytest.mark.parametrize("template", [None, without_markers(CHATML.read_text())], ids=["markers", "no markers"])
def test_pair_labels_are_what_the_answers_do_not_share(template):
    tokenizer = make_tokenizer(template)
    rows = rows_of("chat_preference", [preference(["a", "b", "c"], "yes", "no"), preference(["q"], "1", "2")])
    tokens, _ = run_tokenize(rows, tokenizer, name="dpo")
    start = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
    assert [marked(tokens, i, tokenizer) for i in (0, 1)] == [
        f"{start}<|im_start|>assistant\n[{answer}<|im_end|>]\n" for answer in ("yes", "no")
    ]
    assert marked(tokens, 3, tokenizer).endswith("assistant\n[2<|im_end|>]\n")
    assert (len(tokens), tokens.group_size, tokens.num_targets.tolist()) == (2, 2, [4, 3, 2, 2])


def test_plain_pair_is_a_prompt_with_two_completions():
    tokenizer = make_tokenizer(bos="<s>")
    rows = rows_of("preference", [{"prompt": "ab", "chosen": "cd", "rejected": "e"}])
    tokens, _ = run_tokenize(rows, tokenizer, name="dpo")
    assert [marked(tokens, i, tokenizer) for i in (0, 1)] == ["<s>ab[cd<|im_end|>]", "<s>ab[e<|im_end|>]"]


def test_pair_that_truncation_makes_useless_is_a_bad_row(tokenizer):
    rows = [
        {"prompt": "p", "chosen": "same one", "rejected": "same two"},
        {"prompt": "p" * 9, "chosen": "a", "rejected": "b"},
    ]
    _, num_dropped = run_tokenize(rows_of("preference", rows), tokenizer, name="dpo", max_length=6, on_bad_row="drop")
    assert num_dropped == {
        "chosen and rejected are the same after truncation": 1,
        "no trained token after truncation": 1,
    }
    assert len(run_tokenize(rows_of("preference", rows), tokenizer, name="dpo", max_length=20)[0]) == 2


# Long texts.


LONG = [{"text": "a" * 5}, {"text": "b" * 20}]  # and an end each


@pytest.mark.parametrize(
    ("too_long", "lengths", "num_cut"),
    [(None, [6, 8], 1), ("cut", [6, 8], 1), ("drop", [6], 0), ("split", [6, 8, 8, 7], 1)],
)
def test_long_rows_are_treated_as_the_recipe_chooses_and_counted_in_any_case(tokenizer, too_long, lengths, num_cut):
    # Under on_bad_row "error": what a recipe leaves out is no mistake.
    tokens, num_dropped = run_tokenize(rows_of("text", LONG), tokenizer, max_length=8, too_long=too_long)
    assert (tokens.lengths.tolist(), tokens.num_cut) == (lengths, num_cut)
    assert tokens.row_lengths.tolist() == [6, 21]
    assert num_dropped == {}


def test_a_long_row_may_be_an_error_with_its_length(tokenizer):
    message = r"row 2: row longer than data\.max_length: 21 tokens, where that is 8; raise it"
    with pytest.raises(RecipeError, match=message):
        run_tokenize(rows_of("text", LONG), tokenizer, max_length=8, too_long="error")


def test_chunks_of_a_split_chat_train_each_label_once(tokenizer):
    rows = rows_of("messages", [chat("q" * 30, "y" * 20)])
    whole, _ = run_tokenize(rows, tokenizer)
    split, _ = run_tokenize(rows, tokenizer, max_length=16, too_long="split")
    assert split.num_targets.sum() == whole.num_targets.sum() == 21
    assert (split.num_targets > 0).all() and len(split) < len(whole.ids) / 15


@pytest.mark.parametrize("num_characters", range(1, 25))
def test_split_text_has_each_token_but_the_first_as_a_target_once(num_characters):
    text = "abcdefghijklmnopqrstuvwxyz"[:num_characters]
    tokenizer = make_tokenizer(bos="<s>")
    tokens, _ = run_tokenize(rows_of("text", [{"text": text}]), tokenizer, name="cpt", max_length=8)
    targets = [
        int(token)
        for start, end in itertools.pairwise(tokens.offsets)
        for token, is_label in zip(tokens.ids[start + 1 : end], tokens.is_label[start + 1 : end], strict=True)
        if is_label
    ]
    assert tokenizer.decode(targets) == f"{text}<|im_end|>"
    assert tokens.num_targets.sum() == num_characters + 1
    assert tokens.lengths.max() <= 8 and tokens.lengths.min() >= 2
    assert tokens.num_cut == (num_characters + 2 > 8)


def test_split_text_by_hand(tokenizer):
    rows = rows_of("text", [{"text": "abcdefgh"}, {"text": "xy"}])
    tokens, _ = run_tokenize(rows, tokenizer, name="cpt", max_length=4)
    shown = [marked(tokens, i, tokenizer) for i in range(len(tokens))]
    assert shown == ["[abcd]", "d[efg]", "g[h<|im_end|>]", "[xy<|im_end|>]"]
    assert run_tokenize(rows, tokenizer, max_length=4)[0].lengths.tolist() == [4, 3]


# The pool and the cache.


def test_tokens_do_not_depend_on_the_number_of_processes(tokenizer, monkeypatch):
    monkeypatch.setattr(tokens_module, "ROWS_PER_TASK", 2)
    rows = rows_of("messages", [*ODD_CHATS, chat("x" * 100, "ho")])
    marked, other = (
        run_tokenize(rows, tokenizer, num_processes=count, max_length=60, on_bad_row="drop") for count in (1, 2)
    )
    assert_same_tokens(marked[0], other[0])
    assert marked[1] == other[1] == {"no trained token after truncation": 1}


def test_mistake_found_by_a_worker_names_the_row(monkeypatch):
    monkeypatch.setattr(tokens_module, "ROWS_PER_TASK", 2)
    forgetful = LLAMA3.replace("m.content | trim", "(m.content if loop.last or m.role == 'user' else '')")
    rows = rows_of("messages", [chat("a", "b")] * 3 + [chat("a", "b", "c", "d")])
    with pytest.raises(RecipeError, match="row 4: the chat template has no generation markers"):
        run_tokenize(rows, make_tokenizer(forgetful), num_processes=2)


def run_cached(cache, rows, tokenizer, objective=None, **changes):
    data = DataSection(**{"train": "python-stdlib", "max_length": 50, "on_bad_row": "drop"} | changes)
    return cached_tokens([rows], tokenizer, data, objective or Objective.of(), cache=cache, place="data.train")


def assert_same_tokens(own, other):
    for name in ("ids", "is_label", "offsets"):
        a, b = getattr(own, name), getattr(other, name)
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


CACHE_ROWS = rows_of("messages", [chat("hi", "ho"), chat("x" * 100, "ho"), chat("a", "b")])


def test_cache_hit_is_bit_equal_and_does_not_tokenise(tmp_path, tokenizer, monkeypatch):
    made, num_dropped = run_tokenize(CACHE_ROWS, tokenizer, max_length=50, on_bad_row="drop")
    first = run_cached(tmp_path, CACHE_ROWS, tokenizer)
    monkeypatch.setattr("cookbook.training.data.tokens.tokenize", None)
    second = run_cached(tmp_path, CACHE_ROWS, tokenizer)
    for tokens, dropped in (first, second):
        assert_same_tokens(tokens, made)
        assert dropped == num_dropped == {"no trained token after truncation": 1}
    assert isinstance(second[0].ids, np.memmap)
    assert second[0].fingerprint == made.fingerprint


def test_cached_pairs_stay_pairs(tmp_path, tokenizer):
    rows = rows_of("chat_preference", [preference(["q"], "yes", "no"), preference(["q"], "1", "2" * 60)])
    made, again = (run_cached(tmp_path, rows, tokenizer, objective=Objective.of(name="dpo"))[0] for _ in range(2))
    assert isinstance(again.ids, np.memmap)
    assert (len(again), again.group_size, again.part_sizes, again.num_cut) == (2, 2, (2,), 1)
    assert_same_tokens(made, again)


def test_values_stay_with_their_samples(tmp_path, tokenizer):
    rows = [{"prompt": "q", "completion": "a" * (i + 1), "label": i % 3 == 0} for i in range(7)]
    judged, objective = rows_of("judgement", rows), Objective.of(name="kto_zero")
    made, again = (run_cached(tmp_path, judged, tokenizer, objective=objective)[0] for _ in range(2))
    assert isinstance(again.values, np.memmap) and made.fingerprint == again.fingerprint
    assert made.values.tolist() == again.values.tolist() == [1, 0, 0, 1, 0, 0, 1]
    taken = take([(made, 4), (made, 0)])
    assert taken.values.tolist() == [0, 1] and taken.lengths.tolist() == made.lengths[[4, 0]].tolist()
    others = rows_of("judgement", [row | {"label": not row["label"]} for row in rows])
    assert run_cached(tmp_path, others, tokenizer, objective=objective)[0].fingerprint != made.fingerprint


def test_a_stream_of_pairs_gives_pairs(tmp_path, tokenizer):
    """Which objectives without a reference may."""
    rows = [{"prompt": "q", "chosen": "y" * (i + 1), "rejected": "n" * (i + 2)} for i in range(9)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSection.model_validate({"train": str(path), "streaming": True, "shuffle_rows": 4})
    stream = Stream(data=data, objective=Objective.of(name="orpo"), tokenizer=tokenizer)
    windows = stream.windows(seed=0, global_batch_size=3, num_samples_consumed=0)
    seen = []
    for window in (next(windows) for _ in range(3)):
        lengths = window.tokens.lengths.reshape(-1, 2)
        assert len(window.tokens) == 3 and (lengths[:, 1] == lengths[:, 0] + 1).all()
        seen += lengths[:, 0].tolist()
    assert len(set(seen)) == 9


def test_whatever_changes_the_tokens_changes_the_entry(tmp_path, tokenizer):
    run_cached(tmp_path, CACHE_ROWS, tokenizer)
    run_cached(tmp_path, CACHE_ROWS, tokenizer, max_length=49)
    run_cached(tmp_path, CACHE_ROWS, tokenizer, too_long="drop")
    run_cached(tmp_path, CACHE_ROWS, tokenizer, objective=Objective.of(train_on="all"))
    run_cached(tmp_path, rows_of("messages", CACHE_ROWS.rows[:1]), tokenizer)
    texts = rows_of("text", [{"text": "a" * 60}])
    for objective in ("sft", "cpt"):
        run_cached(tmp_path, texts, tokenizer, objective=Objective.of(name=objective))
    run_cached(tmp_path, CACHE_ROWS, make_tokenizer(CHATML.read_text() + " "))
    run_cached(tmp_path, CACHE_ROWS, make_tokenizer(bos="<s>"))
    run_cached(tmp_path, CACHE_ROWS, tokenizer, special_tokens="tokens")
    assert len(list(tmp_path.glob("tokens-*/meta.json"))) == 10
    tokenizer("a b", truncation=True, max_length=1)  # leaves its truncation in the backend
    run_cached(tmp_path, CACHE_ROWS, tokenizer)
    assert len(list(tmp_path.glob("tokens-*/meta.json"))) == 10


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def change_meta(folder, **values):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | values))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: flip_byte(folder / "ids.npy"),
        lambda folder: flip_byte(folder / "is_label.npy"),
        lambda folder: flip_byte(folder / "target_counts.npy"),  # a count that is wrong would scale the loss
        lambda folder: change_meta(folder, digests={}),
        lambda folder: (folder / "offsets.npy").write_bytes(b""),
        lambda folder: (folder / "ids.npy").write_bytes((folder / "ids.npy").read_bytes()[:-7]),
        lambda folder: (folder / "ids.npy").unlink(),
        lambda folder: (folder / "meta.json").write_text("[]"),
        lambda folder: change_meta(folder, group_size=2),
    ],
    ids=["id", "label", "count", "digests", "empty", "torn", "missing", "meta", "pairs"],
)
def test_corrupt_cache_entry_is_made_anew(tmp_path, tokenizer, spoil):
    made, _ = run_tokenize(CACHE_ROWS, tokenizer, max_length=50, on_bad_row="drop")
    run_cached(tmp_path, CACHE_ROWS, tokenizer)
    (folder,) = (path.parent for path in tmp_path.glob("tokens-*/meta.json"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    spoil(folder)
    tokens, _ = run_cached(tmp_path, CACHE_ROWS, tokenizer)
    assert_same_tokens(tokens, made)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


RACER = """
import sys, time, pathlib
sys.path.insert(0, {root!r} + "/tests")
import test_data_tokens, cookbook.training.data.tokens as module
folder, name = pathlib.Path({folder!r}), sys.argv[1]
def slow(*args, **kwargs):
    (folder / ("made-by-" + name)).touch()
    time.sleep(1)
    return tokenize(*args, **kwargs)
tokenize, module.tokenize = module.tokenize, slow
tokenizer = test_data_tokens.make_tokenizer()
(folder / ("ready-" + name)).touch()
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.01)
tokens, _ = test_data_tokens.run_cached(folder / "cache", test_data_tokens.CACHE_ROWS, tokenizer)
print(tokens.fingerprint)
"""


def test_of_two_processes_one_tokenises_and_both_get_it(tmp_path, tokenizer):
    code = RACER.format(root=str(ROOT), folder=str(tmp_path))
    racers = [
        subprocess.Popen([sys.executable, "-c", code, name], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    printed = [racer.communicate(timeout=120)[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    made, _ = run_tokenize(CACHE_ROWS, tokenizer, max_length=50, on_bad_row="drop")
    assert printed == [made.fingerprint] * 2
    assert len(list(tmp_path.glob("ready-*"))) == 2 and len(list(tmp_path.glob("made-by-*"))) == 1
