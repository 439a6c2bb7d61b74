"""Signal handling: a run ends immediately while there is nothing to save, later at the next step boundary.

Call `install` before slow imports: a scheduler may signal within seconds of the start.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from _thread import start_new_thread
from collections.abc import Iterator
from types import FrameType
from typing import TextIO, cast

from cookbook.system.files import RecipeError
from cookbook.system.masking import MaskedStream

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: stopped, start it again."""
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
OF_SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of schedulers. Ctrl-C, which is none, ends a command by itself."""
PARENT_GONE = "parent gone"
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # found before a fork, after which dlopen may wait for a lock
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that a process gets when its parent ends."""
REASONS = (None, *(number.name for number in HANDLED), PARENT_GONE)
"""All results of `requested_stop`; processes exchange the index."""

AGAIN_SECONDS = 0.01
"""After which a signal comes again if Python dropped the exception that was to end the process."""


class SignalExit(SystemExit):
    """A signal ends this process."""


_parent: int | None = None
_received: str | None = None
_is_deferring = False
_is_ending = False
_num_raised = 0


def install() -> None:
    """Installs handlers for SIGTERM, SIGINT and SIGUSR1, and makes stdout and stderr survive a lost reader.

    On the main thread of the run's own processes only; spawned processes import the program again.
    """
    global _parent
    # Losing a login shell must not stop a run under nohup.
    is_launched = "WORLD_SIZE" in os.environ or any(name.startswith("ACCELERATE_") for name in os.environ)
    _parent = os.getppid() if is_launched else None
    for number in HANDLED:
        signal.signal(number, _handle)
    sys.unraisablehook = _end_again
    sys.stdout, sys.stderr = cast(TextIO, _LastingStream(sys.stdout)), cast(TextIO, _LastingStream(sys.stderr))


@contextlib.contextmanager
def end_command() -> Iterator[None]:
    """Have SIGTERM and SIGUSR1 end a command by `SignalExit`, so that what it began is removed or marked as stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, _handle) for number in OF_SCHEDULERS}
    hook, sys.unraisablehook = sys.unraisablehook, _end_again
    try:
        yield
    finally:
        if not _is_ending:  # else a second signal would interrupt the end
            sys.unraisablehook = hook
            for number, handler in earlier.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def no_exit() -> Iterator[None]:
    """Takes sys.exit in somebody else's code, as a plugin's, for the mistake that it is: with its exit code, often 0, a
    run that has done nothing would seem to have come to its end.

    Raises:
        RecipeError: with the line of the call. A signal still ends the process.
    """
    try:
        yield
    except SystemExit as end:
        if isinstance(end, SignalExit) or end.code == EXIT_CODE:
            raise
        *_, call = traceback.extract_tb(end.__traceback__)
        raise RecipeError(
            f"{call.filename}:{call.lineno}: calls sys.exit({end.code!r}), which would end the command as if it were"
            " done; raise an error in its place"
        ) from end


class OutOfTime(BaseException):
    """A call takes longer than it may. No Exception, which somebody's code would take for a failure of its own."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends the block in this thread, the main one, after a time.

    Raises:
        OutOfTime: the block took longer, also where it caught that, or could not be interrupted, and went on.
    """

    def end(*_: object) -> None:
        raise OutOfTime

    begun, failure = time.monotonic(), None
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except (Exception, OutOfTime) as error:
        failure = error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if time.monotonic() - begun >= seconds:
        raise OutOfTime from None
    if failure is not None:
        raise failure


class _LastingStream(MaskedStream):
    """A stream that ignores write errors: after Ctrl-C in `cookbook launch | tee log`, on a closed terminal or a full
    disk the run must still save.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def defer() -> None:
    """Defers signals from here on: they are reported by `requested_stop`.

    Raises:
        SystemExit: a signal came before and a library swallowed the handler's SystemExit.
    """
    global _is_deferring
    _is_deferring = True
    if _received is not None:
        raise SystemExit(EXIT_CODE)


def stop_deferring(is_main: bool) -> None:
    """Signals end this process again, after everything is saved. All ranks but the main one wait inside C code, where
    Python handlers do not run, so they use the kernel's default action.
    """
    global _is_deferring
    _is_deferring = False
    if not is_main:
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, even by SIGKILL; exit at once if it has ended
    before. Only Linux has this signal; elsewhere the parent is checked once.
    """
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def requested_stop() -> str | None:
    """Why this process should stop: the name of the first signal, or `PARENT_GONE`; None to continue. Not collective.

    `accelerate launch` does not forward signals to a single process, and a killed torchrun leaves its workers behind:
    both would train on unnoticed.
    """
    if _received is not None:
        return _received
    return PARENT_GONE if _parent is not None and os.getppid() != _parent else None


def _handle(number: int, frame: FrameType | None) -> None:
    global _received, _is_ending, _num_raised
    _received = _received or signal.Signals(number).name
    if _is_deferring or _is_ending:  # a second signal must not interrupt the shutdown
        return
    _is_ending = True
    _num_raised += 1
    raise SignalExit(EXIT_CODE)  # not os._exit: finally blocks must remove worker processes and partial files


def _end_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Send the signal again after an `SignalExit` that Python has dropped.

    Exceptions in a weak reference's callback, in a `__del__` or at the interpreter's end are printed, and Python
    continues. A process that a signal should end, as where another refused the recipe, would show a traceback and stay.
    """
    global _is_ending
    if not isinstance(dropped.exc_value, SignalExit):
        sys.__unraisablehook__(dropped)
        return
    with contextlib.suppress(RuntimeError):  # no thread starts at the interpreter's end, which is what is asked for
        start_new_thread(_send_again, (_num_raised,))
    _is_ending = False  # last: what a signal raised in here would be printed


def _send_again(num_raised: int) -> None:
    """Sends signals until one raises."""
    main = threading.main_thread().ident
    assert main is not None
    while num_raised == _num_raised:
        time.sleep(AGAIN_SECONDS)
        signal.pthread_kill(main, signal.SIGTERM)
