"""Hang watchdog: ends a run that makes no progress, in any phase, and names the ranks at fault.

When one process stops, the others only know that they wait. So each process has a thread that notices when its main
thread makes no progress, and writes its state to a folder next to the output folder, `.NAME.hang/START`:

    beat_R.json     heartbeat: what rank R did last
    rank_R.json     after `timeout_seconds` without progress: stacks, entered collectives, the lock it waits for
    report.txt      the conclusion, also on stderr

Ranks missing from a collective that others have entered are at fault, since all must enter collectives in one order.
Without such a collective, the ranks that are behind in `PHASES` are. The folder is removed when a run ends well; after
a hang its files are copied to `hang` in the output folder. Where no thread of Python gets to run, `hang_guard` ends the
process.
"""

import contextlib
import faulthandler
import json
import linecache
import os
import shutil
import signal
import site
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from cookbook.system import faults, lock
from cookbook.system.console import say
from cookbook.system.hang_guard import DUMP, HangGuard
from cookbook.system.hang_report import PHASES, Record, hang_report, moment
from cookbook.system.masking import mask_secrets
from cookbook.system.record_files import read_json, replace_file

GRACE_SECONDS = 5.0
"""Extra time for other ranks to write their files; at most a quarter of the timeout."""
BEAT_FILE_SECONDS = 3.0
ACTIVITY_SECONDS = 15.0
"""Interval of activity measurements; at most a tenth of the timeout."""
BUSY_SHARE = 0.05
"""Share of a core; a process that only waits uses less."""
BUSY_BYTES = 1 << 16
"""Disk I/O per interval; this module's own files are smaller."""
GUARD_SECONDS = 1800.0


