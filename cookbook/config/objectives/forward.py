"""Building blocks of losses: the model's forward, and sums over each sequence. Imports torch.

Every loss must call `model(...)`, which returns the negative log-likelihood of each of the L `targets`. The engines'
hooks are on that call: under DDP, gradients of a backbone that is called directly are silently not synchronized.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

INPUTS = (
    "input_ids",
    "targets",
    "target_positions",
    "position_ids",
    "lengths",
    "offsets",
    "draw_words",
    "token_lengths",
)
BY_TARGET = ("old_logps", "sampled_logps", "token_reference_logps", "teacher_tokens", "teacher_logps")
"""Entries of a batch that have a value for each target, beside `targets`."""

Batch = dict[str, Any]
"""The output of `cookbook.training.data.batches.collate`, with its tensors on the device."""


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch on this process."""

    loss_sum: torch.Tensor
    """Float32 scalar with its autograd graph."""
    count: int
    """Number of targets or samples in the sum."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """Detached sums over the same targets or samples."""

    @classmethod
    def of(cls, losses: torch.Tensor, nll: torch.Tensor, metrics: dict[str, torch.Tensor]) -> "LossOutput":
        """The sum of the losses of samples, which may be none."""
        # `nll` keeps the graph of an empty micro-batch: every process must run the backward's collectives.
        return cls(losses.sum().float() + 0.0 * nll.sum(), len(losses), metrics)


def reward_metrics(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over pairs, whose answers have these rewards, for the metrics of a loss."""
    metrics = {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": (chosen > rejected).float(),
    }
    return {name: values.detach().sum() for name, values in metrics.items()}


def negative_log_likelihood(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Negative log-likelihood of each target, float32 (L,); of a model with a head for sequences its scores, (L, k).
    Collective: call it for empty micro-batches too."""
    return model(**{name: batch[name] for name in INPUTS if name in batch})


class Logits(Protocol):
    """The model's logits at L targets. Under tensor parallel each rank has those of a part of the vocabulary, and each
    method joins a few numbers of all parts: it is collective, and no rank gathers the vocabulary. Results are float32
    and differentiable.
    """

    def nll(self, tokens: torch.Tensor) -> torch.Tensor:
        """(L,) -> (L,): the negative log-likelihood of a token at each target."""

    def at(self, tokens: torch.Tensor) -> torch.Tensor:
        """(L, k) -> (L, k): the logits of tokens."""

    def argmax(self) -> torch.Tensor:
        """(L,) int64: the most probable token at each target, of equals the first. Without a gradient."""

    def rank(self, tokens: torch.Tensor) -> torch.Tensor:
        """(L,) -> (L,): how many tokens have a larger logit than a token at each target. Without a gradient."""

    def mean(self) -> torch.Tensor:
        """(L,): the mean over the vocabulary."""

    def logsumexp(self, *, temperature: float = 1.0, without: torch.Tensor | None = None) -> torch.Tensor:
        """(L,): the log of the sum of exponentials over the vocabulary.

        Args:
            temperature: divides the logits.
            without: (L, k) tokens to leave out, different ones for each target; of no other token it is -inf.
        """

    def whole(self) -> torch.Tensor:
        """(L, V): all logits of a model whose vocabulary is not divided, in a tensor that may be written to."""


class FunctionOfLogits(Protocol):
    """A function of the logits at the targets of a micro-batch, called with some of them at a time."""

    reported: tuple[str, ...]
    """Names of what it returns beside the losses."""

    def __call__(self, logits: Any, rows: slice) -> tuple[torch.Tensor, ...]:
        """(L,) losses, each of the logits at its target alone, which have a gradient; and other tensors of L rows.

        Args:
            rows: of the micro-batch's targets, those of the logits.
        """


class OfTargets:
    """A function of logits and of the entries of a batch that have a row for each target."""

    # No dataclass and no named tuple: FSDP would cast the tensors in one to the dtype of the forward.
    def __init__(
        self,
        function: Callable[[Logits, Batch], tuple[torch.Tensor, ...]],
        reported: tuple[str, ...],
        batch: Batch,
    ) -> None:
        self.function, self.reported = function, reported
        self.entries = {name: batch[name] for name in ("targets", *BY_TARGET) if name in batch}

    def __call__(self, logits: Logits, rows: slice) -> tuple[torch.Tensor, ...]:
        return self.function(logits, {name: values[rows] for name, values in self.entries.items()})


def of_logits(model: torch.nn.Module, batch: Batch, function: FunctionOfLogits) -> tuple[torch.Tensor, ...]:
    """The results of a function of the logits at all targets. Collective, see `negative_log_likelihood`."""
    return model(**{name: batch[name] for name in INPUTS if name in batch}, function=function)


def sums_by_sequence(values: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of `values` (L,) over the targets of each sequence, and their number: both float64 (S,), or (S, k) of
    (L, k). Of ranks that share the tokens of the samples each gets some of the sequences; collective for them.

    Float64, as preference losses depend on small differences between sums of several hundred.
    """
    sums = torch.stack([_own_sums(values, batch), _own_sums(torch.ones_like(values), batch)])
    # Each rank computes the losses of some samples: with those of all on each, loss, counts and metrics would have to
    # be divided wherever they are used, by a plugin too.
    if "own_sequences" in batch:
        sums = _AddedUp.apply(sums, batch["sequence_group"])[:, batch["own_sequences"]]
    return sums[0], sums[1]


def scores_by_sequence(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of each sequence of `sums_by_sequence`, float64 (S, k), and what the model returned: those of the
    sequences whose last token this rank sees, (L, k). Collective."""
    own = negative_log_likelihood(model, batch)
    return sums_by_sequence(own, batch)[0], own


def _own_sums(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sums over the targets that this rank sees, float64 (S,) or (S, k)."""
    zeros = torch.zeros(batch["num_sequences"], *values.shape[1:], dtype=torch.float64, device=values.device)
    return zeros.index_add(0, batch["target_sequences"], values.double())


class _AddedUp(torch.autograd.Function):
    """The sum over a group, of which each rank uses a part: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_reduce(values, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(gradients[0], ctx.group), None


def _all_reduce(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    summed = values.clone()
    dist.all_reduce(summed, group=group)
    return summed


def next_tokens(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The most probable token at the target of each sequence, int64 (S,), of which a sequence has one at most; 0 where
    it has none, as on the ranks that see other parts of it. Collective.
    """
    tokens = model(**{name: batch[name] for name in INPUTS if name in batch and name != "targets"})
    return tokens.new_zeros(batch["num_sequences"]).index_copy(0, batch["target_sequences"], tokens)


def sequence_logps(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Log-probability of the targets of each sequence that this rank sees, float64 (S,)."""
    return _own_sums(-negative_log_likelihood(model, batch), batch)


def target_logps(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Log-probability of each target that this rank sees, float32 (L,)."""
    return -negative_log_likelihood(model, batch)
