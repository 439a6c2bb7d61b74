"""Protects what is read from a source: which rows are good, in which order, and how a bad one is named.

python -m pytest -q tests/test_data_rows.py
"""

import ast
import gzip
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
import yaml
from small_data import ROOT, chat, make_tokenizer, messages, rows_of, run_tokenize, write_lines

from cookbook.config.objectives import Objective
from cookbook.config.sections import DataSection, Source
from cookbook.rows.row_columns import kinds_of
from cookbook.rows.row_kinds import TextGenerator, kinds
from cookbook.system.files import RecipeError
from cookbook.training.data import rows as reading
from cookbook.training.data import stdlib
from cookbook.training.data.readers import MAX_ROW_BYTES, MAX_TEXT_CHARACTERS
from cookbook.training.data.rows import texts
from cookbook.training.data.sources import unread_note
from cookbook.training.data.stdlib import load_stdlib


def read_rows(source, on_bad_row, objective="sft"):
    """By the objective's name."""
    return reading.read_rows(source, on_bad_row, Objective.of(name=objective))


GOOD = messages(("user", "hi"), ("assistant", "ho"))
BAD_LINES = {
    "not JSON": ('{"text": ', "not JSON: Expecting value at column 10"),
    "not an object": ('["hi"]', "not an object: a list of 1 item; a row is"),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8: byte 0xff at column 11"),
    "key twice": ('{"text": "a", "text": "b"}', "key given twice: 'text'"),
    "too deep": ("[" * 100_000, "not JSON: nested too deeply"),
    "missing keys": ('{"prompt": "a"}', "missing keys: found 'prompt'; a row must have `messages`"),
    "no key": ("{}", "missing keys: found none"),
    "null": ('{"text": null}', "empty text: `text` is null"),
    "empty": ('{"text": ""}', "empty text: `text` is empty"),
    "white space": ('{"prompt": "a", "completion": " \\n"}', "empty text: `completion` is only whitespace"),
    "number for text": ('{"text": 3}', "not text: `text` is a number"),
    "messages no list": ('{"messages": "hi"}', "messages not a list: `messages` is a string; write a list"),
    "messages empty": ('{"messages": []}', "messages empty"),
    "message no object": ('{"messages": ["hi"]}', "message not an object: message 1 is a string"),
    "unknown role": (messages(("narrator", "a")), "wrong role: message 1 has 'narrator'; a role is system"),
    "tool": (
        messages(("user", "a"), ("tool", "b")),
        "tool result without a call: message 2 has the role tool; no message before it has `tool_calls`",
    ),
    "null content": (messages(("user", None)), "empty text: message 1 content is null or missing"),
    "list content": (messages(("user", ["a"])), "not text: message 1 content is a list with a string"),
    "object content": (messages(("user", {"de": "a"})), "not text: message 1 content is an object with the key 'de'"),
    "no role": (
        '{"messages": [{"speaker": "a", "says": "b"}]}',
        "wrong role: message 1 is an object with the keys 'speaker', 'says', no role; a role is system",
    ),
    "empty content": (messages(("user", "a"), ("assistant", "")), "empty text: message 2 content is empty"),
    "no assistant": (messages(("system", "s"), ("user", "a")), "no assistant turn"),
    "reasoning": (
        '{"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]}',
        "message with more than text: message 1 has `reasoning_content`, but its role is user",
    ),
    "picture": (
        messages(("user", [{"type": "text", "text": "a"}, {"type": "image_url"}])),
        "not text: message 1 content is a list with 'image_url'; only parts of text are read",
    ),
    "call without a name": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": {}}]}]}',
        "not a tool call: message 2 has {'function': {}}; it needs a name",
    ),
    "loss on a question": (
        '{"messages": [{"role": "user", "content": "a", "train": true}]}',
        "train: true of another role: message 1",
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
    path = write_lines(tmp_path / "rows.jsonl", *["{}"] * 25, GOOD)
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
    jsonl = write_lines(tmp_path / "rows.jsonl", *(json.dumps(row | {"id": f"x{i}"}) for i, row in enumerate(values)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "rows.parquet")
    of_lines, other = (read_rows(Source(path=path), "error") for path in (jsonl, str(tmp_path / "rows.parquet")))
    assert of_lines.rows == other.rows == values
    assert of_lines.fingerprint == other.fingerprint
    assert of_lines.fingerprint != read_rows(Source(path=jsonl, max_rows=1), "error").fingerprint


def test_columns_of_other_kinds_that_are_null_do_not_make_a_row_ambiguous(tmp_path):
    others = {"prompt": None, "completion": None, "chosen": None, "rejected": None, "text": None}
    rows = [chat("a", "b"), chat("c", "d")]
    table = pyarrow.Table.from_pylist([row | others for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    lines = write_lines(tmp_path / "rows.jsonl", *(json.dumps(row | others) for row in rows))
    for path in (tmp_path / "rows.parquet", lines):
        assert read_rows(Source(path=str(path)), "error").rows == rows
    assert kinds_of(rows[0] | others) == {"messages"}  # what `init` and `check` go by


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
    [(b"PAR1 no", "not a readable parquet file"), (None, "missing keys: found 'frage'; a row must have `messages`")],
    ids=["broken", "no known column"],
)
def test_parquet_that_cannot_serve_is_an_error(tmp_path, content, message):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"frage": ["a"]}), path)
    if content:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        read_rows(Source(path=str(path)), "drop")


