"""Supervised fine-tuning and continued pre-training: the negative log-likelihood of every target."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from cookbook.objectives.base import Answer, Objective, TrainOn
from cookbook.registry import register

if TYPE_CHECKING:
    from torch.nn import Module

    from cookbook.objectives.forward import Outcome


class TokenLoss(Objective):
    def compute(self, model: "Module", batch: dict[str, Any]) -> "Outcome":
        """The sum over the targets of the micro-batch."""
        from cookbook.objectives.forward import Outcome, negative_log_likelihood

        return Outcome(negative_log_likelihood(model, batch).sum(), len(batch["targets"]))

    def by_hand(self, samples: Sequence[Sequence[Answer]], values: Sequence[float]) -> float:
        """The mean over the tokens."""
        answers = [answer for sample in samples for answer in sample]
        return -sum(answer.logp for answer in answers) / sum(answer.num_tokens for answer in answers)


@register
class SFT(TokenLoss):
    """Supervised fine-tuning."""

    rows = ("messages", "completion", "text")
    name: Literal["sft"] = "sft"
    train_on: TrainOn = "assistant"
    """Tokens that carry loss: the assistant's turns (completions) with their end-of-turn token, or every token."""

    @property
    def labels(self) -> TrainOn:
        return self.train_on

    def words(self) -> str:
        whose = "the assistant's tokens" if self.train_on == "assistant" else "every token"
        return f"sft, loss on {whose}"


@register
class CPT(TokenLoss):
    """Continued pre-training."""

    rows = ("text",)
    splits_rows = True
    name: Literal["cpt"]

    def words(self) -> str:
        return "cpt, loss on every token"
