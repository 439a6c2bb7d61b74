"""What a recipe has of the things that a strategy file may speak of too (`strategy_keys.Claim`). No torch."""

import math
from collections.abc import Mapping
from typing import Any

from cookbook.config.recipe import Recipe

KEYS = {
    "batch": ("global_batch_size", "micro_batch_size"),
    "schedule": ("name", "warmup_steps"),
    "run": ("max_steps",),
}
"""Those of sections that need no translation."""


def owned(recipe: Recipe) -> dict[str, Any]:
    """The recipe's values by the keys of claims; micro-batches of a step, `~accumulation`, are the plan's."""
    return owned_by({name: getattr(recipe, name) for name in (*Recipe.model_fields, "loss_scaling")})


def owned_by(found: Mapping[str, Any]) -> dict[str, Any]:
    """The same by the recipe's keys; those with mistakes are left out, and so is what they would have."""
    sections = {name: found[name] for name in KEYS if found.get(name) is not None}
    values: dict[str, Any] = {
        f"{name}.{key}": getattr(section, key) for name, section in sections.items() for key in KEYS[name]
    }
    if (precision := found.get("mixed_precision")) is not None:
        is_bf16 = precision in ("bf16", "fp8")  # as `Recipe.compute_precision`
        values |= {"mixed_precision": precision, "~bf16": is_bf16, "~fp16": precision == "fp16"}
    if (model := found.get("model")) is not None:
        values["model.gradient_checkpointing"] = bool(model.gradient_checkpointing)
    if (optim := found.get("optim")) is not None:
        values |= {f"optim.{key}": getattr(optim, key, None) for key in type(optim).model_fields}
        values["optim.max_grad_norm"] = optim.max_grad_norm or 0.0
    if (schedule := found.get("schedule")) is not None and optim is not None:
        values["~min_share"] = schedule.least / optim.learning_rate
    if (scale := found.get("loss_scaling")) is not None:
        values["~initial_scale_power"] = math.log2(scale.initial)
        values |= {f"loss_scale.{key}": getattr(scale, key) for key in ("window", "hysteresis", "minimum")}
    return values
