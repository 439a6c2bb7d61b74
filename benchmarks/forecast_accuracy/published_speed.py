"""The forecast of the speed beside published runs of several machines: the rows of speed_published.csv."""

import csv
import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.forecast_accuracy.models import sizes_of
from cookbook.config.strategy import find_strategy, load_strategy
from cookbook.forecast.costs.flops import ModelSizes, Step
from cookbook.forecast.step_time import EFFICIENCY, step_seconds
from cookbook.system.hardware import parse_machines

FACTS = Path(__file__).resolve().parent / "speed_published.csv"
LEFT_OUT_RUNS = {
    "torchtitan, 8B on 128 H100 (8,380), 70B on 256 (829, 876; 810 and 942, 600 and 625 in pull request 1299) and 405B"
    " on 512 (100, 128; 76 to 16 with context parallel), 8B on 32 and 64 H200 (10,938 and 10,753); Megatron-Bridge, 70B"
    " on 64 and 32 H100 (1,602 to 1,638)": "fp8, of which `plan` forecasts no time",
    "torchtitan, 8B on 64 H100 under SimpleFSDP (4,984), and with asynchronous tensor parallel (8B on 64: 4,809; 70B on"
    " 256: 652)": "engines that this project does not have",
    "Automodel, Nemotron, DeepSeek V3, Kimi K2 and GPT-OSS 120B on 64 to 1,024 H100": "mixtures of experts, whose"
    " routing and uneven loads `plan` says that it does not forecast",
    "Narayanan et al. 2021, table 1, GPT of 39B to 1T on 512 to 3,072 A100": "their micro-batch is not stated, and with"
    " stages it decides; table 2 has it. Without stages it changes the forecast by 2%: those rows are here, with one"
    " sample",
    "Megatron-LM's README, GPT of 2B to 462B on 96 to 6,144 H100": "a picture that does not have the micro-batch",
    "llm-foundry on 16 and 32 GPUs, Automodel's LoRA on 16, ms-swift on 16": "fewer than 64 GPUs",
}


LARGEST = ((8192, 430.0), (16384, 400.0))
"""GPUs, and TFLOP/s of each, of Llama 3 405B under tp 8 and pp 16 (arXiv 2407.21783, table 4)."""
LARGEST_LENGTH, LARGEST_SAMPLES = 8192, 2048
"""Tokens of a sample, and samples of a step: 16 M tokens."""
WAYS = (("pp_tp", 1), ("pp_tp", 4), ("pp_tp_fsdp2", 1))
"""Strategies, and ranges of layers of a stage."""


def largest() -> list[dict[str, Any]]:
    """The largest published runs, each as strategies here would have it: tokens per second of each GPU."""
    sizes, rows = sizes_of("Llama-3-405B"), []
    for count, tflops in LARGEST:
        machines = parse_machines(f"{count // 8}x8xH100", fabric_gbits=400)
        micro_batches, tokens = LARGEST_SAMPLES * 8 * 16 // count, LARGEST_SAMPLES * LARGEST_LENGTH
        step = Step(num_tokens=tokens, num_labelled=tokens, length=LARGEST_LENGTH, micro_batches=micro_batches)
        weights, attention = 6 * sizes.num_parameters, 12 * sizes.num_layers * sizes.hidden * LARGEST_LENGTH
        for name, ranges in WAYS:
            strategy = replace(load_strategy(find_strategy(name)), tp_size=8, pp_size=16, pp_chunks=ranges)
            low, high = step_seconds(strategy, sizes, step, machines).tokens_per_second(tokens, machines.num_gpus)
            ends = [rounded(1e12 * tflops / flops) for flops in (weights + attention, weights)]
            row = {"gpus": count, "tflops": tflops, "micro_batches": micro_batches, "published": ends}
            rows.append(row | {"strategy": name, "ranges": ranges, "forecast": [rounded(low), rounded(high)]})
    return rows