ANSWERS = [{"question": "q, \n1", "answer": "y\u00e4"}, {"question": "r", "answer": "z"}]
READ = [{"user": "q, \n1", "assistant": "y\u00e4"}, {"user": "r", "assistant": "z"}]


def as_cells(delimiter):
    lines = ["question", "answer"], *(row.values() for row in ANSWERS)
    return "".join(delimiter.join(f'"{cell}"' for cell in line) + "\r\n" for line in lines).encode()


JSON_LINES = "\n".join(map(json.dumps, ANSWERS)).encode()
FILES = {
    "a.json": json.dumps(ANSWERS, indent=1).encode(),
    "lines.json": JSON_LINES,
    "a.csv": b"\xef\xbb\xbf" + as_cells(","),
    "a.tsv": as_cells("\t"),
    "a.jsonl.gz": gzip.compress(JSON_LINES),
    "a.csv.gz": gzip.compress(as_cells(",")),
    "a.json.zst": pyarrow.compress(json.dumps(ANSWERS).encode(), "zstd", asbytes=True),
}


@pytest.mark.parametrize(("name", "content"), FILES.items(), ids=FILES.keys())
def test_every_format_gives_the_same_rows(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path / name, tmp_path):
        assert read_rows(Source(path=str(path)), "error").rows == READ


@pytest.mark.parametrize("is_stream", [True, False])
def test_arrow_files_give_the_same_rows(tmp_path, is_stream):
    table = pyarrow.Table.from_pylist([row | {"id": 1} for row in ANSWERS])
    path = str(tmp_path / "a.arrow")
    with (pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table)
    assert read_rows(Source(path=path), "error").rows == READ


def test_what_save_to_disk_wrote_is_read_without_the_caches_beside_it(tmp_path):
    import datasets

    train, test = datasets.Dataset.from_list(ANSWERS), datasets.Dataset.from_list(ANSWERS[:1])
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "both")
    train.save_to_disk(tmp_path / "one", num_shards=2)
    (tmp_path / "one" / "cache-1.arrow").write_bytes(b"no")
    assert read_rows(Source(path=str(tmp_path / "both")), "error").rows == READ
    assert read_rows(Source(path=str(tmp_path / "both"), split="test"), "error").rows == READ[:1]
    assert read_rows(Source(path=str(tmp_path / "one")), "error").rows == READ


