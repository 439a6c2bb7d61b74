"""Protects that rows are what they say in whatever format they are stored: one fingerprint, and no null of Arrow's.

python -m pytest -q tests/test_data_formats.py
"""

import csv
import datetime
import decimal
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from row_files import JSON_WRITERS, WRITERS, needs_json, save_to_disk, write_data_set, write_json_lines, write_parquet
from small_data import write_lines

from cookbook.config.objectives import Objective
from cookbook.config.sections import DataSection, Source
from cookbook.system.files import RecipeError
from cookbook.training.data import arrow
from cookbook.training.data.passes import Passes
from cookbook.training.data.readers import ROWS_PER_READ, file_rows
from cookbook.training.data.rows import BadRows, Rows, read_rows

SFT = Objective.of(name="sft")


def call(name, **arguments):
    return {"id": f"id_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def talk(*calls, question="Frage?", answer="Antwort"):
    results = [{"role": "tool", "content": f"→ {call['id']}", "tool_call_id": call["id"]} for call in calls]
    user, end = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    return (
        [user, {"role": "assistant", "content": "", "tool_calls": list(calls)}, *results, end] if calls else [user, end]
    )


NUMBER = {"type": "number", "enum": [1, None, 3]}  # an item of a list is null because somebody wrote it
TEXT = {"type": "string", "description": 'Wörter\n\t"quoted" \\ 漢字 🏴‍☠️ \u2028'}
NESTED = {"type": "object", "properties": {"x": NUMBER, "only": {"type": "boolean"}}, "required": []}
CHATS = [
    {
        "messages": talk(call("add", a=1, b=[1, None, 2]), call("say", text="hé")),
        "tools": [tool("add", a=NUMBER, b=TEXT)],
    },
    {"messages": talk(question="  null  ", answer="None")},
    {"messages": talk(call("noop")), "tools": [tool("noop"), tool("say", text=TEXT, z=NESTED)]},
    {
        "messages": talk(call("say", text="", more={"deep": [{"x": 1}, {"y": []}, {}, None]})),
        "tools": [tool("say", text=TEXT)],
    },
    {
        "messages": [
            {"role": "system", "content": "S"},
            *talk(call("add", b=[]), answer="\ud83c\udf0d".encode("utf-16", "surrogatepass").decode("utf-16")),
        ]
    },
] * (ROWS_PER_READ // 2)
"""Parallel calls with different arguments, schemas with different properties, keys that are not everywhere; more rows
than are decoded at a time."""
TALKS = [{"messages": row["messages"]} for row in CHATS]


def fingerprint(path, **source):
    return read_rows(Source(path=str(path), **source), "error", SFT).fingerprint


@pytest.mark.parametrize("form", WRITERS)
def test_the_same_rows_have_one_fingerprint_in_every_format(tmp_path: Path, form):
    expected = fingerprint(write_json_lines(tmp_path, CHATS))
    assert fingerprint(WRITERS[form](tmp_path, CHATS)) == expected


ASK, YES, NO = talk()[:1], [{"role": "assistant", "content": "y"}], [{"role": "assistant", "content": "[1]"}]
CHATS_OF = {
    "dpo": [
        {"prompt": ASK, "chosen": YES, "rejected": NO},
        {"prompt": [*ASK, *YES, *ASK], "chosen": NO, "rejected": YES},
    ],
    "kto_zero": [{"prompt": ASK, "completion": YES, "label": True}, {"prompt": ASK, "completion": NO, "label": False}],
    "sft": [{"prompt": ASK, "completion": YES}, {"prompt": [*ASK, *YES, *ASK], "completion": NO}],
}


@pytest.mark.parametrize("objective", CHATS_OF)
@pytest.mark.parametrize("form", WRITERS)
def test_chats_in_other_columns_have_one_fingerprint_too(tmp_path: Path, form, objective):
    rows = CHATS_OF[objective]
    lines, path = write_json_lines(tmp_path, rows), WRITERS[form](tmp_path, rows)
    expected, result = (
        read_rows(Source(path=str(source)), "error", Objective.of(name=objective)).fingerprint
        for source in (lines, path)
    )
    assert result == expected


def test_a_cell_is_json_only_if_it_holds_messages(tmp_path: Path):
    texts = [
        "[1]",
        "[]",
        '[{"role": "chief", "content": "a"}]',
        '{"role": "user", "content": "a"}',
        '"a"',
        "[x",
        "null",
    ]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    assert [row["text"] for row in rows_in(path)] == texts
    path.write_text('text\n"[{""role"": ""user"", ""role"": ""user""}]"\nb\n')
    rows = read_rows(Source(path=str(path)), "drop", SFT)
    assert rows.rows == [{"text": "b"}] and rows.num_dropped == {"key given twice": 1}


@needs_json
@pytest.mark.parametrize("form", JSON_WRITERS)
def test_json_within_a_table_is_the_json_that_it_was(tmp_path: Path, form):
    """With what no type of Arrow holds: keys of changing types, and nulls that are the row's own."""
    calls = [call("set", value=value, unset=None) for value in (1, "1", [1, "x", None], {"a": {}}, True, None)]
    rows = [{"messages": talk(call), "tools": [tool("set", value={"default": None}), NESTED]} for call in calls]
    expected = fingerprint(write_json_lines(tmp_path, [*rows, *CHATS]))
    assert fingerprint(JSON_WRITERS[form](tmp_path, [*rows, *CHATS])) == expected


TEXTS = {"role": datasets.Value("string"), "content": datasets.Value("string")}


@needs_json
@pytest.mark.parametrize("write", [write_data_set, save_to_disk])
@pytest.mark.parametrize("inner", ["contents", "parameters"])
def test_json_within_messages_and_tools_is_the_json_that_it_was(tmp_path: Path, write, inner):
    rows = [
        {"messages": talk(answer=answer), "tools": [{"name": "add", "parameters": {"a": {"x": value}}}]}
        for answer, value in (("yes", 1), ("no", "s"))
    ]
    kinds = {
        "contents": {"messages": [TEXTS | {"content": datasets.Json()}], "tools": [datasets.Json()]},
        "parameters": {"messages": [TEXTS], "tools": [{"name": TEXTS["role"], "parameters": datasets.Json()}]},
    }
    expected = fingerprint(write_json_lines(tmp_path, rows))
    assert fingerprint(write(tmp_path, rows, features=datasets.Features(kinds[inner]))) == expected


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("how", ["parquet", pytest.param("json", marks=needs_json)])
def test_rows_of_the_hub_have_the_fingerprint_of_the_same_file(tmp_path: Path, monkeypatch, how, streaming):
    lines = write_json_lines(tmp_path, CHATS)
    file = lines if how == "json" else write_parquet(tmp_path, CHATS)
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda path, name, **rest: load(how, data_files=str(file), cache_dir=str(tmp_path / "cache"), **one_of(rest)),
    )

    def one_of(rest):
        assert rest["revision"] is None
        return {"split": rest["split"], "streaming": rest["streaming"]}

    assert streamed("some/data", streaming) == fingerprint(lines)


@pytest.mark.parametrize("form", ["json", "csv", "parquet", "arrow stream", "datasets, saved"])
def test_a_stream_of_a_file_has_the_fingerprint_of_the_file(tmp_path: Path, form):
    expected = fingerprint(write_json_lines(tmp_path, CHATS))
    assert streamed(WRITERS[form](tmp_path, CHATS), True) == expected


def streamed(path, streaming):
    """The fingerprint of all blocks of a pass, or of the rows that are read at once."""
    if not streaming:
        return fingerprint(path)
    data = DataSection(train=[Source(path=str(path))], streaming=True, shuffle_rows=11)
    bad_rows = BadRows()
    blocks = [part for parts in Passes(data, SFT).blocks(bad_rows) for part in parts]
    bad_rows.stop_if("error")
    assert len(blocks) > 1
    return Rows(kind=blocks[0].kind, rows=[row for part in blocks for row in part.rows]).fingerprint


def keep_all(schema, roles):
    return lambda batch: batch.to_pylist()


@pytest.mark.parametrize("write", [write_parquet, pytest.param(JSON_WRITERS["mixed types"], marks=needs_json)])
def test_a_reader_that_takes_tables_as_they_are_would_be_found(tmp_path: Path, monkeypatch, write):
    expected = fingerprint(write_json_lines(tmp_path, CHATS))
    path = write(tmp_path, CHATS)
    monkeypatch.setattr(arrow, "row_decoder", keep_all)
    try:
        changed = fingerprint(path)
    except RecipeError:
        return  # texts of JSON where objects are needed
    assert changed != expected


def rows_in(path, **columns):
    return [row for _, row in file_rows(path, Source(path=str(path), columns=columns or None))]


def written(folder, table):
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


def column(values, kind):
    return pyarrow.table({"text": pyarrow.array(values, kind)})


def test_only_nulls_that_a_struct_adds_are_left_out(tmp_path: Path):
    item = pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.list_(pyarrow.struct([("c", pyarrow.null())])))])
    values = [None, {"a": 1}, {}, {"b": []}, {"b": [None, {}]}, {"a": 0, "b": [{}]}]
    assert [row["text"] for row in rows_in(written(tmp_path, column(values, item)))] == values
    lists = [None, [], [None], [1, None]]
    assert [row["text"] for row in rows_in(written(tmp_path, column(lists, pyarrow.list_(pyarrow.int64()))))] == lists


