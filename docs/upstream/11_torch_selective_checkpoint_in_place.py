"""Selective checkpointing gives other gradients where a product that it keeps is changed in place.

python 11_torch_selective_checkpoint_in_place.py
"""

from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = torch.ops.aten.mm.default


def policy(context, operation, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operation == KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def gradient(num_dims, is_checkpointed):
    torch.manual_seed(0)
    weight = torch.randn(4, 4, requires_grad=True)
    inputs = torch.randn(2, 3, 4) if num_dims == 3 else torch.randn(6, 4)

    def layer(inputs):
        product = inputs @ weight
        product += 1
        return product.sin().square()

    contexts = partial(create_selective_checkpoint_contexts, policy)
    options = {"use_reentrant": False, "context_fn": contexts}
    (checkpoint(layer, inputs, **options) if is_checkpointed else layer(inputs)).sum().backward()
    return weight.grad


for num_dims in (3, 2):
    try:
        difference = (gradient(num_dims, True) - gradient(num_dims, False)).abs().max().item()
    except RuntimeError as error:
        difference = f"{type(error).__name__}: {error}"
    print(f"inputs of {num_dims} dimensions:", difference)
