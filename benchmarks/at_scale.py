"""docs/at_scale.md and its plot: the forecast of a step as machines double, and against published runs of several.

    python benchmarks/at_scale.py

Forecasts only, in about a minute; nothing is trained.
"""

import csv
import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cookbook.config.strategy import Strategy, load_strategy  # noqa: E402
from cookbook.forecast.costs.flops import ModelSizes, Step  # noqa: E402
from cookbook.forecast.ranking import forecast_all  # noqa: E402
from cookbook.forecast.step_time import EFFICIENCY, step_seconds  # noqa: E402
from cookbook.forecast.verdict import Forecast  # noqa: E402
from cookbook.planning.run_plan import load_pair  # noqa: E402
from cookbook.system.hardware import GIB, parse_machines  # noqa: E402

RESULTS, PAGE, PLOT = ROOT / "benchmarks/results/at_scale.json", ROOT / "docs/at_scale.md", ROOT / "docs/at_scale.svg"
FACTS = ROOT / "benchmarks/speed_published.csv"
RECIPE = "recipes/llama31_8b/sft.yaml"
SAMPLES = 2
"""Samples of each GPU in a step, and of a micro-batch, of 4,096 tokens."""
FABRIC_GBITS = 400
FAMILIES = {
    "FSDP": ("fsdp1", "fsdp2", "fsdp2_grad_op", "fsdp2_sp", "hsdp"),
    "ZeRO": ("zero1", "zero2", "zero3", "zero3_hpz", "zero3_sp"),
    "tensor parallel": ("ddp_tp", "fsdp2_tp", "hsdp_tp"),
    "pipeline parallel": ("pp", "pp_tp", "pp_fsdp2", "pp_tp_fsdp2"),
}
STRATEGIES = tuple(name for names in FAMILIES.values() for name in names)
GPUS = tuple(2**power for power in range(6, 13))
MIXTURE = "recipes/qwen3_30b_a3b/sft.yaml"
OF_MIXTURE = ("fsdp2", "fsdp2_ep", "hsdp", "zero3")
LARGE = "recipes/llama33_70b/sft.yaml"
MESHES = ("fsdp2", "fsdp2_tp", "pp_fsdp2", "pp_tp_fsdp2")
GPUS_OF_LARGE = (32, 512)
LINKS = ("NVLink", "network")
OFFLOADED = {
    "fsdp2_offload": "fsdp2",
    "zero2_offload": "zero2",
    "zero3_offload": "zero3",
    "zero3_nvme": "zero3",
}
"""Strategies that move states off the GPUs, and the same without it."""
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


def _load(name: str) -> Strategy:
    return load_strategy(Path(f"accelerate_configs/{name}.yaml"))


def _forecasts(gpus: int, path: str, names: Sequence[str], samples: int) -> dict[str, Forecast]:
    machines = parse_machines(f"{gpus // 8}x8xH100", fabric_gbits=FABRIC_GBITS)
    changes = [f"batch.global_batch_size={samples * gpus}", f"batch.micro_batch_size={SAMPLES}"]
    recipe, _ = load_pair(Path(path), changes)
    report = forecast_all(recipe, [_load(name) for name in names], machines, path, limits=False)
    found = {one.strategy.name: one for one in report.forecasts}
    return {name: found[name] for name in names}


def forecasts(
    gpus: int, path: str = RECIPE, names: Sequence[str] = STRATEGIES, samples: int = SAMPLES
) -> dict[str, dict[str, Any]]:
    """Seconds of a step, GiB of a GPU, and the share of messages in a step that overlaps nothing, by strategy.

    Args:
        samples: of each GPU in a step.
    """
    found = {}
    for name, one in _forecasts(gpus, path, names, samples).items():
        assert one.time is not None and one.memory is not None, one.why
        messages = sum(part.high for part in one.time.parts if part.name in LINKS)
        found[name] = {
            "seconds": [_rounded(one.time.low), _rounded(one.time.high)],
            "gib": [_rounded(size / GIB) for size in one.memory.needed],
            "messages": round(messages / one.time.high, 3),
            "limit": one.time.bottleneck,
            "verdict": one.verdict,
        }
    return found


def of_mixture(gpus: int) -> dict[str, dict[str, Any]]:
    """The same of Qwen3-30B-A3B."""
    return forecasts(gpus, MIXTURE, OF_MIXTURE)


