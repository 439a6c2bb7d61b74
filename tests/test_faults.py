"""Accidents in real runs: whatever happens, the run ends soon with its reason, and the next start gives the same curve.

pytest tests/test_faults.py                         one of each kind
pytest tests/test_faults.py -m "slow or not slow"   SIGKILL at every point of a save, every engine (make test-all)
make soak                                           random kills, random strategies
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from curves import ADAMW, ROOT, Curve, Lab, environment, run_to_end

import train
from cookbook.training.checkpoint import folder
from tests.needs import need_namespaces

STOPPED = 75
STEPS = {"run.max_steps": "6", "run.save_every_steps": "2", "schedule.warmup_steps": "2"}
SMALL = ADAMW | STEPS
EVERY_PROCESS = ["save.begin", "save.in_file", "save.after_file", "save.after_receipt"]
MAIN_PROCESS = ["save.before_manifest", "save.before_rename", "save.before_latest", "save.after_latest"]


def start(
    lab: Lab,
    output: Path,
    strategy: str,
    settings: dict[str, str],
    *,
    processes: int | None = 2,
    faults: list[dict] | None = None,
    restarts: int = 0,
    launched: bool = False,
) -> subprocess.CompletedProcess:
    """One start, in which the processes may be started again; `launched` by accelerate, else forked."""
    settings = {**settings, "run.output_dir": str(output)}
    extra = {"COOKBOOK_FAULTS": json.dumps(faults)} if faults else {}
    if not launched:
        return lab.start(strategy, settings, processes, limit=300, restarts=restarts, variables=extra)
    command = lab.command(strategy, settings, processes)
    if restarts:
        command[3:3] = ["--max_restarts", str(restarts), "--monitor_interval", "0.1"]
    done = run_to_end(command, timeout=300, **extra)
    done.stdout += done.stderr
    return done


def assert_same_run(output: Path, reference: Curve) -> None:
    """Assert equal numbers in every line and equal weights, to the last bit."""
    curve = Curve(output)
    for ours, theirs in zip(curve.lines, reference.lines, strict=True):
        waits = {"data_seconds", "eval_seconds", "save_seconds"}
        timings = waits | {"step_seconds", "tokens_per_second", "peak_memory_gib"}
        assert {k: v for k, v in ours.items() if k not in timings} == {
            k: v for k, v in theirs.items() if k not in timings
        }
    weights, expected = curve.weights, reference.weights
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not np.array_equal(weights[name], expected[name])] == []
    for path in folder.list_folders(output / "checkpoints"):
        folder.verify(folder.open_checkpoint(path))


def status(output: Path) -> dict:
    return json.loads((output / "status.json").read_text())


def kill_and_restart(
    lab: Lab, output: Path, strategy: str, point: str, rank: int | str, *, launched: bool = False
) -> None:
    """SIGKILL in the save after step 4; the launcher starts the run again, and it ends as if nothing had been."""
    fault = {"rank": rank, "at": point, "step": 4, "do": "SIGKILL"}
    done = start(lab, output, strategy, SMALL, faults=[fault], restarts=1, launched=launched)
    assert done.returncode == 0, done.stdout[-4000:]
    # From step 4 only where everything was written before the kill.
    assert "resuming from" in done.stdout
    reached = "step-00000004" in done.stdout.split("resuming from")[1].split("\n")[0]
    # After its receipt a process's part is there: whether the main one ends the save before it is killed is chance.
    if (point, rank) != ("save.after_receipt", 1):
        assert reached == (point in ("save.before_latest", "save.after_latest")), done.stdout[-3000:]
    assert not list((output / "checkpoints").glob(".saving-*"))
    assert_same_run(output, lab.run(strategy, SMALL, processes=2))


def test_a_killed_process_in_a_save_costs_nothing_but_time(lab: Lab, tmp_path: Path):
    kill_and_restart(lab, tmp_path / "out", "ddp", "save.after_file", "all", launched=True)


THOROUGH = [pytest.mark.slow, pytest.mark.thorough]
KILLS = [("ddp", point, rank) for point in EVERY_PROCESS for rank in (1, "all")]
KILLS += [("ddp", point, 0) for point in MAIN_PROCESS]
KILLS += [(strategy, "save.in_file", 1) for strategy in ("fsdp2", "zero3", "tp")]
FIRST = [("ddp", "save.after_receipt", "all"), ("ddp", "save.before_rename", 0), ("zero3", "save.in_file", 1)]


@pytest.mark.parametrize(
    ("strategy", "point", "rank"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case in FIRST else THOROUGH) for case in KILLS],
)
def test_a_kill_at_any_point_of_a_save_costs_nothing_but_time(
    lab: Lab, tmp_path: Path, strategy: str, point: str, rank: int | str
):
    kill_and_restart(lab, tmp_path / "out", strategy, point, rank)


def test_a_dead_process_ends_the_run_in_seconds(lab: Lab, tmp_path: Path):
    fault = {"rank": 1, "at": "step.forward", "step": 3, "do": "SIGKILL"}
    started = time.monotonic()
    done = start(lab, tmp_path / "out", "fsdp2", SMALL, faults=[fault], launched=True)
    assert done.returncode not in (0, 2, STOPPED)
    assert time.monotonic() - started < 60
    assert status(tmp_path / "out")["state"] == "failed"
    assert [path.name for path in folder.list_folders(tmp_path / "out/checkpoints")] == ["step-00000002"]


@pytest.mark.parametrize(
    ("strategy", "point"),
    [
        ("ddp", "step.forward"),
        pytest.param("zero3", "step.update", marks=pytest.mark.slow),
        pytest.param("fsdp2", "eval.batch", marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param("tp", "save.in_file", marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_a_signal_to_one_process_stops_all_with_a_checkpoint(lab: Lab, tmp_path: Path, strategy: str, point: str):
    output = tmp_path / "out"
    settings = SMALL | {"run.resume": "auto", "run.eval_every_steps": "2"}
    fault = {"rank": 1, "at": point, "step": 2, "do": "SIGTERM"}
    done = start(lab, output, strategy, settings, faults=[fault])
    assert done.returncode not in (0, 2), done.stdout[-3000:]
    state = status(output)
    assert (state["state"], state["exit_code"]) == ("stopped", STOPPED), done.stdout[-3000:]
    assert state["step"] in (2, 3)
    done = start(lab, output, strategy, settings)
    assert done.returncode == 0, done.stdout[-3000:]
    assert status(output)["state"] == "finished"
    assert_same_run(output, lab.run(strategy, settings, processes=2))


def test_a_single_process_gives_75_and_leaves_no_orphan(lab: Lab, tmp_path: Path):
    """`accelerate launch` of one process hands no signal on: the run sees that its launcher is gone."""
    output = tmp_path / "out"
    settings = {**SMALL, "run.max_steps": "100000", "run.output_dir": str(output)}
    command = lab.command("accelerate_configs/single.yaml", settings)
    with (tmp_path / "said").open("w") as said:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=said, stderr=said)
    wait_for(lambda: "step 2: saved" in (tmp_path / "said").read_text())
    pid = status(output)["pid"]
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(timeout=30)
    wait_for(lambda: not is_alive(pid))
    state = status(output)
    assert (state["state"], state["exit_code"], state["reason"]) == ("stopped", STOPPED, "parent gone")
    newest = folder.open_checkpoint(folder.list_folders(output / "checkpoints")[0])
    assert newest.step == state["step"]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path("/proc").is_dir() else True
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)


NAN_STRATEGIES = ["single", "ddp", "zero3"]
MORE_NAN_STRATEGIES = ["fsdp1", "zero2", "tp"]


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [(name, "'no'") for name in NAN_STRATEGIES]
    + [pytest.param("zero1", "bf16", marks=pytest.mark.slow), pytest.param("fsdp2", "'no'", marks=pytest.mark.slow)]
    + [pytest.param(name, "'no'", marks=THOROUGH) for name in MORE_NAN_STRATEGIES]
    + [pytest.param(name, "bf16", marks=THOROUGH) for name in ("zero2_offload", "zero3")],
)
def test_a_loss_that_is_not_finite_leaves_the_step_out_under_every_strategy(
    lab: Lab, tmp_path: Path, strategy: str, precision: str
):
    """One micro-batch of one process: all leave the step out, and go on from the weights before it."""
    output = tmp_path / "out"
    settings = SMALL | {"run.skip_nonfinite_steps": "1", "mixed_precision": precision}
    processes = None if strategy == "single" else 2
    fault = {"rank": 0 if strategy == "single" else 1, "at": "step.loss", "step": 3, "do": "nan"}
    done = start(lab, output, strategy, settings, faults=[fault], processes=processes)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "step 3 skipped" in done.stdout
    (named,) = output.glob("nonfinite-step-3-*.json")
    record = json.loads(named.read_text())
    assert record["samples"] and record["text"]
    healthy = SMALL if precision == "'no'" else SMALL | {"mixed_precision": precision}
    curve, reference = Curve(output), lab.run(strategy, healthy, processes=processes)
    assert [line["grad_norm"] is None for line in curve.steps] == [False, False, True, False, False, False]
    for i in range(2):
        assert curve.steps[i]["loss"] == reference.steps[i]["loss"]
    assert all(np.isfinite(tensor).all() for tensor in curve.weights.values())
    # Left out: step 4 begins where step 3 did, and not where the reference's ended.
    assert curve.steps[3]["loss"] != reference.steps[3]["loss"]
    assert abs(curve.steps[3]["loss"] - reference.steps[3]["loss"]) < 0.5


def test_one_more_than_allowed_ends_the_run_with_weights_untouched(lab: Lab, tmp_path: Path):
    output = tmp_path / "out"
    fault = {"rank": 1, "at": "step.loss", "step": 3, "do": "nan"}
    done = start(lab, output, "fsdp2", SMALL, faults=[fault])
    assert done.returncode not in (0, 2, STOPPED)
    assert "run.skip_nonfinite_steps is 0" in done.stdout
    assert list(output.glob("nonfinite-step-3-process-1-*.json"))
    assert not (output / "export").exists()


@pytest.mark.parametrize("strategy", ["zero2", pytest.param("zero3_nvme", marks=pytest.mark.slow)])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(lab: Lab, tmp_path: Path, strategy: str):
    output = tmp_path / "out"
    settings = SMALL | ({"model.from_scratch.vocab_size": "8192"} if strategy == "zero3_nvme" else {})  # 1 MiB and more
    fault = {"rank": 1, "at": "save.in_file", "step": 4, "do": "ENOSPC"}
    done = start(lab, output, strategy, settings, faults=[fault])
    assert done.returncode == 0, done.stdout[-3000:]
    assert "step 4 could not be saved: process 1: [Errno 28] No space left on device" in done.stdout
    assert [path.name for path in folder.list_folders(output / "checkpoints")] == ["step-00000006", "step-00000002"]
    assert_same_run(output, lab.run(strategy, settings, processes=2))


@pytest.mark.parametrize(
    ("strategy", "first", "last", "kept"), [("ddp", 3, 6, [2, 6]), ("single", 0, 4, [4, 6])], ids=["later", "at once"]
)
def test_a_disk_that_takes_nothing_for_a_while_costs_nothing_but_the_saves_of_that_time(
    lab: Lab, tmp_path: Path, strategy: str, first: int, last: int, kept: list[int]
):
    """No file at all grows, the log of its output included; every line of the metrics is there in the end."""
    output, processes = tmp_path / "out", 1 if strategy == "single" else 2
    program = ("tests/full_disk.py", str(first), str(last))
    done = lab.start(strategy, SMALL | {"run.output_dir": str(output)}, processes, program=program)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "metrics.jsonl is written again, with all pending lines" in done.stdout
    assert status(output)["state"] == "finished"
    assert sorted(checkpoint.step for checkpoint in folder.whole_checkpoints(output / "checkpoints")) == kept
    assert {"recipe.yaml", "run.json", "model", "export"} <= {path.name for path in output.iterdir()}
    assert_same_run(output, lab.run(strategy, SMALL, processes=processes))


def test_the_samples_of_a_gradient_that_is_not_finite_are_named(lab: Lab, tmp_path: Path):
    """Every loss is finite, so any sample of the step may be the one."""
    output = tmp_path / "out"
    settings = SMALL | {"run.skip_nonfinite_steps": "1", "run.output_dir": str(output)}
    done = lab.start("ddp", settings, 2, program=("tests/sabotage.py", "gradient_not_finite_in_step_3"))
    assert done.returncode == 0 and "step 3 skipped" in done.stdout, done.stdout[-3000:]
    records = [json.loads(path.read_text()) for path in output.glob("nonfinite-step-3-*.json")]
    assert {record["process"] for record in records} == {0, 1}
    assert {record["not_finite"] for record in records} == {"gradient"}
    named = [sample for record in records for sample in record["samples"]]
    assert len(set(named)) == len(named) == 16


def test_a_run_has_finished_when_its_export_was_opened_and_compared(lab: Lab, tmp_path: Path):
    settings = SMALL | {"run.output_dir": str(tmp_path / "out"), "run.check_export": "true"}
    done = lab.start("ddp", settings, 2)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "reopened in a fresh process" in done.stdout
    assert "equal" in json.loads((tmp_path / "out/export/export.json").read_text())["reopened"]["logits"]
    done = lab.start("ddp", settings, 2, program=("tests/sabotage.py", "export_not_what_was_trained"))
    assert done.returncode not in (0, 2, STOPPED)
    assert "is not what the checkpoint holds" in status(tmp_path / "out")["reason"]
    assert status(tmp_path / "out")["state"] == "failed" and not (tmp_path / "out/export").exists()


def test_a_last_step_that_cannot_be_saved_is_tried_again_and_then_reported(lab: Lab, tmp_path: Path):
    output = tmp_path / "out"
    fault = {"rank": 0, "at": "save.begin", "step": 6, "do": "EROFS"}
    done = lab.start(
        "ddp",
        SMALL | {"run.output_dir": str(output)},
        2,
        program=("tests/sabotage.py", "no_pause_before_the_last_save_is_tried_again"),
        variables={"COOKBOOK_FAULTS": json.dumps([fault])},
    )
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout[-3000:]
    assert done.stdout.count("step 6 could not be saved: ") == train.LAST_SAVE_TRIES == 3
    last = output / "checkpoints" / "step-00000004"
    line = next(line for line in done.stdout.splitlines() if line.startswith("stopped after step 6"))
    assert "NOT saved" in line and "Read-only file system" in line
    assert line.endswith(f"make room and start it with run.resume=auto, from step 4 in {last}")
    assert status(output)["state"] == "failed" and line.partition("NOT")[2] in status(output)["reason"]
    assert [path.name for path in folder.list_folders(output / "checkpoints")] == ["step-00000004", "step-00000002"]


@pytest.mark.parametrize("failing", range(4))
def test_room_that_is_made_in_time_saves_the_last_step(monkeypatch, failing: int):
    """The first `failing` saves fail."""
    saver = SimpleNamespace(failed="full" if failing else None, wait=lambda: None, beat=lambda: None)
    saves = [saver.failed]

    def save(*_, again: bool) -> None:
        saves.append("full" if len(saves) < failing else None)
        saver.failed = saves[-1]

    monkeypatch.setattr(train, "save", save)
    monkeypatch.setattr(train, "LAST_SAVE_PAUSE_SECONDS", 0)
    run = SimpleNamespace(engine=SimpleNamespace(collectives=SimpleNamespace(all_true=bool)))
    services = SimpleNamespace(saver=saver, log=SimpleNamespace(say=print))
    assert train.save_last(run, services) is (failing < train.LAST_SAVE_TRIES)
    assert len(saves) == min(failing + 1, train.LAST_SAVE_TRIES)


def test_a_signal_while_the_last_save_waits_has_it_tried_at_once_and_for_the_last_time(monkeypatch):
    saver = SimpleNamespace(failed="full", wait=lambda: None, beat=lambda: None)
    saves = []
    monkeypatch.setattr(train, "save", lambda *_, again: saves.append(again))
    monkeypatch.setattr(train, "stop_reason", lambda _: "SIGTERM")
    run = SimpleNamespace(engine=SimpleNamespace(collectives=SimpleNamespace(all_true=bool)))
    assert not train.save_last(run, SimpleNamespace(saver=saver, log=SimpleNamespace(say=print)))
    assert saves == [True]


@pytest.mark.slow
def test_a_clock_that_is_set_back_during_a_run_changes_nothing(lab: Lab):
    settings = {"run.save_every_steps": "3", "run.save_in_background": "true", "run.hang_timeout_minutes": "1"}
    run, plain = lab.run("ddp", settings, processes=2, sabotage="clock_set_back"), lab.run("ddp", settings, processes=2)
    times = [event["time"] for event in run.events]
    assert min(times[1:]) < times[0] - 3000, "the clock was not set back"
    assert run.losses == plain.losses and [line["step"] for line in run.steps] == [*range(1, 21)]
    assert [event["event"] for event in run.events] == [event["event"] for event in plain.events]
    assert json.loads((run.folder / "status.json").read_text())["state"] == "finished"


@pytest.mark.slow
def test_shared_memory_of_64_kib_is_enough(lab: Lab, tmp_path: Path):
    """A container has 64 MiB unless somebody asks for more."""
    need_namespaces()
    settings = {"run.max_steps": "3"}
    small = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$0" "$@"'
    command = lab.command("zero3", settings | {"run.output_dir": str(tmp_path / "run")}, 2)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", small, *command],
        cwd=ROOT,
        env=environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == lab.run("zero3", settings).losses


def test_the_same_step_failing_three_times_stops_with_a_report(lab: Lab, tmp_path: Path):
    output = tmp_path / "out"
    fault = {"rank": 0, "at": "step.forward", "step": 4, "do": "SIGKILL"}
    settings = SMALL | {"run.resume": "auto"}
    for _ in range(3):
        done = start(lab, output, "single", settings, faults=[fault], processes=None)
        assert done.returncode not in (0, 2)
    done = start(lab, output, "single", settings, faults=[fault], processes=None)
    assert done.returncode == 2, done.stdout[-2000:]
    assert "failed 3 times after step 3" in done.stdout
