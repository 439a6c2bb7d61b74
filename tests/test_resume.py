"""One training in many legs, each under another strategy and number of processes, is the uninterrupted one.

pytest tests/test_resume.py                 a few legs each
pytest tests/test_resume.py -m slow         every strategy file, adapters, optimizers, bf16
"""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from curves import ADAMW, ROOT, Curve, Lab, distance, environment

from cookbook.checkpoint import folder
from cookbook.checkpoint.tensors import Reader

STOPPED = 75
SGD_STEPS = {"run.max_steps": "4", "schedule.warmup_steps": "2"}


def launch(
    lab: Lab, output: Path, strategy: str, settings: dict[str, str], processes: int | None = None, **extra: str
) -> subprocess.CompletedProcess:
    """One start of a run in a folder of its own."""
    command = lab.command(strategy, {**settings, "run.output_dir": str(output)}, processes)
    return subprocess.run(
        command, cwd=ROOT, env=environment(**extra), capture_output=True, text=True, errors="replace", timeout=900
    )


def leg(lab: Lab, output: Path, where: str, settings: dict[str, str], *, num_steps: int | None) -> str:
    """Goes on for some steps, or to the end. `where` is strategy:processes. Returns what was printed."""
    strategy, _, processes = where.partition(":")
    slice_of = {"run.resume": "auto"} | ({"run.stop_after_steps": str(num_steps)} if num_steps else {})
    done = launch(lab, output, strategy, {**settings, **slice_of}, int(processes) if processes else None)
    said = done.stdout + done.stderr
    # torchrun's exit code for any worker that does not give 0 is 1.
    expected = 0 if num_steps is None else STOPPED if strategy == "single" else 1
    assert done.returncode == expected, said[-4000:]
    assert ("run.stop_after_steps); saved" in said) == (num_steps is not None), said[-4000:]
    return said


