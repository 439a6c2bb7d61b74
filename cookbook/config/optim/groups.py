"""Parameter groups and learning rate of a recipe's torch optimizer. Imports torch."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from cookbook.config.objectives.scored import HEAD
from cookbook.config.optim.optimizer import Optimizer

CONSTANTS = ("A_log", "D")
"""Parameters of a state space, in whatever shape, which Gu and Dao's own code keeps from weight decay (arXiv
2312.00752)."""


class Kind(NamedTuple):
    """Properties of a parameter by which optimizers treat it."""

    is_matrix: bool
    """True if it decays: not a bias, the weight of a norm, or a vector, whatever their number of dimensions."""
    is_orthogonal: bool
    """True if Muon orthogonalizes it: a matrix inside the layers, also of an adapter. Not an embedding or head, as
    Muon's author advises, nor experts that are stacked, in three dimensions or in two, nor their adapters."""


def kinds(model: torch.nn.Module) -> dict[torch.nn.Parameter, Kind]:
    """The kind of each parameter of a model, by its module and name. A tied parameter counts once."""
    apart = {parameter for module in _not_orthogonal(model) for parameter in module.parameters()}
    kind_of: dict[torch.nn.Parameter, Kind] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            shape = _shape(parameter)
            is_matrix = _is_matrix(module, name, shape)
            is_stacked = "expert" in type(module).__name__.lower()
            is_orthogonal = is_matrix and len(shape) == 2 and not is_stacked and parameter not in apart
            kind_of.setdefault(parameter, Kind(is_matrix, is_orthogonal))
    return kind_of


def _shape(parameter: torch.nn.Parameter) -> torch.Size:
    """The shape of a parameter, also under ZeRO-3, where it is an empty placeholder with its real shape in ds_shape."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _is_matrix(module: torch.nn.Module, name: str, shape: torch.Size) -> bool:
    is_norm = "Norm" in type(module).__name__ and not isinstance(module, torch.nn.Embedding)
    if len(shape) < 2 or is_norm or name.endswith("bias") or name in CONSTANTS:
        return False
    return name == "weight" or shape.numel() > max(shape)  # RWKV's factors are [1, 1, width]


def _not_orthogonal(model: Any) -> Iterator[torch.nn.Module]:
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):  # of positions and of layers, too
            yield module
        if hasattr(module, "parameter_name"):  # peft's wrapper of stacked experts, whose matrices are stacked as well
            yield from (module.lora_A, module.lora_B)
    if hasattr(model, "get_input_embeddings"):
        # Their wrappers by peft have rows of new tokens.
        ends = model.get_input_embeddings(), model.get_output_embeddings(), getattr(model, HEAD, None)
        yield from (module for module in ends if module is not None)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in groups: matrices with weight decay, biases, norms and vectors without.

    DTensors and plain tensors, which tensor parallel mixes, get separate groups: a fused update refuses both together.
    """
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    kind_of = kinds(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            key = kind_of[parameter].is_matrix, isinstance(parameter, DTensor)
            groups.setdefault(key, []).append(parameter)
    ordered = sorted(groups.items(), key=lambda item: item[0], reverse=True)
    return [
        {"params": params, "weight_decay": weight_decay if is_matrix else 0.0} for (is_matrix, _), params in ordered
    ]


def build_optimizer(model: torch.nn.Module, settings: Optimizer, mixed_precision: str) -> torch.optim.Optimizer:
    """The recipe's optimizer for the trained parameters of a model."""
    return settings.build(parameter_groups(model, settings.weight_decay), model, mixed_precision)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
