"""AdamW with moments in 8 bits, Dettmers et al. 2022 (arXiv 2110.02861)."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from cookbook.config.optim.optimizer import Groups, Refusal, WithBetas
from cookbook.system.registry import register

if TYPE_CHECKING:
    import torch


@register
class AdamW8bit(WithBetas):
    """AdamW that keeps its moments in 8 bits (bitsandbytes)."""

    counts_beside = "state1"
    most_for_all_weights = 1e-3  # of SmolLM2-135M, a small model (recipes/smollm2_135m/sft.yaml)
    caveat = "the strategy's sharding decides where its blocks begin, so its band is wider"
    refusals = (
        Refusal(
            what="optimizer state on NVMe",
            clashes=lambda strategy: strategy.offload_optimizer == "nvme",
            why="DeepSpeed swaps optimizer state as float32 of the weights' length, and these states are bytes (read in"
            " its source, not run)",
            seen="deepspeed 0.19.8",
            way_out="accelerate_configs/zero3_offload.yaml, or optim.name: adamw",
        ),
    )
    name: Literal["adamw_8bit"]

    def state(self, *, is_matrix: bool) -> dict[str, float]:
        return {"state1": 1, "state2": 1}

    def state_bytes(self, tensors: Iterable[tuple[int, bool]]) -> int:
        """A byte for each moment plus a float32 scale per block of 256; float32 below 4,096 elements. All tensors share
        two tables of values (bitsandbytes 0.50, optim/optimizer.py, Optimizer2State.init_state).
        """
        sizes = [numel for numel, _ in tensors]
        small = sum(2 * 4 * numel for numel in sizes if numel < 4096)
        large = sum(2 * (numel + 4 * math.ceil(numel / 256)) for numel in sizes if numel >= 4096)
        return small + large + (2 * 256 * 4 if large else 0)

    def build(self, groups: Groups, model: "torch.nn.Module", mixed_precision: str) -> "torch.optim.Optimizer":
        from cookbook.config.optim.eight_bits import adamw_8bit

        return adamw_8bit(groups, lr=self.learning_rate, betas=self.betas, eps=self.eps)
