"""The micro-batch and the checkpointing with which a run fits and is fastest: what `launch` takes for `auto`."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cookbook.config.recipe import Recipe
from cookbook.config.sections import BatchSection, Checkpointing
from cookbook.config.strategy import Strategy
from cookbook.forecast.costs.inputs import micro_batch_of
from cookbook.forecast.memory import GIB
from cookbook.forecast.order import BEST, rank
from cookbook.forecast.ranking import PlanReport
from cookbook.forecast.step_time import Range
from cookbook.forecast.verdict import (
    MAY_RUN,
    UNKNOWN,
    Forecast,
    TraceCache,
    extrapolated_need,
    forecast,
    least_time,
    time_compiled,
    why_no_time,
)
from cookbook.start.run_plan import CHECKPOINTING, KINDS, MICRO_BATCH, autos, even
from cookbook.system.files import RecipeError
from cookbook.system.hardware import Machines
from cookbook.training.models.structure import config_of

SURELY = 1.01
"""Times the memory of a GPU: what needs more even by a lower bound is not traced to know that it is too large."""


@dataclass(frozen=True)
class Fitting:
    """Settings of speed with which a run fits."""

    checkpointing: Checkpointing
    batch: BatchSection
    forecast: Forecast

    @property
    def time(self) -> Range | None:
        """The time of a step."""
        return self.forecast.time

    @property
    def seconds(self) -> float:
        """Seconds by which steps are ranked; 0 if no time is forecast."""
        return self.time.low + self.time.high if self.time else 0.0


def fitting(
    recipe: Recipe,
    strategy: Strategy,
    machines: Machines,
    recipe_name: str,
    batches: Sequence[BatchSection],
    kinds: Sequence[Checkpointing],
    *,
    best_alone: bool = False,
) -> list[Fitting]:
    """The last of ever larger `batches` with which a run fits, for each of `kinds`; the fastest by the forecast first,
    and none if a GPU's memory is not known. Selective checkpointing is left out unless products take most of its time:
    it decides about each operation on the host, and was slower than recomputing all where those are small
    (docs/on_gpu.md).

    Args:
        best_alone: leave out other kinds than the best where they need no look: nothing is faster than the largest of
            all batches if no layer is recomputed.

    Raises:
        RecipeError: there is no forecast.
    """
    traces = TraceCache(config_of(recipe)[0], recipe, recipe_name)
    of_kind: dict[Checkpointing, Fitting] = {}
    for kind in sorted(kinds, key=lambda kind: (kind is not False, kind is not True)):
        model = recipe.model.model_copy(update={"gradient_checkpointing": kind})
        search = _Search(traces.with_sections(model=model), strategy, machines, batches)
        if kind == "selective" and len(kinds) > 1:
            # It fits with no larger batch than if all is recomputed, and with a smaller one products take less.
            whole = of_kind.get(True)
            is_bound = whole is not None and whole.time is not None and whole.time.bottleneck == "compute"
            if is_bound and False not in of_kind and not search.fits(batches[0]):  # the likelier of both reasons
                continue
            if whole is not None and not search.is_bound_by_products(whole.batch):
                continue
            if (last := search.last()) and search.is_bound_by_products(last):
                of_kind[kind] = Fitting(kind, last, search.of(last))
        elif last := search.last():
            of_kind[kind] = Fitting(kind, last, search.of(last))
            if best_alone and kind is False and last is batches[-1]:
                break
    return sorted((of_kind[kind] for kind in kinds if kind in of_kind), key=lambda fitting: fitting.seconds)


class _Search:
    """Which of ever larger batches a run fits with, by as few traces as tell it."""

    def __init__(
        self, traces: TraceCache, strategy: Strategy, machines: Machines, batches: Sequence[BatchSection]
    ) -> None:
        self._traces, self._strategy, self._machines, self._batches = traces, strategy, machines, batches
        self._forecasts: dict[int, Forecast] = {}
        """Forecasts by micro-batch."""

    def of(self, batch: BatchSection) -> Forecast:
        """The forecast with a batch."""
        traces = self._traces.with_sections(batch=batch)
        if (size := micro_batch_of(traces.recipe)) not in self._forecasts:
            self._forecasts[size] = forecast(traces, self._strategy, self._machines, limits=False)
        return self._forecasts[size]

    def last(self) -> BatchSection | None:
        """The last with which it fits."""
        count = _first_too_large(self._batches, self.is_too_large, self._most)
        return self._batches[count - 1] if count else None

    def is_bound_by_products(self, batch: BatchSection) -> bool:
        """Return whether products take most of its time; False where no time is forecast."""
        if why_no_time(self._traces, self._machines) is not None:
            return False
        return (time := self.of(batch).time) is not None and time.bottleneck == "compute"

    def is_too_large(self, batch: BatchSection) -> bool:
        """Raises RecipeError where there is no forecast."""
        if (usable := self._machines.usable_gib) is None:
            return True
        if self._is_surely_too_large(batch, SURELY * usable * GIB):
            return True
        if (of_batch := self.of(batch)).verdict == "no forecast":
            raise RecipeError(of_batch.why)
        return not self.fits(batch)

    def fits(self, batch: BatchSection) -> bool:
        """Return whether it fits, as far as is known; False where there is no forecast."""
        return self.of(batch).verdict in ("fits", *UNKNOWN)

    def _is_surely_too_large(self, batch: BatchSection, room: float) -> bool:
        """Return whether it needs more than the room even if what it holds grows no faster than before."""
        traces = self._traces.with_sections(batch=batch)
        size = micro_batch_of(traces.recipe)
        smaller = [traced for traced in self._traced if traced < size]
        if size in self._forecasts or len(smaller) < 2:
            return False
        sizes = smaller[0], smaller[-1]
        return extrapolated_need(traces, self._strategy, self._machines, sizes, is_least=True) > room

    def _most(self) -> int | None:
        """An estimate of the most samples that fit, once the first batch is known to fit: by a second trace, of as many
        as fit if all that the first one holds grows with them.
        """
        if len(self._traced) == 1:
            self.is_too_large(self._batches[max(1, self._count_within((0, self._traced[0])) - 1)])
        if len(self._traced) == 1:  # the second is refused before anything is traced
            return None
        sizes = self._traced[0], self._traced[-1]
        return self._batches[self._count_within(sizes) - 1].micro_batch_size

    @property
    def _traced(self) -> list[int]:
        """Micro-batches of which memory is known, the smallest first."""
        return sorted(size for size, known in self._forecasts.items() if known.memory is not None)

    def _count_within(self, sizes: tuple[int, int]) -> int:
        """Count the batches that fit, if what a forward and backward hold grows evenly as between two sizes."""
        usable = cast(float, self._machines.usable_gib) * GIB

        def is_beyond(batch: BatchSection) -> bool:
            traces = self._traces.with_sections(batch=batch)
            return extrapolated_need(traces, self._strategy, self._machines, sizes) > usable

        return bisect_left(self._batches, True, 1, len(self._batches), key=is_beyond)


def _first_too_large(
    batches: Sequence[BatchSection], is_too_large: Callable[[BatchSection], bool], most: Callable[[], int | None]
) -> int:
    """The number of the first that is too large; as many as there are if none is. Those around `most` are tried first,
    so that it takes as long for thousands, the largest of which would take longest, as for ten.

    Args:
        most: an estimate of the most samples that fit, if there is one.
    """
    low, high = 0, len(batches)
    if high > 3 and is_too_large(batches[0]):
        return 0
    if high > 3 and (size := most()):
        estimate = bisect_right(batches, size, key=lambda batch: cast(int, batch.micro_batch_size))
        for i in (estimate - 1, estimate):
            if low <= i < high:
                low, high = (low, i) if is_too_large(batches[i]) else (i + 1, high)
    return bisect_left(batches, True, low, high, key=is_too_large)


@dataclass(frozen=True)
class ByAuto:
    """A strategy with the micro-batch and checkpointing that `launch` takes for `auto`."""

    strategy: Strategy
    best: Fitting
    compiled: Range | None
    """The time of a step with `model.compile` as well."""

    @property
    def time(self) -> Range | None:
        """The time of a step, compiled where that is served and faster."""
        plain = self.best.time
        if plain is None or self.compiled is None:
            return plain
        return min(plain, self.compiled, key=lambda time: time.low + time.high)

    @property
    def rank(self) -> tuple:
        """A key by which the best setting is the least."""
        order, _, *others = rank(self.best.forecast)
        seconds = self.time.low + self.time.high if self.time else 0.0
        return order, round(seconds, 3), *others


MOST_BY_AUTO = 5
"""Strategies whose order with `auto` is found out, of all that may run."""


def by_auto(report: PlanReport, recipe_name: str, *, all_of_them: bool, best_alone: bool = False) -> list[ByAuto]:
    """Strategies as `launch` would run them with `auto` for the keys where the recipe has it, or if it has none, for
    micro-batch and checkpointing; those that may run and, whatever its verdict, the recipe's own, if anything fits.

    Args:
        all_of_them: not the best `MOST_BY_AUTO` and the recipe's own alone, since each takes up to a second; where
            layers are compiled, whose graphs take several, only the best one.
        best_alone: leave out those that `headline.best_by_auto` surely does not take.
    """
    recipe, machines = report.recipe, report.machines
    if machines.usable_gib is None or not machines.gpus_each:
        return []
    own, model = Path(recipe.strategy), recipe.model
    able = [row for row in report.forecasts if row.verdict in MAY_RUN]
    chosen = able if all_of_them else able[: 1 if model.compile else MOST_BY_AUTO]
    chosen += [row for row in report.forecasts if Path(row.strategy.path) == own and row.plan and row not in chosen]
    keys = autos(recipe) or [MICRO_BATCH, CHECKPOINTING]
    kinds = KINDS if CHECKPOINTING in keys else [model.gradient_checkpointing]
    traces = TraceCache(config_of(recipe)[0], recipe, recipe_name)
    waiting = [_Candidate(row.strategy, _batches(recipe, row, keys)) for row in chosen]
    rows: list[ByAuto] = []
    while waiting:
        candidate, *waiting = waiting
        strategy = candidate.strategy
        try:
            fits = fitting(recipe, strategy, machines, recipe_name, candidate.batches, kinds, best_alone=True)
        except RecipeError:
            continue
        for best in fits[:1]:
            settings = {"gradient_checkpointing": best.checkpointing}
            settled = traces.with_sections(batch=best.batch, model=model.model_copy(update=settings))
            compiled = None if model.compile else time_compiled(settled, strategy, machines)
            rows.append(ByAuto(strategy, best, compiled))
        if best_alone:
            waiting = _left(rows, waiting, machines, lambda candidate: candidate.least(traces, kinds, machines))
    return rows


def is_settled(report: PlanReport, settings: Sequence[ByAuto], recipe_name: str) -> bool:
    """Return whether `headline.best_by_auto` surely takes none of the strategies that the report leaves out."""
    if not report.left_out or not settings:
        return not report.left_out
    traces = TraceCache(config_of(report.recipe)[0], report.recipe, recipe_name)
    keys = autos(report.recipe) or [MICRO_BATCH, CHECKPOINTING]
    kinds = KINDS if CHECKPOINTING in keys else [report.recipe.model.gradient_checkpointing]
    batches = _batches(report.recipe, report.forecasts[0], keys)
    candidates = [_Candidate(strategy, batches) for strategy in report.left_out]
    bounds = {each.strategy.path: each.least(traces, kinds, report.machines) for each in candidates}
    able = [each for each in candidates if report.no_time is not None or bounds[each.strategy.path] is not None]
    return not _left(settings, able, report.machines, lambda candidate: bounds[candidate.strategy.path])


@dataclass(frozen=True)
class _Candidate:
    """A strategy with the batches among which `auto` chooses."""

    strategy: Strategy
    batches: list[BatchSection]

    def least(self, traces: TraceCache, kinds: Sequence[Checkpointing], machines: Machines) -> Range | None:
        """A lower bound of its time: that of the largest batch if no layer is recomputed, without what traces tell."""
        kind = False if False in kinds else kinds[0]
        model = traces.recipe.model.model_copy(update={"gradient_checkpointing": kind})
        return least_time(traces.with_sections(batch=self.batches[-1], model=model), self.strategy, machines)


def _batches(recipe: Recipe, ranked: Forecast, keys: Sequence[str]) -> list[BatchSection]:
    assert ranked.plan is not None
    if MICRO_BATCH not in keys or recipe.batch.micro_batch_tokens is not None:
        return [recipe.batch]
    share = recipe.batch.global_batch_size // ranked.plan.data_parallel_size
    sizes = [1] if ranked.strategy.pp_size > 1 else even(share)
    return [recipe.batch.model_copy(update={"micro_batch_size": size}) for size in sizes]


def _left(
    rows: Sequence[ByAuto], waiting: list[_Candidate], machines: Machines, least: Callable[[_Candidate], Range | None]
) -> list[_Candidate]:
    """Candidates that `headline.best_by_auto` may take, beside rows of which it takes one.

    Args:
        least: a lower bound of a candidate's time, if there is one.
    """
    first = min((row.rank for row in rows), default=None)
    if first is None or first[0] != BEST:
        return waiting
    best_cases = [Forecast(strategy=each.strategy, verdict="fits", why=[], time=least(each)) for each in waiting]
    is_timed = all(row.time is not None for row in rows)
    is_known = [(case.time is not None) == is_timed for case in best_cases]
    kinds = [row.strategy.kind for row in rows] + [case.strategy.kind for case in best_cases]
    if machines.num_gpus == 1 and all(is_known) and kinds.count("single") == 1:
        for row in rows:
            if row.strategy.kind == "single" and row.rank[0] == BEST:
                highs = [
                    time.high for time in (*(other.time for other in rows), *(case.time for case in best_cases)) if time
                ]
                if row.time is None or all(row.time.low <= high for high in highs):
                    return []
    return [
        candidate
        for candidate, case, known in zip(waiting, best_cases, is_known, strict=True)
        if not known or rank(case) <= first or (machines.num_gpus == 1 and candidate.strategy.kind == "single")
    ]
