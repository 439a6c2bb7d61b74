"""Experts that transformers stacks in one tensor, in 4 bits as bitsandbytes has the weight of a linear layer.

bitsandbytes 0.50.2 has a parametrization for it (nn/parametrize.py, replace_parameter_4bit): the same numbers, which
tests compare with. Under it a layer without checkpointing keeps its dequantized experts for the backward, and engines
find another parameter in the place of the one that they shard.
"""

from dataclasses import dataclass
from typing import Any

import torch

MOST_NUMBERS = 2**31 - 1
"""The largest tensor that bitsandbytes 0.50.2 quantizes, whose kernels count in 32 bits (csrc/kernels.cu)."""


@dataclass(frozen=True)
class Dequantizer:
    """Scales and format of a layer's experts in 4 bits. Every process has all of them, as of linear layers."""

    quant_state: Any

    def dequantize(self, stored: torch.Tensor) -> torch.Tensor:
        """All experts of a layer in the dtype in which they were read."""
        from bitsandbytes.functional import dequantize_4bit

        experts: torch.Tensor = dequantize_4bit(stored, self.quant_state)
        return experts


def is_in_4_bits(module: torch.nn.Module, parameter: torch.nn.Parameter) -> bool:
    """Return whether `qlora` stores a parameter of stacked experts in 4 bits: where transformers' own implementations
    multiply them, which ours takes the place of, and bitsandbytes' kernels can count the numbers.
    """
    return (
        "expert" in type(module).__name__.lower()
        and hasattr(module, "is_transposed")
        and parameter.ndim == 3
        and parameter.numel() <= MOST_NUMBERS
    )


def pack(options: Any, module: Any, name: str, weight: torch.nn.Parameter) -> torch.nn.Parameter:
    """A weight as the model keeps it: in 4 bits if it belongs to experts that are served so, else as it was read.

    Args:
        options: transformers' BitsAndBytesConfig.
    """
    if not is_in_4_bits(module, weight):
        return weight
    from bitsandbytes.nn import Params4bit

    from cookbook.training.adapters.stacked import use_own_forward

    quantized: Any = Params4bit(
        weight.data,
        requires_grad=False,
        compress_statistics=options.bnb_4bit_use_double_quant,
        quant_type=options.bnb_4bit_quant_type,
        quant_storage=options.bnb_4bit_quant_storage,
    )
    packed: torch.nn.Parameter = quantized.to(weight.device)
    weight.data = weight.data.new_empty(0)  # transformers holds it until the next one is read
    use_own_forward(module)
    module.packed[name] = Dequantizer(quantized.quant_state)
    packed.__dict__.update(weight.__dict__)  # transformers' mark that it was read, without which it is drawn again
    return packed
