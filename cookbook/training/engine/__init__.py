"""Runs a strategy: starts it on GPU or CPU, runs each forward, backward and update, and verifies what is in effect.

`train.py` knows no strategy; it calls `gradients`, `step`, `evaluate`. `base.Engine` holds what strategies share, the
file of a family what it does differently; nothing outside these files asks which one runs.
"""

from cookbook.config.strategy import Kind, Strategy
from cookbook.training.engine.base import Engine
from cookbook.training.engine.ddp import Ddp, Single
from cookbook.training.engine.expert_parallel import ExpertParallel
from cookbook.training.engine.findings import in_words
from cookbook.training.engine.fsdp1 import Fsdp1
from cookbook.training.engine.fsdp2 import Fsdp2
from cookbook.training.engine.pipeline import Pipeline, ShardedPipeline
from cookbook.training.engine.start import make_deterministic
from cookbook.training.engine.tensor_parallel import ShardedTensorParallel, TensorParallel
from cookbook.training.engine.zero import Zero, build_ops

__all__ = ["Engine", "build_ops", "engine_class", "in_words", "make_deterministic"]

FAMILIES: dict[Kind, type[Engine]] = {
    "single": Single,
    "ddp": Ddp,
    "fsdp1": Fsdp1,
    "fsdp2": Fsdp2,
    "zero": Zero,
    "tp": TensorParallel,
    "pp": Pipeline,
}


def engine_class(strategy: Strategy) -> type[Engine]:
    """The engine of a strategy's family."""
    if strategy.ep_size > 1:
        return ExpertParallel
    if strategy.is_sharded_while_read:
        return ShardedPipeline if strategy.pp_size > 1 else ShardedTensorParallel
    return FAMILIES[strategy.kind]
