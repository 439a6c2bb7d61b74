"""The forecasts of all strategies on given machines, best first; what to change if none fits; a next start."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, cast

from cookbook.config.recipe import Recipe
from cookbook.config.sections import AdapterSection, BatchSection, Checkpointing, ModelSection
from cookbook.config.strategy import Strategy
from cookbook.forecast.costs.flops import Step, sizes_of, work
from cookbook.forecast.costs.inputs import bytes_of, micro_batch_of
from cookbook.forecast.memory import GIB
from cookbook.forecast.mesh_sizes import changed_sizes, in_words, resized, sizes_of_mesh
from cookbook.forecast.skeleton import skeleton
from cookbook.forecast.step_time import Range, caveat, no_forecast, share_of_peak
from cookbook.forecast.trace import scores_in_words
from cookbook.forecast.verdict import (
    MAY_RUN,
    UNKNOWN,
    Forecast,
    TraceCache,
    Verdict,
    forecast,
    may_fit,
    rank,
    time_compiled,
)
from cookbook.start.run_plan import CHECKPOINTING, KINDS, MICRO_BATCH, autos, even
from cookbook.system.files import RecipeError
from cookbook.system.hardware import GPUS, USUAL_GPUS, Machines, in_gib, parse_machines
from cookbook.training.models.structure import config_of, find_config, not_served

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


def forecast_all(
    recipe: Recipe,
    strategies: list[Strategy],
    machines: Machines,
    recipe_name: str,
    others: Sequence[Strategy] = (),
    *,
    limits: bool = True,
    more: bool = False,
    is_whole: bool = True,
) -> PlanReport:
    """Forecasts of all strategies, ranked by verdict, time and simplicity.

    Args:
        others: strategies to suggest if none of `strategies` fits.
        limits: also find the largest micro-batch and the longest sequence, which takes twice as long.
        more: name each kind of change that helps and not the first alone, how many GPUs would do among them; also where
            something fits that offloads or is not sure to.
        is_whole: with `more`, name all kinds of change and not the first that helps.

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
    found = [forecast(traces, strategy, machines, limits=limits) for strategy in strategies]
    ranked = _simplest_first(sorted(found, key=rank), machines)
    best, suggestion = ranked[0], None
    is_small = small_batch(recipe, machines) is not None and best.verdict == "cannot run"
    if is_small or best.verdict == "does not fit" or (more and best.verdict in MAY_RUN and not _is_sure(best)):
        ways = Ways(traces, strategies, others, machines, is_sure=best.verdict in MAY_RUN)
        suggestion = ways.in_words() if is_whole and more else ways.first() if more else next(iter(ways), None)
    return PlanReport(
        recipe=traces.recipe,
        machines=machines,
        forecasts=ranked,
        origin=origin,
        suggestion=suggestion,
        no_time=no_forecast(machines, recipe.mixed_precision),
        time_caveat=caveat(traces.sizes),
        model=config.model_type,
        num_parameters=traces.sizes.num_parameters,
        num_trained=traces.sizes.num_trained,
        scores=scores_in_words(config, traces.recipe),
        notes=(
            *traces.skeleton.notes,
            *filter(None, [scores_in_words(config, traces.recipe)]),
            *_teacher_notes(recipe, machines),
            *filter(None, [small_batch(recipe, machines)]),
        ),
    )


def _is_sure(one: Forecast) -> bool:
    """Whether it fits without a doubt on the GPUs alone."""
    return one.verdict in ("fits", "not judged") and not one.strategy.offloads


def _simplest_first(ranked: list[Forecast], machines: Machines) -> list[Forecast]:
    """On one GPU one process without an engine comes before what is faster by less than the forecast's own width."""
    best = next(iter(ranked), None)
    if best is None or best.verdict not in MAY_RUN:  # then the nearest comes first
        return ranked
    simple = next((one for one in ranked if one.strategy.kind == "single" and one.verdict == best.verdict), None)
    if machines.num_gpus != 1 or simple is None or simple.time is None or best.time is None:
        return ranked
    if simple.time.low > best.time.high:
        return ranked
    return [simple, *(one for one in ranked if one is not simple)]


