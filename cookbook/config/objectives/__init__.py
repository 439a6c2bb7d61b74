"""Training objectives, one per file: recipe keys, properties and loss. Loads without torch.

A loss returns a *sum* over the tokens or samples of one micro-batch; the engine divides it by the count of the whole
global batch. That makes every objective the same under every strategy.
"""

from cookbook.config.objectives import cpo, distill, dpo, grpo, kto_zero, orpo, pair, scored, token_loss
from cookbook.config.objectives.objective import Objective, Question, TooLong, TrainOn

__all__ = [
    "Objective",
    "Question",
    "TooLong",
    "TrainOn",
    "cpo",
    "distill",
    "dpo",
    "grpo",
    "kto_zero",
    "orpo",
    "pair",
    "scored",
    "token_loss",
]
