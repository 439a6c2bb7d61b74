"""Operations on fake tensors, each run once for all tensors alike: for later ones only its results are made."""

from collections.abc import Hashable, Iterable
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

ABSOLUTE = torch.ops.aten.as_strided.default
"""The view that begins at a place of the storage, and not of what it is a view of."""
CPU = torch.device("cpu")


class LightTensor(FakeTensor):
    """A fake tensor whose device torch knows. Of others autograd asks Python, two or three times an operation; and the
    fake mode takes only others: see `_run_plainly`.
    """

    kind: int
    """See `KINDS`."""


class _MadeTensor(NamedTuple):
    """A tensor that an operation returned."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any
    """From the beginning of the tensor whose memory it has."""
    device: torch.device
    of: int | None
    """The tensor among what the operation was given whose memory it has; None: memory of its own."""
    kind: int
    """See `KINDS`."""


FIRST = "what it was given first, changed in place"
RESULTS: dict[Hashable, Any] = {}
"""Results of operations: each tensor as `_Made`, or `FIRST`; None where a result cannot be made from that alone."""


def run(function: Any, args: Any, kwargs: Any, given: list[Any]) -> Any:
    """The result of an operation under a fake mode.

    Args:
        given: the tensors in `args` and `kwargs`.
    """
    key = None
    if given and isinstance(function, torch._ops.OpOverload) and function is not ABSOLUTE:
        try:
            known = RESULTS.get(key := _key(function, args, kwargs))
        except TypeError:
            key = known = None
        if known is FIRST:
            return args[0]
        if known is not None:
            return _remade(known, given, given[0].fake_mode)
    result, made = _run_plainly(function, args, kwargs, given)
    if key is not None and key not in RESULTS:
        if not function._schema.is_mutable:
            RESULTS[key] = made
        elif result is args[0] and torch.Tag.inplace_view not in function.tags:
            RESULTS[key] = FIRST if _changes_first_alone(function) else None
    return result


def _run_plainly(function: Any, args: Any, kwargs: Any, given: list[Any]) -> tuple[Any, Any]:
    """The result of an operation on tensors as the fake mode knows them, and what it is made of."""
    if torch.Tag.inplace_view in getattr(function, "tags", ()) and type(args[0]) is LightTensor:
        with torch._C._DisableTorchDispatch():
            function(*args, **kwargs)
        args[0].kind = _describe_tensor(args[0], args[0].device).kind
        return args[0], None
    below = _on_meta(given)
    if (
        given
        and all(type(tensor) is LightTensor for tensor in given)
        and "device" not in kwargs
        and _is_plain(function)
    ):
        with torch._C._DisableTorchDispatch(), suppress(NotImplementedError, RuntimeError):
            result = _call(function, args, kwargs, given, below)
            if (made := _describe(result, below, given)) is not None:
                return _remade(made, given, given[0].fake_mode), made
    below = [
        FakeTensor(tensor.fake_mode, meta, CPU) if type(tensor) is LightTensor else tensor
        for tensor, meta in zip(given, below, strict=True)
    ]
    result = _call(function, args, kwargs, given, below)
    for tensor, meta in zip(given, below, strict=True):
        if (tensor.shape, tensor.stride()) != (meta.shape, meta.stride()):
            raise NotImplementedError(f"{function} changes the shape of what it is given")
        if meta is result:  # changed in place
            return tensor, None
    made = _describe(result, below, given)
    return (result if made is None else _remade(made, given, tensors_in([result])[0].fake_mode)), made


@cache
def _is_plain(function: Any) -> bool:
    """Return whether torch's own code for the meta device, which takes a fifth of the time, returns what the fake mode
    does. Norms and kernels of attention, which return several tensors, and convolutions differ by device.
    """
    if not isinstance(function, torch._ops.OpOverload) or function.namespace != "aten":
        return False
    depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    schema = function._schema
    is_one = len(schema.returns) == 1 and "convolution" not in function._opname
    return is_one and not schema.is_mutable and not depends & {*function.tags}


def _on_meta(tensors: list[Any]) -> list[torch.Tensor]:
    """Tensors of the meta device that share memory as light ones do; others as they are."""
    storages: dict[int, torch.UntypedStorage] = {}
    on_meta = []
    with torch._C._DisableTorchDispatch():
        for tensor in tensors:
            if type(tensor) is LightTensor:
                storage = tensor.untyped_storage()
                if id(storage) not in storages:
                    whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
                    storages[id(storage)] = whole.untyped_storage()
                like = tensor
                tensor = torch.empty(0, dtype=like.dtype, device="meta")
                tensor.set_(storages[id(storage)], like.storage_offset(), like.shape, like.stride())
            on_meta.append(tensor)
    return on_meta


def _call(function: Any, args: Any, kwargs: Any, given: list[Any], below: list[Any]) -> Any:
    """Calls a function with other tensors than it was given."""
    replaced = {id(tensor): meta for tensor, meta in zip(given, below, strict=True)}
    return function(*_with(args, replaced), **dict(zip(kwargs, _with(kwargs.values(), replaced), strict=True)))


def _with(values: Iterable[Any], replaced: dict[int, Any]) -> list[Any]:
    """Return the same with other tensors, by the identity of those before."""
    return [
        type(value)(_with(value, replaced))
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size)
        else replaced.get(id(value), value)
        for value in values
    ]


@cache
def _changes_first_alone(function: torch._ops.OpOverload) -> bool:
    infos = [argument.alias_info for argument in function._schema.arguments]
    return [info is not None and info.is_write for info in infos] == [True] + [False] * (len(infos) - 1)


def tensors_in(values: Iterable[Any]) -> list[Any]:
    """The tensors in what an operation is given or returns; torch's own walk through a tree takes ten times as long."""
    tensors = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
    return tensors


