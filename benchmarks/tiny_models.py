"""Small random models of every causal type of the installed transformers, with all kinds of layers that a type has."""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cookbook.facts.tiny_types import LARGEST, small_values
from cookbook.training.checkpoint.write_model import saved_buffers
from cookbook.training.models.sample_draws import drawn_parts

DEFAULTS = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        }
    }
}
"""Where transformers' own are not valid."""
STDS = {"zamba": 0.05, "zamba2": 0.1}
"""Deviation of weights, where the usual ones blow a last bit up, a hundred times as far as in Llama."""


def default_config(model_type: str) -> PreTrainedConfig:
    """With transformers' sizes."""
    return AutoConfig.for_model(model_type, **DEFAULTS.get(model_type, {}))


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A small configuration that has all kinds of layers of this architecture."""
    written = default_config(model_type).to_dict()
    config = AutoConfig.for_model(model_type, **small_values(written))
    for key in drawn_parts(config):
        setattr(config, key, 0.0)
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, 2, 1
    return config


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Random weights, large enough for attention to matter; on the CPU, float32."""
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(copy.deepcopy(config)).num_parameters()
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters; its sizes have other names")
    # What a library draws for vectors, as the decay of a state, would else be another model in each process.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=STDS.get(config.model_type, 0.2), generator=generator)
    for name in saved_buffers(model):
        buffer = model.get_buffer(name)
        if buffer.is_floating_point():
            buffer += 0.1 * torch.rand(buffer.shape, generator=generator)
    return model
