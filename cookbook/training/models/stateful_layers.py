"""A small model that is tried at the start: its layers that carry a state along a row, found by what they do with two
samples in it, and its losses, which are to be those of transformers' own code.
"""

import contextlib
import gc
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cookbook.facts.model_types import look_up
from cookbook.facts.packing import packing_problem, short_window
from cookbook.facts.tiny_types import LARGEST, fixed_sizes, small_default
from cookbook.system import optional
from cookbook.system.files import RecipeError, first_line
from cookbook.training.models.attention import PACKED, Lengths, Segments, attend
from cookbook.training.models.loss import add_loss
from cookbook.training.models.mixers import keep_apart, packed_row

Result = TypeVar("Result")
WATCHED = "cookbook_watched"
"""Name for `attn_implementation` of a small model."""
LENGTHS = (6, 6)
"""Tokens of the two samples."""
SAME = 1e-4
"""Largest change of the second sample, relative to its largest value, that is none. Grouped products of experts cause
5e-7 at most, layers with a state 0.3 at least (the 106 packed types, transformers 5.23 and 5.24, torch 2.13 on CPU). Of
the losses, 3e-7 at most, and 3e-3 at least without window, cap, sinks or scale (seven types, transformers 5.23)."""
STRONG_VALUES = {"sliding_window": 4, "attn_logit_softcapping": 1.0}
"""Values with which a small model's few tokens and low scores show what these keys do; only where it has them."""
LOGITS = 10.0
"""Factor of a small model's logits, so that a cap of them shows."""


class Trial(NamedTuple):
    """Results of a small model."""

    layers: dict[type[torch.nn.Module], bool]
    """Classes of the outermost modules that mix the samples of a row by other means than attention, and True for those
    that do not if they are told where each sample begins."""
    problem: str | None
    """Why the samples are not kept apart even if each such layer runs on one of them at a time."""
    distance: float = 0.0
    """Distance of one sample's losses from those of transformers' own forward and attention, see `_distance`."""


def stateful_layers(config: PreTrainedConfig) -> dict[type[torch.nn.Module], bool]:
    """The classes of the layers that `keep_apart` has to change in a model, as `Trial.layers`.

    Raises:
        RecipeError: the samples of a packed row would mix all the same.
    """
    trial = try_two_samples(config, with_losses=True)
    if trial.problem is None:
        _refuse_other_losses(config, trial.distance)
        return trial.layers
    version, measured = importlib.metadata.version("transformers"), look_up(config.model_type).transformers
    known = "" if measured in (None, version) else f", or install transformers {measured}, with which it was measured"
    raise RecipeError(
        f"model of type {config.model_type} under transformers {version}: packed samples would not be kept apart:"
        f" {trial.problem}; write data.packing: false{known}"
    )


def row_notes(layers: dict[type[torch.nn.Module], bool]) -> list[str]:
    """Notes for the user on how `stateful_layers` run with the packages that the recipe names; none without any."""
    if not optional.is_used():
        return []
    ways = {True: "once a packed row", False: "on one sample at a time, as its kernels would mix them"}
    return [f"{optional.KEY}: {kind.__name__} runs {ways[is_told]}" for kind, is_told in layers.items()]


def check_padded(config: PreTrainedConfig) -> None:
    """Compare the losses of padded rows with those of transformers' own code, for a model type that was not measured
    with the installed version. A type of which no small model can be made is left to the user, who is told that it was
    not measured.

    Raises:
        RecipeError: a loss is another.
    """
    if look_up(config.model_type).transformers == importlib.metadata.version("transformers"):
        return
    is_ours = packing_problem(config) is None and short_window(config) is None  # as `load_model` decides
    with contextlib.suppress(_TrialFailure):
        _refuse_other_losses(config, _on_small_model(config, partial(_padded_distance, is_ours=is_ours)))


def _refuse_other_losses(config: PreTrainedConfig, distance: float) -> None:
    """Raise RecipeError if losses of a small model are not those of transformers' own code: a key of the configuration
    or an argument of the attention has another name, or what follows the head is new."""
    if distance <= SAME:
        return
    version, measured = importlib.metadata.version("transformers"), look_up(config.model_type).transformers
    way = "" if measured in (None, version) else f"; install transformers {measured}, with which it was measured"
    raise RecipeError(
        f"model of type {config.model_type} under transformers {version}: a loss of its small model is {distance:.0e}"
        f" from that of transformers' own code, so attention or logits here are not the model's{way}"
    )


