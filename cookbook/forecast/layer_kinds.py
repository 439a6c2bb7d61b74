"""Which layers of a model are alike, so that the trace of a few tells of all."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from cookbook.facts.score_head import empty_model
from cookbook.forecast.activations import Phase

FOUND: dict[tuple[type, str, int], "ShortModel"] = {}


@dataclass(frozen=True)
class ShortModel:
    """A shorter model that tells of a whole one."""

    config: PreTrainedConfig
    layers: list[int]
    """Which layer of the whole each of its layers is."""
    sources: list[int]
    """The layer here that tells of each layer of the whole."""


def few_layers(config: PreTrainedConfig, start: int = 0) -> ShortModel:
    """The shortest model with a layer of each kind that is neither the first nor the last, and whose first and last
    layers are as those of the whole. All layers if there is none, or the model does not tell which are alike.

    Args:
        start: the first layer that a backward reaches, which is of a kind of its own, as are those before it.
    """
    key = type(config), config.to_json_string(), start
    if key not in FOUND:
        FOUND[key] = _few_layers(config, start)
    return FOUND[key]


def _few_layers(config: PreTrainedConfig, start: int) -> ShortModel:
    made_of, rest = _kinds_of(config)
    count = len(made_of)
    if count == config.num_hidden_layers:
        kinds = [(kind, (i > start) - (i < start)) for i, kind in enumerate(made_of)]
        inner = {kind: i for i, kind in reversed(list(enumerate(kinds[:-1]))[1:])}
        ends = (end for end in range(3, count) if {*kinds[1 : end - 1]} == {*inner} and kinds[end - 1] == kinds[-1])
        for layers in (sorted({0, count - 1, *inner.values()}), list(range(next(ends, count)))):
            shorter = _with_layers(config, layers)
            if len(layers) < count and _kinds_of(shorter) == ([made_of[i] for i in layers], rest):
                places = {kind: layers.index(i) for kind, i in inner.items()}
                return ShortModel(shorter, layers, [0, *(places[kind] for kind in kinds[1:-1]), len(layers) - 1])
    return whole(config, count)


def whole(config: PreTrainedConfig, count: int) -> ShortModel:
    """All of so many layers."""
    return ShortModel(_with_layers(config, range(config.num_hidden_layers)), [*range(count)], [*range(count)])


def _with_layers(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """The configuration of these layers alone, where it says by lists how each one is, or which ones are so."""
    count = config.num_hidden_layers
    config = copy.deepcopy(config)
    for key, value in list(vars(config).items()) if len(layers) < count else ():
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(config, key, [value[i] for i in layers])
        elif isinstance(value, (list, tuple)) and ("layer" in key or "idx" in key):
            setattr(config, key, [place for place, i in enumerate(layers) if i in value])
    if dense := getattr(config, "first_k_dense_replace", None):
        config.first_k_dense_replace = sum(i < dense for i in layers)
    config.num_hidden_layers = len(layers)
    config.use_cache = False
    return config


def _kinds_of(config: PreTrainedConfig) -> tuple[list[Any], Any]:
    """List what each layer is made of: modules, shapes of weights and settings; and the weights outside of layers.
    Nothing if the model cannot be built.
    """
    try:
        with torch.device("meta"):
            model = empty_model(config)
    except Exception:  # of a shorter one: its code may fail in any way
        return [], None
    layers = [layer for _, _, layer in decoder_layers(model)]
    inside = {id(module) for layer in layers for module in layer.modules()}
    rest = [(name, _weights(module)) for name, module in model.named_modules() if id(module) not in inside]
    return [
        tuple((name, type(module), _weights(module), _settings(module)) for name, module in layer.named_modules())
        for layer in layers
    ], rest


def decoder_layers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Each layer that checkpointing recomputes as a whole, after its owner and its name there."""
    return [
        (owner, name, module)
        for owner in model.modules()
        for name, module in owner._modules.items()
        if isinstance(module, GradientCheckpointingLayer) and not isinstance(owner, GradientCheckpointingLayer)
    ]


def _weights(module: torch.nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters(recurse=False))


def _settings(module: torch.nn.Module) -> tuple[Any, ...]:
    settings = sorted((name, value) for name, value in vars(module).items() if isinstance(value, int))
    return tuple(pair for pair in settings if "idx" not in pair[0])  # a layer's number


def first_reached(phases: Sequence[Phase], few: ShortModel) -> int:
    """The first layer of the whole model that a backward reaches; 0 if it reaches all. An adapter with targets in some
    layers only leaves those before the first of them out.
    """
    reached = {phase.layer for phase in phases if phase.name == "backward"}
    if len(reached) == len(few.layers) or len(few.sources) == len(few.layers):
        return 0
    return next((layer for layer, place in enumerate(few.sources) if place in reached), 0)


def grows_backward(phases: Sequence[Phase], few: ShortModel) -> bool:
    """Return whether the backward of a layer leaves more than it frees, as RecurrentGemma's, which keeps its state."""
    waits, _ = _waits(phases, few)
    return min(waits[1:], default=0) < 0


def _waits(phases: Sequence[Phase], few: ShortModel) -> tuple[list[int], list[int]]:
    """Count what the backward of each layer frees, of the first as if nothing, and what is held where each begins."""
    of_layers = [
        (phase.layer, phase.held) for phase in reversed(phases) if phase.name == "backward" and phase.layer is not None
    ]
    first = dict(of_layers)  # without those that a backward does not reach
    held = [first.get(layer, first[min(first)]) for layer in range(len(few.layers))]
    return [0, *(after - before for before, after in pairwise(held))], held


def lengthen(phases: Sequence[Phase], few: ShortModel, *, has_copies: bool) -> Iterator[Phase]:
    """The phases of the whole model, from those of a shorter one: each layer's are those of the layer that tells of it,
    above what the other layers hold then.

    Args:
        has_copies: of weights, which autocast makes in the forward and frees at its end.
    """
    if len(few.sources) == len(few.layers):
        yield from phases
        return
    alone = {phase.name: phase for phase in phases if phase.layer is None}
    groups = {
        key: list(group) for key, group in groupby(phases, lambda phase: (phase.layer, phase.name.endswith("forward")))
    }
    forward = [phase.held for phase in phases if phase.name in ("forward", "head")]
    waits, backward = _waits(phases, few)
    kept = [after - before for before, after in pairwise(forward)]
    before = [*accumulate((kept[place] for place in few.sources), initial=forward[0])]
    below = [*accumulate(waits[place] for place in few.sources)]
    yield alone["embed"]
    for layer, place in enumerate(few.sources):
        yield from _raise(groups[place, True], layer, before[layer] - forward[place])
    yield from _raise([alone["head"]], None, before[-1] - forward[-1])
    # What waits for the backward is what the forward kept; without the copies, it is what the backward frees.
    more = below[-1] - sum(waits) if has_copies else before[-1] - forward[-1]
    yield from _raise([alone["head backward"]], None, more)
    top = backward[-1] + more - below[-1]
    for layer, place in reversed(list(enumerate(few.sources))):
        yield from _raise(groups.get((place, False), []), layer, top + below[layer] - backward[place])
    yield from _raise([alone["end"]] if "end" in alone else [], None, top - backward[0])


def _raise(phases: list[Phase], layer: int | None, by: int) -> Iterator[Phase]:
    for phase in phases:
        yield replace(phase, layer=layer, held=phase.held + by, peak=phase.peak + by)
