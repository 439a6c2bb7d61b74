"""Muon (https://kellerjordan.github.io/posts/muon/)."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cookbook.optim.base import WithBetas
from cookbook.registry import Refusal, register

if TYPE_CHECKING:
    import torch

WAY_OUT = "accelerate_configs/fsdp2.yaml, or optim.name: adamw"


@register
class Muon(WithBetas):
    """Updates the matrices inside the layers, and leaves embeddings, head, biases and norms to adamw; one learning rate
    and weight decay serve both."""

    counts_beside = "exp_avg"
    state_words = "optimizer of matrices"
    refusals = (
        Refusal(
            what="ZeRO",
            clashes=lambda strategy: strategy.kind == "zero",
            why="muon orthogonalises whole matrices, and ZeRO gives the optimizer flat pieces without their shape",
            seen="deepspeed 0.19.8",
            way_out=WAY_OUT,
        ),
        Refusal(
            what="FSDP1",
            clashes=lambda strategy: strategy.kind == "fsdp1",
            why="muon orthogonalises whole matrices, and FSDP1 cuts a layer's weights as one flat piece",
            seen="torch 2.13",
            way_out=WAY_OUT,
        ),
    )
    name: Literal["muon"]
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Default: 0.95 for muon, as its author has it, and 0.9 for sgd."""

    def state(self, *, is_matrix: bool) -> dict[str, float]:
        return {"momentum_buffer": 4} if is_matrix else {"exp_avg": 4, "exp_avg_sq": 4}

    def words(self) -> list[str]:
        betas, *rest = super().words()
        return [betas, *([] if self.momentum is None else [f"momentum {self.momentum:g}"]), *rest]

    def build(
        self, groups: list[dict[str, Any]], model: "torch.nn.Module", mixed_precision: str
    ) -> "torch.optim.Optimizer":
        """Orthogonalises in float32 where mixed_precision is 'no', and in bfloat16 elsewhere."""
        import torch

        from cookbook.optim.orthogonal import Muon, split_for_muon

        return Muon(
            split_for_muon(groups, model),
            lr=self.learning_rate,
            momentum=0.95 if self.momentum is None else self.momentum,
            betas=self.betas,
            eps=self.eps,
            dtype=torch.float32 if mixed_precision == "no" else torch.bfloat16,
        )
