"""Muon (https://kellerjordan.github.io/posts/muon/)."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cookbook.config.optim.optimizer import Groups, Refusal, WithBetas
from cookbook.system.registry import register

if TYPE_CHECKING:
    import torch


@register
class Muon(WithBetas):
    """Muon for the matrices inside the layers, AdamW for embeddings, head, stacked experts, biases and norms, with one
    learning rate and weight decay for both."""

    counts_beside = "exp_avg"
    state_words = "optimizer of matrices"
    refusals = (
        Refusal(
            what="FSDP1",
            clashes=lambda strategy: strategy.kind == "fsdp1",
            why="muon orthogonalizes whole matrices, and FSDP1 has a layer's matrices and norms in one flat tensor",
            seen="torch 2.13",
            way_out="accelerate_configs/fsdp2.yaml, or optim.name: adamw",
        ),
    )
    name: Literal["muon"]
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Default: 0.95 for muon, as in its author's code, and 0.9 for sgd."""

    @property
    def momentum_in_effect(self) -> float:
        return 0.95 if self.momentum is None else self.momentum

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
            momentum=self.momentum_in_effect,
            betas=self.betas,
            eps=self.eps,
            dtype=torch.float32 if mixed_precision == "no" else torch.bfloat16,
        )
