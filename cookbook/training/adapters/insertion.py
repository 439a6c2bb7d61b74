"""Insertion of an adapter into a model: peft's layers with their first weights, or those of a saved adapter."""

import contextlib
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    PreTrainedModel,
)

from cookbook.config.sections import AdapterSection
from cookbook.system.files import RecipeError
from cookbook.system.replaced import replace_functions
from cookbook.training.adapters.four_bit_experts import pack
from cookbook.training.adapters.peft_folder import (
    ADAPTER_NAME,
    in_language_names,
)

if TYPE_CHECKING:
    pass
from cookbook.training.adapters.adapted_layers import check_parameters, lora_config, whole_shape
from cookbook.training.adapters.base_model import NO_ROWS


def inject(model: PreTrainedModel, settings: AdapterSection, new_rows: range = NO_ROWS) -> None:
    """Freeze a model and insert peft's layers, in place.

    Args:
        new_rows: rows of embedding and head that are trained too; here they are zeros.

    Raises:
        RecipeError: peft does not support the combination, for example dropout for experts.
    """
    from peft import inject_adapter_in_model

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    config = lora_config(settings, model, new_rows=new_rows)
    check_parameters(model, settings, config)
    try:
        with _sizes_of_modules(), _names_as_written(), _rows_without_values(config):
            inject_adapter_in_model(config, model, adapter_name=ADAPTER_NAME)
    except ValueError as error:
        ways = {"lora_dropout": "adapter.dropout: 0", "use_dora": "adapter.name: lora"}
        way = next((f"; write {way}" for word, way in ways.items() if word in str(error)), "")
        name = f"adapter.name {settings.name} with dropout {settings.dropout:g}"
        raise RecipeError(f"{name}: peft cannot put it into {type(model).__name__}: {error}{way}") from None
    _multiply_experts(model, config)
    _compute_rows_apart(model, config)


def _multiply_experts(model: torch.nn.Module, config: Any) -> None:
    """Have stacked experts multiplied by `stacked`, which is imported for models with such adapters only."""
    if getattr(config, "target_parameters", None):  # only LoRA has such keys
        from cookbook.training.adapters.stacked import multiply_low_rank

        multiply_low_rank(model, ADAPTER_NAME)


def _rows_without_values(config: Any) -> contextlib.AbstractContextManager[None]:
    if not config.trainable_token_indices:
        return contextlib.nullcontext()
    from cookbook.training.adapters.token_rows import without_values

    return without_values()


def _compute_rows_apart(model: PreTrainedModel, config: Any) -> None:
    if getattr(config, "trainable_token_indices", None):
        from cookbook.training.adapters.token_rows import compute_apart

        compute_apart(model)


@contextlib.contextmanager
def _names_as_written() -> Iterator[None]:
    """Have peft adapt the layers that are named; see `_renamed_layers`."""
    from peft.utils import transformers_weight_conversion as conversion

    mapping = conversion.get_model_conversion_mapping
    # Read by that function alone, it would compile a thousand patterns for the names of all models.
    conversion.get_model_conversion_mapping = lambda *_, **__: []
    try:
        with replace_functions(conversion, convert_peft_config_for_transformers=lambda *_, **__: None):
            yield
    finally:
        conversion.get_model_conversion_mapping = mapping


