"""Odds ratio preference optimization: supervised fine-tuning and preferences in one loss, without a reference."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cookbook.config.objectives.pair import PairObjective
from cookbook.system.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
class ORPO(PairObjective):
    """Odds ratio preference optimization, Hong et al. 2024 (arXiv 2403.07691), eqs. 4 to 7.

    Log-probabilities are means over an answer's tokens (as is the likelihood of eq. 3). The loss of a pair is the
    chosen answer's mean negative log-likelihood, plus `beta` times -log sigmoid of the log odds ratio.
    """

    name: Literal["orpo"]
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """The paper's lambda: weight of the odds ratio relative to the likelihood of the chosen answer. The paper uses 0.1
    for Mistral-7B and 0.2 for Llama-2-7B."""

    def words(self) -> str:
        return f"orpo, beta {self.beta:g}"

    def of_pairs(
        self, values: "Tensor", num_tokens: "Tensor", batch: dict[str, Any]
    ) -> "tuple[Tensor, dict[str, Tensor]]":
        import torch
        import torch.nn.functional as F

        from cookbook.config.objectives.forward import reward_metrics

        means = values / num_tokens
        log_odds = means - torch.log(-torch.expm1(means.clamp(max=-1e-12)))  # odds are infinite at p = 1
        chosen, rejected = log_odds[0::2], log_odds[1::2]
        # Per pair, as equation 6. TRL's first term is a mean over tokens, in which long answers weigh more.
        losses = -means[0::2] - self.beta * F.logsigmoid(chosen - rejected)
        of_pairs = reward_metrics(chosen, rejected)
        metrics = {
            "nll_chosen": -means[0::2].detach().sum(),
            "log_odds_ratio": of_pairs["reward_margin"],
            "reward_accuracy": of_pairs["reward_accuracy"],
        }
        return losses, metrics
