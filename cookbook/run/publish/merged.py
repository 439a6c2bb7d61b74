"""An adapter and its base model as one model, written a layer at a time and reopened."""

import ctypes
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from cookbook.facts.language_part import open_config
from cookbook.facts.model_files import GENERATION, read_tokenizer
from cookbook.system.files import RecipeError, first_line
from cookbook.training.adapters.adapter_files import check_fits, open_beside
from cookbook.training.adapters.base_model import Base
from cookbook.training.adapters.peft_folder import ADAPTER_NAME, in_language_names
from cookbook.training.adapters.saved_settings import WRITTEN
from cookbook.training.checkpoint.streamed import StreamedModel, probe_logits
from cookbook.training.checkpoint.tensors import CHUNK, Weight, as_weight
from cookbook.training.checkpoint.tower import Tower, copy_processors
from cookbook.training.checkpoint.write_model import saved_buffers, write_model
from cookbook.training.models.folder_facts import check_folder
from cookbook.training.models.language_model import open_language_model
from cookbook.training.models.model_source import fetch_model, weights_digest

M_MMAP_THRESHOLD = -3
"""In glibc's malloc.h."""


def write_merged(folder: Path, build: Path, dtype: torch.dtype | None) -> str:
    """Write the adapter of `folder` and its base model into `build` as one model, with the tokenizer, and reopen it.

    Merges in float32 on the CPU, a layer at a time, and stores `dtype`, by default that of the base model. For qlora,
    the base is the unquantized model. The CPU holds the adapter, the embeddings and a layer; the whole model where the
    base's files have other tensors than transformers would save (see `StreamedModel.open`).

    Returns:
        A sentence with the dtype and the largest difference of the logits.

    Raises:
        RecipeError: its base model is not the one that it was trained on.
        RuntimeError: the logits are not those of the adapter.
    """
    base = Base.read(folder)
    base_folder = Path(fetch_model(base.name_or_path, base.revision))
    try:
        digest = weights_digest(base_folder)
    except OSError as why:
        raise RecipeError(f"{base_folder}, the base of {folder}: cannot be read ({first_line(why)})") from None
    if digest != base.sha256:
        raise RecipeError(
            f"{base.name_or_path}: its weights are not those that {folder} was trained on (another SHA-256)"
        )
    logging.disable_progress_bar()
    _map_large_tensors()
    config = open_config(base_folder)
    check_folder(base_folder, config, place=str(base_folder))
    base_folder = Path(rebuild_base(str(base_folder), folder, base))
    config = open_config(base_folder)
    check_fits(folder, config, read=WRITTEN)
    stored: torch.dtype = dtype or config.dtype or torch.float32
    weights, expected = _merge_in_parts(base_folder, folder) or _merge_whole(base_folder, folder)
    write_model(weights, build, config=config, dtype=stored, tower=Tower.of(base_folder))
    copy_processors(base_folder, build)
    del weights  # before it is opened again
    read_tokenizer(folder).save_pretrained(build)
    if (folder / GENERATION).is_file():  # not of a model that scores
        shutil.copyfile(folder / GENERATION, build / GENERATION)
    error = (_logits_of(build) - expected).abs().max().item() / expected.abs().max().item()
    limit = {torch.float32: 1e-4, torch.float16: 1e-2}.get(stored, 5e-2)
    if not error < limit:
        raise RuntimeError(f"{build}: its logits are {error:.1e} from those of the adapter; it was removed")
    return f"{str(stored).removeprefix('torch.')}; reopened, its logits are within {error:.0e} of the adapter's"


def rebuild_base(base: str, adapter: Path, record: Base, *, cache: Path = Path(".cache")) -> str:
    """The folder of an adapter's base with rows for the tokens that its run added, and with the head that it trained,
    whose weights are in the adapter."""
    if record.new_tokens:
        from cookbook.training.models.grown import grown_folder

        base = grown_folder(base, read_tokenizer(adapter), record.new_tokens, cache=cache)
    if record.head is not None:
        from cookbook.training.models.first_head import scored_folder

        base = scored_folder(base, record.head, seed=0, cache=cache)
    return base