def test_a_slice_of_a_table_gives_the_rows_of_the_slice():
    """Structs, lists and maps hold more than the slice."""
    inner = pyarrow.struct([("a", pyarrow.string())])
    kinds = {
        "list": pyarrow.list_(inner),
        "large": pyarrow.large_list(inner),
        "fixed": pyarrow.list_(inner, 1),
        "view": pyarrow.list_view(inner),
        "map": pyarrow.map_(pyarrow.string(), inner),
    }
    for name, kind in kinds.items():
        values = [None if i % 3 == 1 else [{"a": str(i)} if i % 2 else {}] for i in range(9)]
        given = [value and [("k", value[0])] for value in values] if name == "map" else values
        expected = [value and {"k": value[0]} for value in values] if name == "map" else values
        batch = pyarrow.record_batch({"text": pyarrow.array(given, kind)})
        decode = arrow.row_decoder(batch.schema)
        for start in range(9):
            texts = [row["text"] for row in decode(batch.slice(start, 4))]
            assert texts == expected[start : start + 4], name


def test_encoded_texts_and_maps_are_read(tmp_path: Path):
    for kind in (pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())):
        assert rows_in(written(tmp_path, column(["a", None, "ü"], kind))) == [
            {"text": text} for text in ("a", None, "ü")
        ]
    encoded = pyarrow.compute.run_end_encode(pyarrow.array(["a", "a", None]))
    batch = pyarrow.record_batch({"text": encoded})
    assert arrow.row_decoder(batch.schema)(batch) == [{"text": "a"}, {"text": "a"}, {"text": None}]
    value = pyarrow.struct([("type", pyarrow.string()), ("enum", pyarrow.list_(pyarrow.int64()))])
    kind = pyarrow.map_(pyarrow.string(), value)
    rows = rows_in(written(tmp_path, column([[("x", {"type": "n"}), ("y", None)], None, []], kind)))
    assert rows == [{"text": {"x": {"type": "n"}, "y": None}}, {"text": None}, {"text": {}}]
    (row,) = rows_in(written(tmp_path, column([[("x", None), ("x", None)]], kind)))
    assert str(row["text"]) == "a map (column 'text') with a key given twice: 'x'"


