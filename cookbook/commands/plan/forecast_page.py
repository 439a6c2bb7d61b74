"""The page of a plan: memory by part against what a GPU has, and time against price with its front."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from cookbook.commands.shared.html_page import SOFT, STRONG, drawing, figure, grid, ink, legend, page_text, table
from cookbook.forecast.any_gpus import CardReport
from cookbook.forecast.card_table import amount_of
from cookbook.forecast.fitting import ByAuto
from cookbook.forecast.memory import GIB, Memory
from cookbook.forecast.ranking import PlanReport
from cookbook.forecast.show import hours_in_words, num_steps, range_in_words
from cookbook.forecast.step_time import Range
from cookbook.forecast.verdict import PRICED_TOKENS, tokens_of_step
from cookbook.system.hardware import in_gib
from cookbook.system.prices import PRICES, SOURCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUTSIDE = "CUDA, NCCL and fragments, at most"
WIDEST = 1.6
"""The most that a chart shows of memory, in what the largest GPU has."""
LOGARITHMIC_FROM = 8
"""Largest over smallest value, from which an axis is logarithmic."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The forecast for one `--gpus`."""

    outlook: PlanReport
    settings: list[ByAuto]
    text: str
    """The answer in words."""


@dataclass(frozen=True)
class Bar:
    """Memory of a GPU under a strategy."""

    name: str
    memory: Memory
    limit: float | None
    """Bytes that a run can have of a GPU; None: not known."""
    is_judged: bool = True
    """On a CPU what is allocated counts alone."""

    @property
    def needed(self) -> tuple[int, int]:
        return self.memory.needed if self.is_judged else (self.memory.allocated,) * 2


@dataclass(frozen=True)
class Point:
    """A run of a length: hours and price, least and most."""

    name: str
    hours: tuple[float, float]
    price: tuple[float, float]
    ink: int = 0

    @property
    def middle(self) -> tuple[float, float]:
        """Price and hours."""
        return sum(self.price) / 2, sum(self.hours) / 2


