"""What a recipe has of the things that a strategy file may speak of too (`strategy_keys.Claim`). No torch."""

import math
from typing import Any

from cookbook.config.recipe import Recipe


def owned(recipe: Recipe) -> dict[str, Any]:
    """The recipe's values by the keys of claims; micro-batches of a step, `~accumulation`, are the plan's."""
    optim, schedule, scale = recipe.optim, recipe.schedule, recipe.loss_scaling
    found: dict[str, Any] = {
        "mixed_precision": recipe.mixed_precision,
        "~bf16": recipe.compute_precision == "bf16",
        "~fp16": recipe.compute_precision == "fp16",
        "model.gradient_checkpointing": bool(recipe.model.gradient_checkpointing),
        "batch.global_batch_size": recipe.batch.global_batch_size,
        "batch.micro_batch_size": recipe.batch.micro_batch_size,
        "optim.gradient_dtype": optim.gradient_dtype,
        "schedule.name": schedule.name,
        "schedule.warmup_steps": schedule.warmup_steps,
        "run.max_steps": recipe.run.max_steps,
    }
    found |= {f"optim.{key}": getattr(optim, key, None) for key in type(optim).model_fields}
    found["optim.max_grad_norm"] = optim.max_grad_norm or 0.0
    if scale is not None:
        found["~initial_scale_power"] = math.log2(scale.initial)
        found |= {f"loss_scale.{key}": getattr(scale, key) for key in ("window", "hysteresis", "minimum")}
    return found
