"""The learning rate as a pure function of the step. No torch."""

import math

from cookbook.recipe import OptimSection, ScheduleSection


def peak_learning_rate(optim: OptimSection, schedule: ScheduleSection, global_batch_size: int) -> float:
    """optim.learning_rate, scaled from schedule.base_batch_size to the batch size of the run if the recipe says so.

    Linear: Goyal et al. 2017 (arXiv 1706.02677). Square root: Malladi et al. 2022 (arXiv 2205.10287), for Adam.
    """
    if schedule.base_batch_size is None:
        return optim.learning_rate
    ratio = global_batch_size / schedule.base_batch_size
    return optim.learning_rate * (ratio if schedule.scale_lr == "linear" else math.sqrt(ratio))


def learning_rate(step: int, max_steps: int, peak: float, schedule: ScheduleSection) -> float:
    """The learning rate of optimizer step `step`, counted from 0. What ends at 0 would be there at `max_steps`.

    Stateless, and never given to `accelerator.prepare`: a prepared scheduler steps once per process
    (accelerate/scheduler.py, AcceleratedScheduler.step).
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, max_steps - warmup)
    match schedule.name:
        case "constant":
            return peak
        case "linear":
            return peak * (1.0 - progress)
        case "cosine":
            return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "inverse_sqrt":
            return peak * math.sqrt(warmup / (step + 1))
        case "wsd":
            assert schedule.decay_steps is not None
            return peak * min(1.0, (max_steps - step) / schedule.decay_steps)
