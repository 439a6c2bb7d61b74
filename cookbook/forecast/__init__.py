"""Before a run: will it fit, how fast will it be, which strategy to take. Numbers from the model's own code traced
without data (`trace`), from what each engine holds (`states`), and from data sheets (`speed`)."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from transformers import PreTrainedConfig

from cookbook.files import RecipeError
from cookbook.forecast.memory import GIB, Memory, peak
from cookbook.forecast.skeleton import Skeleton, Weight
from cookbook.forecast.skeleton import skeleton as skeleton_of
from cookbook.forecast.speed import Range, Sizes, Step, no_forecast, step_seconds
from cookbook.forecast.states import States
from cookbook.forecast.states import states as states_of
from cookbook.forecast.trace import Pass, Untraceable, bound
from cookbook.forecast.trace import trace as trace_pass
from cookbook.hardware import Machines
from cookbook.models.structure import find_config
from cookbook.plan import Plan, make_plan
from cookbook.recipe import Recipe
from cookbook.strategy import Strategy

__all__ = ["Forecast", "Outlook", "forecast", "forecast_all", "of_run"]

Verdict = Literal["fits", "tight", "does not fit", "cannot run"]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Of one strategy on given machines."""

    strategy: Strategy
    verdict: Verdict
    why: list[str]
    """Why it cannot run, or is not sure to fit."""
    num_processes: int = 0
    plan: Plan | None = None
    memory: Memory | None = None
    is_bound: bool = False
    """The model could not be traced: activations are a bound by formula."""
    host: int = 0
    """Bytes of a machine's memory for what is offloaded, all its processes."""
    disk: int = 0
    """Bytes of a machine's NVMe disk."""
    checkpoint: int = 0
    """Bytes of a checkpoint, all its files."""
    time: Range | None = None
    largest_micro_batch: int | None = None
    """Sequences (pairs) of max_length that fit; None where nothing is known of the GPU, or nothing fits."""
    longest: int | None = None
    """Tokens of a sequence that fit at micro-batch 1."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """All strategies, best first."""

    recipe: Recipe
    machines: Machines
    forecasts: list[Forecast]
    origin: str
    """Where the model's structure is from."""
    next_rung: str | None
    """What to change, where nothing fits."""
    no_time: str | None
    """Why there is no forecast of time, if there is none."""
    model: str
    """Its type."""
    num_parameters: int
    num_trained: int


def forecast_all(recipe: Recipe, strategies: list[Strategy], machines: Machines, recipe_name: str) -> Outlook:
    """Every strategy, ranked: what fits, then by time, then by how little there is to go wrong.

    Raises:
        RecipeError: there is no structure of the model to be had.
    """
    config, origin = find_config(recipe.model)
    workshop = _Workshop(config, recipe)
    found = [forecast(workshop, strategy, machines, recipe_name) for strategy in strategies]
    ranked = sorted(found, key=_rank)
    fits = any(one.verdict in ("fits", "tight") for one in ranked)
    rung = None if fits else _next_rung(config, recipe, strategies, machines, recipe_name)
    return Outlook(
        recipe=recipe,
        machines=machines,
        forecasts=ranked,
        origin=origin,
        next_rung=rung,
        no_time=no_forecast(machines, recipe.mixed_precision),
        model=config.model_type,
        num_parameters=workshop.sizes.num_parameters,
        num_trained=workshop.sizes.num_trained,
    )


class _Workshop:
    """What strategies share: the model's skeleton, and a trace for each way to compute."""

    def __init__(self, config: PreTrainedConfig, recipe: Recipe) -> None:
        self.config, self.recipe = config, recipe
        self.skeleton: Skeleton = skeleton_of(config, recipe)
        self.sizes = _sizes(config, self.skeleton)
        self.untraceable: str | None = None
        self._trace = cache(self._traced)

    def work(self, strategy: Strategy, micro_batch: int) -> Pass:
        """A micro-batch of so many samples, at their full length."""
        autocast = strategy.kind in ("single", "ddp", "tp")
        return self._trace(autocast, strategy.tp_size, micro_batch)

    def _traced(self, autocast: bool, tp_size: int, micro_batch: int) -> Pass:
        recipe = self.recipe
        sequences = micro_batch * (2 if recipe.objective.name == "dpo" else 1)
        length = recipe.data.max_length
        rows, row = (1, sequences * length) if recipe.data.packing else (sequences, length)
        if self.untraceable is None:
            try:
                return trace_pass(
                    self.config,
                    recipe,
                    rows=rows,
                    length=row,
                    num_targets=sequences * length,
                    autocast=autocast,
                    tp_size=tp_size,
                )
            except Untraceable as error:
                self.untraceable = str(error)
        return bound(self.config, recipe, tokens=sequences * length, tp_size=tp_size)


