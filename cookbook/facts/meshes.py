"""Checks whether a model can be divided over a mesh, from the model's configuration. No torch.

A configuration is transformers', or the values of a `config.json`, which may lack some: what is missing is not judged.
"""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from cookbook.config.mesh import Mesh
from cookbook.config.strategy import Strategy
from cookbook.facts.model_types import TYPES, look_up, why_not
from cookbook.facts.packing import packing_problem, short_window
from cookbook.system.console import several

BUCKET_BYTES = 25 * 2**20
"""Size of the gradients that copies of a part exchange at once, as DDP has it."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a configuration for the number of experts, by architecture."""
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k")
"""Keys for the number of them that a token passes through."""


def _size(config: Any, *names: str) -> int | None:
    """The value of the first of several keys that a configuration has; None if it has none, or no positive number."""
    text = config.get_text_config() if _is_whole(config) else config
    size = next((value for name in names if (value := getattr(text, name, None)) is not None), None)
    return size if isinstance(size, int) and size > 0 else None


def size_of_experts(config: Any, names: Sequence[str]) -> int | None:
    """The value of one of `EXPERTS` or `EXPERTS_OF_A_TOKEN`; None if a configuration has none, or several."""
    text = config.get_text_config() if _is_whole(config) else config
    apart = getattr(text, "ffn_config", None)  # DBRX's
    parts = [text, SimpleNamespace(**apart) if isinstance(apart, dict) else apart]
    values = (getattr(part, name, None) for part in parts for name in names)
    value = next((value for value in values if value is not None), None)
    if isinstance(value, list) and len(set(value)) == 1:  # Hunyuan's, of each layer
        value = value[0]
    return value if isinstance(value, int) and value > 0 else None


def _is_whole(config: Any) -> bool:
    """Return whether a configuration lacks nothing: an object of transformers, which has all defaults."""
    return hasattr(config, "get_text_config")


def expert_problem(config: Any, size: int) -> str | None:
    """Why so many processes cannot share a model's experts, or None."""
    if size == 1:
        return None
    unknown = f"{config.model_type} is not among the architectures whose curve under expert parallel was compared"
    problem = why_not(config.model_type, look_up(config.model_type).ep, unknown)
    count = size_of_experts(config, EXPERTS)
    if count is None and (_is_whole(config) or problem):
        return f"{config.model_type} has no experts; use fsdp2"
    if problem:
        return f"{problem}; use fsdp2 or zero3"
    if count is None or count % size == 0:
        return None
    return f"{several(count, 'expert')} cannot be divided over ep_size {size}; use a divisor"


def pipeline_problem(config: Any, num_stages: int, chunks: int = 1) -> str | None:
    """Why a model cannot be cut into so many stages of so many ranges of layers, or None."""
    if num_stages == 1:
        return None
    suited = ", ".join(name for name, facts in TYPES.items() if facts.pp is True)
    unknown = f"{config.model_type} is not one of the models that a pipeline is known to suit: {suited}"
    if problem := why_not(config.model_type, look_up(config.model_type).pp, unknown):
        return problem
    layers = _size(config, "num_hidden_layers")
    if layers is not None and layers < num_stages * chunks:
        times = f" x pp_chunks {chunks}" if chunks > 1 else ""
        return f"{several(layers, 'layer')} cannot be divided over pp_size {num_stages}{times}"
    return None


def tensor_problem(config: Any) -> str | None:
    """Why tensor parallel cannot train this model, or None."""
    unknown = f"{config.model_type} is not among the architectures whose curve under tensor parallel was compared"
    return why_not(config.model_type, look_up(config.model_type).tp, unknown)


def _division_problem(config: Any, size: int) -> str | None:
    """Name the parts of a model that `size` processes cannot share under tensor parallel, or return None."""
    # transformers 5.23 (distributed/tensor_parallel.py, ColwiseParallel) shards the matrices of attention between
    # heads, and does not check that they can be.
    heads = _size(config, "num_attention_heads")
    counts = {
        "query head": heads,
        "key head": _size(config, "num_key_value_heads") or heads,
        "inner feature": _size(config, "intermediate_size"),
    }
    parts = [several(count, part) for part, count in counts.items() if count and count % size]
    return f"{' and '.join(parts)} cannot be divided over tp_size {size}; use a divisor" if parts else None


