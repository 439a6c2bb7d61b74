"""Changes with which a run fits: one list of changes, the cheapest first, and one search over it."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from cookbook.config.recipe import Recipe
from cookbook.config.sections import AdapterSection, BatchSection, Checkpointing
from cookbook.config.strategy import Strategy
from cookbook.forecast.costs.inputs import micro_batch_of
from cookbook.forecast.memory import GIB
from cookbook.forecast.mesh_sizes import changed_sizes, in_words, resize, sizes_of_mesh
from cookbook.forecast.order import best_that_fits
from cookbook.forecast.other_machines import fewer_gpus, larger_gpus, more_and_larger_gpus, more_gpus
from cookbook.forecast.verdict import MAY_RUN, UNKNOWN, Forecast, TraceCache, Verdict, forecast
from cookbook.system.files import RecipeError
from cookbook.system.hardware import Machines, enough_gib
from cookbook.training.models.structure import config_of

NOTHING_HELPS = "no other strategy, smaller micro-batch, checkpointing or adapter helps: take more"


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that a user may write in another way, and the strategies that are tried with it."""

    recipe: Recipe
    strategies: Sequence[Strategy]
    machines: Machines
    words: str = ""
    """The words before the strategy's name."""


@dataclass(frozen=True, kw_only=True)
class Helpful:
    """A change with the best forecast that it makes possible."""

    change: Change
    forecast: Forecast

    @property
    def condition(self) -> str:
        """The room in a machine under which it fits, where that is not known."""
        if self.forecast.verdict not in UNKNOWN:
            return ""
        disk = f" and {enough_gib(self.forecast.disk)} GiB of NVMe" if self.forecast.disk else ""
        return f" if a machine has {enough_gib(self.forecast.host)} GiB of memory{disk}"


