"""What every optimizer has."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from cookbook.registry import Named, Refusal

if TYPE_CHECKING:
    import torch

STEP = 4
"""Bytes of the float32 tensor in which torch's fused AdamW counts the updates of each tensor."""


class Optimizer(Named):
    """What a recipe's `optim` is; a kind overrides what is different with it."""

    family = "optim"
    default = "adamw"
    name: str
    learning_rate: float = Field(gt=0, allow_inf_nan=False)
    """Peak learning rate, reached after the warm-up."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decoupled for adamw and muon; never applied to biases and norms."""
    max_grad_norm: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Gradients are scaled down to this global norm; 0 turns clipping off."""

    counts_beside: ClassVar[str | None] = None
    """The state tensor beside which it keeps `step`, the number of updates; None if it counts none."""
    state_words: ClassVar[str] = "optimizer"
    """What to call its state in a table of bytes."""
    caveat: ClassVar[str | None] = None
    """Why its curve is not the same to the last digits under every strategy."""
    refusals: ClassVar[tuple[Refusal, ...]] = ()
    """Strategies that it does not go with."""

    def state(self, *, is_matrix: bool) -> dict[str, float]:
        """Bytes a parameter, by the name of each state tensor.

        Args:
            is_matrix: of a matrix inside the layers; else of embeddings, head, biases and norms.
        """
        raise NotImplementedError

    def state_bytes(self, tensors: Iterable[tuple[int, bool]]) -> int:
        """Bytes of the state of tensors, each given by its elements and by `is_matrix` (see `state`)."""
        states = {is_matrix: self.state(is_matrix=is_matrix) for is_matrix in (True, False)}
        each = {is_matrix: STEP * (self.counts_beside in found) for is_matrix, found in states.items()}
        return sum(int(numel * sum(states[is_matrix].values())) + each[is_matrix] for numel, is_matrix in tensors)

    def words(self) -> list[str]:
        """For `explain`: settings beside the learning rate and clipping."""
        return [f"weight decay {number(self.weight_decay)}"]

    def build(
        self, groups: list[dict[str, Any]], model: "torch.nn.Module", mixed_precision: str
    ) -> "torch.optim.Optimizer":
        """torch's optimizer.

        Args:
            groups: the trained parameters in groups with their weight decay, see `groups.parameter_groups`.
            mixed_precision: the recipe's.
        """
        raise NotImplementedError


class WithBetas(Optimizer):
    """Two moments, as Adam has them."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Default: torch's."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Default: torch's."""

    @model_validator(mode="before")
    @classmethod
    def _pair(cls, values: Any) -> Any:
        # YAML has lists only; strict mode would refuse one for a tuple.
        if isinstance(values, dict) and isinstance(values.get("betas"), list):
            values = {**values, "betas": tuple(values["betas"])}
        return values

    def words(self) -> list[str]:
        return [f"betas {self.betas[0]:g} and {self.betas[1]:g}, eps {number(self.eps)}", *super().words()]


def number(value: float) -> str:
    """2e-05 as one writes it in a recipe: 2e-5."""
    if value == 0 or 0.01 <= abs(value) < 10_000:
        return f"{value:.4g}"
    digits, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"
