"""The number for `batch.micro_batch_size: auto`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.planning.run_plan import Plan
from cookbook.run.next_start import machines_of
from cookbook.system.files import RecipeError, read_document


def choose(path: Path, recipe: Recipe, strategy: Strategy, plan: Plan) -> tuple[int, str]:
    """The micro-batch of a run on GPUs like this machine's, and why it has this one: the largest by the forecast that
    splits the global batch, or what the run that is resumed had.

    Args:
        path: of the recipe.
    """
    sizes = list(_even(recipe.batch.global_batch_size // plan.data_parallel_size))
    if (earlier := _earlier(recipe)) in sizes:
        return earlier, "as the run that it goes on with"
    if not plan.num_gpus:
        return 1, "no forecast says what a CPU holds"
    if strategy.pp_size > 1:
        return 1, "the more micro-batches, the less do the stages of a pipeline wait"
    from cookbook.forecast.ranking import largest_micro_batch

    here = machines_of(plan)
    machines = replace(here, gpus_each=plan.num_local, num_machines=plan.num_processes // plan.num_local)
    if machines.usable_gib is None:
        return 1, "the memory of this GPU is not known"
    batches = [recipe.batch.model_copy(update={"micro_batch_size": size}) for size in sizes]
    try:
        found = largest_micro_batch(recipe, strategy, machines, str(path), batches)
    except RecipeError as error:
        return 1, f"there is no forecast: {error.mistakes[0]}"
    room = f"{machines.usable_gib:.0f} GiB of GPU memory"
    if found is None:
        return 1, f"by the forecast even that may exceed {room}"
    size = found.micro_batch_size or 1
    larger = next((one for one in sizes if one > size), None)
    return size, f"it fits in {room} by the forecast, and {f'{larger} may not' if larger else 'is all of a step'}"


def _even(share: int) -> Iterator[int]:
    """Micro-batches that split a process's share of the global batch."""
    return (size for size in range(1, share + 1) if share % size == 0)


def _earlier(recipe: Recipe) -> int | None:
    """That of the run in the folder which this one goes on with."""
    written = Path(recipe.run.output_dir, "recipe.yaml")
    if recipe.run.resume == "never" or not written.is_file():
        return None
    size = read_document(written).values.get("batch", {}).get("micro_batch_size")
    return size if isinstance(size, int) else None
