"""Savings of memory or time that change at most the last bits: recomputed activations, compiled layers, Liger kernels.

Liger returns queries and keys in 16 bits where transformers returns float32.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    _VersionWrapper,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import simulated_gpus
from cookbook.config.recipe import Recipe
from cookbook.config.sections import ModelSection
from cookbook.facts.packing import why_split
from cookbook.system.files import RecipeError, first_line
from cookbook.training.models import sample_draws
from cookbook.training.models.mixers import is_kept_apart, replay_context

MOST_COMPILATIONS = 64
"""Limit for all layers of a model, which share one function of transformers' GradientCheckpointingLayer: for each kind
of layer (four in some hybrids) it is compiled for training, evaluation, one row or more, one length or any. Torch's own
limit of 8 is a guard against code that is compiled for each call; beyond it layers run uncompiled."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "_scaled_mm"}


def save_activations(
    model: PreTrainedModel, *, selective: bool, offload: bool = False, has_draws: bool = False
) -> None:
    """Recompute each layer in the backward pass.

    Args:
        selective: all but matrix products and attention.
        offload: keep the inputs of layers on the GPU in pinned host memory until then.
        has_draws: whether layers draw, which they do again.

    Raises:
        RecipeError: a transformers that is too old to offload.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    context: Any = _selective if selective else noop_context_fn
    if is_kept_apart(model):
        context = partial(replay_context, context)
    if has_draws:
        context = partial(sample_draws.replay_context, context)
    if context is not noop_context_fn:
        options["context_fn"] = context
    # transformers 5.23 renamed the method (modeling_utils.py, activation_checkpointing_enable), which can
    # offload since then.
    if offload and not hasattr(model, "activation_checkpointing_enable"):
        what = "model.gradient_checkpointing: offload needs transformers 5.23 or newer"
        raise RecipeError(f"{what}; here is {transformers.__version__}")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # Offloaded by transformers on the stream of the layers. A copy on a second stream overlaps, but needs events on
    # both sides: one that is missing is a wrong curve, and neither a CPU nor a simulated GPU shows it.
    enable(options, **({"offload": True} if offload else {}))


def is_saved(operation: str) -> bool:
    """Return whether selective checkpointing keeps the result of an operation, by its name in ATen."""
    # Every attention kernel has the word in its name: _scaled_dot_product_flash_attention, _varlen_attn, ...
    return operation in PRODUCTS or "attention" in operation or "attn" in operation


def _policy(context: object, operation: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_saved(operation._opname) else CheckpointPolicy.PREFER_RECOMPUTE


def _selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    forward, recompute = create_selective_checkpoint_contexts(_policy)
    forward.__class__ = _CopyBeforeChange
    return forward, recompute


class _CopyBeforeChange(_CachingTorchDispatchMode):
    """A dispatch mode that copies a kept result before an operation changes it in place, as GPT-OSS's and Gemma 3n's
    code does with products.

    torch 2.13 refuses a backward from a result that was changed, and does not see the change where a product was
    reshaped in between, as `matmul` and `linear` do: the gradients are then others (docs/upstream, 11).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and not torch.compiler.is_compiling():
            changed = {_memory(tensor) for tensor in _written_tensors(func, args, kwargs or {})}
            for kept in tree_leaves(self.storage):
                if isinstance(kept, _VersionWrapper) and torch.is_tensor(kept.val) and _memory(kept.val) in changed:
                    kept.val = kept.val.clone()
                    kept.version = kept.val._version
        return super().__torch_dispatch__(func, types, args, kwargs)


def _written_tensors(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes to."""
    for i, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from filter(torch.is_tensor, tree_leaves(value))


def _memory(tensor: torch.Tensor) -> int:
    """A number of a tensor's memory, equal for tensors that share it."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.untyped_storage()._cdata


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each decoder layer in place, for any batch size and length.

    Seen on CPU (torch 2.13): one compilation serves all layers of a kind, a second one all further lengths, under each
    strategy that is served (`tests/test_compiled.py`). On a CPU the split attention of packed rows breaks the graph;
    checkpointed layers cannot have a graph break, so they run uncompiled.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert layers, f"{type(model).__name__} has no layers to compile"
    for layer in layers:
        # Not dynamic=True: under FSDP2 a layer's sizes and factors would be symbols, which breaks its graph.
        layer.compile(recompile_limit=MOST_COMPILATIONS)


def compile_counts() -> dict[str, Any]:
    """Counts of torch's compiler in this process: `graphs`, `graph_breaks`, `recompilations`, and calls of functions
    that it left uncompiled, `given_up`; with its `reasons` for breaks and for giving up, each a line.

    The counters are private (torch 2.13, _dynamo/utils.py `counters`, _dynamo/convert_frame.py, FRAME_COMPILE_COUNTER).
    """
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import counters

    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompilations": sum(times - 1 for times in convert_frame.FRAME_COMPILE_COUNTER.values()),
        "given_up": counters["frames"]["total"] - counters["frames"]["ok"],
        "reasons": sorted({first_line(why) for kind in ("graph_break", "unimplemented") for why in counters[kind]}),
    }


def kernel_notes(settings: ModelSection, config: PreTrainedConfig) -> list[str]:
    """Notes on `model.compile` and `model.liger_kernels` for the user.

    Raises:
        RecipeError: there is a GPU, and Liger is not installed or does not know this architecture.
    """
    notes = []
    if settings.compile and simulated_gpus.is_active():
        notes.append("model.compile: simulated GPUs run the operations of its graphs; Triton's kernels need a real one")
    if not settings.liger_kernels:
        return notes
    if not torch.cuda.is_available():
        return [*notes, "model.liger_kernels: ignored, its kernels need a GPU"]
    if importlib.util.find_spec("liger_kernel") is None:
        raise RecipeError("model.liger_kernels is true, but Liger is not installed: pip install liger-kernel")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # type: ignore[import-not-found]

    if config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise RecipeError(f"model.liger_kernels is true, but Liger has none for {config.model_type}; remove it")
    return notes


def slow_kernel_notes(recipe: Recipe, config: PreTrainedConfig, capability: tuple[int, int] | None) -> list[str]:
    """Notes on settings whose results are right and which are slow on this GPU.

    Args:
        capability: the GPU's compute capability; None without one.
    """
    if capability is None:
        return []
    notes, split = [], why_split(config.get_text_config())
    reasons = {
        "mixed_precision is no, and it takes 16 bits": recipe.compute_precision == "no",
        f"this GPU has compute capability {'.'.join(map(str, capability))}, and it needs 8.0": capability < (8, 0),
        split: split is not None,
    }
    if recipe.data.is_packed and any(reasons.values()):
        why = "; ".join(str(reason) for reason, is_so in reasons.items() if is_so)
        notes.append(f"no kernel for the attention of packed rows ({why}): sample by sample, or data.packing: false")
    if recipe.mixed_precision == "fp8" and not recipe.model.compile:
        notes.append(
            "fp8 without model.compile: each cast is a kernel of its own, and a step may be slower than bf16's"
        )
    return notes


def patch_kernels(model: PreTrainedModel) -> None:
    """Replace layers by Liger's kernels if there is a GPU, but not the loss. A run with them failed on an H100
    (docs/on_gpu.md)."""
    if not torch.cuda.is_available():
        return
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # type: ignore[import-not-found]

    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
