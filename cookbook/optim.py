"""Optimizers by name."""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from cookbook.recipe import OptimSection

MOMENTUM = {"sgd": 0.9, "muon": 0.95}
"""Where the recipe gives none: what most use with SGD, and what Muon's author does."""


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters, grouped: matrices with weight decay, biases and norms (one dimension) without.

    Tensor parallel cuts some parameters and leaves others whole, which no fused update takes together: a group of each.
    """
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Under ZeRO-3 a parameter is an empty placeholder; its true shape is in ds_shape.
            is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
            groups.setdefault((is_matrix, isinstance(parameter, DTensor)), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda item: item[0], reverse=True)
    return [{"params": found, "weight_decay": weight_decay if is_matrix else 0.0} for (is_matrix, _), found in ordered]


def build_optimizer(model: torch.nn.Module, settings: OptimSection, mixed_precision: str) -> torch.optim.Optimizer:
    """The recipe's optimizer, on the parameters that are trained.

    AdamW is fused: one kernel over all tensors, on CPU 3 to 10 times the speed of torch's loop over them.

    Args:
        mixed_precision: the recipe's; muon orthogonalises in float32 where it is 'no', and in bfloat16 elsewhere.
    """
    groups = parameter_groups(model, settings.weight_decay)
    lr = settings.learning_rate
    momentum = MOMENTUM.get(settings.name, 0.0) if settings.momentum is None else settings.momentum
    match settings.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=settings.betas, eps=settings.eps, fused=True)
        case "adamw_8bit":
            return _adamw_8bit(groups, lr=lr, betas=settings.betas, eps=settings.eps)
        case "muon":
            dtype = torch.float32 if mixed_precision == "no" else torch.bfloat16
            groups = split_for_muon(groups, model)
            return Muon(groups, lr=lr, momentum=momentum, betas=settings.betas, eps=settings.eps, dtype=dtype)
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=momentum)


def split_for_muon(groups: list[dict[str, Any]], model: Any) -> list[dict[str, Any]]:
    """The groups with `orthogonal`: true for the matrices inside the layers, adapters' included.

    Embeddings and head stay out, as Muon's author advises; so do stacked experts (three dimensions).
    """
    outside = {
        parameter
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        for parameter in module.parameters()
    }
    split = []
    for group in groups:
        for orthogonal in (True, False):
            params = [p for p in group["params"] if (p.ndim == 2 and p not in outside) == orthogonal]
            if params:
                split.append({**group, "params": params, "orthogonal": orthogonal})
    return split


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/) for the groups with `orthogonal`, fused AdamW for the others.

    One learning rate and weight decay serve both, because Muon's update is scaled to the size of AdamW's (Liu et al.
    2025, arXiv 2502.16982, equation 4). The same numbers as torch.optim.Muon with adjust_lr_fn="match_rms_adamw", which
    always orthogonalises in bfloat16: that turns the last bits of a gradient, in which strategies differ, into 2e-4 in
    loss. And of a matrix that is cut each process gathers the whole and keeps its own part of the result; one that is
    offloaded comes to the GPU for that.
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
        """Muon over `groups`, each with `params`, `weight_decay` and `orthogonal`.

        Args:
            momentum: for the matrices.
            betas: for AdamW, as is `eps`.
            dtype: in which matrices are orthogonalised.
        """
        self.dtype = dtype
        rest = [group for group in groups if not group["orthogonal"]]
        self.adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps, fused=True) if rest else None
        for group in groups:
            if group["orthogonal"]:
                group.update(lr=lr, momentum=momentum)
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; `closure`, which torch passes on as None, is not used."""
        for group in self.param_groups:
            if group["orthogonal"]:
                self._update_matrices(group)
        if self.adamw is not None:
            # Each time, because loading a state replaces both.
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
            nesterov = parameter.grad.lerp(average, group["momentum"])
            whole = orthogonalise(_whole(nesterov.to(_mesh_device(parameter))), self.dtype)
            update = _like(parameter, whole).to(parameter.device)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonalise(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """About U V^T of the singular value decomposition of a matrix: most singular values come out between 0.7 and 1.2.

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
    """Where a matrix is gathered and multiplied: under fsdp2_offload the GPU, while the parameter lies on the host."""
    return parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Collective where the tensor is cut."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """`whole`, cut as the parameter is. Without communication: each process has it."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _adamw_8bit(
    groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW with moments in 8 bits, in blocks of 256 with a scale each (Dettmers et al. 2022, arXiv
    2110.02861). Tensors, or shards, below 4,096 elements keep theirs in 32 bits.
    """
    import bitsandbytes

    class ShardedAdamW8bit(bitsandbytes.optim.AdamW8bit):
        """Each process updates its own shards, which the kernels take for plain tensors: they refuse a DTensor."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            params = [group["params"] for group in self.param_groups]
            shards = [[_shard(parameter) for parameter in found] for found in params]
            self._exchange(params, shards)
            super().step()
            self._exchange(shards, params)

        def moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
            """First and second moment of this process's part in float32; none before the first step."""
            state = self.state.get(parameter, {})
            return {kind: _decode_8bit(state, key) for kind, key in MOMENTS_8BIT.items() if key in state}

        @torch.no_grad()
        def set_moments(self, parameter: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
            """What `moments` gave; where the parts are cut as they were, to the last bit."""
            shard = _shard(parameter)
            group, place = next(
                (group, i)
                for group, found in enumerate(self.param_groups)
                for i, other in enumerate(found["params"])
                if other is parameter
            )
            self.init_state(self.param_groups[group], shard, group, place)
            if shard is not parameter:
                self.state[parameter] = self.state.pop(shard)
            for kind, value in values.items():
                _encode_8bit(self.state[parameter], MOMENTS_8BIT[kind], value)

        def _exchange(self, old: list[list[torch.Tensor]], new: list[list[torch.Tensor]]) -> None:
            for group, before, after in zip(self.param_groups, old, new, strict=True):
                group["params"] = after
                for a, b in zip(before, after, strict=True):
                    if a is not b and a in self.state:
                        self.state[b] = self.state.pop(a)

    return ShardedAdamW8bit(groups, lr=lr, betas=betas, eps=eps)


MOMENTS_8BIT = {"exp_avg": "state1", "exp_avg_sq": "state2"}
BLOCK_8BIT = 256


def _decode_8bit(state: dict[str, Any], key: str) -> torch.Tensor:
    """In float32, such that encoding gives the same codes and scales again.

    A code of -1 is missing, so a block whose largest element is negative would come back smaller, with another scale:
    the element that is largest is given the scale itself.
    """
    # On the host: where 8 bits had to do, there is no room for 32.
    codes, number = state[key].to("cpu", copy=True), key[-1]
    if codes.dtype != torch.uint8:
        return codes
    scales = state[f"absmax{number}"].cpu()
    values = state[f"qmap{number}"].cpu()[codes.flatten().int()]
    blocks = _blocks_8bit(values)
    place = blocks.abs().argmax(1, keepdim=True)
    largest = blocks.gather(1, place)
    blocks = (blocks * scales[:, None]).scatter(1, place, largest.sign() * scales[:, None])
    return blocks.flatten()[: len(values)].view(codes.shape)


def _encode_8bit(state: dict[str, Any], key: str, values: torch.Tensor) -> None:
    """To the nearest code; bitsandbytes' own function takes a neighbour for small ones on CPU."""
    number = key[-1]
    if state[key].dtype != torch.uint8:
        state[key].copy_(values)
        return
    blocks = _blocks_8bit(values.flatten())
    scales = blocks.abs().amax(1)
    codes = state[f"qmap{number}"].to(values.device)  # in ascending order
    middles = (codes[1:] + codes[:-1]) / 2
    nearest = torch.bucketize(blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None], middles)
    state[key].copy_(nearest.flatten()[: values.numel()].view(values.shape))
    state[f"absmax{number}"].copy_(scales)


def _blocks_8bit(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % BLOCK_8BIT)).view(-1, BLOCK_8BIT)


def _shard(parameter: torch.Tensor) -> torch.Tensor:
    """This process's part of parameter and gradient, in the parameter's own memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    shard = parameter.to_local().detach()
    assert shard.is_contiguous(), "bitsandbytes would update a copy"
    if parameter.grad is not None and shard.numel():
        # Tensor parallel leaves the gradient of a cut embedding whole.
        shard.grad = parameter.grad.redistribute(placements=parameter.placements).to_local()  # type: ignore[attr-defined]
    return shard


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Writes `lr` into every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