class Watch:
    """Watches the main thread of one process; every process of a run has one."""

    def __init__(
        self,
        output_dir: Path,
        rank: int,
        num_ranks: int,
        timeout_seconds: float,
        *,
        attempt: str = "",
        claim: Callable[[str], bool] = lambda what: True,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        """Starts watching.

        Args:
            output_dir: the same on all processes; the watch's folder is next to it, since a start may rename it.
            timeout_seconds: longer than any gap between two heartbeats of a healthy run.
            attempt: identifies this start, the same on all processes; names a folder.
            claim: called with a one-line summary before a hang ends the process; records it in the output folder and
                returns whether that folder is this run's. If not, the report stays next to it.
            end: ends the process.
        """
        self.output_dir, self.folder = output_dir, folder_of(output_dir) / attempt
        self.rank, self.num_ranks = rank, num_ranks
        self.timeout_seconds, self._claim, self._end = timeout_seconds, claim, end
        self.tell: Callable[[str, int], Any] = lambda what, step: None
        """Called with that summary and the step after the report, in the process that wrote it."""
        self._poll_seconds = min(1.0, timeout_seconds / 10)
        self._grace_seconds = min(GRACE_SECONDS, timeout_seconds / 4)
        self._main = threading.main_thread().ident
        self._phase, self._is_alone, self._began_ns = PHASES[0], True, time.time_ns()
        self._beat: tuple[str, int] = (PHASES[0], 0)
        self._closed = threading.Event()
        self._identity = {
            "rank": rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_started": psutil.Process().create_time(),
        }
        self._remove()  # files of an earlier start of the same name
        self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self._write_beat(self._beat)
        faulthandler.cancel_dump_traceback_later()  # see `guard`
        self._guard = HangGuard(timeout_seconds + 4 * self._grace_seconds, f"rank {rank}") if DUMP else None
        self._activity = _Activity(
            min(ACTIVITY_SECONDS, timeout_seconds / 10), self._guard.pid if self._guard else None
        )
        self._thread = threading.Thread(target=self._run, name="cookbook-watch", daemon=True)
        self._thread.start()

    def enter(self, phase: str, *, is_alone: bool = False) -> None:
        """The main thread begins a phase.

        Args:
            phase: one of `PHASES`.
            is_alone: this process waits for no other, so that CPU time and disk I/O count as progress; waiting in a
                collective may keep a core busy.
        """
        self._phase, self._is_alone, self._began_ns = phase, is_alone, time.time_ns()
        self.beat(phase, 0)
        if self._guard:
            self._guard.enter(is_alone=is_alone)
        self._write_beat(self._beat)  # immediately: the process may be stopped in this phase
        faults.at(f"phase.{phase}", 0)

    def beat(self, what: str, step: int) -> None:
        """Heartbeat: the main thread begins `what` of `step`. Costs one assignment."""
        self._beat = (what, step)

    def close(self) -> None:
        """Stops watching and removes this process's files."""
        self._closed.set()
        self._thread.join()
        if self._guard:
            self._guard.close()
        self._remove()
        with contextlib.suppress(OSError):
            for path in (self.folder, self.folder.parent, *self._made):  # succeeds on the last process only
                if path.exists():
                    path.rmdir()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            for name in (f"rank_{self.rank}.json", f"beat_{self.rank}.json"):
                (self.folder / name).unlink(missing_ok=True)

    def _signs(self) -> tuple[tuple[str, int], int]:
        """A value that changes with each progress of the main thread."""
        return self._beat, self._activity.count() if self._is_alone else 0

    def _run(self) -> None:
        seen, silent, written_at = None, 0.0, time.monotonic()
        before = time.monotonic()
        is_written = True
        while not self._closed.wait(self._poll_seconds):
            now = time.monotonic()
            # Time in which this thread did not run either (Ctrl-Z, a suspended laptop) does not count.
            silent += min(now - before, 2 * self._poll_seconds)
            before, signs = now, self._signs()
            if seen is None or signs[0] is not seen[0] or signs[1] != seen[1]:
                seen, silent, is_written = signs, 0.0, False
            if not is_written and now - written_at >= min(BEAT_FILE_SECONDS, self.timeout_seconds / 4):
                self._write_beat(signs[0])
                written_at, is_written = now, True
            if silent >= self.timeout_seconds:
                self._give_up(signs, silent)
                before, silent = time.monotonic(), 0.0

    def _give_up(self, signs: tuple[tuple[str, int], int], silent: float) -> None:
        """Writes the state of this process, waits for the files of the others, and ends it; the lowest rank that wrote
        one reports. Returns if the main thread makes progress meanwhile.
        """
        beat = signs[0]
        record = self._identity | {
            "doing": beat[0],
            "step": beat[1],
            "phase": PHASES.index(self._phase),
            "phase_began_ns": self._began_ns,
            "silent_seconds": round(silent, 1),
            "collectives": entered_collectives(),
            "waits_for": lock.owner_of_waited(),
            "waits_at": _own_line(sys._current_frames().get(self._main or 0)),
            "stacks": _stacks(self._main),
        }
        self._write(f"rank_{self.rank}.json", record)
        written = time.monotonic()
        while not (goes_on := self._closed.is_set() or self._signs() != signs):
            if time.monotonic() - written >= self._patience():
                break
            time.sleep(self._poll_seconds / 2)
        if goes_on:  # slow, not hanging
            with contextlib.suppress(OSError):
                (self.folder / f"rank_{self.rank}.json").unlink()
            _say(f"rank {self.rank}: {moment(record)} took more than {silent:.0f} s")
            return
        stuck, beats = self._read_all("rank"), self._read_all("beat")
        stuck.setdefault(self.rank, record)  # the folder may be gone
        try:
            if self.rank == min(stuck):
                self._report(stuck, beats)
            else:
                deadline, report = time.monotonic() + 2 * self._grace_seconds, self.folder / "report.txt"
                while time.monotonic() < deadline and self.folder.exists() and not report.exists():
                    time.sleep(self._poll_seconds / 2)
        except Exception:  # a failed report must not keep the run alive
            _say(traceback.format_exc())
        self._end_silent(stuck, beats)
        self._end(1)

    def _report(self, stuck: dict[int, Record], beats: dict[int, Record]) -> None:
        """Prints the report, and writes it to the output folder if that is this run's."""
        text = mask_secrets(hang_report(stuck, beats, num_ranks=self.num_ranks, timeout_seconds=self.timeout_seconds))
        _say(f"\n{text}\n")
        place, what = self.folder, text.splitlines()[1].removesuffix(".")
        is_ours = self._claim(f"hang: {what}")
        if is_ours:
            place = self.output_dir / "hang"
            with contextlib.suppress(OSError):
                place.mkdir(parents=True, exist_ok=True)
                for path in self.folder.glob("*.json"):
                    shutil.copyfile(path, place / path.name)
                (place / "report.txt").write_text(text + "\n", encoding="utf-8")
        _say(f"Details: {place}\n")
        self._write("report.txt", text + "\n")  # for which the other ranks wait
        if is_ours:
            self.tell(what, self._beat[1])

    def _patience(self) -> float:
        """Seconds, from this process's file on, within which all ranks that can still write have done so.

        A rank that entered the collective later reaches its timeout later. Ages are differences of file times on one
        file system, so the clocks of several machines do not matter.
        """
        missing = self._read_all("beat").keys() - self._read_all("rank").keys()
        if not missing and len(self._read_all("rank")) == self.num_ranks:
            return 0.0
        due = [0.0]
        with contextlib.suppress(OSError):
            own = (self.folder / f"rank_{self.rank}.json").stat().st_mtime
            unwritten = min(BEAT_FILE_SECONDS, self.timeout_seconds / 4)  # heartbeats are written with this delay
            for rank in missing:
                sign = (self.folder / f"beat_{rank}.json").stat().st_mtime
                due.append(sign - own + unwritten + self.timeout_seconds + 2 * self._poll_seconds)
        return max(due) + self._grace_seconds

    def _end_silent(self, stuck: dict[int, Record], beats: dict[int, Record]) -> None:
        """Kills silent ranks of this machine: only SIGKILL ends a stopped process, and launchers wait half a minute."""
        for rank, beat in beats.items():
            if rank in stuck or beat["host"] != self._identity["host"]:
                continue
            with contextlib.suppress(psutil.Error, OSError):
                if psutil.Process(beat["pid"]).create_time() == beat["process_started"]:
                    os.kill(beat["pid"], signal.SIGKILL)

    def _write_beat(self, beat: tuple[str, int]) -> None:
        phase = PHASES.index(self._phase)
        self._write(f"beat_{self.rank}.json", self._identity | {"doing": beat[0], "step": beat[1], "phase": phase})

    def _write(self, name: str, content: str | Record) -> None:
        with contextlib.suppress(OSError):  # the main thread reports a broken folder
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / name, content if isinstance(content, str) else json.dumps(content, indent=1))

    def _read_all(self, kind: str) -> dict[int, Record]:
        """The files of all ranks, by rank."""
        records = {rank: read_json(self.folder / f"{kind}_{rank}.json") for rank in range(self.num_ranks)}
        return {rank: record for rank, record in records.items() if record}


