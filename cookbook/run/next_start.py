"""The next start of a run whose GPU memory ran out: a smaller micro-batch, then another strategy, or an advice."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import simulated_gpus
from cookbook.config.recipe import Recipe
from cookbook.config.sections import BatchSection
from cookbook.config.strategy import Strategy, load_known
from cookbook.run import forecasts
from cookbook.start.run_plan import Plan, launch_command, load_pair, make_plan
from cookbook.system.hardware import DRIVER_RESERVE_GIB, Machines, this_machine


@dataclass(frozen=True, kw_only=True)
class Start:
    recipe_name: str
    assignments: list[str]
    recipe: Recipe
    strategy: Strategy
    plan: Plan
    logs: Path | None = None
    """See `launch_command`."""

    @property
    def words(self) -> str:
        batch = self.recipe.batch
        size = batch.micro_batch_size or f"{batch.micro_batch_tokens} tokens"
        return f"{self.strategy.name} with micro-batch {size}"

    @property
    def command(self) -> list[str]:
        """The `accelerate launch` line, for one machine."""
        count = self.plan.num_processes
        return launch_command(
            self.recipe_name, self.strategy, num_processes=count, assignments=self.assignments, logs=self.logs
        )

    def change(self, strategy: Strategy, batch: BatchSection, *, resumes: bool) -> "Start":
        """Return the start of this run under another strategy or micro-batch."""
        run = self.recipe.run
        settings = {
            "run.output_dir": run.output_dir,  # whose default has the strategy in its name
            "run.resume": "auto" if resumes else run.resume,
            "batch.micro_batch_size": batch.micro_batch_size,
            "batch.micro_batch_tokens": batch.micro_batch_tokens,
        }
        kept = [assignment for assignment in self.assignments if assignment.partition("=")[0].strip() not in settings]
        assignments = [*kept, *(f"{key}={json.dumps(value)}" for key, value in settings.items() if value is not None)]
        recipe, strategy = load_pair(Path(self.recipe_name), assignments, Path(strategy.path))
        counts = {"num_processes": self.plan.num_processes, "num_gpus": self.plan.num_gpus}
        plan = make_plan(recipe, strategy, **counts, recipe_name=self.recipe_name)
        return replace(self, assignments=assignments, recipe=recipe, strategy=strategy, plan=plan)


def next_start(start: Start, first: Start, tried: set[str], *, resumes: bool) -> Start | None:
    """The next start of a run whose GPU memory ran out; None if nothing is left to try.

    Args:
        first: has the micro-batch that somebody wrote, which is the first to be tried under another strategy.
        tried: paths of strategies.
        resumes: whether the run's own folder has a checkpoint of it.
    """
    recipe, strategy, name = start.recipe, start.strategy, start.recipe_name
    machines = machines_of(start.plan)
    smaller = list(smaller_batches(recipe, start.plan.data_parallel_size))
    batch = forecasts.smaller_micro_batch(recipe, strategy, machines, name, smaller)
    if batch is not None:
        return start.change(strategy, batch, resumes=resumes)
    if recipe.run.on_out_of_memory != "next_strategy" or not start.plan.num_gpus:
        return None
    counts = (None, start.plan.num_processes)
    others = [other for other in load_known() if other.path not in tried and other.num_processes in counts]
    sizes = [first.recipe.batch, *smaller_batches(first.recipe, first.plan.data_parallel_size)]
    change = forecasts.next_strategy(recipe, strategy, machines, name, others, sizes)
    return start.change(*change, resumes=resumes) if change is not None else None


def smaller_batches(recipe: Recipe, data_parallel_size: int) -> Iterator[BatchSection]:
    """Ever smaller micro-batches, each at most half of the one before, that split the global batch evenly."""
    batch = recipe.batch
    size, tokens = batch.micro_batch_size or 0, batch.micro_batch_tokens or 0
    least = recipe.data.max_length * len(recipe.objective.sequences)
    while tokens > least:
        tokens = max(least, tokens // 2)
        yield batch.model_copy(update={"micro_batch_tokens": tokens})
    while size > 1:
        size = next(
            divisor
            for divisor in range(size // 2, 0, -1)
            if batch.global_batch_size % (divisor * data_parallel_size) == 0
        )
        yield batch.model_copy(update={"micro_batch_size": size})


def machines_of(plan: Plan) -> Machines:
    """The GPUs of this run."""
    here = this_machine()
    if plan.num_gpus == 0:
        return replace(here, gpus_each=0, gpu=None, usable_gib=None)
    usable = here.usable_gib
    if simulated_gpus.is_active() and usable is not None:
        usable += DRIVER_RESERVE_GIB
    return replace(here, gpus_each=plan.num_processes, usable_gib=usable)


def suggestion(recipe: Recipe, strategy: Strategy, plan: Plan, recipe_name: str) -> str:
    """The first change that makes the run fit, as `plan` names it."""
    try:
        here = this_machine()
        machines = replace(here, num_machines=max(1, -(-plan.num_processes // max(1, here.gpus_each))))
        return forecasts.first_change(recipe, strategy, machines, recipe_name)
    except Exception as trouble:  # the advice is optional, the report is not
        return f"cookbook plan {recipe_name} (no advice from here: {trouble})"
