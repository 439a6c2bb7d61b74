"""Trained rows of embedding and head, for new tokens, in peft's own layers, so that names and files are peft's."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils import TrainableTokensWrapper
from torch.nn import Embedding
from transformers import PreTrainedModel

from cookbook.config.sections import AdapterSection
from cookbook.system.files import RecipeError
from cookbook.system.replaced import replace_functions


def trained_rows(model: PreTrainedModel, settings: AdapterSection, rows: range) -> dict[str, list[int]]:
    """peft's `trainable_token_indices`: the rows by the names of embedding and head, a tied head left to peft; none of
    a module that the adapter trains whole, or that this stage of a pipeline does not have.
    """
    # peft 0.21.2, tuners/trainable_tokens/layer.py, TrainableTokensLayer.forward_adapters
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        why = f"the head of {type(model).__name__} has a bias, which peft leaves out where it trains its rows"
        raise RecipeError(f"model.new_tokens: {why}; train all weights without an adapter")
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(first, Embedding) and type(first).forward is not Embedding.forward and _scale_of(first) is None:
        why = f"{type(first).__name__} of {type(model).__name__} does more than look rows up, and that is not served"
        raise RecipeError(f"model.new_tokens: {why} beside an adapter; train all weights without an adapter")
    ends = [first] + [last] * (not getattr(model.config, "tie_word_embeddings", False))
    ends = [module for module in ends if hasattr(module, "weight")]
    names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
    return {name: [*rows] for name in names if name.rpartition(".")[2] not in settings.modules_to_save}


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Have peft make the rows as zeros. It would read them from a matrix that a process may hold a shard of, and under
    ZeRO-3 only with CUDA (peft 0.21.2, tuners/trainable_tokens/layer.py, TrainableTokensLayer.update_layer).
    """

    def rows(self: Any, adapter_name: str, *, token_indices: list[int] | None = None, tied_adapter: Any = None) -> None:
        if tied_adapter is None:
            assert token_indices is not None
            base = self.get_base_layer()
            width = base.embedding_dim if isinstance(base, Embedding) else base.in_features
            self.token_indices[adapter_name] = token_indices
            self.trainable_tokens_delta[adapter_name] = torch.nn.Parameter(torch.zeros(len(token_indices), width))

    with replace_functions(TrainableTokensLayer, update_layer=rows):
        yield


def fill(model: PreTrainedModel, first: dict[str, torch.Tensor]) -> None:
    """Set all trained rows of a matrix to one row, which `first` has by the names of the matrices."""
    for name, module in model.named_modules():
        if isinstance(module, TrainableTokensWrapper) and (row := first.get(f"{name}.weight")) is not None:
            for parameter in module.token_adapter.trainable_tokens_delta.values():
                parameter.data.copy_(row)


def compute_apart(model: PreTrainedModel) -> None:
    """Have embedding and head with trained rows call the module that they wrap. peft's own forward copies its whole
    matrix, and reads it outside of the module, around whose call engines gather it.
    """
    for module in model.modules():
        if isinstance(module, TrainableTokensWrapper):
            _fill_gaps(module.token_adapter)
            forward = _embed if isinstance(module.original_module, Embedding) else _score
            own = {"forward": forward, "weight": _FROZEN, "__setattr__": _set}
            module.__class__ = type("RowsApart", (type(module),), own)


_FROZEN = property(lambda self: self.token_adapter.base_layer.weight)
"""The frozen matrix as `weight`, by which accelerate sees that embedding and head are tied; peft's property makes a new
matrix each time."""


def _set(self: Any, name: str, value: Any) -> None:
    """Set an attribute; `weight` is that of the wrapped module, so that transformers can tie weights again that
    accelerate has moved (modeling_utils.py, tie_weights)."""
    torch.nn.Module.__setattr__(self.token_adapter.base_layer if name == "weight" else self, name, value)


@torch.no_grad()
def _fill_gaps(layer: Any) -> None:
    """Give a layer whose trained rows have gaps, or another order, as peft's own adapters may, all rows from the first
    to the last, in order: those between are the frozen matrix's. Tied layers share them."""
    (name,) = layer.trainable_tokens_delta
    ids, own = layer.token_indices[name], layer.trainable_tokens_delta[name]
    first, end = min(ids), max(ids) + 1
    if ids == [*range(first, end)]:
        return
    rows = layer.base_layer.weight[first:end].detach().to(own.dtype, copy=True)
    rows[torch.tensor(ids) - first] = own.detach()
    layer.trainable_tokens_delta[name] = torch.nn.Parameter(rows, requires_grad=own.requires_grad)
    layer.token_indices[name] = [*range(first, end)]


def _rows_of(layer: Any) -> tuple[int, torch.Tensor]:
    """The token id of the first trained row, and all trained rows, whose ids are consecutive."""
    (name,) = layer.trainable_tokens_delta
    return layer.token_indices[name][0], layer.trainable_tokens_delta[name]


def _scale_of(embedding: Any) -> Any:
    """The factor, a buffer or a number, by which the forward of Gemma's embedding and of others multiplies; or None."""
    return getattr(embedding, "embed_scale", None)


def _embed(self: Any, ids: torch.Tensor) -> torch.Tensor:
    layer = self.token_adapter
    embedded = layer.base_layer(ids)
    first, rows = _rows_of(layer)
    is_new = (ids >= first) & (ids < first + len(rows))
    own = torch.nn.functional.embedding((ids - first) * is_new, rows.to(embedded.dtype))
    if (scale := _scale_of(layer.base_layer)) is not None:
        own = own * torch.as_tensor(scale).to(own.dtype)
    return torch.where(is_new.unsqueeze(-1), own, embedded)


def _score(self: Any, hidden: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """The forward of a head with trained rows: see `LossHead.forward` in cookbook/training/models/loss.py; without our
    loss the logits."""
    if type(self.token_adapter.base_layer) is torch.nn.Linear:
        return self.token_adapter(hidden)
    return self.token_adapter.base_layer(hidden, *arguments, rows=_rows_of(self.token_adapter), **options)
