"""Objectives of a head that scores whole sequences."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cookbook.config.objectives.objective import Answer, Objective, TooLong, TrainOn
from cookbook.config.registry import register

if TYPE_CHECKING:
    from torch.nn import Module

    from cookbook.config.objectives.forward import LossOutput


class Scored(Objective):
    """The score of a sequence is read at its last token, so that what is before it are inputs alone."""

    mean_over = "samples"
    shares_samples = True

    @property
    def labels(self) -> TrainOn:
        return "all"

    def long_rows(self, chosen: TooLong | None) -> TooLong:
        """Longer rows are left out, as in TRL (1.16, trainer/reward_trainer.py): the end of a text is what a score is
        about."""
        return chosen or "drop"


@register
class Reward(Scored):
    """A reward model: that of Bradley and Terry (1952), as in eq. 1 of Ouyang et al. 2022 (arXiv 2203.02155).

    The loss of a pair is -log sigmoid(r(chosen) - r(rejected)), plus `center_rewards_coefficient` times
    (r(chosen) + r(rejected))^2, eq. 2 of Eisenstein et al. 2023 (arXiv 2312.09244).
    """

    rows = ("chat_preference", "preference")
    sample = "pair"
    sequences = ("chosen", "rejected")
    name: Literal["reward"]
    center_rewards_coefficient: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """reward only: how strongly the two rewards of a pair are drawn to a sum of 0, which the loss of their difference
    leaves open. TRL recommends 0.01."""

    @property
    def num_scores(self) -> int:
        return 1

    def words(self) -> str:
        centred = f", rewards centred by {self.center_rewards_coefficient:g}" if self.center_rewards_coefficient else ""
        return f"reward, Bradley-Terry{centred}"

    def compute(self, model: "Module", batch: dict[str, Any]) -> "LossOutput":
        """The sum over the pairs: sequence 2i is the chosen answer of pair i, 2i + 1 the rejected one."""
        import torch.nn.functional as F

        from cookbook.config.objectives.forward import LossOutput, scores_by_sequence

        scores, own = scores_by_sequence(model, batch)
        chosen, rejected = scores[0::2, 0], scores[1::2, 0]
        losses = self.center_rewards_coefficient * (chosen + rejected).square() - F.logsigmoid(chosen - rejected)
        metrics = {
            "reward_chosen": chosen.detach().sum(),
            "reward_rejected": rejected.detach().sum(),
            "reward_margin": (chosen - rejected).detach().sum(),
            "reward_accuracy": (chosen > rejected).float().sum(),
        }
        return LossOutput.of(losses, own, metrics)

    def by_hand(self, samples: Sequence[Sequence[Answer]], values: Sequence[float]) -> float:
        """The mean over the pairs."""
        total = 0.0
        for pair in samples:
            chosen, rejected = (answer.scores[0] for answer in pair)
            centred = self.center_rewards_coefficient * (chosen + rejected) ** 2
            total += math.log1p(math.exp(rejected - chosen)) + centred
        return total / len(samples)
