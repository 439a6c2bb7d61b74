"""The forecasts of all strategies on given machines, best first."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from transformers import PreTrainedConfig

from cookbook.config.recipe import Recipe
from cookbook.config.sections import ModelSection
from cookbook.config.strategy import Strategy
from cookbook.facts.served_code import ServedCode
from cookbook.forecast.changes import NOTHING_HELPS, Changes, small_batch
from cookbook.forecast.costs.flops import Step, sizes_of, work
from cookbook.forecast.costs.inputs import bytes_of
from cookbook.forecast.memory import GIB
from cookbook.forecast.order import in_order, plain_first
from cookbook.forecast.sampler import SamplerForecast, forecast_sampler
from cookbook.forecast.step_time import caveat, share_of_peak
from cookbook.forecast.verdict import MAY_RUN, Forecast, TraceCache, forecast, skeleton_of, why_no_time
from cookbook.system.files import RecipeError, refuse
from cookbook.system.hardware import Machines, in_gib
from cookbook.training.models.structure import config_of, doubts_about, find_config, why_not_trained


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The forecasts of all strategies, best first."""

    recipe: Recipe
    machines: Machines
    forecasts: list[Forecast]
    origin: str
    """The source of the model's structure."""
    suggestion: str | None
    """Changes to make if nothing fits, or if what may fit is not sure to or moves its state to the host or a disk."""
    no_time: str | None
    """Why there is no forecast of time, if there is none."""
    time_caveat: str | None
    """Costs that the forecast of time omits, if they matter."""
    model: str
    """The model type."""
    num_parameters: int
    num_trained: int
    notes: tuple[str, ...] = ()
    """On the recipe."""
    doubts: tuple[str, ...] = ()
    """Reasons why they may be of another run than the one that is meant, see `doubts_about`."""
    scores: str | None = None
    """Memory of attention without a kernel, if the model has such."""
    sampler: SamplerForecast | None = None
    """The sampler of a recipe with rounds."""
    left_out: tuple[Strategy, ...] = ()
    """Strategies without a forecast, which surely come after the first."""


def forecast_all(
    recipe: Recipe,
    strategies: list[Strategy],
    machines: Machines,
    recipe_name: str,
    others: Sequence[Strategy] = (),
    *,
    limits: bool = True,
    suggests: Literal["first", "all"] | None = None,
    first_alone: bool = False,
) -> PlanReport:
    """Forecasts of all strategies, ranked by verdict, time and simplicity.

    Args:
        others: strategies to suggest if none of `strategies` fits.
        limits: also find the largest micro-batch and the longest sequence, which takes twice as long.
        suggests: where nothing fits, or only what offloads or is not sure to, name the first change that helps, or of
            each kind the first; and how many GPUs would do, where no change helps or all are named.
        first_alone: leave out all but the first, if it is known without their traces.

    Raises:
        RecipeError: the model's structure is not available, or the model is not supported.
    """
    config, origin = config_of(recipe)
    refuse(why_not_trained(config, recipe.data.max_length, f"model.name_or_path is {recipe.model.name_or_path!r}"))
    if not machines.gpus_each:  # what goes to host memory on GPUs stays where it is
        model = recipe.model.model_copy(update={"gradient_checkpointing": recipe.model.recompute})
        recipe = recipe.model_copy(update={"model": model})
    traces = TraceCache(config, recipe, recipe_name)
    first = plain_first(traces, strategies, machines, limits=limits) if first_alone else None
    judged = strategies if first is None else []
    forecasts = [forecast(traces, strategy, machines, limits=limits) for strategy in judged]
    ranked = in_order(forecasts, machines) if first is None else [first]
    may_run = ranked[0].verdict in MAY_RUN
    trainer = ranked[0].memory
    trainer_bytes = None if trainer is None else max(trainer.needed)
    sampler = forecast_sampler(config, traces.recipe, traces.sizes, machines, trainer_bytes)
    changes = Changes(traces=traces, own=strategies, others=others, machines=machines, is_sure=may_run)
    return PlanReport(
        recipe=traces.recipe,
        machines=machines,
        forecasts=ranked,
        origin=origin,
        suggestion=_suggestion(changes, ranked[0], suggests),
        no_time=why_no_time(traces, machines),
        time_caveat=caveat(traces.sizes),
        model=config.model_type,
        num_parameters=traces.sizes.num_parameters,
        num_trained=traces.sizes.num_trained,
        doubts=(doubts := doubts_about(config, recipe.model, recipe.adapter)),
        scores=(scores := scores_in_words(config, traces.recipe, traces.skeleton.code)),
        sampler=sampler,
        left_out=() if first is None else tuple(other for other in strategies if other.kind != "single"),
        notes=(
            *traces.skeleton.notes,
            *doubts,
            *filter(None, [scores]),
            *_teacher_notes(recipe, machines),
            *([] if sampler is None else [f"sampler: {sampler.words}"]),
            *filter(None, [small_batch(recipe, machines)]),
        ),
    )


def scores_in_words(config: PreTrainedConfig, recipe: Recipe, code: ServedCode) -> str | None:
    """A note on the memory of attention that no kernel computes: how large one tensor of a layer's scores is."""
    length, heads = recipe.data.max_length, getattr(config, "num_attention_heads", None)
    if heads is None or not code.holds_scores:  # Mamba and RWKV have no attention
        return None
    size = in_gib(2 * len(recipe.objective.sequences) * heads * length**2)
    return (
        f"no kernel computes the attention of {config.model_type} here: {heads} heads x {length:,} x {length:,} scores"
        f" are {size} GiB a sample, and a layer holds several such tensors; without recomputation each layer does"
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


def _is_sure(forecast: Forecast) -> bool:
    """Return whether a strategy fits without a doubt on the GPUs alone."""
    return forecast.verdict in ("fits", "not judged") and not forecast.strategy.offloads


def _teacher_notes(recipe: Recipe, machines: Machines) -> list[str]:
    """Say what a teacher takes before the first step."""
    asked = recipe.objective.asks
    if asked is None:
        return []
    notes = [f"teacher {asked.teacher}: {asked.words()}"]
    model = ModelSection(name_or_path=asked.teacher)
    try:
        config, _ = find_config(model)
        sizes = sizes_of(config, skeleton_of(config, recipe.model_copy(update={"model": model, "adapter": None})))
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
