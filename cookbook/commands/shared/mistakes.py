"""Mistakes of a recipe on this machine, and the place of each in its file."""

import re
from pathlib import Path

from cookbook.config.recipe import Recipe
from cookbook.system.files import RecipeError, read_document
from cookbook.system.imports import quiet_deepspeed
from cookbook.system.machine import fp8_problems, num_gpus


def lacks_checkpoint(recipe: Recipe) -> list[str]:
    """What is wrong with a checkpoint that the recipe names."""
    if recipe.run.resume in ("never", "auto"):
        return []
    from cookbook.training.checkpoint.folder import BrokenCheckpoint, open_checkpoint

    try:
        open_checkpoint(Path(recipe.run.resume))
    except (BrokenCheckpoint, OSError) as error:
        advice = "write never, auto, or the folder of a checkpoint, as outputs/mine/checkpoints/step-00000100"
        return [f"run.resume is {recipe.run.resume!r}: {error}; {advice}"]
    return []


def check_model(recipe: Recipe) -> list[str]:
    """Compare what a model's folder here says of itself, as the start of a run does. Imports torch if there is one.

    Returns:
        notes for the user.

    Raises:
        RecipeError: what does not agree.
    """
    name = recipe.model.name_or_path
    if name is None or not any(Path(name).glob("*.safetensors")):  # without weights yet, it can be planned with
        return []
    if not num_gpus():
        quiet_deepspeed()
    from cookbook.training import models
    from cookbook.training.models.folder_facts import check_folder

    folder = models.resolve_model(recipe.model, seed=recipe.seed, texts=(), fingerprint="", cache=Path())
    config = models.load_config(folder, recipe.data.max_length)
    return check_folder(Path(folder), config, models.load_tokenizer(folder, recipe.data.chat_template)).notes


def lacks_for_fp8(path: Path, recipe: Recipe, num_gpus: int) -> list[str]:
    if not num_gpus or recipe.mixed_precision != "fp8":
        return []
    return [f"{path}: {what}; {remedy}" for what, remedy in fp8_problems()]


def placed(mistakes: list[str], path: Path, assignments: list[str]) -> list[str]:
    """`file: section.key ...` with the place of the values in it: each --set that gave one, or the key's line."""
    try:
        lines = read_document(path).lines
    except RecipeError:  # of which the mistakes are
        return mistakes
    found = []
    for mistake in mistakes:
        named = re.match(rf"{re.escape(str(path))}(?: under \S+)?: (\w+(?:\.\w+)*)(.*)", mistake, re.DOTALL)
        if named is None:
            found.append(mistake)
            continue
        key, words = named[1], set(re.findall(r"\w+(?:\.\w+)*", named[2]))
        line = lines.get(tuple(key.split(".")))
        causes = [f"--set {one}" for one in assignments if _is_named(one.partition("=")[0].strip(), key, words)]
        place = " ".join(causes) or (f"{path}:{line}" if line else str(path))
        found.append(f"{place}{mistake[len(str(path)) :]}")
    return found


def _is_named(given: str, key: str, words: set[str]) -> bool:
    """Whether a mistake in `key` names the key that was given; by its last part too, where that is no common word."""
    last = given.rpartition(".")[2]
    return f"{key}.".startswith(f"{given}.") or ("." in given and given in words) or ("_" in last and last in words)
