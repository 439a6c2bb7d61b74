"""Divides the time of profiled steps: into phases of a step, and in each what computed, copied, communicated or waited.

Works on plain intervals, as torch's profiler records them on a CPU or a GPU.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cookbook.system.console import Row, page

PHASE, LAYER = "run: ", "layer: "
"""Prefixes of our annotations."""
STEP = "step"
PARTS = ("compute", "copies", "communication", "other")
"""In a phase, communication is what neither computing nor copying hides; other is Python and waiting for the host."""
COMMUNICATION = re.compile(r"(gloo|nccl|mpi):|c10d::|_c10d_functional::|nccl(Dev)?Kernel|simulated_nccl:")
COPIES = re.compile(r"aten::(copy_|_to_copy|_pin_memory)$|Memcpy|Memset")
CALLERS = re.compile(r"(torch::)?autograd::|torch\.distributed\.|(?!.*::)")
"""On the host, what only calls operations, and in which a hook may wait: autograd's nodes and functions in Python have
no namespace."""
MOST_ROWS = 12


@dataclass(frozen=True)
class Event:
    """An interval of the profiler, in nanoseconds."""

    name: str
    start: int
    end: int
    thread: int = 0
    is_note: bool = False
    """An annotation and no operation."""
    is_async: bool = False
    """Belongs to no thread, as gloo's work."""
    on_device: bool = False
    sequence: int = -1
    """Autograd's number, the same for an operation and its backward."""
    link: int = 0
    """Number shared by an operation of the host and the GPU's kernels that it launched; 0: none."""


def divide(events: list[Event], num_steps: int) -> dict[str, Any]:
    """Seconds a step: `seconds` in all; `phases`, each with `PARTS`; `hidden`, communication that is hidden;
    `operations`, `communications` and `layers`, each by name.

    Args:
        events: of one process, within whole steps. With events of a GPU, those alone are the work.
    """
    has_device = any(event.on_device and not event.is_note for event in events)
    work = [event for event in events if event.on_device == has_device]
    phases = [event for event in events if event.name.startswith(PHASE) and not event.on_device]
    if has_device:
        phases = [*_on_device(events, phases), *(phase for phase in phases if phase.name == PHASE + STEP)]
    stretches = list(innermost(work))
    changes: list[tuple[int, int, str]] = []
    operations: Counter[str] = Counter()
    for name, start, end in stretches:
        if part := part_of(name, on_device=has_device):
            changes += [(start, 1, part), (end, -1, part)]
            operations[name] += end - start
    communications: Counter[str] = Counter()
    for event in work:
        if event.is_async and COMMUNICATION.match(event.name):
            changes += [(event.start, 1, "communication"), (event.end, -1, "communication")]
            communications[event.name] += event.end - event.start
    for event in phases:
        name = event.name.removeprefix(PHASE)
        changes += [(event.start, 1, PHASE + name), (event.end, -1, PHASE + name)]
    sums, hidden = _sweep(changes)
    scale = 1e-9 / num_steps
    by_phase = {phase: {part: parts[part] * scale for part in PARTS} for phase, parts in sums.items()}
    return {
        "steps": num_steps,
        "seconds": sum(sum(parts.values()) for parts in by_phase.values()),
        "phases": by_phase,
        "hidden": hidden * scale,
        "operations": _largest(operations, scale),
        "communications": _largest(communications, scale),
        "layers": _of_layers(events, scale),
    }


def _on_device(events: list[Event], phases: list[Event]) -> Iterator[Event]:
    """The phases on the GPU's clock, which runs behind the host's: each kernel belongs to the phase in which the host
    launched it, from whatever thread (the backward has its own); while there is none, the host's phase counts.
    """
    launched = {event.link: event.start for event in events if event.link and not event.on_device}
    inner = sorted((phase for phase in phases if phase.name != PHASE + STEP), key=lambda phase: phase.start)
    starts, before = [phase.start for phase in inner], min(phase.start for phase in phases) if phases else 0

    def at(time: int) -> Event | None:
        number = bisect_right(starts, time) - 1
        return inner[number] if number >= 0 and time <= inner[number].end else None

    def waiting(start: int, end: int) -> Iterator[Event]:
        for phase in inner[max(0, bisect_right(starts, start) - 1) : bisect_left(starts, end)]:
            if max(phase.start, start) < min(phase.end, end):
                yield replace(phase, start=max(phase.start, start), end=min(phase.end, end))

    kernels = (event for event in events if event.on_device and not event.is_note)
    for kernel in sorted(kernels, key=lambda event: event.start):
        yield from waiting(before, kernel.start)
        if kernel.end > before and (phase := at(launched.get(kernel.link, kernel.start))):
            yield replace(phase, start=max(before, kernel.start), end=kernel.end)
        before = max(before, kernel.end)
    yield from waiting(before, max((phase.end for phase in phases), default=before))


