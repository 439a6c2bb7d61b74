"""Problems of the hardware: the monitor's measurements compared with those of a healthy run."""

from collections.abc import Iterable
from statistics import mean, median
from typing import Any

from cookbook.commands.shared.history import History

XIDS = {
    13: "a kernel failed: the program's mistake, or the GPU's",
    31: "a kernel read or wrote where it must not: the program's mistake, or the GPU's",
    43: "the GPU stopped working for a program",
    45: "a program's work was taken from the GPU, as after another error",
    48: "an uncorrected memory error: reset the GPU",
    63: "a row of the memory is to be replaced: reset the GPU when the run has ended",
    64: "a row of the memory could not be replaced: replace the GPU",
    74: "an NVLink failed: look at its connection",
    79: "the GPU has fallen off the bus: look at its power, seat and heat",
    92: "many corrected memory errors",
    94: "an uncorrected memory error that ended one program: reset the GPU",
    95: "an uncorrected memory error that ended all programs: reset the GPU",
    119: "the GPU's own processor does not answer: reset the GPU",
    120: "the GPU's own processor failed: reset the GPU",
}
"""NVIDIA's driver reports errors by these numbers: "XID Errors" in NVIDIA's documentation of GPU deployment (r580)."""
LEAST_BUSY, MOST_CELSIUS, LEAST_MEMORY, MOST_HOST_MEMORY, LEAST_CLOCK = 90, 80, 0.7, 0.9, 0.9
"""Percent of the time that a GPU computes; degrees; shares of the GPU's and the host's memory; of the others' clock."""
LEAST_SENT = 0.1
"""Share of what the others send over NVLink. The stages of a pipeline differ, by less."""


def series(run: History) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """For each measured name, such as busy_percent, the points (minutes since the first line, value) of each rank's GPU
    ("rank 0") and of the machines ("CPU").
    """
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    begin = run.monitor[0]["time"] if run.monitor else 0.0
    for line in run.monitor:
        minutes = (line["time"] - begin) / 60
        for who, sample in _samples(line):
            for name, value in sample.items():
                if isinstance(value, int | float) and name != "rank":
                    points.setdefault(name, {}).setdefault(who, []).append((minutes, value))
    return points


