"""The plan's verdict and time beside what people reported of runs elsewhere, above all of those that ran out of memory.

The rows: reports_published.csv, and those of llm-foundry on 8 to 32 GPUs, speed_few_gpus.csv. Each is forecast as
`cookbook plan` would, by a recipe with the model, the strategy and the sizes of the row. One thing of the other program
is counted beside it: whole logits, which most of them held, where the loss comes in parts here.
"""

import csv
import json
import statistics
from dataclasses import replace
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from benchmarks.forecast_accuracy import published_speed
from benchmarks.forecast_accuracy.models import config_of
from benchmarks.forecast_accuracy.unsaid_rows import EVERY_LINEAR, WHOLE_LOGITS
from benchmarks.records import dump
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import find_strategy, load_strategy
from cookbook.facts.offline import known_model
from cookbook.forecast.memory import GIB
from cookbook.forecast.verdict import UNKNOWN, TraceCache, forecast, tokens_of_step
from cookbook.system.hardware import Machines, parse_machines

FACTS = Path(__file__).resolve().parent / "reports_published.csv"
FEW_GPUS = Path(__file__).resolve().parent / "speed_few_gpus.csv"
RESULTS = Path(__file__).resolve().parent / "results" / "reports.json"
FAMILIES = ("all weights", "LoRA", "QLoRA")
NOTES = (
    "r13 is of torch 2.0, whose FSDP did not free the frozen weights that a backward had gathered"
    " ([pytorch issue 95805](https://github.com/pytorch/pytorch/issues/95805)): all 24 GiB of them lay on each GPU. Of"
    " r05 and r08 no cause is known.",
    "r22 needs less than is expected to be allocated: its weights and their states have 16 bits, where they have 32"
    " here, and a kernel computes its attention.",
    "torchtune's row of a 70B with LoRA on 8 A100, of 26.4 GB with 4 samples of 4,096 tokens, is left out: what its 80"
    " layers keep of so many tokens is 20 GiB, beside shards of 16, so its samples were shorter than their limit.",
    "From 16,384 tokens on the forecast of llm-foundry is too fast, most on H100, and at 512 and 1,024 too slow: the"
    " share of the peak that products reach is taken for attention too.",
    "VectorLM's figures are medians of micro-batches, of which one in four has an update; trained whole, all nine are"
    " faster than the fast end, by 23 % at most. Its adapters are at most 7 % faster than it, and PEFT's own on an L40S"
    " lie in the middle: that the plan is too fast for adapters is not seen here.",
)
KERNEL_FLOPS = (
    "https://github.com/Dao-AILab/flash-attention/blob/0469c72723278048f1b1bd29f6c6155b5ef98369/benchmarks/"
    "benchmark_flash_attention.py"
)
CHECKPOINTING = {"true": True, "false": False, "selective": "selective"}


def config_by(name: str) -> PreTrainedConfig:
    """The structure of a model, of the offline facts or of models.py."""
    known = known_model(name)
    return config_of(name) if known is None else AutoConfig.for_model(**known["config"])


def recipe_of(row: dict[str, str], machines: Machines) -> Recipe:
    """Part of a row that a recipe can say."""
    adapter = None
    if row["method"] != "full":
        targets = EVERY_LINEAR if row["targets"] == "linear" else row["targets"].split()
        adapter = {"name": row["method"], "rank": int(row["rank"]), "targets": targets}
    samples = int(row["samples"])
    return Recipe.model_validate(
        {
            "strategy": f"accelerate_configs/{row['strategy']}.yaml",
            "mixed_precision": "fp16" if machines.gpu is not None and not machines.gpu.has_bf16 else "bf16",
            "model": {
                "name_or_path": row["model"],
                "gradient_checkpointing": CHECKPOINTING[row["checkpointing"]],
                "compile": row["compiled"] == "true",
            },
            "data": {"train": "python-stdlib", "max_length": int(row["length"]), "packing": False},
            "adapter": adapter,
            "batch": {
                "global_batch_size": samples * machines.num_gpus * int(row["micro_batches"]),
                "micro_batch_size": samples,
            },
            "optim": {"learning_rate": 1e-5},
            "run": {"max_steps": 1, "output_dir": "out"},
        }
    )


