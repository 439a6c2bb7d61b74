"""Products of the layers in 8 bits, by torchao: `mixed_precision: fp8`.

Of torchao's recipes the one whose scales span one token, or a row or all of a weight, and whose gradients of weights
are multiplied in bf16: no scale depends on which tokens share a micro-batch or a process, so no strategy changes one.
"""

import functools
import importlib
import logging
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cookbook.system.files import RecipeError
from cookbook.system.imports import show_torchao

SCALING = "rowwise_with_gw_hp"
MULTIPLE = 16
"""Both sizes of a matrix are multiples of this, or a GPU does not multiply it in 8 bits (torch's `_scaled_mm`)."""


def convert_layers(model: PreTrainedModel) -> None:
    """Make the matrices of the layers multiply in 8 bits; the weights stay as they are, with their names. Those whose
    sizes do not fit stay in bf16, as do embedding, head, and experts, which are no linear modules.

    Raises:
        RecipeError: no matrix fits.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    linear_class = _linear_class()
    config = _library().Float8LinearConfig.from_recipe_name(SCALING)
    for layer in layers:
        for parent in list(layer.modules()):
            for name, module in list(parent.named_children()):
                if _fits(module):
                    # Here and not by accelerate, which replaces them when it wraps the model, and then refuses FSDP2's
                    # efficient loading (1.15, accelerator.py, Accelerator.__init__).
                    setattr(parent, name, linear_class.from_float(module, config))
    if not num_converted(model):
        why = f"no torch.nn.Linear in the layers of this {model.config.model_type} has sizes that {MULTIPLE} divides"
        raise RecipeError(f"mixed_precision is fp8, and {why}; write bf16")


def num_converted(model: torch.nn.Module) -> int:
    """Number of matrices that multiply in 8 bits."""
    return sum(isinstance(module, _linear_class()) for module in model.modules())


def _fits(module: torch.nn.Module) -> bool:
    return type(module) is torch.nn.Linear and not (module.in_features | module.out_features) % MULTIPLE


@functools.cache
def _library() -> Any:
    show_torchao()
    # They warn of compiled parts that nothing here uses, and of a call that torch deprecates.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return importlib.import_module("torchao.float8.float8_linear")


@functools.cache
def _linear_class() -> Any:
    library = _library()
    base: Any = library.Float8Linear

    class Fp8Linear(base):
        """A linear layer that rounds its weight to the dtype of the forward before its scale is taken, as FSDP and ZeRO
        hand it over: torchao's rounds the input only, and a float32 weight under DDP would become other 8 bits.
        """

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            weight, kind = self.weight, input.device.type
            if torch.is_autocast_enabled(kind):
                low = torch.get_autocast_dtype(kind)
                input, weight = input.to(low), weight.to(low)
            # As rows: torchao refuses others that are not contiguous, as Mamba's, and would return a view of what its
            # function made, which Llama 4's code changes in place.
            rows = input.reshape(-1, input.shape[-1]).contiguous()
            with torch.autocast(kind, enabled=False):
                product = library.matmul_with_hp_or_float8_args.apply(
                    rows, weight.t(), self.linear_mm_config, self.config
                )
            product = torch.ops.aten._unsafe_view(product, [*input.shape[:-1], self.out_features])
            return product if self.bias is None else product + self.bias.to(product.dtype)

    return Fp8Linear
