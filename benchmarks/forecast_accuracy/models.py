"""The models that published runs trained: their configuration for transformers, and their sizes for the speed."""

from functools import cache
from typing import Any, NamedTuple

from transformers import AutoConfig, PreTrainedConfig

from cookbook.facts.offline import known_model
from cookbook.forecast.costs.flops import ModelSizes


class Shape(NamedTuple):
    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    vocab: int


def _gpt(layers: int, hidden: int, heads: int, vocab: int) -> Shape:
    """Its inner layer has four times the width, and as many heads are for keys."""
    return Shape(layers, hidden, 4 * hidden, heads, heads, vocab)


LLAMAS = {
    "Llama-3-8B": Shape(32, 4096, 14336, 32, 8, 128256),
    "Llama-3-70B": Shape(80, 8192, 28672, 64, 8, 128256),
    "Llama-3-405B": Shape(126, 16384, 53248, 128, 8, 128256),
    "Llama-2-7B": Shape(32, 4096, 11008, 32, 32, 32000),
    "Llama-2-13B": Shape(40, 5120, 13824, 40, 40, 32000),
    "Llama-2-70B": Shape(80, 8192, 28672, 64, 8, 32000),
    "CodeLlama-34B": Shape(48, 8192, 22016, 64, 8, 32000),
    "Yi-34B": Shape(60, 7168, 20480, 56, 8, 64000),
}
GPTS = {
    "MPT-125M": _gpt(12, 768, 12, 50432),
    "MPT-350M": _gpt(24, 1024, 16, 50432),
    "MPT-760M": _gpt(24, 1536, 12, 50432),
    "MPT-1B": _gpt(24, 2048, 16, 50432),
    "MPT-3B": _gpt(32, 2560, 20, 50432),
    "MPT-7B": _gpt(32, 4096, 32, 50432),
    "MPT-13B": _gpt(40, 5120, 40, 50432),
    "MPT-30B": _gpt(48, 7168, 56, 50432),
    "MPT-70B": _gpt(80, 8192, 64, 50432),
    "GPT-3.6B": _gpt(30, 3072, 32, 51200),
    "GPT-7.5B": _gpt(36, 4096, 32, 51200),
    "GPT-18B": _gpt(40, 6144, 48, 51200),
    "GPT-175B": _gpt(96, 12288, 96, 51200),
    "GPT-530B": _gpt(105, 20480, 128, 51200),
}
"""Embedding and head are one, and queries, keys and values one product."""
QWEN3 = {
    "Qwen3-1.7B": Shape(28, 2048, 6144, 16, 8, 151936),
    "Qwen3-8B": Shape(36, 4096, 12288, 32, 8, 151936),
    "Qwen3-14B": Shape(40, 5120, 17408, 40, 8, 151936),
    "Qwen3-32B": Shape(64, 5120, 25600, 64, 8, 151936),
}
NEMOTRON_LAYERS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
OTHERS: dict[str, dict[str, Any]] = {
    **{
        name: dict(
            model_type="qwen3",
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_heads,
            head_dim=128,
            rms_norm_eps=1e-6,
            tie_word_embeddings=name == "Qwen3-1.7B",
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
        for name, shape in QWEN3.items()
    },
    "Nemotron-3-Nano-30B-A3B": dict(
        model_type="nemotron_h",
        vocab_size=131072,
        hidden_size=2688,
        layers_block_type=[NEMOTRON_LAYERS[kind] for kind in 5 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME"],
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=1856,
        mamba_num_heads=64,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
        max_position_embeddings=262144,
    ),
    "Qwen-72B (v1)": dict(
        model_type="qwen2",
        vocab_size=152064,
        hidden_size=8192,
        intermediate_size=24576,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=64,
        tie_word_embeddings=False,
    ),
    "Qwen1.5-7B": dict(
        model_type="qwen2",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-72B": dict(
        model_type="qwen2",
        vocab_size=152064,
        hidden_size=8192,
        intermediate_size=29568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "SmolLM2-1.7B": dict(
        model_type="llama",
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=32,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-14B": dict(
        model_type="qwen2",
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "phi-1.5": dict(
        model_type="phi",
        vocab_size=51200,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        partial_rotary_factor=0.5,
        hidden_act="gelu_pytorch_tanh",  # in one kernel, as litgpt has it
    ),
    "StableLM-Alpha-3B": dict(
        model_type="gpt_neox",
        vocab_size=50688,
        hidden_size=4096,
        intermediate_size=16384,
        num_hidden_layers=16,
        num_attention_heads=32,
        rotary_pct=0.25,
        tie_word_embeddings=False,
    ),
}
KNOWN = {
    "Llama-3-8B": "NousResearch/Meta-Llama-3.1-8B",
    "Llama-3.1-8B": "NousResearch/Meta-Llama-3.1-8B",
    "Llama-3.2-3B": "unsloth/Llama-3.2-3B",
    "Qwen2-7B": "Qwen/Qwen2.5-7B",
    "Qwen2.5-7B": "Qwen/Qwen2.5-7B",
    "Mistral-7B": "mistral-community/Mistral-7B-v0.2",
    "Qwen3-0.6B": "Qwen/Qwen3-0.6B-Base",
    "Qwen3-4B": "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B-Base",
}
"""By their name in recipes/offline_facts.json."""


@cache
def config_of(model: str) -> PreTrainedConfig:
    """The structure of a model."""
    if model in KNOWN:
        facts = known_model(KNOWN[model])
        assert facts is not None
        return AutoConfig.for_model(**facts["config"])
    if model in OTHERS:
        return AutoConfig.for_model(**OTHERS[model])
    shape = LLAMAS[model]
    return AutoConfig.for_model(
        "llama",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )


def sizes_of(model: str) -> ModelSizes:
    """The sizes of a Llama or a GPT, without norms, biases and positions."""
    is_gpt = model in GPTS
    layers, hidden, inner, heads, key_heads, vocab = (GPTS if is_gpt else LLAMAS)[model]
    head_dim = hidden // heads
    of_layer = hidden * (2 * hidden + 2 * key_heads * head_dim + (2 if is_gpt else 3) * inner)
    whole = layers * of_layer + (1 if is_gpt else 2) * vocab * hidden
    return ModelSizes(
        num_parameters=whole,
        num_trained=whole,
        num_matrix=layers * of_layer,
        num_matrix_trained=layers * of_layer,
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_key_heads=key_heads,
        head_dim=head_dim,
        vocab=vocab,
        column_matrices=layers * (2 if is_gpt else 5),
        row_matrices=layers * 2,
        is_embedding_divided=True,
        is_tied=is_gpt,
    )
