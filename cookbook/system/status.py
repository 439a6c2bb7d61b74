"""`status.json` in the output folder: the state of the run, for schedulers and the next start.

Exit codes do not show whether to restart a run: torchrun always exits with 1 and srun with 143.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from cookbook.system import signals
from cookbook.system.console import say
from cookbook.system.files import RecipeError
from cookbook.system.masking import masked_values
from cookbook.system.record_files import METRICS, RUN, read_lines, replace_file
from cookbook.system.record_forms import State, read_form

FILE = "status.json"
EXPORTING = "export"
"""The reason while a run exports, with state "stopped": if it is killed then, only the export is left to do."""
MAX_FAILURES = 3
"""Consecutive failures after the same step, beyond which a start is refused."""
EXIT_FILE = "COOKBOOK_EXIT_FILE"
"""Environment variable with the file through which `note_exit` passes a code to `cookbook launch`."""
KILLED = ".killed"
"""Ending of a file beside `EXIT_FILE`, with the ranks that a signal has killed."""
STEP_FILE = "COOKBOOK_STEP_FILE"
"""Environment variable with the file to which `cookbook launch` writes the step after which a run stopped,
for scripts that start it again."""


def read(folder: Path) -> dict[str, Any] | None:
    """The record of the folder's last run; None if there is none or it cannot be read.

    Keys: `state` (running, stopped, finished, failed), `step`, `exit_code`, `reason`, `checkpoint`, `pid`, `host`,
    `started`, `launch`, `failed_after`, with run.price_per_gpu_hour `price`. A run that was killed still has "running";
    the folder's lock shows which it is.
    """
    return read_form(folder / FILE, State)[0] or None


def launch_id() -> str:
    """Identifies the launcher of this process, across restarts.

    Independent of the clock, which may be set between two starts: pid plus ticks from boot to the launcher's start.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":  # given by the user, the same on all machines
        return run_id
    parent, boot = os.getppid(), Path("/proc/sys/kernel/random/boot_id")
    try:
        ticks = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        return f"{boot.read_text(encoding='utf-8').strip()}:{parent}:{ticks}"
    except (OSError, IndexError):  # not Linux
        return f"{socket.gethostname()}:{parent}:{psutil.Process(parent).create_time()}"


def attempt_id() -> str:
    """Identifies one start: the same on all its processes, different after each restart.

    Several machines without a scheduler share nothing but their rendezvous address, so that is used there.
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
    return hashlib.sha256("/".join([*start, common_restarts()]).encode()).hexdigest()[:8]


def common_restarts() -> str:
    """Number of the launcher's restarts of the run, where all machines agree on it; else 0.

    Under `torchrun --nnodes 1:2` each counts by itself, but each group has a port of its own (torch 2.13,
    dynamic_rendezvous.py, next_rendezvous).
    """
    is_fixed = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "True") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_fixed else "0"


def is_restart(folder: Path) -> bool:
    """Return whether this process is a restart, by the same launcher, of the run in this folder.

    False after a start that died before it wrote its status: the folder may then hold another run.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    record = read(folder)
    return record is not None and record.get("launch") == launch_id()


def past_failures(folder: Path) -> list[int]:
    """The last completed step of each consecutive failed start; empty after progress.

    Call it under the folder's lock and before anything in it changes, so that "running" means a killed run.

    Raises:
        RecipeError: the last `MAX_FAILURES` starts failed after the same step; with a report.
    """
    record = read(folder)
    if record is None or record["state"] == "finished":
        return []
    failures = [step for step in record.get("failed_after") or [] if isinstance(step, int)]
    last = last_step(folder / METRICS)
    if failures and last > failures[-1]:
        failures = []
    if record["state"] == "stopped":
        return failures
    failures.append(last)
    latest = failures[-MAX_FAILURES:]
    if len(latest) == MAX_FAILURES and len(set(latest)) == 1:
        raise RecipeError(_report(folder, record, last))
    return failures


def last_step(metrics: Path) -> int:
    """The last training step in a metrics.jsonl, 0 without one; truncated lines are skipped."""
    return next((int(line["step"]) for line in reversed(read_lines(metrics)) if "loss" in line), 0)


def price_so_far(folder: Path, lines: Iterable[Mapping[str, Any]]) -> float | None:
    """The cost of all starts of a run with run.price_per_gpu_hour, as it last wrote it; None: it had no such key.

    Args:
        lines: of its metrics.jsonl, the last ones at least. A start that trained no step wrote only its status, and one
            that was killed wrote its last step after that.
    """
    written = [(read(folder) or {}).get("price"), *(line.get("price") for line in lines)]
    return max((price for price in written if price is not None), default=None)


def _report(folder: Path, record: dict[str, Any], step: int) -> str:
    reason = f"\n  Last error: {record['reason']}" if record.get("reason") else ""
    hang = folder / "hang" / "report.txt"
    stuck = f"\n  Hang report: {hang}" if hang.is_file() else ""
    return (
        f"{folder}: the run failed {MAX_FAILURES} times after step {step}; the next start would fail again.{reason}"
        f"\n  Metrics: {folder / 'metrics.jsonl'}. Errors: the output of those starts.{stuck}"
        f"\n  If it ran out of memory: lower batch.micro_batch_size, which keeps the curve, or data.max_length, which"
        f"\n  truncates more samples and changes it. If its loss was not finite: lower optim.learning_rate. If it"
        f"\n  ended without a message: the kernel's log (dmesg) shows whether memory ran out. The samples of a step"
        f"\n  depend on seed and data alone."
        f"\n  To try again anyway: rm {folder / FILE}"
    )


