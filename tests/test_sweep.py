"""`sweep` trains each value in a folder of its own, goes on where it stopped, and names the best.

python -m pytest -q tests/test_sweep.py
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from cookbook.commands import launch
from cookbook.commands.cli import main
from cookbook.config.recipe import dump_recipe
from cookbook.start.run_plan import load_pair
from cookbook.system import lock, status
from cookbook.system.record_files import read_lines

SUMS = "recipes/sums/sft.yaml"
RATES = "optim.learning_rate=1e-3,2e-3,4e-3"


class Started:
    """Stands in for the processes of a run: notes each start, and leaves what a run leaves."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.codes: dict[str, int] = {}
        self.has_held_out = True
        self.hits: list[float | None] = []

    def __call__(self, command: list[str], environment: dict[str, str], folder: Path) -> int:
        self.runs.append(folder.name)
        words = [word for flag, word in pairwise(command) if flag == "--set"]
        assert words[-1] == f"run.output_dir={folder}" and "run.resume=auto" in words
        if "--dry-run" in command:
            return 0
        recipe, _ = load_pair(ROOT / SUMS, words)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(dump_recipe(recipe))
        rate = recipe.optim.learning_rate
        line = {"step": 1, "epoch": 0.1, "num_tokens": 8, "loss": rate, "learning_rate": rate}
        held_out = {"step": 1, "epoch": 0.1, "num_tokens": 8, "eval_loss": abs(rate - 2e-3) + 1}
        if self.hits:
            held_out |= {"eval_hits": self.hits[len(self.runs) - 1]}
            record: dict[str, Any] = {"strategy": {"file": "single", "processes": 1}, "hardware": {"cores": 2}}
            record |= {"best_by": {"metric": "hits", "greater_is_better": True}}
            (folder / "run.json").write_text(json.dumps(record))
        lines = [line, held_out] if self.has_held_out else [line]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(values) + "\n" for values in lines))
        code = self.codes.get(folder.name, 0)
        state = {0: "finished", 75: "stopped"}.get(code, "failed")
        status.Status(folder, is_main=True).end(state, exit_code=code, reason="")
        return code


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(lock, "_held_locks", [])
    stand_in = Started()
    monkeypatch.setattr(launch, "run_command", stand_in)
    yield stand_in
    for held in lock._held_locks:
        held.release()


def sweep(out: Path, *words: str) -> int:
    for held in lock._held_locks:  # which the end of a process releases
        held.release()
    return main(["sweep", SUMS, *words, "--set", f"run.output_dir={out}"])


def name(rate: str) -> str:
    return f"optim.learning_rate={rate}"


def test_each_value_trains_in_a_folder_of_its_own_and_the_best_is_named(started, tmp_path, capsys):
    assert sweep(tmp_path / "out", RATES) == 0
    assert started.runs == [name("1e-3"), name("2e-3"), name("4e-3")]
    parent = tmp_path / "out-sweep"
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.strip().startswith("optim.")]
    assert [row[:3] for row in rows] == [
        [name("1e-3"), "finished", "1.0010"],
        [name("2e-3"), "finished", "1.0000"],
        [name("4e-3"), "finished", "1.0020"],
    ]
    assert f"best held-out loss: 1.0000, at the end of {parent / name('2e-3')}\n" in printed
    assert all(name(rate) in (parent / "compare.html").read_text() for rate in ("1e-3", "2e-3", "4e-3"))


@pytest.mark.parametrize(
    ("hits", "best"), [([0.1, 0.2, 0.7], "hits: 0.7000"), ([0.1, None, 0.7], "loss: 1.0000")], ids=["all", "not all"]
)
def test_the_metric_that_the_recipe_compares_by_is_shown_and_names_the_best(started, tmp_path, capsys, hits, best):
    """Where a metric counted nothing in one of the runs, the loss compares them."""
    started.hits = hits
    assert sweep(tmp_path / "out", RATES) == 0
    printed = capsys.readouterr().out
    assert f"best held-out {best}, at the end of {tmp_path}" in printed
    assert "1.0020 held out, hits 0.7000" in printed and ("hits 0.2000" in printed) == (None not in hits)