@dataclass(frozen=True)
class Ways:
    """What to change if nothing fits, or is sure to: of each kind the first change that helps."""

    traces: TraceCache
    strategies: Sequence[Strategy]
    others: Sequence[Strategy]
    """That may take the place of `strategies`."""
    machines: Machines
    is_sure: bool = False
    """Whether only what fits without a doubt counts, on the GPUs alone."""

    def __iter__(self) -> Iterator[str]:
        """Other strategies; a smaller micro-batch, recomputation, both, its inputs in host memory; an adapter."""
        new = self._new
        if self._is_small:
            yield from self._of_batch()
            return
        if best := self._best(self.traces, new):
            yield f"strategy {best.strategy.name} fits{_if_there(best)}"
        for ladder in (self._of_memory(), self._of_adapters()):
            for words, changes in ladder:
                try:
                    changed = self.traces.changed(**changes)
                except RecipeError:  # nobody wrote these settings, so that they do not suit this model is no mistake
                    continue
                every = _without_fsdp1([*self.strategies, *new])
                divided = [one for one in every if sizes_of_mesh(one)]  # with a trace for each
                plain = [one for one in every if one not in divided]
                if best := self._best(changed, plain) or self._best(changed, divided):
                    yield f"with {words}, {best.strategy.name} fits{_if_there(best)}"
                    break

    def _of_batch(self) -> Iterator[str]:
        """A global batch with samples for each GPU, with what else it takes; or fewer GPUs for that of the recipe."""
        recipe = self.traces.recipe
        each = self.machines.num_gpus * micro_batch_of(recipe)
        size = -(-recipe.batch.global_batch_size // each) * each
        larger = recipe.batch.model_copy(update={"global_batch_size": size})
        enlarged = replace(self, traces=self.traces.changed(batch=larger))
        every = _without_fsdp1([*self.strategies, *self._new])
        words = f"with batch.global_batch_size: {size}"
        if best := self._best(enlarged.traces, [strategy for strategy in every if not sizes_of_mesh(strategy)]):
            yield f"{words}, {best.strategy.name} fits{_if_there(best)}"
        else:
            yield from (f"{words}, {way.removeprefix('with ')}" for way in islice(enlarged, 1))
        for fewer in _fewer_gpus(self.machines, recipe.batch.global_batch_size):
            if best := best_that_fits(self.traces, every, fewer, ("fits", *UNKNOWN)):
                yield f"on {fewer.text}, {best.strategy.name} fits{_if_there(best)}"
                return

    def first(self) -> str | None:
        """The first that helps; where none does, how many GPUs or which would."""
        if way := next(chain(self, self._of_meshes()), None):
            return way
        every = _without_fsdp1([*self.strategies, *self._new])
        enough = "" if self._is_small else _enough(self.traces, every, self.machines, self.is_sure)
        return f"take more: {enough}" if enough else None

    def in_words(self) -> str | None:
        """All of them, with other sizes of meshes, and how many GPUs or which would do."""
        every = _without_fsdp1([*self.strategies, *self._new])
        ways = [*self]
        enough = "" if self._is_small else _enough(self.traces, every, self.machines, self.is_sure)
        ways = [*self._of_meshes(), *ways]
        if not ways and not self.is_sure:
            return f"{NOTHING_HELPS}: {enough}" if enough else None
        return "; or ".join([*ways, *([f"take more: {enough}"] if enough else [])]) or None

    @property
    def _is_small(self) -> bool:
        return small_batch(self.traces.recipe, self.machines) is not None

    @property
    def _new(self) -> list[Strategy]:
        known = {strategy.path for strategy in self.strategies}
        return [strategy for strategy in self.others if strategy.path not in known]

    def _best(self, traces: TraceCache, strategies: Sequence[Strategy]) -> Forecast | None:
        able = [one for one in strategies if not (self.is_sure and one.offloads)]
        return best_that_fits(traces, able, self.machines, ("fits",) if self.is_sure else ("fits", *UNKNOWN))

    def _of_meshes(self) -> Iterator[str]:
        """A strategy that fits with other sizes than those of its file."""
        every = [*self.strategies, *self._new]
        if best := self._best(self.traces, _other_sizes(every, self.machines)):
            sizes = in_words(changed_sizes(every, best.strategy))
            yield f"with {sizes} in its file, {best.strategy.name} fits{_if_there(best)}"

    def _of_memory(self) -> Iterator[tuple[str, dict[str, Any]]]:
        recipe = self.traces.recipe
        if micro_batch_of(recipe) > 1:
            yield "batch.micro_batch_size: 1", self._small
        if recipe.model.recompute is not True:
            yield "model.gradient_checkpointing: true", self._saved
            both = self._small | self._saved
            yield "batch.micro_batch_size: 1 and model.gradient_checkpointing: true", both
        if recipe.model.gradient_checkpointing != "offload" and not recipe.model.compile:
            hosted = recipe.model.model_copy(update={"gradient_checkpointing": "offload"})
            words = "batch.micro_batch_size: 1 and " * (micro_batch_of(recipe) > 1)
            yield f"{words}model.gradient_checkpointing: offload", self._small | {"model": hosted}

    def _of_adapters(self) -> Iterator[tuple[str, dict[str, Any]]]:
        recipe, least = self.traces.recipe, self._small | self._saved
        words = ", batch.micro_batch_size: 1" * (micro_batch_of(recipe) > 1)
        words += ", model.gradient_checkpointing: true" * (recipe.model.recompute is not True)
        if recipe.adapter is None:
            for name in ("lora", "qlora"):
                yield f"adapter: {{name: {name}}}{words}", least | {"adapter": AdapterSection(name=name)}
        elif recipe.adapter.name == "lora":
            four_bits = recipe.adapter.model_copy(update={"name": "qlora"})
            yield f"adapter.name: qlora{words}", least | {"adapter": four_bits}

    @property
    def _small(self) -> dict[str, Any]:
        batch = self.traces.recipe.batch
        return {"batch": batch.model_copy(update={"micro_batch_size": 1, "micro_batch_tokens": None})}

    @property
    def _saved(self) -> dict[str, Any]:
        """Recomputation, unless the recipe has what needs less."""
        model = self.traces.recipe.model
        if model.recompute is True:
            return {}
        return {"model": model.model_copy(update={"gradient_checkpointing": True})}


def small_batch(recipe: Recipe, machines: Machines) -> str | None:
    """Say why most strategies cannot run, if a step has fewer samples than there are GPUs."""
    size, count = recipe.batch.global_batch_size, machines.num_gpus
    if size >= count:
        return None
    return (
        f"batch.global_batch_size: {size} is less than the {count:,} GPUs, so that only meshes can share it;"
        f" take fewer GPUs, or batch.global_batch_size: {count}"
    )


def _fewer_gpus(machines: Machines, most: int) -> Iterator[Machines]:
    """At most so many of the GPUs, powers of two, the most first."""
    kind = re.sub(r"^(\d+x)*", "", machines.text)
    count = 1 << most.bit_length() - 1
    while count >= 1:
        each = min(count, 1 << machines.gpus_each.bit_length() - 1)
        text = f"{count // each}x" * (count > each) + f"{each}x{kind}"
        yield replace(machines, text=text, gpus_each=each, num_machines=count // each)
        count //= 2


def _without_fsdp1(strategies: list[Strategy]) -> list[Strategy]:
    """FSDP1's flat shards are reckoned for each process, and what they save FSDP2's do too."""
    return [one for one in strategies if one.kind != "fsdp1"] or strategies


def _other_sizes(strategies: Sequence[Strategy], machines: Machines) -> list[Strategy]:
    pairs = [(written, one) for written in strategies for _, one in resized(written, machines)]
    return [one for written, one in pairs if one != written]


MORE_GPUS = 256
"""The most that are tried where fewer do not suffice."""


def _enough(traces: TraceCache, strategies: Sequence[Strategy], machines: Machines, is_sure: bool = False) -> str:
    """How many of these GPUs would do, and how large as many would have to be, or where neither does how many of which,
    with strategies that share the weights or, on one GPU, need not: `fsdp2 fits on 4x24GB, single on 1x80GB`; empty
    where none is found."""
    small = traces.recipe.batch.model_copy(update={"micro_batch_size": 1, "micro_batch_tokens": None})
    if not machines.gpus_each:
        return ""
    try:
        changed = traces.changed(batch=small)
    except RecipeError:  # as in `Ways`
        return ""
    able = [one for one in strategies if not (is_sure and one.offloads)]
    divided = [one for one in able if max(one.tp_size, one.pp_size) > 1]
    sharing = [one for one in able if one.kind == "single" or one.fsdp is not None or one.zero_stage == 3]
    sharing = [one for one in sharing if one not in divided]
    verdicts: tuple[Verdict, ...] = ("fits",) if is_sure else ("fits", *UNKNOWN)
    found: list[str] = []
    for ways in (more_gpus, _larger, _more_and_larger):
        if found and ways is _more_and_larger:
            break
        for way in ways(machines):
            best = best_that_fits(changed, sharing, way, verdicts)
            if best is None and ways is more_gpus and way.num_machines == 1:
                best = best_that_fits(changed, [*divided, *_other_sizes(divided, way)], way, verdicts)
            if best:
                text = re.sub(r"^(\d+x)+", "1x", way.text) if best.strategy.kind == "single" else way.text
                sizes = in_words(changed_sizes(able, best.strategy))
                name = f"{best.strategy.name}{sizes and f' with {sizes}'}"
                found.append(f"{name}{' fits' * (not found)} on {text}{_if_there(best)}")
                break
    return ", ".join(found) + ", with batch.micro_batch_size: 1" * bool(found and micro_batch_of(traces.recipe) > 1)


def more_gpus(machines: Machines) -> Iterator[Machines]:
    """The same GPUs, twice as many each time, powers of two: of a machine up to 8, then such machines."""
    kind = re.sub(r"^(\d+x)*", "", machines.text)
    each, count = machines.gpus_each, machines.num_machines
    while 2 * each * count <= MORE_GPUS:
        if each & (each - 1):
            each = 1 << each.bit_length()
        else:
            each, count = (2 * each, count) if 2 * each <= USUAL_GPUS and count == 1 else (each, 2 * count)
        text = f"{count}x" * (count > 1) + f"{each}x{kind}"
        yield replace(machines, text=text, gpus_each=each, num_machines=count)


def _larger(machines: Machines) -> Iterator[Machines]:
    """As many GPUs with more memory, as they are sold, the smallest first."""
    counts = f"{machines.num_machines}x" * (machines.num_machines > 1) + f"{machines.gpus_each}x"
    for gb in sorted({gpu.sold_gb for gpu in GPUS}):
        larger = parse_machines(f"{counts}{gb}GB")
        if machines.usable_gib and larger.usable_gib and larger.usable_gib > machines.usable_gib:
            yield replace(
                larger, host_gib=machines.host_gib, nvme_gib=machines.nvme_gib, fabric_gbits=machines.fabric_gbits
            )


def _more_and_larger(machines: Machines) -> Iterator[Machines]:
    """More GPUs with more memory, the least memory in all first, in machines of which nothing else is known."""
    more = [(way.num_gpus, way.num_machines, way.gpus_each) for way in more_gpus(machines)]
    sizes = [(way.usable_gib or 0, way.text.rpartition("x")[2]) for way in _larger(machines)]
    for (_, count, each), (_, size) in sorted(product(more, sizes), key=lambda pair: pair[0][0] * pair[1][0]):
        yield parse_machines(f"{count}x{each}x{size}" if count > 1 else f"{each}x{size}")


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


def rung_below(
    recipe: Recipe, strategy: Strategy, machines: Machines, recipe_name: str, others: Sequence[Strategy]
) -> str | None:
    """The first change that makes a run fit which ran out of GPU memory, even if it was forecast to fit.

    The usable memory is taken to be at most the forecast, since the real need was higher than the GPU's memory.

    Args:
        others: strategies to suggest.
    """
    traces = TraceCache(config_of(recipe)[0], recipe, recipe_name)
    return next(iter(Ways(traces, [strategy], others, _less_than(traces, strategy, machines))), None)


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
    """The first of `batches` with which a run may fit; each may where there is no forecast."""
    traces = TraceCache(config_of(recipe)[0], recipe, recipe_name)
    for batch in batches:
        found = forecast(traces.changed(batch=batch), strategy, machines, limits=False)
        if found.verdict in (*MAY_RUN, "no forecast"):
            return batch
    return None


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
    traces = TraceCache(config_of(recipe)[0], recipe, recipe_name)
    machines = _less_than(traces, strategy, machines)
    for batch in batches:
        if found := best_that_fits(traces.changed(batch=batch), others, machines, ("fits",)):
            return found.strategy, batch
    return None


def best_that_fits(
    traces: TraceCache, strategies: Sequence[Strategy], machines: Machines, verdicts: Sequence[Verdict]
) -> Forecast | None:
    """The best forecast with one of these verdicts."""
    possible = (strategy for strategy in strategies if may_fit(traces, strategy, machines))
    found = (forecast(traces, strategy, machines, limits=False) for strategy in possible)
    ranked = sorted((one for one in found if one.verdict in verdicts), key=rank)
    return next(iter(_simplest_first(ranked, machines)), None)


def _if_there(one: Forecast) -> str:
    """The condition under which a strategy fits, if its verdict has one."""
    if one.verdict not in UNKNOWN:
        return ""
    disk = f" and {in_gib(one.disk)} GiB of NVMe" if one.disk else ""
    return f" if a machine has {in_gib(one.host)} GiB of memory{disk}"
