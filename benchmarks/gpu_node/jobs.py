"""Programs on this machine's GPUs, each on its own ones, of which none is left behind. For run.py."""

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import simulated_gpus
from cookbook.system.gpus import VARIABLE, InstalledGpu, read_driver, visible_gpus
from cookbook.system.record_files import EVENTS, METRICS, RUN, read_json, read_lines

ROOT = Path(__file__).resolve().parents[2]
MARK = "COOKBOOK_GPU_NODE"
"""The variable by which all processes of a program are found, also those whose parent has ended."""
KILL_SECONDS = 20.0
"""After which a process that was killed is given up: the driver holds it."""
POLL_SECONDS = 0.2


class Ended(SystemExit):
    """A signal ends this program: nothing more is started."""


@dataclass(frozen=True)
class Job:
    """A program that has ended."""

    code: int
    """0 also where it was ended because it had done enough."""
    said: str
    errors: str = ""
    """Text that it wrote to stderr, where that was kept apart."""
    folder: Path = Path()
    seconds: float = 0.0
    is_late: bool = False
    """True if its time was up."""
    num_steps: int | None = None
    """That it was to take; None: those of its recipe."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.folder / METRICS) if "loss" in line][: self.num_steps]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.steps]

    @property
    def record(self) -> dict[str, Any]:
        return read_json(self.folder / RUN)

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / EVENTS)

    @property
    def last_words(self) -> str:
        lines = [line.strip() for line in (self.said + self.errors).splitlines() if line.strip()]
        named = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|error: )")
        errors = [line for line in lines if named.match(line) and "ChildFailed" not in line]
        if self.code == 2:  # a refusal ends what the product says, before what torch's launcher adds
            errors = [line for line in lines if "torch/distributed/elastic" not in line]
        how = f"not within {self.seconds:.0f} s" if self.is_late else f"exit code {self.code}"
        return f"{how}: {(errors or lines or [''])[-1][-300:]}"

    @property
    def log(self) -> dict[str, str]:
        """For the figures of a failure."""
        return {"log": self.said[-6000:] + self.errors[-2000:]}


class Cards:
    """The GPUs of this machine, of which each job has its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = set(range(count))
        self._change, self._turn = threading.Condition(), threading.Lock()

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[list[int]]:
        with self._turn, self._change:  # in the order of asking: a job that needs all would wait for ever
            self._change.wait_for(lambda: len(self._free) >= count)
            mine = sorted(self._free)[:count]
            self._free -= set(mine)
        try:
            yield mine
        finally:
            with self._change:
                self._free |= set(mine)
                self._change.notify_all()


