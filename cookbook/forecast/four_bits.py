"""The allocations of bitsandbytes and peft around a 4-bit matrix product on a GPU, on fake tensors."""

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

from cookbook.facts.score_head import head_of
from cookbook.training.adapters.four_bit_experts import is_in_4_bits

BLOCK = 64
"""Weights per scale (bitsandbytes 0.50.2, nn/modules.py, Params4bit)."""


def _dequantize_stored(packed: torch.Tensor, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The weight of so many rows, and the float32 scales of its blocks, dequantized from 8 bits."""
    scales = packed.new_empty(-(-2 * packed.numel() // BLOCK), dtype=torch.float32)
    return [packed.new_empty(rows, 2 * packed.numel() // rows, dtype=dtype), scales]


def _product_makes(hidden: torch.Tensor, whole: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return hidden.new_empty(*hidden.shape[:-1], whole.shape[0])


# Custom operations, as the ledger has what each of them launches. Selective checkpointing sees no product inside that
# it would keep, nor in bitsandbytes' one operation of both.
_dequantize_4bit = torch.library.custom_op("cookbook::dequantize_4bit", _dequantize_stored, mutates_args=())
_dequantize_4bit.register_fake(_dequantize_stored)
_gemm_4bit = torch.library.custom_op("cookbook::gemm_4bit", _product_makes, mutates_args=())
_gemm_4bit.register_fake(_product_makes)


def _dequantize(weight: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    packed = weight.view(torch.uint8).flatten()[: weight.numel() // 2]  # a view as long as the weight in 4 bits
    dequantized: list[torch.Tensor] = _dequantize_4bit(packed, weight.shape[0], dtype)
    return dequantized


class _Product(torch.autograd.Function):
    """bitsandbytes 0.50.2, autograd/_functions.py, MatMul4Bit on CUDA: only the weight is kept for the backward, and it
    is dequantized in both directions."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """backends/cuda/ops.py, _dequant_linear_fallback, for more than 1,536 rows (a fused kernel may need no
        temporaries): the offset of the scales is added out of place."""
        ctx.weight = weight
        whole, scales = _dequantize(weight, hidden.dtype)
        before_offset = torch.empty_like(scales)
        result: torch.Tensor = _gemm_4bit(hidden, whole, bias)
        del before_offset
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        whole, scales = _dequantize(ctx.weight, gradient.dtype)  # the offset is added in place
        result = torch.matmul(gradient, whole)
        del scales
        return result, None, None


def _product(self: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """nn/modules.py, Linear4bit.forward; the weight's dtype is the compute dtype."""
    dtype = self.weight.dtype
    bias = None if self.bias is None else self.bias.to(dtype)
    return _Product.apply(hidden.to(dtype), self.weight, bias).to(hidden.dtype)  # type: ignore[no-untyped-call]


class _PackedExperts:
    """See `training.adapters.four_bit_experts.Dequantizer`; here the experts lie whole in the dtype of the product."""

    def dequantize(self, stored: torch.Tensor) -> torch.Tensor:
        return _dequantize(stored, stored.dtype)[0].view(stored.shape)


def _pack_experts(model: PreTrainedModel) -> None:
    for module in model.modules():
        names = [name for name, parameter in module.named_parameters(recurse=False) if is_in_4_bits(module, parameter)]
        if names:
            from cookbook.training.adapters.stacked import use_own_forward

            use_own_forward(module)
            experts: Any = module
            experts.packed |= dict.fromkeys(names, _PackedExperts())


def multiply_in_4_bits(model: PreTrainedModel) -> None:
    """Makes frozen linear layers but the head, stacked experts and peft's adapters allocate as with 4-bit weights."""
    from peft.tuners.lora import Linear
    from peft.tuners.lora.bnb import Linear4bit

    head = head_of(model)
    _pack_experts(model)
    for module in model.modules():
        if isinstance(module, Linear):
            module.forward = MethodType(Linear4bit.forward, module)  # type: ignore[method-assign]
        elif type(module) is torch.nn.Linear and module is not head and not module.weight.requires_grad:
            module.forward = MethodType(_product, module)  # type: ignore[method-assign]
