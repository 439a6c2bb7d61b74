"""Files that a run has written so far, read from its folder while it runs or afterwards."""

import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cookbook.commands.shared.arguments import which_run
from cookbook.config.recipe import read_recipe
from cookbook.system import status
from cookbook.system.console import say
from cookbook.system.files import RecipeError, flatten
from cookbook.system.record_files import EVENTS, METRICS, RUN, SAMPLES
from cookbook.system.record_forms import Event, Form, Line, Measurement, Record, Sample, read_form, read_lines_of


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run, by its status.json and its process."""

    name: str
    """starting, running, exporting, killed, stopped, finished, failed or unknown."""
    reason: str | None = None
    has_ended: bool = True

    @property
    def words(self) -> str:
        return f"{self.name}: {self.reason.splitlines()[0]}" if self.reason else self.name


@dataclass(frozen=True, kw_only=True)
class History:
    """A run's files; what is missing is empty."""

    folder: Path
    lines: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    events: list[dict[str, Any]]
    """Lines of events.jsonl."""
    record: dict[str, Any]
    """run.json."""
    settings: dict[str, Any]
    """recipe.yaml by `section.key`."""
    state: RunState
    samples: list[dict[str, Any]]
    """Lines of samples.jsonl."""
    monitor: list[dict[str, Any]]
    """Lines of monitor.jsonl and those of other machines, in the order of time."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of steps whose loss is finite."""
        return [line for line in self.lines if line.get("loss") is not None]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("eval_loss") is not None]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The lines of what was sampled, a round each; none of a run that `rounds` did not start."""
        return [line for line in self.lines if line.get("round") is not None]


def read_history(folder: Path) -> History:
    """The history of a run that has begun to train.

    Raises:
        RecipeError: no run is there, or none with a step.
    """
    path = folder / METRICS
    if not path.is_file():
        raise RecipeError(f"{path}: no such file; {which_run(folder)}")
    recipe = folder / "recipe.yaml"
    record, note = read_form(folder / RUN, Record)
    notes = [note]

    def lines_of(file: Path, form: type[Form]) -> list[dict[str, Any]]:
        lines, note = read_lines_of(file, form)
        notes.append(note)
        return lines

    measured = [line for file in sorted(folder.glob("monitor*.jsonl")) for line in lines_of(file, Measurement)]
    history = History(
        folder=folder,
        lines=lines_of(path, Line),
        events=lines_of(folder / EVENTS, Event),
        record=record,
        settings=flatten(read_recipe(recipe).values) if recipe.is_file() else {},
        state=state_of(folder),
        samples=lines_of(folder / SAMPLES, Sample),
        monitor=sorted(measured, key=lambda line: line["time"]),
    )
    for note in filter(None, notes):
        say(note, file=sys.stderr)
    if not history.steps:
        raise RecipeError(f"{path}: {_why_no_steps(history, path)}")
    return history


def _why_no_steps(history: History, path: Path) -> str:
    """Why a run's metrics.jsonl has no step with a loss."""
    if read_lines_of(path, Line)[1]:
        return "its records are damaged, and no training step is left; put the file back as the run wrote it"
    if any("loss" in line for line in history.lines):
        return "the loss of no training step is finite; `cookbook next` says what to change"
    if not history.state.has_ended and (history.folder / status.FILE).is_file():
        return "no training step in it yet"
    return "no training step in it; the run ended before its first"


def read_ranks(folder: Path, form: type[Form]) -> list[dict[str, Any]]:
    """The records of the files rank_R.json of this form, by rank."""
    records = [read_form(path, form)[0] for path in folder.glob("rank_*.json")]
    return sorted(filter(None, records), key=lambda record: record["rank"])


def state_of(folder: Path) -> RunState:
    """The state of a run."""
    record = status.read(folder)
    if record is None:
        if (folder / status.FILE).exists():
            return RunState(name="unknown", reason=f"{status.FILE} is damaged")
        return RunState(name="starting", has_ended=False)
    state, reason = record["state"], record.get("reason")
    is_here = record.get("host") == socket.gethostname() and record.get("pid") is not None
    if not status.has_ended(record):
        # A killed process writes no last state. The pid says nothing about a run of another machine.
        if is_here and not psutil.pid_exists(record["pid"]):
            return RunState(name="killed")
        return RunState(name="exporting" if state == "stopped" else state, has_ended=False)
    return RunState(name=state, reason=reason or None)
