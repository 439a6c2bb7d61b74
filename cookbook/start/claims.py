"""The recipe's values for everything that a strategy file may claim (`strategy_keys.Claim`). No torch."""

import math
from collections.abc import Mapping
from typing import Any

KEYS = {
    "batch": ("global_batch_size", "micro_batch_size"),
    "schedule": ("name", "warmup_steps", "warmup"),
    "run": ("max_steps",),
}
"""Keys whose values need no translation, by section."""


def claimed_values(valid: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's values by the keys of claims, as far as its sections are valid. The plan has that of micro-batches,
    `~accumulation`.

    Args:
        valid: see `Draft`.
    """
    sections = {name: valid[name] for name in KEYS if valid.get(name) is not None}
    values: dict[str, Any] = {
        f"{name}.{key}": getattr(section, key) for name, section in sections.items() for key in KEYS[name]
    }
    if (precision := valid.get("mixed_precision")) is not None:
        is_bf16 = precision in ("bf16", "fp8")  # as `Recipe.compute_precision`
        values |= {"mixed_precision": precision, "~bf16": is_bf16, "~fp16": precision == "fp16"}
    if (model := valid.get("model")) is not None:
        values["model.gradient_checkpointing"] = bool(model.gradient_checkpointing)
    if (optim := valid.get("optim")) is not None:
        values |= {f"optim.{key}": getattr(optim, key, None) for key in type(optim).model_fields}
        values["optim.max_grad_norm"] = optim.max_grad_norm or 0.0
        if "optim.momentum" in values:
            values["optim.momentum"] = optim.momentum_in_effect
    if (schedule := valid.get("schedule")) is not None and optim is not None:
        values["~min_share"] = schedule.least / optim.learning_rate
    if (scale := valid.get("loss_scaling")) is not None:
        values["~initial_scale_power"] = math.log2(scale.initial)
        values |= {f"loss_scale.{key}": getattr(scale, key) for key in ("window", "hysteresis", "minimum")}
    return values
