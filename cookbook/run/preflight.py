"""Checks before a run: files, launcher, environment, batch and machine, all mistakes together. No torch."""

from functools import partial
from pathlib import Path

from cookbook.config import schedule
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.run import shortage
from cookbook.start import launchers
from cookbook.start.run_plan import (
    Pair,
    Plan,
    autos,
    find_runs_elsewhere,
    read_pair,
    refuse_rounds,
    try_plan,
    without_auto,
)
from cookbook.system import machine
from cookbook.system.files import refuse


def check(recipe_name: str, assignments: list[str]) -> tuple[Recipe, Strategy, Plan, launchers.World, list[str]]:
    """Check a run in one process of it, as its launcher has started it.

    Returns:
        The recipe, the strategy fitted to the processes, the plan, the processes, and notes for the user.

    Raises:
        RecipeError: every mistake of the files, and what launcher, environment and machine have against the run.
    """
    launcher, world = launchers.find_launcher(), launchers.read_world()
    pair = read_pair(Path(recipe_name), assignments, partial(launchers.strategy_in_force, launcher, world))
    world, plan, problems = fit(pair, launcher, world, recipe_name)
    if pair.recipe is not None and not pair.mistakes:
        problems = [*refuse_rounds(pair.recipe, recipe_name), *problems]
    refuse([*pair.mistakes, *problems])
    recipe, strategy = pair.recipe, pair.strategy
    assert recipe is not None and strategy is not None and plan is not None
    note = launchers.strategy_note(launcher, strategy.path, recipe.strategy)
    strategy = strategy.fitted(world.num_processes, world.num_local)
    notes = [*([note] if note else []), *shortage.unanswered(recipe)]
    if keys := autos(recipe):
        recipe = without_auto(recipe)
        notes.append(f"{' and '.join(keys)}: auto is what takes least memory here; `cookbook launch` finds the fastest")
    notes += strategy.notes
    max_steps = recipe.run.max_steps
    notes += schedule.short_run(recipe.schedule, max_steps and recipe.in_schedule(0, max_steps)[1])
    notes += find_runs_elsewhere(Path(recipe_name), recipe, strategy)
    return recipe, strategy, plan, world, notes


def fit(
    pair: Pair, launcher: launchers.Launcher, world: launchers.World, recipe_name: str
) -> tuple[launchers.World, Plan | None, list[str]]:
    """Fit a pair to this machine; what concerns the good one of a pair is found if the other has mistakes.

    Returns:
        The processes of the run, its plan if it can run, and what launcher, environment and machine have against it.
    """
    recipe, strategy = pair.recipe, pair.strategy
    mistakes = launchers.check_environment(strategy, launcher, None if recipe is None else recipe.mixed_precision)
    launchers.clear_environment()
    num_gpus = machine.num_gpus()
    if num_gpus:
        # Here and not in `launch`: accelerate, torchrun and srun start runs as well.
        machine.expand_segments()
    if strategy is not None:
        world = launchers.trim_world(world, strategy, launcher, num_gpus)
        mistakes += launchers.check_shares(strategy, world)
    mistakes += launchers.check_count(world, launcher)
    mistakes += launchers.choose_network(world)
    sizes = launchers.elastic_sizes(world)
    if recipe is not None:
        mistakes += launchers.check_elastic(sizes, recipe.run.resume)
        mistakes += launchers.check_machine(
            strategy, num_gpus, deterministic=recipe.run.deterministic, mixed_precision=recipe.mixed_precision
        )
    plans = []
    for count in (world.num_processes, *sizes):
        counts = {"num_processes": count, "num_local": world.num_local, "num_gpus": num_gpus}
        plan, problems = try_plan(pair, **counts, recipe_name=recipe_name)
        plans.append(plan)
        mistakes += problems
    return world, plans[0], mistakes
