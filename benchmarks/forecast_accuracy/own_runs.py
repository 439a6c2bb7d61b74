"""Runs of this project that people submitted: the rows of own_runs.csv, by `cookbook plan --submit-row`."""

from pathlib import Path

from cookbook.commands.plan.submitted_row import RunRow, read_rows

FACTS = Path(__file__).resolve().parent / "own_runs.csv"
HOW = (
    "`cookbook plan --submit-row RUN` prints a row of a run on a GPU, without a path, a host or a name that somebody"
    " chose, for `benchmarks/forecast_accuracy/own_runs.csv`: what its run.json says was forecast when it began, and"
    " what it measured."
)


def section() -> list[str]:
    """Lines of docs/plan_accuracy.md."""
    with FACTS.open(newline="", encoding="utf-8") as file:
        rows = read_rows(file)
    return ["## Runs of this project", "", HOW, "", *(_table(rows) if rows else ["None was submitted yet."])]


def _table(rows: list[RunRow]) -> list[str]:
    return [
        "| row | run | on | allocated, GiB | forecast | error | a step, s | forecast | inside | versions |",
        "|" + "---|" * 10,
        *map(_line, rows),
    ]


def _line(row: RunRow) -> str:
    low, high = row.forecast_seconds_low, row.forecast_seconds_high
    of_time = ["-", "-"]
    if low is not None and high is not None:
        of_time = [f"{low:g} to {high:g}", "yes" if low <= row.seconds <= high else "**no**"]
    machines = f" in {row.machines} machines" * (row.machines > 1)
    memory = [f"{row.peak_gib:.2f}", f"{row.forecast_gib:.2f}", f"{row.forecast_gib / row.peak_gib - 1:+.1%}"]
    cells = [row.id, _words(row), f"{row.gpus}{machines}", *memory, f"{row.seconds:g}", *of_time, row.versions]
    return "| " + " | ".join(cells) + " |"


def _words(row: RunRow) -> str:
    settings = f"{row.global_batch} x {row.length:,}, micro-batch {row.micro_batch}, checkpointing {row.checkpointing}"
    kind = f"{row.objective}, {row.optimizer}, {row.precision}" + ", compiled" * row.is_compiled
    return f"{row.model}, {row.method}, {row.strategy}, {settings}, {kind}" + ", packed" * row.is_packed
