"""Kahneman-Tversky optimization with its reference point at 0: single answers, each called good or bad."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cookbook.objectives.base import Answer, Objective
from cookbook.registry import register

if TYPE_CHECKING:
    from torch.nn import Module

    from cookbook.objectives.forward import Outcome


@register
class KTOZero(Objective):
    """Eqs. 7 and 8 of Ethayarajh et al. 2024 (arXiv 2402.01306) with z0 = 0, which TRL calls `apo_zero_unpaired`.

    z0 is an estimate of the divergence from the reference; docs/decisions.md has why it is left out. The loss of an
    answer with log-ratio r is desirable_weight (1 - sigmoid(beta r)), or undesirable_weight (1 - sigmoid(-beta r)).
    """

    rows = ("chat_judgement", "judgement")
    mean_over = "samples"
    needs_reference = True
    name: Literal["kto_zero"]
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Strength of the pull towards the reference. Default: the paper's."""
    desirable_weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Of answers whose label is true."""
    undesirable_weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Of answers whose label is false."""

    def words(self) -> str:
        weights = f"{self.desirable_weight:g} and {self.undesirable_weight:g}"
        return f"kto_zero, beta {self.beta:g}, weights of good and bad answers {weights}"

    def compute(self, model: "Module", batch: dict[str, Any]) -> "Outcome":
        """The sum over the answers, whose labels are `values`: 1 for a good one, 0 for a bad one."""
        import torch

        from cookbook.objectives.forward import Outcome, negative_log_likelihood, sums_by_sequence

        nll = negative_log_likelihood(model, batch)
        is_good = batch["values"] > 0.5
        sign = torch.where(is_good, 1.0, -1.0).double()
        rewards = sign * self.beta * (sums_by_sequence(-nll, batch)[0] - batch["reference_logps"])
        losses = torch.where(is_good, self.desirable_weight, self.undesirable_weight) * torch.sigmoid(-rewards)
        found = rewards.detach()
        metrics = {"signed_reward": found.sum(), "reward_accuracy": (found > 0).float().sum()}
        # A micro-batch without samples still has its backward: every process must take part in the collectives.
        return Outcome(losses.sum().float() + 0.0 * nll.sum(), len(losses), metrics)

    def by_hand(self, samples: Sequence[Sequence[Answer]], values: Sequence[float]) -> float:
        """The mean over the answers."""
        total = 0.0
        for (answer,), value in zip(samples, values, strict=True):
            reward = self.beta * (answer.logp - answer.reference_logp)
            if value:
                total += self.desirable_weight * (1 - 1 / (1 + math.exp(-reward)))
            else:
                total += self.undesirable_weight * (1 - 1 / (1 + math.exp(reward)))
        return total / len(samples)
