"""Distillation: the student learns the distribution over next tokens of a teacher, which was asked before training."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cookbook.config.objectives.objective import Question, TrainOn
from cookbook.config.objectives.token_loss import SFT, TokenLoss
from cookbook.system.files import PathText
from cookbook.system.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from cookbook.config.objectives.forward import Logits, OfTargets


@register
class Distill(TokenLoss):
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
    """Number of the teacher's most probable tokens to keep for each trained token; all others are one outcome."""
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

    def function(self, batch: dict[str, Any]) -> "OfTargets":
        """A function of the targets, whose `teacher_logps` are those of the rest and of `teacher_tokens`."""
        from cookbook.config.objectives.forward import OfTargets

        return OfTargets(self._mix_losses, ("nll", "divergence"), batch)

    def _mix_losses(self, logits: "Logits", batch: dict[str, Any]) -> "tuple[Tensor, ...]":
        import torch

        nll, tokens = logits.nll(batch["targets"]), batch["teacher_tokens"].long()
        # Not 1 less the sum of the candidates' probabilities, which has no digits left where that is nearly 1.
        rest = logits.logsumexp(temperature=self.temperature, without=tokens)
        apart = torch.cat([rest.unsqueeze(1), logits.at(tokens) / self.temperature], 1)
        student, teacher = apart - apart.logsumexp(1, keepdim=True), batch["teacher_logps"]
        divergence = self._divergence(student, teacher.to(student.dtype))
        return (1 - self.kd_ratio) * nll + self.kd_ratio * divergence, nll, divergence

    def _divergence(self, student: "Tensor", teacher: "Tensor") -> "Tensor":
        """(L,) from log-probabilities (L, 1 + k), of which the first is -inf in both where nothing is left over."""
        import torch

        is_left = teacher > -torch.inf
        student, teacher = (torch.where(is_left, logps, 0.0) for logps in (student, teacher))

        def from_to(first: "Tensor", second: "Tensor") -> "Tensor":
            return (first.exp() * (first - second) * is_left).sum(1)

        if self.beta in (0, 1):
            return from_to(teacher, student) if self.beta == 0 else from_to(student, teacher)
        weights = torch.tensor([self.beta, 1 - self.beta], device=student.device).log()
        mixture = torch.logaddexp(teacher + weights[0], student + weights[1])
        return self.beta * from_to(teacher, mixture) + (1 - self.beta) * from_to(student, mixture)
