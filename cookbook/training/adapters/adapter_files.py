"""Adapters as peft folders: written, compared with a base model, and opened beside one without data."""

import copy
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from cookbook.config.sections import ALL_LINEAR, AdapterSection
from cookbook.facts.language_part import has_tower, language_config
from cookbook.facts.model_files import values_of
from cookbook.facts.score_head import backbone_name, empty_model
from cookbook.system.digests import sha256_of
from cookbook.system.files import RecipeError, first_line, refuse
from cookbook.training.adapters.peft_folder import (
    ADAPTER_NAME,
    ADAPTER_WEIGHTS,
    in_language_names,
    name_in_file,
    shapes_in,
)
from cookbook.training.adapters.saved_settings import OPENED, differences_from_layers

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig
from cookbook.training.adapters.adapted_layers import examine, last_parts, lora_config
from cookbook.training.adapters.base_model import Base
from cookbook.training.adapters.insertion import inject


def check_names(config: PreTrainedConfig, settings: AdapterSection) -> list[str]:
    """Check an adapter against the structure of a model, without data.

    Returns:
        notes for the user, see `examine`.

    Raises:
        RecipeError: as `examine` and `inject`, or an `adapter.path` that does not fit.
    """
    model = _empty_model(config)
    notes = examine(model, settings)
    with torch.device("meta"):
        inject(model, settings)
    if settings.path is not None:
        from cookbook.training.adapters import continued

        continued.check(model, settings)
    return notes


def weights_digest(settings: AdapterSection, *, cache: Path) -> str:
    """SHA-256 of the weights that an adapter with a `path` begins with."""
    path = Path(settings.path or "") / ADAPTER_WEIGHTS
    return sha256_of([path], cache=cache)[path]


def write_adapter(
    weights: dict[str, torch.Tensor],
    folder: Path,
    *,
    config: PreTrainedConfig,
    settings: AdapterSection,
    base: Base,
    whole: PreTrainedConfig | None = None,
) -> None:
    """Write a peft folder: `adapter_model.safetensors`, `adapter_config.json`, and a record of the base model.

    Args:
        weights: the whole trained parameters by their names in the model.
        whole: of the model whose language part was trained; the adapter is then written for the whole model.
    """
    from peft.utils import get_peft_model_state_dict

    # A model without data, since peft derives the names in the file from a model.
    empty = _empty_model(config)
    peft_config = lora_config(settings, empty, base, new_rows=base.new_rows, for_file=True)
    inject(empty, settings, base.new_rows)
    named = get_peft_model_state_dict(empty, state_dict=weights, adapter_name=ADAPTER_NAME, save_embedding_layers=False)
    if len(named) != len(weights):
        raise RuntimeError(f"{len(weights)} tensors were trained, peft would save {len(named)}: nothing was written")
    if whole is not None:
        roots = module_roots(whole)
        named = {in_whole(name, roots): tensor for name, tensor in named.items()}
        peft_config.target_modules = _in_language_part(peft_config, weights, roots[backbone_name(empty)])
        rows: Any = peft_config.trainable_token_indices or {}
        peft_config.trainable_token_indices = {in_whole(name, roots): ids for name, ids in rows.items()} or None
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in named.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    peft_config.inference_mode = True
    peft_config.save_pretrained(str(folder))
    # With its digest: peft records name and revision, which can come to mean other weights before a merge.
    base.write(folder)


def module_roots(config: PreTrainedConfig) -> dict[str, str]:
    """The place of the language part in a model with a tower: for the first part of a name in the class for the
    language part, the beginning of that name in the whole model.
    """
    part, model = _empty_model(language_config(config)), _empty_model(config)
    names_in_part = {module: name for name, module in part.named_modules()}
    names_in_model = {module: name for name, module in model.named_modules()}
    roots = {}
    # Embedding and head are asked for by function, so that no name of a model type has to be known here.
    for in_part, in_model in (
        (part.get_input_embeddings(), model.get_input_embeddings()),
        (part.get_output_embeddings(), model.get_output_embeddings()),
    ):
        root, _, rest = names_in_part[in_part].partition(".")
        name = names_in_model[in_model]
        roots[root] = name.removesuffix(f".{rest}") if rest else name
    return roots


def in_whole(name: str, roots: dict[str, str]) -> str:
    """A name in the language part as the whole model has it."""
    root, dot, rest = name.partition(".")
    return f"{roots.get(root, root)}{dot}{rest}"


def _in_language_part(settings: "LoraConfig", weights: Iterable[str], root: str) -> str:
    """A pattern of the adapted modules for peft, which by names alone would adapt layers of the tower too."""
    names = settings.target_modules
    if names == ALL_LINEAR:
        names = last_parts(name.partition(".lora_")[0] for name in weights if ".lora_" in name)
    return rf"{re.escape(root)}\.(.*\.)?({'|'.join(map(re.escape, sorted(names or ())))})"


