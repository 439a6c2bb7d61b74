"""Optimizers: each file has one: its keys in a recipe, its facts, how torch's is built. Loads without torch."""

from cookbook.optim import adamw, adamw_8bit, muon, sgd
from cookbook.optim.base import Optimizer, WithBetas, number

__all__ = ["Optimizer", "WithBetas", "adamw", "adamw_8bit", "muon", "number", "sgd"]