def test_text_files_are_texts_and_a_long_one_is_broken_at_a_line_end(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "testing.md").write_text("# a")
    (tmp_path / "sub" / "b.md").write_text("# b\n\nc")
    rows = read_rows(Source(path=str(tmp_path)), "error", "cpt").rows
    assert sorted(row["text"] for row in rows) == ["# a", "# b\n\nc"]
    line = "\u00e4" * 96 + "\n"
    assert MAX_TEXT_CHARACTERS % len(line), "each part would end with a line in any case"
    (tmp_path / "long.txt").write_text(line * (MAX_TEXT_CHARACTERS // len(line) * 2 + 3))
    long = [row["text"] for row in read_rows(Source(path=str(tmp_path / "long.txt")), "error", "cpt").rows]
    assert len(long) == 3 and "".join(long) == (tmp_path / "long.txt").read_text()
    assert all(text.endswith("\n") for text in long)


BROKEN_FILES = {
    "a.json": (b'[{"text": ', "not a list of objects in JSON: Expecting value"),
    "comma.json": (b'[{"text": "a"}, ]', "not a list of objects in JSON: Expecting value, in row 2"),
    "middle.json": (
        b'[{"text": "a"} {"text": "b"}]',
        "not a list of objects in JSON: neither a comma nor the end of the list",
    ),
    "after.json": (b'[{"text": "a"}] []', "not a list of objects in JSON: more text after the list"),
    "end.json": (b'[{"text": "a"}', "not a list of objects in JSON: neither a comma nor the end of the list"),
    "number.json": (b"[12", "not a list of objects in JSON: the list does not end"),
    "empty.json": (b" [ ] ", "no row left to train on"),
    "twice.json": (b'[{"text": "a", "text": "b"}]', "not a list of objects in JSON: key given twice: 'text'"),
    "a.csv": (b'text\n"a', "not readable as cells: unexpected end of data"),
    "twice.csv": (b"text,text\na,b\n", "two columns are called 'text'"),
    "a.jsonl.gz": (b"no", "cannot be read: Not a gzipped file"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}' * 99)[:-20], "not a readable jsonl file"),
    "a.jsonl.zst": (b"no no no no no", "cannot be read"),
    "a.arrow": (b"no no no no no", "not a readable arrow file"),
    "a.txt": (b"\xff", "no row left to train on\n.*part 1: not UTF-8: byte 0xff"),
}


@pytest.mark.parametrize(("name", "content"), BROKEN_FILES.items(), ids=BROKEN_FILES.keys())
def test_a_broken_file_is_an_error(tmp_path, name, content):
    (tmp_path / name).write_bytes(content[0])
    with pytest.raises(RecipeError, match=f"(?s){name}(:[0-9]+)?: {content[1]}"):
        read_rows(Source(path=str(tmp_path / name)), "drop")


def test_bad_rows_of_a_table_are_named_with_their_line(tmp_path):
    path = write_lines(tmp_path / "a.csv", "text,id", "a,1", "b,1,2", b"\xff,3", ",4", "c")
    rows = read_rows(Source(path=path), "drop")
    assert list(texts(rows)) == ["a", "c"]
    assert rows.num_dropped == {"more cells than columns": 1, "not UTF-8": 1, "empty text": 1}
    with pytest.raises(RecipeError, match=r"a\.csv:3: more cells than columns: 3 cells, 2 columns"):
        read_rows(Source(path=path), "error")


def test_a_table_that_is_not_utf_8_is_refused_with_how_to_save_it(tmp_path):
    path = write_lines(tmp_path / "a.csv", "question,answer", "Erkläre x,y".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"a\.csv:2: not UTF-8: byte 0xe4 after 'Erkl'; save the file as"):
        read_rows(Source(path=path), "error")


def test_the_empty_cell_that_is_named_is_one_that_the_row_needs(tmp_path):
    path = write_lines(tmp_path / "a.csv", "instruction,input,output", "a,,b", "only")
    with pytest.raises(RecipeError, match=r"a\.csv:3: empty text: `output` is null"):
        read_rows(Source(path=path), "error")


def test_a_column_whose_name_is_almost_right_is_found(tmp_path):
    path = write_lines(tmp_path / "a.csv", "instruction,input,ouput", "a,b,c", "d,,e")
    with pytest.raises(RecipeError) as error:
        read_rows(Source(path=path), "error")
    first, more, advice = error.value.mistakes
    assert "(did you mean `output`, not 'ouput'?)" in first and more == "... and 1 more row with the same mistake"
    columns = yaml.safe_load(advice.partition("\n")[2])["data"]["columns"]
    assert columns == {"user": "instruction", "context": "input", "assistant": "ouput"}
    assert len(read_rows(Source(path=path, columns=columns), "error").rows) == 2


@pytest.mark.parametrize(
    ("files", "split", "expected"),
    [
        (["b.jsonl", "a.jsonl", "notes.txt", "info.json", "b.jsonl.gz", ".hidden.jsonl"], "train", ["a", "b"]),
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
    ("files", "split", "unread"),
    [
        (["b.jsonl", "README.md", "state.json", "config.json", "test.csv"], "train", ""),
        (["b.jsonl", "more.csv"], "train", "more.csv is"),
        (["train.jsonl", "extra.jsonl", "b.parquet"], "train", "b.parquet, extra.jsonl are"),
        (["test/x.jsonl", "test/y.csv", "a.jsonl"], "test", "y.csv is"),
        (["train/a.csv", "b.jsonl"], "train", "a.csv is"),
    ],
)
def test_files_of_rows_that_a_folder_is_not_read_for_are_named(tmp_path, files, split, unread):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, '{"text": "a"}')
    expected = f"{tmp_path}: {unread} not read beside the other files; list files as sources" if unread else None
    assert unread_note(Source(path=str(tmp_path), split=split)) == expected


def test_files_of_formats_that_nobody_reads_are_named(tmp_path):
    for name in ("a.jsonl", "b.ndjson", "c.jsonl.xz", "d.of_next_year", "README.md", "LICENSE", "info.json"):
        write_lines(tmp_path / name, '{"text": "a"}')
    others = "b.ndjson, c.jsonl.xz, d.of_next_year are not read beside the other files; rows are read of .jsonl, "
    assert f"{tmp_path}: {others}" in str(unread_note(Source(path=str(tmp_path))))
    pattern = f"{tmp_path}/[ab].*"
    assert f"{pattern}: {tmp_path}/b.ndjson is not read" in str(unread_note(Source(path=pattern)))
    assert unread_note(Source(path=f"{tmp_path}/a*")) is None


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
    code = f"import sys, cookbook.training.data.{module}\n"
    code += "print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
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
    "no text prompt": (
        {"chosen": "y", "rejected": "n"},
        "no prompt: `prompt` is missing, and `chosen` and",
    ),
    "mixed forms": (
        {"prompt": "q", "chosen": "y", "rejected": [said("n")]},
        "chosen and rejected of different form: `chosen` is a string, `rejected` a list of 1 item",
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
        "no assistant turn: `chosen`",
    ),
    "empty answer": ({"prompt": "q", "chosen": "", "rejected": "n"}, "empty text: `chosen` is empty"),
    "number": ({"prompt": 3, "chosen": [ASK], "rejected": [ASK]}, "messages not a list: `prompt` is a number"),
    "no rejected": ({"prompt": "q", "chosen": "y"}, "missing keys: found 'prompt', 'chosen'"),
}


@pytest.mark.parametrize(("raw", "message"), BAD_PREFERENCES.values(), ids=BAD_PREFERENCES.keys())
def test_bad_preference_is_named_with_its_reason(tmp_path, raw, message):
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(raw))
    with pytest.raises(RecipeError) as error:
        read_rows(Source(path=path), "error", "dpo")
    assert error.value.mistakes[0].startswith(f"{path}:1: {message}")


