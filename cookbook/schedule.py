"""The learning rate as a pure function of the step: the shapes that a recipe may name. No torch."""

import math
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from cookbook.optim import Optimizer
from cookbook.registry import Named, register


class Schedule(Named):
    """What a recipe's `schedule` is: a warm-up, and after it the shape of its kind."""

    family = "schedule"
    default = "cosine"
    name: str
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps to the peak learning rate, in equal rises: the first step takes 1/warmup_steps of it."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Multiplies optim.learning_rate by global_batch_size / base_batch_size, or by its square root."""
    base_batch_size: int | None = Field(default=None, gt=0)
    """The global batch size for which optim.learning_rate is meant; goes with scale_lr."""

    stretches: ClassVar[tuple[str, ...]] = ()
    """Keys with a number of steps, after the warm-up, that must fit into the run."""

    @model_validator(mode="after")
    def _scale_and_base_go_together(self):
        if (self.scale_lr != "none") != (self.base_batch_size is not None):
            raise ValueError(
                f"scale_lr {self.scale_lr} and base_batch_size {self.base_batch_size} go together; give both or neither"
            )
        return self

    def factor(self, step: int, max_steps: int) -> float:
        """The learning rate of a step after the warm-up, as a share of the peak; steps count from 0."""
        raise NotImplementedError

    def ends(self) -> str:
        """For `explain`: where it goes."""
        raise NotImplementedError

    @property
    def fixed_steps(self) -> int:
        """Steps whose number does not depend on the length of the run."""
        return self.warmup_steps + sum(getattr(self, key) for key in self.stretches)

    def progress(self, step: int, max_steps: int) -> float:
        """From 0 after the warm-up to 1 at `max_steps`."""
        return (step - self.warmup_steps) / max(1, max_steps - self.warmup_steps)

    def misfits(self, max_steps: int) -> list[str]:
        """What does not fit into a run of so many steps."""
        if self.warmup_steps >= max_steps:
            return [
                f"warmup_steps is {self.warmup_steps}, but the run has {max_steps} steps: the peak learning rate would"
                f" never be reached; write less than {max_steps}"
            ]
        before = self.warmup_steps
        for key in self.stretches:
            if before + getattr(self, key) > max_steps:
                return [
                    f"{key} is {getattr(self, key)}, after {before} warmup_steps, but the run has {max_steps} steps;"
                    f" write at most {max_steps - before}"
                ]
            before += getattr(self, key)
        return []


@register
class Cosine(Schedule):
    """Half a cosine to 0."""

    name: Literal["cosine"] = "cosine"

    def factor(self, step: int, max_steps: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * self.progress(step, max_steps)))

    def ends(self) -> str:
        return "to 0"


@register
class Linear(Schedule):
    """A line to 0."""

    name: Literal["linear"]

    def factor(self, step: int, max_steps: int) -> float:
        return 1.0 - self.progress(step, max_steps)

    def ends(self) -> str:
        return "to 0"


@register
class Constant(Schedule):
    """Stays at the peak."""

    name: Literal["constant"]

    def factor(self, step: int, max_steps: int) -> float:
        return 1.0

    def ends(self) -> str:
        return "at the peak"


@register
class WSD(Schedule):
    """Warm-up, stable, decay: stays at the peak and falls linearly to 0 over the last decay_steps."""

    stretches = ("decay_steps",)
    name: Literal["wsd"]
    decay_steps: int = Field(gt=0)
    """wsd only, and required there."""

    def factor(self, step: int, max_steps: int) -> float:
        return min(1.0, (max_steps - step) / self.decay_steps)

    def ends(self) -> str:
        return f"at the peak, then to 0 over the last {self.decay_steps} steps"


@register
class InverseSqrt(Schedule):
    """Falls with sqrt(warmup_steps / step)."""

    name: Literal["inverse_sqrt"]

    @model_validator(mode="after")
    def _has_a_warmup(self):
        if not self.warmup_steps:
            raise ValueError("inverse_sqrt needs warmup_steps: it falls with sqrt(warmup_steps / step)")
        return self

    def factor(self, step: int, max_steps: int) -> float:
        return math.sqrt(self.warmup_steps / (step + 1))

    def ends(self) -> str:
        return "with sqrt(warm-up / step)"


def peak_learning_rate(optim: Optimizer, schedule: Schedule, global_batch_size: int) -> float:
    """optim.learning_rate, scaled from schedule.base_batch_size to the batch size of the run if the recipe says so.

    Linear: Goyal et al. 2017 (arXiv 1706.02677). Square root: Malladi et al. 2022 (arXiv 2205.10287), for Adam.
    """
    if schedule.base_batch_size is None:
        return optim.learning_rate
    ratio = global_batch_size / schedule.base_batch_size
    return optim.learning_rate * (ratio if schedule.scale_lr == "linear" else math.sqrt(ratio))


def learning_rate(step: int, max_steps: int, peak: float, schedule: Schedule) -> float:
    """The learning rate of optimizer step `step`, counted from 0. What ends at 0 would be there at `max_steps`.

    Stateless, and never given to `accelerator.prepare`: a prepared scheduler steps once per process
    (accelerate/scheduler.py, AcceleratedScheduler.step).
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    return peak * schedule.factor(step, max_steps)
