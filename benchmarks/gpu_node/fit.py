"""Constants of the forecast, and compiling by default, beside a node.json: fit.py FILE

Reads one that run.py wrote on real GPUs, and prints each constant of cookbook/forecast/step_time.py that it bears on,
as it is and as it was measured, and for each strategy whether model.compile passed. Changes nothing: a measured value
outside of a range moves its nearer end, by hand, since one machine is one machine (docs/on_gpu.md).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cookbook.forecast import step_time  # noqa: E402
from cookbook.system.hardware import Gpu, Machines, find_gpu  # noqa: E402

RINGS = ("all_reduce", "all_gather", "reduce_scatter")
ONE_AFTER_ANOTHER = ("GPU memory", "update", "activations to the host")
"""Parts of a step that take the GPU's own time beside the products."""


@dataclass(frozen=True)
class Measured:
    """Range of a constant on a node: from `low` to `high`, as is `now`."""

    constant: str
    now: tuple[float, float]
    low: float
    high: float
    why: str

    @property
    def is_inside(self) -> bool:
        return self.now[0] <= self.low and self.high <= self.now[1]


def rows_of(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for result in node["results"] for row in result["figures"].get("rows", ())]


def links(node: dict[str, Any], gpu: Gpu) -> Iterator[Measured]:
    """Shares of a link's rate, and the latency of a step around a ring."""
    rows, count = rows_of(node), node["cards"] * node["machines"]
    rings = [row for row in rows if len(row["ranks"]) == count and row["what"] in RINGS]
    if not rings:
        return
    largest, smallest = (of(row["mebibytes"] for row in rings) for of in (max, min))
    speeds = [row["bus_gb"] for row in rings if row["mebibytes"] == largest]
    if node["machines"] > 1:
        slow, fast = Machines.fabric_gbits
        worst, best = step_time.FABRIC_SHARE
        reached = [speed * 8 / node["cards"] for speed in speeds]
        why = f"Gbit/s of the network for each GPU, rings of {largest} MiB"
        yield Measured("fabric_gbits x FABRIC_SHARE", (slow * worst, fast * best), min(reached), max(reached), why)
        return
    link, rate = ("PCIe", gpu.host_link) if gpu.nvlink is None else ("NVLink", gpu.nvlink)
    name = "PCIE_PEER_SHARE" if gpu.nvlink is None else "NVLINK_SHARE"
    shares = [speed * 1e9 / rate for speed in speeds]
    why = f"rings of {largest} MiB over {count} GPUs, {rate / 1e9:.0f} GB/s by the data sheet"
    yield Measured(name, getattr(step_time, name), min(shares), max(shares), why)
    if count < 3 or smallest == largest:
        return

    def latency(ranks: int) -> float:
        """Seconds of a small all-gather beside its bytes; of pairs their median."""
        chosen = [row for row in rows if len(row["ranks"]) == ranks and row["what"] == "all_gather"]
        taken = {
            size: statistics.median(row["seconds"] for row in chosen if row["mebibytes"] == size)
            for size in (smallest, largest)
        }
        return (taken[smallest] - taken[largest] * smallest / largest) / (1 - smallest / largest)

    hop = (latency(count) - latency(2)) / (count - 2)
    why = f"all-gathers of {smallest} MiB over {count} GPUs and over pairs; what the host takes is in both"
    yield Measured(f"HOP_LATENCY['{link}']", step_time.HOP_LATENCY[link], hop, hop, why)


def products(node: dict[str, Any], gpu: Gpu) -> Iterator[Measured]:
    """The share of the peak of products on one GPU: of what a step has left when the other kernels have run."""
    for result in node["results"]:
        figures = result["figures"]
        if result["part"] != "widths" or figures.get("processes") != 1 or "mfu" not in figures:
            continue
        step = figures["step_seconds"]
        rest = [part for part in (figures["step_forecast"] or {}).get("parts", ()) if part["name"] in ONE_AFTER_ANOTHER]
        left = [step - sum(part[end] for part in rest) for end in ("low", "high")]
        if min(left) <= 0:
            continue
        low, high = (figures["mfu"] * step / seconds for seconds in left)
        name = f"EFFICIENCY['{step_time.kind_of(gpu)}']"
        yield Measured(
            name, step_time.share_of_peak(gpu), low, high, f"{result['name']}: {figures['mfu']:.1%} of the peak"
        )


def beside(node: dict[str, Any]) -> Iterator[str]:
    """Runs of real widths whose time or memory the forecast misses."""
    for result in node["results"]:
        figures = result["figures"]
        if result["part"] != "widths" or "step_seconds" not in figures:
            continue
        low, high = ((figures["step_forecast"] or {}).get(end) for end in ("low", "high"))
        if low is not None and not low <= figures["step_seconds"] <= high:
            taken = figures["step_seconds"]
            yield f"{result['name']}: a step took {taken:.3f} s, the forecast has {low:.3f} to {high:.3f}"
        if figures.get("forecast"):
            expected = figures["forecast"]["allocated"] / 2**30
            error = expected / figures["peak_memory_gib"] - 1
            if abs(error) > 0.05:
                taken = figures["peak_memory_gib"]
                yield f"{result['name']}: allocated {taken:.2f} GiB, the forecast has {expected:.2f} ({error:+.1%})"


def compiling(node: dict[str, Any]) -> dict[str, list[str]]:
    """The strategies under which `model.compile` passed, failed or was skipped, with what was said."""
    names: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for result in node["results"]:
        if result["part"] == "compiled":
            ratio = result["figures"].get("times_as_fast")
            names[result["state"]].append(f"{result['name']} ({ratio:.2f} times as fast)" if ratio else result["name"])
    return names


def report(node: dict[str, Any]) -> Iterator[str]:
    """
    Raises:
        ValueError: it has nothing to fit.
    """
    if node["is_simulated"]:
        raise ValueError("it comes from simulated GPUs, which measure nothing")
    gpu = find_gpu(node["gpu"])
    if gpu is None or gpu.half_flops is None:
        raise ValueError(f"no row for {node['gpu']} in GPUS of cookbook/system/hardware.py; add one, with its sheet")
    failed = [f"{result['part']}: {result['name']}" for result in node["results"] if result["state"] == "failed"]
    yield f"{node['machines']} x {node['cards']} x {gpu.name}, {node['date']}, commit {node['commit']}"
    yield f"failed: {'; '.join(failed) or 'nothing'}"
    yield ""
    for measure in (*links(node, gpu), *products(node, gpu)):
        verdict = "inside" if measure.is_inside else "OUTSIDE"
        now, here = (
            " to ".join(f"{value:.3g}" for value in ends) for ends in (measure.now, (measure.low, measure.high))
        )
        yield f"{verdict:8}{measure.constant}: {now}; here {here} ({measure.why})"
    yield from (f"MISSED  {line}" for line in beside(node))
    yield ""
    for state, names in compiling(node).items():
        yield f"model.compile {state}: {', '.join(names) or 'nowhere'}"
    yield "what to change for each line: docs/on_gpu.md, When a node.json arrives"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="node.json")
    path = parser.parse_args().file
    try:
        print("\n".join(report(json.loads(path.read_text()))))
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {path}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