def test_a_sequence_of_datasets_is_a_list_of_messages(tmp_path: Path):
    """A dictionary of lists: told by the schema of `datasets`, or by a column whose `role` is a list."""
    chat = talk(question="hi")
    table = pyarrow.Table.from_pylist(
        [{"messages": {key: [message[key] for message in chat] for key in ("role", "content")}}]
    )
    assert fingerprint(written(tmp_path, table)) == fingerprint(write_json_lines(tmp_path, [{"messages": chat}]))
    table = table.rename_columns(["talk"])
    says = pyarrow.Table.from_pylist([{"talk": {"who": ["user", "assistant"], "says": ["hi", "Antwort"]}}])
    columns = {"messages": "talk", "role": "who", "content": "says"}
    expected = fingerprint(write_json_lines(tmp_path, [{"messages": chat}]))
    assert fingerprint(written(tmp_path, says), columns=columns) == expected

    texts = {"feature": {"a": {"dtype": "string", "_type": "Value"}}, "_type": "Sequence"}
    old = {"info": {"features": {"text": {"x": texts}}}}
    lists = pyarrow.Table.from_pylist([{"text": {"x": {"a": ["1", None]}}}])
    assert rows_in(written(tmp_path, lists)) == [{"text": {"x": {"a": ["1", None]}}}]
    lists = lists.replace_schema_metadata({"huggingface": json.dumps(old)})
    assert rows_in(written(tmp_path, lists)) == [{"text": {"x": [{"a": "1"}, {}]}}]


