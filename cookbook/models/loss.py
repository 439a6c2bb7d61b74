"""The loss inside the model: only labelled positions meet the head, and in chunks where their logits are many."""

from types import MethodType

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from cookbook.files import RecipeError
from cookbook.models.attention import PACKED, Lengths, Segments

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
    """Makes `model(...)` return the negative log-likelihoods of the targets, (L,) float32, in their order.

    Its arguments are `input_ids`, `targets` and `target_positions` of `cookbook.data.batches.collate`, and for a packed
    row `position_ids`, `lengths` and `offsets`; then each sample attends to itself only, and the model must have been
    loaded for packing. There is no attention mask, since causal attention never sees the padding on the right. A
    micro-batch without targets calls the head too, on zero rows: the collectives of a sharded head must happen on every
    rank.
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
    targets: torch.Tensor,
    target_positions: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    lengths: tuple[int, ...] | None = None,
    offsets: torch.Tensor | None = None,
    **unset: None,
) -> torch.Tensor:
    # peft hands on every argument that a transformers model could have.
    assert all(value is None for value in unset.values()), f"not known to our loss: {sorted(unset)}"
    options = {}
    if lengths is not None:
        assert offsets is not None
        assert self.config._attn_implementation == PACKED, "a packed row, and a model that was not loaded for packing"
        assert input_ids.shape == (1, sum(lengths)), f"{tuple(input_ids.shape)} is not one row of {lengths}"
        options["segments"] = Segments(offsets, max(lengths), Lengths(lengths))
    backbone = self.base_model
    hidden = backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False, **options).last_hidden_state
    # By index: a mask would make the host wait to learn how many they are, here and in the backward pass.
    return nll_of_targets(self, hidden.flatten(0, 1).index_select(0, target_positions), targets)


def nll_of_targets(model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihoods, (L,) float32, of targets, (L,), after hidden states, (L, hidden size)."""
    head = model.get_output_embeddings()
    # peft's ModulesToSaveWrapper hands arguments on; its LoRA layer would add logits to the loss.
    if isinstance(getattr(head, "original_module", head), LossHead):
        return head(hidden, targets)
    return _nll(head(hidden), targets)