def _key(function: Any, args: Any, kwargs: Any) -> Hashable:
    key = function, *[_alike(value) for value in args]
    return (*key, *[(name, _alike(value)) for name, value in kwargs.items()]) if kwargs else key


def _alike(value: Any) -> Hashable:
    """Return a key that is equal for values that an operation does not tell apart; raises TypeError for one of its own
    kind.
    """
    if type(value) is LightTensor:
        return value.kind
    if isinstance(value, (list, tuple)):
        if {*map(type, value)} == {int}:
            return int, tuple(value)
        return tuple([_alike(element) for element in value])
    if isinstance(value, torch.Tensor):
        if not isinstance(value, FakeTensor) or value.constant is not None:
            raise TypeError
        return value.dtype, value.shape, value.stride(), value._fake_device, value.is_conj(), value.is_neg()
    return type(value), value  # 1, 1.0 and True are equal, and give other types


KINDS: dict[Hashable, int] = {}
"""Numbers of all that tells two light tensors apart."""


def _describe(result: Any, plain: list[Any], given: list[Any]) -> Any:
    if isinstance(result, (list, tuple)):
        parts = [_describe(part, plain, given) for part in result]
        return None if None in parts else parts
    if not isinstance(result, torch.Tensor) or getattr(result, "constant", None) is not None:
        return None
    if result.is_conj() or result.is_neg():  # marks, for which the operations that read it run one more
        return None
    storage, offset = result.untyped_storage(), result.storage_offset()
    of = next((place for place, tensor in enumerate(plain) if tensor.untyped_storage() is storage), None)
    if of is not None:
        if type(given[of]) is not LightTensor:
            return None
        offset -= plain[of].storage_offset()
    elif offset or storage.nbytes() != result.nbytes:
        return None
    return _describe_tensor(result, result._fake_device if isinstance(result, FakeTensor) else CPU, offset, of)


def _remade(made: Any, given: list[Any], mode: FakeTensorMode) -> Any:
    if not isinstance(made, _MadeTensor):
        return [_remade(part, given, mode) for part in made]
    tensor: Any = torch.Tensor._make_wrapper_subclass(
        LightTensor, made.shape, made.stride, dtype=made.dtype, device=made.device
    )
    if made.of is not None:
        whole = given[made.of]
        with torch._C._DisableTorchDispatch():
            tensor.set_(whole.untyped_storage(), whole.storage_offset() + made.offset, made.shape, made.stride)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    vars(tensor).update(_state(mode, made.device), kind=made.kind)
    return tensor


def light(mode: FakeTensorMode, tensor: torch.Tensor) -> Any:
    """A tensor of the CPU that is like another, with memory of its own."""
    return _remade(_describe_tensor(tensor, CPU), [], mode)


def _describe_tensor(tensor: torch.Tensor, device: torch.device, offset: Any = 0, of: int | None = None) -> _MadeTensor:
    described = tensor.dtype, tensor.shape, tensor.stride()
    return _MadeTensor(*described, offset, device, of, KINDS.setdefault((*described, device), len(KINDS)))


@lru_cache(maxsize=1)
def _state(mode: FakeTensorMode, device: torch.device) -> dict[str, Any]:
    """The attributes that `FakeTensor` writes to each tensor, in more time than torch takes for the tensor itself."""
    return dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), device)))
