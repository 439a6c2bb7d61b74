"""Language models as a run trains them: loaded from a folder, checked, with their loss inside."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from cookbook.config.sections import ModelSection
from cookbook.facts.language_part import open_config, open_options
from cookbook.facts.meshes import num_experts
from cookbook.facts.model_files import why_not
from cookbook.facts.packing import packing_problem, short_window
from cookbook.facts.score_head import auto_class, head_of, is_scored
from cookbook.system.files import RecipeError, refuse
from cookbook.training.models import sample_draws
from cookbook.training.models.attention import PACKED
from cookbook.training.models.efficiency import compile_layers, patch_kernels, save_activations
from cookbook.training.models.experts import autocast_products
from cookbook.training.models.fp8 import convert_layers
from cookbook.training.models.loss import add_loss, compile_loss
from cookbook.training.models.mixers import keep_apart
from cookbook.training.models.model_source import refuse_adapter
from cookbook.training.models.stateful_layers import stateful_layers
from cookbook.training.models.structure import why_not_trained


def load_config(name: str, max_length: int, *, key: str = "model.name_or_path") -> PreTrainedConfig:
    """The configuration of what is trained of a model, see `language_config`.

    Args:
        key: the recipe's, for mistakes.

    Raises:
        RecipeError: no such model, or one for which loss or attention would be wrong.
    """
    refuse_adapter(name, key)
    try:
        config = open_config(name)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{key} is {name!r}: {why_not('model', error)}") from None
    refuse(why_not_trained(config, max_length, f"{key} is {name!r}"))
    return config


def config_in(folder: str) -> PreTrainedConfig:
    """The configuration with which a model is loaded from its folder."""
    config: PreTrainedConfig = open_options(folder).get("config") or open_config(folder)
    return config


def load_model(
    name: str,
    settings: ModelSection,
    *,
    packing: bool,
    dtype: torch.dtype = torch.float32,
    sequence_mesh: DeviceMesh | None = None,
    fp8: bool = False,
    has_draws: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Load a model with its loss inside (see `add_loss`), in training mode.

    Under ZeRO-3 and tensor parallel every rank must call. The engine sets the dtype of the forward.

    Args:
        dtype: float32 if an optimizer updates the weights; frozen weights may be smaller.
        sequence_mesh: the ranks that share the tokens of each row, if any.
        fp8: multiply in 8 bits in the layers, see `convert_layers`.
        has_draws: whether layers will draw in training.
        options: further arguments of `from_pretrained`, from engine and adapter.
    """
    if packing or sequence_mesh is not None:
        options["attn_implementation"] = PACKED
    autocast_products()
    config = config_in(name)
    if sample_draws.set_to_zero(config):
        options["config"] = config
    model = open_language_model(name, dtype=dtype, **options)
    _allocate_meta_weights(model)
    _check_tied(model)
    _check_experts(model)
    model.config.use_cache = False
    if packing:
        keep_apart(model, stateful_layers(model.config))
    is_ours = packing_problem(model.config) is None and short_window(model.config) is None
    if model.config._attn_implementation == "sdpa" and is_ours:
        # Our attention for padded rows too: transformers would synchronize with the device to look for packed rows
        # (masking_utils.py, find_packed_sequence_indices), and in float32 use a kernel with T x T scores.
        model.set_attn_implementation(PACKED)
    if settings.liger_kernels:
        patch_kernels(model)
    if fp8:
        convert_layers(model)
    if settings.gradient_checkpointing:
        offload = settings.gradient_checkpointing == "offload" and torch.cuda.is_available()
        # A compiled layer keeps the words of its tokens with its inputs, and torch takes no such context for it.
        replays = has_draws and not settings.compile
        save_activations(model, selective=settings.recompute == "selective", offload=offload, has_draws=replays)
    if settings.compile:
        compile_layers(model)
    add_loss(model, sequence_mesh)
    if settings.compile:
        compile_loss(head_of(model))
    model.train()
    return model


def _check_tied(model: PreTrainedModel) -> None:
    """Raise RecipeError if a model is to have one matrix for embedding and head, and has two. What a DTensor shares is
    the engine's matter (`gather_tied_once`)."""
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    first, last = (getattr(module, "weight", None) for module in modules)
    is_whole = all(
        isinstance(weight, torch.nn.Parameter) and not isinstance(weight, DTensor) for weight in (first, last)
    )
    if getattr(model.config, "tie_word_embeddings", False) and is_whole and first is not last:
        what = f"model of type {model.config.model_type} under transformers {transformers.__version__}"
        raise RecipeError(
            f"{what}: its tie_word_embeddings is true, and embedding and head are two weights; write false"
        )


def _check_experts(model: PreTrainedModel) -> None:
    """Raise RecipeError if a model stacks its experts in a class without "expert" in its name, by which Muon leaves
    them out, `qlora` stores them in 4 bits, and adapters know them."""
    count = num_experts(model.config)
    for module in model.modules():
        is_known = "expert" in type(module).__name__.lower() or type(module).__module__.startswith("torch.nn.")
        for name, parameter in module.named_parameters(recurse=False):
            shape = getattr(parameter, "ds_shape", parameter.shape)  # under ZeRO-3 it is an empty placeholder
            if count > 1 and len(shape) == 3 and shape[0] == count and not is_known:
                what = f"model of type {model.config.model_type} under transformers {transformers.__version__}"
                raise RecipeError(
                    f"{what}: {name} of {type(module).__name__} stacks {count} experts, which nothing here knows by"
                    " that name; see docs/upgrade.md"
                )


def check_finite(model: torch.nn.Module, place: object) -> None:
    """Check the values of a model that one process has whole, which no header tells: a model with NaN answers all the
    same, and a loss of it is NaN.

    Raises:
        RecipeError: a weight is NaN or infinite.
    """
    for name, weight in model.named_parameters():
        in_4_bits = getattr(weight, "quant_state", None) is not None  # of which pairs lie in a tensor of another dtype
        if in_4_bits or not weight.is_floating_point() or not weight.numel():
            continue
        if not torch.stack(weight.detach().aminmax()).isfinite().all():
            raise RecipeError(f"{place}: {name} has values that are not finite; fetch it again, or take an earlier one")


def open_language_model(name: str | Path, **options: Any) -> Any:
    """`from_pretrained` of a folder's class, for causal language models or for scores; of a model with a tower, the
    language part alone.

    Args:
        options: of `from_pretrained`; a `config` decides in the place of the folder's.
    """
    options = open_options(name) | options
    config = options.get("config") or open_config(name)
    verbosity = logging.get_verbosity()
    if "key_mapping" in options or is_scored(config):
        # For its list of a tower's tensors, or of the head that is not loaded; `check_folder` has compared all.
        logging.set_verbosity_error()
    try:
        return auto_class(config).from_pretrained(name, trust_remote_code=False, use_safetensors=True, **options)
    finally:
        logging.set_verbosity(verbosity)


def _allocate_meta_weights(model: PreTrainedModel) -> None:
    """Allocate weights and buffers whose values another rank will send, since accelerate identifies parameters by their
    addresses (accelerator.py, _prepare_fsdp2). The kernel provides no memory until they are written.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        # transformers compares two tied weights that the files both hold, and leaves those apart that have no values
        # (modeling_utils.py, tie_weights); `check_folder` has found them equal.
        model.tie_weights()
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device="cpu")
                setattr(module, name, made.setdefault(parameter, torch.nn.Parameter(empty, parameter.requires_grad)))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
