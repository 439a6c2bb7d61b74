"""Protects what a row says: each of its keys is read, named as passed over, or refused.

python -m pytest -q tests/test_data_keys.py
"""

import json
from contextlib import nullcontext

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError
from small_data import ROOT, make_tokenizer, marked, run_tokenize, write_lines

from cookbook.config.objectives import Objective
from cookbook.config.sections import DataSection, Source
from cookbook.rows.json_text import BadRow
from cookbook.rows.messages import LOSS_MARKS, MEANT_KEYS, OTHER_ROLES, REASONING_KEYS, _check_call
from cookbook.rows.row_columns import MEANT
from cookbook.rows.row_kinds import kinds
from cookbook.system.files import RecipeError
from cookbook.training.data import rows as reading
from cookbook.training.data.known import known_rows
from cookbook.training.data.sets import read_data, tokenize_data

SYSTEM, USER = {"role": "system", "content": "S"}, {"role": "user", "content": "q"}
CALL = {"type": "function", "function": {"name": "dig", "arguments": {"depth": 3}}}
TOOL = {"type": "function", "function": {"name": "dig", "parameters": {}}}
RESULT = {"role": "tool", "content": "2"}


def said(content="y", **more):
    return {"role": "assistant", "content": content, **more}


def read(tmp_path, *raws, objective="sft", **source):
    path = write_lines(tmp_path / "rows.jsonl", *map(json.dumps, raws))
    return reading.read_rows(Source(path=path, **source), "error", Objective.of(name=objective))


def refusal(tmp_path, *raws, **how):
    with pytest.raises(RecipeError) as error:
        read(tmp_path, *raws, **how)
    return error.value.mistakes[0].partition("rows.jsonl:")[2]


