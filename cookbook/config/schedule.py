"""Learning-rate schedules: the learning rate as a pure function of the step. No torch."""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from cookbook.config.optim import Optimizer
from cookbook.system.registry import NamedSection, register


def _steps_or_share(value: float) -> float:
    if value >= 1 and not value.is_integer():
        raise ValueError(f"is {value}; write a whole number of steps, or a share of the run below 1")
    return int(value) if value >= 1 or value == 0 else value


class Schedule(NamedSection):
    """A recipe's `schedule`: a warm-up, then the shape of its kind."""

    family = "schedule"
    default = "cosine"
    name: str
    warmup_steps: Annotated[float, AfterValidator(_steps_or_share)] = Field(default=0, ge=0, allow_inf_nan=False)
    """Optimizer steps of warm-up, or their share of the run (0.03), rounded up. The last step uses the peak learning
    rate."""
    warmup: Literal["linear", "log"] = "linear"
    """Shape of the warm-up: the first step uses 1/steps of the peak (linear), or 0 and then log(step) / log(steps) of
    it, as DeepSpeed's schedulers do unless told otherwise (log)."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Multiply optim.learning_rate by global_batch_size / base_batch_size (linear) or by its square root (sqrt)."""
    base_batch_size: int | None = Field(default=None, gt=0)
    """The global batch size that optim.learning_rate was chosen for; required by scale_lr."""

    stretches: ClassVar[tuple[str, ...]] = ()
    """Keys that hold a number of steps after the warm-up, which must fit into the run."""

    @model_validator(mode="after")
    def _scale_and_base_go_together(self):
        if (self.scale_lr != "none") != (self.base_batch_size is not None):
            raise ValueError(
                f"scale_lr {self.scale_lr} and base_batch_size {self.base_batch_size} go together; give both or neither"
            )
        return self

    @model_validator(mode="after")
    def _logarithm_has_steps(self):
        if self.warmup == "log" and not self.warmup_steps:
            raise ValueError("warmup is log, and there are no warmup_steps; give their number, or take warmup out")
        return self

    def warmup_factor(self, step: int) -> float:
        """Learning rate over peak learning rate, for a step (from 0) of a warm-up of whole steps."""
        if self.warmup == "log":  # deepspeed 0.19.8, runtime/lr_schedules.py, WarmupLR._get_gamma
            return math.log(step + 1) / math.log(max(2, self.warmup_steps))
        # From 1/warmup_steps: a step with learning rate 0 would be computed and thrown away.
        return (step + 1) / self.warmup_steps

    def factor(self, step: int, max_steps: int) -> float:
        """Learning rate over peak learning rate, for a step (from 0) after a warm-up of whole steps."""
        raise NotImplementedError

    @property
    def least(self) -> float:
        """The learning rate where `factor` is 0."""
        return 0.0

    def ends(self) -> str:
        """Where the learning rate goes after the warm-up, for `explain`."""
        return f"to {self.least:g}"

    def for_length(self, max_steps: int) -> Self:
        """The schedule with the steps of its warm-up where the recipe has a share."""
        if self.warmup_steps >= 1:
            return self
        steps = math.ceil(round(self.warmup_steps * max_steps, 6))  # 0.07 x 100 is 7.000000000000001
        return self.model_copy(update={"warmup_steps": steps})

    @property
    def fixed_steps(self) -> int:
        """Number of steps that do not depend on the length of the run."""
        return int(self.warmup_steps) + sum(getattr(self, key) for key in self.stretches)

    def progress(self, step: int, max_steps: int) -> float:
        """Progress after the warm-up: 0 at its end, 1 at `max_steps`."""
        return (step - self.warmup_steps) / max(1, max_steps - self.warmup_steps)

    def misfits(self, max_steps: int) -> list[str]:
        """One mistake if warm-up and further keys do not fit into `max_steps`, else none. Of a run that --set has made
        short, they are a note (`short_run`)."""
        before = self.for_length(max_steps).warmup_steps
        if before >= max_steps:
            return [
                f"warmup_steps is {self.warmup_steps}, but the run has {max_steps} steps: none would"
                f" follow the warm-up; write less than {max_steps}"
            ]
        for key in self.stretches:
            if before + getattr(self, key) > max_steps:
                return [
                    f"{key} is {getattr(self, key)}, after {before} warmup_steps, but the run has {max_steps} steps;"
                    f" write at most {max_steps - before}"
                ]
            before += getattr(self, key)
        return []


