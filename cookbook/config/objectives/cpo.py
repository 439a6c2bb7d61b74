"""Preferences without a reference: contrastive preference optimization, and its simple form with a margin."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from cookbook.config.objectives.pair import PairObjective
from cookbook.system.registry import register

if TYPE_CHECKING:
    from torch import Tensor


class Contrast(PairObjective):
    """The loss of a pair is -log sigmoid(r(chosen) - r(rejected) - margin), plus `nll_weight` times the chosen answer's
    mean negative log-likelihood. A reward r is `beta` times the answer's log-probability: the sum over its tokens, or
    their mean.
    """

    by_token: ClassVar[bool]
    """True if a reward is of the mean over an answer's tokens."""
    beta: float
    nll_weight: float | None
    own_weight: ClassVar[float]
    """`nll_weight` where the recipe has none."""

    @property
    def weight(self) -> float:
        """Weight of the chosen answer's likelihood."""
        return self.own_weight if self.nll_weight is None else self.nll_weight

    @property
    def margin(self) -> float:
        """Lead that the chosen answer's reward should have."""
        return 0.0

    def words(self) -> str:
        margin = f", margin {self.margin:g}" if self.margin else ""
        return f"{self.name}, beta {self.beta:g}{margin}, weight of the likelihood {self.weight:g}"

    def of_pairs(
        self, values: "Tensor", num_tokens: "Tensor", batch: dict[str, Any]
    ) -> "tuple[Tensor, dict[str, Tensor]]":
        import torch.nn.functional as F

        from cookbook.config.objectives.forward import reward_metrics

        means = values / num_tokens
        rewards = self.beta * (means if self.by_token else values)
        chosen, rejected = rewards[0::2], rewards[1::2]
        # The likelihood per pair, as ORPO's. TRL's is a mean over a batch's tokens, in which long answers weigh more.
        losses = self.weight * -means[0::2] - F.logsigmoid(chosen - rejected - self.margin)
        metrics = {"nll_chosen": -means[0::2].detach().sum(), **reward_metrics(chosen, rejected)}
        return losses, metrics


@register
class CPO(Contrast):
    """Contrastive preference optimization, Xu et al. 2024 (arXiv 2401.08417), eq. 3 and the likelihood beside it:
    rewards are of whole answers; the chosen answer's likelihood is per token, as in TRL.
    """

    by_token, own_weight = False, 1.0
    name: Literal["cpo"]
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Scale of a reward. Default: the paper's."""
    nll_weight: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """cpo and simpo: weight of the chosen answer's mean negative log-likelihood. Default: 1 for cpo, 0 for simpo."""


@register
class SimPO(Contrast):
    """Simple preference optimization, Meng et al. 2024 (arXiv 2405.14734), eq. 6: rewards are means over an answer's
    tokens, and the chosen one's should be larger by `gamma`.
    """

    by_token, own_weight = True, 0.0
    name: Literal["simpo"]
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Scale of a reward. The paper has 2 to 2.5; the default is TRL's."""
    gamma: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """simpo only: the margin between the rewards. The paper has 0.3 to 1.6; the default is TRL's."""
    nll_weight: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """cpo and simpo: weight of the chosen answer's mean negative log-likelihood. Default: 1 for cpo, 0 for simpo."""

    @property
    def margin(self) -> float:
        return self.gamma
