"""Protects `plan --submit-row`: a run's row says nothing of whose run it was, and the page of accuracy reads it.

python -m pytest -q tests/test_submitted_row.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_report import write_run

from benchmarks.forecast_accuracy import own_runs
from cookbook.commands.cli import main
from cookbook.commands.plan.submitted_row import read_rows
from cookbook.config.recipe import dump_recipe, load_recipe

PRIVATE = ("alice", "acme", "secret", "node17", "launch-9")


def write_private_run(folder: Path, **record: Any) -> Path:
    """A run under one strategy on a GPU, with private words in all its files.

    Args:
        record: of run.json, in the place of what it has.
    """
    write_run(folder)
    recipe = yaml.safe_load(dump_recipe(load_recipe(Path("recipes/qwen25_7b/sft.yaml"))))
    recipe["model"]["name_or_path"] = "/home/alice/acme-model"
    recipe["data"] |= {"train": "/home/alice/secret.jsonl", "max_length": 4096}
    recipe["batch"]["micro_batch_size"] = 2
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    values = json.loads((folder / "run.json").read_text())
    values |= {
        "command": ["/home/alice/train.py"],
        "strategy": {"file": "/home/alice/acme.yaml", "kind": "fsdp2", "processes": 4},
        "hardware": {"gpu": "NVIDIA H100 80GB HBM3", "cores": 8, "machine": "node17"},
        "header": {"model": "qwen2, 7,615,616,512 parameters, all trained", "data": "secret"},
        "step_forecast": {"low": 1.5, "high": 2.5, "parts": [{"name": "compute", "low": 1.0, "high": 2.0}]},
    }
    (folder / "run.json").write_text(json.dumps(values | record))
    (folder / "status.json").write_text(json.dumps({"state": "finished", "host": "node17", "launch": "launch-9"}))
    starts = [{"event": "start", "step": 0, "time": 1.0, "strategy": "acme", "processes": 4, "resumed_from": None}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in starts))
    return folder


def test_a_row_has_no_private_word_and_the_page_reads_it_back(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = write_private_run(tmp_path / "alice")
    written = "".join(path.read_text() for path in folder.iterdir())
    assert all(word in written for word in PRIVATE), "the run has what must not be in the row"
    assert main(["plan", "--submit-row", str(folder)]) == 0
    said = capsys.readouterr().out
    assert not [word for word in (*PRIVATE, "/") if word in said]
    (row,) = read_rows(said.splitlines())
    assert (row.model, row.strategy, row.gpus) == ("qwen2, 7.62 B", "fsdp2", "4 x NVIDIA H100 80GB HBM3")
    assert (row.length, row.micro_batch, row.method) == (4096, "2", "full")
    file = tmp_path / "own_runs.csv"
    header, line = said.splitlines()
    file.write_text(own_runs.FACTS.read_text().splitlines()[0] + f"\n{line}\n")
    assert file.read_text().splitlines()[0] == header, "the file of the page has these columns"
    monkeypatch.setattr(own_runs, "FACTS", file)
    cells = [cell.strip() for cell in own_runs.section()[-1].strip("| ").split("|")]
    # 43 GiB were forecast and 41.5 measured; a step took 2 seconds of 1.5 to 2.5.
    assert cells[3:6] == ["41.50", "43.00", f"{43 / 41.5 - 1:+.1%}"]
    assert cells[6:9] == ["2", "1.5 to 2.5", "yes"]


def test_rows_of_two_runs_have_two_names_and_of_one_run_one(tmp_path: Path, capsys) -> None:
    folder, other = write_private_run(tmp_path / "a"), write_private_run(tmp_path / "b", machines=2)
    rows = []
    for of_run in (folder, folder, other):
        assert main(["plan", "--submit-row", str(of_run)]) == 0
        rows += read_rows(capsys.readouterr().out.splitlines())
    assert rows[0] == rows[1] and len({row.id for row in rows}) == 2


def test_a_model_that_everybody_knows_keeps_its_name(tmp_path: Path, capsys) -> None:
    folder = write_private_run(tmp_path / "run")
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("/home/alice/acme-model", "Qwen/Qwen2.5-7B"))
    assert main(["plan", "--submit-row", str(folder)]) == 0
    assert read_rows(capsys.readouterr().out.splitlines())[0].model == "Qwen/Qwen2.5-7B"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"plugins": {"mine.py": "0"}}, "it has plugins"),
        ({"hardware": {"gpu": "NVIDIA H100", "cores": 8, "simulated": True}}, "its GPUs were simulated"),
        ({"forecast": None}, "no forecast of memory"),
        ({"out_of_memory": [{"from": "a", "to": "b"}]}, "it changed its strategy or micro-batch"),
    ],
)
def test_a_run_that_no_forecast_can_be_compared_with_is_refused(record, message, tmp_path, capsys) -> None:
    folder = write_private_run(tmp_path / "run", **record)
    if record.get("forecast", 0) is None:
        whole = json.loads((folder / "run.json").read_text())
        del whole["forecast"]
        (folder / "run.json").write_text(json.dumps(whole))
    assert main(["plan", "--submit-row", str(folder)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["recipes/qwen25_7b/sft.yaml"], ["--all"], ["--gpus", "1xH100"], ["--set", "a=b"]])
def test_what_a_row_would_ignore_is_refused(words: list[str], tmp_path: Path, capsys) -> None:
    folder = write_private_run(tmp_path / "run")
    assert main(["plan", *words, "--submit-row", str(folder)]) == 2
    assert "asks nothing else" in capsys.readouterr().err
