"""Group relative policy optimization on stored groups: answers to one prompt that were sampled and rewarded before."""

from collections.abc import Collection, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from cookbook.config.objectives.objective import Objective
from cookbook.rows.json_text import BadRow
from cookbook.rows.row_checks import ENDED
from cookbook.system.registry import register

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from cookbook.config.objectives.forward import LossOutput

LEAST_DEVIATION = 1e-4
"""Added to a standard deviation of rewards, as TRL does (1.16, trainer/grpo_trainer.py)."""


@register
class GRPO(Objective):
    """Group relative policy optimization, eq. 3 of Shao et al. 2024 (arXiv 2402.03300), on groups sampled before.

    A sample is one answer. Its advantage is its reward less the mean of its group's. The loss of a token with ratio r
    of its probability to that when it was sampled is -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta KL, and
    lengths and counts in its mean are those of the global batch. Keys have TRL's names and defaults.

    Where temperature or truncation drew a token from another distribution than the model's, its loss is weighted by the
    ratio of both probabilities when it was sampled, so that r is clipped around 1 all the same: section 3 of Hilton et
    al. 2021 (arXiv 2110.00641).
    """

    rows = ("chat_group", "group", "sampled_group")
    sample = "answer"
    shares_samples = True
    needs_reference = True
    reference_of = "tokens"
    settings_of_values = ("scale_rewards", "mask_truncated_completions")
    name: Literal["grpo"]
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = "dapo"
    """`dapo`: a mean over all tokens of the global batch, eq. 8 of Yu et al. 2025 (arXiv 2503.14476); `grpo`: a mean
    over each answer's tokens, then over answers, eq. 3 of Shao et al. 2024 (arXiv 2402.03300); `dr_grpo`: an answer's
    sum divided by max_completion_length, section 3.2 of Liu et al. 2025 (arXiv 2503.20783)."""
    max_completion_length: int | None = Field(default=None, ge=1)
    """The constant of dr_grpo: the tokens that an answer could have when it was sampled."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """The divisor of an advantage: the standard deviation of its group's rewards (Shao et al. 2024, section 4.1.2), of
    all rewards of the set (`batch`, Liu et al. 2025, arXiv 2508.08221), or nothing (Dr. GRPO, arXiv 2503.20783)."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    """Distance below 1 at which the ratio is clipped."""
    epsilon_high: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Distance above 1 at which the ratio is clipped; default: epsilon. `Clip-Higher` of DAPO, eq. 10 of arXiv
    2503.14476, has 0.28."""
    beta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the divergence from the model before training, estimated as in eq. 4 of arXiv 2402.03300 (k3 of
    Schulman's note). DAPO and Dr. GRPO have none."""
    use_bias_correction_kl: bool = True
    """Multiply the divergence by r, which makes its gradient that of the reverse KL: DeepSeek-V3.2 (arXiv 2512.02556).
    With false it is eq. 4 of arXiv 2402.03300 as it stands."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """The ratio r: a token's own, or for all tokens of an answer the geometric mean of theirs: GSPO, eq. 7 of Zheng et
    al. 2025 (arXiv 2507.18071), whose epsilon is 3e-4 and 4e-4 above."""

    importance_sampling_clip_max: float = Field(default=3.0, gt=0, allow_inf_nan=False)
    """The largest weight of a token that was drawn from another distribution than the model's; TRL's
    vllm_importance_sampling_clip_max with `token_truncate`. Truncation alone gives none above 1."""
    mask_truncated_completions: bool = False
    """Leave answers that were cut off while sampling out of the loss, section 3.4 of DAPO (arXiv 2503.14476). Their
    rewards count in their groups; they are no tokens of a mean over tokens, and answers of 0 in a mean over answers."""

    @model_validator(mode="after")
    def _has_its_constant(self):
        length = self.max_completion_length
        if self.loss_type == "dr_grpo" and length is None:
            raise ValueError("loss_type dr_grpo needs max_completion_length: the tokens that an answer could have")
        if self.loss_type != "dr_grpo" and length is not None:
            raise ValueError(f"max_completion_length {length} would be ignored by loss_type: {self.loss_type}")
        return self

    @property
    def mean_over(self) -> Literal["tokens", "samples"]:  # type: ignore[override]
        return "tokens" if self.loss_type == "dapo" else "samples"

    @property
    def most(self) -> float:
        """Where a ratio is clipped above."""
        return 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @property
    def masks_truncated(self) -> bool:
        return self.mask_truncated_completions

    def words(self) -> str:
        masked = ", without answers that were cut off" if self.mask_truncated_completions else ""
        level = ", ratios of sequences" if self.importance_sampling_level == "sequence" else ""
        scaled = {"group": "deviation of the group", "batch": "deviation of all rewards", "none": "nothing"}
        clipped = f"ratios clipped at {1 - self.epsilon:g} and {self.most:g}"
        divided = f"advantages divided by {scaled[self.scale_rewards]}"
        return f"grpo, loss {self.loss_type}, {divided}, {clipped}{level}, beta {self.beta:g}{masked}"

    def compares(self, given: Collection[str]) -> bool:
        return "old_logps" not in given or (self.beta > 0 and "token_reference_logps" not in given)

    def check_row(self, row: dict[str, Any]) -> dict[str, Any]:
        if not self.beta and "reference_logprobs" in row:
            raise BadRow("reference_logprobs without a divergence", "objective.beta is 0; or put them in data.ignore")
        if not self.mask_truncated_completions:
            return {key: value for key, value in row.items() if key != ENDED}
        if ENDED not in row and "completion_ids" not in row:
            seen = f"a text does not show it; write `{ENDED}`, or objective.mask_truncated_completions: false"
            raise BadRow("no word of which answers were cut off", seen)
        return row

    def values_of(self, groups: Sequence[Sequence[float]]) -> list[float]:
        """The advantage of each answer."""
        deviation = _deviation([reward for group in groups for reward in group])
        advantages = []
        for group in groups:
            mean = fmean(group)
            divisor = _deviation(group) if self.scale_rewards == "group" else deviation
            advantages += [(reward - mean) / (1 if self.scale_rewards == "none" else divisor) for reward in group]
        return advantages

    def remarks(self, values: Sequence[float]) -> tuple[str, ...]:
        return () if len({*values}) > 1 else ("with one reward for all answers, whose advantages are 0",)

    def compute(self, model: "Module", batch: dict[str, Any]) -> "LossOutput":
        """The sum over the answers, whose advantages are `values`."""
        import torch

        from cookbook.config.objectives.forward import LossOutput, negative_log_likelihood, sums_by_sequence

        nll = negative_log_likelihood(model, batch)
        logps = -nll.double()
        log_ratios = logps - batch["old_logps" if "old_logps" in batch else "token_reference_logps"]
        drawn = self._weights(logps, batch)
        divergence = torch.zeros_like(logps)
        if self.beta:
            away = batch["token_reference_logps"] - logps
            divergence = torch.exp(away) - away - 1
        if self.importance_sampling_level == "token":
            corrected = divergence * log_ratios.exp() if self.use_bias_correction_kl else divergence
            least, most, *others = self._clip_ratios(log_ratios.exp())
            columns = [drawn * least, drawn * most, *others, drawn * corrected, drawn]
            sums, counts = sums_by_sequence(torch.stack(columns, 1), batch)
            num_tokens = counts[:, 0]
            *policy, divergences, drawn_sums = sums.unbind(1)
        else:
            sums, counts = sums_by_sequence(torch.stack([log_ratios, drawn * divergence, drawn], 1), batch)
            num_tokens, divergences, drawn_sums = counts[:, 0], sums[:, 1], sums[:, 2]
            ratio = (sums[:, 0] / num_tokens.clamp(min=1)).exp()
            divergences = divergences * ratio if self.use_bias_correction_kl else divergences
            least, most, *others = self._clip_ratios(ratio)
            policy = [least * drawn_sums, most * drawn_sums, *(metric * num_tokens for metric in others)]
        least, most, ratios, below, above = policy
        # Not A itself times a token's ratio: of ranks that share a sequence, only one has its advantage.
        advantages = batch["values"]
        is_good = advantages >= 0
        losses = self.beta * divergences - advantages * torch.where(is_good, least, most)
        weights = 1 / num_tokens.clamp(min=1) if self.mean_over == "samples" else torch.ones_like(num_tokens)
        # A mean over answers has those without a token too, as likely as when they were sampled.
        empty = (num_tokens == 0) * (self.mean_over == "samples")
        metrics = {"ratio": ratios + empty, "clipped": torch.where(is_good, above, below) * (advantages != 0)}
        metrics |= {"kl": divergences} if self.beta else {}
        metrics |= {"sampling_weight": drawn_sums + empty} if "sampled_logps" in batch else {}
        sums_of = {name: (weights * values).detach().sum() for name, values in metrics.items()}
        if self.max_completion_length is not None:
            weights = torch.full_like(num_tokens, 1 / self.max_completion_length)
        count = len(advantages) if self.mean_over == "samples" else len(batch["targets"])
        # `nll` keeps the graph of an empty micro-batch: every process must run the backward's collectives.
        return LossOutput((weights * losses).sum().float() + 0.0 * nll.sum(), count, sums_of)

    def _weights(self, logps: "Tensor", batch: dict[str, Any]) -> "Tensor":
        """For each target the ratio of the model's probability when it was sampled to that which it was drawn with."""
        import torch

        if "sampled_logps" not in batch:
            return torch.ones_like(logps)
        old = batch["old_logps" if "old_logps" in batch else "token_reference_logps"]
        return (old - batch["sampled_logps"]).exp().clamp(max=self.importance_sampling_clip_max)

    def _clip_ratios(self, ratios: "Tensor") -> "list[Tensor]":
        """Return min(r A, clip(r) A) for an A of 1, and for -1 times -1; r; whether it is below the range; above."""
        import torch

        low, high = 1 - self.epsilon, self.most
        inside = ratios.clamp(low, high)
        beyond = [(ratios < low).double(), (ratios > high).double()]
        return [torch.minimum(ratios, inside), torch.maximum(ratios, inside), ratios.detach(), *beyond]


def _deviation(rewards: Sequence[float]) -> float:
    return stdev(rewards) + LEAST_DEVIATION