def of_largest(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of docs/at_scale.md on them."""
    lines = [
        "## The largest published runs",
        "",
        "Llama 3 405B on 8,192 and 16,384 H100, with tensor parallel of 8, 16 stages, samples of 8,192 tokens, 16 M"
        " tokens a step and nothing recomputed ([Llama team 2024](https://arxiv.org/abs/2407.21783), table 4 and"
        " section 3.3.2), beside the forecast. Its figures are TFLOP/s; tokens per second of each GPU are between those"
        " over 6 FLOPs of a weight and those with the whole of attention's besides. How many ranges of layers a stage"
        " has is not stated, and decides; one sample a micro-batch is assumed, and 400 Gbit/s to a GPU.",
        "",
        "| GPUs | TFLOP/s | published | micro-batches | strategy here | ranges | forecast | inside |",
        "|" + " --- |" * 8,
    ]
    for row in rows:
        (low, high), (least, most) = row["forecast"], row["published"]
        cells = [f"{row['gpus']:,}", f"{row['tflops']:g}", f"{least:g} to {most:g}", str(row["micro_batches"])]
        cells += [f"{row['strategy']}, tp 8, pp 16", str(row["ranges"]), f"{low:g} to {high:g}"]
        lines.append("| " + " | ".join([*cells, "yes" if low <= most and least <= high else "**no**"]) + " |")
    return [
        *lines,
        "",
        "Its FSDP shards gradients and optimizer states, and does not shard weights again after a forward. `pp_tp`,"
        " which shards nothing over data parallel, sends as much; `pp_tp_fsdp2` gathers weights for each micro-batch,"
        " which the network then limits, so that stages whose FSDP keeps them would be next. Not expressed here can be"
        " its run with samples of 131,072 tokens, whose context parallel of 16 no strategy with stages has, and"
        " DeepSeek-V3's on 2,048 H800 ([arXiv 2412.19437](https://arxiv.org/abs/2412.19437)): 16 stages, experts over"
        " 64 GPUs, and products in fp8. For it and other mixtures stages with expert parallel would be next.",
        "",
    ]


def published(facts: Path = FACTS) -> list[dict[str, Any]]:
    """Rows of such a file, each with its forecast: tokens per second of each GPU."""
    with facts.open(encoding="utf-8", newline="") as file:
        return [_compared(row) for row in csv.DictReader(file)]


def _compared(row: dict[str, str]) -> dict[str, Any]:
    fabric = float(row["fabric_gbits"]) if row["fabric_gbits"] else None
    machines = parse_machines(row["machines"], fabric_gbits=fabric)
    degrees = {key: int(row[key]) for key in ("tp", "pp", "sp") if row[key] != "1"}
    written: dict[str, Any] = {f"{key}_size": size for key, size in degrees.items()}
    strategy = replace(load_strategy(find_strategy(row["strategy"])), **written)
    if strategy.open_sizes:  # hsdp's
        strategy = strategy.for_processes(machines.num_gpus, machines.gpus_each)
    micro_batches = int(row["micro_batches"])
    # `samples` has what a group whose processes share samples gets at a time.
    groups = machines.num_gpus // math.prod(degrees.values())
    tokens = int(row["length"]) * int(row["samples"]) * micro_batches * groups
    step = Step(
        num_tokens=tokens,
        num_labelled=tokens,
        length=int(row["length"]),
        micro_batches=micro_batches,
        recompute={"none": False, "full": True, "selective": "selective"}[row["recompute"]],  # type: ignore[arg-type]
        gradient_dtype=row["gradient_dtype"] or None,  # type: ignore[arg-type]
    )
    sizes = sizes_of(row["model"])
    low, high = step_seconds(strategy, sizes, step, machines).tokens_per_second(tokens, machines.num_gpus)
    measured = float(row["tokens_per_second"] or 1e12 * float(row["tflops"]) / flops_of_megatron(sizes, step))
    return {
        "name": row["name"],
        "source": row["source"],
        "url": row["url"],
        "strategy": row["strategy"],
        "degrees": degrees,
        "gpus": machines.num_gpus,
        "gpu": machines.gpu.name if machines.gpu else "",
        "published": rounded(measured) if row["tflops"] else measured,
        "forecast": [rounded(low), rounded(high)],
        "error": round(math.sqrt(low * high) / measured - 1, 3),
        "is_inside": low <= measured <= high,
    }


def flops_of_megatron(sizes: ModelSizes, step: Step) -> float:
    """FLOPs of a token as Narayanan et al. 2021 count them (equation 3): with recomputation, and attention whole."""
    of_layers = 96 * sizes.num_layers * sizes.hidden**2
    attention, head = step.length / 6 / sizes.hidden, sizes.vocab / 16 / sizes.num_layers / sizes.hidden
    return of_layers * (1 + attention + head)


def rounded(value: float) -> float:
    """To three digits."""
    return float(f"{value:.3g}")


def table_of_runs(rows: list[dict[str, Any]]) -> list[str]:
    """Rows of Markdown: each published run and its forecast."""
    lines = [
        "| run | source | strategy here | GPUs | published | forecast | inside | error of the middle |",
        "|" + " --- |" * 8,
    ]
    for row in rows:
        degrees = "".join(f", {key} {size}" for key, size in row["degrees"].items())
        cells = [row["name"], f"[{row['source']}]", row["strategy"] + degrees]
        cells += [f"{row['gpus']:,} {row['gpu']}", f"{row['published']:,g}"]
        cells += ["{:,g} to {:,g}".format(*row["forecast"]), "yes" if row["is_inside"] else "**no**"]
        lines.append("| " + " | ".join([*cells, _signed(row["error"])]) + " |")
    sources = {row["source"]: row["url"] for row in rows}
    return [*lines, "", *(f"[{source}]: {url}" for source, url in sources.items())]


def _signed(error: float) -> str:
    return f"{round(error, 2) + 0.0:+.0%}"  # no -0%


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Rows of Markdown: the runs by strategy."""
    lines = [
        "| strategy | runs | inside | mean size of the error | mean error | from | to |",
        "|" + " --- |" * 7,
    ]
    by_strategy = groupby(sorted(rows, key=lambda row: row["strategy"]), key=lambda row: row["strategy"])
    for name, group in [*((name, list(group)) for name, group in by_strategy), ("all", rows)]:
        errors = [row["error"] for row in group]
        inside = sum(row["is_inside"] for row in group)
        cells = [name, str(len(group)), str(inside), f"{sum(map(abs, errors)) / len(errors):.0%}"]
        cells += map(_signed, (sum(errors) / len(errors), min(errors), max(errors)))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def outside(rows: list[dict[str, Any]]) -> list[str]:
    """In words, which runs the forecast misses."""
    fast = [row for row in rows if row["published"] > row["forecast"][1]]
    slow = [row for row in rows if row["published"] < row["forecast"][0]]
    most = max((row["published"] / row["forecast"][1] - 1 for row in fast), default=0.0)
    least = min((row["published"] / row["forecast"][0] for row in slow), default=1.0)
    return [
        f"- Faster than the fast end, by {most:.0%} at most: {_named(fast)}. On A100 the large"
        " ones spend 69% of the peak or more on products, with what they recompute; the forecast has"
        f" {EFFICIENCY['ampere'][1]:.0%} at most, and other kernels beside them.",
        f"- Slower than the slow end, down to {least:.0%} of it: {_named(slow)}. With one or two samples a micro-batch,"
        " GPT of 175B took 67 s a step on 768 GPUs and on 1,536, so it waited for messages, for which the forecast has"
        " less than 20 s. DeepSpeed was that of 2021; why it took so long is not known. So do not rely on what is above"
        " of `zero3` on so many GPUs.",
    ]


def _named(rows: list[dict[str, Any]]) -> str:
    return "; ".join(f"{row['name']}, {row['strategy']} on {row['gpus']:,} {row['gpu']}" for row in rows) or "none"


def against_published(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of docs/at_scale.md on what others measured."""
    inside = sum(row["is_inside"] for row in rows)
    return [
        "## Against published runs of several machines",
        "",
        f"Tokens per second of each GPU, of {len(rows)} runs of 64 GPUs or more by other programs, in 16 bits."
        f" {inside} lie inside the forecast. The error is that of its geometric middle: above zero, the forecast is"
        " too fast. Nothing was fitted to a row but ends of the share of its peak that a GPU reaches, to those that"
        " `cookbook/forecast/step_time.py` names.",
        "",
        *summary(rows),
        "",
        "Outside are:",
        "",
        *outside(rows),
        "",
        "Other programs do not do all that the strategy beside them does here. What is called selective is counted"
        " as recomputing no product; some of theirs recompute every second layer or some products. Megatron-LM"
        " sums the gradients of tensor parallel in 16 bits, and its pipelines may have several ranges of layers a"
        " stage; both are counted as [here](strategies.md). Its figures are TFLOP/s, over its FLOPs of a token."
        " Context parallel passes keys and values around, where `fsdp2_sp` exchanges heads. The network is what"
        " the source states for each GPU, or 100 to 400 Gbit/s; fms-fsdp's 400 and 800 are read as those of a"
        " machine. llm-foundry's A100 reduce gradients in 16 bits. torchtitan's H100 have less power and memory"
        " bandwidth than those of the data sheet.",
        "",
        *table_of_runs(rows),
        "",
        "Left out:",
        "",
        "| runs | why |",
        "| --- | --- |",
        *(f"| {runs} | {why} |" for runs, why in LEFT_OUT_RUNS.items()),
        "",
        "Written by `python benchmarks/forecast_accuracy/run.py at-scale` from data sheets, published rates and the"
        " [ledger](terms.md), and the rows of `benchmarks/forecast_accuracy/speed_published.csv`; no hardware took"
        " part.",
        "",
    ]
