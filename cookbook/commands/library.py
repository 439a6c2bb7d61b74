"""`library`: the page of all recipes, recipes/README.md, from the recipes."""

from pathlib import Path

from cookbook.commands.shared.arguments import write_page
from cookbook.commands.shared.labels import read_label, read_needs, recipe_files
from cookbook.config.optim import number
from cookbook.config.recipe import RECIPES, Recipe, load_recipe

PAGE = RECIPES / "README.md"


def library() -> int:
    """Write recipes/README.md from the recipes."""
    return write_page(PAGE, library_page)


def library_page() -> str:
    """recipes/README.md, generated from the recipes."""
    files = recipe_files()
    rows = [_row(path, load_recipe(path)) for path in files]
    anywhere = [path.relative_to(RECIPES) for path in files if read_needs(read_label(path)).num_gpus is None]
    lines = [
        "# The library",
        "",
        "Generated from the recipes by `cookbook library`; change those, not this page. Replace `launch` by `rehearse`",
        "to try a row first without a GPU, with a tiny model of its kind.",
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
