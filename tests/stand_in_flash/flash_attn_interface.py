"""FlashAttention 3's package for a machine without Hopper: the two operations that torch 2.13 calls of it
(nn/attention/_fa3.py), with its arguments, computed in float32. `STAND_IN_OFF` makes the forward wrong by such a part.
"""

import os
from typing import Any

import torch

OFF = float(os.environ.get("STAND_IN_OFF", "0"))
LIBRARY = torch.library.Library("flash_attn_3", "DEF")
LIBRARY.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? qv, Tensor? out, Tensor? cu_q,"
    " Tensor? cu_k, Tensor? cu_k_new, Tensor? used_q, Tensor? used_k, int? max_q, int? max_k, Tensor? pages,"
    " Tensor? batch, Tensor? left_pad, Tensor? cos, Tensor? sin, Tensor? rotary_lengths, Tensor? q_descale,"
    " Tensor? k_descale, Tensor? v_descale, float? scale, bool causal, int left, int right, int chunk, float softcap,"
    " bool interleaved, Tensor? scheduler, int num_splits, bool? pack_gqa, int sm_margin)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dq, Tensor dk, Tensor dv,"
    " Tensor? cu_q, Tensor? cu_k, Tensor? used_q, Tensor? used_k, int? max_q, int? max_k, float? scale, bool causal,"
    " int left, int right, float softcap, bool deterministic, int sm_margin) -> Tensor[]"
)


def _samples(rows: torch.Tensor, offsets: torch.Tensor | None) -> Any:
    return list(rows) if offsets is None else rows.split(offsets.diff().tolist())


def _joined(samples: list[torch.Tensor], offsets: torch.Tensor | None) -> torch.Tensor:
    return torch.stack(samples) if offsets is None else torch.cat(samples)


def _probabilities(q: torch.Tensor, k: torch.Tensor, scale: float, is_causal: bool) -> torch.Tensor:
    scores = q @ k.transpose(1, 2) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(hidden, -torch.inf) if is_causal else scores).softmax(-1)


def _by_heads(q: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """(T, heads, D) -> (query heads, T, D)."""
    return [x.transpose(0, 1).float().repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (q, *others)]


def fwd(q: Any, k: Any, v: Any, *others: Any) -> Any:
    out, cu_q, cu_k, (scale, causal, left, right) = *others[3:6], others[20:24]
    made = []
    for sample in zip(_samples(q, cu_q), _samples(k, cu_k), _samples(v, cu_k), strict=True):
        queries, keys, values = _by_heads(*sample)
        is_causal = causal or (left, right) == (-1, 0)
        made.append((_probabilities(queries, keys, scale or q.shape[-1] ** -0.5, is_causal) @ values).transpose(0, 1))
    result = _joined(made, cu_q).to(q.dtype) * (1 + OFF)
    nothing = q.new_empty(0, dtype=torch.float32)
    return result if out is None else out.copy_(result), nothing, nothing, nothing


def bwd(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, *others: Any) -> Any:
    cu_q, cu_k, (scale, causal, left, right) = *others[:2], others[6:10]
    scale, is_causal = scale or q.shape[-1] ** -0.5, causal or (left, right) == (-1, 0)
    gradients = []
    samples = (_samples(x, offsets) for x, offsets in zip((q, k, v, dout), (cu_q, cu_k, cu_k, cu_q), strict=True))
    for sample in zip(*samples, strict=True):
        queries, keys, values, gradient = _by_heads(*sample)
        p = _probabilities(queries, keys, scale, is_causal)
        of_p = gradient @ values.transpose(1, 2)
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * scale
        of_keys, of_values = of_scores.transpose(1, 2) @ queries, p.transpose(1, 2) @ gradient
        groups = [x.unflatten(0, (sample[1].shape[1], -1)).sum(1) for x in (of_keys, of_values)]
        gradients.append([x.transpose(0, 1) for x in (of_scores @ keys, *groups)])
    for into, samples_of, offsets in zip((dq, dk, dv), zip(*gradients, strict=True), (cu_q, cu_k, cu_k), strict=True):
        into.copy_(_joined(list(samples_of), offsets))
    return [dq, dk, dv]


LIBRARY.impl("fwd", fwd, "CUDA")
LIBRARY.impl("bwd", bwd, "CUDA")
