"""Finds the model that a command is to use, and the run and the base that it comes from. Imports no torch."""

import os
from collections.abc import Sequence
from pathlib import Path

from cookbook.commands.shared.arguments import which_run
from cookbook.config.recipe import Recipe, load_recipe, read_recipe
from cookbook.facts.model_files import values_of
from cookbook.system.files import RecipeError, first_line
from cookbook.system.imports import quiet_deepspeed
from cookbook.system.machine import num_gpus
from cookbook.training.checkpoint.listing import is_run

ADAPTER = "adapter_config.json"
"""Marks a model's folder as an adapter, as peft writes it."""
CACHE = Path(".cache")


def find_model(folder: Path) -> Path:
    """The Hugging Face folder of a run, or `folder` itself if it is one.

    Raises:
        RecipeError: neither.
    """
    model = folder / "export" if (folder / "export").is_dir() else folder
    if any(os.path.lexists(model / name) for name in ("config.json", ADAPTER)):
        return model
    if any(folder.glob("checkpoints/step-*")):
        raise RecipeError(
            f"{folder}: the run is not finished; write its newest checkpoint first: cookbook export {folder}"
        )
    raise RecipeError(f"{model}: no model there; {which_run(folder)}")


def is_adapter(folder: Path) -> bool:
    """Return whether a model's folder has an adapter, even one whose settings cannot be read."""
    return os.path.lexists(folder / ADAPTER)


def find_run(folder: Path) -> Path | None:
    """The run that `folder` is, or that contains it."""
    return next((path for path in (folder, folder.resolve().parent) if is_run(path)), None)


def recipe_of_run(run: Path, assignments: Sequence[str] = ()) -> Recipe:
    """The recipe that a run has recorded, with `section.key=value` over it.

    Raises:
        RecipeError: as `load_recipe`; a run that the command line made too short for its warm-up is none.
    """
    path = run / "recipe.yaml"
    of_run = read_recipe(path).values.get("run")
    steps = of_run.get("max_steps") if isinstance(of_run, dict) else None
    return load_recipe(path, [*([] if steps is None else [f"run.max_steps={steps}"]), *assignments])


def name_of_base(adapter: Path) -> str:
    """The base model by the settings of an adapter's folder, or else by the record of its run.

    Raises:
        RecipeError: neither names one, as after peft was given a model that was built in memory.
    """
    from cookbook.training.adapters.base_model import Base

    path = adapter / ADAPTER
    if name := values_of(path).get("base_model_name_or_path"):
        return str(name)
    try:
        return Base.read(adapter).name_or_path
    except FileNotFoundError:
        what = "names no base model; write the name or the folder of the one that it was trained on"
        raise RecipeError(f"{path}: {what}, as base_model_name_or_path") from None


def check_base(trained: Path) -> None:
    """Check that the base model in a folder is still the one that was trained from. An adapter's is where its
    `adapter_config.json` has it, which may have been edited since.

    Takes about a second per gigabyte at the first time, see `sha256_of`. A model of the Hub has a commit instead.

    Args:
        trained: the folder of an adapter, or of what a run keeps of its model; adapters of other projects have no
            record of their base.

    Raises:
        RecipeError: its weights are others, or the record is damaged.
    """
    from cookbook.training.adapters.base_model import Base
    from cookbook.training.models.model_source import weights_digest

    try:
        base = Base.read(trained)
    except FileNotFoundError:
        return
    folder = Path(name_of_base(trained) if is_adapter(trained) else base.name_or_path)
    try:
        digest = weights_digest(folder, cache=CACHE) if (folder / "config.json").is_file() else None
    except OSError as error:
        raise RecipeError(f"{folder}, the base of {trained}: cannot be read ({first_line(error)})") from None
    if digest not in (None, base.sha256):
        raise RecipeError(
            f"{folder}: its files are not those that {trained} was trained on (another SHA-256); put those back"
        )


def quiet_without_gpus() -> None:
    """Before torch is imported: else DeepSpeed, which peft imports, warns that there is no GPU."""
    if not num_gpus():
        quiet_deepspeed()
