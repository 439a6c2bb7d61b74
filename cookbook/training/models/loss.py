"""The loss inside the model: only labelled positions pass through the head, in chunks if their logits are many."""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from cookbook.system.files import RecipeError
from cookbook.training.models.attention import PACKED, Lengths, Segments

LOGITS_BUDGET = 2**27
"""Largest number of logits in one matrix product: 0.5 GiB in float32. Below it, a single product is fastest."""


class LossHead(torch.nn.Linear):
    """An output head that returns the loss if it gets targets.

    Engines gather the head's weight around the call of this module only, so loss and chunks must be inside it.
    """

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """(L, hidden size) -> negative log-likelihoods, (L,) float32; without targets, the logits.

        Above the budget, logits exist for one chunk at a time and are recomputed in the backward pass.
        """
        if targets is None:
            return super().forward(hidden)
        chunk = max(1, LOGITS_BUDGET // self.out_features)
        if len(targets) <= chunk:
            return self._chunk(hidden, targets)
        parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
        return torch.cat([checkpoint(self._chunk, *part, use_reentrant=False) for part in parts])

    def _chunk(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # A head that an adapter trains is float32, and without autocast the hidden states may not be.
        return _nll(super().forward(hidden.to(self.weight.dtype)), targets)


def _nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")


def add_loss(model: PreTrainedModel, sequence_mesh: DeviceMesh | None = None) -> None:
    """Make `model(...)` return the negative log-likelihoods of the targets, (L,) float32, in their order; without
    `targets`, the most probable token at each of `target_positions`, (L,) int64.

    It takes `input_ids`, `targets` and `target_positions` of `collate` in data/batches.py, and for a packed row
    `position_ids`, `lengths` and `offsets`; then samples attend only to themselves, and the model must have been loaded
    for packing. There is no attention mask: causal attention never sees padding on the right. A micro-batch without
    targets calls the head on zero rows, since the collectives of a sharded head must happen on every rank.

    A stage of a pipeline but the first takes `hidden`, (B, T, hidden size), of the stage before instead of embeddings;
    all but the last return that.

    Args:
        sequence_mesh: the ranks that share the tokens of each row; each passes its `sequence_part`.
    """
    stage = getattr(model, "_pp_stage", None)  # of transformers/distributed/pipeline_parallel.py
    model.has_head = stage is None or stage.pp_is_last_stage
    head = model.get_output_embeddings()
    if model.has_head and (not isinstance(head, torch.nn.Linear) or model.base_model is model):
        raise RecipeError([f"model {type(model).__name__}: not a backbone with a linear head, which is not served yet"])
    # A quantized head, or one sharded by tensor parallel, has a forward of its own that must run.
    if type(head) is torch.nn.Linear and not isinstance(head.weight, DTensor):
        head.__class__ = LossHead
    model.sequence_mesh = sequence_mesh
    model.forward = MethodType(_forward, model)


def _forward(
    self: PreTrainedModel,
    *,
    input_ids: torch.Tensor,
    target_positions: torch.Tensor,
    targets: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    lengths: tuple[int, ...] | None = None,
    offsets: torch.Tensor | None = None,
    **unset: None,
) -> torch.Tensor:
    # peft passes every argument that a transformers model could have.
    assert all(value is None for value in unset.values()), f"not known to our loss: {sorted(unset)}"
    options: dict[str, Any] = {}
    mesh = self.sequence_mesh
    if mesh is not None:
        options["sequence_mesh"] = mesh
    if lengths is not None:
        assert offsets is not None
        assert self.config._attn_implementation == PACKED, "a packed row, and a model that was not loaded for packing"
        whole = input_ids.shape[1] * (1 if mesh is None else mesh.size())
        assert (len(input_ids), whole) == (1, sum(lengths)), f"{tuple(input_ids.shape)} is not one row of {lengths}"
        options["segments"] = Segments(offsets, max(lengths), Lengths(lengths))
    backbone = self.base_model
    inputs = {"input_ids": input_ids} if hidden is None else {"inputs_embeds": hidden}
    hidden = backbone(**inputs, position_ids=position_ids, use_cache=False, **options).last_hidden_state
    if not self.has_head:
        return hidden
    # By index: with a mask the host would wait for the number of rows, here and in the backward pass.
    hidden = hidden.flatten(0, 1).index_select(0, target_positions)
    if targets is None:
        head = self.get_output_embeddings()
        return head(hidden.to(head.weight.dtype)).argmax(-1)
    return nll_of_targets(self, hidden, targets)


def nll_of_targets(model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihoods, (L,) float32, of targets, (L,), given hidden states, (L, hidden size)."""
    head = model.get_output_embeddings()
    # peft's ModulesToSaveWrapper passes targets on; its LoRA layer would add logits to the loss.
    if isinstance(getattr(head, "original_module", head), LossHead):
        return head(hidden, targets)
    return _nll(head(hidden), targets)
