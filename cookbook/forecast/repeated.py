"""Operations on fake tensors, each run once for all tensors alike: for later ones only its results are made."""

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

DEVICE = torch.ops.prim.device.default
"""Half of all that is dispatched: autograd asks each tensor where it lies."""


class _Made(NamedTuple):
    """A tensor that an operation returned."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any
    device: torch.device
    of: int | None
    """The tensor among what the operation was given whose memory it has; None: memory of its own."""


RESULTS: dict[Hashable, Any] = {}
"""What operations returned, of each tensor as `_Made`; None where a result cannot be made from that alone."""


def run(function: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation under a fake mode."""
    if function is DEVICE:
        return args[0].fake_device
    given = [*tensors_in(args), *tensors_in(kwargs)]
    if not given or not isinstance(function, torch._ops.OpOverload) or function._schema.is_mutable:
        return function(*args, **kwargs)
    try:
        key = function, _alike(args), _alike(kwargs)
        found = RESULTS.get(key)
    except TypeError:
        return function(*args, **kwargs)
    if found is not None:
        return _remade(found, given)
    result = function(*args, **kwargs)
    if key not in RESULTS:
        RESULTS[key] = _described(result, [one.untyped_storage() for one in given])
    return result


def tensors_in(value: Any) -> Iterator[Any]:
    """Those in what an operation is given or returns; torch's own walk through any tree takes four times as long."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


def _alike(value: Any) -> Hashable:
    """What is equal for values that an operation does not tell apart; raises TypeError for one of its own kind."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, FakeTensor) or value.constant is not None:
            raise TypeError
        return value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device
    if isinstance(value, (list, tuple)):
        return tuple(map(_alike, value))
    if isinstance(value, dict):
        return tuple((name, _alike(one)) for name, one in value.items())
    return type(value), value  # 1, 1.0 and True are equal, and give other types


def _described(result: Any, given: list[torch.UntypedStorage]) -> Any:
    if isinstance(result, (list, tuple)):
        found = [_described(one, given) for one in result]
        return None if None in found else found
    if not isinstance(result, FakeTensor) or result.constant is not None:
        return None
    storage = result.untyped_storage()
    of = next((place for place, one in enumerate(given) if one is storage), None)
    if of is None and (result.storage_offset() or storage.nbytes() != result.nbytes):
        return None
    return _Made(result.dtype, result.shape, result.stride(), result.storage_offset(), result.fake_device, of)


def _remade(made: Any, given: list[Any]) -> Any:
    if not isinstance(made, _Made):
        return [_remade(one, given) for one in made]
    mode = given[0].fake_mode
    with in_kernel_invocation_manager(mode):
        empty = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        if made.of is not None:
            empty.set_(given[made.of].untyped_storage(), made.offset, made.shape, made.stride)
    return FakeTensor(mode, empty, made.device)
