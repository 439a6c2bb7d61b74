"""Dropout and noise of a model in training, drawn for the tokens of a micro-batch by `config/draws.py`."""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cookbook.config.draws import DRAWS, dropout_mask, feature_words, name_word, noise, threshold
from cookbook.system.files import RecipeError


class _CurrentDraw(NamedTuple):
    tokens: torch.Tensor | None = None
    """Words of the micro-batch, (B, T); None outside of a training forward."""
    lengths: torch.Tensor | None = None
    """Tokens of the sequence of each, (B, T)."""


@dataclass
class _Place:
    """Where a forward is: which call of dropout in which layer comes next."""

    layer: str = ""
    count: int = 0


# Not a ContextVar: a compiled layer reads them, and a GPU's backward recomputes layers in a thread of its own.
_NOW = _CurrentDraw()
_PLACE = _Place()


@contextlib.contextmanager
def drawn_row(
    tokens: torch.Tensor | None, lengths: torch.Tensor | None = None, layer: str = "", count: int = 0
) -> Iterator[None]:
    """Draw for the tokens of a micro-batch while this is open.

    Args:
        tokens: their `token_words`, int32 (B, T); without them there is nothing to draw.
        lengths: the tokens of the sequence of each, int32 (B, T), for NEFTune.
        layer, count: the next call of dropout is this one in this layer; default: the first, in none.
    """
    global _NOW
    before, _NOW = _NOW, _CurrentDraw(tokens, lengths)
    _PLACE.layer, _PLACE.count = layer, count
    try:
        yield
    finally:
        _NOW = before


def rows_of_parts(lengths: tuple[int, ...]) -> list[AbstractContextManager[None]]:
    """A `drawn_row` for each sample of the packed row that is open."""
    if _NOW.tokens is None:
        return [contextlib.nullcontext() for _ in lengths]
    # Each begins at the call where the row is, as in a row of one sample.
    here = _PLACE.layer, _PLACE.count
    return [drawn_row(part, None, *here) for part in _NOW.tokens.split(lengths, 1)]


