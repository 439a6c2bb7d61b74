"""What a signal does to a run: before there is anything to lose it ends at once, afterwards at the next step boundary.

`install` comes before anything slow is imported: a scheduler may signal within seconds of the start, and a process
without handlers dies on the spot.
"""

import os
import signal
from types import FrameType

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
    """Handles SIGTERM, SIGINT and SIGUSR1 from now on. On the main thread, and in the run's own processes only: those
    that it spawns import its program anew.
    """
    global _parent
    _parent = os.getppid()
    for number in HANDLED:
        signal.signal(number, _handle)


def hold() -> None:
    """From now on a signal is kept for `requested`.

    Raises:
        SystemExit: there was one before, and some library swallowed what the handler raised.
    """
    global _is_holding
    _is_holding = True
    if _received is not None:
        raise SystemExit(EXIT_CODE)


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
