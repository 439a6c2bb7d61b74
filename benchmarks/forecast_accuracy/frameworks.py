"""The plan beside what frameworks of 2026 published of their speed and memory: the rows of frameworks_published.csv.

Each is forecast as `cookbook plan` would, by a recipe with the model, the strategy and the sizes of the row: nothing is
taken from the other program.
"""

import csv
import json
import statistics
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.records import dump
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import find_strategy, load_strategy
from cookbook.forecast.memory import GIB
from cookbook.forecast.verdict import TraceCache, forecast, tokens_of_step
from cookbook.planning.offline import known_model
from cookbook.system.hardware import parse_machines

FACTS = Path(__file__).resolve().parent / "frameworks_published.csv"
RESULTS = Path(__file__).resolve().parent / "results" / "frameworks.json"
FAMILIES = {
    "unsloth/gpt-oss-20b-BF16": "mixture with attention sinks, gpt-oss-20b",
    "Qwen/Qwen3-30B-A3B-Base": "mixture, Qwen3-30B-A3B",
    "Qwen/Qwen3-4B-Instruct-2507": "dense, Qwen3-4B",
}
"""By names in recipes/offline_facts.json."""
PROGRAMS = {
    "TRL": "TRL's SFTTrainer on transformers 5 with FSDP2, grouped products, Flash Attention 4 and Liger's kernels",
    "Halo": "Halo, with Flash Attention 4, fused kernels and optimizer states of 16 bits; its experts are exchanged by"
    " DeepEP. Its dense model has weights in 16 bits, where `single` here casts those of 32 in each forward, and its"
    " kernels are fused, where the plan counts one for each operation of the model's code",
}


SINKS = (
    "gpt-oss: a kernel computes its attention there. Here none does, with its sinks, and the forecast is that of the"
    " scores that this project then holds, which grow with the square of a sample: from 16,384 tokens on the rows say"
    " how much that costs, and not how true the forecast is."
)


