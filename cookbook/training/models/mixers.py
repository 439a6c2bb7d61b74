"""Layers that carry a state along a row (linear attention, state space, convolution), run on one sample at a time, or
told where each sample begins.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cookbook.training.models.sample_draws import rows_of_parts


@dataclass(frozen=True)
class _Row:
    """Samples of a packed row."""

    lengths: tuple[int, ...] = ()
    """Tokens of each."""
    offsets: torch.Tensor | None = None

    @cached_property
    def places(self) -> dict[str, torch.Tensor]:
        """Where they begin, as transformers names it for kernels: `cu_seq_lens_q`, (samples + 1,), and `seq_idx`,
        (1, T), both int32. Once for all layers: fla keeps what it computes of the offsets by the tensor's identity.
        """
        if self.offsets is None:
            return {}
        numbers = torch.arange(len(self.lengths), dtype=torch.int32, device=self.offsets.device)
        sample = numbers.repeat_interleave(self.offsets.diff(), output_size=sum(self.lengths))
        return {"cu_seq_lens_q": self.offsets, "seq_idx": sample[None]}


_NO_ROW = _Row()
_ROW: ContextVar[_Row] = ContextVar("row", default=_NO_ROW)


@contextlib.contextmanager
def packed_row(lengths: tuple[int, ...], offsets: torch.Tensor | None = None) -> Iterator[None]:
    """Have a model of `keep_apart` take its input for a row of samples while this is open.

    Args:
        lengths: in tokens.
        offsets: (samples + 1,) int32 on the model's device, of which layers are told.
    """
    with _open_row(_Row(lengths, offsets)):
        yield


@contextlib.contextmanager
def _open_row(row: _Row) -> Iterator[None]:
    before = _ROW.set(row)
    try:
        yield
    finally:
        _ROW.reset(before)


def has_several() -> bool:
    """Return whether a `packed_row` of more than one sample is open."""
    return len(_ROW.get().lengths) > 1


def replay_context(
    context: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a checkpointed layer, with the row of its forward around its recomputation too, which comes after
    that `packed_row`, and in a pipeline after other rows (torch/utils/checkpoint.py, `context_fn`)."""
    forward, recompute = context()
    return forward, _both(_ROW.get(), recompute)


@contextlib.contextmanager
def _both(row: _Row, context: AbstractContextManager[Any]) -> Iterator[None]:
    with _open_row(row), context:
        yield


def is_kept_apart(model: torch.nn.Module) -> bool:
    """Return whether `keep_apart` has changed modules of a model."""
    ways = (_each_alone, _with_places)
    return any(getattr(vars(module).get("forward"), "__func__", None) in ways for module in model.modules())


def keep_apart(model: PreTrainedModel, layers: Mapping[type[torch.nn.Module], bool]) -> None:
    """Run the modules that carry a state along a row on each sample of a `packed_row`, one after another.

    So the result is that of the samples alone whatever kernel computes it, and no kernel must know of samples. Modules
    whose kernels do run once, on the whole row.

    Args:
        layers: classes of these modules, and True for those whose kernels keep samples apart that they are told of; see
            `stateful_layers`.
    """
    for module in model.modules():
        if type(module) in layers:
            # The instance's, not the class's: the hooks of engines and the classes that FSDP2 makes stay as they are.
            module.forward = MethodType(_with_places if layers[type(module)] else _each_alone, module)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and not layers.keys().isdisjoint(map(type, layer.modules())):
            # ZeRO-3 then gathers the weights of the layer once, around the loop (DeepSpeed 0.19.8,
            # utils/z3_leaf_module.py, set_z3_leaf_module): ranks with other numbers of samples would gather another
            # number of times. Not of the module alone: its input comes by name, and DeepSpeed would free the weights
            # before its backward.
            layer._z3_leaf = True


@torch.compiler.disable  # else a compiled layer would recompile for each new list of lengths
def _each_alone(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that carries a state. Its tensors are (1, T, ...) or None."""
    forward = type(self).forward
    if not has_several():
        return forward(self, *args, **kwargs)
    lengths = _ROW.get().lengths
    parts = {name: _split(value, lengths) for name, value in _arguments(self, args, kwargs).items()}
    results = []
    for i, drawn in enumerate(rows_of_parts(lengths)):
        with packed_row(()), drawn:  # modules inside see one sample
            results.append(forward(self, **{name: part[i] for name, part in parts.items()}))
    return _join(results)


@torch.compiler.disable
def _with_places(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module whose kernels keep the samples of a row apart if they are told where each begins."""
    return type(self).forward(self, **_arguments(self, args, kwargs), **(_ROW.get().places if has_several() else {}))


def _arguments(self: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a module's forward by name, without further keywords: they would reach kernels, and not every kernel
    takes them."""
    arguments = dict(inspect.signature(type(self).forward).bind(self, *args, **kwargs).arguments)
    return {name: value for name, value in arguments.items() if name not in ("self", "kwargs")}


def _split(value: Any, lengths: tuple[int, ...]) -> list[Any]:
    """An argument of a whole row as an argument for each sample."""
    if isinstance(value, tuple):
        return list(zip(*(_split(item, lengths) for item in value), strict=True))
    if isinstance(value, torch.Tensor):
        assert value.shape[:2] == (1, sum(lengths)), f"{tuple(value.shape)} is not a row of {sum(lengths)} tokens"
        return list(value.split(lengths, 1))
    assert value is None or isinstance(value, bool), f"{type(value).__name__} cannot be divided among samples"
    return [value] * len(lengths)


def _join(results: list[Any]) -> Any:
    first = results[0]
    if isinstance(first, tuple):
        return tuple(_join(list(parts)) for parts in zip(*results, strict=True))
    return torch.cat(results, dim=1) if isinstance(first, torch.Tensor) else None