class Node:
    """This machine, and how programs are run on it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.simulated: int = arguments.simulate
        self.gpus: list[InstalledGpu] = [] if self.simulated else visible_gpus(read_driver().gpus)
        self.cards = Cards(self.simulated or len(self.gpus))
        self.machines: int = arguments.machines
        self._jobs: dict[str, tuple[threading.Lock, list[Job]]] = {}
        self._running: set[str] = set()
        self._numbers = itertools.count()
        # Reentrant: the handler of a signal, on a thread that may hold it, takes it.
        self._lock, self._is_ending = threading.RLock(), False
        folder.mkdir(parents=True, exist_ok=True)
        for met in folder.glob(f"met/*.{arguments.machine}"):  # of an earlier start
            met.unlink()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a program that is no `cookbook launch` needs to see the GPUs."""
        return simulated_gpus.environment(self.simulated) if self.simulated else {}

    def meet(self, name: str) -> None:
        """Waits for the other machines, `--limit` seconds at most: where a job failed on one alone, they are apart."""
        here = self.folder / "met"
        here.mkdir(exist_ok=True)
        (here / f"{name}.{self.arguments.machine}").touch()
        until = time.monotonic() + self.arguments.limit
        others = [here / f"{name}.{machine}" for machine in range(self.machines)]
        while not all(path.exists() for path in others) and time.monotonic() < until and not self._is_ending:
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Ends all programs; none is started any more."""
        with self._lock:
            self._is_ending = True
            marks = set(self._running)
        end_all(marks)

    def execute(
        self,
        words: list[str],
        name: str,
        *,
        cards: list[int] | None = None,
        environment: dict[str, str] | None = None,
        seconds: float | None = None,
        apart: bool = False,
        is_enough: Callable[[], bool] = bool,
        trouble: Callable[[subprocess.Popen[bytes], str], None] | None = None,
    ) -> Job:
        """A program of this Python, to its end, until `is_enough`, or for `seconds` (default: `--limit`).

        Args:
            name: of the files of what it says.
            cards: the GPUs that it sees; None: all.
            apart: what it writes to stderr is kept apart.
            trouble: what happens to it meanwhile, given its process and its mark.

        Raises:
            Ended: a signal has ended this program.
        """
        mark = mark_of(os.getpid(), next(self._numbers))
        variables = {"HF_HUB_OFFLINE": "1", "NCCL_DEBUG": "WARN", **os.environ, **(environment or {}), MARK: mark}
        if cards is not None and not self.simulated:
            variables[VARIABLE] = self._names(cards)
        log, started = self.folder / f"{name}.{self.arguments.machine}.log", time.monotonic()
        limit = started + (seconds or self.arguments.limit)
        with log.open("wb") as stream, log.with_suffix(".err").open("wb") as errors:
            with self._lock:
                if self._is_ending:
                    raise Ended
                self._running.add(mark)
                run = subprocess.Popen(
                    [sys.executable, *words],
                    cwd=ROOT,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=errors if apart else stream,
                    start_new_session=True,
                )
            has_enough = False
            try:
                if trouble is not None:
                    trouble(run, mark)
                while run.poll() is None and time.monotonic() < limit and not self._is_ending:
                    if has_enough := is_enough():
                        break
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        run.wait(POLL_SECONDS)
                is_late = run.poll() is None and not has_enough
            finally:
                end_all({mark})
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(KILL_SECONDS)
                self._running.discard(mark)
        if self._is_ending:
            raise Ended
        return Job(
            code=0 if has_enough else -signal.SIGKILL if run.returncode is None else run.returncode,
            said=log.read_text(errors="replace"),
            errors=log.with_suffix(".err").read_text(errors="replace"),
            seconds=round(time.monotonic() - started, 1),
            is_late=is_late,
        )

    def start(
        self,
        name: str,
        recipe: Path,
        strategy: str | Path,
        count: int,
        settings: dict[str, Any] | None = None,
        *,
        steps: int | None = None,
        alone: bool = False,
        trouble: Callable[[subprocess.Popen[bytes], str], None] | None = None,
    ) -> Job:
        """A run on GPUs of its own; the same one again, if it has one of this name.

        Args:
            count: processes, of all machines.
            steps: ends it after so many, before it saves and exports: 21 GB of an 8B's two layers.
            alone: on this machine, though there are several.
            trouble: see `execute`.
        """
        with self._lock:
            turn, ended = self._jobs.setdefault(name, (threading.Lock(), []))
        with turn:
            if not ended:
                ended.append(self._start(name, recipe, strategy, count, settings or {}, steps, alone, trouble))
        return ended[0]

    def _start(
        self,
        name: str,
        recipe: Path,
        strategy: str | Path,
        count: int,
        settings: dict[str, Any],
        steps: int | None,
        alone: bool,
        trouble: Callable[[subprocess.Popen[bytes], str], None] | None,
    ) -> Job:
        output = self.folder / name
        shutil.rmtree(output, ignore_errors=True)
        words = ["-m", "cookbook", "launch", str(recipe), "--strategy", str(strategy), "--processes", str(count)]
        given = {"run.output_dir": output, **({"run.max_steps": 10**6} if steps else {}), **settings}
        for key, value in given.items():
            words += ["--set", f"{key}={value}"]
        here, chosen = count, self.arguments
        if self.machines > 1 and not alone:
            here = count // self.machines
            self.meet(name)
            words += ["--machines", str(self.machines), "--machine", str(chosen.machine), "--first", chosen.first]
        words += ["--simulate-gpus", str(here)] if self.simulated else []

        def is_enough() -> bool:
            return steps is not None and num_steps(output) >= steps

        with self.cards.take(here) as mine:
            job = self.execute(words, name, cards=mine, is_enough=is_enough, trouble=trouble)
        return Job(job.code, job.said, folder=output, seconds=job.seconds, is_late=job.is_late, num_steps=steps)

    def _names(self, cards: list[int]) -> str:
        """CUDA_VISIBLE_DEVICES for some of the GPUs, in the words of who has set it."""
        given = os.environ.get(VARIABLE)
        names = [word.strip() for word in given.split(",")] if given else list(map(str, range(self.cards.count)))
        return ",".join(names[card] for card in cards)


def num_steps(output: Path) -> int:
    return sum("loss" in line for line in read_lines(output / METRICS))


def mark_of(pid: int, number: int) -> str:
    """The mark of a program that a run.py starts, with the namespace of its number: a host sees its containers' too."""
    return f"{pid}-{number}-{Path('/proc/self/ns/pid').stat().st_ino}"


def marked(marks: Iterable[str]) -> list[int]:
    """The processes of programs, without those that have ended."""
    wanted = {f"{MARK}={mark}" for mark in marks}
    return [pid for pid, variables in _environments() if wanted.intersection(variables)]


def left_behind() -> set[str]:
    """Marks of programs whose run.py was killed."""
    given = {word.partition("=")[2] for _, variables in _environments() for word in variables if word.startswith(MARK)}
    marks = set()
    for mark in given:
        with contextlib.suppress(ValueError):  # not one of ours
            pid, number = map(int, mark.split("-")[:2])
            if mark == mark_of(pid, number) and not Path("/proc", str(pid)).exists():
                marks.add(mark)
    return marks


def _environments() -> Iterator[tuple[int, list[str]]]:
    """All processes of this user, with the variables that they were started with: a zombie has none."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if folder.name.isdigit():
                yield int(folder.name), (folder / "environ").read_bytes().decode(errors="replace").split("\0")


def end_all(marks: Iterable[str]) -> None:
    """Ends programs with all that they started: a process that is left would keep its GPU."""
    marks, limit, num_clear = set(marks), time.monotonic() + KILL_SECONDS, 0
    while num_clear < 2 and time.monotonic() < limit:  # one that is just being started has no variables for a moment
        left = marked(marks)
        num_clear = 0 if left else num_clear + 1
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def write(path: Path, text: str) -> None:
    """Whole or not at all, also where another machine writes the same."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    part.write_text(text)
    part.replace(path)


def last_json(text: str) -> Any:
    """The last line that is an object.

    Raises:
        ValueError: there is none.
    """
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(lines[-1] if lines else "")