def part_of(name: str, *, on_device: bool) -> str | None:
    """The part of a step that an operation's own time counts for; None for what is no work."""
    if COMMUNICATION.match(name):
        return "communication"
    if COPIES.match(name):
        return "copies"
    return "compute" if on_device or not CALLERS.match(name) else None


def innermost(events: Iterable[Event]) -> Iterator[tuple[str, int, int]]:
    """The own time of each operation: stretches in which no other one inside it runs."""
    by_thread: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if not event.is_async and not (event.is_note and event.on_device):
            by_thread[event.thread].append(event)
    for of_thread in by_thread.values():
        of_thread.sort(key=lambda event: (event.start, -event.end))
        stack: list[Event] = []
        at = 0
        last = Event("", of_thread[-1].end + max(event.end for event in of_thread), 0)  # after all, to empty the stack
        for event in [*of_thread, last]:
            while stack and stack[-1].end <= event.start:
                top = stack.pop()
                if not top.is_note and top.end > at:
                    yield top.name, at, top.end
                at = max(at, top.end)
            if stack and not stack[-1].is_note and event.start > at:
                yield stack[-1].name, at, event.start
            at = max(at, event.start)
            stack.append(event)


def _sweep(changes: list[tuple[int, int, str]]) -> tuple[dict[str, Counter[str]], int]:
    """Nanoseconds of each phase by part, and of communication that is hidden behind work."""
    changes.sort(key=lambda change: change[0])
    running: Counter[str] = Counter()
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    hidden, before = 0, 0
    for at, change, what in changes:
        open_phases = [name for name, count in running.items() if count and name.startswith(PHASE)]
        if at > before and open_phases:
            inner = [name for name in open_phases if name != PHASE + STEP]
            phase = (inner[-1] if inner else open_phases[0]).removeprefix(PHASE)
            part = next((part for part in PARTS[:3] if running[part]), "other")
            sums[phase][part] += at - before
            if part != "communication" and running["communication"]:
                hidden += at - before
        before = at
        running[what] += change
        if not running[what]:
            del running[what]  # so that the last one in it is the innermost
    return sums, hidden


def _largest(sums: Counter[str], scale: float) -> dict[str, float]:
    return {name: time * scale for name, time in sums.most_common(MOST_ROWS)}


def _of_layers(events: list[Event], scale: float) -> dict[str, dict[str, float]]:
    """Seconds of each annotated layer, forward and backward, on the host's clock."""
    host = sorted((event for event in events if not event.on_device), key=lambda event: (event.start, -event.end))
    layers: dict[str, Counter[str]] = defaultdict(Counter)
    layer_of: dict[int, str] = {}
    inside: Event | None = None
    for event in host:
        if event.name.startswith(LAYER):
            inside = event
            layers[event.name.removeprefix(LAYER)]["forward"] += event.end - event.start
        elif event.sequence >= 0 and event.name.startswith("autograd::engine::evaluate_function"):
            if layer := layer_of.get(event.sequence):
                layers[layer]["backward"] += event.end - event.start
        elif event.sequence >= 0 and inside and event.thread == inside.thread and event.end <= inside.end:
            layer_of[event.sequence] = inside.name.removeprefix(LAYER)
    return {name: {part: time * scale for part, time in parts.items()} for name, parts in layers.items()}


def in_words(record: dict[str, Any], title: str) -> str:
    """The division as a table."""
    total = record["seconds"] or 1e-9
    rows: list[Row] = [f"{title}: {total:.3f} s a step", ("", *PARTS, "all")]
    for phase, parts in record["phases"].items():
        rows.append((phase, *(_share(parts[part], total) for part in PARTS), _share(sum(parts.values()), total)))
    sums = [sum(parts[part] for parts in record["phases"].values()) for part in PARTS]
    rows.append(("all", *(_share(time, total) for time in sums), _share(total, total)))
    exposed, hidden = sums[PARTS.index("communication")], record["hidden"]
    if exposed + hidden:
        share = f"{hidden / (exposed + hidden):.0%} hidden behind work"
        rows.append(f"  communication: {exposed + hidden:.3f} s a step, {share}")
    lines = [page(*rows)]
    for what in ("operations", "communications"):
        if record[what]:
            lines.append(page(f"  {what}", *((n, _share(t, total)) for n, t in record[what].items()), indent=4))
    if record["layers"]:
        layers = [
            (name, *(_share(of.get(p, 0.0), total) for p in LAYER_PARTS)) for name, of in record["layers"].items()
        ]
        lines.append(page(("layers", *LAYER_PARTS), *layers, indent=2))
    return "\n".join(lines)


LAYER_PARTS = ("forward", "backward")


def _share(seconds: float, total: float) -> str:
    return f"{100 * seconds / total:.1f} %" if seconds else "-"