def tensors_of(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of a checkpoint, whole and flat."""
    checkpoint = folder.open_checkpoint(path)
    folder.verify(checkpoint)
    reader = Reader(checkpoint.pieces)
    sizes = {name: torch.Size(shape).numel() for name, shape in checkpoint.state()["parameters"].items()}
    return {
        (name, kind): torch.cat(list(reader.parts(name, kind, sizes[name], torch.float32)))
        for name in reader.names()
        for kind in reader.kinds(name)
    }


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("resume"))


LEGS = ["zero3:3", "fsdp2:2", "zero1:2", "ddp:3", "single", "tp:2", "fsdp1:2"]


def test_seven_legs_are_one_run(lab: Lab, tmp_path: Path):
    """AdamW, no clipping, head not tied, sizes that three processes do not divide."""
    settings = ADAMW | {"optim.eps": "1e-4", "batch.global_batch_size": "24", "batch.micro_batch_size": "2"}
    reference = lab.run("single", settings)
    output = tmp_path / "legs"
    for where in LEGS[:-1]:
        leg(lab, output, where, settings, num_steps=3)
    said = leg(lab, output, LEGS[-1], settings, num_steps=None)
    assert "goes on from" in said
    found = distance(Curve(output), reference)
    assert found.loss < 2e-5 and found.norm < 2e-4 and found.weight < 2e-5, found


def test_an_interrupted_run_is_the_uninterrupted_one_to_the_last_bit(lab: Lab, tmp_path: Path):
    settings = SGD_STEPS | {"run.save_in_background": "true"}
    output = tmp_path / "run"
    leg(lab, output, "ddp:2", settings, num_steps=2)
    leg(lab, output, "ddp:2", settings, num_steps=None)
    reference = lab.run("ddp", settings, processes=2)
    assert Curve(output).steps[-1]["loss"] == reference.steps[-1]["loss"]
    ours, theirs = Curve(output).weights, reference.weights
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []


def save_at(lab: Lab, output: Path, where: str, settings: dict[str, str]) -> dict[tuple[str, str], torch.Tensor]:
    """The state that a run leaves after its next two steps."""
    leg(lab, output, where, settings, num_steps=2)
    return tensors_of(folder.list_folders(output / "checkpoints")[0])


@pytest.fixture
def broken_newest(lab: Lab, tmp_path: Path) -> Path:
    """A run with two checkpoints, a bit of the newer one flipped."""
    output = tmp_path / "run"
    leg(lab, output, "single", SGD_STEPS | {"run.save_every_steps": "1"}, num_steps=2)
    newest = folder.list_folders(output / "checkpoints")[0]
    (pieces,) = newest.glob("*.safetensors")
    content = bytearray(pieces.read_bytes())
    content[-5] ^= 4
    pieces.write_bytes(content)
    return output


def test_a_broken_checkpoint_is_passed_over_aloud(lab: Lab, broken_newest: Path):
    said = leg(lab, broken_newest, "single", SGD_STEPS, num_steps=None)
    assert "step-00000002 is not whole" in said and "does not have the digest" in said
    assert "goes on from" in said and "step-00000001" in said.split("goes on from")[1]
    assert [line["step"] for line in Curve(broken_newest).steps] == [1, 2, 3, 4]


def test_no_whole_checkpoint_means_no_start(lab: Lab, broken_newest: Path):
    oldest = folder.list_folders(broken_newest / "checkpoints")[-1]
    (oldest / "manifest.json").unlink()
    before = sorted(path for path in broken_newest.rglob("*"))
    done = launch(lab, broken_newest, "single", SGD_STEPS | {"run.resume": "auto"})
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in said
    assert "no manifest.json in it" in said and "run.resume: never" in said
    assert sorted(path for path in broken_newest.rglob("*")) == before


CHANGES = {
    "seed": ({"seed": "8"}, "seed was 7 when the checkpoint was made, and is 8; change it back"),
    "batch": ({"batch.global_batch_size": "32"}, "batch.global_batch_size was 16 .* and is 32; change it back"),
    "data": ({"data.max_length": "64"}, "the data is not what the checkpoint was made with"),
    "model": ({"model.from_scratch.hidden_size": "32"}, "the model is not what the checkpoint was made with"),
    "optimizer": ({"optim.name": "adamw"}, "optim.name was 'sgd' .* change it back"),
    "learning rate": ({"optim.learning_rate": "0.05"}, r"run.allow_changes: \[optim.learning_rate\]"),
    "steps": ({"run.max_steps": "5"}, r"run.allow_changes: \[run.max_steps\]"),
    "adapter": ({"adapter.name": "lora"}, "adapter.name was None .* and is 'lora'"),
}


@pytest.fixture(scope="module")
def stopped(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after two of its steps; tests do not change it."""
    output = tmp_path_factory.mktemp("stopped") / "run"
    leg(lab, output, "single", SGD_STEPS, num_steps=2)
    return output


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_recipe_is_refused_or_needs_consent(lab: Lab, stopped: Path, change: str):
    settings, message = CHANGES[change]
    before = {path: path.stat().st_mtime_ns for path in stopped.rglob("*") if path.is_file()}
    done = launch(lab, stopped, "single", {**SGD_STEPS, "run.resume": "auto", **settings})
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in said, said[-3000:]
    assert re.search(message, said), said
    assert {path: path.stat().st_mtime_ns for path in stopped.rglob("*") if path.is_file()} == before


def test_consent_lets_the_learning_rate_change_and_says_so(lab: Lab, stopped: Path, tmp_path: Path):
    output = tmp_path / "run"
    shutil.copytree(stopped, output)
    settings = SGD_STEPS | {"optim.learning_rate": "0.05", "run.allow_changes": "[optim.learning_rate]"}
    said = leg(lab, output, "single", settings, num_steps=None)
    assert "optim.learning_rate was 0.1 when the checkpoint was made, and is 0.05, as run.allow_changes allows" in said
    rates = [line["learning_rate"] for line in Curve(output).steps]
    assert rates[2] < rates[1]


def test_a_run_can_begin_at_a_checkpoint_of_another(lab: Lab, stopped: Path, tmp_path: Path):
    output = tmp_path / "other"
    path = folder.list_folders(stopped / "checkpoints")[0]
    done = launch(lab, output, "single", SGD_STEPS | {"run.resume": str(path)})
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert [line["step"] for line in Curve(output).steps] == [3, 4]


def test_a_path_that_is_no_checkpoint_is_refused(lab: Lab, stopped: Path, tmp_path: Path):
    for path, reason in ((tmp_path / "nothing", "no such folder"), (stopped, "no manifest.json in it")):
        done = launch(lab, tmp_path / "out", "single", SGD_STEPS | {"run.resume": str(path)})
        said = done.stdout + done.stderr
        assert done.returncode == 2 and reason in said and "Traceback" not in said, said[-3000:]
        assert not (tmp_path / "out" / "metrics.jsonl").exists()
