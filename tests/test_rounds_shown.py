"""Protects what `watch` and `report` show of rounds: the numbers of a round, and conversations turn by turn.

python -m pytest -q tests/test_rounds_shown.py
"""

import json
import os
import re
import shutil
import socket
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from cookbook.commands import watch
from cookbook.commands.cli import main
from cookbook.commands.rounds.rounds_folder import Round, show_as_one_run
from cookbook.config.recipe import load_recipe
from tests.test_report import Page, offences

HOSTILE = "<b>7</b>\x1b[2J"


def line(number: int, row: int, rewards: list[float], results: list[str]) -> dict[str, Any]:
    """The answers to a prompt: a call of a tool and an answer, then one without a call."""
    called = [
        {"role": "assistant", "content": f"calc {row} + 4"},
        {"role": "tool", "content": results[0]},
        {"role": "assistant", "content": results[0]},
    ]
    at_once = [{"role": "assistant", "content": results[1]}]
    return {
        "round": number,
        "row": row,
        "prompt": [{"role": "user", "content": f"{row} + 4 = ?"}],
        "completions": [called, at_once],
        "rewards": rewards,
        "scores": {"environment": rewards},
        "ended": [True, False],
        "num_tokens": [10, 4],
        "num_turns": [2, 1],
        "policy": 0,
        "prompt_ids": [1],
        "completion_ids": [[2], [3]],
    }


