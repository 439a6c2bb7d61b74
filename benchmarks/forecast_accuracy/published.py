"""The plan's forecast of GPU memory beside what other programs published of their runs.

The rows: memory_rows.py; how they are run: memory_runs.py; those of which too little is said: unsaid_rows.py.
"""

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.forecast_accuracy.memory_rows import Row, Setup, is_out_of_memory, program_of, read_facts, setup_of
from benchmarks.forecast_accuracy.memory_runs import forecast
from benchmarks.forecast_accuracy.published_page import plot, render
from benchmarks.forecast_accuracy.unsaid_rows import UNSAID, place
from benchmarks.records import dump
from cookbook.forecast.memory import GIB, Memory

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results" / "published.json"
PAGE = ROOT / "docs" / "plan_accuracy.md"
PLOT = ROOT / "docs" / "plan_accuracy.svg"
UNITS = {"GiB": GIB, "GB (1e9)": 10**9, "GB (torchtitan log, GiB)": GIB, "MiB": 2**20}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A row with its forecast; GiB."""

    id: str
    source: str
    setup: str
    group: str
    kind: str
    published: float
    forecast: float
    low: float
    high: float
    """End of the band, if it is reserved memory."""
    error: float
    """Error of the forecast, relative to what was published."""
    error_without_habits: float
    moment: str
    states: float
    gathered: float
    activations: float
    """With the logits."""
    verdict: str
    """The plan's, of a run that did run; empty if its GPU's memory is not stated."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A row that ran out of memory, with its forecast; GiB."""

    id: str
    source: str
    setup: str
    gpu: float
    low: float
    high: float
    middle: float
    verdict: str
    verdict_without_habits: str


def compare(row: Row, setup: Setup) -> Compared:
    """The forecast beside what was published: of reserved memory, the middle of the forecast's band."""
    memory = forecast(setup)
    low, high = (size / GIB for size in memory.reserved)
    gib = {
        "allocated": memory.allocated / GIB,
        "reserved": (low + high) / 2,
        "weights": memory.parameters / GIB,
    }[setup.kind]
    if setup.kind != "reserved":
        low = high = gib
    published = float(row["reported_GiB_or_GB"]) * UNITS[row["unit"]] / GIB
    plain = error = gib / published - 1
    if has_habits(setup):
        plain = compare(row, replace(setup, without_habits=True)).error
    return Compared(
        id=row["id"],
        source=row["source"],
        setup=_words(setup),
        group=group_of(setup),
        kind=setup.kind,
        published=round(published, 2),
        forecast=round(gib, 2),
        low=round(low, 2),
        high=round(high, 2),
        error=round(error, 4),
        error_without_habits=round(plain, 4),
        moment=memory.moment,
        states=round((memory.parameters + memory.gradients + memory.optimizer) / GIB, 2),
        gathered=round(memory.gathered / GIB, 2),
        activations=round((memory.activations + memory.logits) / GIB, 2),
        verdict=verdict_of(memory, setup) if setup.gpu_gib and setup.kind != "weights" else "",
    )


def verdict_of(memory: Memory, setup: Setup) -> str:
    """As `cookbook plan` judges."""
    low, high = (size / GIB for size in memory.needed)
    return "does not fit" if low > setup.gpu_gib else "tight" if high > setup.gpu_gib else "fits"


def call(row: Row, setup: Setup) -> Failed:
    """The plan's verdict on a run that failed."""
    memory = forecast(setup)
    low, high = (size / GIB for size in memory.needed)
    verdict = verdict_of(memory, setup)
    return Failed(
        id=row["id"],
        source=row["source"],
        setup=_words(setup),
        gpu=setup.gpu_gib,
        low=round(low, 1),
        high=round(high, 1),
        middle=round((low + high) / 2, 1),
        verdict=verdict,
        verdict_without_habits=call(row, replace(setup, without_habits=True)).verdict if has_habits(setup) else verdict,
    )


def has_habits(setup: Setup) -> bool:
    """True if a forecast without its habits could be another."""
    return program_of(setup) != program_of(replace(setup, without_habits=True))


def group_of(setup: Setup) -> str:
    """Whose band a row is held against."""
    return "sharded" if setup.shards and setup.processes > 1 else "whole"


def _words(setup: Setup) -> str:
    parts = [setup.model, f"{setup.rows} x {setup.length:,}"]
    if setup.processes > 1:
        sharded = {"fsdp1": "FSDP1", "fsdp2": "FSDP2", "": "DDP"}[setup.shards]
        sharded = "FSDP1 that shards nothing" if setup.shards_nothing else sharded
        parts.append(f"{sharded} x {setup.processes}" + (", on CPU" if setup.on_cpu else ""))
    if setup.split_of_rows > 1:
        parts.append(f"TP {setup.split_of_rows}: a lower bound")
    if setup.adapter:
        parts.append("QLoRA" if setup.four_bits else "LoRA")
    if setup.checkpointing != "none":
        parts.append({"full": "recomputed", "every second product": "selective"}[setup.checkpointing])
    if setup.is_compiled:
        parts.append("compiled")
    if setup.loss == "in eight parts":
        parts.append("loss in parts")
    if not setup.reshards:
        parts.append("never resharded")
    if setup.first_step:
        parts.append("step 1")
    return ", ".join(parts)


def run() -> dict[str, Any]:
    """All rows."""
    begin = time.monotonic()
    compared, failed, unsaid, left_out = [], [], [], Counter[str]()
    for row in read_facts():
        setup = setup_of(row)
        if row["id"] in UNSAID:
            unsaid.append(asdict(place(row)))
        elif isinstance(setup, str):
            left_out[setup] += 1
        elif is_out_of_memory(row):
            failed.append(asdict(call(row, setup)))
        else:
            compared.append(asdict(compare(row, setup)))
            print(f"{row['id']}  {compared[-1]['error']:+.1%}  {compared[-1]['setup']}", flush=True)
    return {
        "command": "python benchmarks/forecast_accuracy/run.py published",
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "seconds": round(time.monotonic() - begin),
        "compared": compared,
        "failed": failed,
        "unsaid": unsaid,
        "left_out": dict(left_out.most_common()),
    }


def main(*, only_page: bool) -> None:
    """Writes the results, unless only the page is asked for, then the page and its plot."""
    if not only_page:
        RESULTS.write_text(dump(run()) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(render(results), encoding="utf-8")
    PLOT.write_text(plot(results), encoding="utf-8")
