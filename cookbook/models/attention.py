"""Attention that keeps the samples of a packed row apart, and serves padded rows too; registered with transformers."""

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedConfig

PACKED = "cookbook_packed"
"""For `attn_implementation`. transformers knows no mask of this name, so it builds none."""

# A list, since no property tells: stablelm, nemotron and nanochat have an attention of their own and do not say so.
PACKABLE = (
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt_neox",
    "helium",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
)
"""Architectures that tests/test_packed_attention.py shows to keep samples apart."""

VARLEN_ARGUMENTS = frozenset(inspect.signature(varlen_attn).parameters)
"""They differ by version: torch 2.10 has is_causal and no scale, 2.13 window_size; grouped heads came last."""


class Lengths:
    """Tokens of each sample, on the host: asking the device would wait for it.

    An object, since a compiled layer would be compiled again for each new tuple among its arguments.
    """

    def __init__(self, values: tuple[int, ...]) -> None:
        self.values = values


class Segments(NamedTuple):
    """Where the samples of a packed row begin and end."""

    offsets: torch.Tensor
    """(samples + 1,) int32, on the model's device."""
    longest: int
    """Tokens of the longest sample."""
    lengths: Lengths


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    segments: Segments | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sample of one packed row; without `segments`, within each row.

    Args:
        query: (B, query heads, T, D); key and value have their own number of heads.

    Returns:
        (B, T, query heads, D), as transformers wants it.
    """
    assert attention_mask is None, "a mask reached the packed attention, which would ignore it"
    if segments is None:
        return _causal(query, key, value, scaling).transpose(1, 2), None
    dtype = _computed_in(query)
    if query.is_cuda and dtype in (torch.bfloat16, torch.float16):
        query, key, value = (x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value))
        return _varlen(query, key, value, segments, scaling).unsqueeze(0), None
    return _one_by_one(query, key, value, segments, scaling), None


def _computed_in(query: torch.Tensor) -> torch.dtype:
    """By a kernel: autocast lowers what rotary embeddings in float32 have raised."""
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return query.dtype


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda and _computed_in(query) == torch.float32:
        # On CUDA only the flash and the math kernel know groups (torch/nn/functional.py, enable_gqa), and flash knows
        # no float32. The math kernel holds scores of T x T; with a key for each query head another serves.
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)


@torch.compiler.disable  # else a compiled layer would be compiled again for each new list of lengths
def _one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scaling: float | None
) -> torch.Tensor:
    lengths = list(segments.lengths.values)
    # Split, not sliced: each slice would make a zero gradient of the whole row in the backward pass.
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    return torch.cat([_causal(q, k, v, scaling).transpose(1, 2) for q, k, v in parts], dim=1)


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scaling: float | None
) -> torch.Tensor:
    """torch's own kernel for ragged samples, (T, heads, D) in and out. It has no CPU version; simulated GPUs check its
    call and compute its numbers, and the kernel itself has not been run by us.
    """
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in VARLEN_ARGUMENTS else {"is_causal": True}
    if "enable_gqa" in VARLEN_ARGUMENTS:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    else:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    if "scale" in VARLEN_ARGUMENTS:
        options["scale"] = scaling
    elif scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)  # the kernel divides by the root of the head size
    offsets, longest, _ = segments
    result: Any = varlen_attn(query, key, value, offsets, offsets, longest, longest, **options)
    return result


AttentionInterface.register(PACKED, attend)


def packing_problem(config: PreTrainedConfig, max_length: int | None = None) -> str | None:
    """Why this model would not keep the samples of a packed row apart, or None.

    Args:
        max_length: tokens of a sample at most; as many as the model has positions, if not given.
    """
    max_length = max_length or getattr(config, "max_position_embeddings", None) or 2**62
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < max_length:
        return f"its attention window is {window} tokens, less than data.max_length {max_length}"
    foreign = sorted(kinds - {"full_attention", "sliding_attention"})
    if foreign:
        return f"it has layers of {', '.join(foreign)}"
    if getattr(config, "attention_dropout", 0.0):
        return f"its attention_dropout {config.attention_dropout} is not in the packed attention"
    if config.model_type not in PACKABLE:
        return f"{config.model_type} is not among the architectures that were shown to keep samples apart"
    return None