def write_round(folder: Path, number: int, lines: list[dict[str, Any]], losses: list[float], state: str) -> None:
    current = Round(folder, number)
    current.run.mkdir(parents=True)
    current.samples.write_text("".join(json.dumps(each) + "\n" for each in lines))
    steps = [
        {"step": i, "loss": loss, "epoch": i / 2, "tokens_per_second": 50.0, "step_seconds": 1.0}
        for i, loss in enumerate(losses, start=1)
    ]
    (current.run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    record = {
        "command": ["train.py"],
        "strategy": {"file": "accelerate_configs/single.yaml", "processes": 1},
        "hardware": {"cores": 2, "device": "cpu"},
        "versions": {},
        "max_steps": 2,
    }
    (current.run / "run.json").write_text(json.dumps(record))
    write_status(current.run, state, len(losses))


def write_status(folder: Path, state: str, step: int) -> None:
    status = {"state": state, "reason": None, "step": step, "pid": os.getpid(), "host": socket.gethostname()}
    (folder / "status.json").write_text(json.dumps(status))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rounds of which the second trains, and has done the first of its two steps."""
    folder = tmp_path / "out"
    folder.mkdir()
    recipe = load_recipe(Path("recipes/calculator/grpo.yaml"), ["rounds.num_rounds=3"])
    (folder / "rounds.json").write_text(json.dumps({"recipe": recipe.model_dump(mode="json", exclude_none=True)}))
    write_round(folder, 1, [line(1, 3, [0.0, 0.0], ["8", "9"])], [0.5, 0.3], "finished")
    of_second = [line(2, 3, [1.0, 0.0], ["7", "9"]), line(2, 5, [0.5, 0.25], [HOSTILE, "9"])]
    write_round(folder, 2, of_second, [0.1], "running")
    (Round(folder, 2).run / "metrics.jsonl").rename(folder / "kept")
    show_as_one_run(folder, recipe, [Round(folder, 1), Round(folder, 2)])
    (folder / "kept").rename(Round(folder, 2).run / "metrics.jsonl")  # the step came after the metrics of all
    write_status(folder, "running", 2)
    return folder


def test_watch_has_the_numbers_of_the_round_that_trains(folder, capsys):
    assert main(["watch", str(folder), "--json"]) == 0
    (seen,) = json.loads(capsys.readouterr().out)["runs"]
    # Two steps of the first round and one of the second, of three rounds of two steps.
    assert (seen["step"], seen["max_steps"], seen["seconds_left"]) == (3, 6, None)
    assert seen["loss"] == pytest.approx((0.5 + 0.3 + 0.1) / 3)
    of_round = seen["round"]
    answers = of_round.pop("answers")
    assert of_round == {
        "round": 2,
        "num_rounds": 3,
        "is_training": True,
        "reward": (1.0 + 0.0 + 0.5 + 0.25) / 4,
        "completion_tokens": 7.0,
        "ended": 0.5,
        "turns": 1.5,
        "staleness": 1,
        "kl_sampler_trainer": None,
        "num_answers": 4,
    }
    assert [answer["reward"] for answer in answers] == [1.0, 0.5, 0.0]
    assert answers[0] == {
        "prompt": "user: 3 + 4 = ?",
        "answer": "assistant: calc 3 + 4\ntool (not trained): 7\nassistant: 7",
        "reward": 1.0,
    }
    assert answers[2]["answer"] == "9", "of one message, which is the policy's"


def test_the_time_that_is_left_is_the_median_round_for_each_that_is_not_over(folder, monkeypatch):
    """With its sampling, and without a night in which nothing ran."""
    record = json.loads((folder / "rounds.json").read_text())
    record["recipe"]["rounds"]["num_rounds"] = 6
    (folder / "rounds.json").write_text(json.dumps(record))

    def left(started: float, ends: list[float], now: float) -> float | None:
        """The seconds left of six rounds, where the one after those with `ends` trains."""
        shutil.rmtree(folder / "rounds")
        for number in range(1, len(ends) + 2):
            state, losses = ("finished", [0.5, 0.3]) if number <= len(ends) else ("running", [0.1])
            write_round(folder, number, [line(number, 3, [0.0, 0.0], ["8", "9"])], losses, state)
        for number, end in enumerate(ends, start=1):
            event = {"event": "finish", "step": 2, "time": end}
            (Round(folder, number).run / "events.jsonl").write_text(json.dumps(event) + "\n")
        write_status(folder, "running", 2)
        of_all = json.loads((folder / "status.json").read_text()) | {"started": started}
        (folder / "status.json").write_text(json.dumps(of_all))
        monkeypatch.setattr(watch.time, "time", lambda: now)
        return watch.look(folder).seconds_left

    assert left(1000.0, [1100.0], 1130.0) == 5 * 100 - 30
    assert left(1000.0, [1100.0, 1160.0], 1170.0) == 4 * 60 - 10, "the first has the start in it"
    # The third was interrupted, and ended 50 seconds after a start at 90,000; the fourth took 80.
    assert left(90_000.0, [1100.0, 1160.0, 90_050.0, 90_130.0], 90_131.0) == 2 * 70 - 1
    assert left(1000.0, [1100.0, 1160.0, 1220.0, 1280.0, 1340.0], 9999.0) == 0.0
    write_status(folder, "stopped", 2)
    assert watch.look(folder).seconds_left is None


def test_of_one_round_before_this_start_no_time_is_known(folder):
    event = {"event": "finish", "step": 2, "time": 1100.0}
    (Round(folder, 1).run / "events.jsonl").write_text(json.dumps(event) + "\n")
    state = json.loads((folder / "status.json").read_text())
    for started, is_known in ((1000.0, True), (2000.0, False)):
        (folder / "status.json").write_text(json.dumps(state | {"started": started}))
        assert (watch.look(folder).seconds_left is not None) == is_known


def test_watch_prints_three_answers_of_each_new_round_turn_by_turn(folder, capsys):
    write_status(folder, "finished", 3)
    assert main(["watch", str(folder)]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith(f"run {folder}, state finished, step 3 of 6, mean loss 0.3") and "round 2 of 3" in first
    assert "reward 0.438  7 tokens an answer  1.5 turns  50% ended  staleness 1" in others[0]
    cells = [re.split(" {2,}", text.strip())[-1] for text in others[1:]]
    assert cells[:4] == ["user: 3 + 4 = ?", "assistant: calc 3 + 4", "tool (not trained): 7", "assistant: 7"]
    assert any("\\x1b[2J" in cell for cell in cells) and not any("\x1b" in cell for cell in cells)


def test_between_two_rounds_the_next_is_not_said_to_train(folder, capsys):
    write_status(Round(folder, 2).run, "finished", 2)
    assert main(["watch", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["round"]["is_training"] is False


def test_before_the_first_run_there_are_no_numbers_and_damaged_samples_have_none(folder, capsys):
    samples = Round(folder, 2).samples
    samples.write_text(samples.read_text()[:-40])
    assert main(["watch", str(folder), "--json"]) == 0
    of_round = json.loads(capsys.readouterr().out)["runs"][0]["round"]
    assert (of_round["round"], of_round["reward"], of_round["answers"]) == (2, None, [])
    for number in (1, 2):
        (Round(folder, number).folder).rename(folder / f"gone{number}")
    assert main(["watch", str(folder), "--json"]) == 0
    of_round = json.loads(capsys.readouterr().out)["runs"][0]["round"]
    assert (of_round["round"], of_round["num_rounds"], of_round["answers"]) == (0, 3, [])


def test_report_has_answers_by_round_with_their_turns(folder):
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert offences(Page(folder / "report.html")) == []
    section = page.partition("<h2>Samples</h2>")[2].partition("<h2>")[0]
    rows = [[unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row, re.DOTALL)] for row in section.split("<tr>")]
    assert [row for row in rows if row] == [
        ["1", "user: 3 + 4 = ?", "assistant: calc 3 + 4\ntool (not trained): 8\nassistant: 8", "0"],
        ["2", "user: 3 + 4 = ?", "assistant: calc 3 + 4\ntool (not trained): 7\nassistant: 7", "1"],
        ["2", "user: 5 + 4 = ?", f"assistant: calc 5 + 4\ntool (not trained): {HOSTILE}\nassistant: {HOSTILE}", "0.5"],
    ]
    assert "td { white-space: pre-line }" in page, "else all turns stand in one line"
