"""Protects the data path: what is read, which tokens carry loss, and which samples make up a step on each rank.

python -m pytest -q tests/test_data.py
"""

import ast
import itertools
import json
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cookbook.data import stdlib
from cookbook.data.batches import collate, deal, epoch_order, eval_batches, steps_per_epoch, train_steps
from cookbook.data.rows import MAX_ROW_BYTES, Rows, read_rows, texts
from cookbook.data.stdlib import load_stdlib
from cookbook.data.tokens import TokenSet, cached_tokens, tokenize
from cookbook.files import RecipeError
from cookbook.recipe import Source

ROOT = Path(__file__).parents[1]
CHATML = ROOT / "recipes" / "chat_templates" / "chatml.jinja"
PAD = 0


def chat(*contents):
    """Messages of user and assistant in turn."""
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]}


def rows_of(kind, rows):
    return Rows(kind=kind, rows=rows, num_dropped={}, fingerprint=f"{kind} {json.dumps(rows)}")


def make_tokenizer(template=None, bos=None):
    """Byte-level, with no merges: one token per ASCII character, so masks can be written by hand."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"] + ([bos] if bos else [])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["a"], trainer)
    if bos:
        ids = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        bos_token=bos,
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML.read_text() if template is None else template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def run_tokenize(rows, tokenizer, **changes):
    settings = {"max_length": 1000, "train_on": "assistant", "on_bad_row": "error", "place": "data.train"} | changes
    return tokenize(rows, tokenizer, **settings)


def marked(tokens, sample, tokenizer):
    """The sample as text, with [ ] around each stretch of labels."""
    start, end = tokens.offsets[sample], tokens.offsets[sample + 1]
    text = ""
    for is_label, run in itertools.groupby(range(start, end), key=lambda i: bool(tokens.is_label[i])):
        piece = tokenizer.decode(tokens.ids[list(run)].tolist())
        text += f"[{piece}]" if is_label else piece
    return text


def token_set(lengths, is_label=None):
    """Samples whose every token has an id of its own, counting from 1; labels everywhere but at each first token."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    labels = np.ones(offsets[-1], dtype=bool)
    labels[offsets[:-1]] = False
    ids = np.arange(1, offsets[-1] + 1, dtype=np.int32)
    return TokenSet(ids=ids, is_label=labels if is_label is None else np.array(is_label, dtype=bool), offsets=offsets)


def samples_in(tokens, micro_batches):
    """Sample numbers, in order, found by the id of their first token."""
    by_first_id = {int(tokens.ids[start]): i for i, start in enumerate(tokens.offsets[:-1])}
    firsts = (int(row[0]) for batch in micro_batches for row in batch["input_ids"])
    return [by_first_id[first] for first in firsts if first != PAD]


def targets_in(micro_batches):
    flat = torch.cat([batch["targets"].flatten() for batch in micro_batches])
    return sorted(flat[flat != -100].tolist())


# Rows.


def write_lines(path, *lines):
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return str(path)


def messages(*pairs):
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in pairs]})


