"""Ends a run that hangs, and says who is at fault.

When one process stops, the others wait for it inside a collective and can say no more than that they wait. So each has
a thread that sees its main thread fall silent, and writes down where it stands:

    hang/beat_R.json     what rank R did last; a process that is stopped cannot write that any more
    hang/rank_R.json     after `timeout_seconds` of silence: stacks, and how many collectives it has entered
    hang/report.txt      what follows from them, also on stderr

A collective that some have entered and others have not names the others: all must enter in the same order.
"""

import contextlib
import json
import linecache
import os
import signal
import site
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

GRACE_SECONDS = 5.0
"""For the others' files, beyond the moment at which they are due; no longer than a quarter of the timeout."""
BEAT_FILE_SECONDS = 3.0
MAX_NAMED = 8
"""Ranks of one kind that the report shows one by one."""

Record = dict[str, Any]


class Watch:
    """Watches the main thread of one process of a run; every process has one."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        num_ranks: int,
        timeout_seconds: float,
        *,
        attempt: str = "",
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        """Starts at the first `beat`.

        Args:
            folder: the output folder, the same for all processes, which is there and no longer renamed.
            timeout_seconds: more than the longest time between two beats of a healthy run.
            attempt: the same on all processes, another at each start; files of other attempts are passed over.
        """
        self.folder, self.rank, self.num_ranks = folder / "hang", rank, num_ranks
        self.timeout_seconds, self.attempt, self._end = timeout_seconds, attempt, end
        self._poll_seconds = min(1.0, timeout_seconds / 10)
        self._grace_seconds = min(GRACE_SECONDS, timeout_seconds / 4)
        self._main = threading.main_thread().ident
        self._beat: tuple[str, int] | None = None
        self._closed = threading.Event()
        self._identity = {
            "rank": rank,
            "attempt": attempt,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_started": psutil.Process().create_time(),
        }
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in (f"rank_{rank}.json", f"beat_{rank}.json"):
                (self.folder / name).unlink(missing_ok=True)
            if rank == 0 and (self.folder / "report.txt").exists():
                os.replace(self.folder / "report.txt", self.folder / "earlier_report.txt")
        self._thread = threading.Thread(target=self._run, name="cookbook-watch", daemon=True)

    def beat(self, what: str, step: int) -> None:
        """The main thread begins `what` of `step`. Costs an assignment, but for the first one, which writes a file: a
        process that stops before its thread ever ran has given a sign.
        """
        self._beat = (what, step)
        if self._thread.ident is None:
            self._write_beat(self._beat)
            self._thread.start()

    def pause(self) -> None:
        """No watching until the next beat: what comes may take its time."""
        self._beat = None

    def close(self) -> None:
        """Ends the watching."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        seen, silent, written, written_at = None, 0.0, None, -BEAT_FILE_SECONDS
        before = time.monotonic()
        while not self._closed.wait(self._poll_seconds):
            now = time.monotonic()
            # Time in which this thread did not run either (Ctrl-Z, a sleeping laptop) is not the main thread's silence.
            silent += min(now - before, 2 * self._poll_seconds)
            before, beat = now, self._beat
            if beat is None or beat is not seen:
                seen, silent = beat, 0.0
            if beat is None:
                continue
            if beat is not written and now - written_at >= min(BEAT_FILE_SECONDS, self.timeout_seconds / 4):
                self._write_beat(beat)
                written, written_at = beat, now
            if silent >= self.timeout_seconds:
                self._give_up(beat, silent)
                before, silent = time.monotonic(), 0.0

    def _give_up(self, beat: tuple[str, int], silent: float) -> None:
        """Writes where this process stands, waits for those that still can, reports if that falls to this one, and ends
        it; or returns, if the main thread goes on meanwhile.
        """
        record = self._identity | {
            "doing": beat[0],
            "step": beat[1],
            "silent_seconds": round(silent, 1),
            "collectives": entered_collectives(),
            "waits_at": _own_line(sys._current_frames().get(self._main or 0)),
            "stacks": _stacks(self._main),
        }
        self._write(f"rank_{self.rank}.json", record)
        written = time.monotonic()
        while self._beat is beat and not self._closed.is_set():
            if time.monotonic() - written >= self._patience():
                break
            time.sleep(self._poll_seconds / 2)
        if self._beat is not beat or self._closed.is_set():  # slow, not stuck
            with contextlib.suppress(OSError):
                (self.folder / f"rank_{self.rank}.json").unlink()
            _say(f"rank {self.rank}: {beat[0]} of step {beat[1]} took more than {silent:.0f} s")
            return
        stuck, beats = self._read("rank"), self._read("beat")
        stuck.setdefault(self.rank, record)  # when the folder is gone
        try:
            if self.rank == min(stuck):
                text = report(stuck, beats, num_ranks=self.num_ranks, timeout_seconds=self.timeout_seconds)
                _say(f"\n{text}\nAll that is known: {self.folder}\n")
                self._write("report.txt", text + "\n")
            else:
                deadline = time.monotonic() + 2 * self._grace_seconds
                while time.monotonic() < deadline and not (self.folder / "report.txt").exists():
                    time.sleep(self._poll_seconds / 2)
        except Exception:  # a report that fails must not keep the run from ending
            _say(traceback.format_exc())
        self._end_silent(stuck, beats)
        self._end(1)

    def _patience(self) -> float:
        """Seconds after this process's file until the others' must be there, if they can write at all.

        A rank that came to the collective later falls silent later: it has the timeout from its last sign on. The ages
        are differences of file times, so clocks of several machines do not matter.
        """
        missing = self._read("beat").keys() - self._read("rank").keys()
        if not missing and len(self._read("rank")) == self.num_ranks:
            return 0.0
        due = [0.0]
        with contextlib.suppress(OSError):
            own = (self.folder / f"rank_{self.rank}.json").stat().st_mtime
            unwritten = min(BEAT_FILE_SECONDS, self.timeout_seconds / 4)  # beats after the one in the file
            for rank in missing:
                sign = (self.folder / f"beat_{rank}.json").stat().st_mtime
                due.append(sign - own + unwritten + self.timeout_seconds + 2 * self._poll_seconds)
        return max(due) + self._grace_seconds

    def _end_silent(self, stuck: dict[int, Record], beats: dict[int, Record]) -> None:
        """A stopped process ends by SIGKILL alone, and a launcher would first ask it in vain for half a minute."""
        for rank, beat in beats.items():
            if rank in stuck or beat["host"] != self._identity["host"]:
                continue
            with contextlib.suppress(psutil.Error, OSError):
                if psutil.Process(beat["pid"]).create_time() == beat["process_started"]:
                    os.kill(beat["pid"], signal.SIGKILL)

    def _write_beat(self, beat: tuple[str, int]) -> None:
        self._write(f"beat_{self.rank}.json", self._identity | {"doing": beat[0], "step": beat[1]})

    def _write(self, name: str, content: str | Record) -> None:
        with contextlib.suppress(OSError):  # what is wrong with the folder is not for this thread to tell
            build = self.folder / f".{name}.{self.rank}"
            build.write_text(content if isinstance(content, str) else json.dumps(content, indent=1), encoding="utf-8")
            os.replace(build, self.folder / name)

    def _read(self, kind: str) -> dict[int, Record]:
        """The files of this attempt, by rank."""
        found = {}
        for rank in range(self.num_ranks):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads((self.folder / f"{kind}_{rank}.json").read_text(encoding="utf-8"))
                if record["attempt"] == self.attempt:
                    found[rank] = record
        return found


