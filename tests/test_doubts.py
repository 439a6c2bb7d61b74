"""`check` warns of settings that contradict each other, and reads every row if asked, all without torch.

python -m pytest -q tests/test_doubts.py
"""

import json
import re

import pytest
from conftest import ROOT

from cookbook.commands.cli import main
from tests.test_cli import cookbook_without_torch

TEXTS = [{"text": f"text {i}"} for i in range(5)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes"}]} for i in range(5)
]
EXISTING = "model={name_or_path: some/model}"
HIGH = r"recipes/small.yaml:\d+: optim.learning_rate is 3e-3 for all weights of an existing model, above 1e-3"


def write_rows(book, name: str, rows: list) -> None:
    book.write(name, "".join(json.dumps(row) + "\n" for row in rows))


def warnings(capsys, *assignments: str) -> list[str]:
    flags = [word for assignment in assignments for word in ("--set", assignment)]
    assert main(["check", "recipes/small.yaml", *flags]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("assignments", "warns"),
    [
        ([], False),  # a new model
        ([EXISTING], True),
        ([EXISTING, "optim.learning_rate=1e-3"], False),
        ([EXISTING, "adapter={name: lora}"], False),
        ([EXISTING, "optim={name: adamw_8bit, learning_rate: 3e-3}"], True),
        ([EXISTING, "optim={name: muon, learning_rate: 2e-2}"], False),  # whose rates are others
        ([EXISTING, "optim.learning_rate=1e-3", "schedule={scale_lr: linear, base_batch_size: 4}"], True),  # 4e-3
    ],
)
def test_the_rate_of_a_new_model_on_all_weights_of_an_existing_one_is_warned_of(book, capsys, assignments, warns):
    warned = warnings(capsys, *assignments)
    assert len(warned) == warns
    if assignments == [EXISTING]:
        assert re.match(f"warning: {HIGH}", warned[0])


@pytest.mark.parametrize(
    ("adapter", "narrow"),
    [
        ("{name: lora, rank: 64}", ""),
        ("{name: lora, rank: 65}", "k_proj, v_proj"),
        ("{name: lora, rank: 65, targets: [q_proj, k_proj]}", "k_proj"),
        ("{name: lora, rank: 65, targets: [q_proj, up_proj]}", ""),
        ("{name: lora, rank: 200}", "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
    ],
)
def test_a_rank_above_the_width_of_a_layer_is_warned_of(book, capsys, adapter, narrow):
    """Layers of 128 x 128, keys and values of two heads of 32."""
    sizes = "{vocab_size: 300, hidden_size: 128, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,"
    sizes = f"model.from_scratch={sizes} num_key_value_heads: 2}}"
    warned = warnings(capsys, sizes, f"adapter={adapter}")
    rank = re.search(r"rank: (\d+)", adapter)[1]
    assert [line.partition(" have fewer")[0] for line in warned] == (
        [f"warning: --set adapter={adapter}: adapter.rank is {rank}, and {narrow}"] if narrow else []
    )


@pytest.mark.parametrize(("rank", "narrow"), [(64, ""), (65, "k_proj, v_proj have fewer")])
def test_plan_names_such_a_rank_too(capsys, rank, narrow):
    """In the quickstart's model, too, keys and values have two heads of 32."""
    adapter = f"adapter={{name: lora, rank: {rank}}}"
    assert main(["plan", "recipes/quickstart.yaml", "--gpus", "1xA100", "--strategy", "single", "--set", adapter]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (f"note adapter.rank is {rank}, and {narrow}" in said) == bool(narrow)


def test_the_quickstarts_evaluation_on_own_rows_is_warned_of(book, capsys):
    write_rows(book, "mine.jsonl", CHATS)
    (warned,) = warnings(capsys, "data.train=mine.jsonl")
    assert warned.startswith(
        "warning: --set data.train=mine.jsonl: data.eval is python-stdlib, which data.train is not"
    )
    assert warnings(capsys, "data.train=mine.jsonl", "data.eval=mine.jsonl") == []


@pytest.mark.parametrize(("rows", "warns"), [(CHATS, False), (TEXTS, True)], ids=["chats", "texts"])
def test_an_evaluation_set_of_another_kind_is_warned_of(book, capsys, rows, warns):
    write_rows(book, "mine.jsonl", CHATS)
    write_rows(book, "held.jsonl", rows)
    given = ["data.train=mine.jsonl", "data.eval={chosen: {path: held.jsonl}}"]
    warned = warnings(capsys, *given)
    assert (
        warned
        == [
            f"warning: --set {given[0]} --set {given[1]}: data.eval.chosen has rows of `text`, and data.train of"
            " `messages`: its loss is that of another task"
        ]
        * warns
    )


@pytest.mark.core
def test_no_shipped_recipe_has_a_doubt(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["check"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_every_row_is_read_without_a_model_and_without_torch(tmp_path):
    shares = [
        {"conversations": [{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": "yes"}]} for i in range(7)
    ]
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shares))
    (tmp_path / "bad.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in CHATS) + '{"messages": []}\nnot json\n'
    )
    good, bad = (f"{tmp_path}/{name}.jsonl" for name in ("good", "bad"))
    asked = ("check", "recipes/quickstart.yaml", "--data", "--set", EXISTING.replace("some/model", "not/there"))
    asked += ("--set", "optim.learning_rate=1e-5", "--set", f"data.train={good}")
    answer = cookbook_without_torch(*asked, "--set", f"data.eval={good}")
    assert answer.returncode == 0, answer.stderr
    assert f"data.train: {good}: 7 rows of `messages`; rows look like ShareGPT" in answer.stdout
    answer = cookbook_without_torch(*asked, "--set", f"data.eval={bad}")
    assert answer.returncode == 2
    assert f"{bad}:6: " in answer.stderr and f"{bad}:7: not JSON" in answer.stderr
    answer = cookbook_without_torch(*asked, "--set", f"data.eval={bad}", "--set", "data.on_bad_row=drop")
    assert answer.returncode == 0 and "5 rows of `messages`; 1 dropped: " in answer.stdout
    answer = cookbook_without_torch(*(word for word in asked if word != "--data"), "--set", f"data.eval={bad}")
    assert answer.returncode == 0 and "7 rows" not in answer.stdout  # files only
