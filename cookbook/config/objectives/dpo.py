"""Direct preference optimization."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from cookbook.config.objectives.objective import Answer, Objective
from cookbook.system.registry import register

if TYPE_CHECKING:
    from torch.nn import Module

    from cookbook.config.objectives.forward import LossOutput


@register
class DPO(Objective):
    """Direct preference optimization on pairs of answers.

    `sigmoid` is eq. 7 of Rafailov et al. 2023 (arXiv 2305.18290), with label smoothing as in eq. 3 of Mitchell's note
    on conservative DPO (2023). `ipo` is eq. 17 of Azar et al. 2023 (arXiv 2310.12036) on log-probabilities per token,
    as in TRL, so that the length of an answer does not matter.
    """

    rows = ("chat_preference", "preference")
    sample = "pair"
    sequences = ("chosen", "rejected")
    mean_over = "samples"
    shares_samples = True
    needs_reference = True
    name: Literal["dpo"]
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: Rafailov et al. 2023 (arXiv 2305.18290); `ipo`: Azar et al. 2023 (arXiv 2310.12036), on the mean
    log-probability per token."""
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Strength of the regularization towards the reference model. Default: that of the DPO paper."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed fraction of swapped preferences (conservative DPO); sigmoid only."""

    @model_validator(mode="after")
    def _smoothing_has_effect(self):
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(f"label_smoothing {self.label_smoothing} would be ignored by loss: ipo; take it out")
        return self

    def words(self) -> str:
        return f"dpo, {self.loss}, beta {self.beta:g}"

    def compute(self, model: "Module", batch: dict[str, Any]) -> "LossOutput":
        """The sum over the pairs: sequence 2i is the chosen answer of pair i, 2i + 1 the rejected one."""
        import torch.nn.functional as F

        from cookbook.config.objectives.forward import (
            LossOutput,
            negative_log_likelihood,
            reward_metrics,
            sums_by_sequence,
        )

        nll = negative_log_likelihood(model, batch)
        logps, num_tokens = sums_by_sequence(-nll, batch)
        ratios = logps - batch["reference_logps"]
        if self.loss == "ipo":
            ratios = ratios / num_tokens
        margins = ratios[0::2] - ratios[1::2]
        if self.loss == "ipo":
            losses = (margins - 1 / (2 * self.beta)).square()
        else:
            logits, swapped = self.beta * margins, self.label_smoothing
            losses = -(1 - swapped) * F.logsigmoid(logits) - swapped * F.logsigmoid(-logits)
        rewards = self.beta * ratios
        return LossOutput.of(losses, nll, reward_metrics(rewards[0::2], rewards[1::2]))

    def by_hand(self, samples: Sequence[Sequence[Answer]], values: Sequence[float]) -> float:
        """The mean over the pairs."""
        return sum(self._loss_of(*(self._ratio(answer) for answer in pair)) for pair in samples) / len(samples)

    def _ratio(self, answer: Answer) -> float:
        return (answer.logp - answer.reference_logp) / (answer.num_tokens if self.loss == "ipo" else 1)

    def _loss_of(self, chosen: float, rejected: float) -> float:
        if self.loss == "ipo":
            return (chosen - rejected - 1 / (2 * self.beta)) ** 2
        right, wrong = (math.log1p(math.exp(-sign * self.beta * (chosen - rejected))) for sign in (1, -1))
        return (1 - self.label_smoothing) * right + self.label_smoothing * wrong
