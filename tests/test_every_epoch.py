"""Evaluations and checkpoints so many times an epoch come after the steps that complete that part of it.

python -m pytest -q tests/test_every_epoch.py
"""

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest

from cookbook.commands.cli import main
from cookbook.config.recipe import load_recipe
from cookbook.config.sections import RunSection
from cookbook.system.files import RecipeError
from tests.curves import Curve, Lab

STEPS = 7
"""Steps of an epoch of the small recipe: 101 rows in global batches of 16, the last of them of 5."""


@pytest.mark.parametrize(("steps", "times"), [(1, 1), (3, 2), (7, 1), (7, 2), (7, 3), (7, 7), (10, 4), (1000, 3)])
def test_the_parts_of_an_epoch_are_completed_by_their_steps(steps: int, times: int):
    parts = [math.ceil(Fraction(steps * part, times)) for part in range(1, times + 1)]
    wanted = [epoch * steps + step for epoch in range(3) for step in parts]
    run = RunSection(num_epochs=3, evals_per_epoch=times, output_dir="x")
    assert [step for step in range(3 * steps + 1) if run.evaluates_after(step, steps)] == wanted
    assert len(wanted) == 3 * times and 3 * steps in wanted


@pytest.mark.parametrize(("steps", "epochs"), [(1, 2), (3, 3), (7, 5)])
def test_every_so_many_epochs_is_after_their_last_step(steps: int, epochs: int):
    run = RunSection(num_epochs=3 * epochs + 1, saves_per_epoch=f"1/{epochs}", output_dir="x")
    due = [step for step in range(run.num_epochs * steps + 1) if run.saves_after(step, steps)]
    assert due == [epochs * steps, 2 * epochs * steps, 3 * epochs * steps]
    assert run.model_dump()["saves_per_epoch"] == f"1/{epochs}"
    assert RunSection(num_epochs=1, saves_per_epoch="1/1", output_dir="x").model_dump()["saves_per_epoch"] == 1


def test_explain_says_every_so_many_epochs(capsys):
    words = ("explain", "recipes/quickstart.yaml", "--set", "run.evals_per_epoch=1/5", "--set", "run.saves_per_epoch=1")
    assert main([*words]) == 0
    said = capsys.readouterr().out
    assert "at the end of every 5 epochs and at the end" in said and "once an epoch, at the end" in said
    assert main([*words, "--json"]) == 0
    assert '"1/5"' in capsys.readouterr().out


def saved_steps(run: Curve) -> list[int]:
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    return [event["step"] for event in events if event["event"] == "save"]


def test_two_processes_that_are_stopped_and_resumed_evaluate_and_save_at_these_steps(lab: Lab, tmp_path: Path):
    settings = {"run.num_epochs": "2", "run.evals_per_epoch": "2", "run.saves_per_epoch": "1", "run.keep_best": "1"}
    settings |= {"run.output_dir": str(tmp_path / "run"), "run.resume": "auto"}
    stopped = lab.start("ddp", settings | {"run.stop_after_steps": "5"}, 2)
    assert stopped.returncode == 75, stopped.stdout[-3000:]
    done = lab.start("ddp", settings, 2)
    assert done.returncode == 0, done.stdout[-3000:]
    run = Curve(tmp_path / "run")
    assert [step for step, _, _ in run.evaluations] == [0, 4, 7, 11, 14]
    assert saved_steps(run) == [5, STEPS, 2 * STEPS]
    assert [line["epoch"] for line in run.steps if line["step"] in (7, 14)] == [1, 2]


def test_more_evaluations_than_steps_are_refused_before_the_model_is_loaded(lab: Lab):
    folder, printed = lab.attempt("single", {"run.evals_per_epoch": "8"})
    assert (folder / "exit_code").read_text() == "2"
    assert f"run.evals_per_epoch is 8, but an epoch has {STEPS} steps; write at most {STEPS}" in printed


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        (["run={max_steps: 9, eval_every_steps: 3, evals_per_epoch: 2}"], "evals_per_epoch 2 are both given; keep one"),
        (["run={max_steps: 9, save_every_steps: 3, saves_per_epoch: 2}"], "saves_per_epoch 2 are both given; keep one"),
        (["data.streaming=true", "run.evals_per_epoch=2"], "evals_per_epoch is 2, but the length of a stream is not"),
        (["data.streaming=true", "run.saves_per_epoch=1"], "saves_per_epoch is 1, but the length of a stream is not"),
        (["data.eval=null", "run.evals_per_epoch=2"], "evals_per_epoch is 2, but there is no data.eval"),
        (["run.keep_best=1", "run.evals_per_epoch=3", "run.saves_per_epoch=2"], "make evals_per_epoch a multiple of"),
        (["run.keep_best=1", "run.eval_every_steps=3", "run.saves_per_epoch=1"], "make evals_per_epoch a multiple of"),
        (["run.evals_per_epoch=0"], "run.evals_per_epoch is 0; write how many times an epoch, as 2, or 1/5 for"),
        (["run.evals_per_epoch=0.5"], "run.evals_per_epoch is 0.5; write how many times"),
        (["run.saves_per_epoch=2/3"], "run.saves_per_epoch is '2/3'; write how many times"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(lab: Lab, settings: list[str], mistake: str):
    with pytest.raises(RecipeError) as error:
        load_recipe(lab.folder / "recipe.yaml", settings)
    assert mistake in str(error.value)


def test_a_cadence_on_the_command_line_takes_the_place_of_the_files(lab: Lab, tmp_path: Path):
    text = (lab.folder / "recipe.yaml").read_text().replace("max_steps: 20", "max_steps: 20, eval_every_steps: 5")
    (tmp_path / "recipe.yaml").write_text(text)
    run = load_recipe(tmp_path / "recipe.yaml", ["run.evals_per_epoch=1"]).run
    assert (run.eval_every_steps, run.evals_per_epoch) == (None, 1)