PAIR = {"prompt": [USER], "chosen": [said("y")], "rejected": [said("n")]}
JUDGED = {"prompt": [USER], "completion": [said()], "label": True}
CHAT = {"messages": [USER, said()]}
HISTORY = [{"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]
IN_CHATS = {
    "messages": ("sft", CHAT, "messages"),
    "question and answer": ("sft", {"instruction": "q", "output": "y"}, ""),
    "completion": ("sft", {"prompt": [USER], "completion": [said()]}, "prompt"),
    "preference": ("dpo", PAIR, "prompt"),
    "judged answer": ("kto_zero", JUDGED, "prompt"),
    "judged chat": ("kto_zero", CHAT | {"label": False}, "messages"),
}


@pytest.mark.parametrize(("objective", "raw", "chat"), IN_CHATS.values(), ids=IN_CHATS.keys())
def test_every_kind_with_chats_reads_system_history_tools_and_what_is_for_the_template(tmp_path, objective, raw, chat):
    more = {"system_prompt": "S", "history": [["e", "f"]], "functions": [TOOL["function"]]}
    rows = read(tmp_path, raw | more | {"chat_template_kwargs": {"mark": "XX"}}, objective=objective)
    row = rows.rows[0]
    chats = kinds()[rows.kind].chats(row)
    assert all(messages[:4] == [SYSTEM, *HISTORY, USER] for messages, _ in chats)
    assert row["tools"] == [TOOL] and row["chat_template_kwargs"] == {"mark": "XX"}
    assert not rows.unread and kinds()[rows.kind].check(row) == row
    # Earlier turns carry loss as others do, but not in front of an answer that is judged or compared.
    assert [num_without for _, num_without in chats] == [
        0 if chat in ("", "messages") and objective == "sft" else 1
    ] * len(chats)


@pytest.mark.parametrize(("beside", "answer"), [("input", "output"), ("context", "response"), ("input", "response")])
def test_what_an_instruction_has_beside_it_is_asked_after_an_empty_line(tmp_path, beside: str, answer: str):
    """Alpaca's names, Dolly's, and those of both."""
    rows = read(tmp_path, {"instruction": "q", beside: "c", answer: "y"})
    (((asked, given), _),) = kinds()[rows.kind].chats(rows.rows[0])
    assert (asked["role"], asked["content"], given) == ("user", "q\n\nc", said("y")) and not rows.unread


def test_all_parts_of_a_content_are_read(tmp_path):
    parts = [{"type": "text", "text": text} for text in ("a", " b", "c")]
    rows = read(tmp_path, {"messages": [USER | {"content": parts}, said([*parts, {"type": "text", "text": "d"}])]})
    assert rows.rows[0]["messages"] == [USER | {"content": "a bc"}, said("a bcd")]


def test_a_system_message_is_read_once(tmp_path):
    row = {"system": "S", "messages": [SYSTEM, USER, said()]}
    assert read(tmp_path, row).rows == [{"messages": row["messages"]}]
    assert "two system messages" in refusal(tmp_path, row | {"system": "T"})


def test_the_context_of_a_preference_follows_its_prompt(tmp_path):
    pair = {"chosen": "y", "rejected": "n"}
    for raw in (
        {"question": "q", "context": "c"},
        {"instruction": "q", "input": "c"},
        {"prompt": "q\n\nc", "context": "c"},
    ):
        assert read(tmp_path, raw | pair, objective="dpo").rows == [{"prompt": "q\n\nc"} | pair]
    row = read(tmp_path, PAIR | {"prompt": "q", "context": "c"}, objective="dpo").rows[0]
    assert row["prompt"] == [{"role": "user", "content": "q\n\nc"}]
    assert "`context` is not read" in refusal(tmp_path, PAIR | {"context": "c"}, objective="dpo")


def test_a_conversational_completion_has_its_loss_on_the_completion(tmp_path):
    asked = [SYSTEM, USER, said("earlier"), USER]
    rows = read(tmp_path, {"prompt": asked, "completion": [said("late"), USER, said("last")]})
    tokenizer = make_tokenizer()
    tokens, _ = run_tokenize(rows, tokenizer)
    text = marked(tokens, 0, tokenizer)
    assert [part.partition("]")[0] for part in text.split("[")[1:]] == ["late<|im_end|>", "last<|im_end|>"]
    for prompt, completion in (("q", [said()]), ([USER], "y"), (USER, said())):
        rows = read(tmp_path, {"prompt": prompt, "completion": completion})
        assert rows.rows == [{"prompt": [USER], "completion": [said()]}]
    assert "its first message must be the assistant's" in refusal(tmp_path, {"prompt": [USER], "completion": [USER]})


def test_a_rated_chat_is_a_judged_answer_and_never_trained_as_a_good_one(tmp_path):
    raw = {"messages": [USER, said("a"), USER, said("b")], "label": False}
    rows = read(tmp_path, raw, objective="kto_zero")
    assert rows.rows == [raw]
    assert kinds()[rows.kind].chats(raw) == [(raw["messages"], 1)] and kinds()[rows.kind].value(raw) == 0
    assert refusal(tmp_path, raw).startswith("1: `label` is not read: it is false; objective.name sft would train bad")
    assert read(tmp_path, raw, ignore=["label"]).rows == [{"messages": raw["messages"]}]
    named = read(tmp_path, CHAT | {"label": "poems"})  # the name of a class
    assert named.rows == [CHAT] and named.unread == "not read: label"


NOT_READ = {
    "pictures": (CHAT | {"images": ["a.png"]}, "sft", "`images` is not read: it is a list of 1 item; only text is"),
    "sound": (CHAT | {"audios": ["a.wav"]}, "sft", "`audios` is not read"),
    "documents": (CHAT | {"documents": [{"text": "d"}]}, "sft", "`documents` is not read"),
    "a picture beside a text": ({"text": "t", "image": "a.png"}, "sft", "`image` is not read: it is a string"),
    "a system message of texts": ({"prompt": "q", "completion": "y", "system": "S"}, "sft", "`system` is not read"),
    "tools of texts": ({"prompt": "q", "chosen": "y", "rejected": "n", "tools": [TOOL]}, "dpo", "`tools` is not read"),
    "a weight of the row": (CHAT | {"weight": 0.5}, "sft", "`weight` is not read: it is a number; rows weigh alike"),
    "tokens": ({"text": "t", "input_ids": [1, 2]}, "sft", "`input_ids` is not read"),
    "a judged answer of LLaMA-Factory": (
        {"instruction": "q", "output": "y", "kto_tag": True},
        "sft",
        "`kto_tag` is not",
    ),
}


@pytest.mark.parametrize(("raw", "objective", "message"), NOT_READ.values(), ids=NOT_READ.keys())
def test_a_column_with_a_meaning_that_is_not_read_is_a_bad_row_with_the_way_out(tmp_path, raw, objective, message):
    mistake = refusal(tmp_path, raw, objective=objective)
    assert mistake.startswith(f"1: {message}")
    column = message.split("`")[1]
    assert mistake.endswith(f"data.ignore: [{column}]")
    rows = read(tmp_path, raw, objective=objective, ignore=[column])
    assert rows.unread == f"passed over by data.ignore: {column}"
    without = {key: value for key, value in raw.items() if key != column}
    assert rows.rows == read(tmp_path, without, objective=objective).rows


@pytest.mark.parametrize("value", [None, "", [], {}])
def test_a_key_without_a_value_asks_for_nothing(tmp_path, value):
    empty = dict.fromkeys((*MEANT, "id"), value)
    in_message = dict.fromkeys((*MEANT_KEYS, *REASONING_KEYS, "tool_calls", "function_call", "name"), value)
    marks = dict.fromkeys(LOSS_MARKS)
    rows = read(tmp_path, empty | {"messages": [USER | in_message | marks, said() | in_message | marks]})
    assert rows.rows == [CHAT] and rows.unread == ""


def test_what_a_text_may_be_rendered_from_is_named_and_not_refused(tmp_path):
    rows = read(tmp_path, {"text": "t", "system": "S", "tools": [TOOL], "weight": 1})
    assert rows.rows == [{"text": "t"}] and rows.unread == "not read: system, tools"


def test_metadata_is_named_once_with_how_many_rows_have_it(tmp_path):
    part = {"type": "text", "text": "q", "cache_control": {"type": "x"}}
    call = said("", tool_calls=[CALL | {"index": 0, "id": "c"}])
    row = {"messages": [USER | {"content": [part]}, call, RESULT, said(stopped="here")], "id": 1, "source": "web"}
    rows = read(tmp_path, row, row | {"score": 3}, CHAT | {"id": 1, "source": None})
    names = "id, messages.content.cache_control, messages.stopped, messages.tool_calls.index"
    assert rows.unread == f"not read: {names}, score (1 of 3 rows), source (2 of 3 rows)"
    ignored = read(tmp_path, row, ignore=["id", "source", *names.split(", ")[1:]])
    assert ignored.rows == rows.rows[:1]
    assert ignored.unread.startswith("passed over by data.ignore: id, source, messages.content")


def test_columns_that_a_file_has_and_nobody_reads_are_named_too(tmp_path, monkeypatch):
    import datasets

    table = [{"text": "a", "id": 1, "url": "x"}, {"text": "b", "id": 2, "url": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "rows.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "rows.arrow", (arrow := pyarrow.Table.from_pylist(table)).schema) as writer:
        writer.write_table(arrow)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **how: datasets.Dataset.from_list(table))
    sft = Objective.of(name="sft")
    for path in (str(tmp_path / "rows.parquet"), str(tmp_path / "rows.arrow"), "some/data"):
        assert reading.read_rows(Source(path=path), "error", sft).unread == "not read: id, url"
        rows = reading.read_rows(Source(path=path, ignore=["id"]), "error", sft)
        assert rows.unread == "not read: url; passed over by data.ignore: id"
        with pytest.raises(RecipeError, match="ignore has 'score', which no row has"):
            reading.read_rows(Source(path=path, ignore=["score"]), "error", sft)


def test_a_picture_in_parquet_reaches_the_refusal(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([CHAT | {"images": ["a.png"]}]), tmp_path / "rows.parquet")
    with pytest.raises(RecipeError, match=r"rows\.parquet:row 1: `images` is not read"):
        reading.read_rows(Source(path=str(tmp_path / "rows.parquet")), "error", Objective.of(name="sft"))


def test_what_was_passed_over_is_shown_at_every_start(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(CHAT | {"id": 1, "source": "web"}))
    data, sft, cache = DataSection(train=path, max_length=100), Objective.of(name="sft"), tmp_path / "cache"
    cache.mkdir()
    for _ in range(2):  # the second start reads no row
        sets = tokenize_data(known_rows(data, sft, cache=cache), make_tokenizer(), data, sft, cache=cache)
        assert "data.train: not read: id, source" in sets.notes


# Names in a recipe.


def test_a_key_of_columns_that_the_kind_has_not_is_an_error(tmp_path):
    raw = {"ask": "q", "say": "y", "sys": "S"}
    columns = {"prompt": "ask", "completion": "say"}
    assert read(tmp_path, raw, columns=columns).unread == "not read: sys"
    mistake = refusal(tmp_path, raw, columns=columns | {"system": "sys"})
    assert mistake.startswith("1: columns has system: sys, but a row with `prompt` and `completion` has no `system`")
    assert "no `role`" in refusal(tmp_path, raw, columns=columns | {"role": "ask"})
    raw = {"talk": [USER, said()], "sys": "S"}
    rows = read(tmp_path, raw, columns={"messages": "talk", "system": "sys"})
    assert rows.rows == [{"messages": [SYSTEM, USER, said()]}]


def test_a_column_that_no_row_has_is_an_error_and_a_note_where_others_may_have_it(tmp_path):
    for source, words in (
        ({"columns": {"messages": "messages", "system": "sytem"}}, "columns has 'sytem', which no row has"),
        ({"ignore": ["messages", "imgs"][1:]}, "ignore has 'imgs', which no row has"),
        ({"ignore": ["messages.imgs"]}, "ignore has 'messages.imgs', which no row has"),
    ):
        with pytest.raises(RecipeError, match=words):
            read(tmp_path, CHAT, **source)
        first, other = (write_lines(tmp_path / f"{name}.jsonl", json.dumps(CHAT)) for name in "ab")
        with pytest.raises(RecipeError, match=words):
            read_data(DataSection(train=first, **source), Objective.of(name="sft"))
        shared = read_data(DataSection(train=[first, other], **source), Objective.of(name="sft"))
        assert [rows.unread for rows in shared.train] == [words] * 2


def test_an_ignored_column_of_a_table_is_not_even_decoded(tmp_path):
    """Though its name is one of a row's, and its text is broken."""
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"a", b"\xff"]).buffers())
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", "y"], "system": broken}), path)
    rows = reading.read_rows(Source(path=str(path), ignore=["system"]), "error", Objective.of(name="sft"))
    assert rows.rows == [{"text": "x"}, {"text": "y"}] and rows.unread == "passed over by data.ignore: system"
    with pytest.raises(RecipeError, match="not UTF-8"):
        reading.read_rows(Source(path=str(path)), "error", Objective.of(name="sft"))


