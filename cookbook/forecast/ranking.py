"""The forecasts of all strategies on given machines, best first, as they are and as `launch` runs them with `auto`."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, cast

from cookbook.config.recipe import Recipe
from cookbook.config.sections import BatchSection, Checkpointing, ModelSection
from cookbook.config.strategy import Strategy
from cookbook.forecast.changes import NOTHING_HELPS, Changes, small_batch
from cookbook.forecast.costs.flops import Step, sizes_of, work
from cookbook.forecast.costs.inputs import bytes_of
from cookbook.forecast.memory import GIB
from cookbook.forecast.order import in_order
from cookbook.forecast.sampler import SamplerForecast, forecast_sampler
from cookbook.forecast.skeleton import skeleton
from cookbook.forecast.step_time import Range, caveat, no_forecast, share_of_peak
from cookbook.forecast.trace import scores_in_words
from cookbook.forecast.verdict import MAY_RUN, UNKNOWN, Forecast, TraceCache, forecast, time_compiled
from cookbook.start.run_plan import CHECKPOINTING, KINDS, MICRO_BATCH, autos, even
from cookbook.system.files import RecipeError
from cookbook.system.hardware import Machines, in_gib
from cookbook.training.models.structure import config_of, find_config, not_served


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The forecasts of all strategies, best first."""

    recipe: Recipe
    machines: Machines
    forecasts: list[Forecast]
    origin: str
    """The source of the model's structure."""
    suggestion: str | None
    """What to change if nothing fits, or if what may fit is not sure to or moves its state to the host or a disk."""
    no_time: str | None
    """Why there is no forecast of time, if there is none."""
    time_caveat: str | None
    """What the forecast of time omits, if that matters."""
    model: str
    """The model type."""
    num_parameters: int
    num_trained: int
    notes: tuple[str, ...] = ()
    """On the recipe."""
    scores: str | None = None
    """What attention without a kernel takes, if the model has such."""
    sampler: SamplerForecast | None = None
    """What samples, of a recipe with rounds."""


def forecast_all(
    recipe: Recipe,
    strategies: list[Strategy],
    machines: Machines,
    recipe_name: str,
    others: Sequence[Strategy] = (),
    *,
    limits: bool = True,
    suggests: Literal["first", "all"] | None = None,
) -> PlanReport:
    """Forecasts of all strategies, ranked by verdict, time and simplicity.

    Args:
        others: strategies to suggest if none of `strategies` fits.
        limits: also find the largest micro-batch and the longest sequence, which takes twice as long.
        suggests: where nothing fits, or only what offloads or is not sure to, name the first change that helps, or of
            each kind the first; and how many GPUs would do, where no change helps or all are named.

    Raises:
        RecipeError: the model's structure is not available, or the model is not supported.
    """
    config, origin = config_of(recipe)
    if problem := not_served(config):
        raise RecipeError(f"model.name_or_path is {recipe.model.name_or_path!r}: {problem}")
    if not machines.gpus_each:  # what goes to host memory on GPUs stays where it is
        model = recipe.model.model_copy(update={"gradient_checkpointing": recipe.model.recompute})
        recipe = recipe.model_copy(update={"model": model})
    traces = TraceCache(config, recipe, recipe_name)
    forecasts = [forecast(traces, strategy, machines, limits=limits) for strategy in strategies]
    ranked = in_order(forecasts, machines)
    may_run = ranked[0].verdict in MAY_RUN
    trainer = ranked[0].memory
    trainer_bytes = None if trainer is None else max(trainer.needed)
    sampler = forecast_sampler(config, traces.recipe, machines, trainer_bytes)
    changes = Changes(traces=traces, own=strategies, others=others, machines=machines, is_sure=may_run)
    return PlanReport(
        recipe=traces.recipe,
        machines=machines,
        forecasts=ranked,
        origin=origin,
        suggestion=_suggestion(changes, ranked[0], suggests),
        no_time=no_forecast(machines, recipe.mixed_precision),
        time_caveat=caveat(traces.sizes),
        model=config.model_type,
        num_parameters=traces.sizes.num_parameters,
        num_trained=traces.sizes.num_trained,
        scores=scores_in_words(config, traces.recipe),
        sampler=sampler,
        notes=(
            *traces.skeleton.notes,
            *filter(None, [scores_in_words(config, traces.recipe)]),
            *_teacher_notes(recipe, machines),
            *([] if sampler is None else [f"sampler: {sampler.words}"]),
            *filter(None, [small_batch(recipe, machines)]),
        ),
    )


def _suggestion(changes: Changes, best: Forecast, suggests: Literal["first", "all"] | None) -> str | None:
    """The changes that help, unless the best of the forecasts needs none."""
    can_help = best.verdict == "does not fit" or (best.verdict in MAY_RUN and not _is_sure(best))
    if best.verdict == "cannot run":
        can_help = small_batch(changes.traces.recipe, changes.machines) is not None
    if suggests is None or not can_help:
        return None
    suggestions = list(islice(changes.suggestions(), 1 if suggests == "first" else None))
    if suggestions and suggests == "first":
        return suggestions[0]
    if gpus := changes.enough_gpus():
        is_last = suggests == "all" and not suggestions and not changes.is_sure
        suggestions.append(f"{NOTHING_HELPS if is_last else 'take more'}: {gpus}")
    return "; or ".join(suggestions) or None


def _is_sure(one: Forecast) -> bool:
    """Whether it fits without a doubt on the GPUs alone."""
    return one.verdict in ("fits", "not judged") and not one.strategy.offloads


