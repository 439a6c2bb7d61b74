"""Direct preference optimization."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from cookbook.config.objectives.pair import PairObjective
from cookbook.system.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
class DPO(PairObjective):
    """Direct preference optimization on pairs of answers.

    `sigmoid` is eq. 7 of Rafailov et al. 2023 (arXiv 2305.18290), with label smoothing as in eq. 3 of Mitchell's note
    on conservative DPO (2023). `ipo` is eq. 17 of Azar et al. 2023 (arXiv 2310.12036) on log-probabilities per token,
    as in TRL, so that the length of an answer does not matter.
    """

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

    def of_pairs(
        self, values: "Tensor", num_tokens: "Tensor", batch: dict[str, Any]
    ) -> "tuple[Tensor, dict[str, Tensor]]":
        import torch.nn.functional as F

        from cookbook.config.objectives.forward import reward_metrics

        ratios = values - batch["reference_logps"]
        if self.loss == "ipo":
            ratios = ratios / num_tokens
        margins = ratios[0::2] - ratios[1::2]
        if self.loss == "ipo":
            losses = (margins - 1 / (2 * self.beta)).square()
        else:
            logits, swapped = self.beta * margins, self.label_smoothing
            losses = -(1 - swapped) * F.logsigmoid(logits) - swapped * F.logsigmoid(-logits)
        rewards = self.beta * ratios
        return losses, reward_metrics(rewards[0::2], rewards[1::2])