def test_a_column_is_read_or_ignored_and_not_both():
    with pytest.raises(ValidationError, match="ignore has 'talk', which columns reads"):
        Source(path="a.jsonl", columns={"messages": "talk"}, ignore=["talk"])
    with pytest.raises(ValidationError, match="ignore has 'talk', which columns reads"):
        DataSection(train={"path": "a.jsonl", "columns": {"messages": "talk"}}, ignore=["talk"])
    with pytest.raises(ValidationError, match="ignore would be ignored: python-stdlib"):
        DataSection(train="python-stdlib", ignore=["id"])


def test_errors_name_the_column_of_the_row(tmp_path):
    alpaca = {"instruction": "as JSON", "input": "", "output": {"a": 1}}
    assert refusal(tmp_path, alpaca).startswith(
        "1: not text: `output` is an object with the key 'a'; write its JSON text"
    )
    named = {"Frage": "q", "Antwort": " "}
    assert "`Antwort` is only whitespace" in refusal(tmp_path, named, columns={"user": "Frage", "assistant": "Antwort"})
    pair = {"question": "q", "chosen_response": "", "rejected_response": "n"}
    assert "`chosen_response` is empty" in refusal(tmp_path, pair, objective="dpo")


# Messages.

NO_LOSS = [{key: value} for key in LOSS_MARKS if key not in ("mask", "masked") for value in (False, 0, 0.0)]
NO_LOSS += [{"masked": True}, {"masked": 1}]


