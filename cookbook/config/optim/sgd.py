"""Stochastic gradient descent with momentum."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cookbook.config.optim.optimizer import Groups, Optimizer
from cookbook.system.registry import register

if TYPE_CHECKING:
    import torch


@register
class SGD(Optimizer):
    """torch's SGD; its weight decay is not decoupled."""

    name: Literal["sgd"]
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Default: 0.9 for sgd, and 0.95 for muon."""

    @property
    def momentum_in_effect(self) -> float:
        return 0.9 if self.momentum is None else self.momentum

    def state(self, *, is_matrix: bool) -> dict[str, float]:
        return {} if self.momentum == 0 else {"momentum_buffer": 4}

    def words(self) -> list[str]:
        return [*([] if self.momentum is None else [f"momentum {self.momentum:g}"]), *super().words()]

    def build(self, groups: Groups, model: "torch.nn.Module", mixed_precision: str) -> "torch.optim.Optimizer":
        from torch.optim import SGD

        return SGD(groups, lr=self.learning_rate, momentum=self.momentum_in_effect)
