"""Muon as a torch optimizer. Imports torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from cookbook.config.optim.groups import kinds


def split_for_muon(groups: list[dict[str, Any]], model: torch.nn.Module) -> list[dict[str, Any]]:
    """Split each parameter group by `orthogonal`, see `groups.Kind`."""
    kind_of, split = kinds(model), []
    for group in groups:
        for orthogonal in (True, False):
            params = [p for p in group["params"] if kind_of[p].is_orthogonal == orthogonal]
            if params:
                split.append({**group, "params": params, "orthogonal": orthogonal})
    return split


@dataclass(frozen=True, kw_only=True)
class Run:
    """The elements of a parameter that this process has in a flat tensor; none, if only others have some."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """Index of the first element in the flattened parameter."""
    place: int
    """Index of the first element in the flat tensor."""
    length: int
    is_split: bool
    """True if several processes have elements of the parameter; then all have this run, in the same order."""


class MuonOptimizer(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/) for the groups with `orthogonal`, fused AdamW for the others.

    Both share learning rate and weight decay, as Muon's update is scaled to the size of AdamW's (Liu et al. 2025, arXiv
    2502.16982, equation 4). The numbers are those of torch.optim.Muon with adjust_lr_fn="match_rms_adamw", which always
    orthogonalizes in bfloat16: that turns the last bits of a gradient, in which strategies differ, into 2e-4 in loss.
    Each process gathers a sharded matrix and keeps its shard of the result; an offloaded one moves to the GPU for that.
    Of flat tensors (see `read_flat`) it gathers only the matrices that several processes have parts of.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            groups: each with `params`, `weight_decay` and `orthogonal`.
            momentum: for the matrices.
            betas: for AdamW, as is `eps`.
            dtype: in which matrices are orthogonalized.
        """
        self.dtype = dtype
        rest = [group for group in groups if not group["orthogonal"]]
        self.adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps, fused=True) if rest else None
        for group in groups:
            if group["orthogonal"]:
                group.update(lr=lr, momentum=momentum)
        self._runs: Mapping[torch.Tensor, list[Run]] = {}
        super().__init__(groups, {})

    def read_flat(self, runs: Mapping[torch.Tensor, list[Run]], device: torch.device) -> None:
        """Take the places of the parameters in the flat tensors that ZeRO made of them.

        Args:
            runs: the parameters in each flat tensor, in their order.
            device: on which matrices are gathered and orthogonalized.
        """
        self._runs, self._device = runs, device

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; `closure` is not supported."""
        for group in self.param_groups:
            if group["orthogonal"]:
                self._update_matrices(group)
        if self.adamw is not None:
            # At each step, because loading a state dict replaces both.
            self.adamw.state = self.state
            self.adamw.param_groups = [group for group in self.param_groups if not group["orthogonal"]]
            self.adamw.step()

    def _update_matrices(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            average = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            if parameter in self._runs:
                self._update_runs(parameter, average, group)
                continue
            nesterov = parameter.grad.lerp(average, group["momentum"])
            matrix = orthogonalize(_gather(nesterov.to(_mesh_device(parameter))), self.dtype)
            update = _shard_like(parameter, matrix).to(parameter.device)
            parameter.add_(update, alpha=_rate(group, parameter.shape))

    def _update_runs(self, flat: torch.Tensor, average: torch.Tensor, group: dict[str, Any]) -> None:
        assert flat.grad is not None
        for run in self._runs[flat]:
            weight, grad, smooth = (values.narrow(0, run.place, run.length) for values in (flat, flat.grad, average))
            # Before `run.length` is looked at: a process without elements of a split matrix takes part in the sum.
            matrix = self._gather_run(run, grad.lerp(smooth, group["momentum"]).to(self._device))
            if run.length:
                update = orthogonalize(matrix.view(run.shape), self.dtype).flatten().narrow(0, run.start, run.length)
                weight.add_(update.to(weight.device), alpha=_rate(group, run.shape))

    def _gather_run(self, run: Run, part: torch.Tensor) -> torch.Tensor:
        """The whole matrix of a run, flattened; collective if it is split."""
        if not run.is_split:
            return part
        flattened = part.new_zeros(math.prod(run.shape))
        flattened.narrow(0, run.start, run.length).copy_(part)
        dist.all_reduce(flattened)  # a sum of zeros and one value for each element: exact
        return flattened


def _rate(group: dict[str, Any], shape: Sequence[int]) -> float:
    return -group["lr"] * 0.2 * math.sqrt(max(shape))


def orthogonalize(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Approximates U V^T of the singular value decomposition: most singular values end up between 0.7 and 1.2.

    Five Newton-Schulz steps with the coefficients of https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype)
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _mesh_device(parameter: torch.Tensor) -> torch.device | str:
    """The device on which a matrix is gathered: under fsdp2_offload the GPU, although the parameter is on the host."""
    return parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shard_like(parameter: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """A matrix that each process has whole, sharded like a parameter, without communication."""
    if not isinstance(parameter, DTensor):
        return matrix
    return distribute_tensor(matrix, parameter.device_mesh, parameter.placements, src_data_rank=None)
