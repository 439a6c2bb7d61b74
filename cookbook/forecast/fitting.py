"""The micro-batch and the checkpointing with which a run fits and is fastest: what `launch` takes for `auto`."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cookbook.config.recipe import Recipe
from cookbook.config.sections import BatchSection, Checkpointing, ModelSection
from cookbook.config.strategy import Strategy
from cookbook.forecast.ranking import PlanReport
from cookbook.forecast.step_time import Range
from cookbook.forecast.verdict import MAY_RUN, UNKNOWN, Forecast, TraceCache, forecast, time_compiled
from cookbook.start.run_plan import CHECKPOINTING, KINDS, MICRO_BATCH, autos, even
from cookbook.system.files import RecipeError
from cookbook.system.hardware import Machines
from cookbook.training.models.structure import config_of


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

        def of(batch: BatchSection, model: ModelSection = model) -> Forecast:
            return forecast(traces.with_sections(batch=batch, model=model), strategy, machines, limits=False)

        def is_too_large(batch: BatchSection) -> bool:
            if machines.usable_gib is None:
                return True
            of_batch = of(batch)
            if of_batch.verdict == "no forecast":
                raise RecipeError(of_batch.why)
            return of_batch.verdict not in ("fits", *UNKNOWN)

        def is_bound_by_products(batch: BatchSection) -> bool:
            return (time := of(batch).time) is not None and time.bottleneck == "compute"

        def most(model: ModelSection = model) -> int | None:
            smallest = traces.with_sections(batch=batches[0], model=model)
            return forecast(smallest, strategy, machines).largest_micro_batch

        is_judged = kind == "selective" and len(kinds) > 1
        # It fits with no larger batch than if all is recomputed, and with a smaller one products take less.
        if is_judged and True in of_kind and not is_bound_by_products(of_kind[True].batch):
            continue
        if count := _first_too_large(batches, is_too_large, most):
            last = batches[count - 1]
            if not is_judged or is_bound_by_products(last):
                of_kind[kind] = Fitting(kind, last, of(last))
            if best_alone and kind is False and count == len(batches):
                break
    return sorted((of_kind[kind] for kind in kinds if kind in of_kind), key=lambda fitting: fitting.seconds)


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


MOST_BY_AUTO = 5
"""Strategies whose order with `auto` is found out, of all that may run."""


def by_auto(report: PlanReport, recipe_name: str, *, all_of_them: bool) -> list[ByAuto]:
    """Strategies as `launch` would run them with `auto` for the keys where the recipe has it, or if it has none, for
    micro-batch and checkpointing; those that may run and, whatever its verdict, the recipe's own, if anything fits.

    Args:
        all_of_them: not the best `MOST_BY_AUTO` and the recipe's own alone, since each takes up to a second; where
            layers are compiled, whose graphs take several, only the best one.
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
    rows = []
    for ranked in chosen:
        assert ranked.plan is not None
        batches = [recipe.batch]
        if MICRO_BATCH in keys and recipe.batch.micro_batch_tokens is None:
            share = recipe.batch.global_batch_size // ranked.plan.data_parallel_size
            sizes = [1] if ranked.strategy.pp_size > 1 else even(share)
            batches = [recipe.batch.model_copy(update={"micro_batch_size": size}) for size in sizes]
        try:
            fits = fitting(recipe, ranked.strategy, machines, recipe_name, batches, kinds, best_alone=True)
        except RecipeError:
            continue
        for best in fits[:1]:
            settings = {"gradient_checkpointing": best.checkpointing}
            traces = TraceCache(config_of(recipe)[0], recipe, recipe_name)
            traces = traces.with_sections(batch=best.batch, model=model.model_copy(update=settings))
            compiled = None if model.compile else time_compiled(traces, ranked.strategy, machines)
            rows.append(ByAuto(ranked.strategy, best, compiled))
    return rows
