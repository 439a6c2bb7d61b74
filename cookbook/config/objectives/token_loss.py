"""Supervised fine-tuning and continued pre-training: the negative log-likelihood of every target."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from cookbook.config.objectives.objective import Answer, Objective, TrainOn
from cookbook.system.registry import register

if TYPE_CHECKING:
    from torch.nn import Module

    from cookbook.config.objectives.forward import LossOutput


class TokenLoss(Objective):
    def compute(self, model: "Module", batch: dict[str, Any]) -> "LossOutput":
        """The sum over the targets of the micro-batch."""
        from cookbook.config.objectives.forward import LossOutput, negative_log_likelihood

        return LossOutput(negative_log_likelihood(model, batch).sum(), len(batch["targets"]))

    def by_hand(self, samples: Sequence[Sequence[Answer]], values: Sequence[float]) -> float:
        """The mean over the tokens."""
        answers = [answer for sample in samples for answer in sample]
        return -sum(answer.logp for answer in answers) / sum(answer.num_tokens for answer in answers)


@register
class SFT(TokenLoss):
    """Supervised fine-tuning."""

    rows = ("messages", "exchange", "completion", "chat_completion", "text")
    name: Literal["sft"] = "sft"
    train_on: TrainOn = "assistant"
    """Tokens that carry loss: assistant turns (completions) with their end-of-turn token, the last such turn of a chat
    only, or every token."""

    @property
    def labels(self) -> TrainOn:
        return self.train_on

    def words(self) -> str:
        whose = {"assistant": "the assistant's tokens", "last": "the last assistant turn", "all": "every token"}
        return f"sft, loss on {whose[self.train_on]}"


@register
class CPT(TokenLoss):
    """Continued pre-training."""

    rows = ("text",)
    splits_rows = True
    name: Literal["cpt"]

    def words(self) -> str:
        return "cpt, loss on every token"
