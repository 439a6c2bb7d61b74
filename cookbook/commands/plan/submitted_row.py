"""An anonymous row of a run for the page of the plan's accuracy: what was forecast beside what was measured."""

import csv
import hashlib
import io
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from cookbook.commands.report.summary import earlier_strategies
from cookbook.commands.shared.history import History, read_history
from cookbook.facts.offline import known_model
from cookbook.system.files import RecipeError, refuse
from cookbook.system.hardware import GIB
from cookbook.system.shipped import HOME

FIRST_STEPS = 2
"""Steps that allocate and compile, whose time is not counted."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run without a path, a host, a user or a name that somebody could have chosen."""

    id: str = ""
    """Digest of the rest."""
    model: str
    """A name that recipes/offline_facts.json has too, else the model type and its number of parameters."""
    method: str
    gpus: str
    machines: int
    strategy: str
    """A shipped one's name, else its kind."""
    precision: str
    objective: str
    optimizer: str
    length: int
    global_batch: int
    micro_batch: str
    """Samples, or tokens."""
    checkpointing: str
    is_compiled: bool
    is_packed: bool
    forecast_gib: float
    peak_gib: float
    """Memory that torch allocated at most in the process that needs most; the forecast is of the same."""
    forecast_seconds_low: float | None
    forecast_seconds_high: float | None
    seconds: float
    """The median step's."""
    versions: str


def in_csv(row: RunRow) -> str:
    """The header and the row."""
    file = io.StringIO()
    writer = csv.DictWriter(file, [field.name for field in fields(RunRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerow(asdict(row))
    return file.getvalue()


def read_rows(text: Iterable[str]) -> list[RunRow]:
    """The rows of such a file."""
    rows = []
    for row in csv.DictReader(text):
        values: dict[str, Any] = dict(row)
        values |= {name: int(row[name]) for name in ("machines", "length", "global_batch")}
        values |= {name: float(row[name]) for name in ("forecast_gib", "peak_gib", "seconds")}
        values |= {name: row[name] == "True" for name in ("is_compiled", "is_packed")}
        ends = ("forecast_seconds_low", "forecast_seconds_high")
        values |= {name: float(row[name]) if row[name] else None for name in ends}
        rows.append(RunRow(**values))
    return rows


def row_of(folder: Path) -> RunRow:
    """The row of a run in a folder.

    Raises:
        RecipeError: the run has no measured memory, no forecast, or nothing that another run could be compared with.
    """
    run = read_history(folder)
    record, settings = run.record, run.settings
    refuse([f"{folder}: {problem}" for problem in _problems(run)])
    steps = [line for line in run.steps if line.get("step_seconds") is not None]
    timed = steps[FIRST_STEPS:] or steps
    if not timed:
        raise RecipeError(f"{folder}: no step has its time; submit a run of three steps or more")
    hardware, strategy, forecast = record["hardware"], record["strategy"], record.get("step_forecast", {})
    adapter, rank = settings.get("adapter.name"), settings.get("adapter.rank")
    row = RunRow(
        model=_model(settings["model.name_or_path"], record.get("header", {}).get("model", "")),
        method="full" if adapter is None else f"{adapter} of rank {rank}",
        gpus=f"{strategy['processes']} x {hardware['gpu']}",
        machines=record.get("machines", 1),
        strategy=_strategy(strategy),
        precision=settings["mixed_precision"],
        objective=settings["objective.name"],
        optimizer=settings["optim.name"],
        length=settings["data.max_length"],
        global_batch=settings["batch.global_batch_size"],
        micro_batch=_micro_batch(settings),
        checkpointing=str(settings["model.gradient_checkpointing"]).lower(),
        is_compiled=settings["model.compile"],
        is_packed=record.get("packing", {}).get("is_on", False),
        forecast_gib=round(record["forecast"]["allocated"] / GIB, 2),
        peak_gib=round(max(line["peak_memory_gib"] for line in run.steps), 2),
        forecast_seconds_low=_round(forecast.get("low")),
        forecast_seconds_high=_round(forecast.get("high")),
        seconds=float(f"{median(line['step_seconds'] for line in timed):.4g}"),
        versions=", ".join(f"{name} {number}" for name, number in record["versions"].items() if number),
    )
    digest = hashlib.sha256(in_csv(row).encode()).hexdigest()
    return RunRow(**asdict(row) | {"id": f"r{digest[:8]}"})


def _problems(run: History) -> list[str]:
    record = run.record
    if not record or not run.settings:
        return ["run.json or recipe.yaml is missing, so that nothing says what was forecast; submit another run"]
    if record.get("plugins") or run.settings.get("plugins"):
        return ["it has plugins, whose names and memory are its own; submit a run without"]
    if record["hardware"].get("simulated"):
        return ["its GPUs were simulated, so that nothing was measured; submit a run on real ones"]
    if not record.get("forecast"):
        return ["its run.json has no forecast of memory, as on a CPU; submit a run on a GPU"]
    if not all(line.get("peak_memory_gib") for line in run.steps):
        return ["its metrics.jsonl has no peak_memory_gib; submit a run on a GPU"]
    if earlier_strategies(run) or record.get("out_of_memory"):
        return ["it changed its strategy or micro-batch, and a row is of one; submit a run that did not"]
    return []


def _model(name: str, header: str) -> str:
    if known_model(name) is not None:
        return name
    match = re.match(r"(\w+), ([\d,]+) parameters", header)
    return f"{match[1]}, {int(match[2].replace(',', '')) / 1e9:.3g} B" if match else "not known"


def _strategy(strategy: dict[str, Any]) -> str:
    path = Path(strategy["file"])
    return path.stem if (HOME / "accelerate_configs" / path.name).is_file() else strategy.get("kind") or "not known"


def _micro_batch(settings: dict[str, Any]) -> str:
    tokens = settings.get("batch.micro_batch_tokens")
    return str(settings["batch.micro_batch_size"]) if tokens is None else f"{tokens} tokens"


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.4g}")