def sequence_problem(config: Any, size: int) -> str | None:
    """Why `size` ranks cannot share the tokens of this model's rows, or None: each takes a part of the heads."""
    if problem := _meets_elsewhere(config):
        return f"sequence parallel needs the attention of packed rows in every layer, and {problem}"
    heads = _size(config, "num_attention_heads")
    key_heads = _size(config, "num_key_value_heads") or heads
    if heads is None or key_heads is None:
        return None
    if heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0):
        return None
    return f"{heads} query and {key_heads} key heads cannot be divided over sp_size {size}; use a divisor of both"


def _meets_elsewhere(config: Any) -> str | None:
    """Why the tokens of a row would miss one another if only their heads were exchanged, or None."""
    unknown = f"it is not known of {config.model_type}"
    if problem := why_not(config.model_type, look_up(config.model_type).sp, unknown):
        return packing_problem(config) or problem
    if (window := short_window(config)) is not None:
        return f"its attention window is {window} tokens, less than a sample may have"
    return packing_problem(config)


def units_problem(config: Any, strategy: Strategy) -> str | None:
    """Why a strategy cannot gather this model layer by layer, or None."""
    if strategy.fsdp is None or not look_up(config.model_type).shares_layers:
        return None
    return (
        f"the layers of {config.model_type} share weights, which FSDP cannot gather with one of them; use zero3 or ddp"
    )


BUFFER_SIZE = 100_000_000
"""DeepSpeed's elements of a buffer of weights on NVMe."""


MIN_SWAP = 2**20
"""DeepSpeed keeps smaller tensors in memory (runtime/swap_tensor/utils.py, MIN_AIO_BYTES)."""


def swap_limit(strategy: Strategy) -> int:
    """Bytes from which on DeepSpeed swaps a process's share of a weight."""
    return max(MIN_SWAP, strategy.aio.get("block_size", MIN_SWAP))


def buffer_problem(config: Any, strategy: Strategy, num_processes: int, bytes_each: int) -> str | None:
    """Why the buffers of weights on NVMe cannot hold a process's share of the largest weight that a config tells of,
    the embedding or the first matrices of all experts of a layer, or None.

    Args:
        bytes_each: bytes of an element of the weights.
    """
    width, rows = _size(config, "hidden_size") or 0, _size(config, "vocab_size") or 0
    inner = _size(config, "moe_intermediate_size", "intermediate_size") or 0
    of_experts = 2 * inner * (size_of_experts(config, EXPERTS) or 0)
    whose = "a layer's experts" if of_experts > rows else "the embedding"
    return share_beyond_buffer(strategy, max(rows, of_experts) * width, whose, num_processes, bytes_each)


def share_of_weight(num_elements: int, num_processes: int) -> int:
    """Elements of a process's share of a weight under stage 3, and of a buffer of weights whose size is "auto", if the
    weight is the largest.
    """
    return -(-num_elements // num_processes)


def share_beyond_buffer(
    strategy: Strategy, num_elements: int, whose: str, num_processes: int, bytes_each: int
) -> str | None:
    """Why a buffer of weights on NVMe cannot hold a process's share of a weight of so many elements, or None
    (deepspeed 0.19.8, swap_tensor/partitioned_param_swapper.py, `get_buffer`: an assertion while the weights are read).
    """
    if strategy.offload_param != "nvme":
        return None
    size = (strategy.zero.get("offload_param") or {}).get("buffer_size") or BUFFER_SIZE
    share = share_of_weight(num_elements, num_processes)
    if size == "auto" or share <= size or share * bytes_each < swap_limit(strategy):
        return None
    return f"offload_param.buffer_size is {size:.0f}, and a process's share of {whose} {share}; write {share}"


def mesh_problem(config: Any, mesh: Mesh) -> str | None:
    """Why a model cannot be trained on this mesh, or None."""
    if mesh.tensor > 1 and (problem := tensor_problem(config)):
        return f"{problem}; use fsdp2 or zero3"
    if mesh.tensor > 1 and (problem := _division_problem(config, mesh.tensor)):
        return problem
    if mesh.sequence > 1 and (problem := sequence_problem(config, mesh.sequence)):
        return problem
    return expert_problem(config, mesh.expert) or pipeline_problem(config, mesh.pipeline, mesh.chunks)


def num_experts(config: Any) -> int:
    """Number of experts of a layer between which its router chooses; 1 without a router."""
    return size_of_experts(config, EXPERTS) or 1


def in_buckets(sizes: Iterable[int]) -> list[list[int]]:
    """The tensors of each bucket, by their numbers in order, of BUCKET_BYTES at most; a larger one is by itself.

    Args:
        sizes: bytes of each, as it is sent.
    """
    buckets: list[list[int]] = []
    held = 0
    for i, size in enumerate(sizes):
        if not buckets or held + size > BUCKET_BYTES:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += size
    return buckets
