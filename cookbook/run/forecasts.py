"""Questions of a run to the forecast, which is imported nowhere else and only when asked; no step depends on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cookbook.config.recipe import Recipe
from cookbook.config.sections import BatchSection, Checkpointing
from cookbook.config.strategy import Strategy, load_known
from cookbook.system.hardware import Machines, find_gpu, peak_flops
from cookbook.system.kept_results import kept_results

if TYPE_CHECKING:
    from cookbook.forecast.costs.flops import ModelSizes
    from cookbook.forecast.fitting import Fitting
    from cookbook.forecast.memory import Memory as Memory
    from cookbook.run.stages import Run
    from cookbook.training.data.batches import StepBatch


@dataclass(frozen=True, kw_only=True)
class FlopCounter:
    """Model FLOPs utilization by the rules of docs/flops.md; recomputation is not counted."""

    sizes: "ModelSizes | None"
    """None if unknown: then mfu is not logged."""
    peak: float | None
    """FLOP/s of a GPU; None if unknown."""

    def mfu(self, batch: "StepBatch", seconds: float, num_processes: int) -> dict[str, float]:
        """`{"mfu": fraction of the peak}`, or empty if it is unknown."""
        if self.sizes is None or self.peak is None:
            return {}
        from cookbook.forecast.costs.flops import Step, work

        length = batch.num_tokens / batch.num_sequences
        step = Step(num_tokens=batch.num_tokens, num_labelled=batch.num_targets, length=length)
        return {"mfu": work(self.sizes, step).of_model / seconds / (self.peak * num_processes)}


def flop_counter(run: "Run", notes: list[str]) -> FlopCounter:
    """The counter of a run; on a GPU that is known, on rank 0. `notes` receives why there is none."""
    name = _gpu_name(run)
    peak, sizes = name and peak_flops(name), None
    if peak and run.engine.is_main:
        from cookbook.forecast.costs.flops import sizes_of
        from cookbook.forecast.skeleton import skeleton

        try:
            sizes = sizes_of(run.inputs.config, skeleton(run.inputs.config, run.recipe))
        except Exception as error:  # the run does not depend on it
            notes.append(f"mfu is not logged: {error}")
    return FlopCounter(sizes=sizes, peak=peak or None)


def memory(run: "Run", notes: list[str]) -> "Memory | None":
    """The memory of a GPU; None on a CPU and on ranks other than 0. `notes` receives why there is none."""
    name = _gpu_name(run)
    if name is None or not run.engine.is_main:
        return None  # a CPU process has more memory than its tensors
    from cookbook.forecast import verdict

    try:
        return verdict.of_run(run.inputs.config, run.recipe, run.engine.strategy, run.engine.plan, find_gpu(name))
    except Exception as error:  # the run does not depend on it
        notes.append(f"no forecast of memory: {error}")
        return None


def step_time(run: "Run", num_tokens: float | None) -> dict[str, Any]:
    """The time of a step by its parts, or `none` with why there is no forecast of it.

    Args:
        num_tokens: of a step, if known.
    """
    name = _gpu_name(run)
    if name is None:
        return {"none": "there is none for a CPU"}
    from cookbook.forecast import verdict

    engine = run.engine
    try:
        gpu = find_gpu(name)
        forecast = verdict.time_of_run(run.inputs.config, run.recipe, engine.strategy, engine.plan, gpu, num_tokens)
    except Exception as error:  # the run does not depend on it
        return {"none": str(error)}
    return {"none": forecast} if isinstance(forecast, str) else forecast.record()


def smaller_micro_batch(
    recipe: Recipe, strategy: Strategy, machines: Machines, recipe_name: str, batches: Sequence[BatchSection]
) -> BatchSection | None:
    """See `changes.smaller_micro_batch`."""
    from cookbook.forecast import changes

    return changes.smaller_micro_batch(recipe, strategy, machines, recipe_name, batches)


def fitting(
    recipe: Recipe,
    strategy: Strategy,
    machines: Machines,
    recipe_name: str,
    batches: Sequence[BatchSection],
    kinds: Sequence[Checkpointing],
    *,
    cache: Path | None,
) -> "list[Fitting]":
    """See `cookbook.forecast.fitting` and `cookbook.system.kept_results`."""
    from cookbook.forecast.fitting import fitting as fit

    with kept_results(cache):
        return fit(recipe, strategy, machines, recipe_name, batches, kinds)


def next_strategy(
    recipe: Recipe,
    strategy: Strategy,
    machines: Machines,
    recipe_name: str,
    others: Sequence[Strategy],
    batches: Sequence[BatchSection],
) -> tuple[Strategy, BatchSection] | None:
    """See `changes.next_strategy`."""
    from cookbook.forecast import changes

    return changes.next_strategy(recipe, strategy, machines, recipe_name, others, batches)


def first_change(recipe: Recipe, strategy: Strategy, machines: Machines, recipe_name: str) -> str:
    """The first change that makes a run fit which ran out of memory, in words."""
    from cookbook.forecast import changes

    return changes.rung_below(recipe, strategy, machines, recipe_name, load_known()) or changes.NOTHING_HELPS


def _gpu_name(run: "Run") -> str | None:
    """The name of this process's GPU; None on a CPU."""
    import torch

    device = run.engine.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