@pytest.mark.parametrize("mark", NO_LOSS, ids=str)
def test_a_turn_that_is_marked_so_carries_no_loss(tmp_path, mark):
    (key, value), *_ = mark.items()
    opposite = {key: type(value)(not value)}
    rows = read(tmp_path, {"messages": [USER, said("wrong", **mark), USER, said("right", **opposite)]})
    assert rows.rows == [{"messages": [USER, said("wrong", train=False), USER, said("right")]}]
    assert not rows.unread
    tokenizer = make_tokenizer()
    tokens, _ = run_tokenize(rows, tokenizer)
    assert marked(tokens, 0, tokenizer).count("[") == 1 and "[right<|im_end|>]" in marked(tokens, 0, tokenizer)


TWO_ANSWERS = [USER, said("wrong"), USER, said("right")]


@pytest.mark.parametrize("mark", [{"trainable": False}, {"learn": False}, {"loss_scale": 0.0}, {"skip": True}], ids=str)
@pytest.mark.parametrize("other", [True, False], ids=["both", "one"])
def test_a_mark_of_any_name_that_differs_between_answers_is_asked_about(tmp_path, mark, other):
    (key, value), *_ = mark.items()
    opposite = {key: type(value)(not value)} if other else {}
    row = {"messages": [USER, said("wrong", **mark), USER, said("right", **opposite)]}
    with pytest.raises(RecipeError) as error:
        read(tmp_path, row)
    assert f"`messages.{key}` differs from one of the assistant's messages to another" in str(error.value)
    ignored = read(tmp_path, row, ignore=[f"messages.{key}"])  # as offered
    assert ignored.rows == [{"messages": TWO_ANSWERS}] and f"data.ignore: [messages.{key}]" in str(error.value)
    same = {"messages": [USER, said("a", **mark), USER | {key: 7}, said("b", **mark)]}
    assert read(tmp_path, same).unread == f"not read: messages.{key}"  # tells nothing apart


