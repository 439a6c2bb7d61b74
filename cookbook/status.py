"""`status.json` in the output folder: how the run stands, or how it ended. Schedulers and the next start read it.

torchrun ends with 1 and srun with 143 whatever code a worker ended with, so a program that wants to know whether to
start the run again cannot tell by the exit code.
"""

import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from cookbook import signals
from cookbook.files import RecipeError

FILE = "status.json"
EXPORTING = "export"
"""The reason of a run that is "stopped" while it exports: only that is left to do, if it is killed."""
MAX_FAILURES = 3
"""In a row after the same step; a fourth start would fail there again."""
EXIT_FILE = "COOKBOOK_EXIT_FILE"
"""Names the file in which `note_exit` leaves a code for `python -m cookbook launch`."""


def read(folder: Path) -> dict[str, Any] | None:
    """What the folder's last run wrote: `state` (running, stopped, finished, failed), `step`, `exit_code`, `reason`,
    `checkpoint`, `pid`, `host`, `started`, `launch`, `failed_after`. None if there is nothing that can be read.

    "running" is also what a run says that died without a word: who holds the folder's lock knows which.
    """
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("state"), str) else None


def launch_id() -> str:
    """The same for what one launcher starts, and starts again, and for nothing else. No clock enters it, which may be
    set between two starts: a process is known by its number and the ticks from boot to its start.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":  # its user's, across machines
        return run_id
    parent, boot = os.getppid(), Path("/proc/sys/kernel/random/boot_id")
    try:
        ticks = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{boot.read_text().strip()}:{parent}:{ticks}"
    except (OSError, IndexError):  # not Linux
        return f"{socket.gethostname()}:{parent}:{psutil.Process(parent).create_time()}"


def attempt_id() -> str:
    """A name for the files of one start: the same on all its processes, another after each restart. Where nothing but
    their meeting point tells several machines' starts apart, that.
    """
    variables = os.environ
    if "SLURM_JOB_ID" in variables and "TORCHELASTIC_RUN_ID" not in variables:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        start = [variables.get(name, "0") for name in names]
    elif variables.get("LOCAL_WORLD_SIZE", "1") == variables.get("WORLD_SIZE", "1"):
        start = [launch_id()]
    else:
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        start = [variables.get(name, "") for name in names]
    text = "/".join([*start, variables.get("TORCHELASTIC_RESTART_COUNT", "0")])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def is_restart(folder: Path) -> bool:
    """Whether the launcher of this process has started the folder's run before, and so starts it again.

    A start that died before it came to write here does not count: what lies here may be another run.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    record = read(folder)
    return record is not None and record.get("launch") == launch_id()


def past_failures(folder: Path) -> list[int]:
    """The last completed step of each start that failed, as far as they lie in a row; empty after progress.

    To be called under the folder's lock, before anything in it changes: then an earlier "running" is a dead one.

    Raises:
        RecipeError: the last `MAX_FAILURES` are the same. A report.
    """
    record = read(folder)
    if record is None or record["state"] == "finished":
        return []
    failures = [step for step in record.get("failed_after") or [] if isinstance(step, int)]
    last = last_step(folder / "metrics.jsonl")
    if failures and last > failures[-1]:
        failures = []
    if record["state"] == "stopped":
        return failures
    failures.append(last)
    latest = failures[-MAX_FAILURES:]
    if len(latest) == MAX_FAILURES and len(set(latest)) == 1:
        raise RecipeError([_report(folder, record, last)])
    return failures


def last_step(metrics: Path) -> int:
    """The last training step in a metrics.jsonl, 0 without one; a line that was cut off is none."""
    step = 0
    try:
        lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return step
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and "loss" in record and isinstance(record.get("step"), int):
            step = record["step"]
    return step


def _report(folder: Path, record: dict[str, Any], step: int) -> str:
    reason = f"\n  The last one said: {record['reason']}" if record.get("reason") else ""
    hang = folder / "hang" / "report.txt"
    stuck = f"\n  Where it hung: {hang}" if hang.is_file() else ""
    return (
        f"{folder}: the run failed {MAX_FAILURES} times after step {step}, so what comes next will fail again.{reason}"
        f"\n  Its steps: {folder / 'metrics.jsonl'}. Its errors: the output of those starts.{stuck}"
        f"\n  If it ran out of memory: a smaller batch.micro_batch_size gives the same curve; a smaller data.max_length"
        f"\n  cuts longer samples, so another one. If its loss was not finite: a lower optim.learning_rate. If it ended"
        f"\n  without a word: the kernel's log (dmesg) tells whether memory ran out. The samples of a step"
        f"\n  depend on seed and data alone."
        f"\n  To try once more all the same: rm {folder / FILE}"
    )


