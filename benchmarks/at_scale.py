"""docs/at_scale.md and its plot: the forecast of a step as machines double, and against published runs of several.

    python benchmarks/at_scale.py

Forecasts only, in about a minute; nothing is trained.
"""

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cookbook.commands.forecast import forecast_all  # noqa: E402
from cookbook.config.strategy import load_strategy  # noqa: E402
from cookbook.planning.plan import load_pair  # noqa: E402
from cookbook.system.hardware import GIB, parse_machines  # noqa: E402

RESULTS, PAGE, PLOT = ROOT / "benchmarks/results/at_scale.json", ROOT / "docs/at_scale.md", ROOT / "docs/at_scale.svg"
RECIPE = "recipes/llama31_8b/sft.yaml"
SAMPLES = 2
"""Samples of each GPU in a step, of 4,096 tokens: the recipe's micro-batch."""
FABRIC_GBITS = 400
STRATEGIES = ("zero1", "zero2", "zero3", "fsdp2", "hsdp", "fsdp2_tp")
GPUS = tuple(2**power for power in range(6, 13))
LARGE = "recipes/llama33_70b/sft.yaml"
MESHES = ("fsdp2", "fsdp2_tp", "pp_fsdp2", "pp_tp_fsdp2")
GPUS_OF_LARGE = (32, 512)
LINKS = ("NVLink", "network")


def forecasts(
    gpus: int, path: str = RECIPE, names: tuple[str, ...] = STRATEGIES, samples: int = SAMPLES
) -> dict[str, dict[str, Any]]:
    """Seconds of a step, GiB of a GPU, and the share of messages in a step that overlaps nothing, by strategy.

    Args:
        samples: of each GPU in a step.
    """
    machines = parse_machines(f"{gpus // 8}x8xH100", fabric_gbits=FABRIC_GBITS)
    recipe, _ = load_pair(Path(path), [f"batch.global_batch_size={samples * gpus}"])
    strategies = [load_strategy(Path(f"accelerate_configs/{name}.yaml")) for name in names]
    found = {}
    for one in forecast_all(recipe, strategies, machines, path, limits=False).forecasts:
        assert one.time is not None and one.memory is not None, one.why
        messages = sum(part.high for part in one.time.parts if part.name in LINKS)
        found[one.strategy.name] = {
            "seconds": [_rounded(one.time.low), _rounded(one.time.high)],
            "gib": [_rounded(size / GIB) for size in one.memory.needed],
            "messages": round(messages / one.time.high, 3),
            "limit": one.time.bottleneck,
        }
    return {name: found[name] for name in names}


def of_large(gpus: int) -> dict[str, dict[str, Any]]:
    """The same of Llama-3.3-70B. Four samples for each GPU: a pipeline has then four micro-batches or more."""
    return forecasts(gpus, LARGE, MESHES, 2 * SAMPLES)


def published() -> list[dict[str, Any]]:
    """Throughputs of several machines, from the records that hold the forecast (tests/test_forecast_speed.py)."""
    from tests.test_forecast_speed import RECORDS

    rows = []
    for record in RECORDS:
        if parse_machines(record.machines).num_machines > 1:
            low, high = record.range()
            rows.append(
                {
                    "name": record.name,
                    "source": record.source,
                    "strategy": record.strategy,
                    "gpus": parse_machines(record.machines).num_gpus,
                    "published": record.tokens_per_second,
                    "forecast": [round(low), round(high)],
                    "error": round(math.sqrt(low * high) / record.tokens_per_second - 1, 3),
                }
            )
    return rows


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def table(scale: dict[str, Any], few: str, many: str) -> list[str]:
    """Rows of Markdown: each strategy on few GPUs and on many."""
    lines = [
        f"| strategy | step on {few} | on {int(many):,} | messages on {few} | on {int(many):,} | GiB a GPU on {few} |"
        f" on {int(many):,} | limit |",
        "|" + " --- |" * 8,
    ]
    for name, first in scale[few].items():
        last = scale[many][name]
        cells = [name, *(f"{one['seconds'][0]:.2g} to {one['seconds'][1]:.2g} s" for one in (first, last))]
        cells += [f"{one['messages']:.0%}" for one in (first, last)]
        cells += ["{:.0f} to {:.0f}".format(*one["gib"]) for one in (first, last)]
        lines.append("| " + " | ".join([*cells, last["limit"]]) + " |")
    return lines