@pytest.mark.parametrize(
    "mark", [{"loss": False}, {"trainable": False}, {"loss_scale": 0}, {"learn": "false"}, {"masked": True}], ids=str
)
def test_a_mark_of_any_name_that_differs_between_rows_is_asked_about(tmp_path, mark):
    (key, _), *_ = mark.items()
    with pytest.raises(RecipeError, match=rf"`{key}` differs from row to row .* data.ignore: \[{key}\]"):
        read(tmp_path, CHAT | mark, CHAT)
    assert read(tmp_path, CHAT | mark, CHAT, ignore=[key]).rows == [CHAT, CHAT]
    assert read(tmp_path, CHAT | mark, CHAT | mark).unread == f"not read: {key}"
    table = pyarrow.Table.from_pylist([CHAT | mark] * 200 + [CHAT | {key: None}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with nullcontext() if key == "learn" else pytest.raises(RecipeError, match=f"`{key}` differs"):
        reading.read_rows(Source(path=str(tmp_path / "rows.parquet")), "error", Objective.of(name="sft"))


def test_numbers_of_rows_and_kinds_are_no_marks(tmp_path):
    numbered = [CHAT | {"id": i, "turns": 1 + i % 2, "kind": "ab"[i % 2]} for i in range(3)]
    assert read(tmp_path, *numbered).unread == "not read: id, kind, turns"


def test_calls_of_tools_that_no_row_describes_are_counted_in_a_note(tmp_path):
    calls = {"messages": [USER, said("", tool_calls=[CALL]), RESULT, said()]}
    rows = read(tmp_path, calls, calls | {"tools": [TOOL]}, CHAT)
    assert rows.notes == [
        "data.train: 1 row has tool calls and no `tools`, so the samples do not say what can be called"
    ]
    assert read(tmp_path, calls | {"tools": [TOOL]}).notes == []


@pytest.mark.parametrize("form", ["parquet", "hub", "stream"])
def test_a_column_of_a_table_that_may_be_meant_is_asked_about(tmp_path, form, monkeypatch):
    import datasets

    path = str(tmp_path / "rows.parquet")
    rows = [
        {"question": f"q {i}", "rationale": "because it is so and never was other", "answer": "a"} for i in range(70)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    if form != "parquet":
        table = datasets.Dataset.from_list(rows)
        table = table.to_iterable_dataset() if form == "stream" else table
        monkeypatch.setattr(datasets, "load_dataset", lambda *names, **how: table)
        path = "some/data"
    data = DataSection(train=path, streaming=form == "stream")
    with pytest.raises(RecipeError) as error:
        read_data(data, Objective.of(name="sft"))
    assert "`rationale` is not read and longer than the answer that is, `answer`" in str(error.value)
    assert "{user: question, assistant: answer, reasoning_content: rationale}" in str(error.value)
    (read_so,) = read_data(
        data.model_copy(update={"train": [Source(path=path, ignore=["rationale"])]}), Objective.of(name="sft")
    ).train
    assert len(read_so.rows) == 70 and read_so.rows[69] == {"user": "q 69", "assistant": "a"}


def test_a_mask_of_the_row_is_over_its_messages(tmp_path):
    chat = [USER, said("wrong"), USER, said("right")]
    for key in ("loss_mask", "mask"):
        rows = read(tmp_path, {"messages": chat, key: [0, 0, 0, 1]})
        assert rows.rows == [{"messages": [USER, said("wrong", train=False), USER, said("right")]}]
    assert read(tmp_path, {"conversations": chat, "mask": "User", "system": "S"}).rows[0]["messages"][0] == SYSTEM
    for mask, words in (
        ([0, 1], "has 2 values for 4 messages"),
        ([1, 1, 1, 1], "message 1; only the assistant's messages carry loss"),
        ([0, 0.5, 0, 1], "not a list of 0 and 1"),
        ("all", "not a list of 0 and 1"),
    ):
        assert words in refusal(tmp_path, {"messages": chat, "loss_mask": mask})


BAD_MESSAGES = {
    "a weight between": ([USER, said(weight=0.5)], "`weight` is not true or false: message 2 has `weight` 0.5"),
    "a mark as text": ([USER, said(train="no")], "`train` is not true or false: message 2 has `train` 'no'"),
    "a mask of either meaning": ([USER, said(mask=True)], "mask that can mean two things: message 2 has `mask` True"),
    "a number for it": ([USER, said(mask=1)], "mask that can mean two things: message 2 has `mask` 1"),
    "marks that disagree": ([USER, said(train=True, weight=0)], "loss marks that disagree: message 2"),
    "loss on a question": ([USER | {"loss": True}, said()], "loss: true of another role: message 1 has `loss` True"),
    "a picture": ([USER | {"images": ["a"]}, said()], "`images` is not read: message 1 has `images`, a list of 1 item"),
    "a refusal": ([USER, {"role": "assistant", "refusal": "no"}], "`refusal` is not read: message 2"),
    "tools in a message": ([SYSTEM | {"tools": [TOOL]}, USER, said()], "`tools` is not read: message 1"),
    "a part with a picture": (
        [USER | {"content": [{"type": "text", "text": "a", "image_url": {"url": "x"}}]}, said()],
        "`image_url` is not read: message 1 has `image_url` of a part of the content",
    ),
    "a part of another type": (
        [USER | {"content": [{"type": "image", "text": "a.png"}]}, said()],
        "not text: message 1 content is a list with 'image'; only parts of text are read",
    ),
    "reasoning after the text": (
        [USER, said([{"type": "text", "text": "y"}, {"type": "thinking", "thinking": "r"}])],
        "parts in another order: message 2",
    ),
    "two reasonings": ([USER, said(reasoning="a", thinking="b")], "two reasonings in one message: message 2"),
    "a key twice in arguments": (
        [USER, said("", tool_calls=[{"function": {"name": "dig", "arguments": '{"a": 1, "a": 2}'}}])],
        "key given twice: message 2 in a JSON text: 'a'",
    ),
    "a call of another type": (
        [USER, said("", tool_calls=[{"type": "custom", "custom": {"name": "dig", "input": "x"}}])],
        "not a tool call: message 2",
    ),
    "a result without a call": ([USER, RESULT, said()], "tool result without a call: message 2"),
    "a role that nobody knows": (
        [{"role": "narrator", "content": "a"}, said()],
        "wrong role: message 1 has 'narrator'",
    ),
    "a role that is no text": ([{"role": ["user"], "content": "a"}, said()], "wrong role: message 1 has ['user']"),
    "a name that is no text": ([USER | {"name": 3}, said()], "not text: message 1 name is a number"),
}


@pytest.mark.parametrize(("messages", "words"), BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
def test_a_message_that_cannot_be_honoured_is_a_bad_row(tmp_path, messages, words):
    assert refusal(tmp_path, {"messages": messages}).startswith(f"1: {words}")


def test_a_key_of_messages_can_be_passed_over(tmp_path):
    row = {"messages": [USER | {"images": ["a"]}, said(weight=0.5)]}
    rows = read(tmp_path, row, ignore=["messages.images", "messages.weight"])
    assert rows.rows == [CHAT] and rows.unread == "passed over by data.ignore: messages.images, messages.weight"


@pytest.mark.parametrize("beside", [None, "", "dig", "fill"])
def test_a_call_that_is_named_beside_its_function_has_that_name_or_none(beside: str | None):
    """As clients write it that fill each key of a call."""
    function = {"name": "dig", "arguments": {"deep": 3}}
    call = {"type": "function", "function": function}
    if beside == "fill":
        with pytest.raises(BadRow, match="it needs one name, and its arguments once"):
            _check_call(call | {"name": beside})
    else:
        assert _check_call(call | {"name": beside}) == call


@pytest.mark.parametrize("key", REASONING_KEYS)
def test_reasoning_is_one_key_under_every_name(tmp_path, key):
    for message in (said(**{key: "r"}), said(**{key: "r", "reasoning_content": "r"})):
        assert read(tmp_path, {"messages": [USER, message]}).rows == [{"messages": [USER, said(reasoning_content="r")]}]
    assert "its role is user" in refusal(tmp_path, {"messages": [USER | {key: "r"}, said()]})


PARTS = {
    "OpenAI": ([{"type": "text", "text": "y"}], said()),
    "OpenAI's responses": ([{"type": "output_text", "text": "y", "annotations": []}], said()),
    "LLaMA-Factory": (
        [{"type": "reasoning", "value": "r"}, {"type": "text", "value": "y"}],
        said(reasoning_content="r"),
    ),
    "Anthropic": ([{"type": "thinking", "thinking": "r"}, {"type": "text", "text": "y"}], said(reasoning_content="r")),
    "Mistral": (
        [{"type": "thinking", "thinking": [{"type": "text", "text": "r"}]}, {"type": "text", "text": "y"}],
        said(reasoning_content="r"),
    ),
    "a call": (
        [{"type": "text", "value": "y"}, {"type": "tool_call", "value": '{"name": "dig", "arguments": {"depth": 3}}'}],
        said(tool_calls=[CALL]),
    ),
}


@pytest.mark.parametrize(("parts", "expected"), PARTS.values(), ids=PARTS.keys())
def test_parts_of_content_are_text_reasoning_and_calls(tmp_path, parts, expected):
    rows = read(tmp_path, {"messages": [USER, said(parts, loss_weight=1.0)]})
    assert rows.rows == [{"messages": [USER, expected]}] and not rows.unread


def test_roles_come_in_any_order_and_under_other_names(tmp_path):
    for messages in (
        [said("hello"), USER, said()],
        [USER, USER, said(), said("z")],
        [USER, SYSTEM, said(), SYSTEM, USER],
        [USER, said("", tool_calls=[CALL]), USER, said()],
    ):
        assert read(tmp_path, {"messages": messages}).rows == [{"messages": messages}]
    for role, names in OTHER_ROLES.items():
        for name in (*names, role.upper()):
            turns = [USER, said("", tool_calls=[CALL]), {"role": name, "content": "x"}, said()]
            assert read(tmp_path, {"messages": turns}).rows[0]["messages"][2]["role"] == role


def test_calls_in_messages_of_their_own_are_one_turn(tmp_path):
    call = {"role": "tool_call", "content": '{"name": "dig", "arguments": {"depth": 3}}'}
    result = {"role": "tool_response", "content": "2"}
    rows = read(tmp_path, {"messages": [USER, call, call, result, result, said()]})
    assert rows.rows == [{"messages": [USER, said("", tool_calls=[CALL, CALL]), RESULT, RESULT, said()]}]


def test_names_of_speakers_are_kept(tmp_path):
    row = {"messages": [USER | {"name": "Ann"}, said(name="Bo")]}
    assert read(tmp_path, row).rows == [row]


def test_what_the_encoder_gives_the_template_is_not_a_rows_to_set(tmp_path):
    row = CHAT | {"chat_template_kwargs": {"add_generation_prompt": True}}
    assert "not a row's to set: add_generation_prompt" in refusal(tmp_path, row)
    assert "`chat_template_kwargs` is a list" in refusal(tmp_path, CHAT | {"chat_template_kwargs": [1]})
    assert read(tmp_path, CHAT | {"chat_template_kwargs": '{"a": 1}'}).rows[0]["chat_template_kwargs"] == {"a": 1}


def test_a_request_and_two_answers_are_a_preference(tmp_path):
    raw = {"input": {"messages": [USER], "tools": [TOOL], "parallel_tool_calls": True}}
    raw |= {"preferred_output": [said("y")], "non_preferred_output": [said("n")]}
    assert read(tmp_path, raw, objective="dpo").rows == [PAIR | {"tools": [TOOL]}]


def test_a_preference_finds_its_prompt_or_is_refused(tmp_path):
    answers = {"chosen": said("y"), "rejected": said("n")}
    for key, prompt in (("messages", [USER]), ("conversations", [USER]), ("question", "q"), ("prompt", USER)):
        assert read(tmp_path, answers | {key: prompt}, objective="dpo").rows == [PAIR]
    assert "no prompt" in refusal(tmp_path, answers, objective="dpo")


def test_a_lone_surrogate_in_a_call_or_a_tool_is_a_bad_row(tmp_path):
    call = {"function": {"name": "dig", "arguments": {"a": "\ud800"}}}
    assert "lone surrogate" in refusal(tmp_path, {"messages": [USER, said("", tool_calls=[call])]})
    assert "lone surrogate" in refusal(tmp_path, CHAT | {"tools": [{"name": "\ud800"}]})
    assert "lone surrogate" in refusal(tmp_path, CHAT | {"chat_template_kwargs": {"a": "\ud800"}})


def test_the_page_lists_the_names_that_have_a_meaning():
    page = (ROOT / "docs/recipes.md").read_text()
    rule = page.partition("### What is not read")[2].partition("### Rows that are too long")[0]
    columns, in_messages = rule.partition("Messages:")[::2]
    for names, text in ((MEANT, columns), (MEANT_KEYS, in_messages)):
        assert not [name for name in names if f"`{name}`" not in text]
    chats = page.partition("### Tools, reasoning, turns without loss")[2].partition("## Rows")[0]
    roles = [name for names in OTHER_ROLES.values() for name in names]
    assert not [name for name in (*roles, *REASONING_KEYS, *LOSS_MARKS) if f"`{name}`" not in chats]


SAME_CALL = {
    "args": {"name": "dig", "args": {"depth": 3}, "id": "c", "type": "tool_call"},
    "input": {"name": "dig", "input": {"depth": 3}, "id": "c"},
    "args of a function": {"function": {"name": "dig", "args": '{"depth": 3}'}, "id": "c"},
    "arguments beside the function": {"function": {"name": "dig"}, "arguments": {"depth": 3}, "id": "c"},
    "an empty object beside them": {"name": "dig", "arguments": {}, "parameters": {"depth": 3}, "id": "c"},
}


@pytest.mark.parametrize("call", SAME_CALL.values(), ids=SAME_CALL.keys())
def test_the_arguments_of_a_call_are_read_whatever_they_are_called(tmp_path, call):
    rows = read(tmp_path, {"messages": [USER, said("", tool_calls=[call])]})
    assert rows.rows[0]["messages"][1]["tool_calls"] == [CALL | {"id": "c"}] and not rows.unread


@pytest.mark.parametrize(
    "call",
    [
        {"name": "dig", "arguments": {"a": 1}, "parameters": {"b": 2}},
        {"function": {"name": "dig", "arguments": {"a": 1}}, "input": {"b": 2}},
        {"function": {"name": "dig"}, "name": "fly"},
    ],
)
def test_a_call_that_says_two_things_is_refused(tmp_path, call):
    assert "one name, and its arguments once" in refusal(tmp_path, {"messages": [USER, said(tool_calls=[call])]})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "R", "text": "S"},
        {"type": "text", "text": "A", "value": "B"},
        {"type": "text", "text": "A", "reasoning": "B"},
    ],
)
def test_a_part_with_two_texts_is_refused(tmp_path, part):
    assert "two texts in one part" in refusal(tmp_path, {"messages": [USER, said([part])]})


def test_a_part_that_is_marked_as_a_thought_is_reasoning(tmp_path):
    parts = [{"text": "R", "thought": True}, {"text": "y"}]
    assert read(tmp_path, {"messages": [USER, said(parts)]}).rows == [{"messages": [USER, said(reasoning_content="R")]}]


def test_parts_that_belong_elsewhere_are_refused_with_the_place(tmp_path):
    for part, place in (
        ({"type": "tool_use", "name": "f", "input": {}}, "`tool_calls`"),
        ({"type": "tool_result"}, "tool"),
    ):
        assert place in refusal(tmp_path, {"messages": [USER, said([part])]})


def test_a_result_may_follow_a_call_that_is_text(tmp_path):
    messages = [USER, said("<tool_call>"), {"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}, said()]
    assert read(tmp_path, {"messages": messages}).rows == [{"messages": messages}]
    assert "without a call" in refusal(
        tmp_path, {"messages": [USER, said(), USER, {"role": "tool", "content": "3"}, said()]}
    )


def test_a_system_message_may_be_parts(tmp_path):
    system = [{"type": "text", "text": "S"}]
    rows = read(tmp_path, CHAT | {"system": system})
    assert rows.rows == [{"messages": [SYSTEM, USER, said()]}] and not rows.unread


def test_renamed_keys_of_messages_win_over_those_that_have_the_name(tmp_path):
    """In whatever order they stand; tools keep theirs."""
    for order in (1, -1):
        talk = [
            dict([("content", "old"), ("text", text), ("role", "x"), ("type", role)][::order])
            for role, text in (("human", "q"), ("ai", "y"))
        ]
        columns = {"role": "type", "content": "text"}
        for messages in (talk, json.dumps(talk)):
            rows = read(tmp_path, {"messages": messages, "tools": [TOOL]}, columns=columns)
            assert rows.rows == [CHAT | {"tools": [TOOL]}]
            assert rows.unread == "not read: messages.content, messages.role"


AS_TEXT = {
    "completion": ("sft", {"prompt": [USER], "completion": [said()]}),
    "preference": ("dpo", {"chosen": [USER, said("y")], "rejected": [USER, said("n")]}),
    "judged answer": ("kto_zero", JUDGED),
}


@pytest.mark.parametrize(("objective", "row"), AS_TEXT.values(), ids=AS_TEXT.keys())
def test_messages_that_are_texts_of_json_are_messages_and_those_of_python_are_refused(tmp_path, objective, row):
    """As pandas and others write lists into tables."""

    def as_text(write):
        return {key: write(value) if isinstance(value, list) else value for key, value in row.items()}

    expected = read(tmp_path, row, objective=objective)
    assert read(tmp_path, as_text(json.dumps), objective=objective).fingerprint == expected.fingerprint
    parquet = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([as_text(json.dumps)]), parquet)
    rows = reading.read_rows(Source(path=str(parquet)), "error", Objective.of(name=objective))
    assert rows.fingerprint == expected.fingerprint
    assert "messages as Python prints them: `" in refusal(tmp_path, as_text(str), objective=objective)


def test_what_is_empty_in_a_text_of_json_or_in_a_list_asks_for_nothing(tmp_path):
    nothing = {"images": "[]", "tools": "null", "audios": [None, ""], "weight": "1.0", "train": True, "functions": "[]"}
    assert read(tmp_path, CHAT | nothing).rows == [CHAT]
    assert read(tmp_path, CHAT | {"system": "null"}).rows[0]["messages"][0]["content"] == "null"
    assert "`train` is not read: it is false" in refusal(tmp_path, CHAT | {"train": False})


def test_a_column_without_a_name_is_named_in_the_note(tmp_path):
    path = write_lines(tmp_path / "rows.csv", ",text", "0,a")
    assert (
        reading.read_rows(Source(path=path), "error", Objective.of(name="sft")).unread
        == "not read: a column without a name"
    )


def test_names_of_columns_in_another_encoding_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_bytes("text\na\n".encode("utf-16"))
    with pytest.raises(RecipeError, match="not UTF-8: byte 0xff after '' in a column's name; save the file as UTF-8"):
        reading.read_rows(Source(path=str(tmp_path / "rows.csv")), "error", Objective.of(name="sft"))


def test_a_stream_names_at_its_end_what_was_not_read_of_later_rows(tmp_path):
    first, second = ({"text": "a", "id": 1}, {"text": "b"}), ({"question": "q", "answer": "y", "score": 2},) * 2
    sources = [
        write_lines(tmp_path / f"{i}.jsonl", *map(json.dumps, rows)) for i, rows in enumerate((first, first, second))
    ]
    data = DataSection(train=sources, streaming=True, shuffle_rows=2, max_length=64)
    objective = Objective.of(name="sft")
    sets = tokenize_data(read_data(data, objective), make_tokenizer(), data, objective, cache=tmp_path)
    note = f"data.train.{{}} ({tmp_path}/{{}}.jsonl): {{}}".format
    assert sets.notes == [note(0, 0, "not read: id (1 of 2 rows)")] and sets.closing_notes() == []
    steps = sets.train.windows(seed=0, global_batch_size=2, num_samples_consumed=0)
    for _ in range(3):
        next(steps)
    assert sets.closing_notes() == [
        note(1, 1, "not read: id (1 of 2 rows)"),
        note(2, 2, "rows look like this: question -> user, answer -> assistant"),
        note(2, 2, "not read: score"),
    ]


ASKED = [SYSTEM, USER]
ASKED_WITH_MESSAGES = {
    "prompt and response": ("sft", {"prompt": ASKED, "response": "4"}, {"completion": [said("4")]}),
    "input and output": ("sft", {"input": ASKED, "output": "null"}, {"completion": [said("null")]}),
    "an answer that is JSON": ("sft", {"prompt": ASKED, "completion": '{"a": 1}'}, {"completion": [said('{"a": 1}')]}),
    "JSON with a key twice": (
        "sft",
        {"prompt": ASKED, "completion": '[{"a": 1, "a": 2}]'},
        {"completion": [said('[{"a": 1, "a": 2}]')]},
    ),
    "an answer of messages": ("sft", {"question": "q", "answer": [said()]}, {"prompt": [USER], "completion": [said()]}),
    "two texts": (
        "dpo",
        {"prompt": ASKED, "chosen": "1", "rejected": "0"},
        {"chosen": [said("1")], "rejected": [said("0")]},
    ),
    "two texts with one beginning": (
        "dpo",
        {"messages": ASKED, "chosen": "a b", "rejected": "a c"},
        {"chosen": [said("a b")], "rejected": [said("a c")]},
    ),
    "a judged text": (
        "kto_zero",
        {"prompt": ASKED, "response": "[1]", "label": 1},
        {"completion": [said("[1]")], "label": True},
    ),
}


@pytest.mark.parametrize(("objective", "row", "expected"), ASKED_WITH_MESSAGES.values(), ids=ASKED_WITH_MESSAGES.keys())
def test_a_text_may_answer_messages(tmp_path, objective, row, expected):
    """Whatever the text looks like."""
    assert read(tmp_path, row, objective=objective).rows == [{"prompt": ASKED} | expected]


def test_two_readings_of_a_preference_are_told_apart(tmp_path):
    row = {"question": "q", "instruction": "i", "chosen": "y", "rejected": "n"}
    words = "`instruction` and `chosen` and `rejected` as well as `question` and `chosen` and `rejected`"
    assert words in refusal(tmp_path, row, objective="dpo")


def test_reasoning_beside_a_question_and_its_answer_is_the_answers(tmp_path):
    rows = read(tmp_path, {"question": "q", "reasoning_content": "R", "answer": "y"})
    assert kinds()["exchange"].chats(rows.rows[0]) == [([USER, said(reasoning_content="R")], 0)] and not rows.unread


def test_the_columns_that_are_offered_for_messages_have_roles(tmp_path):
    def advice(message):
        with pytest.raises(RecipeError) as error:
            read(
                tmp_path,
                {"messages": [message, {key: "gpt" if text == "human" else text for key, text in message.items()}]},
            )
        return error.value.mistakes[-1]

    assert advice({"type": "human", "text": "q"}).endswith("role: type\n      content: text")
    assert "role" not in advice({"input": "q", "output": "why"}).partition("data:")[2]


def test_tools_may_be_one_object_and_functions_may_be_tools(tmp_path):
    for tools in ({"tools": TOOL}, {"functions": [TOOL]}, {"functions": TOOL["function"]}, {"tools": json.dumps(TOOL)}):
        assert read(tmp_path, CHAT | tools).rows == [CHAT | {"tools": [TOOL]}]
    assert "tools not a list of objects" in refusal(tmp_path, CHAT | {"tools": {"dig": TOOL}})


def test_a_second_system_column_is_refused_as_such(tmp_path):
    mistake = refusal(tmp_path, CHAT | {"system": "S", "system_prompt": "T"})
    assert mistake.startswith("1: `system_prompt` is not read: it is a string; the row has `system` too.")


def test_a_message_with_two_contents_is_refused(tmp_path):
    talk = [{"from": "human", "value": "q", "content": "other"}, {"from": "gpt", "value": "y"}]
    assert "two contents in one message: message 1 has" in refusal(tmp_path, {"conversations": talk})
    talk[0]["content"] = None
    assert read(tmp_path, {"conversations": talk}).rows == [CHAT]
    talk[0]["content"] = "other"
    assert read(tmp_path, {"conversations": talk}, ignore=["messages.content"]).rows == [CHAT]


def test_a_row_whose_label_is_null_is_a_bad_row_among_others(tmp_path):
    rows = [JUDGED, JUDGED | {"label": None}, JUDGED]
    path = write_lines(tmp_path / "rows.jsonl", *map(json.dumps, rows))
    rows_read = reading.read_rows(Source(path=path), "drop", Objective.of(name="kto_zero"))
    assert len(rows_read.rows) == 2 and rows_read.num_dropped == {"another kind of row": 1}


def test_a_text_does_not_answer_a_conversation_that_ends_with_an_answer(tmp_path):
    row = {"messages": [USER, said()], "chosen": "y", "rejected": "n"}
    assert refusal(tmp_path, row, objective="dpo").startswith("1: prompt ends with an answer: `chosen` is a text")


@pytest.mark.parametrize("column", ["reasoning", "thinking", "thought"])
def test_reasoning_beside_an_answer_is_asked_about(tmp_path, column):
    """In some sets it is a switch or a category."""
    raw = {"question": "q", column: "Two and two.", "answer": "a"}
    with pytest.raises(RecipeError, match=f"`{column}` is not read: .*data.columns: .*reasoning_content: {column}"):
        read(tmp_path, raw)
    with pytest.raises(RecipeError, match=f"`{column}` is not read: .*name it in data.columns as reasoning_content"):
        read(tmp_path, raw | {column: "on"})
    named = {"user": "question", "reasoning_content": column, "assistant": "answer"}
    expected = [{"user": "q", "reasoning_content": "Two and two.", "assistant": "a"}]
    assert read(tmp_path, raw, columns=named).rows == expected