def of_large(gpus: int) -> dict[str, dict[str, Any]]:
    """The same of Llama-3.3-70B. Four samples for each GPU: a pipeline has then four micro-batches or more."""
    return forecasts(gpus, LARGE, MESHES, 2 * SAMPLES)


def left_out(gpus: int = GPUS[0]) -> dict[str, str]:
    """Why each other strategy is not in the plot."""
    others = ("ddp", "ddp_sp", "fsdp2_ep")
    found = _forecasts(gpus, RECIPE, [*others, *OFFLOADED, *OFFLOADED.values()], SAMPLES)
    reasons = {
        "single": "one process, on one GPU",
        "tp": "more processes than a group are copies of it: what `ddp_tp` is",
    }
    for name in others:
        reasons[name] = "; ".join(found[name].why).removeprefix(f"accelerate_configs/{name}.yaml: ")
    for name, plain in OFFLOADED.items():
        with_it, without = (found[one].memory for one in (name, plain))
        assert with_it is not None and without is not None
        most, least = (memory.needed[1] / GIB for memory in (without, with_it))
        reasons[name] = f"for fewer GPUs: here `{plain}` fits too, with {most:.0f} GiB at most, to its {least:.0f}"
    return reasons


def _gpt(layers: int, hidden: int, heads: int, vocab: int) -> tuple[int, ...]:
    """The shape of a GPT: an inner layer of four times the width, and as many heads for keys."""
    return layers, hidden, 4 * hidden, heads, heads, vocab


LLAMAS = {
    "Llama-3-8B": (32, 4096, 14336, 32, 8, 128256),
    "Llama-3-70B": (80, 8192, 28672, 64, 8, 128256),
    "Llama-2-7B": (32, 4096, 11008, 32, 32, 32000),
    "Llama-2-13B": (40, 5120, 13824, 40, 40, 32000),
    "Llama-2-70B": (80, 8192, 28672, 64, 8, 32000),
    "CodeLlama-34B": (48, 8192, 22016, 64, 8, 32000),
}
"""Layers, width, inner width, heads, heads of keys, words."""
GPTS = {
    "MPT-125M": _gpt(12, 768, 12, 50432),
    "MPT-350M": _gpt(24, 1024, 16, 50432),
    "MPT-760M": _gpt(24, 1536, 12, 50432),
    "MPT-1B": _gpt(24, 2048, 16, 50432),
    "MPT-3B": _gpt(32, 2560, 20, 50432),
    "MPT-7B": _gpt(32, 4096, 32, 50432),
    "MPT-13B": _gpt(40, 5120, 40, 50432),
    "MPT-30B": _gpt(48, 7168, 56, 50432),
    "MPT-70B": _gpt(80, 8192, 64, 50432),
    "GPT-3.6B": _gpt(30, 3072, 32, 51200),
    "GPT-7.5B": _gpt(36, 4096, 32, 51200),
    "GPT-18B": _gpt(40, 6144, 48, 51200),
    "GPT-175B": _gpt(96, 12288, 96, 51200),
    "GPT-530B": _gpt(105, 20480, 128, 51200),
}
"""The same; embedding and head are one, and queries, keys and values one product."""


def sizes_of(model: str) -> ModelSizes:
    """The sizes of a published model, without norms, biases and positions."""
    is_gpt = model in GPTS
    layers, hidden, inner, heads, key_heads, vocab = (GPTS if is_gpt else LLAMAS)[model]
    head_dim = hidden // heads
    of_layer = hidden * (2 * hidden + 2 * key_heads * head_dim + (2 if is_gpt else 3) * inner)
    whole = layers * of_layer + (1 if is_gpt else 2) * vocab * hidden
    return ModelSizes(
        num_parameters=whole,
        num_trained=whole,
        num_matrix=layers * of_layer,
        num_matrix_trained=layers * of_layer,
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_key_heads=key_heads,
        head_dim=head_dim,
        vocab=vocab,
        column_matrices=layers * (2 if is_gpt else 5),
        row_matrices=layers * 2,
        is_embedding_divided=True,
        is_tied=is_gpt,
    )


def published() -> list[dict[str, Any]]:
    """The rows of speed_published.csv, each with its forecast: tokens per second of each GPU."""
    with FACTS.open(newline="") as file:
        return [_compared(row) for row in csv.DictReader(file)]


