"""Products of a mixture's experts in the dtype of autocast, which torch leaves in float32, and their sums."""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

KEYS = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda"}
PRODUCTS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
"""Operations that multiply with stacked experts in transformers: torch's, and its own where that one does not serve,
as in compiled layers (5.23, integrations/moe.py, `_can_use_grouped_mm`)."""
SUM = "aten::index_add_"
"""Operation that adds up what DBRX's experts return, in the dtype of autocast, in the dtype of their input."""


@functools.cache
def autocast_products() -> tuple[torch.library.Library, ...]:
    """Make `PRODUCTS` operations of autocast, as `torch.mm` is. Without this the experts of float32 weights, those of
    `single` and `ddp`, are computed in float32 whatever `mixed_precision` asks for. `SUM` takes what is added in the
    dtype of the sum, as autocast has `scatter_add` do. Nothing changes outside of autocast, nor where torch has a
    kernel of its own.

    Returns:
        What holds the registrations for the rest of the process.
    """
    with suppress(ImportError):
        import transformers.integrations.moe  # noqa: F401  # defines the second
    libraries = []
    for product in (*PRODUCTS, SUM):
        namespace, name = product.split("::")
        if not torch._C._dispatch_has_kernel(product):
            continue
        casting = _adding if product == SUM else _casting
        # With torch's dispatcher: a patch of transformers' function would be of a private name that older ones lack.
        libraries.append(torch.library.Library(namespace, "IMPL"))
        operation = getattr(getattr(torch.ops, namespace), name).default
        for key in KEYS:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(product, key):
                libraries[-1].impl(name, casting(operation, key), key)
    return tuple(libraries)


def _casting(operation: Any, key: str) -> Callable[..., torch.Tensor]:
    def multiply(*arguments: Any, **options: Any) -> torch.Tensor:
        dtype = torch.get_autocast_dtype(KEYS[key])

        def cast(value: Any) -> Any:
            is_cast = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(dtype) if is_cast else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return operation(*map(cast, arguments), **{name: cast(value) for name, value in options.items()})

    return multiply


def _adding(operation: Any, key: str) -> Callable[..., torch.Tensor]:
    def add(total: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, **options: Any) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return operation(total, dim, index, source.to(total.dtype), **options)

    return add
