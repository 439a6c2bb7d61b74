"""A checkpoint's weights as Hugging Face files, whatever strategy wrote them: no process group, a part in memory."""

import contextlib
import copy
import ctypes
import errno
import fcntl
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
)

from cookbook.checkpoint.folder import Checkpoint
from cookbook.checkpoint.tensors import Reader, Tensor, room_for, write_tensors

BUILD, OLD = "build", "old"
SHARD_SIZE = "5GB"
"""Of a weight file at most: the Hub takes far larger ones, and a broken transfer starts its file anew."""


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` at the end. After an error there is no trace of it, and what lay
    there before is untouched; after a kill another start sweeps, see `sweep_builds`.
    """
    sweep_builds(folder)
    build = _beside(folder, BUILD)
    build.mkdir(parents=True)
    with _held(build):
        try:
            yield build
            _take_place(build, folder)
        except BaseException:
            shutil.rmtree(build, ignore_errors=True)
            raise


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}.{os.getpid()}")


def _take_place(build: Path, folder: Path) -> None:
    """Removes what lay in the place; at no moment is it empty, where the file system can exchange two names."""
    if not folder.exists():
        build.rename(folder)
        return
    if _exchange(build, folder):
        old = build
    else:
        old = folder.rename(_beside(folder, OLD))
        try:
            build.rename(folder)
        except OSError:
            old.rename(folder)
            raise
    shutil.rmtree(old, ignore_errors=True)


def sweep_builds(folder: Path) -> None:
    """Removes what killed processes have left of building `folder`, and brings back what one of them had moved away."""
    for what in (OLD, BUILD):
        for left in sorted(folder.parent.glob(f".{folder.name}.{what}.*")):
            with contextlib.suppress(OSError), _held(left):
                if what == OLD and not folder.exists():
                    left.rename(folder)
                else:
                    shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The kernel's lock of a folder, which a dead process does not have.

    Raises:
        BlockingIOError: another process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):  # a file system without locks
                raise
        yield
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Gives two folders each other's name at once, where kernel and file system can (Linux, renameat2(2))."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


@contextlib.contextmanager
def joined_weights(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """The trained parameters, whole, by name, in a file that is mapped into memory: the machine need not hold them.

    Args:
        folder: with room for them until the end.

    Raises:
        BrokenCheckpoint: elements are missing.
    """
    path = folder / "whole.tmp"
    try:
        yield join_weights(checkpoint, path, dtype)
    finally:
        path.unlink(missing_ok=True)


def join_weights(checkpoint: Checkpoint, path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As `joined_weights`; the file stays."""
    reader = Reader(checkpoint.pieces)
    shapes: dict[str, list[int]] = checkpoint.state()["parameters"]
    tensors = (
        Tensor(name, shape, dtype, reader.parts(name, "weight", math.prod(shape), dtype))
        for name, shape in shapes.items()
    )
    write_tensors(path, tensors, room=room_for(shapes))
    return load_file(path)


def write_model(
    weights: dict[str, torch.Tensor], folder: Path, *, config: PreTrainedConfig, shard_size: str = SHARD_SIZE
) -> None:
    """A whole model as `from_pretrained` reads it, all weights in one dtype."""
    dtype = next(iter(weights.values())).dtype
    # An empty twin writes the files: the trained model's own save_pretrained would gather again, on one process.
    with torch.device("meta"):
        twin = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](copy.deepcopy(config)).to(dtype)
    twin.save_pretrained(folder, state_dict=weights, max_shard_size=shard_size)


def write_generation_config(folder: Path, *, like: Path, end_of_turn: int | None) -> None:
    """How to generate, taken over from the model that was trained; it also stops at the end of a turn, which a base
    model never learned to do, and its own configuration does not name.
    """
    config = GenerationConfig()
    if (like / "generation_config.json").is_file():
        config = GenerationConfig.from_pretrained(like)
    elif (like / "config.json").is_file():
        config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(like, trust_remote_code=False))
    own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = list(dict.fromkeys(token for token in (*own, end_of_turn) if token is not None))
    config.eos_token_id = ends if len(ends) > 1 else ends[0] if ends else None
    config.save_pretrained(folder)
