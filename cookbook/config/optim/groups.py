"""Builds the torch optimizer of a recipe: parameter groups and learning rate. Imports torch."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cookbook.config.optim.optimizer import Optimizer


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in groups: matrices with weight decay, biases and norms (one dimension) without.

    DTensors and plain tensors, which tensor parallel mixes, get separate groups: a fused update refuses both together.
    """
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Under ZeRO-3 a parameter is an empty placeholder; ds_shape is its real shape.
            is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
            groups.setdefault((is_matrix, isinstance(parameter, DTensor)), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda item: item[0], reverse=True)
    return [{"params": found, "weight_decay": weight_decay if is_matrix else 0.0} for (is_matrix, _), found in ordered]


def build_optimizer(model: torch.nn.Module, settings: Optimizer, mixed_precision: str) -> torch.optim.Optimizer:
    """The recipe's optimizer for the trained parameters of a model."""
    return settings.build(parameter_groups(model, settings.weight_decay), model, mixed_precision)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
