"""The plan beside what frameworks of 2026 published of their speed and memory: the rows of frameworks_published.csv.

Each is forecast as `cookbook plan` would, by a recipe with the model, the strategy and the sizes of the row: nothing is
taken from the other program. A second time is of fused kernels, as `plan` has it, since all of these programs fuse
some. What the rows say of the speed's constants: frameworks_fit.py.
"""

import csv
import json
import statistics
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.forecast_accuracy.frameworks_fit import CARDS, record, report, work_of
from benchmarks.forecast_accuracy.models import config_of
from benchmarks.forecast_accuracy.unsaid_rows import EVERY_LINEAR
from benchmarks.records import dump
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import find_strategy, load_strategy
from cookbook.facts.offline import known_model
from cookbook.forecast.memory import GIB
from cookbook.forecast.step_time import IF_FUSED, kind_of, share_of_peak, tokens_if_fused
from cookbook.forecast.verdict import Forecast, TraceCache, forecast, tokens_of_step
from cookbook.system.hardware import Machines, parse_machines

FACTS = Path(__file__).resolve().parent / "frameworks_published.csv"
RESULTS = Path(__file__).resolve().parent / "results" / "frameworks.json"
FAMILIES = {
    "unsloth/gpt-oss-20b-BF16": ("mixture with attention sinks", "gpt-oss-20b"),
    "Qwen/Qwen3-30B-A3B-Base": ("mixture", "Qwen3-30B-A3B"),
    "Nemotron-3-Nano-30B-A3B": ("hybrid mixture", "Nemotron-3-Nano"),
}
"""By names in recipes/offline_facts.json or models.py, of those that are not dense."""
PROGRAMS = {
    "TRL": "TRL's SFTTrainer on transformers 5 with FSDP2, grouped products, Flash Attention 4 and Liger's kernels",
    "Halo": "Halo, with Flash Attention 4, fused kernels and optimizer states of 16 bits; its experts are exchanged by"
    " DeepEP. Its dense model has weights in 16 bits, where `single` here casts those of 32 in each forward",
    "prime-rl": "prime-rl's trainer for fine-tuning on made-up full rows, with compiled layers, Flash Attention 2, 3 or"
    " 4 and FSDP2, also on one GPU; the loss holds whole logits in float32. What it reserved is in the tables above"
    " (m601 to m609), and what ran out of memory (m610 to m614)",
    "AutoModel": "NeMo AutoModel on made-up full rows, with TransformerEngine's or Triton's kernels; its experts are"
    " exchanged by DeepEP, with forced equal loads. Its hybrid is forecast without expert parallel, which is not"
    " compared here",
    "Unsloth": "Unsloth with its own kernels, adapters on all linear layers and 8-bit AdamW, as surogate's authors"
    " measured it; recomputation, which their script does not name, is Unsloth's default, and tokens are counted as if"
    " all rows were full",
}
WRONG = {
    "f36": "its weights have 16 bits there, where `single` has 32",
    "a02": "transformers' own code for its state spaces keeps what a kernel does not",
}
"""Why the plan calls a run that ran "does not fit", for each that is not of gpt-oss."""
LEFT_OUT_ROWS = {
    "prime-rl's rows of reinforcement learning": "another loss, over rows of another kind",
    "AutoModel's DeepSeek V3, Kimi K2, and Megatron-Bridge's rows in 16 bits but gpt-oss": "stages with expert"
    " parallel, which this project does not have",
    "AutoModel's Llama 70B under context parallel": "on the page of [large runs](at_scale.md)",
    "AutoModel's gpt-oss-120b, and Megatron-Bridge's (11 rows, GB300 to H100)": "what they recompute is not stated, or"
    " not for these sizes",
    "AutoModel's Nemotron Super and Ultra": "they also predict later tokens, which this project does not",
    "surogate's own rows, and its fp8, fp4 and 4-bit ones": "what they recompute is not stated; no forecast of time for"
    " products in 8 or 4 bits",
}


SINKS = (
    "gpt-oss: a kernel computes its attention there. Here none does, with its sinks, and the forecast is that of the"
    " scores that this project then holds, which grow with the square of a sample: from 16,384 tokens on the rows say"
    " how much that costs, and not how true the forecast is."
)


