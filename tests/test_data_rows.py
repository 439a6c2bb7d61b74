"""Protects what is read from a source: which rows are good, in which order, and how a bad one is named.

python -m pytest -q tests/test_data_rows.py
"""

import ast
import json
import random
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from small_data import ROOT, chat, messages, rows_of, write_lines

from cookbook.data import rows as reading
from cookbook.data import stdlib
from cookbook.data.rows import texts
from cookbook.data.sources import MAX_ROW_BYTES
from cookbook.data.stdlib import load_stdlib
from cookbook.files import RecipeError
from cookbook.objectives import Objective
from cookbook.recipe import Source
from cookbook.row_kinds import MadeUp, kinds


def read_rows(source, on_bad_row, objective="sft"):
    """By the objective's name."""
    return reading.read_rows(source, on_bad_row, Objective.of(name=objective))


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
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, split, revision, streaming: table)
    rows = read_rows(Source(path="some/data"), "drop")
    assert rows.rows == [{"text": "a"}] and rows.num_dropped == {"empty text": 1}
    with pytest.raises(RecipeError, match="some/data:row 2: empty text"):
        read_rows(Source(path="some/data"), "error")


@pytest.mark.parametrize(
    ("module", "expected"), [("rows", "set()"), ("stdlib", "set()"), ("sets", "set()"), ("batches", "{'torch'}")]
)
def test_only_batches_imports_torch(module, expected):
    code = f"import sys, cookbook.data.{module}; print({{'torch', 'transformers', 'datasets'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


# Preferences.

ASK = {"role": "user", "content": "q"}
SYSTEM = {"role": "system", "content": "s"}
EARLIER = [{"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]


def said(content):
    return {"role": "assistant", "content": content}


PAIR = {"prompt": [ASK], "chosen": [said("y")], "rejected": [said("n")]}
PREFERENCES = {
    "texts": ({"prompt": "q", "chosen": "y", "rejected": "n"}, {"prompt": "q", "chosen": "y", "rejected": "n"}),
    "prompt text, conversations": ({"prompt": "q", "chosen": [ASK, said("y")], "rejected": [ASK, said("n")]}, PAIR),
    "prompt text, answers": ({"prompt": "q", "chosen": [said("y")], "rejected": [said("n")]}, PAIR),
    "prompt text, conversations with a system message": (
        {"prompt": "q", "chosen": [SYSTEM, ASK, said("y")], "rejected": [SYSTEM, ASK, said("n")]},
        PAIR | {"prompt": [SYSTEM, ASK]},
    ),
    "prompt messages, answers": (
        {"prompt": [*EARLIER, ASK], "chosen": [said("y")], "rejected": [said("n")]},
        PAIR | {"prompt": [*EARLIER, ASK]},
    ),
    "prompt messages, conversations": (
        {"prompt": [SYSTEM, ASK], "chosen": [SYSTEM, ASK, said("y")], "rejected": [SYSTEM, ASK, said("n")]},
        PAIR | {"prompt": [SYSTEM, ASK]},
    ),
    "no prompt": (
        {"chosen": [*EARLIER, ASK, said("y")], "rejected": [*EARLIER, ASK, said("n")]},
        PAIR | {"prompt": [*EARLIER, ASK]},
    ),
    "answers of several turns": (
        {"prompt": "q", "chosen": [said("a"), ASK, said("y")], "rejected": [said("a"), ASK, said("n"), ASK, said("m")]},
        {"prompt": [ASK, said("a"), ASK], "chosen": [said("y")], "rejected": [said("n"), ASK, said("m")]},
    ),
    "as UltraFeedback has it": (
        {"prompt": "q", "prompt_id": "1", "chosen": [ASK, said("y")], "rejected": [ASK, said("n")]}
        | {"messages": [ASK, said("y")], "score_chosen": 8.0},
        PAIR,
    ),
}


@pytest.mark.parametrize(("raw", "expected"), PREFERENCES.values(), ids=PREFERENCES.keys())
def test_preference_becomes_what_both_share_and_two_ends(tmp_path, raw, expected):
    rows = read_rows(Source(path=write_lines(tmp_path / "rows.jsonl", json.dumps(raw))), "error", "dpo")
    assert rows.rows == [expected]
    assert rows.kind == ("preference" if isinstance(expected["prompt"], str) else "chat_preference")


BAD_PREFERENCES = {
    "same texts": ({"prompt": "q", "chosen": "y", "rejected": "y"}, "chosen and rejected are the same"),
    "same answers": (
        {"prompt": "q", "chosen": [said("y")], "rejected": [said("y")]},
        "chosen and rejected are the same",
    ),
    "no text prompt": ({"chosen": "y", "rejected": "n"}, "empty text: `prompt` is null or missing"),
    "mixed forms": (
        {"prompt": "q", "chosen": "y", "rejected": [said("n")]},
        "chosen and rejected of different form: `chosen` is a str, `rejected` a list",
    ),
    "one goes on": (
        {"prompt": "q", "chosen": [said("y")], "rejected": [said("y"), ASK, said("n")]},
        "chosen and rejected do not answer the same prompt: message 3; the first message in which they differ must be",
    ),
    "different questions": (
        {"chosen": [ASK, said("y")], "rejected": [EARLIER[0], said("n")]},
        "chosen and rejected do not answer the same prompt: message 1;",
    ),
    "another prompt": (
        {"prompt": "other", "chosen": [ASK, said("y")], "rejected": [ASK, said("n")]},
        "prompt is not in the conversation: no user message of `chosen` is the `prompt`",
    ),
    "other prompt messages": (
        {"prompt": EARLIER[:1], "chosen": [ASK, said("y")], "rejected": [ASK, said("n")]},
        "prompt is not in the conversation: `chosen` does not begin with the messages of `prompt`",
    ),
    "no answer": ({"chosen": [ASK], "rejected": [ASK, said("n")]}, "no assistant turn: `chosen`"),
    "role": (
        {"chosen": [ASK, ASK], "rejected": [ASK]},
        "wrong role: message 2 of `chosen` has 'user'; expected assistant",
    ),
    "prompt ends with an answer": (
        {"prompt": [ASK, said("a")], "chosen": [said("y")], "rejected": [said("n")]},
        "wrong role: message 3 of `prompt, chosen` has 'assistant'; expected user",
    ),
    "empty answer": ({"prompt": "q", "chosen": "", "rejected": "n"}, "empty text: `chosen` is empty"),
    "number": ({"prompt": 3, "chosen": [ASK], "rejected": [ASK]}, "messages not a list: `prompt` is a int"),
    "no rejected": ({"prompt": "q", "chosen": "y"}, "missing keys: found 'prompt', 'chosen'"),
}


@pytest.mark.parametrize(("raw", "message"), BAD_PREFERENCES.values(), ids=BAD_PREFERENCES.keys())
def test_bad_preference_is_named_with_its_reason(tmp_path, raw, message):
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(raw))
    with pytest.raises(RecipeError) as error:
        read_rows(Source(path=path), "error", "dpo")
    assert error.value.mistakes[0].startswith(f"{path}:1: {message}")


JUDGEMENTS = {
    "texts": ({"prompt": "q", "completion": "y", "label": True, "id": 3}, None),
    "messages": (
        {"prompt": [SYSTEM, ASK], "completion": [said("y")], "label": False},
        {"prompt": [SYSTEM, ASK], "completion": [said("y")], "label": False},
    ),
    "a text for a prompt": (
        {"prompt": "q", "completion": [said("y")], "label": True},
        {"prompt": [ASK], "completion": [said("y")], "label": True},
    ),
}


@pytest.mark.parametrize(("raw", "expected"), JUDGEMENTS.values(), ids=JUDGEMENTS.keys())
def test_a_judgement_keeps_its_label_and_passes_again(tmp_path, raw, expected):
    expected = expected or {"prompt": "q", "completion": "y", "label": True}
    for i, row in enumerate((raw, expected)):
        rows = read_rows(Source(path=write_lines(tmp_path / f"{i}.jsonl", json.dumps(row))), "error", "kto_zero")
        assert rows.rows == [expected]
        assert rows.kind == ("judgement" if isinstance(raw["completion"], str) else "chat_judgement")


def test_without_its_label_a_judgement_is_a_completion(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(JUDGEMENTS["texts"][0]))
    rows = read_rows(Source(path=path), "error")
    assert (rows.kind, rows.rows) == ("completion", [{"prompt": "q", "completion": "y"}])


BAD_JUDGEMENTS = {
    "text": ({"prompt": "q", "completion": "y", "label": "true"}, "label is not true or false: `label` is 'true'"),
    "number": ({"prompt": "q", "completion": "y", "label": 1}, "label is not true or false: `label` is 1"),
    "a conversation": (
        {"prompt": [ASK], "completion": [ASK, said("y")], "label": True},
        "completion is no answer: its first message must be the assistant's",
    ),
    "no completion": ({"prompt": [ASK], "completion": [], "label": True}, "completion is no answer"),
    "prompt ends with an answer": (
        {"prompt": [ASK, said("a")], "completion": [said("y")], "label": True},
        "wrong role: message 3 of `prompt, completion` has 'assistant'; expected user",
    ),
}


@pytest.mark.parametrize(("raw", "message"), BAD_JUDGEMENTS.values(), ids=BAD_JUDGEMENTS.keys())
def test_bad_judgement_is_named_with_its_reason(tmp_path, raw, message):
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(raw))
    with pytest.raises(RecipeError) as error:
        read_rows(Source(path=path), "error", "kto_zero")
    assert error.value.mistakes[0].startswith(f"{path}:1: {message}")


