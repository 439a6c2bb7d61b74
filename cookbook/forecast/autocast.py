"""CUDA's autocast for a trace on the CPU, whose own leaves some operations in 16 bits."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
"""torch's own lists of operations by what autocast does with them, which pip's wheels bring."""
KEY = "AutocastCPU"


@contextmanager
def autocast_of_cuda() -> Iterator[None]:
    """Computes in float32 what CUDA's autocast does and the CPU's does not, also what checkpointing repeats in the
    backward.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        for macro, function in (("AT_FORALL_FP32", _cast), ("AT_FORALL_FP32_SET_OPT_DTYPE", _call)):
            for name in _left_by_the_cpu(macro):
                packet, _, overload = name.partition(".")
                operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
                library.impl(name, partial(function, operation), KEY)
        yield


@functools.cache
def _left_by_the_cpu(macro: str) -> list[str]:
    """Operations of a list of torch's for which the CPU's autocast has nothing, as "pow.Scalar"."""
    lines = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", HEADER.read_text(encoding="utf-8"))
    assert lines is not None, f"{HEADER} has no {macro}"
    names = [entry.replace(", ", ".") for entry in re.findall(r"_\(([^)]*)\)", lines[1])]
    return [name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", KEY)]


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