def check_fits(folder: Path, config: PreTrainedConfig, *, read: Collection[str] = OPENED) -> None:
    """Compare the tensors of an adapter's file with the adapter that its settings give the base model, without data.

    Args:
        read: keys of its settings that whoever opens it follows.

    Raises:
        RecipeError: it is the adapter of another model, or has a setting that is not followed.
    """
    from peft import PeftConfig

    saved = values_of(folder / "adapter_config.json")
    if saved.get("peft_type") == "LORA":
        refuse([f"{folder}: its adapter_config.json has {what}" for what in differences_from_layers(saved, read)])
    try:
        settings = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # peft takes the keys as arguments of a class
        raise RecipeError(f"{folder / 'adapter_config.json'}: peft cannot read it ({first_line(error)})") from None
    shapes_in(folder, str(folder))
    if settings.is_prompt_learning:
        what = f"its peft_type is {settings.peft_type}, which adds to the prompt"
        raise RecipeError(f"{folder}: {what}; only adapters of layers are read here")
    try:
        with in_language_names(folder) as named:
            first = _first_difference(named, config)
    except RecipeError:
        raise
    except Exception as error:  # what peft, torch and safetensors raise over values that they did not expect
        first = f"{type(error).__name__}: {first_line(error)}"
        if not _fits_a_layer(settings):
            raise RecipeError(
                f"{folder}: peft cannot put a {saved.get('peft_type')} adapter into a model without data, as is done"
                f" here ({first}); merge it into its base with peft's `merge_and_unload`, and name the model that this"
                " saves"
            ) from None
    if first:
        base = settings.base_model_name_or_path
        raise RecipeError(
            f"{folder}: not an adapter of {base} ({first}); put the base there that it was trained on, or write that"
            " one's path into base_model_name_or_path of adapter_config.json"
        )


def _fits_a_layer(settings: "PeftConfig") -> bool:
    """Return whether peft adapts a layer without data by these settings, whatever layers they name."""
    from peft import inject_adapter_in_model

    layer = copy.copy(settings)
    for key in ("layers_to_transform", "layers_pattern", "exclude_modules", "modules_to_save", "target_parameters"):
        if hasattr(layer, key):
            setattr(layer, key, None)
    layer.target_modules = {"layer"}  # type: ignore[attr-defined]
    try:
        with torch.device("meta"):  # of a size that blocks divide
            inject_adapter_in_model(layer, torch.nn.ModuleDict({"layer": torch.nn.Linear(26880, 26880)}), ADAPTER_NAME)
    except Exception:
        return False
    return True


def _first_difference(folder: Path, config: PreTrainedConfig) -> str | None:
    from peft import PeftConfig, inject_adapter_in_model
    from peft.utils import get_peft_model_state_dict

    model = _empty_model(config)
    with torch.device("meta"):
        inject_adapter_in_model(PeftConfig.from_pretrained(str(folder)), model, ADAPTER_NAME)
    wanted = get_peft_model_state_dict(model, adapter_name=ADAPTER_NAME, save_embedding_layers=False)
    shapes = {f"base_model.model.{name}": [*tensor.shape] for name, tensor in wanted.items()}
    stored = shapes_in(folder, str(folder))
    # peft writes an embedding or a head that was resized beside them (utils/save_and_load.py, save_embedding_layers).
    resized = [id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())]
    beside = tuple(f"base_model.model.{name}." for name, module in model.named_modules() if id(module) in resized)
    others = {name for name in stored if not name.startswith(beside) or "lora_" in name} - shapes.keys()
    differ = sorted(others | {name for name, shape in shapes.items() if stored.get(name) != shape})
    if not differ:
        return None
    return f"{differ[0]} is {stored.get(differ[0])} in its file, and for the base {shapes.get(differ[0])}"


def open_beside(model: PreTrainedModel, folder: Path) -> None:
    """Insert the adapter of a peft folder, in float32 on the CPU, into a model without data, in place. peft itself
    would leave the adapter without data as well.

    Raises:
        RuntimeError: the file has other tensors than the adapter's settings ask for.
    """
    from peft import PeftConfig, inject_adapter_in_model

    with in_language_names(folder) as named:
        inject_adapter_in_model(PeftConfig.from_pretrained(str(named)), model, ADAPTER_NAME, low_cpu_mem_usage=True)
        saved = load_file(named / ADAPTER_WEIGHTS)
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            tensor = saved.pop(f"base_model.model.{name_in_file(f'{module_name}.{name}')}", None)
            if tensor is not None and tensor.shape == parameter.shape:
                module.register_parameter(name, torch.nn.Parameter(tensor.float(), requires_grad=False))
            elif "lora_" in module_name or ".modules_to_save." in module_name:
                raise RuntimeError(f"{folder}: {module_name}.{name} is not in its file as the settings describe it")
    if saved:
        raise RuntimeError(
            f"{folder}: its file has tensors without a place in the model: {', '.join(sorted(saved)[:5])}"
        )


def _empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](config) if has_tower(config) else empty_model(config)
