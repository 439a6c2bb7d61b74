"""The forecast of one strategy on given machines: its memory and time, and whether it fits."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from transformers import PreTrainedConfig

from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.facts.meshes import mesh_problem, share_beyond_buffer, units_problem
from cookbook.facts.model_types import look_up
from cookbook.facts.packing import decide
from cookbook.facts.pipeline_stages import StagePass, in_flight, stage_chunks, stage_passes
from cookbook.facts.served_code import check_layers
from cookbook.forecast import second_process
from cookbook.forecast.activations import ActivationTrace, TooLong, Untraceable
from cookbook.forecast.costs.flops import ModelSizes, Step, sizes_of
from cookbook.forecast.costs.inputs import (
    Skeleton,
    bytes_of,
    cost_inputs,
    hidden_bytes,
    micro_batch_of,
    stage_of,
)
from cookbook.forecast.costs.loading import loading as loading_of
from cookbook.forecast.costs.loading import machine_bytes
from cookbook.forecast.costs.states import FLOAT32, States, checkpoint_bytes, heaviest
from cookbook.forecast.costs.states import states as states_of
from cookbook.forecast.costs.traffic import Transfer, transfers
from cookbook.forecast.memory import CONTEXT, GIB, Memory, Stage, peak
from cookbook.forecast.outside import outside as outside_of
from cookbook.forecast.outside import workspaces
from cookbook.forecast.step_time import Range, no_forecast, step_seconds
from cookbook.start.run_plan import Plan, default_num_processes, make_plan
from cookbook.system import kept_results
from cookbook.system.files import RecipeError
from cookbook.system.hardware import HOST_AT_LEAST, Gpu, Machines, enough_gib, in_gib
from cookbook.system.late_compiler import compiled_when_called
from cookbook.training.models.chunks import LOGITS_BUDGET, OF_BACKWARD

Verdict = Literal[
    "fits", "host memory unknown", "disk unknown", "tight", "not judged", "no forecast", "does not fit", "cannot run"
]
"""On a CPU, whose memory is shared with everything else, the verdict is `not judged`. With `host memory unknown` and
`disk unknown` the GPUs suffice, and the machine's memory or disk was not given. `no forecast` is of what cannot be
traced, in the way of no estimate that nothing was compared with."""
MEASURE = "launch it with --set run.max_steps=2: what it takes is peak_memory_gib in its metrics.jsonl"
UNKNOWN: tuple[Verdict, ...] = ("host memory unknown", "disk unknown")
MAY_RUN: tuple[Verdict, ...] = ("fits", *UNKNOWN, "tight", "not judged")


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecast of one strategy on given machines."""

    strategy: Strategy
    verdict: Verdict
    why: list[str]
    """Why it cannot run, may not fit, or is not known."""
    shortage: float = 0.0
    """Needed over available amount of the scarcest resource."""
    num_processes: int = 0
    plan: Plan | None = None
    memory: Memory | None = None
    host: int = 0
    """Bytes of host memory per machine, the maximum of offloaded state and loading; 0 without GPUs."""
    disk: int = 0
    """Bytes of a machine's NVMe disk."""
    checkpoint: int = 0
    """Bytes of a checkpoint."""
    time: Range | None = None
    time_of_kernels: Range | None = None
    """The time where layers with a state have kernels of their own (flash-linear-attention, mamba-ssm, causal-conv1d):
    what moves in their layers is then counted at the slow end alone. None for models without such layers."""
    time_if_fused: Range | None = None
    """See `time_if_fused`; None also for a recipe that compiles."""
    messages: list[Transfer] = field(default_factory=list)
    """Transfers between processes in a step of full samples."""
    largest_micro_batch: int | None = None
    """Sequences (pairs) of max_length that fit; None for an unknown GPU, or if nothing fits."""
    longest: int | None = None
    """Longest sequence that fits at micro-batch 1, in tokens; None also where memory grows with its square."""


