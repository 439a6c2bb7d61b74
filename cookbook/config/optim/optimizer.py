"""Base classes of optimizers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from cookbook.system.registry import NamedSection

if TYPE_CHECKING:
    import torch

    from cookbook.config.strategy import Strategy

Groups = list[dict[str, Any]]
"""Parameter groups as torch's optimizers take them."""
STEP = 4
"""Bytes of the float32 tensor `step` that torch's fused AdamW keeps per tensor."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The strategies that an optimizer does not support."""

    what: str
    """Name of these strategies, for the message."""
    clashes: "Callable[[Strategy], bool]"
    why: str
    seen: str
    """Library versions that show the problem, or "by design"."""
    way_out: str
    """The optimizer to use instead."""


class Optimizer(NamedSection):
    """A recipe's `optim`."""

    family = "optim"
    default = "adamw"
    name: str
    learning_rate: float = Field(gt=0, le=1e3, allow_inf_nan=False, examples=[1e-5])
    """Peak learning rate, reached after the warm-up."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decoupled for adamw and muon; never applied to biases and norms."""
    max_grad_norm: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Clip gradients to this global norm; 0 turns clipping off."""
    gradient_dtype: Literal["bf16", "fp16"] | None = None
    """Round gradients to 16 bits when processes exchange them, for half the traffic; fp16 needs mixed_precision: fp16.
    Default: float32, and under ZeRO the dtype of mixed_precision."""

    counts_beside: ClassVar[str | None] = None
    """The state tensor with which it keeps `step`, the number of updates; None without such a count."""
    state_words: ClassVar[str] = "optimizer"
    """Name of its state in a table of bytes."""
    caveat: ClassVar[str | None] = None
    """Why its curve differs in the last digits between strategies, if it does."""
    most_for_all_weights: ClassVar[float | None] = None
    """The highest learning rate that is usual for all weights of an existing model; `check` warns above it."""
    refusals: ClassVar[tuple[Refusal, ...]] = ()
    """Strategies that it does not support."""

    def state(self, *, is_matrix: bool) -> dict[str, float]:
        """Bytes per parameter, by the name of each state tensor.

        Args:
            is_matrix: for a matrix inside the layers; else for embeddings, head, biases and norms.
        """
        raise NotImplementedError

    def state_bytes(self, tensors: Iterable[tuple[int, bool]]) -> int:
        """Bytes of the state of tensors, given by number of elements and `is_matrix` (see `state`)."""
        states = {is_matrix: self.state(is_matrix=is_matrix) for is_matrix in (True, False)}
        counts = {is_matrix: STEP * (self.counts_beside in state) for is_matrix, state in states.items()}
        return sum(int(numel * sum(states[is_matrix].values())) + counts[is_matrix] for numel, is_matrix in tensors)

    def words(self) -> list[str]:
        """Settings other than learning rate and clipping, for `explain`."""
        return [f"weight decay {number(self.weight_decay)}"]

    def build(self, groups: Groups, model: "torch.nn.Module", mixed_precision: str) -> "torch.optim.Optimizer":
        """The torch optimizer.

        Args:
            groups: the trained parameters from `groups.parameter_groups`.
            mixed_precision: the recipe's.
        """
        raise NotImplementedError


class WithBetas(Optimizer):
    """An optimizer with Adam's two moments."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Default: torch's."""
    eps: float = Field(default=1e-8, gt=0, le=1, allow_inf_nan=False)
    """Default: torch's."""

    @model_validator(mode="before")
    @classmethod
    def _pair(cls, values: Any) -> Any:
        # YAML has lists only, which pydantic's strict mode refuses for a tuple.
        if isinstance(values, dict) and isinstance(values.get("betas"), list):
            values = {**values, "betas": tuple(values["betas"])}
        return values

    def words(self) -> list[str]:
        return [f"betas {self.betas[0]:g} and {self.betas[1]:g}, eps {number(self.eps)}", *super().words()]


def number(value: float) -> str:
    """A number as written in a recipe: 2e-5 rather than 2e-05."""
    if value == 0 or 0.01 <= abs(value) < 10_000:
        return f"{value:.4g}"
    digits, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"
