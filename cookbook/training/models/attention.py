"""Attention within each sample of a packed row, and for padded rows; registered with transformers."""

import contextlib
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from cookbook.training.models.mixers import has_several

PACKED = "cookbook_packed"
"""Name for `attn_implementation`. transformers has no mask function of this name, so it builds no mask."""

SAYS_NOTHING = "position_ids"
"""An argument that models hand on to every attention. By any other they may ask for what `attend` does not compute, as
by `indices`, `position_bias` and `sinks`."""

LONG_ON_CPU = 1024
"""Tokens. On CPU shorter samples are computed in float32 under bf16 and fp16: oneDNN compiles its products of 16 bits
for each new length, which costs more than they save where lengths vary. At 80 to 119 tokens forward and backward of 4
heads of size 64 took 0.8 ms in float32, 7.0 in bf16, 1.5 when its length came again; at 2,000 tokens 69, 65 and 45 (one
thread of an Intel Xeon with AMX, torch 2.13.0+cpu, by a program that is not kept)."""

VARLEN_ARGUMENTS = frozenset(inspect.signature(varlen_attn).parameters)
"""Arguments of the installed torch: 2.10 has is_causal and no scale, 2.13 window_size; grouped heads came last."""


_IS_SHARED: ContextVar[bool] = ContextVar("is_shared", default=False)


@contextlib.contextmanager
def shared_row(mesh: DeviceMesh | None) -> Iterator[None]:
    """Have each attention of a model need the ranks that share its row while this is open; None: one rank has it."""
    before = _IS_SHARED.set(mesh is not None)
    try:
        yield
    finally:
        _IS_SHARED.reset(before)


class Lengths:
    """Tokens of each sample, on the host, so that nothing waits for the device.

    An opaque object: a compiled layer would recompile for each new tuple among its arguments.
    """

    def __init__(self, values: tuple[int, ...]) -> None:
        self.values = values


class Kind(NamedTuple):
    """Properties of a layer's attention."""

    scaling: float | None = None
    """Factor of the products of queries and keys; None for the root of the head size."""
    window: int | None = None
    """Tokens that a token sees, itself included; None for all before it."""
    softcap: float | None = None
    """No score is larger: a score s becomes softcap * tanh(s / softcap) (Gemma 2)."""
    sinks: torch.Tensor | None = None
    """(query heads,) scores of an added token that all others see, and that has no value (gpt-oss)."""

    def within(self, longest: int) -> "Kind":
        """The attention for samples of at most `longest` tokens: without a window that holds them whole."""
        return self if self.window is None or self.window < longest else self._replace(window=None)

    @property
    def has_kernel(self) -> bool:
        """True if torch has a kernel for it, which never holds scores of T x T."""
        return self.softcap is None and self.sinks is None


