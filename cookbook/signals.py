"""What a signal does to a run: before there is anything to lose it ends at once, afterwards at the next step boundary.

`install` comes before anything slow is imported: a scheduler may signal within seconds of the start, and a process
without handlers dies on the spot.
"""

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import Any, TextIO, cast

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong; start it again."""
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PARENT_GONE = "parent gone"
REASONS = (None, *(number.name for number in HANDLED), PARENT_GONE)
"""What `requested` can say; processes agree by number."""

_parent: int | None = None
_received: str | None = None
_is_holding = False
_is_ending = False


def install() -> None:
    """Handles SIGTERM, SIGINT and SIGUSR1 from now on, and outlives who reads the output. On the main thread, and in
    the run's own processes only: those that it spawns import its program anew.
    """
    global _parent
    # A login shell may go, and nohup means that the run does not.
    is_launched = "WORLD_SIZE" in os.environ or any(name.startswith("ACCELERATE_") for name in os.environ)
    _parent = os.getppid() if is_launched else None
    for number in HANDLED:
        signal.signal(number, _handle)
    sys.stdout, sys.stderr = cast(TextIO, _Lasting(sys.stdout)), cast(TextIO, _Lasting(sys.stderr))


class _Lasting:
    """A stream whose reader may go, and whose disk may be full: Ctrl-C in `make train | tee log` ends tee too, a closed
    terminal answers EIO, and the run still has to save.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def hold() -> None:
    """From now on a signal is kept for `requested`.

    Raises:
        SystemExit: there was one before, and some library swallowed what the handler raised.
    """
    global _is_holding
    _is_holding = True
    if _received is not None:
        raise SystemExit(EXIT_CODE)


def let_go(is_main: bool) -> None:
    """Everything is saved: from now on a signal ends this process again. The others of the main process only wait for
    it, where Python has no say, so they take the kernel's way.
    """
    global _is_holding
    _is_holding = False
    if not is_main:
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)


def requested() -> str | None:
    """Why this process should stop: the first signal's name, or that its launcher is gone; None to go on.

    `accelerate launch` does not hand its signals to a single process, and a killed torchrun leaves its workers behind:
    both would train on, unknown to whoever stopped them. Each process answers for itself; the run has to agree.
    """
    if _received is not None:
        return _received
    return PARENT_GONE if _parent is not None and os.getppid() != _parent else None


def _handle(number: int, frame: FrameType | None) -> None:
    global _received, _is_ending
    _received = _received or signal.Signals(number).name
    if _is_holding or _is_ending:  # a second signal must not break off what the first one began
        return
    _is_ending = True
    raise SystemExit(EXIT_CODE)  # not os._exit: finally-blocks run, worker processes and half-written files go
