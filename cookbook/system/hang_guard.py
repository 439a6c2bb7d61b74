"""Ends a process in which no Python runs any more, which its own watchdog, a thread of Python, cannot.

Started as a program by the process itself (`HangGuard`). A kernel launch may keep the interpreter's lock while it waits
for room in the queue of a GPU whose collective hangs (PyTorch issue 109074): all ranks alike, and none has a thread
left that could tell.

    python -I -S hang_guard.py PROCESS SECONDS NAME     signs of life, a byte each, come from stdin
"""

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

SIGN, SIGN_ALONE = b".", b"a"
SIGN_SECONDS = 1.0
"""Between two signs; at most an eighth of the limit."""
DUMP = signal.SIGRTMAX - 1 if sys.platform == "linux" else 0
"""Makes the process print its stacks, from C: without the interpreter's lock. 0: there is no guard here."""
DUMP_SECONDS = 2.0


class HangGuard:
    """The process's side: a thread that gives signs as long as it gets the interpreter's lock."""

    def __init__(self, limit_seconds: float, name: str) -> None:
        """Args: limit_seconds: without a sign; name: of the process, in the message."""
        self._is_alone = True
        self._closed = threading.Event()
        self._seconds = min(SIGN_SECONDS, limit_seconds / 8)
        faulthandler.register(DUMP, all_threads=True)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(limit_seconds), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends the process, and with it the guard
        )
        self.pid = self._guard.pid
        self._thread = threading.Thread(target=self._give_signs, name="cookbook-signs", daemon=True)
        self._thread.start()

    def enter(self, *, is_alone: bool) -> None:
        """Alone a process may compute in C for as long as it likes: no other waits for it in a collective."""
        self._is_alone = is_alone
        self._give_sign()  # now: there may be no other

    def close(self) -> None:
        """Ends the guard."""
        self._closed.set()
        self._thread.join()
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        self._guard.kill()
        self._guard.wait()

    def _give_signs(self) -> None:
        while not self._closed.wait(self._seconds):
            self._give_sign()

    def _give_sign(self) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # the guard was killed; the watchdog is left
            os.write(self._guard.stdin.fileno(), SIGN_ALONE if self._is_alone else SIGN)


def main() -> None:
    """Waits for signs; a process that gives none for so long is made to print its stacks, and killed."""
    pid, limit, name = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    sign, silent, poll = SIGN_ALONE, 0.0, min(SIGN_SECONDS, limit / 8)
    before = time.monotonic()
    while os.getppid() == pid:
        if select.select([0], [], [], poll)[0]:
            sign, silent = os.read(0, 4096)[-1:], 0.0
            if not sign:
                return
        now = time.monotonic()
        # Time in which this program did not run either, and in which the process is stopped, does not count.
        silent += min(now - before, 2 * poll)
        before = now
        if silent < limit or sign == SIGN_ALONE:
            continue
        if is_stopped(pid):
            silent = 0.0
            continue
        say(
            f"HANG: {name} (process {pid}) has run no Python for {silent:.0f} s: a call into C keeps the interpreter's"
            " lock, a kernel launch behind a collective that hangs, say. Its stacks:"
        )
        os.kill(pid, DUMP)
        time.sleep(DUMP_SECONDS)
        if os.getppid() == pid:
            os.kill(pid, signal.SIGKILL)
        return


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger (proc(5), the third field of stat)."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt"


def say(text: str) -> None:
    """To stderr, which may be gone."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
