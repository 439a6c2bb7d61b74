"""The allocations of bitsandbytes and peft around a 4-bit matrix product on a GPU, on fake tensors."""

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

BLOCK = 64
"""Weights per scale (bitsandbytes 0.50.2, nn/modules.py, Params4bit)."""


def _product_makes(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> list[torch.Tensor]:
    """The result, then temporaries: the dequantized weight and its scales before and after the offset
    (backends/cuda/ops.py, _dequant_linear_fallback, for more than 1,536 rows; a fused kernel may need none)."""
    whole = torch.empty_like(weight, dtype=hidden.dtype)
    return [hidden.new_empty(*hidden.shape[:-1], weight.shape[0]), whole, _scales(weight), _scales(weight)]


# One operation like bitsandbytes': selective checkpointing sees no product inside that it would keep.
_gemm_4bit = torch.library.custom_op("cookbook::gemm_4bit", _product_makes, mutates_args=())
_gemm_4bit.register_fake(_product_makes)


class _Product(torch.autograd.Function):
    """bitsandbytes 0.50.2, autograd/_functions.py, MatMul4Bit on CUDA: only the weight is kept for the backward, and it
    is dequantized in both directions."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return _gemm_4bit(hidden, weight, bias)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        scales = _scales(ctx.weight)  # functional.py, dequantize_4bit: offset added in place
        result = torch.matmul(gradient, torch.empty_like(ctx.weight, dtype=gradient.dtype))
        del scales
        return result, None, None


def _scales(weight: torch.Tensor) -> torch.Tensor:
    """The float32 scales of the blocks, dequantized from 8 bits."""
    return weight.new_empty(-(-weight.numel() // BLOCK), dtype=torch.float32)


def _product(self: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """nn/modules.py, Linear4bit.forward; the weight's dtype is the compute dtype."""
    dtype = self.weight.dtype
    bias = None if self.bias is None else self.bias.to(dtype)
    return _Product.apply(hidden.to(dtype), self.weight, bias).to(hidden.dtype)  # type: ignore[no-untyped-call]


def multiply_in_4_bits(model: PreTrainedModel) -> None:
    """Makes frozen linear layers, except the head, and peft's adapters on them allocate as with 4-bit weights."""
    from peft.tuners.lora import Linear
    from peft.tuners.lora.bnb import Linear4bit

    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, Linear):
            module.forward = MethodType(Linear4bit.forward, module)  # type: ignore[method-assign]
        elif type(module) is torch.nn.Linear and module is not head and not module.weight.requires_grad:
            module.forward = MethodType(_product, module)  # type: ignore[method-assign]
