"""Runs a launcher as a child: signals reach the training processes, and the exit code tells how the run ended.

accelerate and torchrun do neither. With one process accelerate dies of a signal and leaves the run behind; torchrun
kills its workers 30 s after one, saved or not, and dies of SIGUSR1 itself. And both end with 1, whatever a worker says.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from cookbook import signals, status

HANDLED = (*signals.HANDLED, signal.SIGHUP, signal.SIGQUIT)
LOOK_SECONDS = 5.0
"""How often the launcher's workers are looked up."""
PR_SET_PDEATHSIG = 1


def run_child(command: list[str], environment: dict[str, str], output_dir: Path) -> int:
    """Starts a launcher and waits for it and its workers. Returns the exit code: 0; 2 for what the user can fix; 75 if
    the run was stopped and goes on when started again; else the launcher's, 128 + n if it died of signal n.
    """
    before = status.read(output_dir)
    with tempfile.TemporaryDirectory(prefix="cookbook-") as folder:
        note = Path(folder) / "exit"
        child = _Child(command, environment | {status.EXIT_FILE: str(note)})
        code = child.wait()
        noted = note.read_text() if note.is_file() else ""
    after = status.read(output_dir)
    state = after["state"] if after is not None and after != before else None
    if state == "stopped" or (child.received and code and not noted and state in (None, "running")):
        return signals.EXIT_CODE
    if noted:
        return int(noted)
    return 128 - code if code < 0 else code


class _Child:
    """The launcher, in a session of its own: Ctrl-C comes to this process alone, which passes it on once."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.received: str | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._workers: dict[int, psutil.Process] = {}
        self._earlier: dict[signal.Signals, Any] = {}
        for number in HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
                self._earlier[number] = signal.signal(number, self._handle)
        self._launcher = subprocess.Popen(
            command, env=environment, start_new_session=True, preexec_fn=_die_with_parent()
        )
        if self.received:  # between the two lines above
            self._launcher.terminate()

    def wait(self) -> int:
        """Until the launcher has ended and no worker is left; the launcher's code, negative for a signal."""
        assert self._launcher is not None
        try:
            while True:
                try:
                    code = self._launcher.wait(LOOK_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    self._look()
            # Without their launcher they stop at the next step, and save.
            psutil.wait_procs(list(self._workers.values()))
            return code
        finally:
            for number, handler in self._earlier.items():
                signal.signal(number, handler)

    def _look(self) -> list[psutil.Process]:
        """The workers: children of the launcher that run Python; accelerate runs nvidia-smi before them."""
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
        """Passes a signal on to the workers, who agree on a step, save and end; before there are any, to the launcher.

        SIGQUIT (Ctrl-\\) ends them all on the spot.
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
            with contextlib.suppress(OSError):  # Ctrl-C has also ended the `tee` that read it
                said = f"{self.received}: the run will save and stop after this step; Ctrl-\\ ends it now"
                print(said, file=sys.stderr, flush=True)
        for receiver in receivers or [self._launcher]:
            try:
                receiver.send_signal(passed)
            except (psutil.Error, OSError):
                continue


def _die_with_parent() -> Callable[[], None]:
    """For a child that should not outlive this process, killed though it be: its launcher gets SIGTERM then."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return lambda: None
    parent = os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it went before it was asked
            os._exit(1)

    return ask
