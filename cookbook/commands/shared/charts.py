"""Charts of a page: curves as SVG with words on their axes, and the script that shows values under the pointer."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.commands.shared.html_page import INKS, SOFT, Drawing, drawing, figure, ink, swatch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 2000
"""Points of a curve: more than a page has pixels."""
LEAST_SPAN = 0.02
"""Share of its largest value that an axis spans at least, so that noise does not fill a chart."""
MARGIN = 0.05
"""Room above and below the curves, in their height."""
MARKS = {"evaluation": ("v", "▾", 1.03), "save": ("s", "▪", 1.09)}
"""Small marks above a chart: as matplotlib draws them, in a sentence, and at which height, in that of the axes."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve of a chart."""

    name: str
    points: list[tuple[float, float]]
    has_dots: bool = False
    """True if its points are marked: few ones, such as evaluations."""
    ink: int = 0
    is_dashed: bool = False
    floor: list[float] | None = None
    """Lower edge of an area, whose upper edge is the points; it is filled between both."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over one another."""

    title: str
    lines: Sequence[Line]
    prefix: str
    """Beginning of the ids of its drawing."""
    across: str
    """Word at the horizontal axis."""
    along: str
    """Word at the vertical axis: a unit, or a name."""
    from_zero: bool = False
    ends: tuple[float, float] | None = None
    """Places from which to which the horizontal axis goes at least; None: those of the points."""
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Places of small marks, by a name of `MARKS`."""
    unusual: Sequence[float] = ()
    """Places of vertical lines."""
    starts: Sequence[float] = ()
    """Places of dotted ones."""
    height: float = 3.0


def chart(of: Chart) -> str:
    """The figure of a chart. Its legend has the last value of each curve, and with the script that at the pointer."""
    lines = [line if line.floor is not None else _thin(line) for line in of.lines]  # of an area both edges have as many
    drawn = curves(of, lines)
    return figure(of.title, drawn.svg, _values_at_the_end(lines), _for_the_script(of, lines, drawn))


def _values_at_the_end(lines: Sequence[Line]) -> str:
    items = "".join(
        f"<li>{swatch(line.ink)}{escape(line.name)} <b>{f'{_values(line)[-1][1]:.5g}' if line.points else ''}</b></li>"
        for line in lines
    )
    return f'<ul class="legend"><li class="soft">at the end</li>{items}</ul>'


def _thin(line: Line) -> Line:
    return Line(**{**vars(line), "points": thin(line.points)})


def _values(line: Line) -> list[tuple[float, float]]:
    """The points of a curve; of an area the height of each."""
    if line.floor is None:
        return line.points
    return [(x, y - low) for (x, y), low in zip(line.points, line.floor, strict=True)]


def _for_the_script(of: Chart, lines: Sequence[Line], drawn: Drawing) -> str:
    """The data of charts.js: values as they were measured, and their places in the drawing."""
    curves = [
        {
            "id": f"{of.prefix}curve-{i}",
            "points": _values(line),
            "ink": line.ink % INKS,
            "is_area": line.floor is not None,
            "can_smooth": not (line.has_dots or line.floor),
        }
        for i, line in enumerate(lines)
    ]
    places = {"across": of.across, "marks": {name: [*places] for name, places in of.marks.items()}}
    return json.dumps({**places, "box": drawn.box, "x": drawn.x, "y": drawn.y, "lines": curves}, separators=(",", ":"))


def curves(of: Chart, lines: Sequence[Line]) -> Drawing:
    """The drawing of a chart's lines."""
    from matplotlib.ticker import EngFormatter, FuncFormatter

    def draw(axes: "Axes") -> None:
        for place in of.starts:
            axes.axvline(place, color=SOFT, linestyle=":", linewidth=1.5)
        for place in of.unusual:
            axes.axvline(place, color=ink(1), linewidth=1)
        for i, line in enumerate(lines):
            x, y = zip(*line.points, strict=True) if line.points else ((), ())
            style = "--" if line.is_dashed else "-"
            if line.floor is not None:
                axes.fill_between(x, line.floor, y, color=ink(line.ink), alpha=0.35, linewidth=0)
            (curve,) = axes.plot(x, y, color=ink(line.ink), linestyle=style, linewidth=1.6)
            if line.has_dots or len(x) == 1:
                curve.set(marker="o", markersize=3.5)
            curve.set_gid(f"curve-{i}")
        limits = _limits([y for line in lines for _, y in line.points], from_zero=of.from_zero)
        if limits is not None:
            axes.set_ylim(*limits)
        if of.ends is not None:
            axes.update_datalim([(place, 0.0) for place in of.ends], updatey=False)
        axes.autoscale_view(scaley=False)
        axes.set_xlim(axes.get_xlim())  # marks do not widen it
        for name, places in of.marks.items():
            symbol, _, height = MARKS[name]
            left, right = axes.get_xlim()
            within = [place for place in places if left <= place <= right]
            axes.plot(
                within,
                [height] * len(within),
                symbol,
                color=SOFT,
                markersize=4,
                transform=axes.get_xaxis_transform(),
                clip_on=False,
                gid=f"mark-{name}",
            )
        # Matplotlib's own would write a factor above the axis, where the marks are.
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        if axes.get_xlim()[1] >= 1000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # which calls half a minute 500m
        axes.set_xlabel(of.across, parse_math=False)
        axes.set_ylabel(of.along, parse_math=False)

    return drawing(draw, of.prefix, of.height)


def _limits(values: Iterable[float], *, from_zero: bool) -> tuple[float, float] | None:
    """Ends of the vertical axis; None if matplotlib is to choose them."""
    finite = [value for value in values if isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    lacking = LEAST_SPAN * max(abs(low), abs(high)) - (high - low)
    if high == low == 0.0:
        lacking = 1.0
    if lacking > 0:
        low, high = low - lacking / 2, high + lacking / 2
    room = MARGIN * (high - low)
    low, high = low - room * (not from_zero or low < 0), high + room
    return (low, high) if isfinite(high - low) else None


def thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MOST_POINTS`: the least and the greatest of each part of a longer curve, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return points
    edges = [round(i * len(points) / (MOST_POINTS // 2)) for i in range(MOST_POINTS // 2 + 1)]
    kept = []
    for begin, end in pairwise(edges):
        part = range(begin, end)
        ends = {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
        kept += [points[i] for i in sorted(ends)]
    return kept


SMOOTHING = (
    '<p class="smoothing soft" hidden><label>Smoothing <input type="range" min="0" max="0.99" step="0.01" value="0">'
    "</label> <output>0</output></p>"
)
"""The slider, which the script shows."""


def script() -> str:
    """The script of a page with charts."""
    return Path(__file__).with_name("charts.js").read_text(encoding="utf-8")
