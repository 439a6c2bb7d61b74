"""Which models can be divided over which mesh, decided from a model's configuration. No torch.

A configuration is transformers', or the values of a `config.json`, which may lack some: what is missing is not judged.
"""

from typing import Any

from cookbook.config.mesh import Mesh
from cookbook.planning.costs.flops import num_experts
from cookbook.planning.packing import packing_problem

PIPELINED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that can be cut into stages: between embedding and norm their code is the layers and nothing else.
Gemma's scales the embeddings there, which each stage would repeat."""

TENSOR_PARALLEL = (
    "arcee",
    "gemma3_text",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
)
"""Model types for which docs/architectures.md has the curve of one process. transformers has plans for more: some leave
matrices of experts' routers whole, and a whole weight between sharded ones gets a part of its gradient, as Apertus's
activations do (the loss was off by 3e-4 after four steps, and nothing failed)."""

EXPERT_PARALLEL = ("deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen3_moe", "qwen3_next")
"""Model types for which docs/architectures.md has the curve of one process."""


def expert_problem(config: Any, size: int) -> str | None:
    """Why so many processes cannot share a model's experts, or None."""
    if size == 1:
        return None
    count = num_experts(config)
    if config.model_type not in EXPERT_PARALLEL:
        if count == 1:
            return f"{config.model_type} has no experts; use fsdp2"
        return (
            f"{config.model_type} is not among the architectures whose curve under expert parallel was compared; use"
            " fsdp2 or zero3"
        )
    return (
        f"{count} experts cannot be divided over ep_size {size}; use a divisor" if count > 1 and count % size else None
    )


def pipeline_problem(config: Any, num_stages: int, chunks: int = 1) -> str | None:
    """Why a model cannot be cut into so many stages of so many ranges of layers, or None."""
    if num_stages == 1:
        return None
    if config.model_type not in PIPELINED:
        return f"{config.model_type} is not one of the models that a pipeline is known to suit: {', '.join(PIPELINED)}"
    layers = getattr(config, "num_hidden_layers", num_stages * chunks)
    if layers < num_stages * chunks:
        each = f" x pp_chunks {chunks}" if chunks > 1 else ""
        return f"{layers} layers cannot be divided over pp_size {num_stages}{each}"
    return None


def tensor_problem(config: Any) -> str | None:
    """Why tensor parallel cannot train this model, or None."""
    if config.model_type in TENSOR_PARALLEL:
        return None
    return f"{config.model_type} is not among the architectures whose curve under tensor parallel was compared"


def _undivided(config: Any, size: int) -> str | None:
    """What of a model so many processes cannot share under tensor parallel, or None. transformers 5.23 shards the
    matrices of attention between heads, and does not check that."""
    heads = getattr(config, "num_attention_heads", 0)
    counts = {
        "query heads": heads,
        "key heads": getattr(config, "num_key_value_heads", None) or heads,
        "inner features": getattr(config, "intermediate_size", 0),
    }
    found = [f"{count} {what}" for what, count in counts.items() if count % size]
    return f"{' and '.join(found)} cannot be divided over tp_size {size}; use a divisor" if found else None


def sequence_problem(config: Any, size: int) -> str | None:
    """Why `size` ranks cannot share the tokens of this model's rows, or None: each takes a part of the heads."""
    if problem := packing_problem(config):
        return f"sequence parallel needs the attention of packed rows, and {problem}"
    heads = getattr(config, "num_attention_heads", 0)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0):
        return None
    return f"{heads} query and {key_heads} key heads cannot be divided over sp_size {size}; use a divisor of both"


def mesh_problem(config: Any, mesh: Mesh) -> str | None:
    """Why a model cannot be trained on this mesh, or None."""
    if mesh.tensor > 1 and (problem := tensor_problem(config)):
        return f"{problem}; use fsdp2 or zero3"
    if mesh.tensor > 1 and (problem := _undivided(config, mesh.tensor)):
        return problem
    if mesh.sequence > 1 and (problem := sequence_problem(config, mesh.sequence)):
        return problem
    return expert_problem(config, mesh.expert) or pipeline_problem(config, mesh.pipeline, mesh.chunks)
