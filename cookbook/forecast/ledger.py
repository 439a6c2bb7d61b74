"""Counts what operations on fake tensors allocate, between marks around the layers and their experts."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from cookbook.forecast.activations import CACHE_BYTES, COUNTED, Phase, TooLong
from cookbook.forecast.repeated import run, tensors_in

MOST_OPERATIONS = 25_000
"""Limit of a forward: more, as of a loop over all tokens, would take minutes. Counted, since seconds depend on what
else a machine does. A trace ends in the forward, at a product or the like: where torch itself makes a view or
detaches a tensor that it saves, an exception from Python aborts the process.
"""
ALLOCATION_BYTES = 512
"""CUDA's allocator rounds sizes up to multiples of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
PRODUCTS = (
    *("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addbmm", "gemm_4bit", "_grouped_mm", "_scaled_mm"),
    *("grouped_mm_fallback", "grouped_mm_fallback_backward"),  # those of transformers
    *("traced_flash_attention", "traced_flash_attention_backward"),
)
"""Operations bound by FLOPs and not by memory."""
KERNELS = {
    "dequantize_4bit": 3,  # scales, their offset, the weight
    "traced_flash_attention_backward": 3,  # one before it and one after (flash-attention, flash_bwd_launch_template.h)
    **dict.fromkeys(("slice_backward", "select_backward", "nll_loss_backward"), 2),  # zeros, and what is put into them
}
"""Number of kernels that an operation starts, where that is not one."""
FREE = ("device", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view")
"""Operations that start no kernel, beside views."""
GROUPED = torch.ops.aten._grouped_mm.default
"""torch 2.13 multiplies float32 too, but knows the shapes in bf16 alone (torch/_meta_registrations.py,
`_meta_grouped_mm_common`)."""
DEVICE = torch.ops.prim.device.default
"""Autograd asks each tensor that is not light where it lies."""
WHERE, VALUE = torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default
CUT = torch.ops.aten.split_with_sizes.default
AROUND_EXPERTS = {
    "forward": "experts forward",
    "experts forward": "rest forward",
    "backward": "experts again",
    "experts again": "backward",
}
"""The phase that follows where a forward comes to a layer's experts, or leaves them."""


def _equal_parts(whole: int, count: int) -> list[int]:
    """Sizes of parts, of which no two differ by more than one."""
    return [whole // count + (part < whole % count) for part in range(count)]


def _run_by_fake_mode(function: Any, args: Any, kwargs: Any, given: list[Any]) -> Any:
    return function(*args, **kwargs)


def _as_large(value: Any, storages: dict[int, torch.Tensor]) -> Any:
    """Tensors of the shapes in `value`, with memory of their own as large as that of those.

    Args:
        storages: by the identity of those of `value`, as views of one have one.
    """
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if id(storage) not in storages:
            storages[id(storage)] = value.new_empty(storage.nbytes() // value.element_size())
        return storages[id(storage)].as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, (list, tuple)):
        parts = [_as_large(part, storages) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class _HeldStorage(weakref.ref[Any]):
    """A storage that is counted until it is gone."""

    __slots__ = ("identity", "size")
    identity: int
    size: int


class Ledger(TorchDispatchMode):
    """Counts the bytes of all tensors that operations allocate, until they are freed."""

    def __init__(self, known: Iterable[torch.Tensor], *, is_light: bool = True) -> None:
        """
        Args:
            known: weights and buffers, which are not counted.
            is_light: whether tensors are light. torch's decompositions, of layers that are compiled, take others alone.
        """
        super().__init__()
        self._run = run if is_light else _run_by_fake_mode
        self.restart()
        self._known: dict[int, _HeldStorage] = {}
        """Held storages by their identity, while they live."""
        for tensor in known:
            self._hold(tensor.untyped_storage(), 0)

    def restart(self) -> None:
        """Count from nothing, before anything that is counted is allocated."""
        self.live = self.peak = self.made = self.peak_with_made = 0
        self.kernels = self.looped = self.moved = self.streamed = 0
        self.phases: list[Phase] = []
        self.inputs: list[weakref.ref[Any]] = []
        """The inputs that the layers got."""
        self.keeps_inputs = False
        self.copies = 0
        """Bytes of weights that autocast frees at its end."""
        self._operations = 0
        self._experts = 1
        self._open: tuple[str, int | None, int] | None = None
        self._kept = 0
        """Bytes of `made` that outlive the experts' backward: gradients of the weights around a layer's experts."""
        self._counts = True

    @property
    def holds_any(self) -> bool:
        """True if something that was counted is not yet freed."""
        return any(held.size for held in self._known.values())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is DEVICE:
            return args[0]._fake_device
        kwargs = kwargs or {}
        given = tensors_in((*args, *kwargs.values()))
        self._operations += 1
        if (
            self._operations > MOST_OPERATIONS
            and self._may_end
            and not function.is_view
            and function._opname not in FREE
        ):
            raise TooLong(f"its forward has more than {MOST_OPERATIONS:,} operations")
        result: Any
        if function is WHERE:
            result = self._where(args[0])
        elif function is VALUE and args[0].dtype == torch.int64:
            result = 0  # the number of an expert, or of its rows
        elif function is CUT and not any(args[1]):
            parts = _equal_parts(args[0].shape[args[2] if len(args) > 2 else 0], len(args[1]))
            result = self._run(function, (args[0], parts, *args[2:]), kwargs, given)
        elif function is GROUPED and args[0].dtype == torch.float32:
            low = [self._cast_to(torch.bfloat16, value) if isinstance(value, torch.Tensor) else value for value in args]
            low_result = self._run(function, low, kwargs, tensors_in((*low, *kwargs.values())))
            result = self._cast_to(torch.float32, low_result)
        else:
            result = self._run(function, args, kwargs, given)
        if self._counts:
            made = tensors_in((result,))
            for value in made:
                self._see(value.untyped_storage())
            if not function.is_view and function._opname not in FREE:
                self._count(function._opname, given, made)
        return result

    def _cast_to(self, dtype: torch.dtype, tensor: Any) -> Any:
        if not tensor.is_floating_point():
            return tensor
        return self._run(torch.ops.aten._to_copy.default, (tensor,), {"dtype": dtype}, [tensor])

    @property
    def _may_end(self) -> bool:
        return self._open is None or not self._open[0].endswith(("backward", "again", "end"))

    def _where(self, mask: torch.Tensor) -> torch.Tensor:
        """Indices of what a mask selects, as in a loop over the experts that have tokens: those are all of a vector,
        and each has an equal part of the tokens.
        """
        if mask.ndim == 1:
            self._experts = mask.numel()
        count = -(-mask.numel() // (1 if mask.ndim == 1 else self._experts))
        return torch.empty(count, mask.ndim, dtype=torch.int64, device=mask.device)

    def _count(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        self.kernels += KERNELS.get(name, 1)
        if name in PRODUCTS:
            if name == "traced_flash_attention_backward" and len(made) > 5:
                self.kernels += 2  # sums over grouped heads
            if name == "_grouped_mm":  # the one vector has the end of each expert's rows
                self.looped += next(len(tensor) - 1 for tensor in given if tensor.ndim == 1)
            return
        read, written = (
            [min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors] for tensors in (given, made)
        )
        size = sum(read) + sum(written)
        if name in ("copy_", "fill_", "zero_"):  # `given` has what these write
            size = sum(read)
        elif name in ("embedding", "gather", "index_select"):  # they read some rows of what they are given
            size = 2 * sum(written)
        elif name == "nll_loss_forward":  # a number of each row
            size = sum(read[1:]) + 2 * sum(written)
        elif name in ("scatter_", "index_put_", "index_put"):  # as much as they put there, with data in place, always
            size = sum(read[1:]) + read[-1]  # (torch 2.13, csrc/autograd/FunctionsManual.cpp, index_backward)
        elif name in ("slice_backward", "select_backward"):  # aten/src/ATen/native/TensorShape.cpp
            size = 2 * sum(read) + sum(written)
        elif name == "nll_loss_backward" or name.startswith("new_") or name.endswith("_like"):  # they read no values
            size = sum(written)
        self.moved += size
        self.streamed += size if size > CACHE_BYTES else 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Does not count tensors that are allocated inside."""
        self._counts, before = False, self._counts
        try:
            yield
        finally:
            self._counts = before

    def in_chunks(self, evaluate: Callable[[slice], Any], chunks: Sequence[slice]) -> list[Any]:
        """Results of a function of each chunk of rows, as those of `cookbook.training.models.logits.in_turn`. From the
        third on, one of as many rows as the second does what that did, and is counted without being run.
        """
        results = [evaluate(rows) for rows in chunks[:1]]
        second, above, counted = None, 0, dict.fromkeys(COUNTED, 0)
        for rows in chunks[1:]:
            size = rows.stop - rows.start
            if size == second:
                self._raise_peak(self.live + above)
                for name, more in counted.items():
                    setattr(self, name, getattr(self, name) + more)
                results.append(_as_large(results[1], {}))
            elif second is None:
                live, peak, before = self.live, self.peak, {name: getattr(self, name) for name in COUNTED}
                self.peak, second = live, size
                results.append(evaluate(rows))
                above, counted = self.peak - live, {name: getattr(self, name) - before[name] for name in COUNTED}
                self._raise_peak(peak)
            else:
                results.append(evaluate(rows))
        return results

    def _see(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._known:
            return
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self._hold(storage, size)
        self.live += size
        self._raise_peak(self.live)

    def _raise_peak(self, live: int) -> None:
        self.peak = max(self.peak, live)
        self.peak_with_made = max(self.peak_with_made, live + self.made)

    def _hold(self, storage: torch.UntypedStorage, size: int) -> None:
        held = self._known[id(storage)] = _HeldStorage(storage, self._gone)
        held.identity, held.size = id(storage), size

    def _gone(self, held: "_HeldStorage") -> None:
        del self._known[held.identity]
        self.live -= held.size

    def drop_gradient(self, parameter: torch.Tensor) -> None:
        """Frees a gradient: strategies count gradients themselves, the trace only the memory to compute them."""
        assert parameter.grad is not None
        self.made += -(-parameter.grad.untyped_storage().nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        parameter.grad = None

    def add_in_place(self, size: int) -> None:
        """Counts the last phase as if it added a gradient of `size` bytes to one that it began with in place: autograd
        does, unless they are fake (torch 2.13, csrc/autograd/input_buffer.cpp, can_accumulate_inplace).
        """
        last = self.phases[-1]
        self.phases[-1] = replace(last, peak=max(last.held + size, last.peak - size))

    def forget(self) -> None:
        """Discards all phases, to trace again."""
        self.phases.clear()
        self.inputs.clear()
        self._open = None

    def begin(self, name: str, layer: int | None = None) -> None:
        """Ends the current phase and begins another."""
        if self._open is not None:
            before, of_layer, held = self._open
            making = self.peak_with_made - self.peak
            counted = {name: getattr(self, name) for name in COUNTED}
            self.phases.append(Phase(name=before, layer=of_layer, held=held, peak=self.peak, making=making, **counted))
        self._kept = {"experts backward": self.made, "rest backward": self._kept}.get(name, 0)
        self.made, self._open = self._kept, (name, layer, self.live + self._kept)
        self.peak, self.peak_with_made = self.live, self.live + self.made
        self.kernels = self.looped = self.moved = self.streamed = 0

    def pass_experts(self, layer: int) -> None:
        """A forward comes to the end or the beginning of a layer's experts. A forward that checkpointing repeats in
        their backward divides nothing: they are gathered by then.
        """
        if self._open is not None and (following := AROUND_EXPERTS.get(self._open[0])):
            self.begin(following, layer)


class Mark(torch.autograd.Function):
    """Identity that begins a phase when its forward or backward runs."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, begin: Any, forward: tuple, backward: tuple) -> torch.Tensor:
        ctx.begin, ctx.backward_of = begin, backward
        begin(*forward)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.begin(*ctx.backward_of)
        return gradients[0], None, None, None


class MarkAll(torch.autograd.Function):
    """Identity of several tensors: begins a phase when its forward runs, and another when all of their gradients are
    there.
    """

    @staticmethod
    def forward(ctx: Any, begin: Callable[[], None], begin_backward: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.begin_backward = begin_backward
        begin()
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.begin_backward()
        return None, None, *gradients


def experts_of(module: torch.nn.Module) -> list[Any]:
    """Modules of experts in a module (transformers 5.23, integrations/moe.py, use_experts_implementation)."""
    return [child for child in module.modules() if hasattr(child, "_is_expert_parallel")]


@dataclass(frozen=True)
class Unit:
    """The casts of FSDP2's units."""

    takes: torch.dtype
    returns: torch.dtype | None
    """None: what it computed."""

    def take(self, values: Any) -> Any:
        return _cast(values, self.takes)

    def give_back(self, values: Any) -> Any:
        return values if self.returns is None else _cast(values, self.returns)


class MarkedLayer(torch.nn.Module):
    """A decoder layer between two marks."""

    def __init__(self, layer: torch.nn.Module, number: int, ledger: Ledger, is_last: bool, unit: Unit | None) -> None:
        super().__init__()
        self.layer, self._number, self._ledger, self._is_last = layer, number, ledger, is_last
        self._unit = unit
        for experts in experts_of(layer):
            if experts._is_expert_parallel:
                experts.forward = partial(self._experts, experts.forward)

    def _experts(self, compute: Callable[..., torch.Tensor], hidden: Any, chosen: Any, weights: Any) -> torch.Tensor:
        """The forward of the layer's experts, which are a unit of their own, between two marks."""
        if self._unit is not None:
            hidden, weights = self._unit.take((hidden, weights))
        i, ledger = self._number, self._ledger
        begin = partial(ledger.pass_experts, i)
        hidden, weights = MarkAll.apply(begin, partial(ledger.begin, "rest backward", i), hidden, weights)
        result = compute(hidden, chosen, weights)
        (result,) = MarkAll.apply(begin, partial(ledger.begin, "experts backward", i), result)
        return result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        i, begin = self._number, self._ledger.begin
        if self._unit is not None:  # outside the marks: a unit is gathered and reduced between its casts
            hidden, args, kwargs = self._unit.take((hidden, args, kwargs))
        self._ledger.inputs.append(weakref.ref(hidden.untyped_storage()))
        hidden = Mark.apply(hidden, begin, ("forward", i), ("backward", i - 1) if i else ("end",))
        result = self.layer(hidden, *args, **kwargs)
        if self._is_last:
            hidden, *rest = result if isinstance(result, tuple) else (result,)
            hidden = Mark.apply(hidden, begin, ("head",), ("backward", i))
            result = (hidden, *rest) if isinstance(result, tuple) else hidden
        return result if self._unit is None else self._unit.give_back(result)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Casts nested floating-point tensors (torch/distributed/fsdp/_fully_shard/_fsdp_common.py, _cast_fp_tensor)."""
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values
    )
