"""What runs, in a form that can be compared with what was asked for, and written to run.json."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

Finding = tuple[str, Any, Any]
"""What, asked for, found."""


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor of which each process holds a piece."""
    return isinstance(tensor, DTensor) and any(isinstance(placement, Shard) for placement in tensor.placements)


def describe_optimizer(optimizer: Any) -> list[Any]:
    """The class of the optimizer inside the wrappers, and the settings of its groups that training does not change."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    fixed = ("weight_decay", "betas", "eps", "momentum")
    groups = [{name: group[name] for name in fixed if name in group} for group in optimizer.param_groups]
    return [type(optimizer).__name__, *groups]


def as_json(value: Any) -> Any:
    """A finding as JSON has it; of a set with one element, that."""
    if isinstance(value, set | frozenset | tuple | list):
        items = [as_json(item) for item in value]
        return items[0] if isinstance(value, set | frozenset) and len(items) == 1 else items
    return value if isinstance(value, str | int | float | bool) or value is None else str(value).removeprefix("torch.")
