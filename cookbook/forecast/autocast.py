"""CUDA's autocast for a trace on the CPU, whose own leaves some operations in 16 bits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

FLOAT32 = (
    *("layer_norm", "rms_norm", "group_norm", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "rsqrt", "reciprocal"),
    *("exp", "log", "log1p", "softplus", "logsumexp"),
)
"""Operations of models that CUDA's autocast computes in float32 and the CPU's does not (torch 2.13,
include/ATen/autocast_mode.h, AT_FORALL_FP32)."""
INTO_FLOAT32 = ("sum", "sum.dim_IntList", "cumsum", "softmax.int", "log_softmax.int")
"""Operations that read 16 bits and return float32 (AT_FORALL_FP32_SET_OPT_DTYPE)."""
KEY = "AutocastCPU"


@contextmanager
def autocast_of_cuda() -> Iterator[None]:
    """Makes them so, also for what checkpointing repeats in the backward."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in (*FLOAT32, *INTO_FLOAT32):
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, partial(_cast if name in FLOAT32 else _call, operation), KEY)
        yield


def _cast(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    def cast(value: Any) -> Any:
        is_low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if is_low else value

    return _below(operation, *map(cast, arguments), **options)


def _call(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    has_type = any(isinstance(value, torch.dtype) for value in (*arguments, *options.values()))
    if arguments[0].is_floating_point() and arguments[0].dtype != torch.float64 and not has_type:
        options["dtype"] = torch.float32
    return _below(operation, *arguments, **options)


def _below(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))):
        return operation(*arguments, **options)
