"""Protects files of the user: no command replaces one that it did not write, or writes through a link.

python -m pytest -q tests/test_named_file.py
"""

import os
from pathlib import Path

import pytest
import typer

from cookbook.commands.cli import app, main
from tests.test_report import write_run

TRAINER = """\
per_device_train_batch_size: 2
learning_rate: 1.0e-5
model_name_or_path: m
dataset_name: d
num_train_epochs: 1
"""
KINDS = ["a file", "an empty file", "a page of another", "a link", "a link to nothing", "a folder"]
COMMANDS = {
    "report": ["report", "run"],
    "convert": ["convert", "trainer.yaml"],
    "init": ["init", "none/model", "rows.jsonl", "--gpus", "1x8GB"],
    "export": ["export", "adapter", "--merged"],
}
"""Each command with --out, as far as it goes before it looks at the name or writes."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"))
    Path("trainer.yaml").write_text(TRAINER)
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    Path("adapter/export").mkdir(parents=True)
    Path("adapter/export/base_model.json").write_text("{}")
    Path("mine.yaml").write_text("mine")
    return tmp_path


def test_each_command_that_writes_a_named_file_is_tried():
    group = typer.main.get_command(app)
    options = {
        name for name, command in group.commands.items() if any("--out" in param.opts for param in command.params)
    }
    assert options == COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "kind", ["a file", "an empty file", "a page of another", "a link", "a link to nothing", "a folder"]
)
def test_what_a_command_did_not_write_stays(command: str, kind: str, capsys):
    out = Path("out.yaml")
    if kind == "a folder":
        out.mkdir()
        (out / "mine").write_text("mine")
    elif "link" in kind:
        out.symlink_to("mine.yaml" if kind == "a link" else "nothing.yaml")
    else:
        out.write_text({"a file": "mine", "an empty file": ""}.get(kind, "<!DOCTYPE html>\n<html>\n"))
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert main([*COMMANDS[command], "--out", str(out)]) == 2
    assert "out.yaml: " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    assert ("link" in kind) == out.is_symlink() and not os.path.lexists("nothing.yaml")


def test_a_report_replaces_its_own_page_and_writes_to_a_device(capsys):
    for _ in range(2):
        assert main(["report", "run", "--out", "out.html"]) == 0
    assert main(["report", "run", "--out", "/dev/null"]) == 0
    assert main(["report", "run", "--out", "/dev/full"]) == 2
    assert "/dev/full: cannot be written" in capsys.readouterr().err
