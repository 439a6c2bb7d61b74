"""Checks of recipes with their strategies: every mistake at once, with its place, before anything is started."""

import os
import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from cookbook.commands.check.warnings import doubts, read_all
from cookbook.commands.shared.answer_forms import CheckAnswer, CheckedRecipe
from cookbook.commands.shared.arguments import RECIPE, AsJson, Assignments, StrategyFile, process_count
from cookbook.commands.shared.for_programs import answer, warn
from cookbook.commands.shared.labels import read_label, read_needs, recipe_files
from cookbook.commands.shared.mistakes import (
    check_layer_classes,
    check_model,
    lacks_checkpoint,
    lacks_for_fp8,
    place_mistakes,
)
from cookbook.config.foreign import as_assignment
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy, known_strategies, load_strategy, strategy_path
from cookbook.config.strategy_keys import Claim
from cookbook.start import run_plan
from cookbook.start.in_rounds import KEY, sampler_hosts
from cookbook.system import versions
from cookbook.system.console import say
from cookbook.system.files import RecipeError, gather_mistakes, refuse
from cookbook.system.machine import num_gpus
from cookbook.system.shipped import short
from cookbook.training.checkpoint.resume import changed_settings


def check(
    paths: Annotated[list[Path] | None, RECIPE] = None,
    *,
    strategy: StrategyFile = None,
    processes: Annotated[int | None, process_count("as many as GPUs are on the recipe's label")] = None,
    assignments: Assignments,
    data: Annotated[bool, Option("--data", help="read every row as well, without a model")] = False,
    as_json: AsJson = False,
) -> int:
    """Check recipes with their strategies; or all that are here."""
    misplaced = [as_assignment(str(path)) for path in paths or () if not path.exists()]
    mistakes = [message for message in misplaced if message is not None]
    refuse(mistakes)
    recipes = paths or recipe_files()
    if not recipes:
        raise RecipeError([f"recipes/: no recipe there (looked in {Path.cwd()})"])
    checked = CheckAnswer(recipes=[], strategies=[])
    for path in recipes:
        with gather_mistakes(mistakes):
            recipe, entry = _check_recipe(path, strategy, assignments, processes, is_named=bool(paths))
            checked.recipes.append(entry)
            for rows in read_all(recipe) if data else ():
                say(short(rows.words))
                entry.rows.append(rows.form)
    for path in () if paths else map(strategy_path, known_strategies()):
        with gather_mistakes(mistakes):
            load_strategy(path)
            say(short(f"{path}: fine"))
            checked.strategies.append(str(path))
    for note in versions.notes():
        warn(note)
    if as_json:
        answer(checked)
    if mistakes:
        sys.stdout.flush()
        raise RecipeError(mistakes)
    return 0


def _check_recipe(
    path: Path, override: Path | None, assignments: list[str], processes: int | None, *, is_named: bool
) -> tuple[Recipe, CheckedRecipe]:
    """A recipe without mistakes; says what it is, its notes and its warnings."""
    pair = run_plan.read_pair(path, assignments, override)
    recipe, strategy, plan = pair.recipe, pair.strategy, None
    doubtful: list[str] = []
    mistakes: list[str] = []
    if strategy is not None:
        if not is_named and strategy.num_processes:  # another number is a mistake only for a recipe that somebody chose
            processes = None
        mistakes += [] if strategy.address_problem is None else [strategy.address_problem]
        mistakes += [] if recipe is None else _lacks_of_label(path, recipe)
        plan, problems = run_plan.try_plan(pair, **_processes_of_label(path, strategy, processes))
        mistakes += problems
    if recipe is not None:
        mistakes += changed_settings(recipe) if is_named else []  # of all recipes, nobody asks to be resumed
        doubtful, problems = _on_disk(path, recipe, pair.claims)
        mistakes += problems
    refuse([*pair.mistakes, *place_mistakes(mistakes, path, assignments)])
    assert recipe is not None and strategy is not None and plan is not None
    batch = run_plan.describe_batch(recipe, plan)
    say(short(f"{path}: fine under {strategy.path}; {batch}"))
    notes = [*pair.notes, *strategy.notes]
    for host in sampler_hosts(recipe):
        notes.append(f"rounds.sampler: {host} gets the prompts" + (f", and {KEY}" if KEY in os.environ else ""))
    for note in notes:
        say(short(f"note: {note}"))
    for doubt in place_mistakes([f"{path}: {doubt}" for doubt in [*doubtful, *doubts(recipe)]], path, assignments):
        warn(short(doubt))
    return recipe, CheckedRecipe(
        recipe=str(path), strategy=str(strategy.path), processes=plan.num_processes, batch=batch, notes=notes
    )


def _on_disk(path: Path, recipe: Recipe, claims: tuple[Claim, ...]) -> tuple[list[str], list[str]]:
    """Notes and mistakes of the checkpoint and the model that a recipe names, and of the classes of its layers that a
    strategy's files name.
    """
    notes, mistakes = [], lacks_checkpoint(recipe)
    with gather_mistakes(mistakes):
        notes = check_model(recipe)
    mistakes = [f"{path}: {mistake}" for mistake in mistakes]
    with gather_mistakes(mistakes):
        check_layer_classes(recipe, claims)
    return notes, mistakes


def _processes_of_label(path: Path, strategy: Strategy, processes: int | None) -> dict[str, int]:
    """`processes`, or as many as the recipe's label names GPUs, whatever this machine has; a recipe that names none is
    for this machine.
    """
    needs = read_needs(read_label(path))
    named, here = needs.num_gpus, 0 if needs.num_gpus else num_gpus()
    count = processes or strategy.num_processes or named or run_plan.default_num_processes(strategy, here)
    num_local = needs.num_local(count) or strategy.num_local(count)
    return {"num_processes": count, "num_local": num_local, "num_gpus": count if named or here else 0}


def _lacks_of_label(path: Path, recipe: Recipe) -> list[str]:
    return lacks_for_fp8(path, recipe, 0 if read_needs(read_label(path)).num_gpus else num_gpus())