def front(points: Sequence[Point]) -> list[Point]:
    """Points than which none is both faster and cheaper, the cheapest first."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: point.middle):
        if not kept or point.middle[1] < kept[-1].middle[1]:
            kept.append(point)
    return kept


def page_of_machines(answers: Sequence[Answer], name: str, *, num_samples: int | None, price: float | None) -> str:
    """The page of a recipe or model on one kind of machines, or on several.

    Args:
        num_samples: rows of the training data, for the length of the run.
        price: of any GPU for an hour; None: as listed.
    """
    figures, points, rows = [], [], []
    for i, answer in enumerate(answers):
        outlook, machines = answer.outlook, answer.outlook.machines
        limit = None if machines.usable_gib is None else machines.usable_gib * GIB
        bars = [
            Bar(forecast.strategy.name, forecast.memory, limit, is_judged=bool(machines.gpus_each))
            for forecast in outlook.forecasts
            if forecast.memory is not None
        ]
        if bars:
            figures.append(_memory(f"GiB of each GPU of {machines.text}", bars, f"m{i}-"))
        listed = price if price is not None or machines.gpu is None else PRICES.get(machines.gpu.name)
        by_auto = {setting.strategy.path: setting for setting in answer.settings}
        for forecast in outlook.forecasts:
            setting = by_auto.get(forecast.strategy.path)
            point = _point(answer, setting, forecast.strategy.name, i, num_samples, listed) if setting else None
            points += [point] if point and listed is not None else []
            rows.append(
                (
                    machines.text,
                    forecast.strategy.name,
                    forecast.verdict,
                    _together(in_gib(*forecast.memory.needed)) if forecast.memory else "-",
                    _step(forecast.time),
                    *_settings(setting),
                    _together(hours_in_words(*point.hours)) if point else "-",
                    _span(point.price if point and listed is not None else None),
                    "; ".join(forecast.why),
                )
            )
    head = ("GPUs", "strategy", "verdict", "GiB a GPU", "step", "by auto", "GiB a GPU", "step", "time", "price", "why")
    legend_of_machines = legend(enumerate(answer.outlook.machines.text for answer in answers))
    amount = _amount(num_steps(answers[0].outlook.recipe, num_samples))
    body = [
        *(f'<pre class="answer">{escape(answer.text)}</pre>' for answer in answers),
        "<h2>Memory</h2>",
        "<p>With the recipe's own settings, at the moment when the GPU that needs most needs most.</p>",
        grid(figures),
        "<h2>Time and price</h2>",
        *_time_and_price(points, amount, legend_of_machines * (len(answers) > 1), is_listed=price is None),
        "<h2>All strategies</h2>",
        "<p>The first memory and step are with the recipe's own settings; those after <i>by auto</i>, time and price of"
        f" {amount} with what <code>launch</code> takes for <code>auto</code>.</p>",
        table(head, rows),
    ]
    return page_text("plan", f"Plan of {name}", body)


def page_of_cards(report: CardReport, name: str, text: str, *, num_samples: int | None, is_listed: bool) -> str:
    """The page of the least number of each kind of GPU.

    Args:
        text: the answer in words.
        is_listed: prices are those of the list.
    """
    bars, points = [], []
    for card in report.cards:
        memory, usable = card.forecast.memory, card.machines.usable_gib
        assert memory is not None and usable is not None
        bars.append(Bar(f"{card.machines.text}, {card.forecast.strategy.name}", memory, usable * GIB))
        steps = num_steps(card.recipe, num_samples)
        hours, price = card.hours(steps), card.price(steps)
        if hours is not None and price is not None:
            points.append(Point(card.machines.text, hours, price))
    body = [
        f'<pre class="answer">{escape(text)}</pre>',
        "<h2>Memory</h2>",
        "<p>The least number of each GPU, with the micro-batch and checkpointing of <code>auto</code>.</p>",
        grid([_memory("GiB of each GPU", bars, "m-")] if bars else []),
        "<h2>Time and price</h2>",
        *_time_and_price(points, amount_of(report, num_samples), "", is_listed=is_listed),
    ]
    return page_text("plan", f"GPUs for {name}", body)


def _point(
    answer: Answer, setting: ByAuto, name: str, number: int, num_samples: int | None, listed: float | None
) -> Point | None:
    """The run under a strategy as `launch` runs it with `auto`; None without a time."""
    if setting.time is None:
        return None
    recipe = answer.outlook.recipe
    steps = num_steps(recipe, num_samples)
    amount = PRICED_TOKENS / tokens_of_step(recipe) if steps is None else steps
    num_gpus = answer.outlook.machines.num_gpus
    price = setting.time.price(amount, per_gpu_hour=listed or 0.0, num_gpus=num_gpus)
    return Point(name, setting.time.hours(amount), price, number)


def _settings(setting: ByAuto | None) -> tuple[str, str, str]:
    if setting is None or setting.best.forecast.memory is None:
        return "-", "-", "-"
    best, memory = setting.best, setting.best.forecast.memory
    words = f"micro-batch {best.batch.micro_batch_size}, checkpointing {str(best.checkpointing).lower()}"
    words += ", compiled" * (setting.time is not None and setting.time is setting.compiled)
    return words, _together(in_gib(*memory.needed)), _step(setting.time)


def _step(time: Range | None) -> str:
    return _together(range_in_words(time.low, time.high, " s")) if time else "-"


def _span(ends: tuple[float, float] | None) -> str:
    return _together(range_in_words(*ends, "")) if ends else "-"


def _together(words: str) -> str:
    """Words of a cell that stay in one line."""
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def _amount(steps: int | None) -> str:
    return f"{PRICED_TOKENS // 10**6} M tokens" if steps is None else f"{steps:,} steps"


def _memory(title: str, bars: Sequence[Bar], prefix: str) -> str:
    parts = [*bars[0].memory.parts]
    names = [*enumerate(parts), (len(parts), OUTSIDE)]
    return figure(title, memory_drawing(bars, prefix), legend(names))


def memory_drawing(bars: Sequence[Bar], prefix: str) -> str:
    """Parts of the peak beside one another, with what lies outside torch's allocator; what the GPU has is a line."""
    most = max(bar.needed[1] for bar in bars)
    limits = [bar.limit for bar in bars if bar.limit is not None]
    right = min(most * 1.02, WIDEST * max(limits)) if limits else most * 1.02
    right = max([right, *(1.02 * limit for limit in limits)])

    def draw(axes: "Axes") -> None:
        for i, bar in enumerate(bars):
            begin = 0.0
            for j, size in enumerate([*bar.memory.parts.values(), bar.needed[1] - bar.memory.allocated]):
                is_outside = j == len(bar.memory.parts)
                if size:
                    alpha = 0.45 if is_outside else 0.9
                    axes.barh(i, size / GIB, 0.66, begin / GIB, color=ink(j), alpha=alpha, linewidth=0)
                begin += size
            if bar.needed[1] > right:
                axes.annotate("▸", (right / GIB, i), ha="right", va="center", color=SOFT)
            if bar.limit is not None:
                place = bar.limit / GIB
                axes.plot([place, place], [i - 0.5, i + 0.5], color=STRONG, linewidth=1.6, gid=f"limit-{i}")
        names = [f"{bar.name}  {in_gib(*bar.needed) if bar.is_judged else in_gib(bar.needed[0])}" for bar in bars]
        axes.set_yticks(range(len(bars)), names, fontsize=10)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, right / GIB)
        axes.set_ylim(len(bars) - 0.4, -0.6)

    return drawing(draw, prefix, 0.7 + 0.23 * len(bars)).svg


