"""8-bit AdamW on shards. Imports torch, and bitsandbytes when it is built."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def adamw_8bit(
    groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW with 8-bit moments in blocks of 256 with a scale each (Dettmers et al. 2022, arXiv
    2110.02861). Tensors and shards below 4,096 elements keep 32 bits.
    """
    import bitsandbytes

    class ShardedAdamW8bit(bitsandbytes.optim.AdamW8bit):
        """An optimizer that updates this process's shards as plain tensors, since the kernels refuse a DTensor."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            params = [group["params"] for group in self.param_groups]
            shards = [[_shard(parameter) for parameter in of_group] for of_group in params]
            self._exchange(params, shards)
            super().step()
            self._exchange(shards, params)

        def moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
            """First and second moment of this process's shard in float32; empty before the first step."""
            state = self.state.get(parameter, {})
            return {kind: _decode_8bit(state, key) for kind, key in MOMENTS_8BIT.items() if key in state}

        @torch.no_grad()
        def set_moments(self, parameter: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
            """Load the output of `moments`; exact to the last bit if the sharding is unchanged."""
            shard = _shard(parameter)
            number, place = next(
                (number, i)
                for number, group in enumerate(self.param_groups)
                for i, other in enumerate(group["params"])
                if other is parameter
            )
            self.init_state(self.param_groups[number], shard, number, place)
            # bitsandbytes keys its state by the tensor that it updates, and between steps that is the parameter.
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
    """The values in float32, such that encoding them gives the same codes and scales again.

    There is no code for -1, so a block whose largest element is negative would shrink and get another scale; its
    largest element is decoded as the scale itself.
    """
    # On the host: a GPU that needs 8-bit moments has no room for 32 bits.
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
    """Write values into a state, rounded to the nearest code.

    bitsandbytes' own function takes a neighbouring code for small values on CPU.
    """
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
    """This process's shard of parameter and gradient, sharing the parameter's memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    shard = parameter.to_local().detach()
    assert shard.is_contiguous(), "bitsandbytes would update a copy"
    if parameter.grad is not None and shard.numel():
        # Tensor parallel does not shard the gradient of a sharded embedding.
        shard.grad = parameter.grad.redistribute(placements=parameter.placements).to_local()  # type: ignore[attr-defined]
    return shard
