"""A process that hangs ends its run in time, in whatever phase, and is named.

python -m pytest -q tests/test_hangs.py                          one phase of each kind
python -m pytest -q tests/test_hangs.py -m "slow or not slow"    all phases x ranks x sleeping or stopped
"""

import itertools
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from curves import ADAMW, Lab

from cookbook.system.watchdog import PHASES, folder_of

TIMEOUT_SECONDS = 15.0
"""More than any phase takes here while other runs start."""
LIMIT_SECONDS = 100.0
AT_ONCE = 8
SETTINGS = ADAMW | {
    "run.max_steps": "4",
    "run.save_every_steps": "2",
    "run.eval_every_steps": "2",
    "schedule.warmup_steps": "2",
    "run.hang_timeout_minutes": str(TIMEOUT_SECONDS / 60),
}


@dataclass(frozen=True)
class Case:
    point: str
    rank: int
    do: str
    """hang: the main thread sleeps. SIGSTOP: the whole process."""
    step: int = 0
    sign: str = ""
    """The last that it gives, where that is not the phase."""
    settings: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.do} at {self.point} {dict(self.settings) or ''}"

    @property
    def last_sign(self) -> str:
        return self.sign or self.point.removeprefix("phase.")


BACKGROUND = (("run.save_in_background", "true"),)
START = "preparing model folder and tokens"
TRAINING = [
    ("eval.batch", 0, "evaluation batch 1", ()),
    ("data.next", 2, "update of step 1", ()),
    ("step.forward", 3, "micro-batch 1 of 1 of step 3", ()),
    ("step.update", 3, "update of step 3", ()),
    ("save.in_file", 2, "of step 2", ()),
    ("save.in_file", 2, "of step", BACKGROUND),
]
CASES = [
    Case(f"phase.{phase}", rank, do)
    for phase in PHASES
    for rank in (0, 1)
    for do in ("hang", "SIGSTOP")
    if (phase, rank) != ("exporting", 1)  # which only the main process does
]
CASES += [
    Case("model.held", rank, do, sign=START, settings=(("seed", str(seed)),))  # each with a model of its own
    for seed, (rank, do) in enumerate(itertools.product((0, 1), ("hang", "SIGSTOP")))
]
CASES += [
    Case(point, rank, do, step, sign, settings)
    for point, step, sign, settings in TRAINING
    for rank in (0, 1)
    for do in ("hang", "SIGSTOP")
]
FEW = [
    Case("model.held", 0, "hang", sign=START, settings=(("seed", "0"),)),
    Case("phase.joining the process group", 1, "hang"),
    Case("phase.restoring", 0, "hang"),
    Case("phase.exporting", 0, "SIGSTOP"),
    Case("phase.leaving", 1, "hang"),
    Case("step.forward", 1, "SIGSTOP", 3, "micro-batch 1 of 1 of step 3"),
]


def run_all(lab: Lab, folder: Path, cases: list[Case]) -> list[subprocess.CompletedProcess]:
    starts = []
    for number, case in enumerate(cases):
        settings = SETTINGS | dict(case.settings) | {"run.output_dir": str(folder / str(number))}
        fault = {"rank": case.rank, "at": case.point, "step": case.step, "do": case.do}
        starts.append((settings, {"COOKBOOK_FAULTS": json.dumps([fault])}))
    return lab.start_all("ddp", starts, at_once=AT_ONCE, limit=LIMIT_SECONDS)


def mistakes(case: Case, done: subprocess.CompletedProcess, output: Path) -> list[str]:
    """Facts that are not as they should be."""
    wrong = [] if done.returncode not in (0, 2, 75) else [f"exit code {done.returncode}"]
    try:
        report = (output / "hang/report.txt").read_text()
        status = json.loads((output / "status.json").read_text())
    except OSError as error:
        return [*wrong, str(error), done.stdout[-2000:]]
    accused = report.splitlines()[1]
    # Steps take less time here than a sign is written in; a sleeping process still shows where it is.
    is_late = case.do == "SIGSTOP" and not case.point.startswith("phase.")
    if not accused.startswith(f"rank {case.rank} (process ") or not (is_late or case.last_sign in accused):
        wrong.append(accused)
    if report not in done.stdout:
        wrong.append("the report is not on stderr")
    if case.point.startswith("step.") and case.rank == 1:  # rank 0, which waits for it, has the log
        events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
        told = [(event["step"], event["reason"]) for event in events if event["event"] == "hang"]
        if told != [(case.step, accused.removesuffix("."))]:
            wrong.append(f"events.jsonl: {events}")
    if case.point == "phase.leaving":  # everything is done
        told = status["state"] == "finished"
    else:
        told = status["state"] == "failed" and status["exit_code"] == 1 and status["reason"].startswith("hang: rank ")
    return wrong if told else [*wrong, f"status.json: {status}"]


def check_all(lab: Lab, folder: Path, cases: list[Case]) -> None:
    ended = run_all(lab, folder, cases)
    wrong = {
        str(case): faults
        for number, (case, done) in enumerate(zip(cases, ended, strict=True))
        if (faults := mistakes(case, done, folder / str(number)))
    }
    assert wrong == {}, json.dumps(wrong, indent=1)


def test_a_hang_ends_the_run_and_the_report_names_its_rank_and_phase(lab: Lab, tmp_path: Path):
    check_all(lab, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("do", ["hang", pytest.param("SIGSTOP", marks=pytest.mark.thorough)])
def test_a_hang_in_any_phase_of_any_rank_ends_the_run_and_is_named(lab: Lab, tmp_path: Path, do: str):
    check_all(lab, tmp_path, [case for case in CASES if case.do == do and case not in FEW])


def test_a_healthy_run_leaves_nothing_of_its_watch(lab: Lab, tmp_path: Path):
    done = lab.start("ddp", SETTINGS | {"run.output_dir": str(tmp_path / "out")}, 2)
    assert done.returncode == 0, done.stdout[-3000:]
    assert not folder_of(tmp_path / "out").exists() and not (tmp_path / "out/hang").exists()


@pytest.mark.thorough
def test_an_earlier_run_keeps_its_record_when_the_next_start_hangs(lab: Lab, tmp_path: Path):
    """Nothing of the folder is this start's yet; but one that goes on with the run records why it did not."""
    output = tmp_path / "out"
    settings = SETTINGS | {"run.output_dir": str(output)}
    assert lab.start("ddp", settings, 2).returncode == 0
    fault = {"COOKBOOK_FAULTS": json.dumps([{"rank": 1, "at": "phase.loading the model", "do": "hang"}])}
    (again, on) = lab.start_all(
        "ddp", [(settings, fault), (settings | {"run.resume": "auto"}, fault)], at_once=1, limit=LIMIT_SECONDS
    )
    assert "rank 1 (process" in again.stdout and "rank 1 (process" in on.stdout
    earlier = json.loads((output / "status.json").read_text())
    assert earlier["state"] == "failed" and earlier["step"] == 4 and earlier["reason"].startswith("hang: rank 1")
    (left,) = folder_of(output).iterdir()  # the first start's went when the second one took the lock
    assert (left / "report.txt").exists() and (output / "hang/report.txt").exists()
