"""Writes a checkpoint's weights as Hugging Face files, whatever strategy saved them: in one process, part by part."""

import contextlib
import copy
import ctypes
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from cookbook.facts.model_files import generation_settings
from cookbook.facts.score_head import empty_model
from cookbook.system import lock
from cookbook.training.checkpoint.folder import Checkpoint
from cookbook.training.checkpoint.tensors import Reader, Tensor, Weight, as_weight, room_for, write_tensors
from cookbook.training.checkpoint.tower import Tower

BUILD, OLD = "build", "old"
BUFFERS = "buffers.safetensors"
"""In `model/` of a run, if its model has such; see `saved_buffers`."""
SHARD_SIZE = "5GB"
"""Largest weight file: the Hub accepts larger ones, but an interrupted transfer restarts its file."""


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path]:
    """An empty folder that replaces `folder` at the end. After an error it is removed and `folder` is untouched; after
    a kill, the next start cleans up, see `sweep_builds`.
    """
    sweep_builds(folder)
    build = _sibling(folder, BUILD)
    try:
        build.mkdir(parents=True)
    except OSError as error:
        error.filename = str(folder)  # which somebody knows
        raise
    with _lock(build):
        try:
            yield build
            _take_place(build, folder)
        except BaseException:
            shutil.rmtree(build, ignore_errors=True)
            raise


def _sibling(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}.{os.getpid()}")


def _take_place(build: Path, folder: Path) -> None:
    """Replace `folder`, without a moment at which it is missing if the file system can exchange two names."""
    if not folder.exists():
        build.rename(folder)
        return
    old = build
    if not _exchange(build, folder):
        old = folder.rename(_sibling(folder, OLD))
        try:
            build.rename(folder)
        except OSError:
            old.rename(folder)
            raise
    shutil.rmtree(old, ignore_errors=True)


def sweep_builds(folder: Path) -> None:
    """Remove what killed processes left of building `folder`, and restore what one of them had moved away."""
    for what in (OLD, BUILD):
        for left in sorted(folder.parent.glob(f".{folder.name}.{what}.*")):
            with contextlib.suppress(OSError), _lock(left):
                if what == OLD and not folder.exists():
                    left.rename(folder)
                else:
                    shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the kernel's lock of a folder itself, which is free if its process died.

    Raises:
        BlockingIOError: another process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in lock.NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


def _exchange(path: Path, other: Path) -> bool:
    """Swap the names of two folders atomically, where kernel and file system can (Linux, renameat2(2))."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(path), here, os.fsencode(other), exchange) == 0


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong into a model's files, such as the biases of DeepSeek-V3's router, on the CPU. No optimizer
    changes them, and a checkpoint does not have them.
    """
    return {
        f"{prefix}.{name}".replace("_fsdp_wrapped_module.", ""): buffer.detach().cpu().contiguous()
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def weights_of(checkpoint: Checkpoint) -> dict[str, Weight]:
    """The trained parameters of a checkpoint by name. Reading them raises BrokenCheckpoint if elements are missing."""
    reader = Reader(checkpoint.pieces)
    shapes: dict[str, list[int]] = checkpoint.state()["parameters"]
    return {
        name: Weight(shape, partial(reader.parts, name, "weight", math.prod(shape))) for name, shape in shapes.items()
    }


def write_model(
    weights: dict[str, Weight],
    folder: Path,
    *,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    tower: Tower | None = None,
    shard_size: str = SHARD_SIZE,
) -> None:
    """Write a whole model for `from_pretrained`, all weights in one dtype (buffers keep theirs): the files of
    `save_pretrained`, written once and in parts. A model whose files have other tensors than the model itself (experts
    that are stacked in memory, for example) is written twice.

    Args:
        tower: what belongs to the model besides, written as it is.
    """
    with torch.device("meta"):
        empty = empty_model(copy.deepcopy(config)).to(dtype)
    ignored = empty._keys_to_ignore_on_save or ()
    saved = {name: weight for name, weight in weights.items() if name not in ignored}
    with _by_key(saved, folder, empty, dtype) as by_key:
        if tower is not None:
            by_key = {tower.key(key): weight for key, weight in by_key.items()} | tower.tensors
        planned = {key: torch.empty(w.shape, dtype=w.own_dtype or dtype, device="meta") for key, w in by_key.items()}
        files = split_torch_state_dict_into_shards(planned, max_shard_size=shard_size)
        for file, keys in files.filename_to_tensors.items():
            tensors = (_in_file(key, by_key[key], dtype) for key in keys)
            write_tensors(folder / file, tensors, room=room_for(keys), metadata={"format": "pt"})
    if files.is_sharded:
        beside = 0 if tower is None else sum(math.prod(weight.shape) for weight in tower.tensors.values())
        metadata = {"total_parameters": empty.num_parameters() + beside, **files.metadata}
        index = {"metadata": metadata, "weight_map": files.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
    if tower is not None:
        tower.write_config(folder, dtype)
    else:
        empty.config.dtype, empty.config.architectures = str(dtype).removeprefix("torch."), [type(empty).__name__]
        empty.config.save_pretrained(folder)
    if empty.can_generate():
        empty.generation_config.save_pretrained(folder)


@contextlib.contextmanager
def _by_key(
    weights: dict[str, Weight], folder: Path, empty: PreTrainedModel, dtype: torch.dtype
) -> Iterator[dict[str, Weight]]:
    """The weights by their names in files."""
    planned = {name: torch.empty(w.shape, dtype=w.own_dtype or dtype, device="meta") for name, w in weights.items()}
    names = {id(tensor): name for name, tensor in planned.items()}
    # Names from transformers, tensors from us: save_pretrained wants all of them first, and so a second copy on disk.
    in_files = revert_weight_conversion(empty, dict(planned))
    if all(id(tensor) in names for tensor in in_files.values()):
        yield {key: weights[names[id(tensor)]] for key, tensor in in_files.items()}
        return
    with _join_parts(weights, folder, dtype) as joined:
        yield {key: as_weight(tensor) for key, tensor in revert_weight_conversion(empty, joined).items()}


def _in_file(name: str, weight: Weight, dtype: torch.dtype) -> Tensor:
    stored = weight.own_dtype or dtype
    return Tensor(name, weight.shape, stored, weight.parts(stored))


@contextlib.contextmanager
def _join_parts(weights: dict[str, Weight], folder: Path, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """The weights in a file mapped into memory, so that the machine need not hold them."""
    path = folder / "whole.tmp"
    try:
        tensors = (_in_file(name, weight, dtype) for name, weight in weights.items())
        write_tensors(path, tensors, room=room_for(weights))
        yield load_file(path)
    finally:
        path.unlink(missing_ok=True)


def write_generation_config(folder: Path, *, like: Path, end_of_turn: int | None) -> None:
    """Write the generation settings of the model that was trained, and let it stop also at the end of a turn, which a
    base model's own settings do not name.
    """
    config = generation_settings(like)
    own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = list(dict.fromkeys(token for token in (*own, end_of_turn) if token is not None))
    config.eos_token_id = ends if len(ends) > 1 else ends[0] if ends else None
    config.save_pretrained(folder)
