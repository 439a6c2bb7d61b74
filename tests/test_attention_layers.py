"""The sizes of every causal model of transformers are read, or it is refused with a reason. No run.

python -m pytest -q tests/test_attention_layers.py
"""

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from conftest import ROOT
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks import architectures
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.facts.attention_layers import attention_layers
from cookbook.forecast.costs.flops import attention_flops, sizes_of
from cookbook.forecast.skeleton import skeleton
from cookbook.system.files import RecipeError
from cookbook.training.models.structure import not_served

NO_LAYERS = {"biogpt", "ctrl", "git", "openai-gpt", "xlm"}
"""Old ones, whose code does not name its layers."""


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    """One that trains all weights."""
    return load_recipe(ROOT / "recipes" / "quickstart.yaml")


def config_of(model_type: str) -> Any:
    """A small configuration, or transformers' own; None if it has none that is valid."""
    for make in (architectures.tiny_config, AutoConfig.for_model):
        with contextlib.suppress(Exception):  # sizes that do not suit it
            return make(model_type)
    return None


def test_sizes_of_every_type_are_read_and_its_parameters_are_transformers_count(recipe: Recipe):
    refused, counted = {}, set()
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config = config_of(model_type)
        if config is None or not_served(config):
            continue
        try:
            sizes = sizes_of(config, skeleton(config, recipe))
        except RecipeError as error:
            refused[model_type] = str(error)
            continue
        with torch.device("meta"):
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        assert sizes.num_parameters == sum(weight.numel() for weight in model.parameters()), model_type
        assert sizes.num_layers > 0 and sizes.num_matrix > 0, model_type
        counted.add(model_type)
    assert all(f"model {name}: transformers" in why and "\n" not in why for name, why in refused.items()), refused
    named = {name for name, why in refused.items() if "does not name its layers" in why}
    assert named == NO_LAYERS & refused.keys() and len(refused) < 14
    assert len(counted) > 110 and {"gemma4_text", "mamba2", "rwkv", "zamba2", "gpt_oss", "deepseek_v32"} <= counted


BY_HAND = {
    # type: number of layers with attention, by heads, size of a head and window
    "gemma4_text": {(8, 256, 512): 25, (8, 512, None): 5},
    "deepseek_v3": {(128, (192 + 128) / 2, None): 61},
    "dots3_note_text": {(128, (192 + 128) / 2, None): 13, (64, (256 + 128) / 2, 512): 33},
    "falcon_h1": {(32, 128, None): 32},
    "longcat_flash": {(64, (192 + 128) / 2, None): 56},
    "mamba2": {},
    "nemotron_h": {(32, 128, None): 1},
    "qwen3_next": {(16, 256, None): 12},
    "rwkv": {},
    "zamba2": {(32, 160, None): 9},
}


@pytest.mark.parametrize("model_type", BY_HAND)
def test_layers_have_the_heads_and_windows_that_their_configuration_says(model_type: str):
    layers = attention_layers(AutoConfig.for_model(model_type))
    assert Counter((layer.num_heads, layer.head_dim, layer.window) for layer in layers) == BY_HAND[model_type]


def test_attention_of_layers_that_differ_is_counted_layer_by_layer(recipe: Recipe):
    config = AutoConfig.for_model("gemma4_text")
    sizes = sizes_of(config, skeleton(config, recipe))
    in_window, whole = 512 - 512**2 / 8192, 2048
    assert attention_flops(sizes, 4096) == 4 * 8 * (25 * 256 * in_window + 5 * 512 * whole)
    config = AutoConfig.for_model("mamba2")
    assert attention_flops(sizes_of(config, skeleton(config, recipe)), 4096) == 0


def test_a_kind_of_layer_that_is_not_known_is_refused():
    config = AutoConfig.for_model("llama")
    config.layer_types = ["full_attention"] * 31 + ["another"]
    with pytest.raises(RecipeError, match="model llama: layers of another are not known"):
        attention_layers(config)
