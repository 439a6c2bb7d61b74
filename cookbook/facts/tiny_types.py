"""Small sizes for every causal type of transformers, under the names that its configurations have. No torch."""

import math
from typing import Any

from cookbook.facts.model_types import look_up

LARGEST = 30_000_000
"""Parameters of a model that is tiny."""
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 128,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_num_experts": 4,
    "moe_k": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_expert_group": 1,
    "num_experts_per_token": 2,
    # latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    # linear attention, state space
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_n_groups": 1,
    "state_size": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 16,
    "expand": 2,
    "block_size": 16,
    # further names of the sizes above
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_inner": 96,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "num_heads": 4,
    "num_layers": 2,
    "attention_heads": 4,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 512,
    "num_kv_shared_layers": 0,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "rotary_dim": 8,
    "n_hidden": 64,
    "emb_dim": 64,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "max_seq_len": 128,
    "mamba_ngroups": 1,
    "n_mamba_heads": 2,
    "adapter_rank": 8,
    "router_hidden_size": 32,
    # sparse attention: exact ties of its scores, see tests/test_architectures.py, are as rare as in published models
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 32,
}
"""Given to a configuration as far as it has them."""
LAYER_KINDS = ("layer_types", "mlp_layer_types")
OF_FILES = ("architectures", "_name_or_path", "transformers_version", "quantization_config")
"""Keys of a large model's files."""


def small_values(written: dict[str, Any]) -> dict[str, Any]:
    """Small values of those keys that a configuration has, and of the configurations in it, with all its kinds of
    layers.
    """
    return {**_sizes(written), **look_up(written["model_type"]).tiny}


def _sizes(written: dict[str, Any]) -> dict[str, Any]:
    """Small values of those keys that a configuration has, and of the configurations in it."""
    sizes = {
        key: value
        for key, value in SIZES.items()
        if written.get(key) is not None or (key == "head_dim" and key in written)
    }
    if written.get("kv_lora_rank") is not None:  # latent attention has keys for each head, of which a part is rotated
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
        sizes |= (
            {"head_dim": SIZES["qk_rope_head_dim"]} if written.get("head_dim") == written["qk_rope_head_dim"] else {}
        )
    kinds = {key: list(dict.fromkeys(written[key])) for key in LAYER_KINDS if written.get(key)}
    if kinds:
        sizes["num_hidden_layers"] = count = max(2, *map(len, kinds.values()))
        sizes |= {key: (names * count)[:count] for key, names in kinds.items()}
    for key, value in written.items():
        if isinstance(value, dict) and "model_type" in value:
            sizes[key] = {"model_type": value["model_type"], **_sizes(value)}
    return sizes


def fixed_sizes(config: Any, vocab_size: int = SIZES["vocab_size"], least_layers: int = 2) -> Any:
    """A small configuration with the sizes above; all else as it is."""
    full = config.to_dict()
    values = full | small_values(full) | {"vocab_size": full_rows(vocab_size)}
    layers = max(least_layers, values.get("num_hidden_layers", 0))
    for key in (*LAYER_KINDS, "layers_block_type"):
        if kinds := values.get(key):
            values[key] = (list(kinds) * layers)[:layers]
    if "num_hidden_layers" in values:
        values["num_hidden_layers"] = layers
    return type(config).from_dict({key: value for key, value in values.items() if key not in OF_FILES})


def small_default(config: Any, vocab_size: int = SIZES["vocab_size"], least_layers: int = 2) -> Any:
    """A small configuration with transformers' defaults for all but the sizes above and the embeddings: some sizes
    follow from others, and would stay large in a copy of the large model's.
    """
    tied = {key: getattr(config, key) for key in ("tie_word_embeddings",) if hasattr(config, key)}
    return fixed_sizes(type(config)(**small_values(config.to_dict()), **tied), vocab_size, least_layers)


def full_rows(vocab_size: int) -> int:
    """Rows of an embedding, which products of 16 bits and tensor parallel can divide."""
    return math.ceil(vocab_size / 64) * 64
