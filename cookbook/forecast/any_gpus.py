"""For each GPU of the table the least number on which a recipe fits, as `launch` would run it with `auto`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from cookbook.config.recipe import Recipe
from cookbook.config.sections import Checkpointing
from cookbook.config.strategy import Strategy
from cookbook.forecast.fitting import Fitting, fitting
from cookbook.forecast.mesh_sizes import sizes_of_mesh
from cookbook.forecast.order import best_that_fits
from cookbook.forecast.other_machines import more_gpus
from cookbook.forecast.ranking import scores_in_words
from cookbook.forecast.sampler import SamplerForecast, SamplerMemory, forecast_sampler, sampler_memory
from cookbook.forecast.step_time import Range, caveat
from cookbook.forecast.verdict import PRICED_TOKENS, UNKNOWN, Forecast, TraceCache, tokens_of_step, why_no_time
from cookbook.start.run_plan import even
from cookbook.system.files import RecipeError, refuse
from cookbook.system.hardware import Gpu, Machines, parse_machines
from cookbook.system.prices import PRICES
from cookbook.training.models.structure import config_of, doubts_about, why_not_trained

KINDS: tuple[Checkpointing, ...] = (False, True)
"""Kinds of checkpointing; without the selective one, which takes as many traces again for a few percent."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The least number of one kind of GPU."""

    gpu: Gpu
    recipe: Recipe
    """As it runs there."""
    machines: Machines
    best: Fitting
    sampler: SamplerForecast | None
    """The sampler there; None for a recipe without rounds."""
    per_hour: float | None
    """Price of one GPU for an hour; None: not known."""

    @property
    def forecast(self) -> Forecast:
        return self.best.forecast

    @property
    def time(self) -> Range | None:
        return self.best.time

    @property
    def tokens_of_step(self) -> int:
        return tokens_of_step(self.recipe)

    def hours(self, num_steps: int | None) -> tuple[float, float] | None:
        """Hours of a run, or where its length is not known of `PRICED_TOKENS` tokens."""
        if self.time is None:
            return None
        return self.time.hours(PRICED_TOKENS / self.tokens_of_step if num_steps is None else num_steps)

    def price(self, num_steps: int | None) -> tuple[float, float] | None:
        """Price of the same."""
        hours = self.hours(num_steps)
        if hours is None or self.per_hour is None:
            return None
        low, high = (value * self.per_hour * self.machines.num_gpus for value in hours)
        return low, high


@dataclass(frozen=True, kw_only=True)
class CardReport:
    """The needs of a recipe on each kind of GPU."""

    recipe: Recipe
    cards: list[Card]
    """The cheapest first, then those without a price or a time by their number."""
    refused: dict[str, list[str]]
    """Names of GPUs on which it does not fit, by the reason."""
    model: str
    origin: str
    num_parameters: int
    num_trained: int
    no_time: list[str]
    """Why there is no forecast of time, where there is none."""
    notes: tuple[str, ...]
    doubts: tuple[str, ...]
    """As of a `PlanReport`, and the next two."""
    scores: str | None
    time_caveat: str | None
    why_any: str | None = None
    """Why no machines were taken, if nobody asked for any GPUs."""


def for_each_card(
    recipe: Recipe,
    strategies: Sequence[Strategy],
    recipe_name: str,
    gpus: Sequence[Gpu],
    *,
    price: float | None = None,
    is_free: bool = False,
    room: dict[str, Any],
) -> CardReport:
    """The least number of each of `gpus`, a power of two.

    Args:
        price: of any GPU for an hour; None: as listed.
        is_free: nobody wrote precision and global batch, so that they follow the GPUs.
        room: of a machine, as for `parse_machines`.

    Raises:
        RecipeError: the model's structure is not available, or the model is not supported.
    """
    config, origin = config_of(recipe)
    refuse(why_not_trained(config, recipe.data.max_length, f"model.name_or_path is {recipe.model.name_or_path!r}"))
    doubts, traces = doubts_about(config, recipe.model, recipe.adapter), TraceCache(config, recipe, recipe_name)
    scores = scores_in_words(config, recipe, traces.skeleton.code)
    # By precision, which alone differs between kinds of GPUs: the model is traced.
    measured: dict[str, SamplerMemory] = {}

    def measure(config: PreTrainedConfig, recipe: Recipe) -> SamplerMemory:
        if (precision := recipe.compute_precision) not in measured:
            measured[precision] = sampler_memory(config, recipe)
        return measured[precision]

    cards: list[Card] = []
    refused: dict[str, list[str]] = {}
    for gpu in gpus:
        machines = parse_machines(f"1x{gpu.name}", **room)
        per_hour = PRICES.get(gpu.name) if price is None else price
        try:
            cards.append(_least(recipe, strategies, machines, recipe_name, per_hour, is_free, measure))
        except RecipeError as error:
            refused.setdefault("; ".join(error.mistakes), []).append(gpu.name)
    return CardReport(
        recipe=recipe,
        cards=sorted(cards, key=_by_price),
        refused=refused,
        model=config.model_type,
        origin=origin,
        num_parameters=traces.sizes.num_parameters,
        num_trained=traces.sizes.num_trained,
        no_time=list(
            dict.fromkeys(filter(None, (why_no_time(TraceCache(config, card.recipe), card.machines) for card in cards)))
        ),
        notes=(*traces.skeleton.notes, *doubts, *filter(None, [scores])),
        doubts=doubts,
        scores=scores,
        time_caveat=caveat(traces.sizes),
    )


