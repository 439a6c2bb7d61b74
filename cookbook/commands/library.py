"""`library`: the shipped recipes, strategies, chat templates and examples, and a copy of one, to edit it.

For maintainers also recipes/README.md, the page of all recipes.
"""

import contextlib
from pathlib import Path
from typing import Annotated

import yaml
from typer import Option

from cookbook.commands.shared.arguments import write_page
from cookbook.commands.shared.labels import read_label, read_needs, recipe_files
from cookbook.config.chat_templates import FOLDER as TEMPLATES
from cookbook.config.optim import number
from cookbook.config.recipe import RECIPES, Recipe, load_recipe
from cookbook.config.strategy import STRATEGIES
from cookbook.system.console import say
from cookbook.system.files import RecipeError, cannot_write, nearest, refuse
from cookbook.system.shipped import HOME

PAGE = RECIPES / "README.md"
EXAMPLES = Path("examples")


def library(
    *,
    copy: Annotated[
        list[str],
        Option("--copy", metavar="NAME|PATH", default_factory=list, show_default=False, help="may be repeated"),
    ],
    page: Annotated[bool, Option("--page", help="write the page of recipes, in the repository")] = False,
) -> int:
    """List recipes, strategies and templates, or copy some."""
    if page:
        return write_page(PAGE, library_page)
    if copy:
        return _copy_here(copy)
    for path in sorted(_list_shipped(RECIPES, "yaml")):
        label = read_label(HOME / path)
        say(f"{path!s:36} {label.get('Needs', '').split('. ')[0].rstrip('.')}")
    say("strategies:", ", ".join(sorted(path.stem for path in _list_shipped(STRATEGIES, "yaml"))))
    say("chat templates:", ", ".join(sorted(path.stem for path in _list_shipped(TEMPLATES, "jinja"))))
    say("programs:", ", ".join(sorted(path.stem for path in _list_shipped(EXAMPLES, "py"))))
    say("cookbook library --copy NAME puts one into this folder, where it is used in the place of the shipped one")
    return 0


def _list_shipped(folder: Path, suffix: str) -> list[Path]:
    """Files below a shipped folder, as paths from `HOME`."""
    return [path.relative_to(HOME) for path in (HOME / folder).rglob(f"*.{suffix}")]


def names_of_copies() -> dict[str, Path]:
    """The names and paths that --copy takes, each with its file."""
    shipped = [*_list_shipped(RECIPES, "yaml"), *_list_shipped(STRATEGIES, "yaml"), *_list_shipped(TEMPLATES, "jinja")]
    shipped += _list_shipped(EXAMPLES, "py")
    short = {path.stem: path for path in shipped if path.parent in (RECIPES, STRATEGIES, TEMPLATES, EXAMPLES)}
    of_recipes = {str(path.relative_to(RECIPES).with_suffix("")): path for path in shipped if RECIPES in path.parents}
    return of_recipes | short | {str(path): path for path in shipped}


def _with_what_it_names(path: Path) -> list[Path]:
    """A shipped file, and those that an edited copy needs beside it: the JSON of a strategy; the schema for editors,
    rows, models and plugins of a recipe.
    """
    if path.parent == STRATEGIES:
        block = yaml.safe_load((HOME / path).read_text(encoding="utf-8")).get("deepspeed_config") or {}
        named = block.get("deepspeed_config_file")
        return [path, *([Path(named)] if named else [])]
    if path.suffix != ".yaml":
        return [path]
    beside = [] if path.parent == RECIPES else (HOME / path.parent).rglob("*")
    others = [other for other in beside if other.is_file() and other.suffix not in (".yaml", ".pyc")]
    return [path, RECIPES / "schema.json", *sorted(other.relative_to(HOME) for other in others)]


def _copy_here(names: list[str]) -> int:
    """Copy all files, or none; those that are here as shipped stay."""
    known, mistakes = names_of_copies(), []
    for name in names:
        if name not in known:
            mistakes.append(f"--copy {name}: nothing shipped has this name; {nearest(name, list(known))}")
    refuse(mistakes)
    files = list(dict.fromkeys(file for name in names for file in _with_what_it_names(known[name])))
    for file in files:
        if file.exists() and not _is_as_shipped(file):
            mistakes.append(f"{file} is here and differs from the shipped one; rename or remove it first")
    refuse(mistakes)
    written: list[Path] = []
    for file in files:
        if file.exists():
            say(f"{file} is here, as shipped")
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("xb") as copied:
                written.append(file)
                copied.write((HOME / file).read_bytes())
        except OSError as error:
            for path in written:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise RecipeError(cannot_write(file, error)) from None
        say(file)
    return 0


def _is_as_shipped(file: Path) -> bool:
    return file.is_file() and file.read_bytes() == (HOME / file).read_bytes()


def library_page() -> str:
    """recipes/README.md, generated from the recipes."""
    files = recipe_files()
    rows = [_row(path, load_recipe(path)) for path in files]
    anywhere = [path.relative_to(RECIPES) for path in files if read_needs(read_label(path)).num_gpus is None]
    lines = [
        "# The library",
        "",
        "Generated from the recipes by `cookbook library --page`; change those, not this page. Replace `launch` by",
        "`rehearse` to try a row first without a GPU, with a tiny model of its kind.",
        "",
        "A recipe is a model and a task. Its strategy is a default; another gives the same curve (`--strategy zero3`).",
        "The label at the top of each recipe lists which strategies fit which machines, as forecast by `plan`, until a",
        "row has a measurement, and the published source of every learning rate, batch size and schedule. An older",
        "model is here for its published or measured numbers, or as the only one of its kind:",
        "[the rule](../CONTRIBUTING.md#a-recipe-for-the-library).",
        "",
        f"On any machine, without a download, in minutes: {', '.join(f'[{name}]({name})' for name in anywhere)}.",
        "",
        "| Recipe | Model | Objective | Adapter | Default strategy | Global batch | Learning rate | Needs | Measured |"
        " Run |",
        "|" + " --- |" * 10,
        *("| " + " | ".join(cells) + " |" for cells in rows),
        "",
        f"{len(rows)} recipes. `recipes/offline_facts.json` has what a rehearsal without network needs to know about"
        " their models and data.",
    ]
    return "\n".join(lines) + "\n"


def _row(path: Path, recipe: Recipe) -> tuple[str, ...]:
    label = read_label(path)
    name = path.relative_to(RECIPES)
    return (
        f"[{name}]({name})",
        recipe.model.name_or_path or f"new {recipe.model.from_scratch.model_type}",  # type: ignore[union-attr]
        recipe.objective.name,
        f"{recipe.adapter.name}, rank {recipe.adapter.rank}" if recipe.adapter else "none: all weights",
        Path(recipe.strategy).stem,
        f"{recipe.batch.global_batch_size} {recipe.objective.sample}s",
        number(recipe.optim.learning_rate),
        label.get("Needs", "").split(". ")[0].rstrip("."),
        "not yet" if label.get("Measured", "not yet").startswith("not yet") else "yes, in its label",
        f"`cookbook {'launch' if recipe.rounds is None else 'rounds'} {path}`",
    )