def test_without_held_out_rows_the_training_loss_says_which_is_least(started, tmp_path, capsys):
    started.has_held_out = False
    assert sweep(tmp_path / "out", RATES) == 0
    said = "least training loss, as no held-out set is shared: 0.0010, at the end of"
    assert f"{said} {tmp_path / 'out-sweep' / name('1e-3')}\n" in capsys.readouterr().out


@pytest.mark.parametrize("has_held_out", [True, False])
def test_a_key_that_makes_another_loss_has_no_best_value(started, tmp_path, capsys, has_held_out):
    """A smoothed label has a larger loss by definition, held out or in training."""
    started.has_held_out = has_held_out
    assert sweep(tmp_path / "out", "objective.label_smoothing=0,0.1") == 0
    printed = capsys.readouterr().out
    assert "no run is the best: a loss under another objective.label_smoothing is another loss\n" in printed
    assert "best held-out loss" not in printed and "least training loss" not in printed


def test_a_sweep_that_was_stopped_goes_on_with_the_run_that_was(started, tmp_path, capsys):
    started.codes = {name("2e-3"): 75}
    assert sweep(tmp_path / "out", RATES) == 75
    assert started.runs == [name("1e-3"), name("2e-3")]
    assert "stopped in run 2 of 3; the same command goes on from there" in capsys.readouterr().out
    started.runs, started.codes = [], {}
    assert sweep(tmp_path / "out", RATES) == 0
    assert started.runs == [name("2e-3"), name("4e-3")]
    started.runs = []
    assert sweep(tmp_path / "out", RATES) == 0 and started.runs == []
    assert sweep(tmp_path / "out", RATES, "--set", "run.resume=never") == 0 and len(started.runs) == 3


def test_a_signal_as_a_run_finishes_starts_no_other_run(started, tmp_path, monkeypatch):
    monkeypatch.setattr("cookbook.system.child._signal", "SIGTERM")
    assert sweep(tmp_path / "out", RATES) == 75
    assert started.runs == [name("1e-3")]


def test_a_finished_run_of_other_settings_is_not_passed_over(started, tmp_path):
    assert sweep(tmp_path / "out", "seed=1,2") == 0
    started.runs = []
    assert sweep(tmp_path / "out", "seed=1,2", "--set", "optim.weight_decay=0.3") == 0
    assert started.runs == ["seed=1", "seed=2"]


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_finished_run_of_rows_that_were_written_since_is_named(started, tmp_path, capsys, is_folder):
    rows = tmp_path / "rows" / "train.jsonl"
    rows.parent.mkdir()
    lines = [json.dumps({"prompt": f"{number}+1=", "completion": f"{number + 1}"}) for number in range(40)]
    rows.write_text("\n".join(lines) + "\n")
    settings = ("seed=1,2", "--set", f"data.train={rows.parent if is_folder else rows}")
    assert sweep(tmp_path / "out", *settings) == 0
    long_ago = time.time() - 1000
    os.utime(rows, (long_ago, long_ago))
    assert sweep(tmp_path / "out", *settings) == 0
    assert "was written since" not in capsys.readouterr().out
    os.utime(rows, (long_ago + 2000, long_ago + 2000))
    assert sweep(tmp_path / "out", *settings) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "was written since then; this run is of" in line]
    assert len(notes) == 2 and str(rows.parent) in notes[0] and "--set run.resume=never" in notes[0]


def test_a_failed_run_ends_no_sweep_and_is_not_the_best(started, tmp_path, capsys):
    started.codes = {name("2e-3"): 1}
    assert sweep(tmp_path / "out", RATES) == 1
    assert started.runs == [name("1e-3"), name("2e-3"), name("4e-3")]
    assert f"1.0010, at the end of {tmp_path / 'out-sweep' / name('1e-3')}\n" in capsys.readouterr().out


