"""Names, bounds and defaults of DeepSpeed's configuration, read from the installed package.

    python benchmarks/deepspeed_facts.py

Writes cookbook/config/deepspeed_facts.json, in seconds; a test compares the file with the package.
"""

import inspect
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from pydantic import BaseModel

FACTS = Path(__file__).resolve().parents[1] / "cookbook" / "config" / "deepspeed_facts.json"
BLOCKS: dict[str, type[BaseModel]] = {
    "fp16": DeepSpeedFP16Config,
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
}
OPTIMIZERS: dict[str, type] = {
    "adam": FusedAdam,
    "adamw": FusedAdam,
    "adam torch_adam": torch.optim.Adam,
    "adamw torch_adam": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
"""Classes that `DeepSpeedEngine._configure_basic_optimizer` takes for a `type`, with `torch_adam` or without. On the
host it takes DeepSpeedCPUAdam, whose defaults of these keys are those of FusedAdam."""
KEYS_OF_OPTIMIZERS = ("lr", "betas", "eps", "weight_decay", "momentum")


def plain_defaults(function: Any) -> dict[str, Any]:
    """Parameters of a signature with defaults that a JSON can have."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    plain = {name: value for name, value in defaults.items() if isinstance(value, bool | int | float | str | tuple)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def fields(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """The fields of a model by their aliases, each with its other name, its least value, its default, and whether it
    may be null.
    """
    described = {}
    for name, field in model.model_fields.items():
        facts: dict[str, Any] = {"field": name} if field.alias else {}
        if type(None) in get_args(field.annotation):
            facts["null"] = True
        for bound in field.metadata:
            facts |= {key: getattr(bound, key) for key in ("gt", "ge") if hasattr(bound, key)}
        if isinstance(field.default, bool | int | float):
            facts["default"] = json.loads(json.dumps(field.default))
        described[field.alias or name] = facts
    return described


def facts() -> dict[str, Any]:
    """All facts, as the file has them."""
    return {
        "version": version("deepspeed"),
        "blocks": {path: fields(model) for path, model in BLOCKS.items()},
        "optimizers": {
            name: {key: value for key, value in plain_defaults(kind).items() if key in KEYS_OF_OPTIMIZERS}
            for name, kind in OPTIMIZERS.items()
        },
        "schedulers": {
            name.lower(): plain_defaults(getattr(lr_schedules, name)) for name in lr_schedules.VALID_LR_SCHEDULES
        },
    }


if __name__ == "__main__":
    FACTS.write_text(json.dumps(facts(), indent=1) + "\n", encoding="utf-8")