def _time_and_price(points: Sequence[Point], amount: str, names: str, *, is_listed: bool) -> Iterable[str]:
    if not points:
        yield "<p>No price: nothing fits, there is no forecast of time, or the list has no such GPU; see --price.</p>"
        return
    title = f"{_unit(points)[0].capitalize()} over price of {amount}"
    yield grid([figure(title, price_drawing(points), names)])
    said = "A line is the width of a forecast; the dashed one joins what nothing beats in both, by its middle"
    yield f'<p class="soft">{said}. The price: {escape(SOURCE) if is_listed else "by --price"}.</p>'


def _unit(points: Sequence[Point]) -> tuple[str, float]:
    """The unit of time that suits, and how many are an hour."""
    return ("hours", 1.0) if max(point.middle[1] for point in points) >= 1 else ("minutes", 60.0)


def price_drawing(points: Sequence[Point]) -> str:
    """Each point with the width of its forecast; the front of all, and of each colour, has names."""
    unit, scale = _unit(points)
    best = front(points)
    named = {point for number in {point.ink for point in points} for point in front(_of(points, number))}

    def draw(axes: "Axes") -> None:
        for point in points:
            hours = [scale * end for end in point.hours]
            axes.plot(point.price, hours, color=ink(point.ink), alpha=0.3, linewidth=1.4)
        for i, point in enumerate(points):
            place = point.middle[0], scale * point.middle[1]
            axes.plot(*place, "o", color=ink(point.ink), markersize=4.5, gid=f"point-{i}")
            if point in named:
                axes.annotate(
                    point.name,
                    place,
                    xytext=(6, -9),
                    textcoords="offset points",
                    fontsize=9.5,
                    color=ink(point.ink),
                )
        prices, times = [point.middle[0] for point in best], [scale * point.middle[1] for point in best]
        axes.plot(prices, times, "--", color=SOFT, linewidth=1, gid="front", zorder=0)
        set_scale(axes.xaxis, [end for point in points for end in point.price])
        set_scale(axes.yaxis, [scale * end for point in points for end in point.hours])
        axes.set_xlabel("price")
        axes.set_ylabel(unit)

    return drawing(draw, "p-").svg


def _of(points: Sequence[Point], number: int) -> list[Point]:
    return [point for point in points if point.ink == number]


def set_scale(axis: Any, values: Sequence[float]) -> None:
    """Numbers in full at an axis that begins at 0, or is logarithmic if its values differ much."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if max(values) < LOGARITHMIC_FROM * min(values):
        axis.axes.set(**{f"{axis.axis_name}lim": (0, max(values) * 1.12)})
        return
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