class Status:
    """Keeps `status.json` up to date from the main process; silent on the others."""

    def __init__(self, folder: Path, *, is_main: bool, step: int = 0, failed_after: list[int] | None = None) -> None:
        """The run is running.

        Args:
            step: done by earlier starts.
            failed_after: of `past_failures`.
        """
        self.folder, self.is_main = folder, is_main
        self.record: dict[str, Any] = {
            "state": "running",
            "step": step,
            "exit_code": None,
            "reason": None,
            "checkpoint": None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.time(),
            "launch": launch_id(),
            "failed_after": failed_after or [],
        }
        self._write()

    def running(self, step: int, *, checkpoint: str | None = None) -> None:
        """So far; a checkpoint stays named until there is a newer one."""
        self.record |= {"step": step, "checkpoint": checkpoint or self.record["checkpoint"]}
        self._write()

    def end(
        self,
        state: str,
        *,
        exit_code: int,
        step: int | None = None,
        reason: str | None = None,
        checkpoint: str | None = None,
    ) -> None:
        """The run is "stopped" (to be started again), "finished" or "failed"."""
        assert state in ("stopped", "finished", "failed"), state
        self.record |= {"state": state, "exit_code": exit_code, "reason": reason}
        self.record |= {"step": self.record["step"] if step is None else step}
        self.record |= {"checkpoint": checkpoint or self.record["checkpoint"]}
        self._write()

    def _write(self) -> None:
        if self.is_main:
            _write(self.folder, self.record)


def _write(folder: Path, record: dict[str, Any]) -> None:
    """Whole or not at all. A full disk does not end a run for this, nor hides what ends it."""
    path = folder / FILE
    build = path.with_name(f".{FILE}.{os.getpid()}")
    try:
        with build.open("w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(build, path)
    except OSError as error:
        build.unlink(missing_ok=True)
        print(f"{path} could not be written: {error}", file=sys.stderr)


def fail(folder: Path, error: BaseException, *, is_of_all: bool = False) -> None:
    """Notes what ended a run, in the file that this process keeps; does nothing before there is one. A run that saved
    and stopped has not failed, whatever its end meets; one whose export fails has, and would fail again.

    Args:
        is_of_all: also in the file that another process of this run keeps, which waits for this one and is killed.
    """
    record = read(folder)
    if record is None:
        return
    if record.get("pid") != os.getpid():
        if is_of_all and record["state"] == "running" and is_of_this_launch(record):
            _write(folder, record | {"state": "failed", "exit_code": 1, "reason": f"{type(error).__name__}: {error}"})
        return
    if record["state"] == "running" or (record["state"] == "stopped" and record.get("reason") == EXPORTING):
        reason = f"{type(error).__name__}: {error}"
        _write(folder, record | {"state": "failed", "exit_code": 1, "reason": reason})


def hang(folder: Path, what: str, *, goes_on: bool) -> bool:
    """Notes that a run hangs, as any of its processes may, since the main one may be who hangs.

    Args:
        goes_on: this start was to go on with what lies there, so that the note is of the same run.

    Returns:
        Whether the folder is this run's. Else an earlier run lies there, which this start had not set aside yet.
    """
    record = read(folder)
    if record is None:
        if (folder / "run.json").exists():
            return False
        folder.mkdir(parents=True, exist_ok=True)
        record = {"step": 0, "checkpoint": None, "pid": None, "host": None, "started": None, "failed_after": []}
    elif is_of_this_launch(record):
        has_ended = record["state"] == "finished" or (
            record["state"] == "stopped" and record.get("reason") != EXPORTING
        )
        if has_ended:  # it hangs while it leaves
            return True
    elif not goes_on:
        return False
    _write(folder, {"launch": launch_id()} | record | {"state": "failed", "exit_code": 1, "reason": what})
    return True


def is_of_this_launch(record: dict[str, Any]) -> bool:
    """Whether what `read` gave was written by a process that this one's launcher started, on whatever machine."""
    if record.get("host") == socket.gethostname():
        return record.get("launch") == launch_id()
    return record.get("started", 0) >= psutil.Process().create_time()


def note_exit(code: int) -> int:
    """Leaves this process's exit code to `python -m cookbook launch`, if that started it; the first process to end has
    the word.

    Returns:
        What to exit with: 0 for a stop that `launch` knows of, since torchrun would print that the run FAILED, and for
        one under --max_restarts, since it would start the run again.
    """
    if code == signals.EXIT_CODE and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        return 0
    path = os.environ.get(EXIT_FILE)
    if not path or not code:
        return code
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(str(code))
    except FileExistsError:
        pass
    except OSError:
        return code
    return 0 if code == signals.EXIT_CODE else code
