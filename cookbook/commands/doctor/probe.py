"""Runs each check in a process of its own. A file system, driver or rank that never answers hangs that process alone:
it is killed with its children at its limit, and what it had found by then is kept.
"""

import contextlib
import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

from cookbook.system import signals

GRACE_SECONDS = 0.5
"""For a killed process to be gone. One that waits inside the kernel never is; nobody waits for it longer."""


@dataclass
class Probe:
    """A check under way."""

    name: str
    pid: int
    pipe: int
    seconds: float
    limit: float
    """On the clock of time.monotonic."""
    received: bytes = b""
    ended: Literal["", "by itself", "out of time"] = ""
    said: list[Any] = field(default_factory=list)
    """The values that the check has yielded."""
    trouble: str = ""
    """The way in which the check broke, if it did."""


def start(name: str, produce: Callable[[], Iterable[Any]], seconds: float) -> Probe:
    """Forks, and lets the child send what `produce` yields, as JSON. For a process without threads."""
    limit = time.monotonic() + seconds
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Probe(name=name, pid=pid, pipe=reader, seconds=seconds, limit=limit)
    try:
        os.close(reader)
        _stand_alone(parent)
        _send(produce, os.fdopen(writer, "w", encoding="utf-8"))
    finally:
        os._exit(0)  # nothing of the parent's, such as its temporary folder, is this process's to end


def _stand_alone(parent: int) -> None:
    """A session of its own, to be killed as a whole; quiet; and not alive without its parent."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signals.die_with_parent(parent)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)


def _send(produce: Callable[[], Iterable[Any]], pipe: TextIO) -> None:
    trouble = ""
    try:
        for item in produce():
            print(json.dumps({"said": item}), file=pipe, flush=True)
    except Exception as error:  # a check that breaks is a line of the report, not the end of it
        trouble = f"{type(error).__name__}: {error}"
    print(json.dumps({"trouble": trouble}), file=pipe, flush=True)


def finish(probes: list[Probe], until: float) -> None:
    """Waits for probes, at most until each one's limit and until `until`; then they are gone."""
    with selectors.DefaultSelector() as selector:
        for probe in probes:
            selector.register(probe.pipe, selectors.EVENT_READ, probe)
        while open_ones := [key.data for key in selector.get_map().values()]:
            left = min(min(probe.limit, until) for probe in open_ones) - time.monotonic()
            ready = [key.data for key, _ in selector.select(max(0, left))]
            for probe in ready:
                data = os.read(probe.pipe, 1 << 16)
                probe.received += data
                if not data:
                    probe.ended = "by itself"
                    selector.unregister(probe.pipe)
            for probe in open_ones:
                # One that had ended before anybody looked is ready, however late it is.
                if probe not in ready and time.monotonic() >= min(probe.limit, until):
                    probe.ended = "out of time"
                    selector.unregister(probe.pipe)
    for probe in probes:
        end(probe)


def end(probe: Probe) -> None:
    """Kills what is left of a probe, and reads what it said. A second call does nothing."""
    if probe.pipe < 0:
        return
    os.close(probe.pipe)
    probe.pipe = -1
    with contextlib.suppress(OSError):
        os.killpg(probe.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # not yet a session of its own
        os.kill(probe.pid, signal.SIGKILL)
    status = _reap(probe.pid)
    finished = False
    for line in probe.received.split(b"\n")[:-1]:
        message = json.loads(line)
        if "said" in message:
            probe.said.append(message["said"])
        else:
            finished, probe.trouble = True, message["trouble"]
    if not finished and probe.ended == "by itself":
        died = f"of {signal.Signals(os.WTERMSIG(status)).name}" if status and os.WIFSIGNALED(status) else "early"
        probe.trouble = f"its process died {died}"


def _reap(pid: int) -> int | None:
    for _ in range(round(GRACE_SECONDS / 0.01)):
        with contextlib.suppress(ChildProcessError):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                return status
        time.sleep(0.01)
    return None