LABELS = ("true", "false", "True", "FALSE", 1, 0, "1", "0", 1.0, 0.0, "1.0", " 0.0 ")
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


def test_a_label_may_be_a_text_or_a_number(tmp_path):
    """As tables without types have it; any text that is not empty is true to Python."""
    lines = [json.dumps({"prompt": "q", "completion": "y", "label": label}) for label in LABELS]
    rows = read_rows(Source(path=write_lines(tmp_path / "rows.jsonl", *lines)), "error", "kto_zero").rows
    assert [row["label"] for row in rows] == [True, False] * (len(LABELS) // 2)


@pytest.mark.parametrize("name", JUDGEMENTS)
def test_without_its_label_a_judgement_is_a_completion(tmp_path, name):
    """Which the recipe must say: a bad answer would be trained as a good one."""
    raw, expected = JUDGEMENTS[name]
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(raw))
    with pytest.raises(
        RecipeError, match=r"`label` is not read: it is (true|false); objective.name sft would train bad"
    ):
        read_rows(Source(path=path), "error")
    rows = read_rows(Source(path=path, ignore=["label"]), "error")
    kept = {key: value for key, value in (expected or raw).items() if key in ("prompt", "completion")}
    assert (rows.kind, rows.rows) == ("completion" if expected is None else "chat_completion", [kept])


BAD_JUDGEMENTS = {
    "text": ({"prompt": "q", "completion": "y", "label": "good"}, "label is not true or false: `label` is 'good'"),
    "number": ({"prompt": "q", "completion": "y", "label": 2}, "label is not true or false: `label` is 2"),
    "a conversation": (
        {"prompt": [ASK], "completion": [ASK, said("y")], "label": True},
        "completion is not an answer: its first message must be the assistant's",
    ),
    "no completion": ({"prompt": [ASK], "completion": [], "label": True}, "completion is not an answer"),
}


@pytest.mark.parametrize(("raw", "message"), BAD_JUDGEMENTS.values(), ids=BAD_JUDGEMENTS.keys())
def test_bad_judgement_is_named_with_its_reason(tmp_path, raw, message):
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(raw))
    with pytest.raises(RecipeError) as error:
        read_rows(Source(path=path), "error", "kto_zero")
    assert error.value.mistakes[0].startswith(f"{path}:1: {message}")


