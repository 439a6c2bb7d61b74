"""Adapters through peft: a few new float32 weights beside frozen ones, saved as a peft folder, merged on request.

peft is imported where it is used: it takes two seconds, and bitsandbytes with it, which a run without an adapter saves.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Embedding
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from cookbook.files import RecipeError
from cookbook.recipe import ALL_LINEAR, AdapterSection

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"
BASE_RECORD = "base_model.json"


@dataclass(frozen=True)
class Base:
    """The model that an adapter belongs to."""

    name_or_path: str
    revision: str | None
    sha256: str
    """Over its weight files; see `models.weights_digest`."""


def lora_config(settings: AdapterSection, base: Base | None = None) -> "LoraConfig":
    """peft's configuration of a recipe's adapter."""
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a float serves as well
        lora_dropout=settings.dropout,
        target_modules=ALL_LINEAR if settings.targets == [ALL_LINEAR] else settings.targets,
        modules_to_save=settings.modules_to_save or None,
        use_dora=settings.name == "dora",
        use_rslora=settings.rslora,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.name_or_path if base else None,
        revision=base.revision if base else None,
    )


def check_names(config: PreTrainedConfig, settings: AdapterSection) -> None:
    """Looks for the adapter's modules in a model without weights.

    Raises:
        RecipeError: every name that matches nothing, or nothing that can be adapted.
    """
    model = _empty_model(config)
    leaves: dict[str, list[torch.nn.Module]] = {}
    for name, module in model.named_modules():
        leaves.setdefault(name.rpartition(".")[2], []).append(module)
    head = model.get_output_embeddings()
    linear = [leaf for leaf, found in leaves.items() if all(type(module) is torch.nn.Linear for module in found)]
    # peft takes every module whose name ends so: of a layer's parts that would be more than was named.
    whole = [
        leaf for leaf, (first, *more) in leaves.items() if not more and (first is head or type(first) is Embedding)
    ]
    mistakes = []
    for target in settings.targets if settings.targets != [ALL_LINEAR] else []:
        if leaves.get(target) == [head]:
            mistakes.append(
                f"adapter.targets has {target!r}, the output head, which computes the loss as a whole; to train it,"
                f" write adapter.modules_to_save: [{target}]"
            )
        elif target not in linear:
            mistakes.append(
                f"adapter.targets has {target!r}, which is no linear layer of {type(model).__name__}; it has"
                f" {', '.join(leaf for leaf in linear if leaves[leaf] != [head])}"
            )
    for name in settings.modules_to_save:
        if name not in whole:
            mistakes.append(
                f"adapter.modules_to_save has {name!r}; of {type(model).__name__} these can be trained whole:"
                f" {', '.join(whole)}"
            )
        elif config.tie_word_embeddings:
            mistakes.append(
                f"adapter.modules_to_save has {name!r}, but embedding and head of this model are one matrix: trained"
                " apart they would no longer be. Take it out, or train all weights without an adapter"
            )
    if mistakes:
        raise RecipeError(mistakes)
    with torch.device("meta"):
        inject(model, settings)


def inject(model: PreTrainedModel, settings: AdapterSection) -> None:
    """Freezes a model and puts peft's layers into it, in place.

    Raises:
        RecipeError: peft has no such layer. Experts whose weights are one tensor it adapts in a way of their own.
    """
    from peft import inject_adapter_in_model

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        inject_adapter_in_model(lora_config(settings), model, adapter_name=ADAPTER)
    except ValueError as error:
        ways = {"lora_dropout": "adapter.dropout: 0", "use_dora": "adapter.name: lora"}
        way = next((f"; write {way}" for word, way in ways.items() if word in str(error)), "")
        name = f"adapter.name {settings.name} with dropout {settings.dropout:g}"
        raise RecipeError([f"{name}: peft cannot put it into {type(model).__name__}: {error}{way}"]) from None


def add_adapter(model: PreTrainedModel, settings: AdapterSection, *, seed: int) -> None:
    """Freezes the model and puts new trainable weights beside its linear layers, in place.

    The first weights are drawn from `seed` alone, so that they are the same however the model was loaded. They are
    float32, as an optimizer needs, whatever the frozen ones are.
    """
    inject(model, settings)
    _draw_first_weights(model, seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                # Other data would leave the piece of this process as it is.
                setattr(module, name, torch.nn.Parameter(parameter.detach().float()))
            elif parameter.requires_grad:
                parameter.data = parameter.data.float()
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # On such a CPU the first forward in eval mode would repack the weights in place, for kernels that have no
            # backward: training after an evaluation would go without their gradients (bitsandbytes 0.50,
            # nn/modules.py, Linear4bit.forward).
            module.support_avx512bf16_for_cpu = False


@torch.no_grad()
def _draw_first_weights(model: PreTrainedModel, seed: int) -> None:
    """Draws every A as peft does, uniform within 1 / sqrt(its inputs), but whole: peft's own draw would give each
    process of a tensor-parallel group the same piece. B is zero, so that the adapter changes nothing yet.
    """
    from peft.tuners.lora import LoraLayer

    generator = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        base: Any = layer.get_base_layer()
        num_inputs: int = base.in_features
        matrices: list[Any] = list(layer.lora_A.values())
        for a in matrices:
            # Of a matrix that is cut along its inputs, peft 0.21.2 notes the size of a piece, and is then misled by it.
            a.in_features = num_inputs
            first = torch.empty(a.out_features, num_inputs)
            first.uniform_(-(num_inputs**-0.5), num_inputs**-0.5, generator=generator)
            old = a.weight
            if isinstance(old, DTensor):
                first = distribute_tensor(first, old.device_mesh, old.placements, src_data_rank=None)
            a.weight = torch.nn.Parameter(first.to(old.device, old.dtype))


def quantization_options(settings: AdapterSection | None, mixed_precision: str) -> dict[str, Any]:
    """What `from_pretrained` must be told to hold the frozen weights in 4 bits: NF4 with double quantisation, Dettmers
    et al. 2023 (arXiv 2305.14314)."""
    if settings is None or not settings.is_quantized:
        return {}
    from transformers import BitsAndBytesConfig

    compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision, torch.float32)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        # Stored as bytes, the weights would be left out of FSDP2's sharding (accelerate/utils/fsdp_utils.py:797).
        bnb_4bit_quant_storage=compute,
    )
    return {"quantization_config": config}


def write_adapter(
    weights: dict[str, torch.Tensor], folder: Path, *, config: PreTrainedConfig, settings: AdapterSection, base: Base
) -> None:
    """A peft folder: `adapter_model.safetensors`, `adapter_config.json`, and which base model it belongs to.

    Args:
        weights: the trained parameters, whole, by their names in the model.
    """
    from peft import inject_adapter_in_model
    from peft.utils import get_peft_model_state_dict

    # An empty twin, since peft names what it saves by looking at a model.
    twin = _empty_model(config)
    peft_config = lora_config(settings, base)
    inject_adapter_in_model(peft_config, twin, adapter_name=ADAPTER)
    named = get_peft_model_state_dict(twin, state_dict=weights, adapter_name=ADAPTER, save_embedding_layers=False)
    if len(named) != len(weights):
        raise RuntimeError(f"{len(weights)} tensors were trained, peft would save {len(named)}: nothing was written")
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in named.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_config.inference_mode = True
    peft_config.save_pretrained(str(folder))
    (folder / BASE_RECORD).write_text(json.dumps(asdict(base), indent=1) + "\n", encoding="utf-8")


def _empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
