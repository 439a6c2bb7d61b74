"""Kahneman-Tversky optimization with its reference point at 0: single answers, each labelled good or bad."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cookbook.config.objectives.objective import Objective
from cookbook.system.registry import register

if TYPE_CHECKING:
    from torch.nn import Module

    from cookbook.config.objectives.forward import LossOutput


@register
class KTOZero(Objective):
    """Eqs. 7 and 8 of Ethayarajh et al. 2024 (arXiv 2402.01306) with z0 = 0, which TRL calls `apo_zero_unpaired`.

    z0 estimates the divergence from the reference as a mean over a batch, so that a loss would depend on the samples
    beside it, and the curve on micro-batches and processes. The loss of an answer with log-ratio r is
    desirable_weight (1 - sigmoid(beta r)), or undesirable_weight (1 - sigmoid(-beta r)).
    """

    rows = ("chat_judgement", "judgement", "judged_chat")
    mean_over = "samples"
    shares_samples = True
    needs_reference = True
    name: Literal["kto_zero"]
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Strength of the regularization towards the reference model. Default: that of the paper."""
    desirable_weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Weight of answers whose label is true."""
    undesirable_weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Weight of answers whose label is false."""

    def words(self) -> str:
        weights = f"{self.desirable_weight:g} and {self.undesirable_weight:g}"
        return f"kto_zero, beta {self.beta:g}, weights of good and bad answers {weights}"

    def compute(self, model: "Module", batch: dict[str, Any]) -> "LossOutput":
        """The sum over the answers, whose labels are `values`: 1 for a good one, 0 for a bad one."""
        import torch

        from cookbook.config.objectives.forward import LossOutput, negative_log_likelihood, sums_by_sequence

        nll = negative_log_likelihood(model, batch)
        is_good = batch["values"] > 0.5
        sign = torch.where(is_good, 1.0, -1.0).double()
        rewards = sign * self.beta * (sums_by_sequence(-nll, batch)[0] - batch["reference_logps"])
        losses = torch.where(is_good, self.desirable_weight, self.undesirable_weight) * torch.sigmoid(-rewards)
        metrics = {"signed_reward": rewards.detach().sum(), "reward_accuracy": (rewards.detach() > 0).float().sum()}
        return LossOutput.of(losses, nll, metrics)
