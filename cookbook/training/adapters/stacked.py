"""LoRA of experts that transformers stacks in one tensor: peft's weights and names, multiplied as low-rank products,
beside experts in 16 or 4 bits.

peft 0.21.2 adds B A to the whole tensor in each forward (tuners/lora/layer.py, ParamWrapper), so that a layer without
checkpointing keeps a second copy of its experts, its backward makes their whole gradient, and a change smaller than
bf16 can add is lost. It also reads a tensor that expert parallel and ZeRO-3 have not gathered yet. The products here
are the same numbers, in the experts' own forward.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import ParamWrapper
from torch.distributed.tensor import DTensor
from transformers.integrations import moe

IMPLEMENTATION = "cookbook_low_rank"
"""Our forward among transformers' implementations of experts."""
RANK_MULTIPLE = 8
"""torch's grouped product on a GPU wants rows of a multiple of 16 bytes (ATen/native/cuda/GroupedBlas.cpp)."""


class LowRankExperts(ParamWrapper):
    """peft's wrapper of one parameter, whose change the experts' forward multiplies by itself.

    A is [experts * rank, inputs] and B is [outputs, rank * experts], as in peft's files.
    """

    reads_weights_inside = True
    """A mark for ZeRO-3: the forward here reads all weights inside, and no forward of their own modules is called."""
    adapter_name: str
    first_expert: int
    """The first expert of this process, among the experts of the layer."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.base_layer(x, *args, **kwargs)

    def change(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The adapter's addition to the product of rows with the experts of this process.

        Args:
            rows: [S, inputs], sorted by expert.
            ends: [experts of this process], the index after the last row of each.
        """
        a: Any = self.lora_A[self.adapter_name].weight
        b: Any = self.lora_B[self.adapter_name].weight
        own = slice(self.first_expert, self.first_expert + len(ends))
        a = a.view(self.num_experts, -1, a.shape[1])[own]
        b = b.view(len(b), -1, self.num_experts).permute(2, 1, 0)[own] * self.scaling[self.adapter_name]
        more = (0, 0, 0, -a.shape[1] % RANK_MULTIPLE)
        a, b = (F.pad(matrix.to(rows.dtype), more).contiguous() for matrix in (a, b))
        return _multiply(_multiply(rows, a.mT, ends), b, ends)


def _multiply(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product of each row with the matrix of its expert, by transformers' own function for experts."""
    product: torch.Tensor = moe._grouped_mm(rows, weights, offs=ends)
    return product


class PackedProduct(torch.autograd.Function):
    """Product of rows with matrices of experts in 4 bits. They are dequantized in forward and backward and not kept, as
    in bitsandbytes' product of a linear layer (0.50.2, autograd/_functions.py, MatMul4Bit).
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: Callable[[], torch.Tensor], ends: torch.Tensor) -> torch.Tensor:
        """
        Args:
            matrices: makes [experts, inputs, outputs]; called in the backward too, for which engines gather again.
        """
        ctx.matrices, ctx.dtype = matrices, rows.dtype
        ctx.save_for_backward(ends)
        return _multiply(rows, matrices(), ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,), (ends,) = gradients, ctx.saved_tensors
        weights = ctx.matrices()
        return _multiply(gradient.to(weights.dtype), weights.mT, ends).to(ctx.dtype), None, None


def _matrices(experts: Any, name: str) -> torch.Tensor:
    """The matrices of a layer's experts, [experts, inputs, outputs], dequantized if they are in 4 bits."""
    stored = getattr(experts, name)
    weights: torch.Tensor = experts.packed[name].dequantize(stored) if name in experts.packed else stored
    return weights if experts.is_transposed else weights.mT


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts, [tokens, hidden]. An implementation of transformers' experts (5.23,
    integrations/moe.py, ExpertsInterface); the indices are those of this process's experts, as `AllToAllEP` sends them.

    Args:
        experts: a module of `use_experts_implementation`, with `adapters` and `packed`, each by parameter.
        top_k_index, top_k_weights: [tokens, experts of a token].
    """
    top_k = top_k_index.shape[-1]
    of_row, order = torch.sort(top_k_index.reshape(-1), stable=True)
    numbers = torch.arange(experts.num_experts, device=of_row.device, dtype=of_row.dtype)
    ends = torch.searchsorted(of_row, numbers, right=True).int()

    def project(name: str, rows: torch.Tensor) -> torch.Tensor:
        matrices = partial(_matrices, experts, name)
        if name in experts.packed:
            result = PackedProduct.apply(rows, matrices, ends)
        else:
            result = _multiply(rows, matrices(), ends)
        if name in experts.adapters:
            result = result + experts.adapters[name].change(rows, ends).to(result.dtype)
        return result + getattr(experts, f"{name}_bias")[of_row] if experts.has_bias else result

    rows = project("gate_up_proj" if experts.has_gate else "up_proj", hidden_states[order // top_k])
    rows = project("down_proj", experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows))
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)
    weighted = (rows * top_k_weights.reshape(-1)[order, None])[torch.argsort(order)]
    return weighted.view(len(hidden_states), top_k, -1).sum(1).to(hidden_states.dtype)


moe.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def multiply_low_rank(model: torch.nn.Module, adapter_name: str) -> None:
    """Have peft's wrappers of stacked experts multiplied by `experts_forward`, in place."""
    for wrapper in [module for module in model.modules() if type(module) is ParamWrapper]:
        experts: Any = wrapper.get_base_layer()
        if hasattr(experts, "is_transposed"):
            adapted: Any = wrapper
            adapted.__class__ = LowRankExperts
            adapted.adapter_name = adapter_name
            adapted.first_expert = _first_expert(wrapper.get_param(), experts.num_experts)
            use_own_forward(experts)
            experts.adapters[wrapper.parameter_name] = wrapper


def use_own_forward(experts: Any) -> None:
    """Have experts multiplied by `experts_forward`, in place."""
    if experts.config._experts_implementation == IMPLEMENTATION:
        return
    # Plain dicts, which make a wrapper no module of what it wraps.
    experts.adapters, experts.packed = {}, {}
    # A copy: other models are made from the configuration too.
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation = IMPLEMENTATION


def _first_expert(weight: torch.Tensor, num_here: int) -> int:
    """The number of this process's first expert in its layer."""
    # Each process of an expert-parallel group has as many experts, in order (distributed/expert_parallel.py,
    # AllToAllEP).
    mesh = weight.device_mesh if isinstance(weight, DTensor) else None
    divides = mesh is not None and "ep" in (mesh.mesh_dim_names or ())
    return mesh["ep"].get_local_rank() * num_here if divides else 0  # type: ignore[index]
