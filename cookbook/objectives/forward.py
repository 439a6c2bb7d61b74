"""What losses are made of: the model's forward, and sums over each sequence. Imports torch.

All go through `model(...)`, which returns the negative log-likelihood of each of `targets`, float32 (L,), in their
order: an engine's hooks sit on that call, and a backbone that is called around it is silently wrong under
DDP (its gradients are not synchronised).
"""

from dataclasses import dataclass, field
from typing import Any

import torch

INPUTS = ("input_ids", "targets", "target_positions", "position_ids", "lengths", "offsets")

Batch = dict[str, Any]
"""As `cookbook.data.batches.collate` makes it, its tensors on the device."""


@dataclass(frozen=True)
class Outcome:
    """Of one micro-batch of this process."""

    loss_sum: torch.Tensor
    """Float32 scalar with its graph."""
    count: int
    """What the loss is a mean of: targets, or samples."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums over the same count, without graph."""


def negative_log_likelihood(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Of each target, float32 (L,). Once for each micro-batch, with or without samples in it."""
    return model(**{name: batch[name] for name in INPUTS if name in batch})


def sums_by_sequence(values: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of `values` (L,) over the targets of each sequence, and how many those are: both float64 (S,).

    In float64: a loss of preferences depends on small differences of these sums, which may be hundreds.
    """
    owner = batch["target_sequences"]
    zeros = torch.zeros(batch["num_sequences"], dtype=torch.float64, device=values.device)
    return zeros.index_add(0, owner, values.double()), zeros.index_add(0, owner, torch.ones_like(values).double())


def sequence_logps(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Log-probability of the targets of each sequence, float64 (S,)."""
    return sums_by_sequence(-negative_log_likelihood(model, batch), batch)[0]