GROUP = {"prompt": [ASK], "completions": ["y", "no"], "rewards": [1, 0.5]}
BAD_GROUPS = {
    "one answer": ({"completions": ["y"], "rewards": [1]}, "a group of fewer than two answers: `completions` has 1"),
    "no list": ({"completions": "y"}, "completions not a list: `completions` is a string"),
    "a reward missing": ({"rewards": [1]}, "rewards of another length: `rewards` has 1 for 2 completions"),
    "not finite": ({"rewards": [1, float("nan")]}, "not a finite number: `rewards` has nan"),
    "a word": ({"rewards": [1, "good"]}, "not a finite number: `rewards` has 'good'"),
    "an empty answer": ({"completions": ["y", ""]}, "empty text: completion 2"),
    "lists missing": ({"logprobs": [[-1.0]]}, "logprobs of another length: `logprobs` is 1 lists for 2 completions"),
    "probabilities": ({"logprobs": [[0.5], [0.5]]}, "logprobs above 0"),
}


@pytest.mark.parametrize("prompt", [[ASK], "q"], ids=["chat", "text"])
def test_all_bad_groups_are_named_together_with_line_and_reason(tmp_path, prompt):
    rows = [GROUP | {"prompt": prompt}] + [GROUP | {"prompt": prompt} | bad for bad, _ in BAD_GROUPS.values()]
    path = write_lines(tmp_path / "rows.jsonl", *map(json.dumps, rows))
    with pytest.raises(RecipeError) as error:
        read_rows(Source(path=path), "error", "grpo")
    for line, (_, message) in enumerate(BAD_GROUPS.values(), start=2):
        here = [mistake for mistake in error.value.mistakes if mistake.startswith(f"{path}:{line}: ")]
        assert here and message in here[0], (here, message)


def test_each_answer_of_a_group_is_a_sample_with_its_advantage_and_its_log_probabilities(tmp_path):
    rows = [GROUP | {"logprobs": [[-1.0] * 2, [-2.0] * 3]}, GROUP | {"completions": ["no", "no"], "rewards": [2, 2]}]
    rows[1]["logprobs"] = [[-3.0] * 3, [-4.0] * 3]
    rows_read = read_rows(Source(path=write_lines(tmp_path / "rows.jsonl", *map(json.dumps, rows))), "error", "grpo")
    tokens, _ = run_tokenize(rows_read, make_tokenizer(), max_length=60, name="grpo")
    assert (rows_read.kind, len(tokens), tokens.num_targets.tolist()) == ("chat_group", 4, [2, 3, 3, 3])
    assert tokens.old_logps.tolist() == [-1.0] * 2 + [-2.0] * 3 + [-3.0] * 3 + [-4.0] * 3
    assert tokens.values.tolist() == pytest.approx([0.25 / (0.125**0.5 + 1e-4), -0.25 / (0.125**0.5 + 1e-4), 0, 0])
    assert [remark.num_rows for remark in tokens.remarks if "one reward" in remark.words] == [1]
    short, _ = run_tokenize(rows_read, make_tokenizer(), max_length=int(tokens.lengths.max()) - 2, name="grpo")
    assert short.num_targets.tolist() == [2, 2, 2, 2] and len(short.old_logps) == 8


SAMPLED = {"prompt_ids": [5, 6], "completion_ids": [[7, 2], [7, 8, 9]], "rewards": [1, 0]}


