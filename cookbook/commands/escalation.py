"""What a run goes on with after its GPU memory ran out: a smaller micro-batch, then another strategy.

The parent of `accelerate launch` does it, since a strategy is chosen there; see `run.on_out_of_memory`.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cookbook.commands import shortage
from cookbook.config.recipe import Recipe
from cookbook.config.sections import BatchSection
from cookbook.config.strategy import Strategy, load_known
from cookbook.planning import simulated_gpus
from cookbook.planning.plan import Plan, launch_command, load_pair, make_plan
from cookbook.system import signals, status
from cookbook.system.hardware import DRIVER_RESERVE_GIB, Machines, this_machine

RunChild = Callable[[list[str], dict[str, str], Path], int]
"""From a command, its environment and the run's folder to the exit code of the run, see `child.run_child`."""


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

    def changed(self, strategy: Strategy, batch: BatchSection, *, resumes: bool) -> "Start":
        """The same run under another strategy or micro-batch."""
        run = self.recipe.run
        settings = {
            "run.output_dir": run.output_dir,  # whose default has the strategy in its name
            "run.resume": "auto" if resumes else run.resume,
            "batch.micro_batch_size": batch.micro_batch_size,
            "batch.micro_batch_tokens": batch.micro_batch_tokens,
        }
        kept = [one for one in self.assignments if one.partition("=")[0].strip() not in settings]
        assignments = [*kept, *(f"{key}={json.dumps(value)}" for key, value in settings.items() if value is not None)]
        recipe, strategy = load_pair(Path(self.recipe_name), assignments, Path(strategy.path))
        counts = {"num_processes": self.plan.num_processes, "num_gpus": self.plan.num_gpus}
        plan = make_plan(recipe, strategy, **counts, recipe_name=self.recipe_name)
        return replace(self, assignments=assignments, recipe=recipe, strategy=strategy, plan=plan)


def run(start: Start, run_child: RunChild, environment: dict[str, str]) -> int:
    """Run on this machine, and go on as run.on_out_of_memory says. Returns the exit code of the last start."""
    folder, first, tried = Path(start.recipe.run.output_dir), start, {start.strategy.path}
    steps: list[dict[str, str]] = []
    while True:
        before = status.read(folder)
        with tempfile.TemporaryDirectory(prefix="cookbook-") as temporary:
            note = Path(temporary) / "shortage"
            variables = {shortage.NOTE_FILE: str(note), shortage.HISTORY: json.dumps(steps)}
            code = run_child(start.command, environment | variables, folder)
            ran_out = json.loads(note.read_text()) if note.is_file() else None
        if ran_out is None or code in (0, signals.EXIT_CODE):
            return code
        has_begun = status.read(folder) != before
        following = next_start(start, first, tried, resumes=has_begun and any(folder.glob("checkpoints/step-*")))
        if following is None:
            advice = shortage.suggestion(start.recipe, start.strategy, start.plan, start.recipe_name)
            _say(f"out of memory under {start.words}, and nothing is left to try. Next: {advice}.")
            return code
        if has_begun:
            status.answered(folder, f"out of memory under {start.words}")
        steps = [*steps, {"from": start.words, "to": following.words, "reason": ran_out["reason"]}]
        _say(
            f"out of memory under {start.words}: starts again under {following.words}, from the newest checkpoint or"
            f" the beginning; still {start.recipe.batch.global_batch_size} {start.recipe.objective.sample}s a step"
        )
        start = following
        tried.add(start.strategy.path)


def next_start(start: Start, first: Start, tried: set[str], *, resumes: bool) -> Start | None:
    """The next start of a run whose GPU memory ran out; None if nothing is left to try.

    Args:
        first: has the micro-batch that somebody wrote, which is the first to be tried under another strategy.
        tried: paths of strategies.
        resumes: whether the run's own folder has a checkpoint of it.
    """
    from cookbook.commands import forecast

    recipe, strategy, name = start.recipe, start.strategy, start.recipe_name
    machines = _machines(start.plan)
    smaller = list(smaller_batches(recipe, start.plan.data_parallel_size))
    batch = forecast.smaller_micro_batch(recipe, strategy, machines, name, smaller)
    if batch is not None:
        return start.changed(strategy, batch, resumes=resumes)
    if recipe.run.on_out_of_memory != "next_strategy" or not start.plan.num_gpus:
        return None
    counts = (None, start.plan.num_processes)
    others = [other for other in load_known() if other.path not in tried and other.num_processes in counts]
    sizes = [first.recipe.batch, *smaller_batches(first.recipe, first.plan.data_parallel_size)]
    found = forecast.next_strategy(recipe, strategy, machines, name, others, sizes)
    return start.changed(*found, resumes=resumes) if found is not None else None


def smaller_batches(recipe: Recipe, data_parallel_size: int) -> Iterator[BatchSection]:
    """Ever smaller micro-batches, each at most half of the one before, that split the global batch evenly."""
    batch = recipe.batch
    size, tokens = batch.micro_batch_size or 0, batch.micro_batch_tokens or 0
    least = recipe.data.max_length * len(recipe.objective.sequences)
    while tokens > least:
        tokens = max(least, tokens // 2)
        yield batch.model_copy(update={"micro_batch_tokens": tokens})
    while size > 1:
        size = next(one for one in range(size // 2, 0, -1) if batch.global_batch_size % (one * data_parallel_size) == 0)
        yield batch.model_copy(update={"micro_batch_size": size})


def _machines(plan: Plan) -> Machines:
    """The GPUs of this run."""
    here = this_machine()
    if plan.num_gpus == 0:
        return replace(here, gpus_each=0, gpu=None, usable_gib=None)
    usable = here.usable_gib
    if simulated_gpus.is_active() and usable is not None:
        usable += DRIVER_RESERVE_GIB
    return replace(here, gpus_each=plan.num_processes, usable_gib=usable)


def _say(text: str) -> None:
    print(f"\n{text}\n", file=sys.stderr, flush=True)
