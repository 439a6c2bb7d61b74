"""The norm of a step's gradients, and clipping by it, whatever their layout."""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor


def square_sums(
    parameters: Iterable[torch.nn.Parameter],
    is_shard: Callable[[torch.Tensor], bool],
    to_device: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of squares of whole gradients, and of this process's parts of those that are sharded; two scalars.

    In float64: torch's float32 norm on CPU is off by 5e-5 for a tensor of a million elements; DeepSpeed's is float64.

    Args:
        is_shard: whether each process has another part of this gradient.
        to_device: where the sums are wanted. Gradients that lie elsewhere are summed there first: one copy for each
            place, not one for each parameter.
    """
    norms: dict[tuple[bool, torch.device], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is None:
            continue
        # The gradient's own placement: tensor parallel leaves that of a sharded embedding whole on each process.
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
            gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        norm = torch.linalg.vector_norm(local(gradient), dtype=torch.float64)
        norms[is_shard(gradient), norm.device].append(norm)
    sums = {is_part: to_device(torch.zeros((), dtype=torch.float64)) for is_part in (False, True)}
    for (is_part, _), found in norms.items():
        sums[is_part] = sums[is_part] + to_device(torch.stack(found).square().sum())
    return sums[False], sums[True]


def clip(parameters: Iterable[torch.nn.Parameter], norm: float, max_norm: float) -> None:
    """Scales gradients of this norm down to `max_norm`, with the same epsilon as torch.nn.utils.clip_grad_norm_ and
    DeepSpeed's unscale_and_clip_grads.
    """
    if norm > max_norm:
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(max_norm / (norm + 1e-6))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
