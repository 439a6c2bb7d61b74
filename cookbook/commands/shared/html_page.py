"""One HTML file with drawings as SVG, without scripts and without a network: its style, its parts and its curves."""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 2000
"""Points of a curve: more than a page has pixels."""
INKS = 8
"""Colours of lines; a ninth line has the first again."""
STYLE = """\
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --rule: #d1d9e0; --page: #fff; --panel: #f6f8fa;
--line-0: #0969da; --line-1: #cf222e; --line-2: #1a7f37; --line-3: #8250df; --line-4: #bc4c00; --line-5: #0a7d91;
--line-6: #bf3989; --line-7: #6e5a00 }
@media (prefers-color-scheme: dark) { :root { --ink: #f0f6fc; --soft: #9198a1; --rule: #3d444d; --page: #0d1117;
--panel: #151b23; --line-0: #4493f8; --line-1: #f85149; --line-2: #3fb950; --line-3: #ab7df8; --line-4: #f0883e;
--line-5: #39c5cf; --line-6: #f778ba; --line-7: #d29922 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 84rem; background: var(--page); color: var(--ink);
font: 16px/1.45 system-ui, sans-serif }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { margin: 2rem 0 .7rem; font-size: 1.15rem }
h3 { margin: 0 0 .3rem; font-size: .95rem; overflow-wrap: anywhere }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)) }
figure { margin: 0; padding: .8rem; background: var(--panel); border: 1px solid var(--rule); border-radius: 8px }
svg { display: block; width: 100%; height: auto }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin: .3rem 0 0; padding: 0; list-style: none;
font-size: .85rem; overflow-wrap: anywhere }
.legend i { display: inline-block; width: 1.1em; height: .25em; margin-right: .4em; vertical-align: middle }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule) }
td { white-space: pre-line }
thead th { color: var(--soft) } .soft { color: var(--soft) }
.answer { overflow-x: auto; font-size: .85rem }"""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve of a chart."""

    name: str
    points: list[tuple[float, float]]
    has_dots: bool = False
    """Whether its points are marked: few ones, such as evaluations."""
    ink: int = 0
    is_dashed: bool = False
    floor: list[float] | None = None
    """Lower edge of an area, whose upper edge is the points; it is filled between both."""


def legend(names: Iterable[tuple[int, str]]) -> str:
    """Names with the number of their colour."""
    items = (f'<li><i style="background: var(--line-{ink % INKS})"></i>{escape(name)}</li>' for ink, name in names)
    return f'<ul class="legend">{"".join(items)}</ul>'


def curves(lines: Sequence[Line], prefix: str, marks: Sequence[int], starts: Sequence[int]) -> str:
    """A drawing of curves, whose ids begin with `prefix`.

    Args:
        marks: places of vertical lines.
        starts: places of dotted ones.
    """
    from matplotlib.ticker import EngFormatter

    def draw(axes: "Axes") -> None:
        for step in starts:
            axes.axvline(step, color=SOFT, linestyle=":", linewidth=1.5)
        for step in marks:
            axes.axvline(step, color=ink(1), linewidth=1)
        for i, line in enumerate(lines):
            points = thinned(line.points) if line.floor is None else line.points  # of an area both edges have as many
            x, y = zip(*points, strict=True) if points else ((), ())
            style = "--" if line.is_dashed else "-"
            if line.floor is not None:
                axes.fill_between(x, line.floor, y, color=ink(line.ink), alpha=0.35, linewidth=0)
            (drawn,) = axes.plot(x, y, color=ink(line.ink), linestyle=style, linewidth=1.6)
            if line.has_dots or len(x) == 1:
                drawn.set(marker="o", markersize=3.5)
            drawn.set_gid(f"curve-{i}")
        if axes.get_xlim()[1] >= 1000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # which calls half a minute 500m

    return drawing(draw, prefix)


# One colour for each role, which CSS variables then replace; none is black, which SVG leaves out.
SOFT, RULE, STRONG = "#00aa01", "#00aa02", "#00aa03"


def ink(number: int) -> str:
    """The colour of a role in a drawing."""
    return f"#00bb{number % INKS:02x}"


def drawing(draw: Callable[["Axes"], None], prefix: str, height: float = 3.0) -> str:
    """A drawing by `draw` with the colours of `ink`, as SVG whose colours follow the page.

    Args:
        prefix: beginning of its ids.
        height: in inches; the width is 5.4.
    """
    from matplotlib import rc_context  # takes a second
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "page",
        "font.family": "sans-serif",
        "font.size": 10,
        "path.simplify": False,  # each of the points of `thinned` is there
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": RULE,
        "axes.labelcolor": SOFT,
        "text.color": SOFT,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
    }
    with rc_context(settings):
        figure = Figure(figsize=(5.4, height), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(color=RULE, linewidth=0.6)
        axes.set_axisbelow(True)
        draw(axes)
        file = io.StringIO()
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' xmlns(:\w+)?="[^"]*"| width="[\d.]+pt"| height="[\d.]+pt"', "", text)  # HTML's own
    # The drawings share one HTML page, where an id of one would be found from another.
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", text)
    for i in range(INKS):
        text = text.replace(ink(i), f"var(--line-{i})")
    for colour, variable in ((SOFT, "soft"), (RULE, "rule"), (STRONG, "ink")):
        text = text.replace(colour, f"var(--{variable})")
    return text


def figure(title: str, drawn: str, names: str = "") -> str:
    """A drawing under its title.

    Args:
        names: its legend.
    """
    return f"<figure><h3>{escape(title)}</h3>{drawn}{names}</figure>"


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls sideways where there is no room."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    shown = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table>{shown}<tbody>{lines}</tbody></table></div>'


def grid(charts: Iterable[str]) -> str:
    """Figures beside one another, as many as there is room for."""
    return f'<div class="charts">{"".join(charts)}</div>'


def beginning(command: str) -> str:
    """How each page of a command begins, by which it knows its own."""
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="cookbook {command}">"""


def page_text(command: str, title: str, body: Iterable[str]) -> str:
    """A whole page.

    Args:
        command: that writes it.
    """
    return "\n".join(
        (
            beginning(command),
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
            *body,
            "</body>\n</html>\n",
        )
    )
