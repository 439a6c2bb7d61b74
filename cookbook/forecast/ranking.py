"""The forecasts of all strategies on given machines, best first; what to change if none fits; a next start."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cookbook.config.recipe import Recipe
from cookbook.config.sections import AdapterSection, BatchSection
from cookbook.config.strategy import Strategy
from cookbook.forecast.costs.inputs import micro_batch_of
from cookbook.forecast.memory import GIB
from cookbook.forecast.step_time import caveat, no_forecast
from cookbook.forecast.verdict import MAY_RUN, UNKNOWN, Forecast, TraceCache, Verdict, forecast, rank
from cookbook.system.files import RecipeError
from cookbook.system.hardware import Machines, in_gib
from cookbook.training.models.structure import find_config, not_served

NOTHING_HELPS = "no other strategy, smaller micro-batch, checkpointing or adapter helps: take more"


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The forecasts of all strategies, best first."""

    recipe: Recipe
    machines: Machines
    forecasts: list[Forecast]
    origin: str
    """The source of the model's structure."""
    suggestion: str | None
    """What to change if nothing fits."""
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


def forecast_all(
    recipe: Recipe,
    strategies: list[Strategy],
    machines: Machines,
    recipe_name: str,
    others: Sequence[Strategy] = (),
    *,
    limits: bool = True,
) -> PlanReport:
    """Forecasts of all strategies, ranked by verdict, time and simplicity.

    Args:
        others: strategies to suggest if none of `strategies` fits.
        limits: also find the largest micro-batch and the longest sequence, which takes twice as long.

    Raises:
        RecipeError: the model's structure is not available, or the model is not supported.
    """
    config, origin = find_config(recipe.model)
    if problem := not_served(config):
        raise RecipeError(f"model.name_or_path is {recipe.model.name_or_path!r}: {problem}")
    if not machines.gpus_each:  # what goes to host memory on GPUs stays where it is
        model = recipe.model.model_copy(update={"gradient_checkpointing": recipe.model.recompute})
        recipe = recipe.model_copy(update={"model": model})
    traces = TraceCache(config, recipe, recipe_name)
    found = [forecast(traces, strategy, machines, limits=limits) for strategy in strategies]
    ranked = sorted(found, key=rank)
    nothing_fits = ranked[0].verdict == "does not fit"
    return PlanReport(
        recipe=traces.recipe,
        machines=machines,
        forecasts=ranked,
        origin=origin,
        suggestion=_suggestion(traces, strategies, others, machines) if nothing_fits else None,
        no_time=no_forecast(machines, recipe.mixed_precision),
        time_caveat=caveat(traces.sizes),
        model=config.model_type,
        num_parameters=traces.sizes.num_parameters,
        num_trained=traces.sizes.num_trained,
        notes=traces.skeleton.notes,
    )


def rung_below(
    recipe: Recipe, strategy: Strategy, machines: Machines, recipe_name: str, others: Sequence[Strategy]
) -> str | None:
    """The first change that makes a run fit which ran out of GPU memory, even if it was forecast to fit.

    The usable memory is taken to be at most the forecast, since the real need was higher than the GPU's memory.

    Args:
        others: strategies to suggest.
    """
    traces = TraceCache(find_config(recipe.model)[0], recipe, recipe_name)
    return _suggestion(traces, [strategy], others, _less_than(traces, strategy, machines))


def _less_than(traces: TraceCache, strategy: Strategy, machines: Machines) -> Machines:
    """The machines with at most the GPU memory that is forecast for a run."""
    memory = forecast(traces, strategy, machines, limits=False).memory
    if memory is None:
        return machines
    needed = memory.needed[0] / GIB
    return replace(machines, usable_gib=min(needed, machines.usable_gib or needed))