def compared(row: dict[str, str]) -> dict[str, Any]:
    """A row with its forecast: GiB of a GPU, and tokens per second of each."""
    machines = parse_machines(row["machines"])
    strategy = load_strategy(find_strategy(row["strategy"]))
    if row["strategy"] == "fsdp2_ep":
        strategy = replace(strategy, ep_size=machines.num_gpus, dp_shard_size=1)
    recipe = recipe_of(row, machines)
    config = config_by(row["model"])
    outcome = forecast(TraceCache(config, recipe), strategy, machines, limits=False)
    assert outcome.memory is not None and machines.usable_gib is not None, outcome.why
    low, high = (size / GIB for size in outcome.memory.needed)
    logits = WHOLE_LOGITS * int(row["samples"]) * int(row["length"]) * config.get_text_config().vocab_size / GIB
    speed = None
    tokens = tokens_of_step(recipe)
    if row["seconds_a_step"]:
        speed = tokens / machines.num_gpus / float(row["seconds_a_step"])
    elif row["tokens_per_second"]:
        speed = float(row["tokens_per_second"])
    result: dict[str, Any] = {
        "id": row["id"],
        "program": row["program"],
        "outcome": row["outcome"],
        "is_judged": row["states"] != "16",
        "family": family_of(row),
        "setup": words(row),
        "gpu_gib": round(machines.usable_gib, 2),
        "allocated": round(outcome.memory.allocated / GIB, 2),
        "needed": [round(low, 2), round(high, 2)],
        "logits": round(logits, 2),
        "verdict": outcome.verdict,
        "verdict_with_logits": judged(low + logits, high + logits, machines.usable_gib),
        "peak_gib": float(row["peak_gib"]) if row["peak_gib"] else None,
        "speed": None if speed is None else round(speed, 1),
    }
    if result["peak_gib"] is not None:
        result["is_inside"] = outcome.memory.allocated / GIB <= result["peak_gib"] <= high + logits
    if speed is not None:
        assert outcome.time is not None, outcome.why
        least, most = outcome.time.tokens_per_second(tokens, machines.num_gpus)
        result |= {
            "speed_forecast": [float(f"{least:.4g}"), float(f"{most:.4g}")],
            "speed_error": round((least * most) ** 0.5 / speed - 1, 3),
            "is_speed_inside": least <= speed <= most,
        }
    return result


def judged(low: float, high: float, gpu: float) -> str:
    """A verdict from the ends of what is needed."""
    return "does not fit" if low > gpu else "tight" if high > gpu else "fits"


def family_of(row: dict[str, str]) -> str:
    """Family that a row is counted with."""
    return {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}[row["method"]]


def words(row: dict[str, str]) -> str:
    """A row's setup."""
    adapter = "" if row["method"] == "full" else f", {family_of(row)} of rank {row['rank']}"
    kept = {"true": "", "false": ", nothing recomputed", "selective": ", selective"}[row["checkpointing"]]
    model = row["model"].rpartition("/")[2]
    return f"{model}, {row['samples']} x {int(row['length']):,}, {row['strategy']} on {row['machines']}{adapter}{kept}"


