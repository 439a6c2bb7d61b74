"""`explain`: what will run and where each value comes from, or how two runs differ."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument

from cookbook.commands.explain import compare
from cookbook.commands.explain.chart import LETTERS
from cookbook.commands.explain.explanation import as_dict, in_words
from cookbook.commands.explain.explanation import explain as explain_run
from cookbook.commands.shared.answer_forms import ExplainAnswer
from cookbook.commands.shared.arguments import QUICKSTART, RECIPE, AsJson, Assignments, StrategyFile, process_count
from cookbook.commands.shared.for_programs import answer
from cookbook.config.strategy import find_strategy, known_strategies
from cookbook.system.console import can_show, say
from cookbook.system.files import RecipeError
from cookbook.system.shipped import short


def explain(
    path: Annotated[Path, RECIPE] = QUICKSTART,
    other: Annotated[
        str | None, Argument(metavar="OTHER", autocompletion=known_strategies, help="to compare with")
    ] = None,
    *,
    strategy: StrategyFile = None,
    processes: Annotated[int | None, process_count("one per GPU, here or of the recipe's label")] = None,
    assignments: Assignments,
    as_json: AsJson = False,
) -> int:
    """Show what will run and where it is from, or compare two."""
    plain = not can_show(LETTERS, sys.stdout.encoding)
    if other is not None:
        comparison = compare.compare(str(path), other, override=strategy, assignments=assignments, processes=processes)
        say(short(compare.in_words(comparison)))
        return answer(ExplainAnswer(**compare.as_dict(comparison))) if as_json else 0
    if compare.is_strategy(str(path)):
        find_strategy(str(path))
        raise RecipeError([f"{path}: a strategy; write a recipe before it, or another strategy after it"])
    run = explain_run(path, strategy_path=strategy, assignments=assignments, processes=processes)
    say(in_words(run, plain=plain))
    return answer(ExplainAnswer(**as_dict(run))) if as_json else 0