def of_run(config: PreTrainedConfig, recipe: Recipe, strategy: Strategy, plan: Plan) -> Memory:
    """What the run that begins should take of the GPU of each process."""
    workshop = _Workshop(config, recipe)
    held = states_of(workshop.skeleton, recipe, strategy, plan.num_processes)
    return _memory(workshop, strategy, held, plan, workshop.work(strategy, micro_batch_of(recipe)))


def micro_batch_of(recipe: Recipe) -> int:
    """Samples of a forward at their full length."""
    batch = recipe.batch
    if batch.micro_batch_size is not None:
        return batch.micro_batch_size
    assert batch.micro_batch_tokens is not None
    of_a_sample = recipe.data.max_length * (2 if recipe.objective.name == "dpo" else 1)
    return max(1, batch.micro_batch_tokens // of_a_sample)


def forecast(workshop: _Workshop, strategy: Strategy, machines: Machines, recipe_name: str) -> Forecast:
    """One strategy."""
    recipe, found = workshop.recipe, workshop.skeleton
    each = max(1, machines.gpus_each)
    count = strategy.num_processes or machines.num_gpus or 1
    try:
        if machines.num_gpus and count > machines.num_gpus:
            raise RecipeError([f"{strategy.path}: writes {count} processes, and there are {machines.num_gpus} GPUs"])
        asked = replace(strategy, num_machines=-(-count // each))
        plan = make_plan(
            recipe,
            asked,
            num_processes=count,
            num_gpus=min(count, each) if machines.gpus_each else 0,
            recipe_name=recipe_name,
        )
    except RecipeError as error:
        return Forecast(strategy=strategy, verdict="cannot run", why=error.mistakes, num_processes=count)
    held = states_of(found, recipe, strategy, count)
    memory = _memory(workshop, strategy, held, plan, workshop.work(strategy, micro_batch_of(recipe)))
    local = min(count, each)
    host, disk = held.host.total * local, held.disk.total * local
    verdict, why = _verdict(memory, host, disk, machines)
    largest = longest = None
    if machines.usable_gib is not None and held.gpu.total < machines.usable_gib * GIB:
        largest = _largest(workshop, strategy, held, plan, machines.usable_gib * GIB)
    if largest is not None:
        tokens = int(largest * recipe.data.max_length)
        positions = getattr(workshop.config, "max_position_embeddings", None) or tokens
        longest = min(tokens, positions) // 64 * 64
    return Forecast(
        strategy=strategy,
        verdict=verdict,
        why=why,
        num_processes=count,
        plan=plan,
        memory=memory,
        is_bound=workshop.untraceable is not None,
        host=host,
        disk=disk,
        checkpoint=checkpoint_bytes(found, recipe),
        time=_time(workshop, strategy, plan, machines, count),
        largest_micro_batch=None if largest is None else int(largest),
        longest=longest,
    )


def _time(workshop: _Workshop, strategy: Strategy, plan: Plan, machines: Machines, num_processes: int) -> Range | None:
    recipe = workshop.recipe
    if no_forecast(machines, recipe.mixed_precision) is not None:
        return None
    length = recipe.data.max_length
    step = Step(
        num_tokens=tokens_of_step(recipe),
        num_labelled=tokens_of_step(recipe),
        length=length,
        micro_batches=plan.gradient_accumulation_steps,
        recompute=recipe.model.gradient_checkpointing,
        precision=recipe.mixed_precision,
    )
    return step_seconds(strategy, workshop.sizes, step, machines, num_processes=num_processes)


def tokens_of_step(recipe: Recipe) -> int:
    """At most: every sample at its full length."""
    of_a_sample = 2 if recipe.objective.name == "dpo" else 1
    return recipe.batch.global_batch_size * of_a_sample * recipe.data.max_length


def _sizes(config: PreTrainedConfig, found: Skeleton) -> Sizes:
    text = config.get_text_config()
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    share = (getattr(text, "num_experts_per_tok", None) or 1) / experts

    def active(weight: Weight) -> float:
        """Elements that a token is multiplied by."""
        if len(weight.shape) < 2 or weight.layer is None:
            return 0.0
        return weight.num_elements * (share if ".experts." in weight.name else 1.0)

    heads = text.num_attention_heads
    head = [
        weight for weight in found.weights if weight.part == "head" or (found.is_tied and weight.part == "embedding")
    ]
    return Sizes(
        num_parameters=sum(weight.num_elements for weight in found.weights),
        num_trained=sum(weight.num_elements for weight in found.weights if weight.is_trained),
        num_matrix=round(sum(map(active, found.weights))),
        num_matrix_trained=round(sum(active(weight) for weight in found.weights if weight.is_trained)),
        head_trained=any(weight.is_trained for weight in head),
        num_layers=found.num_layers,
        hidden=text.hidden_size,
        num_heads=heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab=text.vocab_size,
    )


def _memory(workshop: _Workshop, strategy: Strategy, held: States, plan: Plan, work: Pass) -> Memory:
    is_sharded = plan.num_processes > 1 and (strategy.kind in ("fsdp1", "fsdp2") or strategy.zero_stage == 3)
    accumulates = plan.gradient_accumulation_steps > 1
    return peak(workshop.skeleton, held, work, accumulates=accumulates, is_sharded=is_sharded)


LARGEST = 2**20


def _largest(workshop: _Workshop, strategy: Strategy, held: States, plan: Plan, usable: float) -> float | None:
    """Samples of max_length in a forward that surely fit; a fraction tells of shorter samples.

    Every stretch of a forward and backward grows with the tokens: two traces tell of any number of them.
    """
    small = micro_batch_of(workshop.recipe)
    one, two = (workshop.work(strategy, size) for size in (small, 2 * small))

    def fits(size: float) -> bool:
        work = one.towards(two, size / small - 1)
        return _memory(workshop, strategy, held, plan, work).needed[1] <= usable

    low, high = 0.0, 1.0
    while fits(high) and high < LARGEST:
        low, high = high, 2 * high
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None


def _verdict(memory: Memory, host: int, disk: int, machines: Machines) -> tuple[Verdict, list[str]]:
    why = []
    verdict: Verdict = "fits"
    if machines.usable_gib is not None:
        low, high = memory.needed
        usable = machines.usable_gib * GIB
        if low > usable:
            verdict = "does not fit"
            why.append(f"needs {low / GIB:.0f} GiB or more of a GPU that has {usable / GIB:.0f}")
        elif high > usable:
            verdict = "tight"
            why.append(f"between {low / GIB:.0f} and {high / GIB:.0f} GiB of {usable / GIB:.0f}")
    for what, bytes_needed, there in (("host memory", host, machines.host_gib), ("NVMe", disk, machines.nvme_gib)):
        if there is not None and bytes_needed > there * GIB:
            verdict = "does not fit"
            why.append(f"needs {bytes_needed / GIB:.0f} GiB of {what}, and there are {there:.0f}")
    return verdict, why


def checkpoint_bytes(found: Skeleton, recipe: Recipe) -> int:
    """Weights and moments of what is trained, in float32, whatever the optimizer keeps them in."""
    kinds = {"adamw": 2, "adamw_8bit": 2, "sgd": 0 if recipe.optim.momentum == 0 else 1, "muon": 2}[recipe.optim.name]
    total = 0
    for weight in found.weights:
        if weight.is_trained:
            moments = 1 if recipe.optim.name == "muon" and weight.is_orthogonal else kinds
            total += weight.num_elements * 4 * (1 + moments)
    return total


SIMPLICITY = ("single", "ddp", "fsdp2", "zero", "fsdp1", "tp")


def _rank(one: Forecast) -> tuple:
    order = {"fits": 0, "tight": 1, "does not fit": 2, "cannot run": 3}[one.verdict]
    strategy = one.strategy
    offload = sum(kind is not None for kind in (strategy.offload_optimizer, strategy.offload_param))
    offload += 2 * (strategy.offload_param == "nvme") + bool(strategy.fsdp and strategy.fsdp.fsdp_offload_params)
    seconds = one.time.low + one.time.high if one.time else 0.0
    needed = one.memory.needed[1] if one.memory else 0
    if order == 2:  # the nearest first
        return order, needed, 0, 0, strategy.name
    return order, round(seconds, 3), offload, SIMPLICITY.index(strategy.kind), strategy.zero_stage, strategy.name


def _next_rung(
    config: PreTrainedConfig, recipe: Recipe, strategies: list[Strategy], machines: Machines, recipe_name: str
) -> str | None:
    """The first change with which something fits: a smaller micro-batch, recomputed activations, both, an adapter."""
    from cookbook.recipe import AdapterSection

    def changed(**sections: object) -> Recipe:
        return recipe.model_copy(update=sections)

    small = recipe.batch.model_copy(update={"micro_batch_size": 1, "micro_batch_tokens": None})
    saved = recipe.model.model_copy(update={"gradient_checkpointing": True})
    ladder = []
    if micro_batch_of(recipe) > 1:
        ladder.append(("batch.micro_batch_size: 1", changed(batch=small)))
    if recipe.model.gradient_checkpointing is not True:
        ladder.append(("model.gradient_checkpointing: true", changed(model=saved)))
        ladder.append(
            ("batch.micro_batch_size: 1 and model.gradient_checkpointing: true", changed(batch=small, model=saved))
        )
    if recipe.adapter is None:
        for name in ("lora", "qlora"):
            less = changed(adapter=AdapterSection(name=name), batch=small, model=saved)
            ladder.append((f"adapter: {{name: {name}}}, micro_batch_size: 1 and gradient_checkpointing: true", less))
    for words, other in ladder:
        workshop = _Workshop(config, other)
        fitting = [
            one for one in (forecast(workshop, s, machines, recipe_name) for s in strategies) if one.verdict == "fits"
        ]
        if fitting:
            best = min(fitting, key=_rank)
            return f"with {words}, {best.strategy.name} fits"
    return None