def entered_collectives() -> dict[str, Record]:
    """Of each process group of this process and each of its backends, by both names: `ranks`, and `number`, `op` and
    `entered_ns` of the last collective that it entered. Empty where torch does not tell.

    With offload to the host one group has NCCL and gloo, and each counts for itself. From torch's flight recorder,
    whose names are private (torch 2.13). Of its entries the numbers hold; under gloo the states stay "scheduled".
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    entries = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(Exception):
            entries += json.loads(getattr(torch._C._distributed_c10d, name)())["entries"]
    members: dict[str, list[int]] = {}
    with contextlib.suppress(Exception):
        world = torch.distributed.distributed_c10d._world
        members = {world.pg_names[group]: sorted(ranks) for group, ranks in world.pg_group_ranks.items()}
    found: dict[str, Record] = {}
    for entry in entries:
        group, number, op = entry["process_group"][0], entry["collective_seq_id"], entry["profiling_name"]
        counted = f"{group} {op.partition(':')[0]}"
        if not entry.get("is_p2p") and number >= found.get(counted, {"number": 0})["number"]:
            at = entry["time_created_ns"]
            found[counted] = {"number": number, "op": op, "entered_ns": at, "ranks": members.get(group)}
    return found


@dataclass(frozen=True)
class Collective:
    """One that some of its ranks entered and others did not."""

    group: str
    """Its name, without the backend."""
    number: int
    op: str
    inside: list[int]
    missing: list[int]


def find_unequal(stuck: dict[int, Record], num_ranks: int) -> list[Collective]:
    """The collectives that not all have come to.

    A rank that wrote nothing may have come to any but those that another entered last of all, and waits in.
    """
    last = {rank: _last_group(record) for rank, record in stuck.items()}
    found = []
    for group in sorted({name for record in stuck.values() for name in record["collectives"]}):
        known = {rank: record["collectives"][group] for rank, record in stuck.items() if group in record["collectives"]}
        number = max(state["number"] for state in known.values())
        inside = [rank for rank, state in sorted(known.items()) if state["number"] == number]
        members = next((state["ranks"] for state in known.values() if state["ranks"]), range(num_ranks))
        missing = [rank for rank in members if rank in stuck and rank not in inside]
        if any(last[rank] == group for rank in inside):
            missing = sorted([*missing, *(rank for rank in members if rank not in stuck)])
        if number and missing:
            waiting = [rank for rank in inside if last[rank] == group] or inside
            found.append(Collective(group.split()[0], number, known[inside[0]]["op"], waiting, missing))
    return found


def _last_group(record: Record) -> str | None:
    groups = record["collectives"]
    return max(groups, key=lambda name: groups[name]["entered_ns"], default=None)


def report(stuck: dict[int, Record], beats: dict[int, Record], *, num_ranks: int, timeout_seconds: float) -> str:
    """What the files of a hang tell, for people.

    Args:
        stuck: records of the ranks that fell silent and could still write, by rank.
        beats: what each rank did last, by rank.
    """
    silent = {rank for rank in range(num_ranks) if rank not in stuck}
    unequal = find_unequal(stuck, num_ranks)
    missing = {rank for collective in unequal for rank in collective.missing}
    # A rank may be late for one group since it waits in another: then the fault lies with whom it waits for.
    waiting = {rank for collective in unequal for rank in collective.inside}
    guilty = sorted((missing - waiting) | silent) or sorted(missing)
    lines = [f"HANG: no progress for {timeout_seconds:g} s; the run ends."]
    for rank in guilty[:MAX_NAMED]:
        lines += _accuse(rank, stuck, beats, unequal)
    if len(guilty) > MAX_NAMED:
        lines.append(f"and {len(guilty) - MAX_NAMED} more: ranks {_ranks(guilty[MAX_NAMED:])}")
    if not guilty:
        lines.append("No rank stands out: all have entered the same collectives. Either the network between them has")
        lines.append("failed, or they wait for something else; their lines below tell.")
    places: dict[str, list[int]] = {}
    for rank in sorted(set(stuck) - set(guilty)):
        places.setdefault(stuck[rank]["waits_at"], []).append(rank)
    for place, ranks in places.items():
        lines.append(f"{_ranks(ranks, 'waits', 'wait')} at {place}")
    return "\n".join(lines)


def _accuse(rank: int, stuck: dict[int, Record], beats: dict[int, Record], unequal: list[Collective]) -> list[str]:
    record = stuck.get(rank) or beats.get(rank)
    who = f"rank {rank}" + (f" (process {record['pid']} on {record['host']})" if record else "")
    did = f"Its last sign: {record['doing']} of step {record['step']}." if record else "It never gave a sign."
    where = [
        f"{collective.op} number {collective.number}"
        + ("" if collective.group == "0" else f" of group {collective.group}")
        + f", in which {_ranks(collective.inside, 'waits', 'wait')}"
        for collective in unequal
        if rank in collective.missing
    ]
    lines = [f"{who} never entered {'; nor '.join(where)}. {did}" if where else f"{who} is silent. {did}"]
    if rank not in stuck:
        lines.append("  It wrote nothing: it is stopped or dead, or in C code that keeps Python's lock.")
    else:
        lines.append(f"  It is at {stuck[rank]['waits_at']}; its main thread:")
        lines += [f"    {line}" for line in stuck[rank]["stacks"].get("main", [])]
    return lines


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # whoever read it may be gone
        print(text, file=sys.stderr, flush=True)


def _ranks(ranks: list[int], one: str = "", many: str = "") -> str:
    text = f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} {many}"
    return text.rstrip()


def _stacks(main: int | None) -> dict[str, list[str]]:
    """The stack of every thread, the outermost call first; the main thread's as "main"."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = {}
    for ident, frame in sys._current_frames().items():
        name = "main" if ident == main else f"{names.get(ident, 'thread')} {ident}"
        lines = "".join(traceback.format_stack(frame)).splitlines()
        found[name] = [line.removeprefix("  ") for line in lines]
    return found


def _own_line(frame: FrameType | None) -> str:
    """The innermost line that is no library's."""
    libraries = (sysconfig.get_path("stdlib"), *site.getsitepackages(), sysconfig.get_path("purelib"), "<frozen")
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(libraries):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "an unknown line"
    name, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, number).strip()
    return f"{name}:{number} in {frame.f_code.co_name}" + (f": {text}" if text else "")