def test_tokens_that_were_sampled_are_trained_as_they_are(tmp_path):
    """The second answer was cut off: no end token follows it, as one does where texts are tokenized."""
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(SAMPLED | {"logprobs": [[-1.0, -2.0], [-3.0] * 3]}))
    rows_read = read_rows(Source(path=path), "error", "grpo")
    tokens, _ = run_tokenize(rows_read, make_tokenizer(), max_length=60, name="grpo")
    assert tokens.ids.tolist() == [5, 6, 7, 2, 5, 6, 7, 8, 9]
    assert tokens.is_label.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert tokens.old_logps.tolist() == [-1.0, -2.0, -3.0, -3.0, -3.0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt_ids": []}, "not a list of tokens: `prompt_ids` is empty"),
        ({"completion_ids": [[7], []]}, "not a list of tokens: `completion_ids` 2 is empty"),
        ({"completion_ids": [[7], [-1]]}, "not a token: `completion_ids` 2 has -1"),
        ({"completion_ids": [[7], [True]]}, "not a token: `completion_ids` 2 has True"),
        ({"completion_ids": [[7]]}, "a group of fewer than two answers: `completion_ids` has 1"),
        ({"rewards": [1]}, "rewards of another length: `rewards` has 1 for 2 completions"),
    ],
)
def test_bad_tokens_of_a_group_are_named(tmp_path, bad, message):
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(SAMPLED | bad))
    with pytest.raises(RecipeError) as error:
        read_rows(Source(path=path), "error", "grpo")
    assert error.value.mistakes[0].startswith(f"{path}:1: {message}")


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"logprobs": [[-1.0] * 2, [-1.0] * 2]}, "logprobs of another length: `logprobs` 2 has 2 for 3 trained tokens"),
        ({"logprobs": None}, "logprobs in some rows only: the first row has some, this not"),
    ],
)
def test_log_probabilities_that_are_not_those_of_the_tokens_are_bad_rows(tmp_path, second, reason):
    good = GROUP | {"logprobs": [[-1.0] * 2, [-1.0] * 3]}
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(good), json.dumps(good | second))
    rows = read_rows(Source(path=path), "error", "grpo")
    with pytest.raises(RecipeError) as error:
        run_tokenize(rows, make_tokenizer(), max_length=60, name="grpo")
    assert [mistake for mistake in error.value.mistakes if reason in mistake] == [error.value.mistakes[0]]
    assert "rows.jsonl:2: " in error.value.mistakes[0] or "row 2" in error.value.mistakes[0], error.value.mistakes


@pytest.mark.parametrize("kind", kinds().values(), ids=lambda kind: kind.name)
def test_a_made_up_row_is_a_good_one_of_its_kind(kind):
    row = kind.check(kind.made_up(TextGenerator(random.Random(0), ["a", "b"])))
    assert kind.check(row) == row and kind.matches(row)
    assert sum(way is not None for way in (kind.texts, kind.chats, kind.tokens)) == 1


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


# Shapes of other projects.

ALPACA = {"instruction": "sum", "input": "1 2", "output": "3"}
TURNS = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "y"}]
SHAREGPT = {"conversations": TURNS, "id": "x"}
FOREIGN = {
    "ShareGPT": (SHAREGPT, "sft", {"messages": [SYSTEM, ASK, said("y")]}),
    "conversations with roles": ({"conversations": [ASK, said("y")]}, "sft", {"messages": [ASK, said("y")]}),
    "messages of ShareGPT's roles": (json.loads(messages(("human", "q"), ("gpt", "y"))), "sft", chat("q", "y")),
    "Alpaca": (ALPACA, "sft", {"user": "sum", "context": "1 2", "assistant": "3"}),
    "Alpaca without an input": (ALPACA | {"input": ""}, "sft", {"user": "sum", "assistant": "3"}),
    "OpenOrca": (
        {"id": 1, "system_prompt": "s", "question": "q", "response": "y"},
        "sft",
        {"system": "s", "user": "q", "assistant": "y"},
    ),
    "question, answer": ({"question": "q", "answer": "y"}, "sft", {"user": "q", "assistant": "y"}),
    "prompt, response": ({"prompt": "q", "response": "y"}, "sft", {"user": "q", "assistant": "y"}),
    "a preference without its prompt": (
        {"chosen": "Human: why so? Assistant: you see", "rejected": "Human: why so? Assistant: yes"},
        "dpo",
        {"prompt": "Human: why so? Assistant:", "chosen": " you see", "rejected": " yes"},
    ),
    "a beginning of the other text": (
        {"chosen": "q a b", "rejected": "q a"},
        "dpo",
        {"prompt": "q", "chosen": " a b", "rejected": " a"},
    ),
    "a preference with a question": ({"question": "q", "chosen": "y", "rejected": "n"}, "dpo", PREFERENCES["texts"][0]),
    "ShareGPT's preference": (
        {"conversations": TURNS[:2], "chosen": TURNS[2], "rejected": {"from": "gpt", "value": "n"}},
        "dpo",
        PAIR | {"prompt": [SYSTEM, ASK]},
    ),
    "a judged response": (
        {"prompt": "q", "response": "y", "label": "True"},
        "kto_zero",
        {"prompt": "q", "completion": "y", "label": True},
    ),
    "a label of 0": (
        {"prompt": "q", "completion": "y", "label": 0},
        "kto_zero",
        {"prompt": "q", "completion": "y", "label": False},
    ),
}


