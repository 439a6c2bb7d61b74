"""status.json shows how a run stands, and a run that fails at the same step again and again stops with a report.

python -m pytest -q tests/test_status.py
"""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from cookbook.system import status
from cookbook.system.files import RecipeError
from cookbook.system.status import Status, past_failures, read


def fail(folder: Path, *, after: int, state: str = "running") -> list[int]:
    """One start that gets to a step and dies, or ends with a state; returns the failures that it began with."""
    failures = past_failures(folder)
    folder.mkdir(exist_ok=True)
    run = Status(folder, is_main=True, failed_after=failures)
    lines = [{"step": 0, "eval_loss": 2.0}, *({"step": i + 1, "loss": 1.0} for i in range(after))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if state != "running":
        run.end(state, exit_code=1, step=after, reason="FloatingPointError: step 8: the loss is nan")
    return failures


def test_a_run_says_how_it_stands_and_how_it_ended(tmp_path):
    run = Status(tmp_path, is_main=True, step=2)
    first = read(tmp_path)
    assert first.pop("started") > 1e9 and first.pop("host") and first.pop("launch") == status.launch_id()
    assert first == {
        "state": "running",
        "step": 2,
        "exit_code": None,
        "reason": None,
        "checkpoint": None,
        "pid": os.getpid(),
        "failed_after": [],
    }
    run.running(5, checkpoint="step-00000005")
    run.running(6)
    run.end("stopped", exit_code=75, step=7, reason="SIGTERM")
    last = read(tmp_path)
    shown = [last[key] for key in ("state", "step", "exit_code", "reason", "checkpoint")]
    assert shown == ["stopped", 7, 75, "SIGTERM", "step-00000005"]


def test_only_the_main_process_writes(tmp_path):
    Status(tmp_path, is_main=False).end("failed", exit_code=1)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_never_meets_half_a_file(tmp_path):
    run = Status(tmp_path, is_main=True, failed_after=[1] * 10_000)  # takes several writes

    def write() -> None:
        for step in range(200):
            run.running(step)

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while writer.is_alive():
        seen.add(json.loads((tmp_path / "status.json").read_text())["step"])
    assert len(seen) > 10


def test_a_full_disk_is_reported_and_leaves_the_old_file(tmp_path, monkeypatch, capsys):
    run = Status(tmp_path, is_main=True)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    run.end("failed", exit_code=1)
    assert "status.json could not be written" in capsys.readouterr().err
    assert read(tmp_path)["state"] == "running"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("state", ["running", "failed"])
def test_the_fourth_start_after_three_failures_at_a_step_is_refused(tmp_path, state):
    folder = tmp_path / "run"
    assert [fail(folder, after=7, state=state) for _ in range(3)] == [[], [7], [7, 7]]
    with pytest.raises(RecipeError) as refused:
        past_failures(folder)
    said = str(refused.value)
    assert "failed 3 times after step 7; the next start would fail again" in said
    assert f"rm {folder}/status.json" in said and str(folder / "metrics.jsonl") in said
    assert ("the loss is nan" in said) == (state == "failed")
    (folder / "status.json").unlink()
    assert past_failures(folder) == []


@pytest.mark.parametrize(("reason", "expected"), [("export", "failed"), ("SIGTERM", "stopped")])
def test_an_error_in_the_export_is_a_failure_and_one_after_a_stop_is_none(tmp_path, reason, expected):
    Status(tmp_path, is_main=True).end("stopped", exit_code=75, reason=reason)
    status.fail(tmp_path, OSError("no room"))
    assert read(tmp_path)["state"] == expected
    assert ("no room" in read(tmp_path)["reason"]) == (expected == "failed")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "failed"),
        ({"launch": "another"}, "running"),
        ({"host": "elsewhere", "launch": "theirs", "started": time.time() + 1}, "failed"),
        ({"host": "elsewhere", "launch": "theirs", "started": 1.0}, "running"),
    ],
    ids=["this launch", "another launch", "another machine's part", "another machine's earlier run"],
)
def test_a_rank_that_fails_for_all_writes_into_this_run_s_status_and_into_no_earlier_one(tmp_path, change, expected):
    """The main process waits in a collective for the rank that failed, and is killed there."""
    Status(tmp_path, is_main=True)
    of_another = read(tmp_path) | {"pid": os.getppid()} | change
    (tmp_path / "status.json").write_text(json.dumps(of_another))
    status.fail(tmp_path, MemoryError("no room"))
    assert read(tmp_path)["state"] == "running"
    status.fail(tmp_path, MemoryError("no room"), is_of_all=True)
    assert read(tmp_path)["state"] == expected


def test_progress_starts_the_count_anew(tmp_path):
    assert [fail(tmp_path, after=step) for step in (7, 7, 8, 8)] == [[], [7], [7, 7], [8]]
    assert past_failures(tmp_path) == [8, 8]


def test_failures_at_different_steps_are_no_reason_to_stop(tmp_path):
    for step in (7, 5, 7, 5, 7):
        fail(tmp_path, after=step)
    assert past_failures(tmp_path)[-3:] != [7, 7, 7]


def test_a_stop_between_failures_does_not_count_as_one(tmp_path):
    fail(tmp_path, after=7)
    fail(tmp_path, after=5, state="stopped")
    assert past_failures(tmp_path) == [7]
    fail(tmp_path, after=9, state="stopped")
    assert past_failures(tmp_path) == []


def test_a_finished_run_has_no_failures(tmp_path):
    fail(tmp_path, after=7)
    fail(tmp_path, after=20, state="finished")
    assert past_failures(tmp_path) == []


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"state": 3}', "\x00"])
def test_a_file_that_says_nothing_is_none(tmp_path, text):
    (tmp_path / "status.json").write_text(text)
    assert read(tmp_path) is None
    assert past_failures(tmp_path) == []


def test_the_last_step_is_the_last_whole_line(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert status.last_step(metrics) == 0
    metrics.write_text('{"step": 3, "loss": 1}\n{"step": 4, "loss": 1}\n{"step": 4, "eval_loss": 1}\n{"step": 5, "lo')
    assert status.last_step(metrics) == 4


def test_the_first_process_to_end_leaves_its_code(tmp_path, monkeypatch):
    monkeypatch.setenv(status.EXIT_FILE, str(tmp_path / "exit"))
    assert [status.note_exit(code) for code in (0, 2, 75)] == [0, 2, 0]
    assert (tmp_path / "exit").read_text() == "2"
    monkeypatch.delenv(status.EXIT_FILE)
    assert [status.note_exit(code) for code in (2, 75)] == [2, 75]


def test_a_restart_is_one_of_the_run_that_this_launcher_began(tmp_path, monkeypatch):
    Status(tmp_path, is_main=True)
    assert not status.is_restart(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert status.is_restart(tmp_path)
    record = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(record | {"started": record["started"] - 3600}))
    assert status.is_restart(tmp_path), "a clock that was set between the two starts changes nothing"
    (tmp_path / "status.json").write_text(json.dumps(record | {"launch": "another"}))
    assert not status.is_restart(tmp_path)
    (tmp_path / "status.json").unlink()
    assert not status.is_restart(tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, "null", '{"state": 3}', "\x00" * 50])
def test_a_damaged_status_is_none(tmp_path, content):
    (tmp_path / "status.json").write_text(content)
    assert read(tmp_path) is None and past_failures(tmp_path) == []
