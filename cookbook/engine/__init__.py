"""Runs a strategy: starts it on GPU or CPU, owns all forwards and backwards of a step, and proves what is in force.

`train.py` knows no strategy; it calls `gradients`, `step`, `evaluate`. What all strategies share is `base.Engine`; what
one does differently is in the file of its family, and nothing outside these files asks which one runs.
"""

from cookbook.engine.base import Batch, Engine, Objective, Outcome, StepResult
from cookbook.engine.ddp import Ddp, Single
from cookbook.engine.fsdp1 import Fsdp1
from cookbook.engine.fsdp2 import Fsdp2
from cookbook.engine.start import make_deterministic
from cookbook.engine.tensor_parallel import TensorParallel
from cookbook.engine.zero import Zero, build_ops
from cookbook.strategy import Kind, Strategy

__all__ = ["Batch", "Engine", "Objective", "Outcome", "StepResult", "build_ops", "engine_class", "make_deterministic"]

FAMILIES: dict[Kind, type[Engine]] = {
    "single": Single,
    "ddp": Ddp,
    "fsdp1": Fsdp1,
    "fsdp2": Fsdp2,
    "zero": Zero,
    "tp": TensorParallel,
}


def engine_class(strategy: Strategy) -> type[Engine]:
    """The family that runs a strategy."""
    return FAMILIES[strategy.kind]
