"""Optimizers, one per file: recipe keys, properties, and how to build torch's. Loads without torch."""

from cookbook.config.optim import adamw, adamw_8bit, muon, sgd
from cookbook.config.optim.optimizer import Optimizer, WithBetas, number

__all__ = ["Optimizer", "WithBetas", "adamw", "adamw_8bit", "muon", "number", "sgd"]