def test_keys_are_combined_and_a_list_is_one_value(started, tmp_path):
    betas = "optim.betas=[0.9,0.95],[0.9, 0.99]"
    assert sweep(tmp_path / "out", betas, "--and", "seed=1,'2'", "--dry-run") == 2, "'2' is text"
    assert started.runs == []
    assert sweep(tmp_path / "out", betas, "--and", "seed=1,2", "--dry-run") == 0
    keys = [[part.partition("=")[2][:8] for part in run.split(",")] for run in started.runs]
    assert keys == [["0.9_0.95", "1"], ["0.9_0.95", "2"], ["0.9_0.99", "1"], ["0.9_0.99", "2"]]
    assert len({*started.runs}) == 4 and not (tmp_path / "out-sweep").exists()


def jobs(script: str, tmp_path: Path) -> list[list[str]]:
    """The words that bash gives `launch` in each job of a script."""
    head = script.partition("export COOKBOOK_STEP_FILE")[0] + """printf '%s\\n' "$@"\n"""
    (tmp_path / "head.sh").write_text(head)
    number = re.search(r"^#SBATCH --array=1-(\d+)$", script, re.MULTILINE)
    assert number is not None
    return [
        subprocess.run(
            ["bash", tmp_path / "head.sh"],
            env=os.environ | {"SLURM_ARRAY_TASK_ID": str(task)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for task in range(1, int(number[1]) + 1)
    ]


def test_an_array_of_slurm_has_a_job_for_each_run_that_is_left(started, tmp_path, capsys):
    swept = ("optim.betas=[0.9,0.95],[0.9, 0.99]", "--and", "optim.learning_rate=1e-3,2e-3")
    in_slurm, out = (*swept, "--to", "slurm", "--gpus", "1xcpu"), tmp_path / "an $out"
    assert sweep(out, *in_slurm) == 0
    script = capsys.readouterr().out
    written = jobs(script, tmp_path)
    assert "#SBATCH --nodes=1\n" in script and len(written) == 4 and started.runs == []
    assert all(words[:3] == [SUMS, "--processes", "1"] for words in written)
    pairs = [[word for flag, word in pairwise(words) if flag == "--set"] for words in written]
    assert [settings[:3] for settings in pairs] == [
        ["run.resume=auto", f"optim.betas={betas}", f"optim.learning_rate={rate}"]
        for betas in ("[0.9,0.95]", "[0.9, 0.99]")
        for rate in ("1e-3", "2e-3")
    ]
    assert all(settings[-1].startswith(f"run.output_dir={tmp_path}/an $out-sweep/") for settings in pairs)
    assert len({settings[-1] for settings in pairs}) == 4
    assert sweep(out, swept[0], "--and", "optim.learning_rate=1e-3,4e-3") == 0
    capsys.readouterr()
    assert sweep(out, *in_slurm) == 0
    left = [Path(words[-1]).name for words in jobs(capsys.readouterr().out, tmp_path)]
    assert left == [Path(settings[-1]).name for settings in (pairs[1], pairs[3])], "what has finished is left out"
    assert sweep(out, *swept) == 0
    capsys.readouterr()
    assert sweep(out, *in_slurm) == 0
    written = capsys.readouterr()
    assert "all runs are finished; the same command without --to" in written.err and not written.out


@pytest.mark.parametrize(
    ("words", "mistakes"),
    [
        (["optim.learning_rate=x,1e-3,-1"], ["optim.learning_rate is 'x' (text)", "optim.learning_rate is -1; it"]),
        (["seed=1,y", "--and", "optim.lerning_rate=1,2"], ["seed is 'y'", "lerning_rate"]),
        (["optim.betas=0.9,0.95"], ["is 0.9 (a number); it must be a list", "in brackets: optim.betas=[a,b],[a,c]"]),
        (["optim.betas=[0.9,0.95]"], ["has 1 value; write optim.betas=VALUE,VALUE (a list in brackets is one value)"]),
        (["optim.betas=[0.9,0.95"], ["not valid YAML"]),
        (["seed=1],[2"], ["not valid YAML"]),
        (["seed=1,2 # three"], ["not valid YAML"]),
        (["seed=1,1"], ["seed=1,1: a value is given twice"]),
        ([f"{RATES},0.002"], ["rate=2e-3 and optim.learning_rate=0.002 are the same settings; keep one of them"]),
        (
            ["objective.train_on=assistant,null", "--to", "slurm", "--gpus", "2xcpu"],  # its default
            ["objective.train_on=assistant and objective.train_on=null are the same settings"],
        ),
        (["seed"], ["seed: write it as section.key=VALUE,VALUE"]),
        (["seed=1,2", "--and", "seed=3,4"], ["seed=3,4: seed has values already"]),
        (["run.resume=auto,never", "--and", "seed"], ["gives each run its own run.resume", "seed: write it"]),
        (["seed=1,2", "--set", "seed=3"], ["--set seed: would be ignored, as seed is swept; take it out"]),
        (["strategy=ddp,single", "--strategy", "single"], ["would be ignored with --strategy"]),
        (["seed=1,2", "--set", "run.resume=outputs/x"], ["write --set run.resume=auto"]),
        (["seed=1,2", "--to", "slurm", "--dry-run"], ["--gpus is missing", "--dry-run: would be ignored with --to"]),
        (["seed=1,2", "--gpus", "8xH100"], ["--gpus: would be ignored without --to slurm"]),
        (["seed=1,2", "--to", "slurm", "--gpus", "8xH9000"], ["H9000"]),
        (["seed=1,y", "--to", "slurm", "--gpus", "2xcpu"], ["seed is 'y'"]),
    ],
    ids=lambda value: " ".join(value) if "=" in value[0] else "",
)
def test_all_mistakes_are_told_before_anything_starts(words, mistakes, started, tmp_path, capsys):
    assert sweep(tmp_path / "out", *words) == 2
    printed = capsys.readouterr().err
    assert all(mistake in printed for mistake in mistakes), printed
    assert "Traceback" not in printed and started.runs == [] and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_sweep_that_is_killed_while_it_trains_ends_with_the_curves_of_launch(tmp_path):
    common = ["--set", "run.max_steps=200"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def begin(*words: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "cookbook", *words, *common]
        return subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)

    def losses(folder: Path) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line}

    words = ["sweep", SUMS, "optim.learning_rate=1e-3,2e-3", "--set", f"run.output_dir={tmp_path / 'out'}"]
    second = tmp_path / "out-sweep" / name("2e-3")
    running = begin(*words)
    until = time.monotonic() + 120
    while time.monotonic() < until and running.poll() is None:
        with suppress(OSError):
            if (second / "metrics.jsonl").stat().st_size:
                break
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    printed, _ = running.communicate(timeout=60)
    assert running.returncode == 75, printed
    assert 0 < max(losses(second)) < 200 and status.read(second)["state"] == "stopped"
    first = (tmp_path / "out-sweep" / name("1e-3") / "metrics.jsonl").read_bytes()

    again = begin(*words)
    printed, _ = again.communicate(timeout=120)
    assert again.returncode == 0 and f"RUN 1 of 2: {second.with_name(name('1e-3'))} is finished" in printed
    assert second.with_name(name("1e-3")).joinpath("metrics.jsonl").read_bytes() == first
    assert "best " in printed and "at the end of" in printed

    alone = begin("launch", SUMS, "--set", name("2e-3"), "--set", f"run.output_dir={tmp_path / 'alone'}")
    alone.communicate(timeout=120)
    assert alone.returncode == 0
    assert losses(second) == losses(tmp_path / "alone") and len(losses(second)) == 200