def _compared(row: dict[str, str]) -> dict[str, Any]:
    fabric = float(row["fabric_gbits"]) if row["fabric_gbits"] else None
    machines = parse_machines(row["machines"], fabric_gbits=fabric)
    degrees = {key: int(row[key]) for key in ("tp", "pp", "sp") if row[key] != "1"}
    written: dict[str, Any] = {f"{key}_size": size for key, size in degrees.items()}
    strategy = replace(_load(row["strategy"]), **written)
    if strategy.open_sizes:  # hsdp's
        strategy = strategy.fitted(machines.num_gpus, machines.gpus_each)
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
    measured = float(row["tokens_per_second"] or 1e12 * float(row["tflops"]) / _flops_of_megatron(sizes, step))
    return {
        "name": row["name"],
        "source": row["source"],
        "url": row["url"],
        "strategy": row["strategy"],
        "degrees": degrees,
        "gpus": machines.num_gpus,
        "gpu": machines.gpu.name if machines.gpu else "",
        "published": _rounded(measured) if row["tflops"] else measured,
        "forecast": [_rounded(low), _rounded(high)],
        "error": round(math.sqrt(low * high) / measured - 1, 3),
        "is_inside": low <= measured <= high,
    }


def _flops_of_megatron(sizes: ModelSizes, step: Step) -> float:
    """FLOPs of a token as Narayanan et al. 2021 count them (equation 3): with recomputation, and attention whole."""
    of_layers = 96 * sizes.num_layers * sizes.hidden**2
    attention, head = step.length / 6 / sizes.hidden, sizes.vocab / 16 / sizes.num_layers / sizes.hidden
    return of_layers * (1 + attention + head)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def table(scale: dict[str, Any], few: str, many: str) -> list[str]:
    """Rows of Markdown: each strategy on few GPUs and on many."""
    lines = [
        f"| strategy | step on {few} | on {int(many):,} | messages on {few} | on {int(many):,} | GiB a GPU on {few} |"
        f" on {int(many):,} | verdict | limit |",
        "|" + " --- |" * 9,
    ]
    for name, first in scale[few].items():
        last = scale[many][name]
        cells = [name, *(f"{one['seconds'][0]:.2g} to {one['seconds'][1]:.2g} s" for one in (first, last))]
        cells += [f"{one['messages']:.0%}" for one in (first, last)]
        cells += ["{:.0f} to {:.0f}".format(*one["gib"]) for one in (first, last)]
        lines.append("| " + " | ".join([*cells, last["verdict"], last["limit"]]) + " |")
    return lines


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


def render(results: dict[str, Any]) -> str:
    """The page, in Markdown."""
    return "\n".join([*on_paper(results), *against_published(results["published"])])


def on_paper(results: dict[str, Any]) -> list[str]:
    """Its lines on what is forecast."""
    few, many = str(GPUS[0]), str(GPUS[-1])
    return [
        "# At scale, on paper",
        "",
        f"What [`plan`](plan.md) forecasts for Llama-3.1-8B on {few} to {int(many):,} H100, eight to a machine,"
        f" with a network card of {FABRIC_GBITS} Gbit/s to a GPU. Each GPU has {SAMPLES} samples of 4,096 tokens in"
        " a step, so the global batch grows with the machines. **Nothing here was measured**; the forecast knows"
        " rates, and latencies by NCCL's own estimate, but no congested network, slow machine, or failure."
        " [Published runs](#against-published-runs-of-several-machines) of several machines show how far it can be"
        " trusted.",
        "",
        "![Seconds of a step, share of messages and memory over the number of GPUs, by strategy](at_scale.svg)",
        "",
        *table(results["scale"], few, many),
        "",
        "The time is from everything overlapped at the best published rates to nothing overlapped at the worst;"
        " messages are their share of the latter. A ring sends the same from each GPU however many it has, so on"
        " paper the fast end stays, and what is sharded over all GPUs shrinks to nothing; but each message takes a"
        " step for each GPU, which is the slow end where weights are gathered over thousands. `hsdp` and `hsdp_tp`"
        " have a group in each machine: their memory does not shrink, and only their sums of gradients leave the"
        " machine, by a tree. The gathers of `zero3` are counted as one a layer, and may be more; in published runs"
        " on 768 GPUs and more they took far longer (below). `zero1` and `zero2` send the same where a step has one"
        " micro-batch, and need most when they start, with weights in float32. `fsdp2_grad_op` keeps whole layers,"
        " and over thousands of GPUs narrow matrices are gathered with padding. A pipeline has only two"
        " micro-batches here, or four under tensor parallel, and its waiting is in the time. Groups of tensor and"
        " sequence parallel, and stages, are two, as in the files. The grey line is the memory of a GPU.",
        "",
        "Not in the plot:",
        "",
        "| strategy | why |",
        "| --- | --- |",
        *(f"| {name} | {why} |" for name, why in results["left_out"].items()),
        "",
        "## Qwen3-30B-A3B",
        "",
        f"The same forecast for [a mixture of experts](../{MIXTURE}), which `fsdp2_ep` is for: a pair of GPUs"
        " divides the experts of a layer, so each gathers half of them. The time counts active weights only, not"
        " routing, uneven loads and small products. FSDP2 shards the experts of a layer by their number, 128: over"
        " more processes a gather is mostly padding, which the memory has and the time has not. ZeRO-3 cuts"
        " tensors anywhere.",
        "",
        *table(results["mixture"], few, many),
        "",
        "## Llama-3.3-70B",
        "",
        f"The same forecast for [the recipe of Llama-3.3-70B](../{LARGE}), with {2 * SAMPLES} samples for each GPU"
        f" in a step, in micro-batches of {SAMPLES}. `fsdp2_tp` divides each layer between two GPUs of a machine,"
        " `pp_fsdp2` the layers between two halves of the machines, `pp_tp_fsdp2` both. The first two gather half"
        " as many weights for a micro-batch as `fsdp2`, and have twice as many micro-batches. The idle time of a"
        " pipeline with so few micro-batches is included.",
        "",
        *table(results["large"], *map(str, GPUS_OF_LARGE)),
        "",
        "```bash",
        f"cookbook plan {LARGE} --gpus 4x8xH100 --strategy fsdp2_tp --strategy pp_fsdp2",
        f"cookbook rehearse {LARGE} --strategy pp_fsdp2",
        "```",
        "",
    ]