class Status:
    """Writes `status.json` on the main process; does nothing on the others."""

    def __init__(
        self,
        folder: Path,
        *,
        is_main: bool,
        step: int = 0,
        failed_after: list[int] | None = None,
        price: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """Marks the run as running.

        Args:
            step: steps completed by earlier starts.
            failed_after: the result of `past_failures`.
            price: the price so far, by its name; empty if it is not known.
        """
        self.folder, self.is_main, self.price = folder, is_main, price
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
        """Records progress; without a new checkpoint the last one stays named."""
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
        """Marks the run as "stopped" (start it again), "finished" or "failed"."""
        assert state in ("stopped", "finished", "failed"), state
        self.record |= {"state": state, "exit_code": exit_code, "reason": reason}
        self.running(self.record["step"] if step is None else step, checkpoint=checkpoint)

    def _write(self) -> None:
        if self.is_main:
            _replace(self.folder, self.record | self.price())


def _replace(folder: Path, record: dict[str, Any]) -> None:
    """Writes atomically; a failure is printed, so that a full disk neither ends a run nor hides why it ends."""
    reason = masked_values(record.get("reason"))  # perhaps a library's text
    try:
        replace_file(folder / FILE, json.dumps(record | {"reason": reason}, indent=2) + "\n", flush=True)
    except OSError as error:
        say(f"{folder / FILE} could not be written: {error}", file=sys.stderr)


def fail(folder: Path, error: BaseException, *, is_of_all: bool = False) -> None:
    """Records the error that ended a run, if this process has written its status.

    An error while a saved and stopped run shuts down is not a failure; one during its export is.

    Args:
        is_of_all: also if the main process wrote the status: it waits for this process and will be killed.
    """
    record = read(folder)
    if record is None:
        return
    if record.get("pid") == os.getpid():
        has_failed = not has_ended(record)
    else:
        has_failed = is_of_all and record["state"] == "running" and is_of_this_launch(record)
    if has_failed:
        _replace(folder, record | {"state": "failed", "exit_code": 1, "reason": f"{type(error).__name__}: {error}"})


def mark_stopped(folder: Path, reason: str) -> None:
    """Marks a failed start as stopped: the next one is not the same, so it is none of `past_failures`."""
    record = read(folder)
    if record is not None and record["state"] in ("failed", "running"):
        _replace(folder, record | {"state": "stopped", "reason": reason})


def has_ended(record: dict[str, Any]) -> bool:
    """Return whether a run has nothing left to do, not even its export; one that was killed still has "running"."""
    return record["state"] != "running" and (record["state"] != "stopped" or record.get("reason") != EXPORTING)


def hang(folder: Path, what: str, *, goes_on: bool) -> bool:
    """Records that a run hangs. Any process may call it, since the main one may be the one that hangs.

    Args:
        goes_on: whether this start resumes the run in the folder.

    Returns:
        Whether the folder is this run's; False if it still holds an earlier run that this start had yet to rename.
    """
    record = read(folder)
    if record is None:
        if (folder / RUN).exists():
            return False
        folder.mkdir(parents=True, exist_ok=True)
        record = {"step": 0, "checkpoint": None, "pid": None, "host": None, "started": None, "failed_after": []}
    elif is_of_this_launch(record):
        if record["state"] != "failed" and has_ended(record):  # the hang is in its shutdown
            return True
    elif not goes_on:
        return False
    _replace(folder, {"launch": launch_id()} | record | {"state": "failed", "exit_code": 1, "reason": what})
    return True


def is_of_this_launch(record: dict[str, Any]) -> bool:
    """Return whether a record was written by a process of this launch, on any machine."""
    if record.get("host") == socket.gethostname():
        return record.get("launch") == launch_id()
    return record.get("started", 0) >= psutil.Process().create_time()


def note_exit(code: int) -> int:
    """Passes this process's exit code to `cookbook launch`, if that started it; the first process wins.

    Returns:
        The code to exit with: 0 for a stop that `launch` has been informed of, since torchrun would print FAILED, and
        for a stop under --max_restarts, since torchrun would restart the run.
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


def note_killed(codes: Mapping[int, int]) -> None:
    """Passes the ranks that a signal has killed to `cookbook launch`; the launcher asks a run to stop by SIGTERM.

    Args:
        codes: exit codes by rank, negative for a signal.
    """
    killed = {rank: signal.Signals(-code).name for rank, code in codes.items() if code < 0 and -code != signal.SIGTERM}
    if killed and (path := os.environ.get(EXIT_FILE)):
        words = (f"rank {rank} was ended by {name}" for rank, name in killed.items())
        Path(f"{path}{KILLED}").write_text(", ".join(words), encoding="utf-8")


def add_killed(folder: Path, note: Path, before: dict[str, Any] | None) -> None:
    """Marks a run as failed for the ranks that were killed, if the launcher noted some and the run had begun.

    Args:
        note: the file that `EXIT_FILE` named.
        before: the record before the launcher was started.
    """
    path, record = Path(f"{note}{KILLED}"), read(folder)
    if not path.is_file() or record is None or record == before or record["state"] not in ("running", "failed"):
        return
    others = f"; {record['reason']}" if record.get("reason") else ""
    reason = path.read_text(encoding="utf-8") + others
    _replace(folder, record | {"state": "failed", "exit_code": 1, "reason": reason})


def has_noted_exit() -> bool:
    """Return whether a process of this launch has ended by itself, with a code above 0 noted by `note_exit`."""
    return Path(os.environ.get(EXIT_FILE) or os.devnull).is_file()
