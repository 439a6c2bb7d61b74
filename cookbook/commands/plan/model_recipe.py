"""The recipe behind `cookbook plan MODEL`: what `init` would write for the model, before there are rows."""

from pathlib import Path
from typing import Any, Literal

from cookbook.commands.init import example_for
from cookbook.config.recipe import Draft, Recipe, parse_recipe, read_recipe
from cookbook.config.sections import BUILTIN_SOURCE
from cookbook.system.files import RecipeError, refuse
from cookbook.system.hardware import Machines

Method = Literal["full", "lora", "qlora"]
NO_FILE = Path("model.yaml")
"""Paths of the recipe start in the current folder."""
SUFFIXES = (".yaml", ".yml")


def is_model(name: str, path: Path) -> bool:
    """Return whether the words of a user name a model: a folder, a config.json, or a name like `Qwen/Qwen3-8B`.

    Args:
        path: of the recipe that the name would be.

    Raises:
        RecipeError: another JSON file, or none.
    """
    if path.suffix == ".json" and (path.name != "config.json" or not Path(name).is_file()):
        raise RecipeError(f"{name}: no such file; write a recipe, a model's folder or its config.json, or a name")
    if path.suffix in SUFFIXES or (path.is_file() and path.suffix != ".json"):
        return False
    return path.is_dir() or path.suffix == ".json" or not path.exists()


def recipe_of_model(
    name: str, method: Method | None, length: int | None, machines: Machines | None, assignments: list[str]
) -> Recipe:
    """The recipe of a model: batch, adapter and optimizer of the shipped one nearest in method and size, but a sample
    for each GPU at least; micro-batch and checkpointing by auto.

    Args:
        method: default: lora.
        length: tokens of a sample; default: as in that shipped recipe, or what the model has positions for.
        machines: None: any.

    Raises:
        RecipeError: no model of that name, with the nearest one that is known offline.
    """
    path = Path(name)
    folder = str(path.parent) if path.suffix == ".json" else name
    adapter = None if (method or "lora") == "full" else (method or "lora")
    billions, positions = _size(folder)
    like = read_recipe(example_for("sft", adapter, billions).path).values
    usual = like["data"]["max_length"]
    num_samples = max(like["batch"]["global_batch_size"], machines.num_gpus if machines is not None else 1)
    values: dict[str, Any] = {
        "strategy": "single" if machines is not None and machines.num_gpus == 1 else "fsdp2",
        "mixed_precision": "fp16" if machines and machines.gpu and not machines.gpu.has_bf16 else "bf16",
        "model": {"name_or_path": folder, "gradient_checkpointing": "auto"},
        "data": {"train": BUILTIN_SOURCE, "max_length": length or min(usual, positions or usual)},
        **({"adapter": like["adapter"] | {"name": adapter}} if adapter else {}),
        "batch": {"global_batch_size": num_samples, "micro_batch_size": "auto"},
        "optim": like["optim"],
        "run": {"num_epochs": 1},
    }
    recipe = parse_recipe(Draft(name, values, assignments=assignments, file=NO_FILE))
    trained = "full" if recipe.adapter is None else recipe.adapter.name
    asked = [("--method", method, trained), ("--length", length, recipe.data.max_length)]
    refuse(
        [
            f"{option} {wanted}: --set makes it {value}; leave one of them out"
            for option, wanted, value in asked
            if wanted is not None and wanted != value
        ]
    )
    return recipe


def _size(folder: str) -> tuple[float, int | None]:
    """Billions of parameters of a model, for which a recipe with any settings serves, and its positions."""
    from cookbook.forecast.verdict import TraceCache
    from cookbook.training.models.structure import config_of

    values = {"strategy": "single", "model": {"name_or_path": folder}, "data": {"train": BUILTIN_SOURCE}}
    values |= {"batch": {"global_batch_size": 1, "micro_batch_size": 1}, "optim": {"learning_rate": 1.0}}
    recipe = parse_recipe(Draft(folder, values | {"run": {"num_epochs": 1}}, file=NO_FILE))
    config = config_of(recipe)[0]
    billions = TraceCache(config, recipe).sizes.num_parameters / 1e9
    return billions, getattr(config, "max_position_embeddings", None)