@pytest.mark.parametrize(("raw", "objective", "expected"), FOREIGN.values(), ids=FOREIGN.keys())
def test_shapes_of_other_projects_are_read(tmp_path, raw, objective, expected):
    rows = read_rows(Source(path=write_lines(tmp_path / "rows.jsonl", json.dumps(raw))), "error", objective)
    assert rows.rows == [expected]
    assert kinds()[rows.kind].check(rows.rows[0]) == expected


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, said("y")]
SAME_CALLS = {
    "arguments as text": [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": [{"type": "text", "text": "2"}]},
        said("y"),
    ],
    "function_call": [
        ASK,
        {"role": "assistant", "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "content": "2"},
        said("y"),
    ],
    "ShareGPT": [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "y"},
    ],
}


@pytest.mark.parametrize("turns", SAME_CALLS.values(), ids=SAME_CALLS.keys())
def test_tool_calls_of_every_form_are_the_same_chat(tmp_path, turns):
    raw = {"conversations": turns, "tools": '[{"name": "add"}]', "system": ""}
    rows = read_rows(Source(path=write_lines(tmp_path / "rows.jsonl", json.dumps(raw))), "error")
    assert rows.rows == [{"messages": CALLING, "tools": [{"name": "add"}]}]
    assert kinds()[rows.kind].check(rows.rows[0]) == rows.rows[0]


RENAMED = {
    "ShareGPT": (SHAREGPT, "rows look like ShareGPT: conversations -> messages, from -> role, value -> content"),
    "Alpaca": (ALPACA, "rows look like Alpaca: instruction -> user, input -> context, output -> assistant"),
    "own": (chat("q", "y") | ALPACA, ""),
}


@pytest.mark.parametrize(("raw", "words"), RENAMED.values(), ids=RENAMED.keys())
def test_what_was_understood_is_in_words(tmp_path, raw, words):
    assert read_rows(Source(path=write_lines(tmp_path / "rows.jsonl", json.dumps(raw))), "error").renamed == words


AMBIGUOUS = {
    "two kinds": (SHAREGPT | ALPACA, "`conversations` as well as `instruction` and `output`"),
    "a text that may be rendered from the rest": (
        ALPACA | {"text": "t"},
        "`instruction` and `output` as well as `text`",
    ),
    "two shapes of a kind": (
        {"question": "q", "answer": "y", "response": "z"},
        "`question` and `response` as well as `question` and `answer`",
    ),
}


@pytest.mark.parametrize(("raw", "words"), AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_a_row_of_two_foreign_shapes_names_both(tmp_path, raw, words):
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(raw))
    with pytest.raises(RecipeError) as error:
        read_rows(Source(path=path), "error")
    assert error.value.mistakes[0].startswith(f"{path}:1: two kinds in one row: {words}")


def test_columns_choose_between_shapes_and_name_what_is_not_known(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(SHAREGPT | ALPACA | {"Frage": "f"}))
    chosen = {"user": "Frage", "assistant": "output"}
    assert read_rows(Source(path=path, columns=chosen), "error").rows == [{"user": "f", "assistant": "3"}]
    chat_rows = read_rows(Source(path=path, columns={"messages": "conversations"}), "error")
    assert chat_rows.kind == "messages"
    plain = read_rows(Source(path=path, columns={"prompt": "Frage", "completion": "output"}), "error")
    assert (plain.kind, plain.rows) == ("completion", [{"prompt": "f", "completion": "3"}])
    assert len({chat_rows.fingerprint, plain.fingerprint}) == 2
    with pytest.raises(RecipeError, match=r"with columns \{text: nothing\} it has 'conversations'"):
        read_rows(Source(path=path, columns={"text": "nothing"}), "error")
    with pytest.raises(RecipeError, match=r"did you mean 'conversations', not 'Conversation '\?"):
        read_rows(Source(path=path, columns={"messages": "Conversation "}), "error")
    other = write_lines(tmp_path / "other.jsonl", GOOD)
    with pytest.raises(RecipeError, match=r"it has 'messages', which would be read without data.columns"):
        read_rows(Source(path=other, columns={"text": "nothing"}), "error")


def test_columns_name_the_keys_of_messages(tmp_path):
    turns = [{"speaker": "human", "says": "question"}, {"speaker": "assistant", "says": "ho"}]
    path = write_lines(tmp_path / "rows.jsonl", json.dumps({"talk": turns}))
    columns = {"messages": "talk", "role": "speaker", "content": "says"}
    assert read_rows(Source(path=path, columns=columns), "error").rows == [chat("question", "ho")]


