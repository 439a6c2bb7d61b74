"""Runs a launcher as a child process: forwards signals to the training processes and returns the run's exit code.

accelerate and torchrun do neither. With one process accelerate dies of a signal and leaves the run behind; torchrun
kills its workers after 30 s, saved or not, and dies of SIGUSR1 itself. Both exit with 1 whatever a worker's code was.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from cookbook.system import signals, status

ACCELERATE_CLI = Path(__file__).with_name("accelerate_cli.py")
FORWARDED = (*signals.HANDLED, signal.SIGHUP, signal.SIGQUIT)
USERS_MISTAKE = 2
POLL_SECONDS = 5.0
"""Interval at which the launcher's workers are listed."""
_signal: str | None = None


def run_child(command: list[str], environment: dict[str, str], output_dir: Path) -> int:
    """Runs a launcher until it and its workers have ended. Returns the exit code: 0; 2 for a mistake of the user; 75 if
    the run was stopped and can be resumed; else the launcher's, 128 + n if it died of signal n.

    A run that has finished is 0, whatever processes a signal met while they left; `was_signalled` tells who would start
    another one.
    """
    global _signal
    before = status.read(output_dir)
    with tempfile.TemporaryDirectory(prefix="cookbook-") as folder:
        note = Path(folder) / "exit"
        child = _Child(command, environment | {status.EXIT_FILE: str(note)})
        code = child.wait()
        _signal = child.received
        noted = note.read_text() if note.is_file() else ""
        status.add_killed(output_dir, note, before)
    if noted == str(USERS_MISTAKE):  # refused, perhaps since another run has that folder, whose status it is
        return USERS_MISTAKE
    after = status.read(output_dir)
    state = after["state"] if after is not None and after != before else None
    if state == "stopped" and after is not None and (path := environment.get(status.STEP_FILE)):
        Path(path).write_text(f"{after['step']}\n", encoding="utf-8")
    if state == "finished" and child.received:
        return 0
    if state == "stopped" or (child.received and code and not noted and state in (None, "running")):
        return signals.EXIT_CODE
    if noted:
        return int(noted)
    return 128 - code if code < 0 else code


def was_signalled() -> bool:
    """Return whether a signal was passed on to the latest launcher, which may have come too late to stop its run."""
    return _signal is not None


class _Child:
    """The launcher, in its own session: Ctrl-C reaches only this process, which forwards it once."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.received: str | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._workers: dict[int, psutil.Process] = {}
        self._earlier: dict[signal.Signals, Any] = {}
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                self._earlier[number] = signal.signal(number, self._handle)
        self._launcher = subprocess.Popen(
            command, env=environment, start_new_session=True, preexec_fn=partial(_begin, os.getpid())
        )
        if self.received:  # a signal before the launcher was started
            self._launcher.terminate()

    def wait(self) -> int:
        """Waits for the launcher and its workers. Returns the launcher's code, negative for a signal."""
        assert self._launcher is not None
        try:
            while True:
                try:
                    code = self._launcher.wait(POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    self._look()
            # Workers without a launcher save and stop at the next step.
            psutil.wait_procs(list(self._workers.values()))
            return code
        finally:
            for number, handler in self._earlier.items():
                signal.signal(number, handler)

    def _look(self) -> list[psutil.Process]:
        """The workers: children of the launcher that run Python (accelerate also runs nvidia-smi)."""
        assert self._launcher is not None
        workers = []
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._launcher.pid).children():
                with contextlib.suppress(psutil.Error):
                    if child.exe() == psutil.Process().exe():
                        workers.append(child)
        self._workers |= {worker.pid: worker for worker in workers}
        return workers

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Forwards a signal to the workers, which agree on a step, save and exit; before they exist, to the launcher.

        SIGQUIT (Ctrl-\\) kills them all immediately.
        """
        if self._launcher is None:
            self.received = signal.Signals(number).name
            return
        receivers: list[psutil.Process | subprocess.Popen[bytes]] = [*self._look()]
        passed = signal.Signals(number) if receivers and number in signals.HANDLED else signal.SIGTERM
        if number == signal.SIGQUIT:
            passed, receivers = signal.SIGKILL, [self._launcher, *self._workers.values()]
        elif self.received is None:
            self.received = signal.Signals(number).name
            with contextlib.suppress(OSError):  # Ctrl-C also ends a `tee` that reads this
                notice = "the run will save and stop after this step, or the next; Ctrl-\\ ends it now"
                print(f"{self.received}: {notice}", file=sys.stderr, flush=True)
        for receiver in receivers or [self._launcher]:
            with contextlib.suppress(psutil.Error, OSError):
                receiver.send_signal(passed)
                if passed == signal.SIGUSR1:  # which a worker ignores until it has handlers, see _begin
                    receiver.send_signal(signal.SIGTERM)


def _begin(parent: int) -> None:
    """In the child, before it is the launcher."""
    # Slurm signals all processes of a step. torchrun would die of this one, and with it the store of the workers.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signals.die_with_parent(parent, signal.SIGTERM)