def compared(row: dict[str, str]) -> dict[str, Any]:
    """A row with its forecast: tokens per second of a GPU, and GiB allocated."""
    known = known_model(row["model"])
    assert known is not None
    config = AutoConfig.for_model(**known["config"])
    machines = parse_machines(row["machines"])
    strategy = load_strategy(find_strategy(row["strategy"]))
    if row["ep"] != "1":
        strategy = replace(strategy, ep_size=int(row["ep"]), dp_shard_size=machines.num_gpus // int(row["ep"]))
    samples = int(row["samples"])
    recipe = Recipe.model_validate(
        {
            "strategy": strategy.path,
            "mixed_precision": "bf16",
            "model": {"name_or_path": row["model"], "gradient_checkpointing": row["checkpointing"] == "true"},
            "data": {"train": "python-stdlib", "max_length": int(row["length"]), "packing": False},
            "batch": {"global_batch_size": samples * machines.num_gpus, "micro_batch_size": samples},
            "optim": {"learning_rate": 1e-5},
            "run": {"max_steps": 1, "output_dir": "out"},
        }
    )
    found = forecast(TraceCache(config, recipe), strategy, machines, limits=False)
    assert found.memory is not None and found.time is not None, found.why
    low, high = found.time.tokens_per_second(tokens_of_step(recipe), machines.num_gpus)
    speed = float(row["tokens_per_second"])
    memory = found.memory.allocated / GIB
    published = float(row["peak_gib"]) if row["peak_gib"] else None
    return {
        "id": row["id"],
        "program": row["program"],
        "family": FAMILIES[row["model"]],
        "setup": _words(row),
        "published": speed,
        "forecast": [float(f"{low:.3g}"), float(f"{high:.3g}")],
        "is_inside": low <= speed <= high,
        "speed_error": round((low * high) ** 0.5 / speed - 1, 3),
        "published_gib": published,
        "forecast_gib": round(memory, 1),
        "memory_error": None if published is None else round(memory / published - 1, 3),
        "verdict": found.verdict,
    }


def _words(row: dict[str, str]) -> str:
    ep = f", ep {row['ep']}" * (row["ep"] != "1")
    kept = "" if row["checkpointing"] == "true" else ", nothing recomputed"
    return f"{row['samples']} x {int(row['length']):,}, {row['strategy']}{ep} on {row['machines']}{kept}"


def section() -> list[str]:
    """Lines of docs/plan_accuracy.md."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = results["rows"]
    with FACTS.open(newline="") as file:
        urls = dict.fromkeys(row["url"] for row in csv.DictReader(file))
    return [
        "## Speed and memory of frameworks in 2026",
        "",
        f"{len(rows)} runs on B300 that were published in September and October 2026, mixtures and a dense model,"
        " forecast as `cookbook plan` forecasts a recipe of the same sizes. Nothing was fitted to any of them,"
        " and no habit of the other program is counted.",
        "",
        *_summary(rows),
        "",
        *(f"- {name}: {what}." for name, what in PROGRAMS.items()),
        f"- {SINKS}",
        "",
        "| row | program | model | run | tokens/s a GPU | forecast | inside | GiB | forecast | error |",
        "|" + "---|" * 10,
        *map(_line, rows),
        "",
        f"Every run did run; the plan's verdicts are {_verdicts(rows)}. Tokens are a second's of each GPU, GiB are"
        " allocated ones. Sources: " + ", ".join(f"[{url.rsplit('/', 1)[-1]}]({url})" for url in urls) + ".",
        f"Written by `{results['command']}`.",
    ]


def _line(row: dict[str, Any]) -> str:
    low, high = row["forecast"]
    of_memory = ["-", "-", "-"]
    if row["published_gib"] is not None:
        of_memory = [f"{row['published_gib']:g}", f"{row['forecast_gib']:.1f}", f"{row['memory_error']:+.0%}"]
    cells = [row["id"], row["program"], row["family"].rpartition(", ")[2], row["setup"], f"{row['published']:,.0f}"]
    cells += [f"{low:,.0f} to {high:,.0f}", "yes" if row["is_inside"] else "**no**", *of_memory]
    return "| " + " | ".join(cells) + " |"


def _summary(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| program and family | runs | speed inside | median error of its middle | worst | memory | median error"
        " | worst |",
        "|" + "---|" * 8,
    ]

    def key(row: dict[str, Any]) -> tuple[str, str]:
        return row["program"], row["family"]

    groups = [(", ".join(name), list(group)) for name, group in groupby(sorted(rows, key=key), key)]
    without = [row for row in rows if "gpt-oss" not in row["family"]]
    for name, group in [*groups, ("all without gpt-oss", without), ("all", rows)]:
        inside = sum(row["is_inside"] for row in group)
        cells = [name, str(len(group)), str(inside), *_errors(group, "speed_error")]
        known = [row for row in group if row["memory_error"] is not None]
        cells += [str(len(known)), *(_errors(known, "memory_error") if known else ("-", "-"))]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _errors(rows: list[dict[str, Any]], name: str) -> tuple[str, str]:
    errors = [row[name] for row in rows]
    return f"{statistics.median(errors):+.0%}", f"{max(errors, key=abs):+.0%}"


def _verdicts(rows: list[dict[str, Any]]) -> str:
    found: dict[str, int] = {}
    for row in rows:
        found[row["verdict"]] = found.get(row["verdict"], 0) + 1
    return ", ".join(f'"{name}" of {number}' for name, number in sorted(found.items()))


def main(*, only_page: bool) -> None:
    """Writes the results, unless only the page is asked for, then the page."""
    from benchmarks.forecast_accuracy import published  # which asks for the section

    if not only_page:
        with FACTS.open(newline="") as file:
            rows = [compared(row) for row in csv.DictReader(file)]
        command = "python benchmarks/forecast_accuracy/run.py frameworks"
        RESULTS.write_text(dump({"command": command, "rows": rows}) + "\n", encoding="utf-8")
    published.main(only_page=True)