def short_run(schedule: Schedule, max_steps: int | None) -> list[str]:
    """A note if a run of `max_steps`, which the command line asks for, ends before its schedule leaves the warm-up."""
    misfits = [] if max_steps is None else schedule.misfits(max_steps)
    return [f"schedule.{misfit.partition(';')[0]}" for misfit in misfits]


class Decay(Schedule):
    """A schedule that ends at 0, or at a learning rate above it."""

    min_learning_rate: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The learning rate at the end (cosine, linear and wsd), as 2e-6; not its share of the peak. Default: 0."""

    @property
    def least(self) -> float:
        return self.min_learning_rate or 0.0


@register
class Cosine(Decay):
    """Cosine decay."""

    name: Literal["cosine"] = "cosine"

    def factor(self, step: int, max_steps: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * self.progress(step, max_steps)))


@register
class Linear(Decay):
    """Linear decay."""

    name: Literal["linear"]

    def factor(self, step: int, max_steps: int) -> float:
        return 1.0 - self.progress(step, max_steps)


@register
class Constant(Schedule):
    """Constant at the peak."""

    name: Literal["constant"]

    def factor(self, step: int, max_steps: int) -> float:
        return 1.0

    def ends(self) -> str:
        return "at the peak"


@register
class WSD(Decay):
    """Warm-up, stable, decay: constant at the peak, then linear decay over the last decay_steps."""

    stretches = ("decay_steps",)
    name: Literal["wsd"]
    decay_steps: int = Field(gt=0)
    """Steps of the final decay (wsd only, required)."""

    def factor(self, step: int, max_steps: int) -> float:
        return min(1.0, (max_steps - step) / self.decay_steps)

    def ends(self) -> str:
        return f"at the peak, then to {self.least:g} over the last {self.decay_steps} steps"


@register
class InverseSqrt(Schedule):
    """Inverse square root decay: sqrt(warmup_steps / step)."""

    name: Literal["inverse_sqrt"]

    @model_validator(mode="after")
    def _has_a_warmup(self):
        if not self.warmup_steps:
            raise ValueError("inverse_sqrt needs warmup_steps: the learning rate decays as sqrt(warmup_steps / step)")
        return self

    def factor(self, step: int, max_steps: int) -> float:
        return math.sqrt(self.warmup_steps / (step + 1))

    def ends(self) -> str:
        return "with sqrt(warm-up / step)"


def peak_learning_rate(optim: Optimizer, schedule: Schedule, global_batch_size: int) -> float:
    """optim.learning_rate, scaled from schedule.base_batch_size to the global batch size as scale_lr asks.

    Linear: Goyal et al. 2017 (arXiv 1706.02677). Square root: Malladi et al. 2022 (arXiv 2205.10287), for Adam.
    """
    if schedule.base_batch_size is None:
        return optim.learning_rate
    ratio = global_batch_size / schedule.base_batch_size
    return optim.learning_rate * (ratio if schedule.scale_lr == "linear" else math.sqrt(ratio))


def learning_rate(step: int, max_steps: int, peak: float, schedule: Schedule) -> float:
    """The learning rate of optimizer step `step`, counted from 0; a decay reaches its end at `max_steps`.

    Above a least rate as in transformers 5.23 (optimization.py, get_cosine_with_min_lr_schedule_with_warmup): factor x
    (1 - share) + share, where share is least / peak.

    A function instead of a torch scheduler: `accelerator.prepare` would step that once per process
    (accelerate/scheduler.py, AcceleratedScheduler.step).
    """
    schedule = schedule.for_length(max_steps)
    if step < schedule.warmup_steps:
        return peak * schedule.warmup_factor(step)
    return schedule.least + (peak - schedule.least) * schedule.factor(step, max_steps)