def render(results: dict[str, Any]) -> str:
    """The page, in Markdown."""
    scale, rows = results["scale"], results["published"]
    few, many = str(GPUS[0]), str(GPUS[-1])
    errors = [abs(row["error"]) for row in rows]
    lines = [
        "# At scale, on paper",
        "",
        f"What [`plan`](plan.md) forecasts for Llama-3.1-8B on {few} to {int(many):,} H100, eight to a machine, with a"
        f" network card of {FABRIC_GBITS} Gbit/s to a GPU. Each GPU has {SAMPLES} samples of 4,096 tokens in a step, so"
        " the global batch grows with the machines. **Nothing here was measured**; the forecast knows rates, and"
        " latencies by NCCL's own estimate, but no congested network, slow machine, or failure.",
        "",
        "![Seconds of a step, share of messages and memory over the number of GPUs, by strategy](at_scale.svg)",
        "",
        *table(scale, few, many),
    ]
    return "\n".join(
        [
            *lines,
            "",
            "The time is from everything overlapped at the best published rates to nothing overlapped at the worst;"
            " messages are their share of the latter. A ring sends the same from each GPU however many it has, so on"
            " paper the fast end stays, and what is sharded over all GPUs shrinks to nothing; but each message takes a"
            " step for each GPU, which is the slow end where weights are gathered over thousands. `hsdp` has a group"
            " in each machine: its memory does not shrink, and only its sums of gradients leave the machine, by a tree."
            " The gathers of `zero3` are counted as one a layer, and may be more.",
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
            f"python -m cookbook plan {LARGE} --gpus 4x8xH100 --strategy fsdp2_tp --strategy pp_fsdp2",
            f"python -m cookbook rehearse {LARGE} --strategy pp_fsdp2",
            "```",
            "",
            "## Against published runs of several machines",
            "",
            f"Tokens per second of each GPU. All {len(rows)} lie inside the forecast; its geometric middle is off by"
            f" {sum(errors) / len(errors):.0%} on average and {max(errors):.0%} at most. Records with fp8, or with"
            " pipeline or tensor parallel of other programs, are left out.",
            "",
            "| run | source | strategy here | GPUs | published | forecast | error of the middle |",
            "|" + " --- |" * 7,
            *(
                f"| {row['name']} | {row['source']} | {row['strategy']} | {row['gpus']} | {row['published']:,} |"
                f" {row['forecast'][0]:,} to {row['forecast'][1]:,} | {row['error']:+.0%} |"
                for row in rows
            ),
            "",
            "Written by `python benchmarks/at_scale.py` from data sheets, published rates and the"
            " [ledger](terms.md); no hardware took part.",
            "",
        ]
    )


def plot(results: dict[str, Any]) -> str:
    """The plot, as SVG."""
    matplotlib.use("svg")
    from matplotlib import pyplot

    settings = {"svg.hashsalt": "at scale", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure, (time, share, memory) = pyplot.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
        for name in STRATEGIES:
            rows = [results["scale"][str(gpus)][name] for gpus in GPUS]
            low, high = zip(*(row["seconds"] for row in rows), strict=True)
            (line,) = time.plot(GPUS, high, label=name)
            time.plot(GPUS, low, color=line.get_color(), linestyle=":")
            share.plot(GPUS, [100 * row["messages"] for row in rows], label=name)
            memory.plot(GPUS, [row["gib"][1] for row in rows], label=name)
        for axes, title in ((time, "seconds of a step"), (share, "messages, % of a step"), (memory, "GiB of a GPU")):
            axes.set(title=title, xlabel="GPUs")
            axes.set_xscale("log", base=2)
            axes.set_xticks(GPUS, [f"{gpus:,}" for gpus in GPUS])
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        figure.legend(*memory.get_legend_handles_labels(), loc="outside right center")
        time.text(0.02, 0.03, "dotted: all overlaps, best rates", transform=time.transAxes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def main() -> None:
    results = {"scale": {str(gpus): forecasts(gpus) for gpus in GPUS}, "published": published()}
    results["large"] = {str(gpus): of_large(gpus) for gpus in GPUS_OF_LARGE}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(results), encoding="utf-8")
    PLOT.write_text(plot(results), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