def _samples(line: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    yield from ((f"rank {gpu['rank']}", gpu) for gpu in line.get("gpus", []))
    yield "CPU", line.get("cpu", {})


def findings(run: History) -> list[str]:
    """List the problems that the monitor measured, each with its remedy; empty if there is none or no measurement."""
    values = {
        name: {who: [value for _, value in points] for who, points in of_name.items()}
        for name, of_name in series(run).items()
    }
    return [*_of_xids(run), *_of_gpus(values), *_of_links(values), *_of_clocks(run, values), *_of_host(values)]


Values = dict[str, dict[str, list[float]]]


def _of_gpus(values: Values) -> Iterable[str]:
    gpus = {name: {who: of for who, of in by_who.items() if who != "CPU"} for name, by_who in values.items()}
    idle = {who: mean(busy) for who, busy in gpus.get("busy_percent", {}).items() if mean(busy) < LEAST_BUSY}
    if idle:
        yield f"GPU busy {_range(idle)} % of the time ({_who(idle)}), not {LEAST_BUSY}: see cookbook why-slow"
    hot = {who: max(heat) for who, heat in gpus.get("celsius", {}).items() if max(heat) >= MOST_CELSIUS}
    if hot:
        yield f"GPU at {_range(hot)} degrees ({_who(hot)}), not below {MOST_CELSIUS}: look at fans and air"
    total, shares = gpus.get("memory_total_gib", {}), {}
    for who, used in gpus.get("memory_gib", {}).items():
        shares[who] = max(used) / total[who][0] if total.get(who) else 1.0
    if shares and max(shares.values()) < LEAST_MEMORY:
        yield (
            f"GPU memory at most {max(shares.values()):.0%} used: a larger batch.micro_batch_size may fit"
            " (see cookbook plan)"
        )
    broken = {who: max(count) for who, count in gpus.get("uncorrected_errors", {}).items() if max(count)}
    if broken:
        yield f"uncorrected memory errors since its driver started: {_range(broken)} ({_who(broken)}): replace the GPU"


def _of_xids(run: History) -> Iterable[str]:
    """Errors that the driver reported, and rows of memory that wait to be replaced."""
    for xid, ranks in _times(run, "xids").items():
        yield f"Xid {xid} ({_who(ranks)}): {XIDS.get(xid, 'see NVIDIA, XID Errors')}"
    rows = _times(run, "remapping")
    if "failed" in rows:
        yield f"rows of GPU memory that could not be replaced ({_who(rows['failed'])}): replace the GPU"
    if "pending" in rows:
        yield f"rows of GPU memory wait to be replaced ({_who(rows['pending'])}): reset the GPU after the run"


def _times(run: History, name: str) -> dict[Any, dict[str, float]]:
    """For each word or number that the monitor saw under a name, in how many lines it saw it of each rank."""
    counts: dict[Any, dict[str, float]] = {}
    for line in run.monitor:
        for gpu in line.get("gpus", []):
            value = gpu.get(name, [])
            for word in [value] if isinstance(value, str) else value:
                ranks = counts.setdefault(word, {})
                ranks[f"rank {gpu['rank']}"] = ranks.get(f"rank {gpu['rank']}", 0) + 1
    return counts


def _of_links(values: Values) -> Iterable[str]:
    """Links that fail, and a GPU that sends nothing over its NVLinks while the others do."""
    failing = (("nvlink_recoveries", "NVLinks failed and recovered"), ("pcie_replays", "PCIe messages were sent again"))
    for name, what in failing:
        times = {who: max(of) for who, of in values.get(name, {}).items() if max(of)}
        if times:
            yield f"{what} {_range(times)} times ({_who(times)}): look at the GPU's seat and cables"
    # The median of the ranks is the measure: how much a run sends depends on its strategy and model.
    sent = {who: mean(of) for who, of in values.get("nvlink_mb_s", {}).items()}
    silent = {who: rate for who, rate in sent.items() if rate < LEAST_SENT * median(sent.values())}
    if silent:
        yield (
            f"NVLinks carried {_range(silent)} MB/s ({_who(silent)}), {median(sent.values()):,.0f} on the others:"
            " see nvidia-smi nvlink --status"
        )


def _of_clocks(run: History, values: Values) -> Iterable[str]:
    for reason, times in _times(run, "throttled").items():
        shares = {who: 100 * count / len(run.monitor) for who, count in times.items()}
        yield f"clocks lowered in {_range(shares)} % of the time ({_who(shares)}) by {reason}"
    clocks = {who: mean(clock) for who, clock in values.get("clock_mhz", {}).items()}
    usual = median(clocks.values()) if clocks else 0
    slow = {who: clock for who, clock in clocks.items() if clock < LEAST_CLOCK * usual}
    if slow:
        yield f"clock of {_range(slow)} MHz ({_who(slow)}), {usual:.0f} on the others: the slowest rank sets the pace"


def _of_host(values: Values) -> Iterable[str]:
    memory = {name: values.get(name, {}).get("CPU", []) for name in ("memory_gib", "memory_total_gib")}
    if memory["memory_gib"]:
        share = max(memory["memory_gib"]) / memory["memory_total_gib"][0]
        if share > MOST_HOST_MEMORY:
            yield f"host memory {share:.0%} used: the kernel ends processes when it is full"


def _who(values: dict[str, float]) -> str:
    names = list(values)
    return ", ".join(names) if len(names) < 5 else f"{len(names)} ranks, {names[0]} among them"


def _range(values: dict[str, float]) -> str:
    low, high = min(values.values()), max(values.values())
    return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f} to {high:.0f}"
