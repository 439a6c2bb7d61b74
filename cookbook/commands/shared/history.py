"""Files that a run has written so far, read from its folder while it runs or afterwards."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cookbook.commands.shared.arguments import which_run
from cookbook.system import status
from cookbook.system.files import RecipeError, flatten, read_document
from cookbook.system.record_files import EVENTS, METRICS, RUN, SAMPLES, read_json, read_lines


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
    state: str
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
    history = History(
        folder=folder,
        lines=read_lines(path),
        events=read_lines(folder / EVENTS),
        record=read_json(folder / RUN),
        settings=flatten(read_document(recipe).values) if recipe.is_file() else {},
        state=state_of(folder)[0],
        samples=read_lines(folder / SAMPLES),
        monitor=sorted(
            (line for file in sorted(folder.glob("monitor*.jsonl")) for line in read_lines(file, "time")),
            key=lambda line: line["time"],
        ),
    )
    if not history.steps:
        raise RecipeError(f"{path}: no training step in it; the run ended before its first")
    return history


def read_ranks(folder: Path, key: str) -> list[dict[str, Any]]:
    """The records of the files rank_R.json that have this key, by rank."""
    records = [read_json(path) for path in folder.glob("rank_*.json")]
    return sorted((record for record in records if key in record), key=lambda record: record["rank"])


def state_of(folder: Path) -> tuple[str, bool]:
    """The state of a run, with its reason, and whether it has ended."""
    record = status.read(folder)
    if record is None:
        return "starting", False
    state, reason = record["state"], record.get("reason")
    is_here = record.get("host") == socket.gethostname() and record.get("pid") is not None
    if not status.has_ended(record):
        # A killed process writes no last state. The pid says nothing about a run of another machine.
        if is_here and not psutil.pid_exists(record["pid"]):
            return "killed", True
        return ("exporting" if state == "stopped" else state), False
    return (f"{state}: {reason.splitlines()[0]}" if reason else state), True
