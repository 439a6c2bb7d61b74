"""Supervised fine-tuning and continued pre-training: the negative log-likelihood of every target."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cookbook.config.objectives.objective import Objective, TrainOn
from cookbook.system.registry import register

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from cookbook.config.objectives.forward import Logits, LossOutput, OfTargets


class TokenLoss(Objective):
    """A sum over the targets. The loss of each is the negative log-likelihood, or `function`."""

    def compute(self, model: "Module", batch: dict[str, Any]) -> "LossOutput":
        """The sum over the targets of the micro-batch."""
        from cookbook.config.objectives.forward import LossOutput, negative_log_likelihood, of_logits

        function = self.function(batch)
        if function is None:
            return LossOutput(negative_log_likelihood(model, batch).sum(), len(batch["targets"]))
        losses, *values = of_logits(model, batch, function)
        metrics = {name: value.detach().sum() for name, value in zip(function.reported, values, strict=True)}
        return LossOutput(losses.sum(), len(batch["targets"]), metrics)


class LabelLoss(TokenLoss):
    """Cross-entropy with the labels."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """For sft and cpt: the share of a label's probability that is spread evenly over the vocabulary, Szegedy et al.
    2016 (arXiv 1512.00567, section 7). For dpo: the assumed fraction of swapped preferences (conservative DPO), with
    sigmoid only."""

    def function(self, batch: dict[str, Any]) -> "OfTargets | None":
        from cookbook.config.objectives.forward import OfTargets

        return OfTargets(self._smooth_labels, ("nll",), batch) if self.label_smoothing else None

    def _smooth_labels(self, logits: "Logits", batch: dict[str, Any]) -> "tuple[Tensor, ...]":
        """Cross-entropy with the smoothed label, and with the label."""
        targets = batch["targets"]
        nll = logits.nll(targets)
        # Of all tokens alike the cross-entropy is the log-sum-exp less the mean logit; `nll` has the same log-sum-exp.
        above_mean = logits.at(targets.unsqueeze(1)).squeeze(1) - logits.mean()
        return nll + self.label_smoothing * above_mean, nll

    def words(self) -> str:
        return f", label smoothing {self.label_smoothing:g}" if self.label_smoothing else ""


@register
class SFT(LabelLoss):
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
        return f"sft, loss on {whose[self.train_on]}{super().words()}"


@register
class CPT(LabelLoss):
    """Continued pre-training."""

    rows = ("text",)
    splits_rows = True
    name: Literal["cpt"]

    def words(self) -> str:
        return f"cpt, loss on every token{super().words()}"
