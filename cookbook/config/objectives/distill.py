"""Distillation: the student learns the distribution over next tokens of a teacher, which was asked before training."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cookbook.config.objectives.objective import Answer, Objective, Question, TrainOn
from cookbook.config.objectives.token_loss import SFT
from cookbook.system.files import PathText
from cookbook.system.registry import register

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from cookbook.config.objectives.forward import LossOutput


@register
class Distill(Objective):
    """Knowledge distillation from stored log-probabilities.

    The loss of a token is (1 - kd_ratio) times the negative log-likelihood of the label, plus kd_ratio times the
    divergence between teacher and student, both at `temperature`: the generalized Jensen-Shannon divergence of `beta`,
    eq. 1 of Agarwal et al. 2024 (arXiv 2306.13649), which at its ends is a Kullback-Leibler divergence. It is over the
    teacher's `loss_top_k` tokens and one more outcome, all other tokens together, as in TRL's `loss_add_tail` (1.16,
    experimental/server_distillation); with the whole vocabulary nothing is left over.
    """

    rows = (*SFT.rows, "sampled")
    name: Literal["distill"]
    teacher: PathText
    """distill only, required: Hub name or local folder of a causal language model with the student's vocabulary."""
    loss_top_k: int = Field(default=64, ge=1)
    """How many of the teacher's most probable tokens are kept for each trained token; all others are one outcome."""
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Divides the logits of teacher and student in the divergence, which is not multiplied by its square."""
    beta: float = Field(default=0.0, ge=0, le=1)
    """0: the forward KL divergence, of the student from the teacher; 1: the reverse one; between: eq. 1 of
    arXiv 2306.13649. As TRL has it, whose default is 1."""
    kd_ratio: float = Field(default=0.5, gt=0, le=1)
    """Weight of the divergence; the label's negative log-likelihood has the rest. Name and default are torchtune's."""
    train_on: TrainOn = "assistant"
    """Tokens that carry loss: assistant turns (completions) with their end-of-turn token, the last such turn of a chat
    only, or every token."""

    @property
    def labels(self) -> TrainOn:
        return self.train_on

    @property
    def asks(self) -> Question:
        return Question(self.teacher, self.loss_top_k, self.temperature)

    def words(self) -> str:
        kind = {0.0: "forward KL", 1.0: "reverse KL"}.get(self.beta, f"divergence of beta {self.beta:g}")
        over = f"over the {self.loss_top_k:,} likeliest tokens of {self.teacher} and the rest as one"
        mixed = f"{self.kd_ratio:g} {kind}, {1 - self.kd_ratio:g} likelihood of the labels"
        return f"distill, {mixed}, {over}, temperature {self.temperature:g}"

    def compute(self, model: "Module", batch: dict[str, Any]) -> "LossOutput":
        """The sum over the targets, whose `teacher_logps` are those of the rest and of `teacher_tokens`."""
        from cookbook.config.objectives.forward import LossOutput, log_probabilities

        found = log_probabilities(model, batch, self.temperature)
        nll, student, teacher = found[:, 0], found[:, 1:], batch["teacher_logps"]
        divergence = self._divergence(student, teacher.to(student.dtype))
        loss = (1 - self.kd_ratio) * nll.sum() + self.kd_ratio * divergence.sum()
        metrics = {"nll": nll.detach().sum(), "divergence": divergence.detach().sum()}
        return LossOutput(loss, len(batch["targets"]), metrics)

    def _divergence(self, student: "Tensor", teacher: "Tensor") -> "Tensor":
        """(L,) from log-probabilities (L, 1 + k), of which the first is -inf in both where nothing is left over."""
        import torch

        is_left = teacher > -torch.inf
        student, teacher = (torch.where(is_left, one, 0.0) for one in (student, teacher))

        def from_to(first: "Tensor", second: "Tensor") -> "Tensor":
            return (first.exp() * (first - second) * is_left).sum(1)

        if self.beta in (0, 1):
            return from_to(teacher, student) if self.beta == 0 else from_to(student, teacher)
        weights = torch.tensor([self.beta, 1 - self.beta], device=student.device).log()
        mixture = torch.logaddexp(teacher + weights[0], student + weights[1])
        return self.beta * from_to(teacher, mixture) + (1 - self.beta) * from_to(student, mixture)

    def by_hand(self, samples: Sequence[Sequence[Answer]], values: Sequence[float]) -> float:
        """The mean over the tokens."""
        answers = [answer for sample in samples for answer in sample]
        likelihood = sum(answer.logp for answer in answers)
        divergence = sum(self._by_hand(*pair) for answer in answers for pair in answer.token_teacher_logps)
        whole = self.kd_ratio * divergence - (1 - self.kd_ratio) * likelihood
        return whole / sum(answer.num_tokens for answer in answers)

    def _by_hand(self, teacher: Sequence[float], student: Sequence[float]) -> float:
        pairs = [(math.exp(one), math.exp(other)) for one, other in zip(teacher, student, strict=True)]
        rest = [1 - sum(column) for column in zip(*pairs, strict=True)]
        if min(rest) > 1e-9:  # else nothing is left over but rounding
            pairs.append((rest[0], rest[1]))
        if self.beta in (0, 1):
            pairs = pairs if self.beta == 0 else [(other, one) for one, other in pairs]
            return sum(one * math.log(one / other) for one, other in pairs)
        total = 0.0
        for one, other in pairs:
            mixture = self.beta * one + (1 - self.beta) * other
            total += self.beta * one * math.log(one / mixture) + (1 - self.beta) * other * math.log(other / mixture)
        return total
