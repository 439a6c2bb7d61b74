"""The running state in a form that can be compared with what was asked for and written to run.json."""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Comparison = tuple[str, Any, Any]
"""Name, value asked for, value found."""
MOST_NAMED = 10


def num_shards(tensor: torch.Tensor) -> int:
    """Into how many different parts the ranks divide a tensor: 1 unless it is a DTensor."""
    return math.prod(tensor.device_mesh.size(dim) for dim in sharded_dims(tensor))  # type: ignore[attr-defined]


def sharded_dims(tensor: torch.Tensor) -> list[int]:
    """The dimensions of its device mesh along which a DTensor is sharded. Those of FSDP2 over tensor parallel are of
    torch's class _StridedShard.
    """
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return [i for i, placement in enumerate(placements) if not placement.is_replicate() and not placement.is_partial()]


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor of which each rank holds a shard."""
    return bool(sharded_dims(tensor))


def describe_optimizer(optimizer: Any) -> list[Any]:
    """Class of the optimizer inside its wrappers, and the settings of its groups that training does not change."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    fixed = ("weight_decay", "betas", "eps", "momentum")
    groups = [{name: group[name] for name in fixed if name in group} for group in optimizer.param_groups]
    return [type(optimizer).__name__, *groups]


def in_words(names: list[str]) -> str:
    """The first of many names."""
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f", and {rest} more" if rest > 0 else "")


def as_json(value: Any) -> Any:
    """A finding's value as JSON; a set of one element becomes that element."""
    if isinstance(value, set | frozenset | tuple | list):
        items = [as_json(item) for item in value]
        return items[0] if isinstance(value, set | frozenset) and len(items) == 1 else items
    return value if isinstance(value, str | int | float | bool) or value is None else str(value).removeprefix("torch.")
