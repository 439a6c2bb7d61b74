"""Tiny models with an image tower, and their text-only twins: the same language weights in a folder of their own."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoConfig

from benchmarks.tiny_models import tiny_config
from cookbook.facts.language_part import language_config
from cookbook.facts.model_types import look_up
from cookbook.facts.tiny_types import SIZES

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_heads": 2,
    "head_dim": 16,
    "architecture": "test_vit",  # of timm
    "image_size": 28,
    "patch_size": 14,
    "embed_dim": 32,
    "out_hidden_size": 64,
    "hidden_dim": 32,
    "n_layers": 2,
    "d_model": 32,
    "vocab_size": 64,
    "num_position_embeddings": 16,
    "projector_hidden_size": 32,
    "text_hidden_size": 64,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
}
"""Given to the configuration of a tower as far as it has them."""
FIRST_OF_IMAGES = 500
"""Token ids from here on stand for images."""


def whole_config(model_type: str) -> Any:
    """A small configuration of a model with a tower."""
    defaults = AutoConfig.for_model(model_type)
    text = defaults.get_text_config()
    if look_up(text.model_type).computes_as:
        sizes = {key: size for key, size in SIZES.items() if key in text.to_dict()}
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        small = {**sizes, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
    else:
        small = tiny_config(text.model_type).to_dict()
    parts: dict[str, Any] = {"text_config": small}
    for key in sorted(defaults.sub_configs.keys() - {"text_config"}):
        part = getattr(defaults, key, None) or defaults.sub_configs[key]()
        written = part.to_dict()
        sizes = {name: size for name, size in VISION.items() if written.get(name) is not None}
        sizes |= {"image_size": [28, 28]} if isinstance(written.get("image_size"), list | tuple) else {}
        parts[key] = {"model_type": part.model_type, **sizes}
    whole = AutoConfig.for_model(model_type, **parts)
    names = [name for name in whole.to_dict() if name.endswith(("_token_id", "_token_index"))]
    for number, name in enumerate(name for name in names if name.partition("_")[0] not in ("pad", "eos", "bos")):
        setattr(whole, name, FIRST_OF_IMAGES + number)
    return whole


def whole_model(config: Any) -> Any:
    """Random weights, large enough for attention to matter."""
    model = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](copy.deepcopy(config)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return model


def twin_of(model: Any) -> Any:
    """The language part of a model as one of its own, by names alone."""
    text = language_config(model.config)
    twin = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)](text).eval()
    decoder = model.get_decoder()
    inside = getattr(decoder, "model", decoder).state_dict()
    head = {"lm_head.weight": model.get_output_embeddings().weight}
    twin.load_state_dict({f"model.{name}": tensor for name, tensor in inside.items()} | head)
    return twin


def write_pair(folder: Path, config: Any, tokenizer: Any) -> tuple[Path, Path]:
    """Folders of a model with a tower, and of its twin."""
    model = whole_model(config)
    for name, saved in (("whole", model), ("twin", twin_of(model))):
        saved.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "whole", folder / "twin"