def test_messages_under_the_names_of_text_preferences_are_a_bad_row(tmp_path):
    answer = [{"role": "assistant", "content": "a"}]
    row = {"prompt": "x", "chosen_response": answer, "rejected_response": answer}
    with pytest.raises(RecipeError, match="missing keys"):
        read_rows(Source(path=write_lines(tmp_path / "rows.jsonl", json.dumps(row))), "error", "dpo")


@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
@pytest.mark.parametrize(
    ("raw", "objective", "columns"),
    [
        ({"id": "x", "Frage": "was ist das", "Antwort": "ein Satz"}, "sft", {"user": "Frage", "assistant": "Antwort"}),
        ({"id": 7, "body": "some words"}, "cpt", {"text": "body"}),
        (
            {"talk": [{"who": "human", "says": "a question"}, {"who": "gpt", "says": "yes"}]},
            "sft",
            {"messages": "talk", "role": "who", "content": "says"},
        ),
    ],
    ids=["question", "text", "messages"],
)
def test_rows_that_all_fail_alike_are_reported_once_with_the_lines_that_would_read_them(
    tmp_path, raw, objective, columns, on_bad_row
):
    path = write_lines(tmp_path / "rows.jsonl", *[json.dumps(raw)] * 3)
    with pytest.raises(RecipeError) as error:
        read_rows(Source(path=path), on_bad_row, objective)
    *_, first, more, advice = error.value.mistakes
    assert first.startswith(f"{path}:1: missing keys") and more == "... and 2 more rows with the same mistake"
    lines = advice.partition("\n")[2]
    assert yaml.safe_load(lines) == {"data": {"columns": columns}}
    assert len(read_rows(Source(path=path, columns=columns), "error", objective).rows) == 3


def test_columns_of_a_recipe_are_those_of_each_source_without_its_own():
    data = DataSection(
        train=["a.jsonl", {"path": "b.jsonl", "columns": {}}, {"path": "c.jsonl", "columns": {"text": "c"}}],
        eval={"x": "d.jsonl", "y": {"path": "python-stdlib", "split": "test"}},
        columns={"text": "body"},
    )
    assert [source.columns for source in data.train] == [{"text": "body"}, {}, {"text": "c"}]
    assert [source.columns for source in data.eval.values()] == [{"text": "body"}, None]


# SHA-256 of rows and of tokens, from the version that read no shapes but its own.
UNCHANGED = {
    "chats": (
        "sft",
        [chat("hi", "ho"), {"id": 1, "messages": [SYSTEM | {"id": "x"}, *chat("a", "b", "c", "d")["messages"]]}],
        "066395fdb676 f3dc0845eb47",
    ),
    "chats beside other columns": (
        "sft",
        [chat("hi", "ho") | {"problem": "p", "solution": "s", "user": "u", "assistant": "a", "tools": None}],
        "fa4598c57031 23b75900c568",
    ),
    "text beside Alpaca's columns": (
        "cpt",
        [{"text": "t u", "instruction": "i", "input": "", "output": "o"}],
        "52e5efcf0386 7749a9dd4bbf",
    ),
    "completions": ("sft", [{"prompt": "ask", "completion": "answer"}], "7a3ff4ec5e1c 6d8a975a9380"),
    "texts": ("cpt", [{"text": "a text"}], "022fb0a7ae63 206f61a3e22c"),
    "chat preferences": (
        "dpo",
        [raw for raw, _ in PREFERENCES.values() if not isinstance(raw["chosen"], str)],
        "b63a0d302e35 a58ae4417eff",
    ),
    "preferences": ("dpo", [PREFERENCES["texts"][0]], "733ce284da8b 0145bd8dd0f3"),
    "judgements": ("kto_zero", [JUDGEMENTS["texts"][0]], "5d80eda197cc 9274a7f3997b"),
    "chat judgements": (
        "kto_zero",
        [JUDGEMENTS["messages"][0], JUDGEMENTS["a text for a prompt"][0]],
        "7fe2a6beb9d3 743f1c5d5579",
    ),
}


@pytest.mark.parametrize(("objective", "raws", "expected"), UNCHANGED.values(), ids=UNCHANGED.keys())
def test_rows_that_were_read_before_give_the_same_tokens(tmp_path, objective, raws, expected):
    rows = read_rows(Source(path=write_lines(tmp_path / "rows.jsonl", *map(json.dumps, raws))), "error", objective)
    tokens, _ = run_tokenize(rows, make_tokenizer(), max_length=1000 if objective == "dpo" else 60, name=objective)
    assert f"{rows.fingerprint[:12]} {tokens.fingerprint[:12]}" == expected


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