def test_lists_in_arguments_are_no_messages(tmp_path: Path):
    rows = [{"messages": talk(call("mail", **{"from": ["a"], "role": ["b"], "to": ["c"]}))}]
    assert fingerprint(write_parquet(tmp_path, rows)) == fingerprint(write_json_lines(tmp_path, rows))


TEXT_FILES = {
    "rows.txt": "Grüße",
    "rows.md": "Grüße",
    "rows.csv": "text\nGrüße\n",
    "rows.tsv": "text\tid\nGrüße\t1\n",
    "rows.jsonl": '{"text": "Grüße"}\n',
    "rows.json": '[{"text": "Grüße"}]',
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("name", TEXT_FILES)
def test_a_mark_of_utf_8_is_no_part_of_a_text(tmp_path: Path, name: str, encoding: str):
    """As Windows' editors and Excel write it."""
    path = tmp_path / name
    path.write_text(TEXT_FILES[name], encoding=encoding)
    assert read_rows(Source(path=str(path)), "error", SFT).rows == [{"text": "Grüße"}]


WHEN = datetime.datetime(2026, 11, 25, 9)
NOT_JSON = {
    "timestamp": (WHEN, pyarrow.timestamp("us", "UTC"), r"timestamp\[us, tz=UTC\]"),
    "beyond the years of Python": (2**62, pyarrow.timestamp("ms"), r"timestamp\[ms\]"),
    "date": (WHEN.date(), pyarrow.date32(), r"date32\[day\]"),
    "time": (WHEN.time(), pyarrow.time64("us"), r"time64\[us\]"),
    "decimal": (decimal.Decimal("1.50"), pyarrow.decimal128(5, 2), r"decimal128\(5, 2\)"),
    "binary": (b"a text", pyarrow.binary(), "binary"),
    "uuid": (b"0123456789abcdef", pyarrow.uuid(), r"extension<arrow.uuid>"),
}


@pytest.mark.parametrize("case", NOT_JSON)
def test_a_value_that_json_does_not_have_is_refused_only_where_it_is_read(tmp_path: Path, case):
    value, kind, name = NOT_JSON[case]
    array = pyarrow.array([value, None], kind)
    words = rf"not text: `when` is of type {name} \(column 'when'\), which JSON does not have; write it as text"
    path = written(tmp_path, pyarrow.table({"when": array, "id": [1, 2]}))
    with pytest.raises(RecipeError, match=f"row 1: {words}"):
        fingerprint(path, columns={"text": "when"})
    path = written(tmp_path, pyarrow.table({"text": ["a", "b"], "when": array, "query": array}))
    assert read_rows(Source(path=str(path)), "error", SFT).rows == [{"text": "a"}, {"text": "b"}]


def test_a_value_that_json_does_not_have_is_refused_within_a_call(tmp_path: Path):
    rows = [{"messages": [message | {"when": WHEN} for message in talk(call("add", a=1))]}]
    expected = [{"messages": talk(call("add", a=1))}]
    assert fingerprint(write_parquet(tmp_path, rows)) == fingerprint(write_json_lines(tmp_path, expected))
    place = "messages.tool_calls.function.arguments.at.when"
    bad = [{"messages": talk(call("add", at={"when": WHEN}))}]
    with pytest.raises(RecipeError, match=rf"row 1: not JSON: of type timestamp\[us\] \(column '{place}'\)"):
        fingerprint(write_parquet(tmp_path, bad))
    for key, value in (("tools", [{"when": WHEN}]), ("chat_template_kwargs", {"when": WHEN})):
        words = rf"row 1: not JSON: of type timestamp\[us\] \(column '{key}.when'\)"
        with pytest.raises(RecipeError, match=words):
            fingerprint(write_parquet(tmp_path, [{"messages": talk(), key: value}]))


def test_a_picture_is_refused_by_its_name_and_never_opened(tmp_path: Path):
    features = datasets.Features({"text": datasets.Image()})
    table = pyarrow.table({"text": [{"bytes": b"no picture", "path": None}]}, features.arrow_schema)
    for path in (written(tmp_path, table), saved(tmp_path, table)):
        with pytest.raises(RecipeError, match=r"`text` is of type Image of datasets \(column 'text'\)"):
            fingerprint(path)


def saved(folder, table):
    datasets.Dataset(table).save_to_disk(folder / "saved")
    return folder / "saved"


@needs_json
def test_a_column_of_json_that_holds_none_is_a_bad_row_where_it_is_read(tmp_path: Path):
    texts = pyarrow.array(['"fine"', '{"a": 1, "a": 2}', "{'a': 1}", None, "[[3]]"], pyarrow.json_())
    path = written(tmp_path, pyarrow.table({"text": texts}))
    rows = read_rows(Source(path=str(path)), "drop", SFT)
    assert rows.rows == [{"text": "fine"}] and rows.num_dropped == {"not text": 3, "empty text": 1}
    twice = "`text` is a text of JSON \\(column 'text'\\): key given twice: 'a'"
    with pytest.raises(RecipeError, match=f"row 2: not text: {twice}(.|\n)*row 3: not text: .* not JSON: Expecting"):
        fingerprint(path)


def test_content_that_is_the_text_of_json_stays_a_text(tmp_path: Path):
    """A text that looks like JSON stays one wherever no schema says otherwise."""
    rows = [{"text": text} for text in ('{"a": null}', '"a"', "3", "null", "[1]")]
    expected = fingerprint(write_json_lines(tmp_path, rows))
    for form in ("parquet", "arrow file", "datasets, saved"):
        assert fingerprint(WRITERS[form](tmp_path, rows)) == expected


def test_two_columns_or_keys_of_one_name_are_refused(tmp_path: Path):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    with pytest.raises(RecipeError, match="two columns are called 'text'"):
        fingerprint(written(tmp_path, table))
    struct = pyarrow.StructArray.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["x", "x"])
    with pytest.raises(RecipeError, match=r"`text` is of type struct<x: string, x: string>"):
        fingerprint(written(tmp_path, pyarrow.table({"text": struct})))


ONE_OBJECT = {"version": 1, "conversations": talk()}


@pytest.mark.parametrize("objects", [[ONE_OBJECT], [ONE_OBJECT, {"version": 2}]])
@pytest.mark.parametrize(
    ("ending", "remedy"), [("json", "write a list of objects, or"), ("jsonl", "write each object")]
)
def test_an_object_over_several_lines_is_refused_as_a_whole(tmp_path: Path, objects, ending, remedy):
    path = write_lines(tmp_path / f"rows.{ending}", *(json.dumps(record, indent=2) for record in objects))
    words = f"an object with the keys 'version', 'conversations', written over several lines; {remedy}"
    with pytest.raises(RecipeError, match=f"^{path}: {words}"):
        read_rows(Source(path=path), "drop", SFT)


@pytest.mark.parametrize("first", ['{"text": "a"} and more', '{"text": ', "{", '{"text": "a", "text": "b"}'])
def test_a_bad_first_line_is_one_bad_row(tmp_path: Path, first):
    path = write_lines(tmp_path / "rows.json", first, '{"text": "b"}')
    assert read_rows(Source(path=path), "drop", SFT).rows == [{"text": "b"}]