def against_published(rows: list[dict[str, Any]]) -> list[str]:
    """Those on what others measured."""
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
        "Written by `python benchmarks/at_scale.py` from data sheets, published rates and the"
        " [ledger](terms.md), and the rows of `benchmarks/speed_published.csv`; no hardware took part.",
        "",
    ]


def plot(results: dict[str, Any]) -> str:
    """The plot, as SVG: a row of panels for each family."""
    matplotlib.use("svg")
    from matplotlib import pyplot

    panels = {family: (results["scale"], names) for family, names in FAMILIES.items()}
    panels["mixture: Qwen3-30B-A3B"] = (results["mixture"], OF_MIXTURE)
    titles = ("seconds of a step", "messages, % of a step", "GiB of a GPU")
    usable = parse_machines("1xH100").usable_gib
    settings = {"svg.hashsalt": "at scale", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure, rows = pyplot.subplots(
            len(panels), 3, figsize=(11, 2.6 * len(panels)), layout="constrained", sharex=True, sharey="col"
        )
        for (family, (scale, names)), (time, share, memory) in zip(panels.items(), rows, strict=True):
            for name in names:
                found = [scale[str(gpus)][name] for gpus in GPUS]
                low, high = zip(*(one["seconds"] for one in found), strict=True)
                (line,) = time.plot(GPUS, high, label=name)
                time.plot(GPUS, low, color=line.get_color(), linestyle=":")
                share.plot(GPUS, [100 * one["messages"] for one in found], label=name)
                memory.plot(GPUS, [one["gib"][1] for one in found], label=name)
            time.set_ylabel(family)
            memory.axhline(usable, color="grey", linewidth=0.8)
            memory.legend(loc="center left", bbox_to_anchor=(1, 0.5))
            for axes in (time, share, memory):
                axes.grid(alpha=0.3)
        for axes, title in zip(rows[0], titles, strict=True):
            axes.set_title(title)
        for axes in rows[-1]:
            axes.set_xlabel("GPUs")
            axes.set_xscale("log", base=2)
            axes.set_xticks(GPUS, [f"{gpus:,}" for gpus in GPUS])
            axes.set_ylim(bottom=0)
        rows[0][2].set_ylim(top=100)  # what does not fit leaves the panel
        rows[0][0].text(0.02, 0.03, "dotted: all overlaps, best rates", transform=rows[0][0].transAxes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def main() -> None:
    results = {
        "scale": {str(gpus): forecasts(gpus) for gpus in GPUS},
        "left_out": left_out(),
        "mixture": {str(gpus): of_mixture(gpus) for gpus in GPUS},
        "large": {str(gpus): of_large(gpus) for gpus in GPUS_OF_LARGE},
        "published": published(),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(results), encoding="utf-8")
    PLOT.write_text(plot(results), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
