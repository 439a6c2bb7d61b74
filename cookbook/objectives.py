"""Objectives: each takes the model and one micro-batch and returns a loss *sum*; the loop divides it.

All go through `model(...)`, which returns the negative log-likelihood of each of `targets`, float32 (L,), in their
order: an engine's hooks sit on that call, and a backbone that is called around it is silently wrong under
DDP (its gradients are not synchronised).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from cookbook.recipe import ObjectiveSection

INPUTS = ("input_ids", "targets", "target_positions", "position_ids", "lengths", "offsets")

Batch = dict[str, Any]
"""As `cookbook.data.batches.collate` makes it, its tensors on the device."""


@dataclass(frozen=True)
class Outcome:
    """Of one micro-batch of this process."""

    loss_sum: torch.Tensor
    """Float32 scalar with its graph."""
    count: int
    """What the loss is a mean of: targets, or pairs."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums over the same count, without graph."""


@dataclass(frozen=True)
class Objective:
    run: Callable[[torch.nn.Module, Batch], Outcome]
    unit: Literal["num_targets", "num_samples"]
    """The field of a StepBatch that counts, over all processes, what the loss is a mean of."""
    needs_reference: bool = False
    """Whether batches must carry `reference_logps`, what the untrained model makes of each sequence."""


def build_objective(settings: ObjectiveSection) -> Objective:
    """The objective of a recipe."""
    if settings.name == "dpo":
        return Objective(run=partial(preference_loss, settings), unit="num_samples", needs_reference=True)
    return Objective(run=token_loss, unit="num_targets")


def token_loss(model: torch.nn.Module, batch: Batch) -> Outcome:
    """The negative log-likelihood of every target: supervised fine-tuning and continued pre-training."""
    return Outcome(_nll(model, batch).sum(), len(batch["targets"]))


def preference_loss(settings: ObjectiveSection, model: torch.nn.Module, batch: Batch) -> Outcome:
    """Direct preference optimization of pairs: sequence 2i is the chosen answer of pair i, 2i + 1 the rejected one.

    `sigmoid` is eq. 7 of Rafailov et al. 2023 (arXiv 2305.18290), with label smoothing as in eq. 3 of Mitchell's note
    on conservative DPO (2023). `ipo` is eq. 17 of Azar et al. 2023 (arXiv 2310.12036) on log-probabilities per token,
    as TRL computes it, so that long answers do not decide.
    """
    nll = _nll(model, batch)
    reference = batch["reference_logps"]
    ratios, num_tokens = _sum_by_sequence(-nll, batch, len(reference))
    ratios = ratios - reference
    if settings.loss == "ipo":
        ratios = ratios / num_tokens
    margins = ratios[0::2] - ratios[1::2]
    if settings.loss == "ipo":
        losses = (margins - 1 / (2 * settings.beta)).square()
    else:
        logits = settings.beta * margins
        losses = -(1 - settings.label_smoothing) * F.logsigmoid(logits) - settings.label_smoothing * F.logsigmoid(
            -logits
        )
    rewards = settings.beta * ratios.detach()
    chosen, rejected = rewards[0::2], rewards[1::2]
    metrics = {
        "reward_chosen": chosen.sum(),
        "reward_rejected": rejected.sum(),
        "reward_margin": (chosen - rejected).sum(),
        "reward_accuracy": (chosen > rejected).float().sum(),
    }
    # A micro-batch without pairs still has its backward: every process must take part in the collectives.
    return Outcome(losses.sum().float() + 0.0 * nll.sum(), len(losses), metrics)


def sequence_logps(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Log-probability of the targets of each sequence of `sample_index`, float64 (num_sequences,)."""
    return _sum_by_sequence(-_nll(model, batch), batch, len(batch["sample_index"]))[0]


def _nll(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return model(**{name: batch[name] for name in INPUTS if name in batch})


def _sum_by_sequence(values: torch.Tensor, batch: Batch, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of `values` over the targets of each sequence, and how many those are.

    In float64: a loss of preferences depends on small differences of these sums, which may be hundreds.
    """
    owner = batch["target_sequences"]
    zeros = torch.zeros(num_sequences, dtype=torch.float64, device=values.device)
    return zeros.index_add(0, owner, values.double()), zeros.index_add(0, owner, torch.ones_like(values).double())
