"""Keys of a peft folder's adapter_config.json, all of them, compared with what is computed here."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from cookbook.config.sections import AdapterSection

HARMLESS = frozenset(
    {
        # names and versions
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config"),
        # read in training alone, where the recipe has its own, or to find the first weights
        *("lora_dropout", "eva_config"),
        # which layers there are: the names and shapes of the tensors are compared
        *("task_type", "target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
        *("layers_pattern", "bias"),
        # how a layer stores its weight, which peft corrects by the layer's class
        "fan_in_fan_out",
    }
)
"""Keys that do not change what the tensors of an adapter compute."""
LEAVE_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` for first weights that take nothing out of the base."""
TAKEN_AGAIN = ("pissa", "olora", "mica")
"""Values for what peft computes from the base alone, and takes out of it again when it opens the folder. It draws
`pissa_niter_N` anew, and for others it needs data or gradients: each opening gives another model.
"""
KEYS = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora", "use_dora": "name"}
"""peft's names for keys of a recipe's adapter."""
WRITTEN = frozenset({*KEYS, "modules_to_save", "trainable_token_indices"})
"""Keys that the recipe of a run decides."""
OPENED = WRITTEN | {"rank_pattern", "alpha_pattern", "init_lora_weights", "lora_bias", "layer_replication"}
"""Keys that a model opened by peft follows, of `init_lora_weights` what is `TAKEN_AGAIN`."""


def differences_from_recipe(saved: Mapping[str, Any], settings: AdapterSection) -> Iterator[str]:
    """Settings of an adapter that a run with the recipe would compute in another way."""
    ours = dict.fromkeys(KEYS) | {
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "use_rslora": settings.rslora,
        "use_dora": settings.name == "dora",
    }
    for key in ("peft_type", "r", "lora_alpha"):
        if not saved.get(key):
            yield f"whose adapter_config.json has no {key}; fetch it again, or correct it"
            return
    for key, value in _differences(saved, ours):
        own = KEYS.get(key)
        if own is None:
            yield f"whose adapter_config.json has {_explain_unread_key(key, value)}"
        elif own == "name":
            yield f"whose {key} is {value}, and adapter.name is {settings.name}; write adapter.name: " + (
                "dora" if value else "lora"
            )
        else:
            yield f"whose {key} is {value}, and adapter.{own} is {ours[key]}; write adapter.{own}: {json.dumps(value)}"


def differences_from_layers(saved: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """Settings of an adapter that are not followed when its folder is opened.

    Args:
        read: keys that it follows: `WRITTEN` or `OPENED`.
    """
    return [
        _explain_unread_key(key, value)
        for key, value in _differences(saved, {})
        if key not in read or (key == "init_lora_weights" and value not in TAKEN_AGAIN)
    ]


def _differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys with the saved value where it is neither ours nor, if we have none, peft's default."""
    from peft import LoraConfig

    defaults = LoraConfig().to_dict()
    ours, saved = defaults | ours, defaults | saved  # a key that its peft did not have yet has the default
    for key in sorted(saved.keys() - HARMLESS):
        if key == "init_lora_weights" and saved[key] in LEAVE_THE_BASE:
            continue
        # None, False and an empty list all say that nothing is asked for.
        if (saved[key] or None) != (ours.get(key) or None):
            yield key, saved[key]


def _explain_unread_key(key: str, value: Any) -> str:
    import peft
    from peft import LoraConfig

    what = f"{key}: {json.dumps(value):.60}"
    if key not in LoraConfig.__dataclass_fields__:
        how = f"if the adapter computes the same without {key}, take it out of the file"
        return f"{what}, which peft {peft.__version__} does not know; {how}"
    return f"{what}, which is not followed here; convert or merge it with peft first (docs/adapters.md)"
