"""Targets as a grid, (B, T), which is easy to write by hand and to read: -100 where none is predicted."""

from typing import Any

import torch

IGNORE_INDEX = -100


def from_grid(grid: torch.Tensor) -> dict[str, torch.Tensor]:
    """Targets of a grid as a model with its loss takes them."""
    (positions,) = (grid.flatten() != IGNORE_INDEX).nonzero(as_tuple=True)
    return {"targets": grid.flatten()[positions], "target_positions": positions}


def to_grid(batch: dict[str, Any]) -> torch.Tensor:
    """Targets of a micro-batch as a grid in the shape of its input."""
    grid = torch.full_like(batch["input_ids"], IGNORE_INDEX)
    grid.view(-1)[batch["target_positions"]] = batch["targets"]
    return grid


def packed(lengths: list[int] | tuple[int, ...]) -> dict[str, Any]:
    """Borders of the samples of a packed row."""
    return {"lengths": tuple(lengths), "offsets": torch.tensor([0, *lengths]).cumsum(0).int()}