class _Activity:
    """Counts the intervals in which this process was active, although its main thread sent no heartbeat."""

    def __init__(self, interval_seconds: float, besides: int | None) -> None:
        """Args: besides: a child whose work is not the run's."""
        self.interval_seconds, self._besides = interval_seconds, besides
        self._count, self._looked_at = 0, time.monotonic()
        self._spent, self._moved = 0.0, 0
        self._sign: int | None = None

    def count(self) -> int:
        """The count so far. While the process waits for a lock, only signs of the lock's holder count."""
        now = time.monotonic()
        if now - self._looked_at < self.interval_seconds:
            return self._count
        sign = lock.sign_of_waited()
        spent, moved = _cpu_seconds(self._besides), _disk_bytes()
        is_busy = spent - self._spent > BUSY_SHARE * (now - self._looked_at) or moved - self._moved > BUSY_BYTES
        # No fixed time for a lock: any is too short for the tokens of a large set, and too long for a dead machine.
        gets_on = is_busy if sign is None else sign != self._sign
        self._looked_at, self._spent, self._moved, self._sign = now, spent, moved, sign
        if gets_on:
            self._count += 1
            lock.give_signs()
        return self._count


def _cpu_seconds(besides: int | None) -> float:
    """CPU time of this process and its children, such as compilers, besides one and the thread that asks."""
    spent = time.process_time() - time.thread_time()  # looking through all processes takes a busy machine long
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            if child.pid == besides:
                continue
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                spent += times.user + times.system
    return spent


def _disk_bytes() -> int:
    try:
        counters = psutil.Process().io_counters()
    except (psutil.Error, AttributeError, OSError):  # macOS has none
        return 0
    return counters.read_bytes + counters.write_bytes


def guard() -> None:
    """A timeout for this process where there is no `Watch`: before the recipe is read, and while the interpreter shuts
    down. Prints stacks to stderr and exits with 1.
    """
    faulthandler.dump_traceback_later(GUARD_SECONDS, exit=True)


def folder_of(output_dir: Path) -> Path:
    """The folder of all starts of a run, next to the output folder, which a start may rename."""
    path = Path(os.path.abspath(output_dir))
    return path.parent / f".{path.name}.hang"


def remove_other_starts(output_dir: Path, attempt: str) -> None:
    """Removes the files of other starts. Call it with the output folder's lock held, so that they are dead."""
    for path in folder_of(output_dir).glob("*"):
        if path.name != attempt:
            shutil.rmtree(path, ignore_errors=True)


def put_away_report(output_dir: Path) -> None:
    """Renames the report of an earlier start, which no longer applies."""
    path = output_dir / "hang" / "report.txt"
    if path.exists():
        os.replace(path, path.with_name("earlier_report.txt"))


def entered_collectives() -> dict[str, Record]:
    """The last collective that this process entered, by "process group backend": `ranks`, `number`, `op`, `entered_ns`.

    From torch's flight recorder, whose names are private; empty if it has none. With offload to the host a
    group has NCCL and gloo, which count separately. Under gloo the recorded states stay "scheduled", so only numbers
    are used.
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
    collectives: dict[str, Record] = {}
    for entry in entries:
        group, number, op = entry["process_group"][0], entry["collective_seq_id"], entry["profiling_name"]
        counted = f"{group} {op.partition(':')[0]}"
        if not entry.get("is_p2p") and number >= collectives.get(counted, {"number": 0})["number"]:
            at = entry["time_created_ns"]
            collectives[counted] = {"number": number, "op": op, "entered_ns": at, "ranks": members.get(group)}
    return collectives


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the reader may be gone
        say(text, file=sys.stderr, flush=True)


def _stacks(main: int | None) -> dict[str, list[str]]:
    """The stack of every thread, outermost call first, by name; the main thread is "main"."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {}
    for ident, frame in sys._current_frames().items():
        name = "main" if ident == main else f"{names.get(ident, 'thread')} {ident}"
        lines = "".join(traceback.format_stack(frame)).splitlines()
        stacks[name] = [line.removeprefix("  ") for line in lines]
    return stacks


def _own_line(frame: FrameType | None) -> str:
    """The innermost line outside libraries."""
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
