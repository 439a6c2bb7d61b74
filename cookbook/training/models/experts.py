"""Products of a mixture's experts in the dtype of autocast, which torch 2.13 leaves in float32."""

import functools
from collections.abc import Callable
from typing import Any

import torch

KEYS = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda"}


@functools.cache
def autocast_products() -> torch.library.Library | None:
    """Make `torch.nn.functional.grouped_mm`, by which transformers multiplies with stacked experts, an operation of
    autocast, as `torch.mm` is. Without this the experts of float32 weights, those of `single` and `ddp`, are computed
    in float32 whatever `mixed_precision` asks for. Nothing changes outside of autocast.

    Returns:
        What holds the registration for the rest of the process; None if this torch has a kernel of its own.
    """
    name = "aten::_grouped_mm"
    missing = [key for key in KEYS if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]
    if not missing:
        return None
    library = torch.library.Library("aten", "IMPL")
    for key in missing:
        library.impl("_grouped_mm", _casting(key), key)
    return library


def _casting(key: str) -> Callable[..., torch.Tensor]:
    def multiply(
        first: torch.Tensor, second: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
    ) -> torch.Tensor:
        dtype = torch.get_autocast_dtype(KEYS[key])
        bias = None if bias is None else bias.to(dtype)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return torch.ops.aten._grouped_mm(first.to(dtype), second.to(dtype), offs, bias, out_dtype)

    return multiply
