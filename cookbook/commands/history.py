"""What a run has written so far, read from its folder while it runs or afterwards."""

import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cookbook.system import status
from cookbook.system.files import RecipeError, flatten, read_document

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
SAMPLES = "samples.jsonl"


@dataclass(frozen=True, kw_only=True)
class History:
    """A run's files; what is missing is empty."""

    folder: Path
    lines: list[dict[str, Any]]
    """Of metrics.jsonl."""
    events: list[dict[str, Any]]
    """Of events.jsonl."""
    record: dict[str, Any]
    """run.json."""
    settings: dict[str, Any]
    """recipe.yaml by `section.key`."""
    state: str
    samples: list[dict[str, Any]]
    """Of samples.jsonl."""
    monitor: list[dict[str, Any]]
    """Of monitor.jsonl and those of other machines, in the order of time."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of steps whose loss is finite."""
        return [line for line in self.lines if line.get("loss") is not None]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("eval_loss") is not None]


def read_history(folder: Path) -> History:
    """The history of a run that has begun to train.

    Raises:
        RecipeError: no run is there, or none with a step.
    """
    path = folder / METRICS
    if not path.is_file():
        raise RecipeError([f"{path}: no such file; name the run.output_dir of a run, for example outputs/quickstart"])
    recipe = folder / "recipe.yaml"
    found = History(
        folder=folder,
        lines=parse_lines(path.read_bytes().splitlines()),
        events=parse_lines(_bytes_of(folder / EVENTS).splitlines()),
        record=read_json(folder / "run.json"),
        settings=flatten(read_document(recipe).values) if recipe.is_file() else {},
        state=state_of(folder)[0],
        samples=parse_lines(_bytes_of(folder / SAMPLES).splitlines()),
        monitor=_monitor(folder),
    )
    if not found.steps:
        raise RecipeError([f"{path}: no training step in it; the run ended before its first"])
    return found


def _monitor(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("monitor*.jsonl"))
    found = [line for file in files for line in parse_lines(file.read_bytes().splitlines(), "time")]
    return sorted(found, key=lambda line: line["time"])


def parse_lines(lines: Iterable[bytes], number: str = "step") -> list[dict[str, Any]]:
    """The objects of JSON lines; one that is not whole, as the last of a running run may be, is left out.

    Args:
        number: what every line must have.
    """
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get(number), int | float):
            found.append(value)
    return found


def state_of(folder: Path) -> tuple[str, bool]:
    """The state of a run, with its reason, and whether it has ended."""
    record = status.read(folder)
    if record is None:
        return "starting", False
    state, reason = record["state"], record.get("reason")
    is_here = record.get("host") == socket.gethostname() and record.get("pid") is not None
    if not status.has_ended(record):
        if is_here and not psutil.pid_exists(record["pid"]):
            return "killed", True
        return ("exporting" if state == "stopped" else state), False
    return (f"{state}: {reason.splitlines()[0]}" if reason else state), True


def _bytes_of(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        found = json.loads(_bytes_of(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
