"""One HTML file that needs no network: its style, its parts, and drawings as SVG."""

import base64
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS_AN_INCH = 72
"""The unit of a drawing."""
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
.head { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)) }
.head > * { min-width: 0 }
figure { margin: 0; padding: .8rem; background: var(--panel); border: 1px solid var(--rule); border-radius: 8px }
svg { display: block; width: 100%; height: auto }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin: .3rem 0 0; padding: 0; list-style: none;
font-size: .85rem; overflow-wrap: anywhere }
.legend i { display: inline-block; width: 1.1em; height: .25em; margin-right: .4em; vertical-align: middle }
.legend b { font-variant-numeric: tabular-nums; font-weight: 600 }
figure[data-chart] svg { cursor: crosshair; touch-action: pan-y } svg .raw { opacity: .25 }
.pointer { pointer-events: none } .pointer line { stroke: var(--soft); stroke-width: .6 }
.smoothing label, .smoothing input { vertical-align: middle }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule) }
td { white-space: pre-line }
thead th { color: var(--soft) } .soft { color: var(--soft) }
.answer { overflow-x: auto; font-size: .85rem }"""


def swatch(ink: int) -> str:
    """A line's colour, before its name."""
    return f'<i style="background: var(--line-{ink % INKS})"></i>'


def legend(names: Iterable[tuple[int, str]]) -> str:
    """Names with the number of their colour."""
    items = (f"<li>{swatch(ink)}{escape(name)}</li>" for ink, name in names)
    return f'<ul class="legend">{"".join(items)}</ul>'


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """An SVG with the place of its axes."""

    svg: str
    box: tuple[float, float, float, float]
    """Left, top, right and bottom edge of what the axes enclose, in the units of the SVG."""
    x: tuple[float, float]
    """The values at the ends of the horizontal axis."""
    y: tuple[float, float]


# One colour for each role, which CSS variables then replace; none is black, which SVG leaves out.
SOFT, RULE, STRONG = "#00aa01", "#00aa02", "#00aa03"


def ink(number: int) -> str:
    """The colour of a role in a drawing."""
    return f"#00bb{number % INKS:02x}"


def drawing(draw: Callable[["Axes"], None], prefix: str, height: float = 3.0) -> Drawing:
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
    (left, bottom), (right, top) = axes.get_position().get_points()  # shares of the figure, from its lower left corner
    width, tall = POINTS_AN_INCH * figure.get_figwidth(), POINTS_AN_INCH * figure.get_figheight()
    box = left * width, (1 - top) * tall, right * width, (1 - bottom) * tall
    return Drawing(svg=text, box=box, x=axes.get_xlim(), y=axes.get_ylim())


def figure(title: str, drawn: str, names: str = "", data: str | None = None) -> str:
    """A drawing under its title.

    Args:
        names: its legend.
        data: what the page's script reads of it.
    """
    for_script = "" if data is None else f' data-chart="{escape(data)}"'
    return f"<figure{for_script}><h3>{escape(title)}</h3>{drawn}{names}</figure>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls sideways where there is no room."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    shown = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table>{shown}<tbody>{lines}</tbody></table></div>'


def side_by_side(left: str, right: str) -> str:
    """The head of a page: two columns where there is room."""
    return f'<div class="head"><div>{left}</div>{right}</div>'


def grid(charts: Iterable[str]) -> str:
    """Figures beside one another, as many as there is room for."""
    return f'<div class="charts">{"".join(charts)}</div>'


def beginning(command: str) -> str:
    """Beginning of each page of a command, by which it knows its own."""
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="cookbook {command}">"""


def page_text(command: str, title: str, body: Iterable[str], script: str = "") -> str:
    """A whole page. It may fetch nothing, and execute nothing but its script, whatever a run's names and texts are.

    Args:
        command: that writes it.
        script: at its end.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    executed = f"'sha256-{digest}'" if script else "'none'"
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; script-src {executed}"
    return "\n".join(
        (
            beginning(command),
            f'<meta http-equiv="Content-Security-Policy" content="{allowed}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
            *body,
            *([f"<script>{script}</script>"] if script else []),
            "</body>\n</html>\n",
        )
    )
