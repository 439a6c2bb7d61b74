"""Protects who looks at a run whose records are damaged: one line names the file, and the rest is shown.

python -m pytest -q tests/test_record_forms.py
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cookbook.commands.cli import main
from cookbook.commands.shared import charts
from cookbook.commands.shared.html_page import Drawing
from cookbook.system import status
from tests.test_report import write_run

LINES = ("metrics.jsonl", "events.jsonl", "samples.jsonl", "monitor.jsonl")
RECORDS = ("run.json", "status.json", "profile/rank_0.json")
HUGE = 10**400
CHANGES: dict[str, Callable[[Any], Any]] = {
    "a list": lambda value: [1],
    "a text": lambda value: "x",
    "null": lambda value: None,
    "a mapping": lambda value: {"a": {}},
    "true": lambda value: True,
    "negative": lambda value: -value if isinstance(value, int | float) else value,
    "too many digits": lambda value: HUGE if isinstance(value, int | float) else value,
    "1e308": lambda value: 1e308 if isinstance(value, int | float) else value,
    "1e300": lambda value: 1e300 if isinstance(value, float) else value,
}


OFTEN = ("a list", "a mapping", "too many digits")
KINDS = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in CHANGES]


@pytest.fixture
def run(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(charts, "curves", draw_nothing)
    folder = write_run(tmp_path / "run", num_steps=12)
    record = json.loads((folder / "run.json").read_text())
    record |= {
        "header": {"model": "m"},
        "machines": 2,
        "packing": {"is_on": False, "can_pack": True, "padding": 0.4, "why": "no"},
        "step_forecast": {"low": 0.5, "high": 0.7, "parts": [{"name": "matrix products", "low": 0.4, "high": 0.5}]},
    }
    record["forecast"] |= {"moment": "backward", "needed": [1.0, 2.0], "parts": {"weights": 3.0}}
    (folder / "run.json").write_text(json.dumps(record))
    sample = {"rank": 0, "busy_percent": 50.0, "memory_gib": 3.0, "celsius": 90.0, "xids": [79], "throttled": ["heat"]}
    lines = [{"time": 9.0 + i, "gpus": [sample], "cpu": {"memory_gib": 1.0, "memory_total_gib": 4.0}} for i in range(3)]
    (folder / "monitor.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = {"compute": 0.1, "copies": 0.1, "communication": 0.1, "other": 0.1}
    profile = {"rank": 0, "first_step": 3, "last_step": 4, "seconds": 0.4, "hidden": 0.1}
    profile |= {"phases": {"forward": parts, "update": parts}, "operations": {"mm": 0.1}, "communications": {}}
    profile |= {"layers": {"0": {"forward": 0.1}}}
    (folder / "profile").mkdir()
    (folder / "profile/rank_0.json").write_text(json.dumps(profile))
    return folder


def draw_nothing(of: Any, lines: Any) -> Drawing:
    """Take the numbers of a curve as matplotlib does, but draw nothing."""
    for line in lines:
        for x, y in line.points:
            assert float(x) + float(y) is not None
    return Drawing(svg="", box=(0, 0, 1, 1), x=(0, 1), y=(0, 1))


def look(folder: Path, capsys) -> str:
    """All that the commands that read a run say of it; each ends with 0, or with a mistake."""
    said = ""
    for command in ("report", "why-slow", "watch"):
        assert main([command, str(folder)]) in (0, 2), command
        said += "".join(capsys.readouterr())
    assert status.past_failures(folder) is not None
    return said


def changed(value: Any, change: Callable[[Any], Any], key: str | None = None) -> Any:
    """A record with a change of each value, or of that under one key."""
    return {name: change(inner) if key in (None, name) else inner for name, inner in value.items()}


def test_a_whole_run_is_not_called_damaged(run: Path, capsys):
    said = look(run, capsys)
    assert "damaged" not in said and "0.400 s a step" in said and "Xid 79" in (run / "report.html").read_text()


@pytest.mark.parametrize("file", RECORDS)
@pytest.mark.parametrize("name", KINDS)
def test_a_record_with_other_values_is_left_out(run: Path, capsys, file: str, name: str):
    text = (run / file).read_text()
    record = json.loads(text)
    for key in (None, *record):
        (run / file).write_text(json.dumps(changed(record, CHANGES[name], key)))
        said = look(run, capsys)
        if file == "run.json" and name in ("a list", "a text") and key in ("strategy", "forecast"):
            assert said.count("run.json: is damaged, and left out (" + key) == 2


@pytest.mark.parametrize("file", LINES)
@pytest.mark.parametrize("name", KINDS)
def test_lines_with_other_values_are_left_out(run: Path, capsys, file: str, name: str):
    lines = [json.loads(line) for line in (run / file).read_text().splitlines() if line.endswith("}")]
    for key in (None, *dict.fromkeys(key for line in lines for key in line)):
        of_half = [changed(line, CHANGES[name], key) if i % 2 else line for i, line in enumerate(lines)]
        (run / file).write_text("".join(json.dumps(line) + "\n" for line in of_half))
        said = look(run, capsys)
        if name == "a mapping" and key in ("step", "time"):
            assert f"{file}: " in said and "are damaged, and left out" in said


@pytest.mark.parametrize("file", [*RECORDS, *LINES])
@pytest.mark.parametrize(
    "content",
    [
        b"[1]",
        b"3",
        b"null",
        b'"text"',
        b"{}",
        b'{"a": ',
        b"[" * 200_000,
        b"\xff\x00\xfe",
        b"",
        b'[{"step": 1}]\n5\nnull\n',
    ],
    ids=range(10),
)
def test_a_file_that_is_no_record_is_left_out(run: Path, capsys, file: str, content: bytes):
    (run / file).write_bytes(content)
    look(run, capsys)


@pytest.mark.parametrize("file", [*RECORDS, *LINES, "recipe.yaml"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_plain_file_is_not_waited_for(run: Path, capsys, file: str, kind: str):
    (run / file).unlink()
    if kind == "pipe":
        os.mkfifo(run / file)
    elif kind == "folder":
        (run / file).mkdir()
    else:
        (run / file).symlink_to("/dev/zero")
    said = look(run, capsys)
    if file == "run.json":
        assert "run.json: is damaged, and left out (no plain file)" in said


NO_STEPS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "texts": (lambda line: line | dict.fromkeys({"loss"} & line.keys(), "2.5"), "its records are damaged"),
    "not finite": (lambda line: line | dict.fromkeys({"loss"} & line.keys()), "the loss of no training step is finite"),
    "evaluations alone": (lambda line: {"step": 0, "eval_loss": 2.5}, "the run ended before its first"),
}


@pytest.mark.parametrize("losses", NO_STEPS)
def test_report_says_why_there_is_no_step(run: Path, capsys, losses: str):
    change, said = NO_STEPS[losses]
    *lines, _ = (run / "metrics.jsonl").read_text().splitlines()  # the last is cut
    (run / "metrics.jsonl").write_text("".join(json.dumps(change(json.loads(line))) + "\n" for line in lines))
    assert main(["report", str(run)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert [words for _, words in NO_STEPS.values() if words in last] == [said]