def section() -> list[str]:
    """Lines of docs/plan_accuracy.md."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows, few = results["rows"], results["few_gpus"]
    with FACTS.open(newline="") as file:
        facts = {row["id"]: row for row in csv.DictReader(file)}
    failed = [row for row in rows if row["outcome"] == "failed"]
    ran = [row for row in rows if row["outcome"] == "ran"]
    fast = [row for row in rows if row["speed"] is not None]
    known = [row for row in ran if row["peak_gib"] is not None]
    return [
        "## Reports of single runs, and of those that ran out of memory",
        "",
        f"{len(failed)} runs that ran out of memory, as people reported them with their whole setup, {len(ran)} that"
        f" ran, and {len(few)} more of llm-foundry on 8 to 32 GPUs, read on 2026-11-29 with the forecast as it stood:"
        " of what they showed one thing was changed, and nothing fitted: attention's backward has five products now, as"
        f" a kernel makes the scores again that it does not keep ([flash-attention's own count]({KERNEL_FLOPS});"
        " llm-foundry's README says so of itself). With four, as model FLOPs are counted, 61 of llm-foundry's 77 lay"
        " inside, and the largest error was 103 %."
        " Each is forecast as `cookbook plan` forecasts a recipe of the same sizes. Most"
        " of these programs held whole logits, which `plan` does not count, as the loss here comes in parts: the"
        f" verdicts beside count them, with {WHOLE_LOGITS} bytes of a position and word. A setting that a report does"
        " not state is the default of its program at that time; the last column of the file of rows names each.",
        "",
        *_verdicts(failed, ran),
        "",
        f"Of {len(known)} runs with a published memory {sum(row['is_inside'] for row in known)} lie between what is"
        " expected to be allocated and the most, with whole logits.",
        "",
        *_speeds(fast, few),
        "",
        *(f"- {text}" for text in NOTES),
        "",
        "",
        "| row | program | run | GPU, GiB | needed, GiB | whole logits | the plan's verdict | with whole logits |",
        "|" + "---|" * 8,
        *(_failure(row, facts[row["id"]]) for row in failed),
        "",
        "| row | program | run | GiB | allocated to most, with whole logits | tokens/s a GPU | forecast | inside |",
        "|" + "---|" * 8,
        *(_success(row, facts[row["id"]]) for row in ran),
        "",
        f"Written by `{results['command']}`. The rows, what each source says and what it is silent on:"
        " `benchmarks/forecast_accuracy/reports_published.csv` and `speed_few_gpus.csv`.",
    ]


def _verdicts(failed: list[dict[str, Any]], ran: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| runs | rows | does not fit | tight | fits | wrong | wrong, with whole logits |",
        "|" + "---|" * 7,
    ]
    for what, group, wrong in (("ran out of memory", failed, "fits"), ("ran", ran, "does not fit")):
        judged_rows = [row for row in group if row["is_judged"]]
        families = [(name, [row for row in judged_rows if row["family"] == name]) for name in FAMILIES]
        for name, part in [*((name, part) for name, part in families if part), ("all", judged_rows)]:
            said = [_plain(row["verdict"]) for row in part]
            cells = [f"{name}, {what}", len(part), *map(said.count, ("does not fit", "tight", "fits"))]
            cells += [said.count(wrong), sum(row["verdict_with_logits"] == wrong for row in part)]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return [
        *lines,
        "",
        "Left out of this table are runs whose states have 16 bits, where those of all trained weights have 32 here.",
    ]


def _speeds(rows: list[dict[str, Any]], few: list[dict[str, Any]]) -> list[str]:
    lines = ["| speed | rows | inside | median error of the middle | worst |", "|" + "---|" * 5]
    groups: list[tuple[str, list[tuple[float, bool]]]] = []

    def key(row: dict[str, Any]) -> tuple[str, str]:
        return row["program"], row["family"]

    for names, group in groupby(sorted(rows, key=key), key):
        groups.append((", ".join(names), [(row["speed_error"], row["is_speed_inside"]) for row in group]))
    with FEW_GPUS.open(newline="") as file:
        lengths = [int(row["length"]) for row in csv.DictReader(file)]
    for gpu in sorted({row["gpu"] for row in few}):
        for least, most in ((0, 2048), (4096, 8192), (16384, 65536)):
            rows_of_gpu = [
                (row["error"], row["is_inside"])
                for row, length in zip(few, lengths, strict=True)
                if row["gpu"] == gpu and least <= length <= most
            ]
            words_of_length = f"{least:,} to {most:,} tokens" if least else f"up to {most:,} tokens"
            groups.append((f"llm-foundry, all weights, {gpu}, {words_of_length}", rows_of_gpu))
    every = [row for _, rows_of_group in groups for row in rows_of_group]
    for title, part in [*groups, ("all", every)]:
        errors = [error for error, _ in part]
        cells = [title, str(len(part)), str(sum(inside for _, inside in part))]
        cells += [f"{statistics.median(errors):+.0%}", f"{max(errors, key=abs):+.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _failure(row: dict[str, Any], fact: dict[str, str]) -> str:
    low, high = row["needed"]
    cells = [row["id"], f"[{row['program']}]({fact['url']})", row["setup"], f"{row['gpu_gib']:.0f}"]
    cells += [f"{low:.1f} to {high:.1f}", f"{row['logits']:.1f}", _plain(row["verdict"]), row["verdict_with_logits"]]
    return "| " + " | ".join(cells) + " |"


def _success(row: dict[str, Any], fact: dict[str, str]) -> str:
    memory, speed = ["-", "-"], ["-", "-", "-"]
    if row["peak_gib"] is not None:
        memory = [f"{row['peak_gib']:g}", f"{row['allocated']:.1f} to {row['needed'][1] + row['logits']:.1f}"]
    if row["speed"] is not None:
        low, high = row["speed_forecast"]
        speed = [f"{row['speed']:,.0f}", f"{low:,.0f} to {high:,.0f}", "yes" if row["is_speed_inside"] else "**no**"]
    cells = [row["id"], f"[{row['program']}]({fact['url']})", row["setup"], *memory, *speed]
    return "| " + " | ".join(cells) + " |"


def _plain(verdict: str) -> str:
    """The verdict of the GPUs alone: host memory was not given."""
    return "fits" if verdict in UNKNOWN else verdict


def run() -> dict[str, Any]:
    """All rows."""
    rows = []
    with FACTS.open(newline="") as file:
        for row in csv.DictReader(file):
            rows.append(compared(row))
            last = rows[-1]
            print(last["id"], last["outcome"], last["verdict"], last["setup"], last["needed"], flush=True)
    return {
        "command": "python benchmarks/forecast_accuracy/run.py reports",
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "rows": rows,
        "few_gpus": published_speed.published(FEW_GPUS),
    }


def main(*, only_page: bool) -> None:
    """Writes the results, unless only the page is asked for, then the page."""
    from benchmarks.forecast_accuracy import published  # which asks for the section

    if not only_page:
        RESULTS.write_text(dump(run()) + "\n", encoding="utf-8")
    published.main(only_page=True)
