"""An adapter that begins with the weights of one that was trained before."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from cookbook.config.sections import AdapterSection
from cookbook.facts.model_files import values_of
from cookbook.system.files import RecipeError, refuse
from cookbook.training.adapters.peft_folder import ADAPTER_WEIGHTS, in_language_names, name_in_file, shapes_in
from cookbook.training.adapters.saved_settings import differences_from_recipe


def check(empty: PreTrainedModel, settings: AdapterSection) -> None:
    """Compare a recipe's adapter with the folder whose weights it begins with.

    Args:
        empty: the model with the recipe's adapter, without data.

    Raises:
        RecipeError: there is no adapter in the folder, or another.
    """
    folder, place = Path(settings.path or ""), f"adapter.path is {settings.path!r}"
    shapes_in(folder, place)
    saved = values_of(folder / "adapter_config.json")
    refuse([f"{place}, {what}" for what in differences_from_recipe(saved, settings)])
    with in_language_names(folder) as named:
        there = shapes_in(named, place)
    trained = ((name, parameter) for name, parameter in empty.named_parameters() if parameter.requires_grad)
    here = {_key(name): [*parameter.shape] for name, parameter in trained}
    if others := sorted(key for key in there.keys() | here.keys() if there.get(key) != here.get(key)):
        shapes = f"{others[0]} is {there.get(others[0])} there, and {here.get(others[0])} here"
        raise RecipeError(f"{place}, an adapter of other layers ({shapes}); see adapter.targets")


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
