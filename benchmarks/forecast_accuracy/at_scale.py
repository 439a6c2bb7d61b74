"""The forecast of a step as machines double, and beside published runs of several; nothing is trained."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.forecast_accuracy.published_speed import against_published, largest, of_largest, published, rounded
from benchmarks.records import dump
from cookbook.config.strategy import find_strategy, load_strategy
from cookbook.forecast.ranking import forecast_all
from cookbook.forecast.verdict import Forecast
from cookbook.start.run_plan import load_pair
from cookbook.system.hardware import GIB, parse_machines

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results" / "at_scale.json"
PAGE, PLOT = ROOT / "docs" / "at_scale.md", ROOT / "docs" / "at_scale.svg"
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


def _forecasts(gpus: int, path: str, names: Sequence[str], samples: int) -> dict[str, Forecast]:
    machines = parse_machines(f"{gpus // 8}x8xH100", fabric_gbits=FABRIC_GBITS)
    changes = [f"batch.global_batch_size={samples * gpus}", f"batch.micro_batch_size={SAMPLES}"]
    recipe, _ = load_pair(Path(path), changes)
    report = forecast_all(recipe, [load_strategy(find_strategy(name)) for name in names], machines, path, limits=False)
    by_name = {outcome.strategy.name: outcome for outcome in report.forecasts}
    return {name: by_name[name] for name in names}


def forecasts(
    gpus: int, path: str = RECIPE, names: Sequence[str] = STRATEGIES, samples: int = SAMPLES
) -> dict[str, dict[str, Any]]:
    """Seconds of a step, GiB of a GPU, and the share of messages in a step that overlaps nothing, by strategy.

    Args:
        samples: of each GPU in a step.
    """
    rows = {}
    for name, outcome in _forecasts(gpus, path, names, samples).items():
        assert outcome.time is not None and outcome.memory is not None, outcome.why
        messages = sum(part.high for part in outcome.time.parts if part.name in LINKS)
        rows[name] = {
            "seconds": [rounded(outcome.time.low), rounded(outcome.time.high)],
            "gib": [rounded(size / GIB) for size in outcome.memory.needed],
            "messages": round(messages / outcome.time.high, 3),
            "limit": outcome.time.bottleneck,
            "verdict": outcome.verdict,
        }
    return rows


def of_mixture(gpus: int) -> dict[str, dict[str, Any]]:
    """Forecasts of Qwen3-30B-A3B."""
    return forecasts(gpus, MIXTURE, OF_MIXTURE)


def of_large(gpus: int) -> dict[str, dict[str, Any]]:
    """Forecasts of Llama-3.3-70B. Four samples for each GPU: a pipeline has then four micro-batches or more."""
    return forecasts(gpus, LARGE, MESHES, 2 * SAMPLES)


def left_out(gpus: int = GPUS[0]) -> dict[str, str]:
    """Why each other strategy is not in the plot."""
    others = ("ddp", "ddp_sp", "fsdp2_ep")
    outcomes = _forecasts(gpus, RECIPE, [*others, *OFFLOADED, *OFFLOADED.values()], SAMPLES)
    reasons = {
        "single": "one process, on one GPU",
        "tp": "more processes than a group are copies of it: what `ddp_tp` is",
    }
    for name in others:
        reasons[name] = "; ".join(outcomes[name].why).removeprefix(f"accelerate_configs/{name}.yaml: ")
    for name, plain in OFFLOADED.items():
        with_it, without = (outcomes[strategy].memory for strategy in (name, plain))
        assert with_it is not None and without is not None
        most, least = (memory.needed[1] / GIB for memory in (without, with_it))
        reasons[name] = f"for fewer GPUs: here `{plain}` fits too, with {most:.0f} GiB at most, to its {least:.0f}"
    return reasons


def table(scale: dict[str, Any], few: str, many: str) -> list[str]:
    """Rows of Markdown: each strategy on few GPUs and on many."""
    lines = [
        f"| strategy | step on {few} | on {int(many):,} | messages on {few} | on {int(many):,} | GiB a GPU on {few} |"
        f" on {int(many):,} | verdict | limit |",
        "|" + " --- |" * 9,
    ]
    for name, first in scale[few].items():
        last = scale[many][name]
        cells = [name, *(f"{row['seconds'][0]:.2g} to {row['seconds'][1]:.2g} s" for row in (first, last))]
        cells += [f"{row['messages']:.0%}" for row in (first, last)]
        cells += ["{:.0f} to {:.0f}".format(*row["gib"]) for row in (first, last)]
        lines.append("| " + " | ".join([*cells, last["verdict"], last["limit"]]) + " |")
    return lines


def render(results: dict[str, Any]) -> str:
    """The page, in Markdown."""
    return "\n".join([*on_paper(results), *of_largest(results["largest"]), *against_published(results["published"])])


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
        f"cookbook plan {LARGE} --gpus 4x8xH100 --strategy fsdp2_tp --set batch.micro_batch_size={SAMPLES}",
        f"cookbook rehearse {LARGE} --strategy pp_fsdp2",
        "```",
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
                by_scale = [scale[str(gpus)][name] for gpus in GPUS]
                low, high = zip(*(row["seconds"] for row in by_scale), strict=True)
                (line,) = time.plot(GPUS, high, label=name)
                time.plot(GPUS, low, color=line.get_color(), linestyle=":")
                share.plot(GPUS, [100 * row["messages"] for row in by_scale], label=name)
                memory.plot(GPUS, [row["gib"][1] for row in by_scale], label=name)
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


def main(*, only_page: bool) -> None:
    """Writes the results, unless only the page is asked for, then the page and its plot."""
    if not only_page:
        results = {
            "scale": {str(gpus): forecasts(gpus) for gpus in GPUS},
            "left_out": left_out(),
            "mixture": {str(gpus): of_mixture(gpus) for gpus in GPUS},
            "large": {str(gpus): of_large(gpus) for gpus in GPUS_OF_LARGE},
            "published": published(),
            "largest": largest(),
        }
        RESULTS.write_text(dump(results) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(render(results), encoding="utf-8")
    PLOT.write_text(plot(results), encoding="utf-8")