TRACES: dict[tuple[Any, ...], ActivationTrace | Untraceable] = {}
"""Traces of this process, or why there is none; each takes seconds and is the same for every machine."""
LONG = 512, 1024
"""Tokens from which longer samples of models with a state are extrapolated: they run them in steps of 64 to 256, with
operations for each."""
SHORT = 16, 32
"""Likewise of models that run token by token: as many tokens, in more rows."""
SKELETONS: dict[tuple[str, str | None, int], tuple[Skeleton, ModelSizes]] = {}


def trace_pass(config: PreTrainedConfig, recipe: Recipe, **options: Any) -> ActivationTrace:
    """A new trace, see `cookbook.forecast.trace`."""
    # Imported here, as transformers' models take seconds, and a question that was asked before needs none.
    with compiled_when_called():
        from cookbook.forecast.trace import trace

        return trace(config, recipe, **options)


def skeleton_of(config: PreTrainedConfig, recipe: Recipe) -> Skeleton:
    """A new skeleton, likewise."""
    with compiled_when_called():
        from cookbook.forecast.skeleton import skeleton

        return skeleton(config, recipe)


class TraceCache:
    """The model's skeleton and its traces, which strategies share."""

    def __init__(self, config: PreTrainedConfig, recipe: Recipe, recipe_name: str = "") -> None:
        """
        Args:
            recipe_name: for mistakes.
        """
        self.config, self.recipe_name = config, recipe_name
        self._config_text = config.to_json_string()
        self._settle(recipe)

    def with_sections(self, **sections: Any) -> "TraceCache":
        """The traces of the recipe with other sections."""
        changed = copy.copy(self)
        changed._settle(self.recipe.model_copy(update=sections))
        return changed

    def _settle(self, recipe: Recipe) -> None:
        self.recipe = recipe = decide(recipe, self.config).settle(recipe)
        parts = recipe.model_dump_json(include={"model", "data", "objective", "adapter", "mixed_precision"})
        self._key = self._config_text, parts
        # What code outside of this package and the libraries does, no key says.
        self._is_kept = not recipe.plugins and not recipe.model.kernels
        adapter = None if recipe.adapter is None else recipe.adapter.model_dump_json()
        structure = self._config_text, adapter, len(recipe.model.new_tokens or ())
        if structure not in SKELETONS:
            if self._is_kept:
                skeleton = kept_results.find_or_make(structure, lambda: skeleton_of(self.config, recipe), Skeleton)
            else:
                skeleton = skeleton_of(self.config, recipe)
            SKELETONS[structure] = skeleton, sizes_of(self.config, skeleton)
        self.skeleton, self.sizes = SKELETONS[structure]

    def fills_chunks(self, strategy: Strategy) -> int:
        """The samples from which a forward and backward grow linearly with their number: those of data.max_length with
        enough tokens for two whole chunks of the loss's backward: the second is held beside the weight's gradient.
        """
        if self.recipe.objective.num_scores is not None:
            return 1
        ranks = strategy.sp_size * strategy.tp_size  # which share the logits of a micro-batch
        return 2 * OF_BACKWARD * LOGITS_BUDGET * ranks // (self.sizes.vocab * self.recipe.data.max_length) + 1

    def work(self, strategy: Strategy, micro_batch: int) -> ActivationTrace:
        """The trace of a micro-batch of samples of data.max_length. Of compiled layers, whose time no trace tells and
        whose graphs take seconds for each size, only small ones are traced: that of others follows from two.

        Raises:
            Untraceable: there is none.
        """
        small = self.fills_chunks(strategy)
        if not self.recipe.model.compile or micro_batch <= 2 * small:
            return self._work(strategy, micro_batch)
        smaller, larger = (self._work(strategy, size) for size in (small, 2 * small))
        return smaller.towards(larger, micro_batch / small - 1)

    def _work(self, strategy: Strategy, micro_batch: int) -> ActivationTrace:
        recipe, tp_size = self.recipe, strategy.tp_size
        sequences = micro_batch * len(recipe.objective.sequences)
        length = -(-recipe.data.max_length // strategy.sp_size)
        # Layers with a state run on one sample at a time, and their code without kernels goes through a row in steps.
        is_one_row = recipe.data.is_packed and not look_up(self.config.model_type).has_state
        rows, row = (1, sequences * length) if is_one_row else (sequences, length)
        options: dict[str, Any] = {
            "rows": rows,
            "num_targets": sequences * length if recipe.objective.num_scores is None else sequences,
            "autocast": strategy.has_autocast,
            "tp_size": tp_size,
            "ep_size": strategy.ep_size,
            "fsdp": 0 if strategy.fsdp is None else strategy.fsdp.fsdp_version,
            "is_sharded_while_read": strategy.is_sharded_while_read,
            "is_zero3": strategy.zero_stage == 3,
            "sp_size": strategy.sp_size,
        }
        if look_up(self.config.model_type).loops_over_tokens and row > SHORT[1]:
            short, long = self._two_traces(
                [options | {"length": each, "rows": -(-rows * row // each)} for each in SHORT]
            )
            return long.of_loops(short.towards(long, (row - SHORT[0]) / (SHORT[1] - SHORT[0])))
        if not look_up(self.config.model_type).has_state or row <= LONG[1]:
            return self._trace(options | {"length": row})
        short, long = self._two_traces([options | {"length": length} for length in LONG])
        return short.towards(long, (row - LONG[0]) / (LONG[1] - LONG[0]))

    def _two_traces(self, options: list[dict[str, Any]]) -> list[ActivationTrace]:
        """The second in another process meanwhile, if there is one."""
        key = self._key_of(options[1])
        is_begun = self._find_trace(key) is None and second_process.begin(self.config, self.recipe, options[1])
        try:
            first = self._trace(options[0])
        finally:
            if is_begun and (traced := second_process.take()):
                self._keep(key, traced)
        return [first, self._trace(options[1])]

    def _key_of(self, options: dict[str, Any]) -> tuple[Any, ...]:
        too_long = (*self._key, options["length"])  # under any strategy
        return too_long if too_long in TRACES else (*self._key, *options.values())

    def _find_trace(self, key: tuple[Any, ...]) -> ActivationTrace | Untraceable | None:
        """A trace of this process or, where such are kept, of an earlier one."""
        if key not in TRACES and self._is_kept and (kept := kept_results.find(ActivationTrace, key)) is not None:
            TRACES[key] = kept
        return TRACES.get(key)

    def _keep(self, key: tuple[Any, ...], traced: ActivationTrace) -> None:
        TRACES[key] = traced
        if self._is_kept:
            kept_results.keep(key, traced)

    def _trace(self, options: dict[str, Any]) -> ActivationTrace:
        if self._find_trace(key := self._key_of(options)) is None:
            try:
                self._keep(key, trace_pass(self.config, self.recipe, **options))
            except Untraceable as error:
                key = (*self._key, options["length"]) if isinstance(error.__cause__, TooLong) else key
                TRACES[key] = error
        traced = TRACES[key]
        if isinstance(traced, Untraceable):
            raise traced
        self._check_layers(traced)
        return traced

    def _check_layers(self, trace: ActivationTrace) -> None:
        """Each phase belongs to a layer whose weights are known; LongCat-Flash's configuration counts layers twice."""
        num_traced = len({phase.layer for phase in trace.phases} - {None})
        if num_traced != self.skeleton.num_layers:
            raise Untraceable(
                f"{self.config.model_type}: {num_traced} layers were traced of {self.skeleton.num_layers}"
            )


def of_run(config: PreTrainedConfig, recipe: Recipe, strategy: Strategy, plan: Plan, gpu: Gpu | None) -> Memory:
    """The GPU memory forecast of a run that is starting. Not collective.

    Raises:
        Untraceable: there is none.
    """
    traces = TraceCache(config, recipe)
    strategy = strategy.of_width(traces.sizes.hidden)
    held = heaviest(traces.skeleton, cost_inputs(recipe, strategy, plan.num_processes, num_local=plan.num_local))
    return _gpu_memory(traces, strategy, held, plan, gpu)(traces.work(strategy, micro_batch_of(recipe)))


def time_of_run(
    config: PreTrainedConfig, recipe: Recipe, strategy: Strategy, plan: Plan, gpu: Gpu | None, num_tokens: float | None
) -> Range | str:
    """The time of a step that is forecast for a run that is starting, or why there is none. Not collective.

    Args:
        num_tokens: of a step in the mean; None: every sample has data.max_length. Kernels are those of full samples.

    Raises:
        Untraceable: there is none.
    """
    count, each = plan.num_processes, plan.num_local
    machines = Machines(text=f"{each} GPUs", num_machines=count // each, gpus_each=each, gpu=gpu)
    traces = TraceCache(config, recipe)
    if why := why_no_time(traces, machines):
        return "the speed of this GPU is not known" if gpu is None else why
    seconds = _step_time(traces, strategy, plan, machines, num_tokens)
    assert seconds is not None
    return seconds


@dataclass(frozen=True, kw_only=True)
class _PlacedRun:
    """A run under a strategy on given machines: what is known of it before any trace."""

    plan: Plan
    held: States
    """States of the process that holds most."""
    host: int
    """Bytes of a machine's memory, of which `offloaded` are for offloading; `disk` on its disk."""
    offloaded: int
    disk: int


def _fit(traces: TraceCache, strategy: Strategy, machines: Machines) -> tuple[Strategy, int]:
    """The strategy as it would run there, and its number of processes."""
    count = default_num_processes(strategy, machines.num_gpus)
    return strategy.for_processes(count, min(count, machines.gpus_each) or None).of_width(traces.sizes.hidden), count


def _place(traces: TraceCache, strategy: Strategy, count: int, machines: Machines) -> _PlacedRun:
    """Raises RecipeError where the strategy cannot run there."""
    recipe, skeleton, recipe_name = traces.recipe, traces.skeleton, traces.recipe_name
    each = max(1, machines.gpus_each)
    check_layers(recipe.model, traces.config, skeleton.code)
    if machines.num_gpus and count > machines.num_gpus:
        raise RecipeError(f"{strategy.path}: needs {count} GPUs, but there are only {machines.num_gpus}")
    if (gpu := machines.gpu) is not None:
        for precision, has, instead in (("bf16", gpu.has_bf16, "fp16"), ("fp8", gpu.has_fp8, "bf16")):
            if recipe.mixed_precision == precision and not has:
                lacks = f"mixed_precision is {precision}, which a {gpu.name} does not have"
                raise RecipeError(f"{recipe_name}: {lacks}; write mixed_precision: {instead}")
    largest, bytes_each = max(weight.num_elements for weight in skeleton.weights), bytes_of(recipe.compute_precision)
    if problem := share_beyond_buffer(strategy, largest, "the largest weight", count, bytes_each):
        raise RecipeError(f"{strategy.deepspeed_file or strategy.path}: {problem}")
    if problem := mesh_problem(traces.config, strategy.mesh(count)) or units_problem(traces.config, strategy):
        raise RecipeError(f"{strategy.path}: {problem}")
    plan = _plan(recipe, strategy, count, machines, recipe_name)
    inputs = cost_inputs(recipe, strategy, count, num_local=plan.num_local)
    held = heaviest(skeleton, inputs)
    hidden, on_gpus = traces.sizes.hidden, machines.gpus_each > 0
    host, offloaded, disk = machine_bytes(skeleton, inputs, held, min(count, each), hidden=hidden, on_gpus=on_gpus)
    return _PlacedRun(plan=plan, held=held, host=host, offloaded=offloaded, disk=disk)


def _plan(recipe: Recipe, strategy: Strategy, count: int, machines: Machines, recipe_name: str) -> Plan:
    """Raises RecipeError where recipe and strategy do not go together."""
    each = max(1, machines.gpus_each)
    spread = replace(strategy, num_machines=-(-count // each))
    num_gpus = min(count, each) if machines.gpus_each else 0
    return make_plan(recipe, spread, num_processes=count, num_gpus=num_gpus, recipe_name=recipe_name)


def why_no_time(traces: TraceCache, machines: Machines) -> str | None:
    """Why there is no forecast of time; None if there is."""
    if (why := no_forecast(machines, traces.recipe.mixed_precision)) is not None:
        return why
    if traces.recipe.model.compile and traces.skeleton.code.holds_scores:
        return (
            f"no forecast of time with model.compile: no kernel computes the attention of {traces.config.model_type},"
            " and what its scores move in compiled layers is not known; --set model.compile=false has one"
        )
    return None


def time_compiled(traces: TraceCache, strategy: Strategy, machines: Machines) -> Range | None:
    """The time of a step with `model.compile`, whose memory it leaves open: for that it would trace what the compiler
    makes, which takes a hundred times as long. None where that is refused, no time is forecast, or layers have a state:
    how their loops run compiled is not known. Nor where no kernel computes attention: formulas leave out its scores,
    whose bytes are most of the time.
    """
    if look_up(traces.config.model_type).has_state or traces.skeleton.code.holds_scores:
        return None
    return time_if_fused(traces, strategy, machines)


def time_if_fused(traces: TraceCache, strategy: Strategy, machines: Machines) -> Range | None:
    """The time of a step with all kernels fused that `model.compile` would fuse, and with kernels for attention and for
    layers with a state: by formulas alone. None where `model.compile` is refused, or no time is forecast.
    """
    strategy, count = _fit(traces, strategy, machines)
    model = traces.recipe.model.model_copy(update={"compile": True})
    try:
        plan = _plan(traces.recipe.model_copy(update={"model": model}), strategy, count, machines, traces.recipe_name)
    except RecipeError:
        return None
    return _step_time(traces, strategy, plan, machines, is_compiled=True)


def least_time(traces: TraceCache, strategy: Strategy, machines: Machines) -> Range | None:
    """A lower bound of the time of a step, compiled or not: without the launches and the bytes that a trace tells. None
    where the run is refused, or no time is forecast.
    """
    strategy, count = _fit(traces, strategy, machines)
    if count > machines.num_gpus or mesh_problem(traces.config, strategy.mesh(count)):
        return None
    try:
        plan = _plan(traces.recipe, strategy, count, machines, traces.recipe_name)
    except RecipeError:
        return None
    if why_no_time(traces, machines) is not None:
        return None
    step, nothing = replace(_step_of(traces, plan), is_compiled=False), ActivationTrace(phases=())
    return step_seconds(strategy, traces.sizes, step, machines, num_processes=plan.num_processes, trace=nothing)


def may_fit(traces: TraceCache, strategy: Strategy, machines: Machines) -> bool:
    """Return whether a GPU holds weights and optimizer, and the machine what it takes: no trace is needed to rule one
    out.
    """
    strategy, count = _fit(traces, strategy, machines)
    try:
        placed = _place(traces, strategy, count, machines)
    except RecipeError:
        return False
    gpu = placed.held.gpu
    least = Memory(
        moment="between steps",
        parameters=gpu.weights,
        optimizer=gpu.masters + gpu.moments,
        is_sharded=False,
        outside=outside_of(strategy, machines, count),
    )
    return _verdict(least, placed.host, placed.disk, machines, offloaded=placed.offloaded)[0] != "does not fit"


def forecast(traces: TraceCache, strategy: Strategy, machines: Machines, *, limits: bool = True) -> Forecast:
    """The forecast of one strategy; see `forecast_all`."""
    recipe, skeleton = traces.recipe, traces.skeleton
    strategy, count = _fit(traces, strategy, machines)
    try:
        placed = _place(traces, strategy, count, machines)
    except RecipeError as error:
        return Forecast(strategy=strategy, verdict="cannot run", why=error.mistakes, num_processes=count)
    plan, held, host, disk = placed.plan, placed.held, placed.host, placed.disk
    memory_of = _gpu_memory(traces, strategy, held, plan, machines.gpu, outside_of(strategy, machines, count))
    try:
        memory = memory_of(traces.work(strategy, micro_batch_of(recipe)))
    except Untraceable as error:
        return Forecast(
            strategy=strategy,
            verdict="no forecast",
            why=[f"{error}; {MEASURE}"],
            num_processes=count,
            checkpoint=checkpoint_bytes(skeleton, recipe),
        )
    verdict, why, shortage = _verdict(memory, host, disk, machines, offloaded=placed.offloaded)
    largest = longest = None
    if limits and machines.usable_gib is not None and held.gpu.total < machines.usable_gib * GIB:
        largest = _largest(traces, strategy, memory_of, machines.usable_gib * GIB)
    if largest is not None and not skeleton.code.holds_scores:  # n samples of T tokens take less than one of n * T
        tokens = int(largest * recipe.data.max_length)
        positions = getattr(traces.config, "max_position_embeddings", None) or tokens
        longest = min(tokens, positions) // 64 * 64
    has_state = look_up(traces.config.model_type).has_state and not recipe.model.compile
    return Forecast(
        strategy=strategy,
        verdict=verdict,
        why=why,
        shortage=shortage,
        num_processes=count,
        plan=plan,
        memory=memory,
        host=host,
        disk=disk,
        checkpoint=checkpoint_bytes(skeleton, recipe),
        time=_step_time(traces, strategy, plan, machines),
        time_of_kernels=_step_time(traces, strategy, plan, machines, is_traced=False) if has_state else None,
        time_if_fused=None if recipe.model.compile else time_if_fused(traces, strategy, machines),
        messages=transfers(strategy, traces.sizes, _step_of(traces, plan), count, num_local=plan.num_local),
        largest_micro_batch=None if largest is None else int(largest),
        longest=longest,
    )


def extrapolated_need(
    traces: TraceCache, strategy: Strategy, machines: Machines, sizes: tuple[int, int], *, is_least: bool = False
) -> float:
    """Bytes of a GPU's memory that a run needs at most, if what a forward and backward hold grows evenly with the
    micro-batch as from one of these sizes to another; a size of 0 holds nothing. 0 where the run is refused.

    Args:
        is_least: leave out the loss, whose chunks grow to a limit: all else grows as fast or faster beyond both sizes,
            since a peak is the most of several moments, in each of which bytes are in proportion to samples.

    Raises:
        Untraceable: there is no trace of these sizes.
    """
    strategy, count = _fit(traces, strategy, machines)
    try:
        placed = _place(traces, strategy, count, machines)
    except RecipeError:
        return 0
    outside = outside_of(strategy, machines, count)
    memory_of = _gpu_memory(traces, strategy, placed.held, placed.plan, machines.gpu, outside)
    second = traces.work(strategy, sizes[1])
    first = traces.work(strategy, sizes[0]) if sizes[0] else second.without_bytes()
    work = first.towards(second, (micro_batch_of(traces.recipe) - sizes[0]) / (sizes[1] - sizes[0]))
    return memory_of(work.without_bytes("head", "head backward") if is_least else work).needed[1]


def _step_time(
    traces: TraceCache,
    strategy: Strategy,
    plan: Plan,
    machines: Machines,
    num_tokens: float | None = None,
    *,
    is_traced: bool = True,
    is_compiled: bool = False,
) -> Range | None:
    """Args: of a recipe that compiles, or as if this one did."""
    recipe = traces.recipe
    if why_no_time(traces, machines) is not None:
        return None
    step = _step_of(traces, plan, num_tokens)
    step = replace(step, is_compiled=step.is_compiled or is_compiled)
    trace = None if step.is_compiled or not is_traced else traces.work(strategy, micro_batch_of(recipe))
    return step_seconds(strategy, traces.sizes, step, machines, num_processes=plan.num_processes, trace=trace)


def _step_of(traces: TraceCache, plan: Plan, num_tokens: float | None = None) -> Step:
    """A step of so many tokens; None: of samples of data.max_length, each token labelled."""
    recipe, most = traces.recipe, tokens_of_step(traces.recipe)
    share = 1.0 if num_tokens is None else num_tokens / most
    return Step(
        num_tokens=share * most,
        num_labelled=share * most / (1 if recipe.objective.num_scores is None else recipe.data.max_length),
        length=share * recipe.data.max_length,
        micro_batches=plan.gradient_accumulation_steps,
        recompute=recipe.model.recompute,
        offloads_checkpoints=recipe.model.gradient_checkpointing == "offload",
        precision=recipe.compute_precision,
        gradient_dtype=recipe.optim.gradient_dtype,
        is_compiled=recipe.model.compile,
    )


PRICED_TOKENS = 10_000_000
"""Tokens of which a price is said where the length of a run is not known."""


def tokens_of_step(recipe: Recipe) -> int:
    """Upper bound of the tokens of a step: every sample at data.max_length."""
    return recipe.batch.global_batch_size * len(recipe.objective.sequences) * recipe.data.max_length


def _gpu_memory(
    traces: TraceCache,
    strategy: Strategy,
    held: States,
    plan: Plan,
    gpu: Gpu | None,
    outside: tuple[int, int] = (CONTEXT, CONTEXT),
) -> Callable[[ActivationTrace], Memory]:
    """The memory of a process by the trace of its micro-batch; what no trace changes is reckoned once."""
    if strategy.pp_size > 1:
        of_stages = [_stage(traces, strategy, plan, stage, gpu) for stage in range(strategy.pp_size)]

        def of_heaviest(work: ActivationTrace) -> Memory:
            stages = tuple(stage(work) for stage in of_stages)
            i, most = max(enumerate(stage.memory for stage in stages), key=lambda pair: pair[1].allocated)
            return replace(most, moment=f"{most.moment} of stage {i}", outside=outside, stages=stages)

        return of_heaviest
    is_sharded = plan.num_processes > 1 and (strategy.kind in ("fsdp1", "fsdp2") or strategy.zero_stage == 3)
    accumulates = plan.gradient_accumulation_steps > 1
    inputs = cost_inputs(traces.recipe, strategy, plan.num_processes, num_local=plan.num_local)
    loading = loading_of(traces.skeleton, inputs, held, local=1).gpu
    held = _with_buffers(held, workspaces(gpu))

    def of_step(work: ActivationTrace) -> Memory:
        largest = peak(traces.skeleton, held, work, accumulates=accumulates, is_sharded=is_sharded, loading=loading)
        return replace(largest, outside=outside)

    return of_step


def _with_buffers(held: States, size: int) -> States:
    return replace(held, gpu=replace(held.gpu, buffers=held.gpu.buffers + size))


def _stage(
    traces: TraceCache, strategy: Strategy, plan: Plan, stage: int, gpu: Gpu | None
) -> Callable[[ActivationTrace], Stage]:
    """A stage and the memory of its process. At the beginning of a step torch allocates a message for each micro-batch
    (torch 2.13, pipelining/stage.py, `_setup_forward_recv_info` and `_create_grad_recv_info`).
    """
    num_stages, count, recipe = strategy.pp_size, plan.gradient_accumulation_steps, traces.recipe
    whole = traces.skeleton
    chunks = stage_chunks(whole.num_layers, stage, num_stages, strategy.pp_chunks, head_layers=whole.head_layers)
    skeleton = stage_of(whole, stage, num_stages, strategy.pp_chunks)
    inputs = cost_inputs(recipe, strategy, plan.num_processes, num_local=plan.num_local)
    held = states_of(whole, inputs, stage * plan.num_processes // num_stages)
    tokens = micro_batch_of(recipe) * len(recipe.objective.sequences) * recipe.data.max_length
    message = tokens * traces.sizes.hidden
    message *= hidden_bytes(strategy, recipe.compute_precision, is_full=recipe.adapter is None)
    each = FLOAT32 if strategy.has_autocast else inputs.low_bytes
    both = (weight.num_elements for weight in whole.weights if weight.part == "embedding" and weight.is_trained)
    tied = each * sum(both) // strategy.tp_size if whole.is_tied else 0
    loading = loading_of(skeleton, inputs, held, local=1).gpu

    sends = [layers.stop < whole.num_layers for layers in chunks]
    received = message * count * (sum(sends) + sum(layers.start > 0 for layers in chunks))
    # At the first backward of a step there are no gradients yet; at the next one fewer may wait.
    moments = list(stage_passes(count, stage, num_stages, strategy.pp_chunks))
    of_both = [[moment for moment in moments if moment.is_first == is_first] for is_first in (True, False)]
    most = in_flight(count, stage, num_stages, strategy.pp_chunks)
    holds = [
        f"layers {layers.start} to {layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}"
        for layers in chunks
    ]
    holds = ["embedding"] * (stage == 0) + holds + ["head"] * (stage == num_stages - 1)

    def bytes_sent(moment: StagePass) -> int:
        """Bytes that were sent of each micro-batch whose backward is still to come; with several chunks all of a step,
        as many as are received, until its end (torch 2.13, pipelining/schedules.py, `_PipelineScheduleRuntime`,
        send_ops).
        """
        if len(chunks) > 1:
            return received
        return message * sum(number for number, is_sent in zip(moment.counts, sends, strict=True) if is_sent)

    def of_work(work: ActivationTrace) -> Stage:
        kept = [work.kept_by(layers, whole.num_layers, message=message, tied=tied) for layers in chunks]

        def waiting(moment: StagePass) -> int:
            return bytes_sent(moment) + sum(number * each for number, each in zip(moment.waiting, kept, strict=True))

        def at(moment: StagePass) -> Memory:
            own = work.of_stage(chunks, whole.num_layers, waiting=moment.waiting, message=message, tied=tied)
            with_all = _with_buffers(held, received + bytes_sent(moment) + workspaces(gpu))
            return peak(
                skeleton, with_all, own, accumulates=not moment.is_first, is_sharded=bool(held.units), loading=loading
            )

        memory = max(
            (at(max(moments_of_kind, key=waiting)) for moments_of_kind in of_both if moments_of_kind),
            key=lambda memory: memory.allocated,
        )
        return Stage(holds=holds, in_flight=most, memory=memory)

    return of_work


LARGEST = 2**20


def _largest(
    traces: TraceCache, strategy: Strategy, memory_of: Callable[[ActivationTrace], Memory], usable: float
) -> float | None:
    """The number of samples of max_length in a forward that surely fit; below 1 for shorter samples.

    Two traces are extrapolated. None if nothing fits, or so many tokens cannot be traced.
    """
    small = max(micro_batch_of(traces.recipe), traces.fills_chunks(strategy))
    try:
        first, second = (traces.work(strategy, size) for size in (small, 2 * small))
    except Untraceable:
        return None

    def fits(size: float) -> bool:
        work = first.towards(second, size / small - 1)
        return memory_of(work).needed[1] <= usable

    low, high = 0.0, 1.0
    while fits(high) and high < LARGEST:
        low, high = high, 2 * high
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None


def _verdict(
    memory: Memory, host: int, disk: int, machines: Machines, *, offloaded: int
) -> tuple[Verdict, list[str], float]:
    """The fields verdict, why and shortage of `Forecast`."""
    if machines.usable_gib is None:
        return "not judged", [], 0.0
    why, verdict = [], cast(Verdict, "fits")
    low, high = memory.needed
    usable = machines.usable_gib * GIB
    if low > usable:
        verdict = "does not fit"
        why.append(f"needs {in_gib(low)} GiB or more of a GPU that has {in_gib(usable)}")
    elif high > usable:
        verdict = "tight"
        why.append(f"between {in_gib(low)} and {in_gib(high)} GiB of {in_gib(usable)}")
    shortage = low / usable
    of_host = "host memory" if offloaded >= host else "host memory to read the weights"
    # Some host memory is assumed for loading, but none for offloading, which needs it for the whole run.
    granted = 0.0 if offloaded else HOST_AT_LEAST * machines.gpus_each * machines.usable_gib * GIB
    asked: tuple[tuple[str, Verdict, int, float | None, float], ...] = (
        (of_host, "host memory unknown", host, machines.host_gib, granted),
        ("NVMe", "disk unknown", disk, machines.nvme_gib, 0.0),
    )
    for what, unknown, needed, there, taken in asked:
        if there is None and needed > taken:
            verdict = unknown if verdict == "fits" else verdict
            why.append(f"{unknown}, needs {enough_gib(needed)} GiB a machine")
        elif there is not None and needed > there * GIB:
            verdict = "does not fit"
            why.append(f"needs {enough_gib(needed)} GiB of {what} in a machine that has {in_gib(there * GIB)}")
            shortage = max(shortage, needed / GIB / there)
    return verdict, why, shortage