def _teacher_notes(recipe: Recipe, machines: Machines) -> list[str]:
    """What a teacher takes before the first step."""
    asked = recipe.objective.asks
    if asked is None:
        return []
    notes = [f"teacher {asked.teacher}: {asked.words()}"]
    model = ModelSection(name_or_path=asked.teacher)
    try:
        config, _ = find_config(model)
        sizes = sizes_of(config, skeleton(config, recipe.model_copy(update={"model": model, "adapter": None})))
    except RecipeError as error:
        return [*notes, f"what the teacher itself takes is not known: {error}"]
    count, flops = sizes.num_parameters, work(sizes, Step(num_tokens=1, num_labelled=1, length=0)).forward
    size = count * bytes_of(recipe.compute_precision)
    room = machines.usable_gib
    fits = "" if room is None or size / GIB < room else f", more than the {room:.0f} GiB there: take a smaller one"
    notes.append(
        f"before the student is loaded, each process holds the whole teacher, {count / 1e9:.3g} B parameters in"
        f" {in_gib(size)} GiB{fits}; its one pass computes {flops / 1e9:.3g} GFLOP a token"
        + _seconds_of_pass(flops, recipe, machines)
    )
    return notes


def _seconds_of_pass(flops: float, recipe: Recipe, machines: Machines) -> str:
    """The time of a million tokens, where the GPU's rate is known; each GPU computes its own part of them."""
    gpu = machines.gpu
    if gpu is None or gpu.half_flops is None or bytes_of(recipe.compute_precision) != 2:
        return ""
    low, high = (1e6 * flops / (share * gpu.half_flops * machines.num_gpus) for share in reversed(share_of_peak(gpu)))
    return f", {low:.2g} to {high:.2g} s for a million tokens, less attention and padding"


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
        """By which steps are ranked; 0 if no time is forecast."""
        return self.time.low + self.time.high if self.time else 0.0


def fitting(
    recipe: Recipe,
    strategy: Strategy,
    machines: Machines,
    recipe_name: str,
    batches: Sequence[BatchSection],
    kinds: Sequence[Checkpointing],
) -> list[Fitting]:
    """The last of ever larger `batches` with which a run fits, for each of `kinds`; the fastest by the forecast first,
    and none if a GPU's memory is not known. Selective checkpointing is left out unless products take most of its time:
    it decides about each operation on the host, and was slower than recomputing all where those are small
    (docs/on_gpu.md).

    Raises:
        RecipeError: there is no forecast.
    """
    traces = TraceCache(config_of(recipe)[0], recipe, recipe_name)
    found: dict[Checkpointing, Fitting] = {}
    for kind in sorted(kinds, key=lambda one: one is not True):
        model = recipe.model.model_copy(update={"gradient_checkpointing": kind})

        def of(batch: BatchSection, model: ModelSection = model) -> Forecast:
            return forecast(traces.changed(batch=batch, model=model), strategy, machines, limits=False)

        def is_too_large(batch: BatchSection) -> bool:
            if machines.usable_gib is None:
                return True
            one = of(batch)
            if one.verdict == "no forecast":
                raise RecipeError(one.why)
            return one.verdict not in ("fits", *UNKNOWN)

        def is_bound_by_products(batch: BatchSection) -> bool:
            return (time := of(batch).time) is not None and time.bottleneck == "compute"

        def most(model: ModelSection = model) -> int | None:
            smallest = traces.changed(batch=batches[0], model=model)
            return forecast(smallest, strategy, machines).largest_micro_batch

        is_judged = kind == "selective" and len(kinds) > 1
        # It fits with no larger batch than if all is recomputed, and with a smaller one products take less.
        if is_judged and True in found and not is_bound_by_products(found[True].batch):
            continue
        if count := _first_too_large(batches, is_too_large, most):
            last = batches[count - 1]
            if not is_judged or is_bound_by_products(last):
                found[kind] = Fitting(kind, last, of(last))
    return sorted((found[kind] for kind in kinds if kind in found), key=lambda one: one.seconds)


def _first_too_large(
    batches: Sequence[BatchSection], is_too_large: Callable[[BatchSection], bool], most: Callable[[], int | None]
) -> int:
    """The number of the first that is too large; as many as there are if none is. Those around `most` are tried first,
    so that it takes as long for thousands, the largest of which would take longest, as for ten.

    Args:
        most: an estimate of the most samples that fit, if there is one.
    """
    low, high = 0, len(batches)
    if high > 3 and not is_too_large(batches[0]) and (size := most()):
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
    able = [one for one in report.forecasts if one.verdict in MAY_RUN]
    chosen = able if all_of_them else able[: 1 if model.compile else MOST_BY_AUTO]
    chosen += [one for one in report.forecasts if Path(one.strategy.path) == own and one.plan and one not in chosen]
    keys = autos(recipe) or [MICRO_BATCH, CHECKPOINTING]
    kinds = KINDS if CHECKPOINTING in keys else [model.gradient_checkpointing]
    found = []
    for one in chosen:
        assert one.plan is not None
        batches = [recipe.batch]
        if MICRO_BATCH in keys and recipe.batch.micro_batch_tokens is None:
            share = recipe.batch.global_batch_size // one.plan.data_parallel_size
            sizes = [1] if one.strategy.pp_size > 1 else even(share)
            batches = [recipe.batch.model_copy(update={"micro_batch_size": size}) for size in sizes]
        try:
            fits = fitting(recipe, one.strategy, machines, recipe_name, batches, kinds)
        except RecipeError:
            continue
        for best in fits[:1]:
            settings = {"gradient_checkpointing": best.checkpointing}
            traces = TraceCache(config_of(recipe)[0], recipe, recipe_name)
            traces = traces.changed(batch=best.batch, model=model.model_copy(update=settings))
            compiled = None if model.compile else time_compiled(traces, one.strategy, machines)
            found.append(ByAuto(one.strategy, best, compiled))
    return found
