"""Names, bounds and defaults of DeepSpeed's configuration, asked of the installed package.

    python -m benchmarks.deepspeed_facts

Writes cookbook/config/deepspeed_facts.json and cookbook/config/owners/deepspeed.json, in seconds; tests compare both
with the package.
"""

import inspect
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion
from deepspeed.runtime import config_utils, lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from pydantic import BaseModel

from benchmarks import owner_schemas

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
OTHER_OPTIMIZERS = (DeepSpeedCPUAdam, FusedLamb, FusedLion)
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


class AskedKeys:
    def __init__(self, section: "Asked") -> None:
        self.section = section

    def __contains__(self, key: object) -> bool:
        return key in self.section

    def __iter__(self) -> Iterator[str]:
        Asked.spread = self.section.path
        return iter(self.section)


class Asked(dict[str, Any]):
    """A configuration that records which keys it is asked for, by path, each with the default that goes with it."""

    keys_asked: ClassVar[dict[tuple[str, ...], list[Any]]] = {}
    spread: ClassVar[tuple[str, ...] | None] = None
    """The section that became the arguments of a model, at last."""

    def __init__(self, path: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.path = path

    def record(self, key: str, *default: Any) -> None:
        known = self.keys_asked.setdefault((*self.path, key), [""])
        if default and len(known) == 1:
            known += default

    def __contains__(self, key: object) -> bool:
        self.record(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.record(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.record(key, default)
        return super().get(key, default)

    def keys(self) -> Any:
        return AskedKeys(self)

    def __iter__(self) -> Iterator[str]:  # else `**` copies the dictionary without a call of `keys`
        return super().__iter__()

    def __copy__(self) -> "Asked":
        return self

    def section(self, path: tuple[str, ...]) -> None:
        """Add an empty section, with those around it."""
        section = self
        for depth, name in enumerate(path):
            if not dict.__contains__(section, name):
                dict.__setitem__(section, name, Asked(path[: depth + 1]))
            section = dict.__getitem__(section, name)


def keys_of_model(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """The fields of a model by the paths of their aliases, with those of the models in it."""
    for name, field in model.model_fields.items():
        default = field.default
        try:
            known = [json.loads(json.dumps(getattr(default, "value", default)))]
        except TypeError:  # none, or no value of JSON
            known = []
        kinds = (field.annotation, *get_args(field.annotation))
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        here = (*path, field.alias or name)
        yield here, ["" if inner else inspect.formatannotation(field.annotation), *known * (inner is None)]
        if inner is not None:
            yield from keys_of_model(inner, here)


def keys() -> dict[str, Any]:
    """Keys that DeepSpeed reads of a JSON, as in `owner_schemas`: asked with none, and with each section alone."""
    keys_of_models: dict[tuple[str, ...], list[Any]] = {}
    make_model = config_utils.DeepSpeedConfigModel.__init__

    def note_model(self: Any, *arguments: Any, **given: Any) -> None:
        kind, path = type(self), Asked.spread or ()
        # that of all monitors is made of sections
        if path or {(name,) for name in kind.model_fields} <= Asked.keys_asked.keys():
            keys_of_models.update(keys_of_model(kind, path))
        Asked.spread = None
        make_model(self, *arguments, **given)

    config_utils.DeepSpeedConfigModel.__init__ = note_model
    tried: set[tuple[str, ...]] = set()
    while new := {(), *Asked.keys_asked} - tried:
        for path in sorted(new):
            tried.add(path)
            configuration = Asked()
            dict.__setitem__(configuration, "train_batch_size", 1)
            configuration.section(path)
            Asked.spread = None
            try:
                DeepSpeedConfig(configuration)
            except Exception as error:  # a number in its place, or a section that DeepSpeed has removed
                print(f"{'.'.join(path)}: {str(error)[:80]}")
    config_utils.DeepSpeedConfigModel.__init__ = make_model
    defaults = Asked.keys_asked | keys_of_models
    for section, kinds in {
        "optimizer": (*OPTIMIZERS.values(), *OTHER_OPTIMIZERS),
        "scheduler": [getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES],
    }.items():
        for kind in kinds:
            for name in inspect.signature(kind).parameters:
                default = plain_defaults(kind).get(name)
                known = defaults.setdefault((section, "params", name), [""] if default is None else ["", default])
                if name != "optimizer" and known[1:] not in ([], [default]):
                    defaults[section, "params", name] = known[:1]
        defaults.pop((section, "params", "optimizer" if section == "scheduler" else "params"), None)
    described = {".".join(path): entry for path, entry in sorted(defaults.items())}
    return {"version": version("deepspeed"), "classes": {"DeepSpeedConfig": described}}


if __name__ == "__main__":
    FACTS.write_text(json.dumps(facts(), indent=1) + "\n", encoding="utf-8")
    (owner_schemas.OWNERS / "deepspeed.json").write_text(owner_schemas.dumps(keys()), encoding="utf-8")