@contextlib.contextmanager
def _sizes_of_modules() -> Iterator[None]:
    """Have peft size an adapter by what a linear layer computes, and shard it as tensor parallel did the layer.

    peft 0.21.2 takes the size of the weight's local shard (tuners/tuners_utils.py, _get_in_out_features), which is what
    a process computes with under tensor parallel alone, and less than that where FSDP2 shards it further.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    sizes_of_weight, parameter_of = LoraLayer._get_in_out_features, ParamWrapper.get_param

    def sizes(self: LoraLayer, module: torch.nn.Module) -> Any:
        is_sharded = isinstance(module, torch.nn.Linear) and isinstance(module.weight, DTensor)
        return (module.in_features, module.out_features) if is_sharded else sizes_of_weight(self, module)

    def in_whole_shape(self: ParamWrapper) -> Any:
        parameter = parameter_of(self)
        is_packed = getattr(parameter, "quant_state", None) is not None
        # An element expanded to the shape of all experts, by which peft sizes its matrices; nothing is dequantized.
        return parameter.data.new_empty(()).expand(whole_shape(parameter)) if is_packed else parameter

    with (
        replace_functions(LoraLayer, _get_in_out_features=sizes),
        replace_functions(ParamWrapper, get_param=in_whole_shape),
    ):
        yield


def add_adapter(
    model: PreTrainedModel,
    settings: AdapterSection,
    *,
    seed: int,
    new_rows: range = NO_ROWS,
    first: dict[str, torch.Tensor] | None = None,
) -> None:
    """Freeze a model and add trainable float32 weights to its linear layers and experts, in place.

    The weights are those in `adapter.path`, or are drawn from `seed` alone, equally however the model is sharded.

    Args:
        new_rows: rows of embedding and head that are trained too.
        first: the values that these rows begin with, by the names of the matrices; default: zeros.
    """
    inject(model, settings, new_rows)
    _draw_first_weights(model, seed)
    _set_dtypes(model)
    if first:
        from cookbook.training.adapters.token_rows import fill

        fill(model, first)
    if settings.path is not None:
        from cookbook.training.adapters import continued

        continued.fill(model, Path(settings.path))


def open_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Add a trainable adapter to a model, as `add_adapter`, with settings and weights of a peft folder."""
    from peft import PeftConfig, PeftModel

    with in_language_names(folder) as named, _sizes_of_modules():
        settings = PeftConfig.from_pretrained(str(named))
        settings.inference_mode = False
        wrapped = PeftModel(model, settings, ADAPTER_NAME)
        _set_dtypes(model)  # before weights are read, which would be rounded to the model's dtype
        wrapped.load_adapter(str(named), ADAPTER_NAME, is_trainable=True)
    _multiply_experts(model, settings)
    _compute_rows_apart(model, settings)


def _set_dtypes(model: PreTrainedModel) -> None:
    """Make trainable weights float32, and keep frozen ones in 4 bits as they are."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                # Assigning to .data would not change a DTensor's local shard.
                setattr(module, name, torch.nn.Parameter(parameter.detach().float()))
            elif parameter.requires_grad:
                parameter.data = parameter.data.float()
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # On such a CPU the first forward in eval mode would repack the weights in place for kernels without a
            # backward: training after an evaluation would lose their gradients (bitsandbytes 0.50, nn/modules.py,
            # Linear4bit.forward).
            module.support_avx512bf16_for_cpu = False


@torch.no_grad()
def _draw_first_weights(model: PreTrainedModel, seed: int) -> None:
    """Draw every A as peft does, uniform within 1 / sqrt(its inputs), but whole: peft would draw the same shard on each
    rank of a tensor-parallel group. Each by its layer's name, since a stage of a pipeline has only some of the layers.
    B is zero, so that the adapter does not change the model yet.
    """
    from peft.tuners.lora import LoraLayer

    for layer_name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        # From one stream over all layers each stage of a pipeline would draw others, and only the curve would show it.
        generator = torch.Generator().manual_seed(seed + zlib.crc32(layer_name.encode()))
        base: Any = layer.get_base_layer()
        sized: Any = base if isinstance(base, torch.nn.Linear) else layer  # GPT-2 has Conv1D
        num_inputs: int = sized.in_features
        matrices: list[Any] = list(layer.lora_A.values())
        for a in matrices:
            # For a matrix sharded along its inputs, peft 0.21.2 records the size of a shard (tuners/tuners_utils.py,
            # _get_in_out_features), and later relies on it.
            a.in_features = num_inputs
            first = torch.empty(a.out_features, num_inputs)
            first.uniform_(-(num_inputs**-0.5), num_inputs**-0.5, generator=generator)
            old = a.weight
            if isinstance(old, DTensor):
                first = distribute_tensor(first, old.device_mesh, old.placements, src_data_rank=None)
            a.weight = torch.nn.Parameter(first.to(old.device, old.dtype))


def quantization_options(settings: AdapterSection | None, mixed_precision: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` for frozen weights in 4 bits: NF4 with double quantization (Dettmers et al. 2023,
    arXiv 2305.14314); empty for other adapters.
    """
    if settings is None or not settings.is_quantized:
        return {}
    from transformers import BitsAndBytesConfig

    compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision, torch.float32)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        # FSDP2 does not shard weights stored as bytes (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model).
        bnb_4bit_quant_storage=compute,
    )
    return {"quantization_config": config}


def packing(options: dict[str, Any]) -> Callable[[torch.nn.Module, str, torch.nn.Parameter], torch.nn.Parameter]:
    """A function for each weight that is read with `quantization_options`, before an engine takes its part."""
    return partial(pack, options["quantization_config"])
