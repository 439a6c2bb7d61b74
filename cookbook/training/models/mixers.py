"""Layers that carry a state along a row (linear attention, state space, convolution), run on one sample at a time."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cookbook.training.models.sample_draws import rows_of_parts

_LENGTHS: ContextVar[tuple[int, ...]] = ContextVar("lengths", default=())


@contextlib.contextmanager
def packed_row(lengths: tuple[int, ...]) -> Iterator[None]:
    """Have a model of `keep_apart` take its input for a row of samples while this is open; `lengths` is in tokens."""
    before = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(before)


def has_several() -> bool:
    """Return whether a `packed_row` of more than one sample is open."""
    return len(_LENGTHS.get()) > 1


def replay_context(
    context: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a checkpointed layer, with the row of its forward around its recomputation too, which comes after
    that `packed_row`, and in a pipeline after other rows (torch/utils/checkpoint.py, `context_fn`)."""
    forward, recompute = context()
    return forward, _both(_LENGTHS.get(), recompute)


@contextlib.contextmanager
def _both(lengths: tuple[int, ...], context: AbstractContextManager[Any]) -> Iterator[None]:
    with packed_row(lengths), context:
        yield


def is_kept_apart(model: torch.nn.Module) -> bool:
    """Return whether `keep_apart` has changed modules of a model."""
    return any(getattr(vars(module).get("forward"), "__func__", None) is _each_alone for module in model.modules())


def keep_apart(model: PreTrainedModel, layers: Set[type[torch.nn.Module]]) -> None:
    """Run the modules that carry a state along a row on each sample of a `packed_row`, one after another.

    So the result is that of the samples alone whatever kernel computes it, and no kernel must know of samples.

    Args:
        layers: classes of these modules, see `stateful_layers`.
    """
    for module in model.modules():
        if type(module) in layers:
            # The instance's, not the class's: the hooks of engines and the classes that FSDP2 makes stay as they are.
            module.forward = MethodType(_each_alone, module)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and not layers.isdisjoint(map(type, layer.modules())):
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
    lengths = _LENGTHS.get()
    signature = inspect.signature(forward)
    bound = signature.bind(self, *args, **kwargs)
    # Further keywords would reach kernels, and not every kernel takes them.
    bound.arguments.pop("kwargs", None)
    arguments = dict(bound.arguments)
    arguments.pop("self")
    parts = {name: _split(value, lengths) for name, value in arguments.items()}
    results = []
    for i, drawn in enumerate(rows_of_parts(lengths)):
        with packed_row(()), drawn:  # modules inside see one sample
            results.append(forward(self, **{name: part[i] for name, part in parts.items()}))
    return _join(results)


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
