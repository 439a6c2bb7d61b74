"""Arguments that several commands share: type, check, help and completion."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, CallbackParam, Option

from cookbook.commands.shared.labels import recipe_files
from cookbook.config.checks import names_of_no_run
from cookbook.config.recipe import RECIPES
from cookbook.config.strategy import find_strategy, known_strategies
from cookbook.system.console import say
from cookbook.system.files import RecipeError, closest
from cookbook.system.record_files import replace_file
from cookbook.system.shipped import HOME, in_repository, path_from_here

QUICKSTART = RECIPES / "quickstart.yaml"
MODEL = "the run.output_dir of a recipe, or a model's own folder"


def recipes() -> list[str]:
    """Completions of a recipe."""
    return sorted(str(path.relative_to(HOME) if path.is_relative_to(HOME) else path) for path in recipe_files())


def _runs() -> list[str]:
    return sorted(str(path.parent) for path in Path("outputs").glob("*/run.json"))


def runs_in(folder: Path) -> list[str]:
    """The runs that a folder has, as that of a sweep."""
    return sorted(str(path.parent) for path in folder.glob("*/status.json"))


def which_run(folder: Path) -> str:
    """Advice for a folder that is no run: a run in it, the run with the nearest name, or the runs that are here."""
    if inside := runs_in(folder):
        more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
        return f"name a run in it: {', '.join(inside[:3])}{more}"
    names = {Path(run).name: run for run in _runs()}
    if name := closest(folder.name, names, least=0.6):  # of few folders
        return f"did you mean {names[name]}?"
    here = f"; here are {', '.join(names.values())}" if names else ", for example outputs/quickstart"
    return f"name the run.output_dir of a run{here}"


def holds_no_run(folder: Path) -> list[str]:
    """Mistakes of a folder that no run has made, nor may begin in."""
    names = names_of_no_run(folder)
    return [f"{folder}: no run's folder (it has {', '.join(names)}); {which_run(folder)}"] if names else []


def positive(param: CallbackParam, value: float | None) -> float | None:
    """The value of an argument, which must be above 0 if somebody wrote it."""
    if value is not None and not 0 < value < 1e15:
        raise RecipeError(f"{param.opts[0]} is {value:g}; write a number above 0{' and below 1e15' * (value > 0)}")
    return value


def process_count(default: str) -> Any:
    """The option `--processes`, with the number that is used without it."""
    return Option(callback=positive, help=f"default: {default}")


def run_folder(what: str = "the run.output_dir of a recipe") -> Any:
    """The folder of a run, or what else a command takes for it."""
    return Argument(metavar="RUN", autocompletion=_runs, help=what)


def _find(strategy: Path | None) -> Path | None:
    return None if strategy is None else find_strategy(str(strategy))


def locate(path: str | Path) -> Path:
    """Find a recipe: the file here or, if there is none, the shipped one."""
    if not str(path).strip():
        raise BadParameter("is empty; write a path")
    return Path(path_from_here(str(path)))


def recipe_argument(what: str | None = None) -> Any:
    """The path of a recipe, and what help says of it."""
    return Argument(metavar="RECIPE", autocompletion=recipes, parser=locate, help=what)


RECIPE = recipe_argument()
StrategyFile = Annotated[
    Path | None,
    Option(
        "--strategy",
        metavar="NAME|PATH",
        callback=_find,
        autocompletion=known_strategies,
        help="in the recipe's place",
    ),
]
Assignments = Annotated[
    list[str],
    Option("--set", metavar="section.key=value", default_factory=list, show_default=False, help="may be repeated"),
]
Strategies = Annotated[
    list[str] | None,
    Option("--strategy", metavar="NAME|PATH", autocompletion=known_strategies, help="only this; may be repeated"),
]
AsJson = Annotated[bool, Option("--json", help="everything that is known, for programs")]


def write_page(path: Path, text: Callable[[], str]) -> int:
    """Write a generated page of the repository.

    Raises:
        RecipeError: the current folder is another.
    """
    if not in_repository():
        raise RecipeError(f"{path} is a page of the repository, and this folder is another; write the command there")
    replace_file(path, text())
    say(path)
    return 0
