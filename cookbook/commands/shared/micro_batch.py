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
    from cookbook.forecast.ranking import forecast_all

    here = machines_of(plan)
    machines = replace(here, gpus_each=plan.num_local, num_machines=plan.num_processes // plan.num_local)
    try:
        (found,) = forecast_all(recipe, [strategy], machines, str(path)).forecasts
    except RecipeError as error:
        return 1, f"there is no forecast: {error.mistakes[0]}"
    largest = found.largest_micro_batch
    if largest is None:
        unknown = "the memory of this GPU is not known" if machines.usable_gib is None else "the forecast holds no more"
        return 1, "; ".join(found.why) or unknown
    size = max((size for size in sizes if size <= largest), default=1)
    room = f"of {machines.usable_gib:.0f} GiB" if machines.usable_gib else "of the GPU"
    text = f"the forecast holds {largest} of {recipe.data.max_length} tokens in the memory {room}"
    return size, text + (f", and a step has {sizes[-1]} a process" if size == sizes[-1] < largest else "")


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