def simple(strategies: Sequence[Strategy]) -> list[Strategy]:
    """Strategies that any number of GPUs can run, without a mesh whose sizes are written and without offloading."""
    plain = [strategy for strategy in strategies if not strategy.offloads and not sizes_of_mesh(strategy)]
    return [strategy for strategy in plain if strategy.kind != "fsdp1"] or plain


def _by_price(card: Card) -> tuple[Any, ...]:
    price = card.price(None)
    return price is None, sum(price or ()), card.machines.num_gpus, card.gpu.memory_mib, card.gpu.name


def _least(
    recipe: Recipe,
    strategies: Sequence[Strategy],
    machines: Machines,
    recipe_name: str,
    per_hour: float | None,
    is_free: bool,
    measure: Callable[[PreTrainedConfig, Recipe], SamplerMemory],
) -> Card:
    """Raises RecipeError where no number of these GPUs does, with the reason."""
    gpu = machines.gpu
    assert gpu is not None
    if recipe.mixed_precision == "bf16" and not gpu.has_bf16:
        if not is_free:
            raise RecipeError("no bf16; write mixed_precision: fp16")
        recipe = recipe.model_copy(update={"mixed_precision": "fp16"})
    config, lacks_room = config_of(recipe)[0], False
    for way in (machines, *more_gpus(machines)):
        tried = _with_batch_for(recipe, way.num_gpus) if is_free else recipe
        if tried.batch.global_batch_size < way.num_gpus:
            raise RecipeError(
                f"needs more than the {tried.batch.global_batch_size} GPUs that batch.global_batch_size allows"
            )
        model = tried.model.model_copy(update={"gradient_checkpointing": True})
        batch = tried.batch.model_copy(update={"micro_batch_size": 1, "micro_batch_tokens": None})
        traces = TraceCache(config, tried.model_copy(update={"batch": batch, "model": model}), recipe_name)
        if best := best_that_fits(traces, strategies, way, ("fits", *UNKNOWN)):
            settings = _by_auto(tried, best, way, recipe_name)
            memory = settings.forecast.memory
            trainer_bytes = None if memory is None else max(memory.needed)
            sampler = forecast_sampler(config, tried, traces.sizes, way, trainer_bytes, measure)
            if sampler is None or sampler.fits:
                return Card(gpu=gpu, recipe=tried, machines=way, best=settings, sampler=sampler, per_hour=per_hour)
            lacks_room = True
            if tried.rounds is None or not tried.rounds.max_staleness:  # a GPU to itself: more of them help none
                break
    if lacks_room:
        raise RecipeError("the sampler has no room on one of them; rounds.generation_batch_size makes it smaller")
    raise RecipeError(f"does not fit on {way.text.rpartition('x')[0]} either")


def _with_batch_for(recipe: Recipe, num_gpus: int) -> Recipe:
    """The recipe with a global batch that so many processes can share, as `init` rounds it up."""
    size = -(-recipe.batch.global_batch_size // num_gpus) * num_gpus
    return recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"global_batch_size": size})})


def _by_auto(recipe: Recipe, best: Forecast, machines: Machines, recipe_name: str) -> Fitting:
    """The strategy with the micro-batch and checkpointing of `auto`, or if no larger one fits with the least."""
    assert best.plan is not None
    share = recipe.batch.global_batch_size // best.plan.data_parallel_size
    sizes = [1] if best.strategy.pp_size > 1 else even(share)
    batches = [recipe.batch.model_copy(update={"micro_batch_size": size, "micro_batch_tokens": None}) for size in sizes]
    return fitting(recipe, best.strategy, machines, recipe_name, batches, KINDS, best_alone=True)[0]