def forecast_of(row: dict[str, str]) -> tuple[Forecast, Recipe, Machines]:
    """The forecast of a row as `cookbook plan` has it, and the recipe and the machines of it."""
    known = known_model(row["model"])
    config = config_of(row["model"]) if known is None else AutoConfig.for_model(**known["config"])
    machines = parse_machines(row["machines"])
    assert machines.gpu is not None
    strategy = load_strategy(find_strategy(row["strategy"]))
    if row["ep"] != "1":
        strategy = replace(strategy, ep_size=int(row["ep"]), dp_shard_size=machines.num_gpus // int(row["ep"]))
    groups = machines.num_gpus
    if row["degrees"]:
        kind, size = row["degrees"].split()
        written: dict[str, Any] = {f"{kind}_size": int(size)}
        groups //= int(size)
        strategy = replace(strategy, **written, dp_shard_size=groups)
    samples, micro_batches = int(row["samples"]), int(row["micro_batches"])
    adapter = {"name": "lora", "rank": int(row["rank"]), "targets": EVERY_LINEAR} if row["rank"] else None
    recipe = Recipe.model_validate(
        {
            "strategy": strategy.path,
            "mixed_precision": "bf16",
            "model": {
                "name_or_path": row["model"],
                "gradient_checkpointing": row["checkpointing"] == "true",
                "compile": row["compiled"] == "true",
            },
            "data": {"train": "python-stdlib", "max_length": int(row["length"]), "packing": False},
            "adapter": adapter,
            "batch": {"global_batch_size": samples * groups * micro_batches, "micro_batch_size": samples},
            "optim": {"learning_rate": 1e-5},
            "run": {"max_steps": 1, "output_dir": "out"},
        }
    )
    return forecast(TraceCache(config, recipe), strategy, machines, limits=False), recipe, machines


def compared(row: dict[str, str]) -> dict[str, Any]:
    """A row with its forecast: tokens per second of a GPU, and GiB allocated."""
    outcome, recipe, machines = forecast_of(row)
    assert outcome.memory is not None and outcome.time is not None and machines.gpu is not None, outcome.why
    tokens = tokens_of_step(recipe)
    low, high = outcome.time.tokens_per_second(tokens, machines.num_gpus)
    speed = float(row["tokens_per_second"])
    memory = outcome.memory.allocated / GIB
    published = float(row["peak_gib"]) if row["peak_gib"] else None
    family, model = FAMILIES.get(row["model"], ("dense", row["model"].partition("/")[2] or row["model"]))
    # Of a row that compiles it is the same.
    fused = outcome.time if recipe.model.compile else outcome.time_if_fused
    most = tokens_if_fused(outcome.time, fused, tokens, machines.num_gpus)[1]
    shares = share_of_peak(machines.gpu)
    return {
        "id": row["id"],
        "program": row["program"],
        "family": family,
        "model": model,
        "setup": _words(row),
        "published": speed,
        "forecast": [float(f"{low:.3g}"), float(f"{high:.3g}")],
        "most": float(f"{most:.3g}"),
        "is_inside": low <= speed <= high,
        "is_inside_fused": low <= speed <= most,
        "speed_error": round((low * high) ** 0.5 / speed - 1, 3),
        "fused_error": round((low * most) ** 0.5 / speed - 1, 3),
        "published_gib": published,
        "forecast_gib": round(memory, 1),
        "memory_error": None if published is None else round(memory / published - 1, 3),
        "verdict": outcome.verdict,
        "kind": kind_of(machines.gpu),
        "tokens": tokens / machines.num_gpus,
        "works": [record(work_of(time, shares)) for time in (outcome.time, fused) if time is not None],
    }


def _words(row: dict[str, str]) -> str:
    ep = f", ep {row['ep']}" * (row["ep"] != "1")
    degrees = f", {row['degrees']}" * bool(row["degrees"])
    adapter = f", LoRA of rank {row['rank']}" * bool(row["rank"])
    kept = "" if row["checkpointing"] == "true" else ", nothing recomputed"
    compiled = ", compiled" * (row["compiled"] == "true")
    sizes = f"{row['samples']} x {int(row['length']):,}, {row['strategy']}{ep}{degrees} on {row['machines']}"
    return sizes + adapter + kept + compiled


def section() -> list[str]:
    """Lines of docs/plan_accuracy.md."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = results["rows"]
    with FACTS.open(newline="") as file:
        facts = list(csv.DictReader(file))
    wrong = [row["id"] for row in rows if row["verdict"] == "does not fit" and not _has_sinks(row)]
    return [
        "## Speed and memory of frameworks in 2026",
        "",
        f"{len(rows)} runs that were published in 2026 by {len({row['source'].partition(',')[0] for row in facts})}"
        " projects, forecast as `cookbook plan` forecasts a recipe of the same sizes, and no habit of the other program"
        ' is counted. All of these programs fuse kernels. "Inside" is the forecast of the recipe as the row has it,'
        ' whose kernels are those of the model\'s code; "inside, if fused" takes the fast end of the same recipe with'
        " `model.compile: true`, where this project compiles it.",
        "",
        *_summary(rows),
        "",
        *(f"- {name}: {what}." for name, what in PROGRAMS.items()),
        f"- {SINKS}",
        "",
        *_fit(results["fit"]),
        "",
        "| row | program | model | run | tokens/s a GPU | forecast | if fused to | inside | GiB | forecast | error |",
        "|" + "---|" * 11,
        *map(_line, rows),
        "",
        f"Every run did run; the plan's verdicts are {_verdicts(rows)}. Wrong, but for gpt-oss: "
        + ("; ".join(f"{name} ({WRONG[name]})" for name in wrong) or "none")
        + ". Tokens are a second's of each GPU, GiB are allocated ones. Sources: "
        + ", ".join(f"[{url.rsplit('/', 1)[-1]}]({url})" for url in dict.fromkeys(row["url"] for row in facts))
        + ".",
        "",
        "| left out | why |",
        "|---|---|",
        *(f"| {what} | {why} |" for what, why in LEFT_OUT_ROWS.items()),
        "",
        f"Written by `{results['command']}`.",
    ]


def _has_sinks(row: dict[str, Any]) -> bool:
    return row["family"] == "mixture with attention sinks"


def _line(row: dict[str, Any]) -> str:
    low, high = row["forecast"]
    of_memory = ["-", "-", "-"]
    if row["published_gib"] is not None:
        of_memory = [f"{row['published_gib']:g}", f"{row['forecast_gib']:.1f}", f"{row['memory_error']:+.0%}"]
    inside = "yes" if row["is_inside"] else IF_FUSED if row["is_inside_fused"] else "**no**"
    cells = [row["id"], row["program"], row["model"], row["setup"], f"{row['published']:,.0f}"]
    cells += [f"{low:,.0f} to {high:,.0f}", f"{row['most']:,.0f}" if row["most"] > high else "-", inside, *of_memory]
    return "| " + " | ".join(cells) + " |"


def _summary(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| program and family | runs | inside | median error of the middle | worst | inside, if fused | median | worst"
        " | memory | median error | worst |",
        "|" + "---|" * 11,
    ]

    def key(row: dict[str, Any]) -> tuple[str, str]:
        return row["program"], row["family"]

    without = [row for row in rows if not _has_sinks(row)]
    groups = [(", ".join(name), list(group)) for name, group in groupby(sorted(rows, key=key), key)]
    kinds = [(f"{kind}, without gpt-oss", [row for row in without if row["kind"] == kind]) for kind in KINDS]
    for name, group in [*groups, *kinds, ("all without gpt-oss", without), ("all", rows)]:
        inside, fused = (sum(row[which] for row in group) for which in ("is_inside", "is_inside_fused"))
        cells = [name, str(len(group)), str(inside), *_errors(group, "speed_error")]
        cells += [str(fused), *_errors(group, "fused_error")]
        known = [row for row in group if row["memory_error"] is not None]
        cells += [str(len(known)), *(_errors(known, "memory_error") if known else ("-", "-"))]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


KINDS = ("ampere", "hopper", "blackwell", CARDS)


def _fit(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "A row's half is the last bit of the SHA-256 of its name. On one half the shares of the peak that products"
        " reach (`EFFICIENCY` in `cookbook/forecast/step_time.py`) were fitted, gpt-oss left out, to the least interval"
        " score for 80 % of the range to the fast end if fused: its width, and ten times what a row lies outside, of"
        " logarithms. A fit is taken if on the other half it makes the score better, and neither the number inside nor"
        " the median size of the error worse.",
        "",
        "| GPUs | rows fitted, held out | shares before | fitted | held out: inside | median size of error | worst"
        " | score | taken |",
        "|" + "---|" * 9,
    ]
    for row in results:
        now, then = row["now"], row["then"]
        shares = ["{:.2f} to {:.2f}".format(*row[which]) for which in ("before", "shares")]
        cells = [row["kind"], f"{row['fitted']}, {row['held_out']}", *shares, f"{now['inside']} -> {then['inside']}"]
        cells += [f"{now[which]:.0%} -> {then[which]:.0%}" for which in ("median", "worst")]
        cells += [f"{now['score']:.2f} -> {then['score']:.2f}", "yes" if row["is_taken"] else "no"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _errors(rows: list[dict[str, Any]], name: str) -> tuple[str, str]:
    errors = [row[name] for row in rows]
    return f"{statistics.median(errors):+.0%}", f"{max(errors, key=abs):+.0%}"


def _verdicts(rows: list[dict[str, Any]]) -> str:
    numbers: dict[str, int] = {}
    for row in rows:
        numbers[row["verdict"]] = numbers.get(row["verdict"], 0) + 1
    return ", ".join(f'"{name}" of {number}' for name, number in sorted(numbers.items()))


def main(*, only_page: bool) -> None:
    """Writes the results, unless only the page is asked for, then the page."""
    from benchmarks.forecast_accuracy import published  # which asks for the section

    if not only_page:
        with FACTS.open(newline="") as file:
            rows = [compared(row) for row in csv.DictReader(file)]
        command = "python benchmarks/forecast_accuracy/run.py frameworks"
        fit = report([row for row in rows if not _has_sinks(row)])
        RESULTS.write_text(dump({"command": command, "fit": fit, "rows": rows}) + "\n", encoding="utf-8")
    published.main(only_page=True)
