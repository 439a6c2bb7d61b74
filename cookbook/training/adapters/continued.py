"""An adapter that begins with the weights of one that was trained before."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from cookbook.config.sections import AdapterSection
from cookbook.facts.model_files import values_of
from cookbook.system.files import RecipeError, refuse
from cookbook.training.adapters.peft_folder import ADAPTER_WEIGHTS, in_language_names, name_in_file, shapes_in


def check(empty: PreTrainedModel, settings: AdapterSection) -> None:
    """Compare a recipe's adapter with the folder whose weights it begins with.

    Args:
        empty: the model with the recipe's adapter, without data.

    Raises:
        RecipeError: there is no adapter in the folder, or another.
    """
    folder, place = Path(settings.path or ""), f"adapter.path is {settings.path!r}"
    shapes_in(folder, place)
    refuse([f"{place}, {what}" for what in _differences(folder, settings)])
    with in_language_names(folder) as named:
        there = shapes_in(named, place)
    trained = ((name, parameter) for name, parameter in empty.named_parameters() if parameter.requires_grad)
    here = {_key(name): [*parameter.shape] for name, parameter in trained}
    if others := sorted(key for key in there.keys() | here.keys() if there.get(key) != here.get(key)):
        shapes = f"{others[0]} is {there.get(others[0])} there, and {here.get(others[0])} here"
        raise RecipeError(f"{place}, an adapter of other layers ({shapes}); see adapter.targets")


def _differences(folder: Path, settings: AdapterSection) -> Iterator[str]:
    saved = values_of(folder / "adapter_config.json")
    own = {"rank": settings.rank, "alpha": settings.alpha, "rslora": settings.rslora}
    for (key, value), peft_key in zip(own.items(), ("r", "lora_alpha", "use_rslora"), strict=True):
        saved_value = saved.get(peft_key) or False  # an adapter from before peft had use_rslora has no such key
        if not saved_value and key != "rslora":
            yield f"whose adapter_config.json has no {peft_key}; fetch it again, or correct it"
        elif saved_value != value:
            yield f"whose {peft_key} is {saved_value}, and adapter.{key} is {value}; write adapter.{key}: {saved_value}"
    if saved.get("peft_type") != "LORA":
        yield f"whose peft_type is {saved.get('peft_type')}, and here it is LORA"
    if saved.get("use_dora", False) != (settings.name == "dora"):
        yield f"whose use_dora is {saved.get('use_dora', False)}, and adapter.name is {settings.name}"
    for key in ("rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices"):
        if saved.get(key):
            yield f"which has {key}; only matrices of one rank and alpha can be begun with: merge it (docs/adapters.md)"


@torch.no_grad()
def fill(model: PreTrainedModel, folder: Path) -> None:
    """Set the trained weights, in place, to those of a folder that `check` has seen; each process reads all of them."""
    with in_language_names(folder) as named:
        saved = load_file(named / ADAPTER_WEIGHTS)
    for name, parameter in model.named_parameters():
        if (tensor := saved.get(_key(name))) is not None:
            if isinstance(parameter, DTensor):
                tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(tensor)


def _key(name: str) -> str:
    return f"base_model.model.{name_in_file(name)}"
