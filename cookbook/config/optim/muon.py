"""Muon (https://kellerjordan.github.io/posts/muon/)."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cookbook.config.optim.optimizer import Groups, WithBetas
from cookbook.config.registry import Refusal, register

if TYPE_CHECKING:
    import torch


def _refusal(what: str, kind: str, why: str, seen: str) -> Refusal:
    return Refusal(
        what=what,
        clashes=lambda strategy: strategy.kind == kind,
        why=f"muon orthogonalizes whole matrices, and {why}",
        seen=seen,
        way_out="accelerate_configs/fsdp2.yaml, or optim.name: adamw",
    )


@register
class Muon(WithBetas):
    """Muon for the matrices inside the layers, AdamW for embeddings, head, biases and norms, with one learning rate and
    weight decay for both."""

    counts_beside = "exp_avg"
    state_words = "optimizer of matrices"
    refusals = (
        _refusal("ZeRO", "zero", "ZeRO gives the optimizer flat shards without their shape", "deepspeed 0.19.8"),
        _refusal("FSDP1", "fsdp1", "FSDP1 shards a layer's weights as one flat tensor", "torch 2.13"),
    )
    name: Literal["muon"]
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Default: 0.95 for muon, as in its author's code, and 0.9 for sgd."""

    def state(self, *, is_matrix: bool) -> dict[str, float]:
        return {"momentum_buffer": 4} if is_matrix else {"exp_avg": 4, "exp_avg_sq": 4}

    def words(self) -> list[str]:
        betas, *rest = super().words()
        return [betas, *([] if self.momentum is None else [f"momentum {self.momentum:g}"]), *rest]

    def build(self, groups: Groups, model: "torch.nn.Module", mixed_precision: str) -> "torch.optim.Optimizer":
        """Muon that orthogonalizes in float32 if mixed_precision is 'no', else in bfloat16."""
        import torch

        from cookbook.config.optim.orthogonal import MuonOptimizer, split_for_muon

        return MuonOptimizer(
            split_for_muon(groups, model),
            lr=self.learning_rate,
            momentum=0.95 if self.momentum is None else self.momentum,
            betas=self.betas,
            eps=self.eps,
            dtype=torch.float32 if mixed_precision == "no" else torch.bfloat16,
        )
