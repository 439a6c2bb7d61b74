"""The norm of a step's gradients and clipping by it, for whole gradients, shards and DTensors."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor

ROW, LARGE = 256, 2**16


def square_sum(
    parameters: Iterable[torch.nn.Parameter],
    num_shards: Callable[[torch.Tensor], float],
    to_device: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Sum of squares of this rank's part of the gradients, each times its number of shards. The mean over all ranks is
    the square of the norm, whichever ranks hold the same part.

    Args:
        num_shards: into how many different parts the ranks divide this gradient.
        to_device: moves a sum to the device of the result. Gradients elsewhere (offload) are summed there first: one
            copy for each device, not for each parameter.
    """
    norms: dict[tuple[float, torch.device], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient, norm = _norm_of(parameter)
            norms[num_shards(gradient), norm.device].append(norm)
    total = to_device(torch.zeros((), dtype=torch.float64))
    for (times, _), of_weights in norms.items():
        total = total + times * to_device(torch.stack(of_weights).square().sum())
    return total


def squares(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], num_shards: Callable[[torch.Tensor], float]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The squares that `square_sum` adds up, by parameter."""
    for name, parameter in parameters:
        if parameter.grad is not None:
            gradient, norm = _norm_of(parameter)
            yield name, num_shards(gradient) * norm.square()


def _norm_of(parameter: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient and the norm of this rank's part of it. Collective where parts are still to be added up."""
    # Look at the gradient's own placement: tensor parallel may leave a part of the sum on each rank.
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return gradient, norm_in_float64(local(gradient))


def norm_in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The norm of a tensor in 16 or 32 bits, in float64, as DeepSpeed's: torch's float32 norm on CPU is off by 3e-5 for
    a million numbers, and 3e-3 for 33 million. Asked for float64, torch first makes a copy in it (2.13,
    include/ATen/native/ReduceOpsUtils.h, make_reduction). So large tensors are added up in rows of 256 in float32,
    and those in float64: off by 1e-8 for random numbers, by 5e-7 for equal ones, which all round alike. Squares of
    numbers below 1e-20 or beyond 1e18 are none in float32.
    """
    flat = tensor.reshape(-1)
    if flat.numel() < LARGE:
        return torch.linalg.vector_norm(flat, dtype=torch.float64)
    rows = flat.numel() // ROW
    full_rows, rest = flat[: rows * ROW].view(rows, ROW), flat[rows * ROW :]
    of_rows = torch.linalg.vector_norm(full_rows, dim=1, dtype=torch.float32)
    return torch.hypot(*(torch.linalg.vector_norm(part, dtype=torch.float64) for part in (of_rows, rest)))


def clip(parameters: Iterable[torch.nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale gradients of this norm down to `max_norm`, with the epsilon of torch.nn.utils.clip_grad_norm_ and of
    DeepSpeed's unscale_and_clip_grads.
    """
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if norm > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
