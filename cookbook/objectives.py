"""Objectives: each takes the model and one micro-batch and returns a loss *sum*; the loop divides it."""

from collections.abc import Callable

import torch

Objective = Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def sft(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum of the negative log-likelihoods at the labelled positions of this process's micro-batch, float32 scalar.

    Everything happens inside `model(...)`: an engine's hooks sit on the wrapper, and a backbone that is called around
    it is silently wrong under DDP (its gradients are not synchronised).
    """
    return model(**batch)


OBJECTIVES: dict[str, Objective] = {"sft": sft}