GOOD = messages(("user", "hi"), ("assistant", "ho"))
BAD_LINES = {
    "not JSON": ('{"text": ', "not JSON: Expecting value at column 10"),
    "not an object": ('["hi"]', "not an object: a list"),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8: byte 0xff at column 11"),
    "key twice": ('{"text": "a", "text": "b"}', "key given twice: 'text'"),
    "too deep": ("[" * 100_000, "not JSON: nested too deeply"),
    "missing keys": ('{"prompt": "a"}', "missing keys: found 'prompt'; a row must have `messages`"),
    "no key": ("{}", "missing keys: found none"),
    "null": ('{"text": null}', "empty text: `text` is null"),
    "empty": ('{"text": ""}', "empty text: `text` is empty"),
    "white space": ('{"prompt": "a", "completion": " \\n"}', "empty text: `completion` is only whitespace"),
    "number for text": ('{"text": 3}', "not text: `text` is a int"),
    "messages no list": ('{"messages": "hi"}', "messages not a list: a str"),
    "messages empty": ('{"messages": []}', "messages empty"),
    "message no object": ('{"messages": ["hi"]}', "message not an object: message 1 is a str"),
    "unknown role": (messages(("human", "a")), "wrong role: message 1 has 'human'; expected system or user"),
    "assistant first": (messages(("assistant", "a")), "wrong role: message 1 has 'assistant'"),
    "two users": (messages(("user", "a"), ("user", "b")), "wrong role: message 2 has 'user'; expected assistant"),
    "late system": (messages(("user", "a"), ("system", "b")), "wrong role: message 2 has 'system'"),
    "tool": (
        messages(("user", "a"), ("tool", "b")),
        "wrong role: message 2 has 'tool'; expected assistant (tool calls",
    ),
    "null content": (messages(("user", None)), "empty text: message 1 content is null or missing"),
    "list content": (messages(("user", ["a"])), "not text: message 1 content is a list"),
    "empty content": (messages(("user", "a"), ("assistant", "")), "empty text: message 2 content is empty"),
    "no assistant": (messages(("system", "s"), ("user", "a")), "no assistant turn"),
    "reasoning": (
        '{"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]}',
        "message with more than text: message 1 has `reasoning_content`, which is not served",
    ),
    "surrogate": (messages(("user", "a\ud800")), "lone surrogate: message 1 content at character 2"),
    "NUL": ('{"text": "ab\\u0000"}', "NUL character: `text` at character 3"),
    "too large": (json.dumps({"text": "a" * MAX_ROW_BYTES}), "row larger than 1,000,000 bytes"),
    "another kind": ('{"text": "a"}', "another kind of row: `text`, where the rows before have `messages`"),
    "two kinds": (
        '{"text": "a", "messages": [{"role": "user", "content": "b"}]}',
        "two kinds in one row: `messages` as well as `text`",
    ),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_bad_row_is_named_with_file_and_line(tmp_path, line, message):
    path = write_lines(tmp_path / "rows.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(RecipeError) as error:
        read_rows(Source(path=path), "error")
    assert error.value.mistakes[0].startswith(f"{path}:3: {message}")
    assert len(error.value.mistakes) == 2 and "data.on_bad_row: drop" in error.value.mistakes[1]


def test_bad_rows_are_dropped_and_counted_by_reason(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", "{}", GOOD, '{"a": 1}', "no", GOOD, messages(("user", "a")), "")
    rows = read_rows(Source(path=path), "drop")
    assert rows.rows == [json.loads(GOOD)] * 2
    assert rows.num_dropped == {"missing keys": 2, "not JSON": 1, "no assistant turn": 1}


def test_twenty_bad_rows_are_named_and_the_others_counted(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", *["{}"] * 25)
    with pytest.raises(RecipeError) as error:
        read_rows(Source(path=path), "error")
    assert len(error.value.mistakes) == 22
    assert error.value.mistakes[19].startswith(f"{path}:20: ")
    assert error.value.mistakes[20] == "... and 5 more"


def test_nothing_left_is_an_error_even_when_dropping(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", "{}")
    with pytest.raises(RecipeError, match="no row left to train on"):
        read_rows(Source(path=path), "drop")


def test_row_of_exactly_the_limit_is_read(tmp_path):
    line = json.dumps({"text": "a" * (MAX_ROW_BYTES - len('{"text": ""}'))})
    assert len(line) == MAX_ROW_BYTES
    path = write_lines(tmp_path / "rows.jsonl", line, line + " ", line)
    assert read_rows(Source(path=path), "drop").num_dropped == {"row larger than 1,000,000 bytes": 1}
    path = write_lines(tmp_path / "rows.jsonl", line + "\r")
    assert len(read_rows(Source(path=path), "error").rows) == 1


def test_max_rows_takes_the_first_good_rows(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", '{"text": "a"}', "{}", '{"text": "b"}', '{"text": "c"}')
    rows = read_rows(Source(path=path, max_rows=2), "drop")
    assert list(texts(rows)) == ["a", "b"]
    assert len(read_rows(Source(path=path, max_rows=1), "error").rows) == 1


def test_extra_keys_byte_order_mark_and_unicode_line_ends_are_fine(tmp_path):
    path = write_lines(
        tmp_path / "rows.jsonl", b"\xef\xbb\xbf" + '{"id": 1, "text": "a\u2028b"}'.encode(), '{"text": "\u00e4"}'
    )
    assert read_rows(Source(path=path), "error").rows == [{"text": "a\u2028b"}, {"text": "\u00e4"}]


def test_texts_are_all_contents():
    assert list(texts(rows_of("messages", [chat("a", "b"), chat("c", "d")]))) == ["a", "b", "c", "d"]
    assert list(texts(rows_of("completion", [{"prompt": "a", "completion": "b"}]))) == ["a", "b"]


def test_parquet_and_jsonl_of_the_same_rows_have_the_same_fingerprint(tmp_path):
    values = [chat("a", "b"), chat("c", "d", "e", "f")]
    jsonl = write_lines(tmp_path / "rows.jsonl", *(json.dumps(row | {"id": i}) for i, row in enumerate(values)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "rows.parquet")
    one, other = (read_rows(Source(path=path), "error") for path in (jsonl, str(tmp_path / "rows.parquet")))
    assert one.rows == other.rows == values
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != read_rows(Source(path=jsonl, max_rows=1), "error").fingerprint


def test_bad_parquet_row_is_named_with_its_number(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"], "id": [1, 2, 3]}), path)
    with pytest.raises(RecipeError) as error:
        read_rows(Source(path=str(path)), "error")
    assert error.value.mistakes[0] == f"{path}:row 2: empty text: `text` is null"


def test_parquet_text_that_is_not_utf8_is_a_bad_row(tmp_path):
    path = tmp_path / "rows.parquet"
    binary = pyarrow.array([b"a", b"\xff", b"b"])
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, binary.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path)
    rows = read_rows(Source(path=str(path)), "drop")
    assert list(texts(rows)) == ["a", "b"] and rows.num_dropped == {"not UTF-8": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"PAR1 no", "not a readable parquet file"), (None, "has columns question; a row must have `messages`")],
    ids=["broken", "no known column"],
)
def test_parquet_that_cannot_serve_is_an_error(tmp_path, content, message):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"]}), path)
    if content:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        read_rows(Source(path=str(path)), "drop")


@pytest.mark.parametrize(
    ("files", "split", "expected"),
    [
        (["b.jsonl", "a.jsonl", "notes.txt", ".hidden.jsonl"], "train", ["a", "b"]),
        (["train-2.jsonl", "train-1.jsonl", "test.jsonl"], "train", ["train-1", "train-2"]),
        (["train-2.jsonl", "test.jsonl"], "test", ["test"]),
        (["test/x.jsonl", "test/w.jsonl", "test.jsonl", "a.jsonl"], "test", ["w", "x"]),
    ],
    ids=["all files", "prefix", "other prefix", "sub-folder"],
)
def test_folder_gives_the_files_of_the_split_sorted(tmp_path, files, split, expected):
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        write_lines(path, json.dumps({"text": path.stem}))
    assert list(texts(read_rows(Source(path=str(tmp_path), split=split), "error"))) == expected


@pytest.mark.parametrize(
    ("files", "split"), [(["a.jsonl"], "test"), (["data.jsonl", "test.jsonl"], "train"), ([], "train")]
)
def test_folder_never_serves_another_split(tmp_path, files, split):
    for name in files:
        write_lines(tmp_path / name, '{"text": "a"}')
    with pytest.raises(RecipeError, match=f"no folder {split}/ and no file {split}"):
        read_rows(Source(path=str(tmp_path), split=split), "drop")


def test_hub_failure_is_worded(monkeypatch):
    import datasets

    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'some/data' on the Hub (offline)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(RecipeError, match=r"some/data \(split 'train'\): cannot be loaded .*offline"):
        read_rows(Source(path="some/data"), "error")


def test_hub_rows_go_through_the_same_checks(monkeypatch):
    import datasets

    table = datasets.Dataset.from_list([{"text": "a", "id": 1}, {"text": "", "id": 2}])
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, split, revision: table)
    rows = read_rows(Source(path="some/data"), "drop")
    assert rows.rows == [{"text": "a"}] and rows.num_dropped == {"empty text": 1}
    with pytest.raises(RecipeError, match="some/data:row 2: empty text"):
        read_rows(Source(path="some/data"), "error")


@pytest.mark.parametrize(
    ("module", "expected"), [("rows", "set()"), ("stdlib", "set()"), ("tokens", "set()"), ("batches", "{'torch'}")]
)
def test_only_batches_imports_torch(module, expected):
    code = f"import sys, cookbook.data.{module}; print({{'torch', 'transformers', 'datasets'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


# The built-in source.


@pytest.fixture(scope="module")
def stdlib_splits():
    return {split: read_rows(Source(path="python-stdlib", split=split), "error").rows for split in ("train", "test")}


def test_stdlib_splits_share_no_function_and_no_request(stdlib_splits):
    for turn in (0, 1):
        train, test = ([row["messages"][turn]["content"] for row in stdlib_splits[s]] for s in ("train", "test"))
        assert not set(train) & set(test)
        assert len(set(train)) == len(train) and len(set(test)) == len(test)
    assert len(stdlib_splits["train"]) > 2000
    assert 0.03 < len(stdlib_splits["test"]) / len(stdlib_splits["train"]) < 0.08


def test_stdlib_answers_are_the_functions_without_their_docstrings(stdlib_splits):
    """Against the trees of the files themselves."""
    known = set()
    for name in ("textwrap", "shutil", "functools", "email/utils"):
        tree = ast.parse((Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                del node.body[0]
                known.add(ast.dump(node))
    answers = [row["messages"][1]["content"] for split in stdlib_splits.values() for row in split]
    trees = [ast.parse(answer).body for answer in answers]
    assert all(len(body) == 1 and isinstance(body[0], ast.FunctionDef) for body in trees)
    assert len(known & {ast.dump(body[0]) for body in trees}) > 40
    assert all(answer == answer.rstrip() and 40 <= len(answer) <= 800 for answer in answers)


def test_stdlib_function_becomes_a_request_and_an_answer(tmp_path, monkeypatch):
    module = '''
        class Box:
            @property
            def size(self, unit: str = "m") -> float:
                """Return the size of the
                box.

                More words.
                """

                # in metres
                return self.width * {"m": 1}[unit]

            def stub(self):
                """Return nothing that can be learnt from here."""
                raise NotImplementedError

            def long_string(self):
                """Return a text of more than a line."""
                return """a
                b"""
    '''
    (tmp_path / "box.py").write_text(textwrap.dedent(module))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "hidden.py").write_text("raise SystemExit('run!')\n" + textwrap.dedent(module))
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    rows = load_stdlib("train") + load_stdlib("test")
    assert [[message["content"] for message in row["messages"]] for row in rows] == [
        [
            "Write `def size(self, unit: str='m') -> float`: Return the size of the box.",
            '@property\ndef size(self, unit: str = "m") -> float:\n'
            '    # in metres\n    return self.width * {"m": 1}[unit]',
        ]
    ]


# Tokens.


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
    "no markers": ("{{ m.content + eos_token }}", "does not mark the assistant's tokens"),
    "end of turn outside": (
        "{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}",
        "row 1: the trained part of an assistant turn ends with 'b' and no special token, so the model would never",
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


def test_template_without_markers_serves_train_on_all():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    tokenizer = make_tokenizer(template)
    tokens, _ = run_tokenize(rows_of("messages", [chat("ab", "c")]), tokenizer, train_on="all")
    assert marked(tokens, 0, tokenizer) == "[abc<|im_end|>]"


def test_missing_template_names_the_shipped_one():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RecipeError, match=r"recipes/chat_templates/chatml\.jinja"):
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


def test_samples_are_cut_at_the_end(tokenizer):
    rows = rows_of("completion", [{"prompt": "abc", "completion": "defg"}, {"prompt": "abcdef", "completion": "g"}])
    with pytest.raises(RecipeError, match=r"data\.train: row 2: no trained token after truncation: .*max_length 5"):
        run_tokenize(rows, tokenizer, max_length=5)
    tokens, num_dropped = run_tokenize(rows, tokenizer, max_length=5, on_bad_row="drop")
    assert marked(tokens, 0, tokenizer) == "abc[de]" and len(tokens) == 1
    assert num_dropped == {"no trained token after truncation": 1}
    with pytest.raises(RecipeError, match="no row left"):
        run_tokenize(rows, tokenizer, max_length=2, on_bad_row="drop")


def test_a_label_at_the_first_position_alone_trains_nothing(tokenizer):
    with pytest.raises(RecipeError, match="row 1: no trained token after truncation"):
        run_tokenize(rows_of("text", [{"text": "ab"}]), tokenizer, max_length=1)


def run_cached(cache, rows, tokenizer, **changes):
    settings = {"max_length": 50, "train_on": "assistant", "on_bad_row": "drop", "place": "data.train"} | changes
    return cached_tokens(rows, tokenizer, cache=cache, **settings)


def assert_same_tokens(one, other):
    for name in ("ids", "is_label", "offsets"):
        a, b = getattr(one, name), getattr(other, name)
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


CACHE_ROWS = rows_of("messages", [chat("hi", "ho"), chat("x" * 100, "ho"), chat("a", "b")])


def test_cache_hit_is_bit_equal_and_does_not_tokenise(tmp_path, tokenizer, monkeypatch):
    made, num_dropped = run_tokenize(CACHE_ROWS, tokenizer, max_length=50, on_bad_row="drop")
    first = run_cached(tmp_path, CACHE_ROWS, tokenizer)
    monkeypatch.setattr("cookbook.data.tokens.tokenize", None)
    second = run_cached(tmp_path, CACHE_ROWS, tokenizer)
    for tokens, dropped in (first, second):
        assert_same_tokens(tokens, made)
        assert dropped == num_dropped == {"no trained token after truncation": 1}
    assert isinstance(second[0].ids, np.memmap)
    assert second[0].fingerprint == made.fingerprint


def test_whatever_changes_the_tokens_changes_the_entry(tmp_path, tokenizer):
    run_cached(tmp_path, CACHE_ROWS, tokenizer)
    run_cached(tmp_path, CACHE_ROWS, tokenizer, max_length=49)
    run_cached(tmp_path, CACHE_ROWS, tokenizer, train_on="all")
    run_cached(tmp_path, rows_of("messages", CACHE_ROWS.rows[:1]), tokenizer)
    run_cached(tmp_path, CACHE_ROWS, make_tokenizer(CHATML.read_text() + " "))
    run_cached(tmp_path, CACHE_ROWS, make_tokenizer(bos="<s>"))
    assert len(list(tmp_path.glob("tokens-*/meta.json"))) == 6
    tokenizer("a b", truncation=True, max_length=1)  # leaves its truncation in the backend
    run_cached(tmp_path, CACHE_ROWS, tokenizer)
    assert len(list(tmp_path.glob("tokens-*/meta.json"))) == 6


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: flip_byte(folder / "ids.npy"),
        lambda folder: flip_byte(folder / "is_label.npy"),
        lambda folder: (folder / "offsets.npy").write_bytes(b""),
        lambda folder: (folder / "ids.npy").write_bytes((folder / "ids.npy").read_bytes()[:-7]),
        lambda folder: (folder / "ids.npy").unlink(),
        lambda folder: (folder / "meta.json").write_text("[]"),
    ],
    ids=["id", "label", "empty", "torn", "missing", "meta"],
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
import test_data, cookbook.data.tokens as module
folder, name = pathlib.Path({folder!r}), sys.argv[1]
def slow(*args, **kwargs):
    (folder / ("made-by-" + name)).touch()
    time.sleep(1)
    return tokenize(*args, **kwargs)
tokenize, module.tokenize = module.tokenize, slow
tokenizer = test_data.make_tokenizer()
(folder / ("ready-" + name)).touch()
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.01)
tokens, _ = test_data.run_cached(folder / "cache", test_data.CACHE_ROWS, tokenizer)
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


# Batches.


def test_collate_shifts_the_targets_inside_each_sample():
    # ids 1 2 3 | 4 5; labels at 2, 4 (a first token: nothing predicts it) and 5.
    tokens = token_set([3, 2], is_label=[0, 1, 0, 1, 1])
    batch = collate(tokens, [1, 0], pad_id=9)
    assert batch["input_ids"].tolist() == [[4, 5, 9], [1, 2, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch["targets"].tolist() == [[5, -100, -100], [2, -100, -100]]
    assert tokens.num_targets.tolist() == [1, 1]
    assert sorted(batch) == ["input_ids", "position_ids", "targets"]
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in batch.values())


def test_no_samples_make_a_row_without_targets():
    batch = collate(token_set([3]), [], pad_id=9)
    assert {key: tensor.tolist() for key, tensor in batch.items()} == {
        "input_ids": [[9, 9]],
        "position_ids": [[0, 1]],
        "targets": [[-100, -100]],
    }


def test_order_depends_on_seed_and_epoch_only():
    order = epoch_order(100, seed=1, epoch=0)
    assert sorted(order.tolist()) == list(range(100))
    assert order.tolist() == epoch_order(100, seed=1, epoch=0).tolist()
    # (1, 0) and (0, 1) would be the same order if seed and epoch were added.
    others = [epoch_order(100, seed, epoch).tolist() for seed, epoch in ((0, 1), (1, 1), (2, 0))]
    assert order.tolist() not in others and others[0] not in others[1:]


@pytest.mark.parametrize(("num_samples", "size", "steps"), [(10, 4, 3), (8, 4, 2), (3, 4, 1)])
def test_steps_per_epoch_counts_the_partial_one(num_samples, size, steps):
    assert steps_per_epoch(num_samples, size) == steps


def test_deal_by_hand():
    # 9 to rank 0; 5 and 4 to rank 1, now full; 1 to rank 0.
    assert deal([5, 9, 4, 1], 2) == [[1, 3], [0, 2]]
    # Three for two ranks: 9 to rank 0, 5 to rank 1 and 4 as well.
    assert deal([5, 9, 4], 2) == [[1], [0, 2]]
    assert deal([7], 3) == [[0], [], []]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("num_samples", [0, 1, 7, 16, 64])
def test_deal_gives_each_sample_once_in_counts_that_differ_by_at_most_one(num_samples, num_ranks):
    lengths = np.random.default_rng(0).lognormal(5, 1, num_samples).astype(int).tolist()
    dealt = deal(lengths, num_ranks)
    assert sorted(itertools.chain(*dealt)) == list(range(num_samples))
    counts = [len(mine) for mine in dealt]
    assert max(counts) - min(counts) <= 1
    for mine in dealt:
        assert [lengths[i] for i in mine] == sorted((lengths[i] for i in mine), reverse=True)


def test_deal_balances_better_than_round_robin():
    lengths = np.random.default_rng(0).lognormal(5, 1, 64).astype(int).tolist()

    def wait(dealt):
        loads = [sum(lengths[i] for i in mine) for mine in dealt]
        return max(loads) / (sum(loads) / len(loads))

    round_robin = [list(range(rank, 64, 8)) for rank in range(8)]
    assert wait(deal(lengths, 8)) < 1.02
    assert wait(round_robin) > 1.3


LENGTHS = [3, 9, 2, 5, 30, 4, 4, 7, 2, 12]


def steps_of(tokens, rank, num_ranks, count, **changes):
    settings = {"seed": 7, "global_batch_size": 4, "micro_batch_size": 1, "pad_id": PAD} | changes
    return list(itertools.islice(train_steps(tokens, rank=rank, num_ranks=num_ranks, **settings), count))


@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 4), (5, 1)])
def test_every_split_shows_the_same_samples_and_targets_in_each_step(num_ranks, micro_batch_size):
    tokens = token_set(LENGTHS)
    expected = steps_of(tokens, 0, 1, 6)
    ranks = [steps_of(tokens, rank, num_ranks, 6, micro_batch_size=micro_batch_size) for rank in range(num_ranks)]
    for step, shares in enumerate(zip(*ranks, strict=True)):
        assert len({len(share.micro_batches) for share in shares}) == 1
        assert len(shares[0].micro_batches) == -(-shares[0].num_samples // (micro_batch_size * num_ranks))
        together = [batch for share in shares for batch in share.micro_batches]
        assert sorted(samples_in(tokens, together)) == sorted(samples_in(tokens, expected[step].micro_batches))
        assert targets_in(together) == targets_in(expected[step].micro_batches)
        for share in shares:
            assert share.num_targets == len(targets_in(together))
            assert share.num_tokens == sum(LENGTHS[i] for i in samples_in(tokens, together))
            assert (share.num_samples, share.epoch) == (expected[step].num_samples, expected[step].epoch)


def test_an_epoch_shows_every_sample_once_and_its_last_step_is_partial():
    tokens = token_set(LENGTHS)
    steps = steps_of(tokens, 0, 1, 6)
    assert [step.num_samples for step in steps] == [4, 4, 2] * 2
    assert [step.epoch for step in steps] == [0.4, 0.8, 1.0, 1.4, 1.8, 2.0]
    epochs = [[samples_in(tokens, step.micro_batches) for step in steps[i : i + 3]] for i in (0, 3)]
    for epoch, shown in enumerate(epochs):
        assert sorted(itertools.chain(*shown)) == list(range(10))
        order = epoch_order(10, 7, epoch).tolist()
        assert [sorted(step) for step in shown] == [sorted(order[i : i + 4]) for i in (0, 4, 8)]
    assert epochs[0] != epochs[1]


def test_the_comparison_of_splits_sees_a_wrong_window():
    """Negative control: another seed changes what each step shows, and the checks above would say so."""
    tokens = token_set(LENGTHS)
    one, other = steps_of(tokens, 0, 1, 1)[0], steps_of(tokens, 0, 1, 1, seed=8)[0]
    assert targets_in(one.micro_batches) != targets_in(other.micro_batches)
    half = steps_of(tokens, 0, 2, 1)[0]
    assert len(targets_in(half.micro_batches)) < half.num_targets


@pytest.mark.parametrize(("consumed", "done"), [(0, 0), (4, 1), (8, 2), (10, 3), (14, 4), (20, 6)])
def test_resumed_steps_are_those_of_the_uninterrupted_run(consumed, done):
    tokens = token_set(LENGTHS)
    whole, rest = steps_of(tokens, 1, 2, 8), steps_of(tokens, 1, 2, 8 - done, num_samples_consumed=consumed)
    assert sum(step.num_samples for step in whole[:done]) == consumed
    for one, other in zip(whole[done:], rest, strict=True):
        assert one.epoch == other.epoch
        for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
            assert all(torch.equal(a[key], b[key]) for key in a)


def test_resuming_where_no_step_ends_is_refused():
    with pytest.raises(RecipeError, match=r"global_batch_size is 4, .* stands at sample 3"):
        steps_of(token_set(LENGTHS), 0, 1, 1, num_samples_consumed=13)


@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), [(1, 1), (1, 4), (2, 3), (3, 1), (4, 4)])
def test_evaluation_shows_every_sample_once_longest_first(num_ranks, micro_batch_size):
    tokens = token_set(LENGTHS)
    ranks = [
        list(eval_batches(tokens, micro_batch_size=micro_batch_size, num_ranks=num_ranks, rank=rank, pad_id=PAD))
        for rank in range(num_ranks)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    together = list(itertools.chain(*ranks))
    assert sorted(samples_in(tokens, together)) == list(range(10))
    assert len(targets_in(together)) == tokens.num_targets.sum()
    assert ranks[0][0]["input_ids"].shape[1] == 30
    for batches in ranks:
        widths = [batch["input_ids"].shape[1] for batch in batches]
        assert widths == sorted(widths, reverse=True)
