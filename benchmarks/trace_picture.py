"""Draws a profiled step from the traces of its ranks, as docs/trace.svg: what each did when.

python benchmarks/trace_picture.py outputs/run/profile docs/trace.svg
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from cookbook.system.step_phases import COMMUNICATION, PARTS, PHASE, STEP, Event, innermost, part_of

WIDTH, LEFT, LANE, GAP, COLUMN = 880, 140, 20, 8, 2
"""Pixels; each column of a lane is filled to the share of its time."""
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600; font-size: 14px }
.small { fill: #59636e } .lane { fill: #8c959f; fill-opacity: .12 } .grid { stroke: #8c959f; stroke-opacity: .35 }
.phase { fill: #8c959f; fill-opacity: .3; stroke: #8c959f }
.compute { fill: #0969da } .copies { fill: #9a6700 } .communication { fill: #cf222e } .other { fill: #8c959f }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .small { fill: #9198a1 }
.compute { fill: #4493f8 } .copies { fill: #d29922 } .communication { fill: #f85149 }
}"""

Stretch = tuple[float, float]


def read_trace(path: Path) -> list[Event]:
    """The intervals of one rank, in nanoseconds of the machine's clock."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    whole = [event for event in events if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")]
    main = next(event["tid"] for event in whole if event["name"] == PHASE + STEP)
    return [
        Event(
            name=event["name"],
            start=round(event["ts"] * 1000),
            end=round((event["ts"] + event["dur"]) * 1000),
            thread=event["tid"],
            is_note=event["cat"] == "user_annotation",
            is_async=event["tid"] != main and bool(COMMUNICATION.match(event["name"])),
        )
        for event in whole
    ]


def stretches(events: list[Event], step: Event) -> dict[str, list[Stretch]]:
    """When a rank did each of `PARTS` in a step, each as stretches that do not overlap; `other` is none of them."""
    parts: dict[str, list[Stretch]] = defaultdict(list)
    work = [event for event in events if event.start < step.end and event.end > step.start]
    for name, start, end in innermost(work):
        if part := part_of(name, on_device=False):
            parts[part].append((start, end))
    parts["communication"] += [(event.start, event.end) for event in work if event.is_async]
    united = {part: list(_union(parts[part], step)) for part in PARTS[:-1]}
    busy = _union([stretch for part in united.values() for stretch in part], step)
    edges = [step.start, *(edge for stretch in busy for edge in stretch), step.end]
    return united | {PARTS[-1]: [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]}


def _union(parts: list[Stretch], step: Event) -> Iterator[Stretch]:
    open_start: float = step.start
    open_end: float = step.start
    for start, end in sorted(parts):
        start, end = max(start, step.start), min(end, step.end)
        if start > open_end:
            if open_end > open_start:
                yield open_start, open_end
            open_start, open_end = start, end
        open_end = max(open_end, end)
    if open_end > open_start:
        yield open_start, open_end


def shares(pieces: list[Stretch], begin: float, end: float, columns: int) -> list[float]:
    """How much of each of equally long columns from `begin` to `end` the stretches fill."""
    each = (end - begin) / columns
    filled = [0.0] * columns
    for start, stop in pieces:
        for column in range(max(0, int((start - begin) / each)), min(columns, int((stop - begin) / each) + 1)):
            left, right = begin + column * each, begin + (column + 1) * each
            filled[column] += max(0.0, min(stop, right) - max(start, left)) / each
    return filled


def draw(traces: list[Path], title: str) -> str:
    """The first profiled step of these ranks of one machine, as SVG."""
    ranks = [read_trace(path) for path in traces]
    steps = [min((e for e in events if e.name == PHASE + STEP), key=lambda e: e.start) for events in ranks]
    begin, end = min(step.start for step in steps), max(step.end for step in steps)
    columns, block = WIDTH // COLUMN, (len(PARTS) + 1) * (LANE + GAP) + 22
    height = 46 + len(ranks) * block + 24

    def x(time: float) -> float:
        return LEFT + WIDTH * (time - begin) / (end - begin)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" role="img"'
        f' aria-label="A step on {len(ranks)} ranks">',
        f"<style>{STYLE}</style>",
        f'<text x="16" y="24" class="title">{title}</text>',
    ]
    for rank, (events, step) in enumerate(zip(ranks, steps, strict=True)):
        top = 46 + rank * block
        lines.append(f'<text x="16" y="{top + 14}" class="title">rank {rank}</text>')
        for event in events:
            if event.name.startswith(PHASE) and event.name != PHASE + STEP and step.start <= event.start < step.end:
                name, wide = event.name.removeprefix(PHASE), x(event.end) - x(event.start)
                place = f'x="{x(event.start):.1f}" y="{top}" width="{wide:.1f}" height="{LANE}"'
                lines.append(f'<rect {place} class="phase"><title>{name}</title></rect>')
                if wide > 8 * len(name):
                    middle = x((event.start + event.end) / 2)
                    lines.append(f'<text x="{middle:.1f}" y="{top + 14}" text-anchor="middle">{name}</text>')
        parts = stretches(events, step)
        for number, part in enumerate(PARTS, start=1):
            base = top + number * (LANE + GAP) + LANE
            share = sum(stop - start for start, stop in parts[part]) / (step.end - step.start)
            words = f"{part} {share:.0%}"
            lines.append(f'<text x="{LEFT - 8}" y="{base - 5}" text-anchor="end" class="small">{words}</text>')
            lines.append(f'<rect x="{LEFT}" y="{base - LANE}" width="{WIDTH}" height="{LANE}" class="lane"/>')
            path = "".join(
                f"M{LEFT + i * COLUMN} {base}v-{filled * LANE:.1f}h{COLUMN}v{filled * LANE:.1f}z"
                for i, filled in enumerate(shares(parts[part], begin, end, columns))
                if filled * LANE >= 0.05
            )
            lines.append(f'<path d="{path}" class="{part}"/>')
    bottom = height - 22
    every = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 1 << 60) if size * 1e6 * 10 > end - begin)
    for tick in range(0, int((end - begin) / 1e6) + 1, every):
        at = x(begin + tick * 1e6)
        lines.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="40" y2="{bottom}" class="grid"/>')
        lines.append(f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle" class="small">{tick} ms</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