@pytest.mark.parametrize("kind", kinds().values(), ids=lambda kind: kind.name)
def test_a_made_up_row_is_a_good_one_of_its_kind(kind):
    row = kind.check(kind.made_up(MadeUp(random.Random(0), ["a", "b"])))
    assert kind.check(row) == row and kind.matches(row)
    assert (kind.texts is None) != (kind.chats is None)


def test_texts_and_messages_in_one_source_are_two_kinds(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", *(json.dumps(PREFERENCES[name][0]) for name in ("texts", "no prompt")))
    with pytest.raises(RecipeError, match=r"rows\.jsonl:2: another kind of row: `chosen` and `rejected` of messages"):
        read_rows(Source(path=path), "error", "dpo")


@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
@pytest.mark.parametrize(
    ("raw", "objective", "message"),
    [
        (
            PREFERENCES["texts"][0],
            "sft",
            "a row with `chosen` and `rejected`, but objective.name is sft, which trains on",
        ),
        (chat("a", "b"), "dpo", "a row with `messages`, but .* dpo, which trains on `chosen` and `rejected`; .* sft"),
        (chat("a", "b"), "cpt", "a row with `messages`, but .* cpt, which trains on `text`; .* objective.name: sft"),
        ({"text": "a"}, "dpo", "a row with `text`, but .* objective.name: sft or cpt"),
    ],
)
def test_rows_of_another_objective_stop_the_run_at_once(tmp_path, raw, objective, message, on_bad_row):
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(raw), "{}")
    with pytest.raises(RecipeError, match=f"rows.jsonl:1: {message}") as error:
        read_rows(Source(path=path), on_bad_row, objective)
    assert len(error.value.mistakes) == 1


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
