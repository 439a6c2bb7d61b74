"""A run whose held-out loss no longer falls ends by transformers' rule, at the same step after a kill.

python -m pytest -q tests/test_early_stopping.py
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import EarlyStoppingCallback

from cookbook.config.recipe import load_recipe
from cookbook.run.stages import Progress, Run
from cookbook.system.files import RecipeError
from tests.curves import Curve, Lab

PATIENCE, OFTEN = 2, {"run.eval_every_steps": "2", "run.save_every_steps": "2", "run.keep_best": "1"}


def end_of(losses: dict[int, float], threshold: float) -> int | None:
    """The step at which transformers' callback stops a trainer with these held-out losses; the trainer's own part, the
    lowest of all so far, is the line at the end of the loop.
    """
    callback = EarlyStoppingCallback(PATIENCE, threshold)
    arguments: Any = SimpleNamespace(greater_is_better=False, metric_for_best_model="eval_loss")
    state: Any = SimpleNamespace(best_metric=None)
    control: Any = SimpleNamespace(should_training_stop=False)
    for step, loss in losses.items():
        callback.on_evaluate(arguments, state, control, {"eval_loss": loss})
        if control.should_training_stop:
            return step
        if state.best_metric is None or loss < state.best_metric:
            state.best_metric = loss
    return None


def stops_early(progress: Progress) -> bool:
    recipe = SimpleNamespace(run=SimpleNamespace(early_stopping_patience=PATIENCE))
    return Run.stops_early.fget(SimpleNamespace(recipe=recipe, progress=progress))  # type: ignore[attr-defined]


def test_the_loss_before_the_first_step_is_no_best():
    """A model that is trained to answer otherwise than before may need several evaluations to fall below it."""
    progress = Progress(eval_loss=0.1)
    progress.judge(0.0)
    assert progress == Progress(eval_loss=0.1)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_no_best(loss: float):
    progress = Progress(step=1, eval_loss=loss)
    progress.judge(0.0)
    assert (progress.best_rating, progress.best_step, progress.num_worse) == (None, None, 1)
    progress.step, progress.eval_loss = 2, 9.0
    progress.judge(0.0)
    progress.step = 3
    progress.judge(0.0)
    assert (progress.best_rating, progress.best_step, progress.num_worse) == (9.0, 2, 1), (
        "the first of two that are level"
    )


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.3, 0.5])
@pytest.mark.parametrize(
    "losses",
    [
        [3.0, 2.9, 2.8, 2.7, 2.9, 2.75, 2.6],
        [3.0, 2.97, 2.94, 2.91, 2.88, 2.85, 2.5],
        [3.0, 3.1, 2.9, 3.0, 2.99, 2.0, 1.0],
        [3.0, float("nan"), 2.0, float("nan"), float("nan"), 1.0, 0.5],
        [5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.1],
        [3.0, 3.0, 3.0, 2.0, 1.0, 0.5, 0.1],
        [4.0, 3.5, 3.0, 2.5, 2.0, 1.0, 0.1],
    ],
    ids=["bump", "slow", "worse", "nan", "falls", "level", "by halves"],
)
def test_the_rule_is_that_of_transformers(losses: list[float], threshold: float):
    progress, ends = Progress(), None
    for step, loss in enumerate(losses, 1):
        progress.step, progress.eval_loss = step, loss
        progress.judge(threshold)
        if stops_early(progress):
            ends = step
            break
    assert ends == end_of(dict(enumerate(losses, 1)), threshold)


def held_out(curve: Curve) -> dict[int, float]:
    return {step: loss for step, loss, _ in curve.evaluations if step}


@pytest.mark.slow
def test_two_processes_end_at_the_step_of_transformers_rule_and_again_after_a_kill(lab: Lab, tmp_path: Path):
    """The kill is within the count, after its checkpoint; one process goes on."""
    whole = lab.run("ddp", OFTEN, processes=2)
    losses = held_out(whole)
    falls = [
        before - after for before, after in zip(list(losses.values())[:-1], list(losses.values())[1:], strict=True)
    ]
    threshold = sorted(falls)[len(falls) // 2]
    wanted = end_of(losses, threshold)
    assert wanted is not None and 6 <= wanted < 20 and end_of(losses, 0.0) != wanted
    early = {"run.early_stopping_patience": str(PATIENCE), "run.early_stopping_threshold": repr(threshold)}
    settings = OFTEN | early | {"run.output_dir": str(tmp_path / "run"), "run.resume": "auto"}
    kill = json.dumps([{"at": "data.next", "step": wanted - 1, "do": "SIGKILL"}])
    killed = lab.start("ddp", settings, 2, variables={"COOKBOOK_FAULTS": kill})
    assert killed.returncode != 0 and not (tmp_path / "run" / "export").exists()
    done = lab.start("single", settings, 1)
    assert done.returncode == 0, done.stdout[-3000:]
    run = Curve(tmp_path / "run")
    assert run.steps[-1]["step"] == wanted and held_out(run) == pytest.approx(
        {step: loss for step, loss in losses.items() if step <= wanted}, abs=2e-6
    )
    status = json.loads((run.folder / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", wanted)
    assert status["reason"].startswith(f"early stopping after step {wanted}: no held-out loss below")
    assert status["checkpoint"].endswith(f"step-{wanted:08d}")
    assert json.loads((run.folder / "export" / "export.json").read_text())["step"] == wanted
    again = lab.start("single", settings, 1)  # all is done: it exports once more
    assert again.returncode == 0 and Curve(run.folder).steps[-1]["step"] == wanted


@pytest.mark.slow
def test_the_best_checkpoint_is_exported_if_asked(lab: Lab, tmp_path: Path):
    """A rate that is too high, so that the last is not the best."""
    settings = OFTEN | {"run.output_dir": str(tmp_path / "run"), "run.max_steps": "10", "optim.learning_rate": "30"}
    done = lab.start("single", settings | {"run.export": "best"}, 1)
    assert done.returncode == 0, done.stdout[-3000:]
    losses = held_out(Curve(tmp_path / "run"))
    best = min(losses, key=lambda step: losses[step])
    assert best != 10 and json.loads((tmp_path / "run" / "export" / "export.json").read_text())["step"] == best


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        (["run.early_stopping_patience=2"], "nothing is evaluated on the way; write run.eval_every_steps"),
        (
            ["run.early_stopping_patience=2", "data.eval=null"],
            "early_stopping_patience is 2, but there is no data.eval",
        ),
        (["run.early_stopping_threshold=0.1"], "would be ignored without early_stopping_patience"),
        (["run.early_stopping_patience=0"], "run.early_stopping_patience"),
        (["run.export=best"], "export best needs the best checkpoint: write keep_best: 1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(lab: Lab, settings: list[str], mistake: str):
    with pytest.raises(RecipeError) as error:
        load_recipe(lab.folder / "recipe.yaml", settings)
    assert mistake in str(error.value)