def try_two_samples(config: PreTrainedConfig, *, with_losses: bool = False) -> Trial:
    """Find the layers by a change of the first sample that changes what a module returns for the second, and then try
    the model with these layers kept apart.

    Args:
        with_losses: compare its losses too, for which it needs a head that a run can train.
    """
    try:
        return _on_small_model(config, partial(_two_samples, with_losses=with_losses))
    except _TrialFailure as error:
        return Trial({}, f"no small model of it can be tried: {error}")


class _TrialFailure(Exception):
    """No small model of a configuration can be made or run."""


def _on_small_model(config: PreTrainedConfig, result_of: Callable[[PreTrainedModel], Result]) -> Result:
    why = ""
    # Seeded, since some weights are drawn by transformers; the random state of the run stays as it is.
    device = _device()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad(), device:
        for shrink in (fixed_sizes, small_default):
            try:
                torch.manual_seed(0)
                return result_of(_small_model(shrink(config), config))
            except Exception as error:  # any of a configuration's checks or a model's own code
                why = why or f"{type(error).__name__}: {first_line(error)}"
            finally:
                gc.collect()  # its hooks hold it in circles, beside the weights that are trained
    raise _TrialFailure(why)


def _two_samples(model: PreTrainedModel, *, with_losses: bool) -> Trial:
    expected = _their_losses(model) if with_losses else None
    layers = dict.fromkeys(_mixing_layers(model), False)
    keep_apart(model, layers)
    problem = _problem(model, has_found=bool(layers))
    if problem is None and optional.is_used():
        _ask_kernels(model, layers)
    if problem is not None or expected is None:
        return Trial(layers, problem)
    model.set_attn_implementation(PACKED)
    return Trial(layers, None, _distance(expected, _our_losses(model)))


def _ask_kernels(model: PreTrainedModel, layers: dict[type[torch.nn.Module], bool]) -> None:
    """Set to True the layers that have the same logits and gradients told where the samples begin as on each sample
    alone. Where one of its kernels is transformers' own, it raises an error (transformers 5.23,
    integrations/hub_kernels.py, `use_kernel_func_from_hub_with_fallback`).
    """
    alone = _with_gradients(model, 3)
    for kind in layers:
        keep_apart(model, layers | {kind: True})
        with contextlib.suppress(Exception):  # any of a package's
            told, other = (_with_gradients(model, first) for first in (3, 30))
            layers[kind] = all(map(_agree, alone, told)) and _agree(told[0], other[0])
    keep_apart(model, layers)


def _with_gradients(model: PreTrainedModel, first: int) -> list[torch.Tensor]:
    """The logits of the second sample of a row, and a gradient by each parameter that they depend on."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        logits = _results(model, LENGTHS, first)
        gradients = torch.autograd.grad(logits.square().mean(), parameters, allow_unused=True)
    return [logits.detach(), *(gradient for gradient in gradients if gradient is not None)]


def _padded_distance(model: PreTrainedModel, *, is_ours: bool) -> float:
    expected = _their_losses(model)
    if is_ours:
        model.set_attn_implementation(PACKED)
    return _distance(expected, _our_losses(model))


def _device() -> torch.device:
    """Where the small model lies: on the CPU, and with packages of `model.kernels`, which may need it, on the GPU."""
    is_on_gpu = optional.is_used() and torch.cuda.is_available()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_on_gpu else torch.device("cpu")


def _small_model(small: PreTrainedConfig, config: PreTrainedConfig) -> PreTrainedModel:
    small.pad_token_id, small.eos_token_id, small.bos_token_id = 0, 2, 1
    for key, value in STRONG_VALUES.items():
        if getattr(small, key, None) is not None:
            setattr(small, key, value)
    served = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        size = served(type(small).from_dict(small.to_dict())).num_parameters()
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters are left")
    # By its class: `from_config` would divide the weights among the ranks under ZeRO-3.
    model = served(small).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)  # so large that one token matters to another
    return model


def _their_losses(model: PreTrainedModel) -> torch.Tensor:
    """The losses of one sample, (T - 1,), by the model's own forward and attention."""
    model.get_output_embeddings().weight *= LOGITS
    ids = _ids()
    return F.cross_entropy(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), ids[0, 1:], reduction="none")