class Segments(NamedTuple):
    """Boundaries of the samples in a packed row."""

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
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    segments: Segments | None = None,
    sequence_mesh: DeviceMesh | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sample of one packed row; without `segments`, within each row.

    Args:
        query: (B, query heads, T, D); key and value have their own number of heads, the value its own size.
        sliding_window, softcap, s_aux: see `Kind`.
        sequence_mesh: the N ranks that hold consecutive T tokens each of these rows. Collective for them.

    Returns:
        (B, T, query heads, size of the value), as transformers expects.
    """
    assert attention_mask is None, "a mask reached the packed attention, which would ignore it"
    # None and False ask for nothing, but in is_causal.
    ignored = sorted(
        name
        for name, value in others.items()
        if name != SAYS_NOTHING and value is not None and value is not (name == "is_causal")
    )
    assert not ignored, f"{', '.join(ignored)} reached the packed attention, which would ignore them"
    assert segments is not None or torch.compiler.is_compiling() or not has_several(), (
        "a layer did not hand on segments"
    )
    assert sequence_mesh is not None or torch.compiler.is_compiling() or not _IS_SHARED.get(), (
        "a layer did not hand on sequence_mesh"
    )
    assert not dropout, f"dropout {dropout} reached the packed attention, which has none"
    kind = Kind(scaling, sliding_window, softcap, s_aux)
    if sequence_mesh is None:
        return _attend(query, key, value, kind, segments), None
    assert s_aux is None, "sinks of all heads, and each rank has a part of the heads"
    # Ulysses (Jacobs et al. 2023, section 3.1): from all heads of T tokens to 1/N of the heads of all tokens, and back.
    # By DTensor, the same under every engine, padded and packed: DeepSpeed's wants a fixed batch size, accelerate's
    # context parallel FSDP2, and neither packs.
    if (repeats := sequence_mesh.size() // key.shape[1]) > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    # A GPU's kernels read them so: half of what float32 would send. On CPU they may compute in float32.
    sent = computed_in(query) if query.is_cuda else query.dtype
    query, key, value = (_exchange(x.to(sent), sequence_mesh) for x in (query, key, value))
    return _exchange(_attend(query, key, value, kind, segments), sequence_mesh), None


def _exchange(local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """All-to-all from shards along dimension 2 to shards along dimension 1, and back in the backward."""
    return DTensor.from_local(local, mesh, [Shard(2)], run_check=False).redistribute(placements=[Shard(1)]).to_local()


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: Kind, segments: Segments | None
) -> torch.Tensor:
    dtype = computed_in(query)
    longest = query.shape[2] if segments is None else segments.longest
    if query.device.type == "cpu" and dtype != torch.float32 and longest < LONG_ON_CPU:
        with torch.autocast("cpu", enabled=False):
            return _attend(query.float(), key.float(), value.float(), kind, segments).to(dtype)
    if segments is None:
        return causal(query, key, value, kind).transpose(1, 2)
    kind = kind.within(longest)
    if query.is_cuda and dtype in (torch.bfloat16, torch.float16) and _has_kernel(query, kind):
        query, key, value = (x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value))
        return _varlen(query, key, value, segments, kind).unsqueeze(0)
    # Not refused where that kernel does not serve: packing is the default, and must not fail there.
    return one_by_one(query, key, value, segments, kind)


def _has_kernel(query: torch.Tensor, kind: Kind) -> bool:
    """Return whether FlashAttention, called by `varlen_attn`, serves this GPU and head size (torch's flash_api.cpp)."""
    if not kind.has_kernel or (kind.window is not None and "window_size" not in VARLEN_ARGUMENTS):
        return False
    size = query.shape[-1]
    return torch.cuda.get_device_capability(query.device) >= (8, 0) and size % 8 == 0 and size <= 256


def computed_in(query: torch.Tensor) -> torch.dtype:
    """The dtype that reaches a kernel: autocast lowers what rotary embeddings in float32 have raised."""
    device = query.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return query.dtype


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Causal attention within each row: (B, heads, T, D) -> (B, query heads, T, size of the value)."""
    kind = kind.within(query.shape[2])
    if not kind.has_kernel:
        return _by_scores(query, key, value, kind)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda and computed_in(query) == torch.float32:
        # On CUDA only the flash and the math kernel support groups (torch/nn/functional.py, enable_gqa), and flash has
        # no float32. The math kernel holds T x T scores; with repeated keys the memory-efficient kernel serves.
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    grouped = query.shape[1] != key.shape[1]
    band = None if kind.window is None else _visible(query, kind)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=band, is_causal=band is None, scale=kind.scaling, enable_gqa=grouped
    )


def _visible(query: torch.Tensor, kind: Kind) -> torch.Tensor:
    """A mask, (T, T) bool: true where the token of a row sees that of a column."""
    seen = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()
    return seen if kind.window is None else seen.triu(1 - kind.window)


def _by_scores(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: Kind) -> torch.Tensor:
    """`causal` for attention without a kernel in torch. Holds scores of T x T, as transformers' own code does."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if kind.scaling is None else kind.scaling)
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores.masked_fill(~_visible(query, kind), -torch.inf)
    if kind.sinks is not None:
        sinks = kind.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probabilities = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]]
    return probabilities.to(value.dtype) @ value


@torch.compiler.disable  # else a compiled layer would recompile for each new list of lengths
def one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, kind: Kind
) -> torch.Tensor:
    lengths = list(segments.lengths.values)
    # split, not slices: the backward of each slice would allocate a gradient of the whole row.
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    return torch.cat([causal(q, k, v, kind).transpose(1, 2) for q, k, v in parts], dim=1)


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, kind: Kind
) -> torch.Tensor:
    """torch's kernel for ragged samples, (T, heads, D) in and out. It has no CPU version; simulated GPUs check its
    arguments and compute its numbers.
    """
    scaling, size = kind.scaling, value.shape[-1]
    left = -1 if kind.window is None else kind.window - 1  # tokens before itself
    options: dict[str, Any] = {"window_size": (left, 0)} if "window_size" in VARLEN_ARGUMENTS else {"is_causal": True}
    if size != query.shape[-1]:  # of latent attention, whose values are smaller
        value = F.pad(value, (0, query.shape[-1] - size))
    if "enable_gqa" in VARLEN_ARGUMENTS:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    else:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    if "scale" in VARLEN_ARGUMENTS:
        options["scale"] = scaling
    elif scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)  # the kernel divides by the root of the head size
    offsets, longest, _ = segments
    # torch's and not the flash-attn package: what one machine has installed would change the last bits of a curve.
    result: Any = varlen_attn(query, key, value, offsets, offsets, longest, longest, **options)
    return result if size == result.shape[-1] else result[..., :size]


AttentionInterface.register(PACKED, attend)
