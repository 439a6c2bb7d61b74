"""The loss inside the model: only labelled positions meet the head, and in chunks where their logits are many."""

from types import MethodType

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from cookbook.files import RecipeError
from cookbook.models.attention import PACKED, segments

IGNORE_INDEX = -100
LOGITS_BUDGET = 2**27
"""Logits of one matrix product: 0.5 GiB in float32. Where they fit, one product is the fastest."""


class LossHead(torch.nn.Linear):
    """The output head, which returns the loss when it is given targets.

    An engine gathers the head's weight around the call of this module and nowhere else, so loss and chunks lie inside.
    """

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """(L, hidden size) -> the negative log-likelihoods, (L,) float32; without targets, the logits.

        Above the budget, logits exist for one chunk at a time, and are computed again in the backward pass.
        """
        if targets is None:
            return super().forward(hidden)
        chunk = max(1, LOGITS_BUDGET // self.out_features)
        if len(targets) <= chunk:
            return self._chunk(hidden, targets)
        parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
        return torch.cat([checkpoint(self._chunk, *part, use_reentrant=False) for part in parts])

    def _chunk(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # A head that an adapter trains is float32, also where no autocast brings hidden states to that.
        return _nll(super().forward(hidden.to(self.weight.dtype)), targets)


def _nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")


def add_loss(model: PreTrainedModel) -> None:
    """Makes `model(input_ids=, position_ids=, targets=, lengths=None)` return the negative log-likelihoods.

    They come for each labelled position, (L,) float32, in the order of `targets` row by row. A micro-batch without
    labels calls the head too, on zero rows: the collectives of a sharded head must happen on every rank.
    `position_ids` and `targets` (already shifted) are (B, T) int64; there is no attention mask, since causal attention
    never sees the padding on the right. With `lengths`, (samples,) int64 and best on the CPU, the one row is that many
    samples end to end, and each attends to itself only; the model must have been loaded for packing.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        raise RecipeError([f"model {type(model).__name__}: not a backbone with a linear head, which is not served yet"])
    # A head that is quantised, or that tensor parallel cut, has a forward of its own, which must run as it is.
    if type(head) is torch.nn.Linear and not isinstance(head.weight, DTensor):
        head.__class__ = LossHead
    model.forward = MethodType(_forward, model)


def _forward(
    self: PreTrainedModel,
    *,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    targets: torch.Tensor,
    lengths: torch.Tensor | None = None,
    **unset: None,
) -> torch.Tensor:
    # peft hands on every argument that a transformers model could have.
    assert all(value is None for value in unset.values()), f"not known to our loss: {sorted(unset)}"
    options = {}
    if lengths is not None:
        assert self.config._attn_implementation == PACKED, "a packed row, and a model that was not loaded for packing"
        assert input_ids.shape == (1, int(lengths.sum())), f"{tuple(input_ids.shape)} is not one row of {lengths}"
        options["segments"] = segments(lengths, input_ids.device)
    backbone = self.base_model
    hidden = backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False, **options).last_hidden_state
    labelled = targets != IGNORE_INDEX
    return nll_of_targets(self, hidden[labelled], targets[labelled])


def nll_of_targets(model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihoods, (L,) float32, of targets, (L,), after hidden states, (L, hidden size)."""
    head = model.get_output_embeddings()
    # peft's ModulesToSaveWrapper hands arguments on; its LoRA layer would add logits to the loss.
    if isinstance(getattr(head, "original_module", head), LossHead):
        return head(hidden, targets)
    return _nll(head(hidden), targets)