def _our_losses(model: PreTrainedModel) -> torch.Tensor:
    """Losses of that sample as a run has them, by `add_loss`."""
    add_loss(model)
    ids = _ids()
    losses: torch.Tensor = model(input_ids=ids, targets=ids[0, 1:], target_positions=torch.arange(ids.shape[1] - 1))
    return losses


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest change, relative to the largest value."""
    return float((first - second).abs().max() / first.abs().max())


def _mixing_layers(model: PreTrainedModel) -> frozenset[type[torch.nn.Module]]:
    mixing, attending = set[torch.nn.Module](), set[torch.nn.Module]()
    is_repeating = False

    def attend_watched(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        attending.add(module)
        return attend(module, *args, **kwargs)

    def compare(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:
        nonlocal is_repeating
        if is_repeating or not list(_second(results)):
            return
        is_repeating = True
        try:
            # Both of copies: some modules change what they are given.
            same, other = (
                list(_second(type(module).forward(module, *_copy(args, change), **_copy(kwargs, change))))
                for change in (False, True)
            )
        finally:
            is_repeating = False
        if not all(map(_agree, same, other)):
            mixing.add(module)

    AttentionInterface.register(WATCHED, attend_watched)
    model.set_attn_implementation(WATCHED)
    hooks = [module.register_forward_hook(compare, with_kwargs=True) for module in model.modules()]
    _results(model, LENGTHS)
    for hook in hooks:
        hook.remove()
    outermost: list[torch.nn.Module] = []
    for module in model.modules():  # outer ones first
        is_whole = isinstance(module, (GradientCheckpointingLayer, PreTrainedModel))
        has_attention = not attending.isdisjoint(module.modules())
        is_inside = any(module in outer.modules() for outer in outermost)
        if module in mixing and not (is_whole or has_attention or is_inside):
            outermost.append(module)
    classes = frozenset(map(type, outermost))
    AttentionInterface.register(
        WATCHED, attend
    )  # which would hold the small model, beside the weights that are trained
    return classes


def _problem(model: PreTrainedModel, *, has_found: bool) -> str | None:
    if look_up(model.config.model_type).has_state and not has_found:
        return "it has layers that carry a state along a row, and none was found"
    whole, apart = ([_results(model, lengths, first) for first in (3, 30)] for lengths in ((sum(LENGTHS),), LENGTHS))
    if _agree(*whole):
        return "no token of its small model matters to another, so nothing can be tried"
    return None if _agree(*apart) else "in its small model the first sample of a row changed the second"


def _results(model: PreTrainedModel, lengths: tuple[int, ...], first: int = 3) -> torch.Tensor:
    """The logits of the second sample of a row; `first` is a token of the first."""
    ids = _ids()
    ids[:, : LENGTHS[0]] += first
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    segments = Segments(offsets, max(lengths), Lengths(lengths))
    with packed_row(lengths, offsets):
        logits = model(input_ids=ids, position_ids=positions, segments=segments, use_cache=False).logits
    return torch.cat(list(_second(logits)))


def _ids() -> torch.Tensor:
    return torch.arange(3, 3 + sum(LENGTHS))[None]


def _agree(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool((first - second).abs().max() <= SAME * first.abs().max())  # False of NaN


def _second(value: Any) -> Iterator[torch.Tensor]:
    """The part of each tensor of a row that belongs to the second sample."""
    if isinstance(value, tuple):
        for item in value:
            yield from _second(item)
    elif _is_of_row(value):
        yield value[:, LENGTHS[0] :]


def _copy(value: Any, change: bool) -> Any:
    """A copy of arguments, with another first sample if `change` is true."""
    if type(value) is tuple:
        return tuple(_copy(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _copy(item, change) for key, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    value = value.clone()
    if change and _is_of_row(value):
        value[:, : LENGTHS[0]].normal_()
    return value


def _is_of_row(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[:2] == (1, sum(LENGTHS))