def cheapest(traces: TraceCache, changes: Iterable[Change], verdicts: Sequence[Verdict]) -> Helpful | None:
    """The first of the changes with which a strategy has one of these verdicts."""
    for change in changes:
        try:
            changed = TraceCache(traces.config, change.recipe, traces.recipe_name)
        except RecipeError:  # nobody wrote these settings, so that they do not suit this model is no mistake
            continue
        if best := best_that_fits(changed, change.strategies, change.machines, verdicts):
            return Helpful(change=change, forecast=best)
    return None


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes that may help a run, by kind: the kinds in the order of what they cost, and so is each kind."""

    traces: TraceCache
    own: Sequence[Strategy]
    """Strategies that were asked about."""
    others: Sequence[Strategy]
    """Strategies that may take their place."""
    machines: Machines
    is_sure: bool = False
    """True if only a run counts that fits without a doubt counts, on the GPUs alone."""

    def suggestions(self) -> Iterator[str]:
        """The first change of each kind that helps."""
        for changes in self.of_run():
            if helpful := self._cheapest(changes):
                sizes = self._sizes(helpful)
                in_file = f"with {sizes} in its file, " if sizes else ""
                name = helpful.forecast.strategy.name
                yield f"{helpful.change.words}{in_file}{name} fits{helpful.condition}"

    def enough_gpus(self) -> str:
        """Number of these GPUs that would do, and the size that as many would need, or where neither does how many
        of which: `fsdp2 fits on 4x24GB, single on 1x80GB`; empty where no GPUs would do.
        """
        if not self.machines.gpus_each or small_batch(self.traces.recipe, self.machines):
            return ""
        kinds = map(self._cheapest, self.of_gpus())
        more_or_larger = list(filter(None, islice(kinds, 2)))
        ways: list[str] = []
        for helpful in more_or_larger or filter(None, kinds):
            strategy, text, sizes = helpful.forecast.strategy, helpful.change.machines.text, self._sizes(helpful)
            text = re.sub(r"^(\d+x)+", "1x", text) if strategy.kind == "single" else text
            name = f"{strategy.name} with {sizes}" if sizes else strategy.name
            ways.append(f"{name}{' fits' * (not ways)} on {text}{helpful.condition}")
        is_smaller = ways and micro_batch_of(self.traces.recipe) > 1
        return ", ".join(ways) + ", with batch.micro_batch_size: 1" * bool(is_smaller)

    def of_run(self) -> Iterator[Iterable[Change]]:
        """Order the changes: what costs nothing, then time of each step, then what is trained; with fewer samples than
        GPUs, the batch.
        """
        recipe, known = self.traces.recipe, {strategy.path for strategy in self.own}
        new = [strategy for strategy in self._able if strategy.path not in known]
        yield [self._change(recipe, new, "strategy ")]
        yield [self._change(recipe, _other_sizes(self._able, self.machines))]
        if not small_batch(recipe, self.machines):
            yield from (self._of_settings(kind) for kind in _settings(recipe))
            return
        larger = self._with_larger_batch(recipe)
        words = f"batch.global_batch_size: {larger.batch.global_batch_size}"
        of_larger = [(f"{words}, {more}", changed) for kind in _settings(larger) for more, changed in kind]
        yield self._of_settings([(words, larger), *of_larger])
        fewer = fewer_gpus(self.machines, recipe.batch.global_batch_size)
        yield (self._change(recipe, self._able, f"on {way.text}, ", way) for way in fewer)

    def of_gpus(self) -> Iterator[Iterable[Change]]:
        """More of these GPUs, larger ones, or both, for strategies that share the weights or, on one GPU, need not."""
        batch = self.traces.recipe.batch.model_copy(update=ONE_SAMPLE)
        recipe = self.traces.recipe.model_copy(update={"batch": batch})
        divided = [strategy for strategy in self._able if max(strategy.tp_size, strategy.pp_size) > 1]
        whole = [strategy for strategy in self._able if strategy not in divided]
        shared = [
            strategy
            for strategy in whole
            if strategy.kind == "single" or strategy.fsdp is not None or strategy.zero_stage == 3
        ]

        def of_more() -> Iterator[Change]:
            for more in more_gpus(self.machines):
                yield self._change(recipe, shared, machines=more)
                if more.num_machines == 1:
                    yield self._change(recipe, [*divided, *_other_sizes(divided, more)], machines=more)

        yield of_more()
        for larger in (larger_gpus, more_and_larger_gpus):
            yield (self._change(recipe, shared, machines=way) for way in larger(self.machines))

    @cached_property
    def _able(self) -> list[Strategy]:
        """Strategies to try. FSDP1's flat shards are reckoned for each process, and what they save FSDP2's do too."""
        known = {strategy.path: strategy for strategy in (*self.others, *self.own)}
        able = [strategy for strategy in known.values() if not (self.is_sure and strategy.offloads)]
        return [strategy for strategy in able if strategy.kind != "fsdp1"] or able

    def _change(
        self, recipe: Recipe, strategies: Sequence[Strategy], words: str = "", machines: Machines | None = None
    ) -> Change:
        return Change(recipe=recipe, strategies=strategies, machines=machines or self.machines, words=words)

    def _of_settings(self, settings: Iterable[tuple[str, Recipe]]) -> Iterator[Change]:
        """With a strategy without a mesh, else with one, each of which takes a trace of its own."""
        divided = [strategy for strategy in self._able if sizes_of_mesh(strategy)]
        plain = [strategy for strategy in self._able if strategy not in divided]
        for words, recipe in settings:
            yield from (self._change(recipe, strategies, f"with {words}, ") for strategies in (plain, divided))

    def _with_larger_batch(self, recipe: Recipe) -> Recipe:
        """A global batch that has samples for each GPU."""
        size = batch_for_all(recipe, self.machines)
        return recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"global_batch_size": size})})

    def _cheapest(self, changes: Iterable[Change]) -> Helpful | None:
        return cheapest(self.traces, changes, ("fits",) if self.is_sure else ("fits", *UNKNOWN))

    def _sizes(self, helpful: Helpful) -> str:
        return in_words(changed_sizes(self._able, helpful.forecast.strategy))


ONE_SAMPLE = {"micro_batch_size": 1, "micro_batch_tokens": None}


def _settings(recipe: Recipe) -> Iterator[list[tuple[str, Recipe]]]:
    """Settings that a recipe may have in the place of its own, in words: what takes time, then what is trained."""
    small: dict[str, dict[str, Any]] = {}
    saved: dict[str, dict[str, Any]] = {}
    hosted: dict[str, dict[str, Any]] = {}
    if micro_batch_of(recipe) > 1:
        small = {"batch.micro_batch_size: 1": {"batch": recipe.batch.model_copy(update=ONE_SAMPLE)}}
    if recipe.model.recompute is not True:
        saved = {"model.gradient_checkpointing: true": _checkpointing(recipe, True)}
    if recipe.model.gradient_checkpointing != "offload" and not recipe.model.compile:
        hosted = {"model.gradient_checkpointing: offload": _checkpointing(recipe, "offload")}
    less_memory = small, saved, saved and small | saved, hosted and small | hosted
    yield [_with(recipe, " and ", settings) for settings in less_memory if settings]
    adapters: dict[str, AdapterSection] = {}
    if recipe.adapter is None:
        adapters = {f"adapter: {{name: {name}}}": AdapterSection(name=name) for name in ("lora", "qlora")}
    elif recipe.adapter.name == "lora":
        adapters = {"adapter.name: qlora": recipe.adapter.model_copy(update={"name": "qlora"})}
    yield [_with(recipe, ", ", {words: {"adapter": adapter}} | small | saved) for words, adapter in adapters.items()]


def _checkpointing(recipe: Recipe, kind: Checkpointing) -> dict[str, Any]:
    return {"model": recipe.model.model_copy(update={"gradient_checkpointing": kind})}


def _with(recipe: Recipe, separator: str, settings: dict[str, dict[str, Any]]) -> tuple[str, Recipe]:
    """The words of these settings, and the recipe with their sections."""
    sections = {name: section for update in settings.values() for name, section in update.items()}
    return separator.join(settings), recipe.model_copy(update=sections)


def _other_sizes(strategies: Sequence[Strategy], machines: Machines) -> list[Strategy]:
    pairs = [(written, other) for written in strategies for _, other in resize(written, machines)]
    return [other for written, other in pairs if other != written]


def batch_for_all(recipe: Recipe, machines: Machines) -> int:
    """The global batch, rounded up so that all GPUs can share its samples."""
    each = machines.num_gpus * micro_batch_of(recipe)
    return -(-recipe.batch.global_batch_size // each) * each


def small_batch(recipe: Recipe, machines: Machines) -> str | None:
    """Say why most strategies cannot run, if a step has fewer samples than there are GPUs."""
    size, count = recipe.batch.global_batch_size, machines.num_gpus
    if size >= count:
        return None
    return (
        f"batch.global_batch_size: {size} is less than the {count:,} GPUs, so that only meshes can share it;"
        f" take fewer GPUs, or batch.global_batch_size: {count}"
    )


def rung_below(
    recipe: Recipe, strategy: Strategy, machines: Machines, recipe_name: str, others: Sequence[Strategy]
) -> str | None:
    """The first change that makes a run fit which ran out of GPU memory, even if it was forecast to fit.

    The usable memory is taken to be at most the forecast, since the real need was higher than the GPU's memory.

    Args:
        others: strategies to suggest.
    """
    traces = TraceCache(config_of(recipe)[0], recipe, recipe_name)
    machines = _less_than(traces, strategy, machines)
    return next(Changes(traces=traces, own=[strategy], others=others, machines=machines).suggestions(), None)


def smaller_micro_batch(
    recipe: Recipe, strategy: Strategy, machines: Machines, recipe_name: str, batches: Sequence[BatchSection]
) -> BatchSection | None:
    """The first of `batches` with which a run may fit; each may where there is no forecast."""
    traces = TraceCache(config_of(recipe)[0], recipe, recipe_name)
    helpful = cheapest(traces, _with_batches(recipe, [strategy], machines, batches), (*MAY_RUN, "no forecast"))
    return helpful.change.recipe.batch if helpful else None


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
    helpful = cheapest(traces, _with_batches(recipe, others, machines, batches), ("fits",))
    return (helpful.forecast.strategy, helpful.change.recipe.batch) if helpful else None


def _with_batches(
    recipe: Recipe, strategies: Sequence[Strategy], machines: Machines, batches: Sequence[BatchSection]
) -> Iterator[Change]:
    for batch in batches:
        yield Change(recipe=recipe.model_copy(update={"batch": batch}), strategies=strategies, machines=machines)


def _less_than(traces: TraceCache, strategy: Strategy, machines: Machines) -> Machines:
    """The machines with at most the GPU memory that is forecast for a run."""
    memory = forecast(traces, strategy, machines, limits=False).memory
    if memory is None:
        return machines
    needed = memory.needed[0] / GIB
    return replace(machines, usable_gib=min(needed, machines.usable_gib or needed))
