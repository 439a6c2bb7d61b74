"""Objectives: what a run minimises. Each file has one: its keys in a recipe, its facts, its loss. Loads without torch.

A loss takes the model and one micro-batch and returns a *sum*; the engine divides it by what the whole global batch
counts. So every objective is the same under every strategy, if it is a sum over tokens or samples.
"""

from cookbook.objectives import dpo, kto_zero, orpo, token_loss
from cookbook.objectives.base import Answer, Objective, TrainOn

__all__ = ["Answer", "Objective", "TrainOn", "dpo", "kto_zero", "orpo", "token_loss"]
