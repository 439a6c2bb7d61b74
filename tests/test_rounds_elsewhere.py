"""Protects rounds whose answers another command samples, through a folder that both share.

python -m pytest -q -m "thorough or not thorough" tests/test_rounds_elsewhere.py
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment

from cookbook.commands.cli import main
from cookbook.commands.rounds import elsewhere, loop
from cookbook.config.sections import RoundsSection
from tests.test_rounds import ROUNDS, arguments, forked, model, read, release_folders, settings, start  # noqa: F401

SMALL = [
    "rounds.num_rounds=3",
    "rounds.max_staleness=1",
    "rounds.prompts_per_round=4",
    "rounds.num_generations=8",
    "rounds.generation_batch_size=32",
    "batch.global_batch_size=32",
    "batch.micro_batch_size=32",
    "run.num_epochs=1",
    "run.keep_last=4",
]
AHEAD = ROUNDS | {"num_rounds": 3, "max_staleness": 1}


def begin(out: Path, *words: str) -> "subprocess.Popen[str]":
    """The command in a process of its own, by the recipe for a laptop."""
    sets = [word for value in (*SMALL, f"run.output_dir={out}") for word in ("--set", value)]
    command = [sys.executable, "-m", "cookbook", "rounds", "recipes/sums/grpo.yaml", *sets, *words]
    environment = clean_environment() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload]


def wait_for(path: Path, *processes: "subprocess.Popen[str]") -> None:
    until = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < until and all(process.poll() is None for process in processes), path
        time.sleep(0.05)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.thorough
def test_two_commands_that_share_a_folder_leave_the_bytes_of_one(tmp_path: Path):
    """Whichever begins first, with both killed once, and a second sampler refused."""
    code, said = ended(begin(tmp_path / "alone"))
    assert code == 0, said
    out = tmp_path / "shared"
    sampler, trainer = begin(out, "--only", "sample"), begin(out, "--only", "train")
    wait_for(out / "rounds/0001/samples.jsonl", sampler, trainer)
    second = begin(out, "--only", "sample")
    kill(trainer)
    code, said = ended(second)
    assert code == 2 and "is in use by process" in said
    kill(sampler)
    trainer = begin(out, "--only", "train")
    wait_for(out / "rounds/0001/run/status.json", trainer)
    sampler = begin(out, "--only", "sample")
    for process in (trainer, sampler):
        code, said = ended(process)
        assert code == 0, said
    names = [f"rounds/{number:04}/samples.jsonl" for number in (1, 2, 3)]
    names += [f"rounds/{number:04}/run/export/model.safetensors" for number in (1, 2, 3)]
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name
    waits = [line["trainer_wait"] for line in read(out / "metrics.jsonl") if "trainer_wait" in line]
    assert len(waits) == 2 and all(seconds >= 0 for seconds in waits)


def begun_elsewhere(lab, values, monkeypatch, out: Path) -> None:
    """Rounds in a folder as a command that trains leaves them when it is stopped in the first."""
    monkeypatch.setattr(loop, "launch", lambda *_, **__: 75)
    assert start(lab, values) == 75
    record = json.loads((out / "rounds.json").read_text())
    (out / "rounds.json").write_text(json.dumps(record | {elsewhere.ELSEWHERE: True}))


def test_samples_of_other_weights_are_not_trained_on(lab, model, tmp_path, capsys, monkeypatch):  # noqa: F811
    values, out = settings(tmp_path, model, rounds=AHEAD), tmp_path / "out"
    begun_elsewhere(lab, values, monkeypatch, out)
    release_folders()
    assert main([*arguments(lab, values), "--only", "train"]) == 75, "as they are they do"
    samples = out / "rounds/0001/samples.jsonl"
    lines = read(samples)
    samples.write_text("".join(json.dumps(line | {"weights": "0" * 64}) + "\n" for line in lines))
    release_folders()
    assert main([*arguments(lab, values), "--only", "train"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"was sampled by {'0' * 64} of round 0" in said and "the round is sampled again" in said
    assert json.loads((out / "status.json").read_text())["state"] == "failed"


def test_a_sampler_samples_what_has_its_weights_and_no_more(lab, model, tmp_path, capsys, monkeypatch):  # noqa: F811
    """Rounds 1 and 2 by the weights before the first; of round 3 it waits for those of round 1."""
    values, out = settings(tmp_path, model, rounds=AHEAD), tmp_path / "out"
    begun_elsewhere(lab, values, monkeypatch, out)
    before = (out / "rounds/0001/samples.jsonl").read_bytes()
    (out / "rounds/0001/samples.jsonl").unlink()

    def give_up(is_there) -> None:
        assert not is_there()
        raise KeyboardInterrupt

    monkeypatch.setattr(elsewhere, "_wait_until", give_up)
    release_folders()
    assert main([*arguments(lab, values), "--only", "sample"]) != 0
    assert "ROUND 3: waits for the weights of round 1" in capsys.readouterr().out
    assert (out / "rounds/0001/samples.jsonl").read_bytes() == before
    assert (out / "rounds/0002/samples.jsonl").is_file() and not (out / "rounds/0003").exists()


def test_a_command_that_samples_by_itself_is_not_helped(lab, model, tmp_path, capsys, monkeypatch):  # noqa: F811
    values, out = settings(tmp_path, model, rounds=AHEAD), tmp_path / "out"
    begun_elsewhere(lab, values, monkeypatch, out)
    release_folders()
    assert start(lab, values) == 75
    shutil.rmtree(out / "rounds/0001")
    release_folders()
    assert main([*arguments(lab, values), "--only", "sample"]) == 2
    assert "start that one with --only train first" in " ".join(capsys.readouterr().err.split())
    assert not (out / "rounds/0001").exists()
    assert main([*arguments(lab, values), "--only", "sample", "--sample-until", "2"]) == 2
    assert "--sample-until 2 and --only sample: take one out" in capsys.readouterr().err


@pytest.mark.parametrize(("staleness", "keep_last", "kept"), [(0, 1, 1), (1, 1, 2), (1, 3, 3), (4, 2, 5)])
def test_the_weights_that_a_sampler_may_yet_need_are_kept(staleness: int, keep_last: int, kept: int):
    rounds = RoundsSection(num_rounds=9, prompts_per_round=1, max_staleness=staleness)
    assert elsewhere.exports_to_keep(rounds, keep_last) == kept
