"""A callback of a plugin gets events and metrics, and one that changes what is trained ends the run.

python -m pytest -q tests/test_callbacks.py -m "slow or not slow"
"""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from cookbook.config import plugins
from cookbook.config.callbacks import callback
from cookbook.config.recipe import load_recipe
from cookbook.system.files import RecipeError
from tests.curves import Curve, Lab

SETTINGS = {"plugins": f"[{ROOT / 'tests/plugins/watching.py'}]", "run.max_steps": "5", "run.eval_every_steps": "2"}


@pytest.fixture(autouse=True)
def _forget_plugins():
    yield
    plugins.use([])


def with_callbacks(*names: str) -> dict[str, str]:
    return {**SETTINGS, "run.callbacks": f"[{', '.join(names)}]"}


def notes_of(folder: Path, kind: str) -> list[Any]:
    notes = map(json.loads, (folder / "callbacks/Notes/notes.jsonl").read_text().splitlines())
    return [line for what, line in notes if what == kind]


def refusal(lab: Lab, strategy: str, name: str) -> tuple[Path, str]:
    folder, output = lab.attempt(strategy, with_callbacks(name))
    assert (folder / "exit_code").read_text() == "2", output[-2000:]
    return folder, output


def test_a_callback_gets_each_line_of_both_records_once_and_leaves_the_curve(lab: Lab):
    """From one process of several, saves in another thread included."""
    settings = with_callbacks("Notes", "DrawsOfItsOwn") | {"run.save_in_background": "true"}
    curve, without = lab.run("ddp", settings), lab.run("ddp", SETTINGS | {"run.save_in_background": "true"})
    assert notes_of(curve.folder, "event") == curve.events and len(curve.events) >= 3
    assert notes_of(curve.folder, "metrics") == curve.lines and len(curve.lines) >= 8
    assert curve.losses == without.losses and curve.evaluations == without.evaluations


def test_one_that_fails_is_off_and_the_run_goes_on(lab: Lab):
    curve = lab.run("single", with_callbacks("Fails", "Exits", "Notes"))
    output = (curve.folder / "output.txt").read_text()
    assert output.count("run.callbacks: Fails failed and is off: KeyError: 'a key that is not there'") == 1
    assert output.count("run.callbacks: Exits failed and is off: SystemExit: 0") == 1
    assert notes_of(curve.folder, "metrics") == curve.lines and len(curve.losses) == 5
    _, output = refusal(lab, "single", "FailsAtOnce")
    assert "run.callbacks: FailsAtOnce cannot be made: OSError: no place" in output


CHANGES = {
    "WritesWeights": ("on_metrics", "weights", 0),
    "WritesLater": ("on_metrics", "weights", 2),
    "DrawsOfTorch": ("on_metrics", "torch's random numbers", 2),
    "DrawsOfNumpy": ("on_event", "numpy's random numbers", 0),
    "DrawsOfPython": ("__init__", "Python's random numbers", 0),
    "WritesMoments": ("on_metrics", "the optimizer", 1),
    "SetsTheRate": ("on_event", "the optimizer", 0),
    "Moves": ("__init__", "the current folder", 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_that_changes_what_is_trained_ends_the_run_where_it_does(lab: Lab, name: str):
    method, what, step = CHANGES[name]
    folder, output = refusal(lab, "single", name)
    assert f"run.callbacks: {method} of {name} has changed {what}; a callback looks on" in output
    assert len(Curve(folder).steps) == step
    if step:
        assert json.loads((folder / "status.json").read_text())["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp2", "fsdp1"])
def test_a_change_of_weights_is_seen_where_they_are_in_shards(lab: Lab, strategy: str):
    folder, output = lab.attempt(strategy, with_callbacks("WritesWeights"))
    assert (folder / "exit_code").read_text() != "0" and not Curve(folder).steps
    assert "run.callbacks: on_metrics of WritesWeights has changed weights" in output


REFUSED = {
    "run.callbacks=[Note]": "run.callbacks has 'Note', which no file in plugins registers; did you mean Notes?",
    "run.callbacks=[Notes,Notes]": "has 'Notes' twice",
    "run.callbacks=[hits]": "which no file in plugins registers",
    "run.callbacks=Notes": "write a list: --set run.callbacks=[Notes]",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_callback_that_is_not_there_is_refused_before_the_run(lab: Lab, words: str):
    with pytest.raises(RecipeError) as caught:
        load_recipe(lab.folder / "recipe.yaml", [f"plugins={SETTINGS['plugins']}", words])
    assert REFUSED[words] in "\n".join(caught.value.mistakes)


def test_a_class_that_gets_nothing_is_no_callback():
    class Deaf: ...

    with pytest.raises(ValueError, match="'Deaf' has neither on_event nor on_metrics"):
        callback(Deaf)