def smaller_micro_batch(
    recipe: Recipe, strategy: Strategy, machines: Machines, recipe_name: str, batches: Sequence[BatchSection]
) -> BatchSection | None:
    """The first of `batches` with which a run may fit; each is taken where the forecast is only a bound."""
    traces = TraceCache(find_config(recipe.model)[0], recipe, recipe_name)
    for batch in batches:
        found = forecast(traces.changed(batch=batch), strategy, machines, limits=False)
        if found.verdict in MAY_RUN or (found.is_bound and found.verdict != "cannot run"):
            return batch
    return None


def next_strategy(
    recipe: Recipe,
    strategy: Strategy,
    machines: Machines,
    recipe_name: str,
    others: Sequence[Strategy],
    batches: Sequence[BatchSection],
) -> tuple[Strategy, BatchSection] | None:
    """The best strategy of `others` that needs less than was forecast for a run which ran out of GPU memory, with the
    first of `batches` under which one does.
    """
    traces = TraceCache(find_config(recipe.model)[0], recipe, recipe_name)
    machines = _less_than(traces, strategy, machines)
    for batch in batches:
        if found := _best(traces.changed(batch=batch), others, machines, ("fits",)):
            return found.strategy, batch
    return None


def _suggestion(
    traces: TraceCache, strategies: Sequence[Strategy], others: Sequence[Strategy], machines: Machines
) -> str | None:
    """The first change that makes something fit: another strategy, a smaller micro-batch, recomputation, both, its
    inputs in host memory, an adapter."""
    recipe, verdicts = traces.recipe, ("fits", *UNKNOWN)
    known = {strategy.path for strategy in strategies}
    new = [strategy for strategy in others if strategy.path not in known]
    if best := _best(traces, new, machines, verdicts):
        return f"strategy {best.strategy.name} fits{_if_there(best)}"
    small = recipe.batch.model_copy(update={"micro_batch_size": 1, "micro_batch_tokens": None})
    saved = recipe.model.model_copy(update={"gradient_checkpointing": True})
    ladder: list[tuple[str, dict[str, Any]]] = []
    if micro_batch_of(recipe) > 1:
        ladder.append(("batch.micro_batch_size: 1", {"batch": small}))
    if recipe.model.recompute is not True:
        both = {"batch": small, "model": saved}
        ladder.append(("model.gradient_checkpointing: true", {"model": saved}))
        ladder.append(("batch.micro_batch_size: 1 and model.gradient_checkpointing: true", both))
    if recipe.model.gradient_checkpointing != "offload" and not recipe.model.compile:
        hosted = recipe.model.model_copy(update={"gradient_checkpointing": "offload"})
        words = "batch.micro_batch_size: 1 and " * (micro_batch_of(recipe) > 1)
        ladder.append((f"{words}model.gradient_checkpointing: offload", {"batch": small, "model": hosted}))
    if recipe.adapter is None:
        for name in ("lora", "qlora"):
            less = {"adapter": AdapterSection(name=name), "batch": small, "model": saved}
            ladder.append((f"adapter: {{name: {name}}}, micro_batch_size: 1 and gradient_checkpointing: true", less))
    for words, changes in ladder:
        try:
            changed = traces.changed(**changes)
        except RecipeError:  # nobody wrote these settings, so that they do not suit this model is no mistake
            continue
        if best := _best(changed, [*strategies, *new], machines, verdicts):
            return f"with {words}, {best.strategy.name} fits{_if_there(best)}"
    return None


def _best(
    traces: TraceCache, strategies: Sequence[Strategy], machines: Machines, verdicts: Sequence[Verdict]
) -> Forecast | None:
    """The best forecast with one of these verdicts."""
    found = (forecast(traces, strategy, machines, limits=False) for strategy in strategies)
    return min((one for one in found if one.verdict in verdicts), key=rank, default=None)


def _if_there(one: Forecast) -> str:
    """The condition under which a strategy fits, if its verdict has one."""
    if one.verdict not in UNKNOWN:
        return ""
    disk = f" and {in_gib(one.disk)} GiB of NVMe" if one.disk else ""
    return f" if a machine has {in_gib(one.host)} GiB of memory{disk}"