def _merge_in_parts(base_folder: Path, adapter: Path) -> tuple[dict[str, Weight], torch.Tensor] | None:
    """The weights, each merged when it is read, and the logits of adapter and base; None if it cannot be streamed.

    Raises:
        RecipeError: layers share a weight, but not what their adapters make of it.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils import ModulesToSaveWrapper

    streamed = StreamedModel.open(base_folder)
    if streamed is None:
        return None
    names = [name for name, _ in streamed.model.named_parameters()]
    weights = {name: streamed.weight(name) for name in names}
    weights |= {name: as_weight(buffer) for name, buffer in saved_buffers(streamed.model).items()}
    open_beside(streamed.model, adapter)
    for name, module in streamed.model.named_modules():
        if isinstance(module, LoraLayer):
            own = [module.parameter_name] if isinstance(module, ParamWrapper) else None
            for key in own or streamed.tensors_of(module.get_base_layer()):
                # One wrapper is in another where two parameters of a module have adapters.
                of_layer = f"{name.replace('.base_layer', '')}.{key}"
                if of_layer not in weights:
                    what = "is also another layer's weight, and each has an adapter of its own"
                    raise RecipeError(
                        f"{of_layer} {what}: one model cannot have both; serve the adapter beside its base"
                    )
                weights[of_layer] = weights[of_layer]._replace(parts=partial(_merged_layer, streamed, module, key))
        elif isinstance(module, TrainableTokensLayer):
            of_rows = f"{name.removesuffix('.token_adapter')}.weight"
            if of_rows in weights:  # not a head that is tied
                weights[of_rows] = weights[of_rows]._replace(parts=partial(_merged_layer, streamed, module, "weight"))
        elif isinstance(module, ModulesToSaveWrapper):
            for key, parameter in module.modules_to_save[ADAPTER_NAME].named_parameters():
                weights[f"{name}.{key}"] = _to_weight(parameter.detach())
    return weights, streamed.probe_logits()


@torch.no_grad()
def _merged_layer(streamed: StreamedModel, layer: Any, key: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """A tensor of a layer with the adapter in it."""
    with streamed.keep_filled(layer):
        layer.merge(safe_merge=True)
        yield from _to_weight(getattr(layer.get_base_layer(), key).detach()).parts(dtype)
    layer.merged_adapters.clear()


def _merge_whole(base_folder: Path, adapter: Path) -> tuple[dict[str, Weight], torch.Tensor]:
    """Return the result of `_merge_in_parts`, with the whole model in memory."""
    from peft import PeftModel

    with in_language_names(adapter) as named:
        model = PeftModel.from_pretrained(_open_in_float32(base_folder), str(named))
    expected = probe_logits(model)
    merged: PreTrainedModel = model.merge_and_unload(safe_merge=True)
    weights = {name: _to_weight(parameter.detach()) for name, parameter in merged.named_parameters()}
    return weights | {name: as_weight(buffer) for name, buffer in saved_buffers(merged).items()}, expected


def _map_large_tensors() -> None:
    """Have glibc give back each tensor's memory when it is freed. By default its threshold grows with what is freed, up
    to 32 MB, and the gaps between smaller tensors held as much as the model (mallopt(3), M_MMAP_THRESHOLD).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**20)


def _logits_of(folder: Path) -> torch.Tensor:
    """Logits of a model in files, after transformers has found every tensor that it expects in them."""
    streamed = StreamedModel.open(folder)
    if streamed is None:
        return probe_logits(_open_in_float32(folder))
    try:
        check_folder(folder, open_config(folder), place=str(folder))
    except RecipeError as error:
        raise RuntimeError(f"{error}; it was removed") from None
    return streamed.probe_logits()


def _open_in_float32(folder: Path) -> PreTrainedModel:
    return open_language_model(folder, dtype=torch.float32)


def _to_weight(tensor: torch.Tensor) -> Weight:
    return Weight(list(tensor.shape), lambda dtype: (part.to(dtype) for part in tensor.reshape(-1).split(CHUNK)))