def replay_context(
    context: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a checkpointed layer, with the row of its forward around its recomputation too, which comes after
    it, and in a pipeline after other rows (torch/utils/checkpoint.py, `context_fn`)."""
    forward, recompute = context()
    return forward, _both(drawn_row(*_NOW, layer=_PLACE.layer), recompute)


@contextlib.contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class SampleDropout(torch.nn.Dropout):
    """Dropout on the input of an adapted layer, whose draws belong to the tokens."""

    word: torch.Tensor
    """The layer's, by its name."""
    width: int
    """Features of the whole layer."""
    shard: int
    """Which part of the features this process has, where tensor parallel divides them."""
    _features: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., features) -> the same, of the tokens of the row that is open."""
        limit = threshold(self.p)
        if not self.training or not limit:
            return hidden
        width = hidden.shape[-1]
        start = 0 if width == self.width else self.shard * width
        if torch.compiler.is_compiling():
            features = feature_words(self.word, start, width, hidden.device)
        else:
            if self._features is None or self._features.device != hidden.device:
                self._features = feature_words(self.word, start, width, hidden.device)
            features = self._features
        return _drop(hidden, features, limit, start % 2)


def _drop(hidden: torch.Tensor, features: torch.Tensor, limit: int, first: int = 0) -> torch.Tensor:
    tokens, width = _tokens_of(hidden), hidden.shape[-1]
    mask = dropout_mask(tokens, features, limit)[:, first : first + width].view(hidden.shape)
    return (hidden * (DRAWS / (DRAWS - limit))).masked_fill_(mask, 0.0)


def _tokens_of(hidden: torch.Tensor) -> torch.Tensor:
    """The words of the tokens of hidden states, (N,)."""
    if _NOW.tokens is None:
        raise RuntimeError("dropout in training outside of a micro-batch")
    if math.prod(hidden.shape[:-1]) != _NOW.tokens.numel():
        raise RecipeError(
            f"dropout of values of the shape {tuple(hidden.shape)}, which are not those of the {_NOW.tokens.numel()}"
            " tokens of a micro-batch, so that what is dropped would depend on the micro-batch: set it to 0"
        )
    return _NOW.tokens.reshape(-1)


def draw_for_tokens(model: PreTrainedModel, neftune_alpha: float, shard: int, tensor_size: int) -> None:
    """Have all that a model draws in training drawn for the tokens, in place.

    Args:
        shard: the rank in the tensor-parallel group of `tensor_size`.
    """
    _draw_for_adapter(model, shard)
    if keys_drawn_by_model(model.config):
        _draw_for_model(model, tensor_size)
    if neftune_alpha:
        _add_noise(model, neftune_alpha)


def _draw_for_adapter(model: torch.nn.Module, shard: int) -> None:
    """Have the dropout of peft's layers drawn for the tokens, in place.

    Args:
        shard: the rank in the tensor-parallel group.
    """
    from peft.tuners.lora import LoraLayer

    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        base: Any = layer.get_base_layer()
        sized: Any = base if isinstance(base, torch.nn.Linear) else layer
        for dropout in layer.lora_dropout.values():
            if isinstance(dropout, torch.nn.Dropout):
                dropout.__class__ = SampleDropout
                assert isinstance(dropout, SampleDropout)
                dropout.word = torch.tensor(name_word(name), dtype=torch.int32)
                dropout.width, dropout.shard = int(sized.in_features), shard


def _draw_for_model(model: PreTrainedModel, tensor_size: int) -> None:
    """Have the dropouts of a model's own code drawn for the tokens: by the layer and the number of the call in it.

    Args:
        tensor_size: of the tensor-parallel group, which must not divide what is dropped.
    """
    # F.dropout is what torch.nn.Dropout calls too, and code of transformers without one.
    width = model.config.hidden_size if tensor_size > 1 else None

    def dropout(hidden: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        limit = threshold(p)
        if not training or not limit or _NOW.tokens is None:
            return _torch_dropout(hidden, p, training, inplace)
        if width not in (None, hidden.shape[-1]):
            raise RecipeError(f"a part of the {width} features is dropped, which tensor parallel does not serve")
        word = torch.tensor(name_word(f"{_PLACE.layer}#{_PLACE.count}"), dtype=torch.int32)
        _PLACE.count += 1
        return _drop(hidden, feature_words(word, 0, hidden.shape[-1], hidden.device), limit)

    F.dropout = dropout  # type: ignore[assignment]
    for name, layer in model.named_modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.register_forward_pre_hook(_entering(name))


_torch_dropout = F.dropout


def _entering(name: str) -> Callable[..., None]:
    def enter(*_: Any) -> None:
        _PLACE.layer, _PLACE.count = name, 0

    return enter


def _add_noise(model: PreTrainedModel, alpha: float) -> None:
    """Add NEFTune's noise to the embeddings in training: uniform, scaled by alpha / sqrt(L d) for a sequence of L
    tokens and d features (Jain et al. 2023, arXiv 2310.05914, algorithm 1)."""
    word = torch.tensor(name_word("neftune"), dtype=torch.int32)

    def add(module: torch.nn.Module, _: Any, embeddings: torch.Tensor) -> torch.Tensor:
        if not module.training or _NOW.tokens is None:
            return embeddings
        assert _NOW.lengths is not None
        width = embeddings.shape[-1]
        drawn = noise(_tokens_of(embeddings), feature_words(word, 0, width, embeddings.device))[:, :width]
        scale = alpha / (_NOW.lengths.reshape(-1, 1) * width).float().sqrt()
        return embeddings + (drawn * scale).view(embeddings.shape).to(embeddings.dtype)

    model.get_input_embeddings().register_forward_hook(add)


def drawn_parts(config: PreTrainedConfig) -> dict[str, float]:
    """Keys of a configuration by which the model's code draws in training, with their values above 0."""
    return {
        key: value
        for key, value in config.to_dict().items()
        if key.endswith(("dropout", "dropout_prob", "pdrop", "layerdrop", "jitter_noise"))
        and not key.startswith(("classifier_", "summary_"))
        and isinstance(value, float)
        and value > 0
    }


def _keys_drawn_elsewhere(config: PreTrainedConfig) -> dict[str, float]:
    """The keys of `drawn_parts` that cannot be drawn for tokens: dropout of attention's probabilities, which its kernel
    draws, whole layers, and the noise of a router."""
    kinds = ("layerdrop", "jitter_noise")
    return {key: value for key, value in drawn_parts(config).items() if "att" in key or key.endswith(kinds)}


def keys_drawn_by_model(config: PreTrainedConfig) -> dict[str, float]:
    """The keys of `drawn_parts` that are drawn for the tokens."""
    elsewhere = _keys_drawn_elsewhere(config)
    return {key: value for key, value in drawn_parts(config).items() if key not in elsewhere}


def set_to_zero(config: PreTrainedConfig) -> bool:
    """Set what cannot be drawn for tokens to 0, in place. Returns whether there was something."""
    keys = _keys_drawn_elsewhere(config)
    for key in keys:
        setattr(config, key, 0.0)
    return bool(keys)


def notes(config: PreTrainedConfig, *, is_compiled: bool) -> list[str]:
    """Notes for the user on what a configuration draws.

    Raises:
        RecipeError: compiled layers, and a model whose own code draws.
    """
    if is_compiled and (keys := keys_drawn_by_model(config)):
        raise RecipeError(
            f"model.compile is true, and the code of {config.model_type} drops values ({_list_keys(keys)}), which is"
            " drawn for each call of a layer by itself; write model.compile: false"
        )
    if keys := _keys_drawn_elsewhere(config):
        return [
            f"{config.model_type} has {_list_keys(keys)}: off in this run, since it is drawn by kernels or for whole"
            " layers, and would depend on processes and micro-batches"
        ]
    return []


def _list_keys(keys: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in keys.items())
