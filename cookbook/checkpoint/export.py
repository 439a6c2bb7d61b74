"""What a run leaves behind as a Hugging Face folder, written the same under every strategy."""

import copy
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)


def export(
    parameters: Iterable[tuple[str, torch.Tensor | None]],
    write: Callable[[dict[str, torch.Tensor], Path], None],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    dtype: torch.dtype,
    is_main: bool,
) -> None:
    """Writes weights and tokenizer into `folder`, whole or not at all.

    Collective: every process must call, since `parameters` (names and whole tensors, on the main process only) gathers
    them one by one. The main process holds them all in `dtype` in host memory.

    Args:
        write: puts the weights into a folder: `write_model`, or the adapter's.
    """
    weights = {}
    for name, tensor in parameters:
        if tensor is not None:
            if tensor.numel() == 0:
                raise RuntimeError(f"{name} came back empty: nothing was written")
            weights[name] = tensor.to(dtype)
    if not is_main:
        return
    build = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    try:
        write(weights, build)
        tokenizer.save_pretrained(build)
        shutil.rmtree(folder, ignore_errors=True)
        build.rename(folder)
    except BaseException:
        shutil.rmtree(build, ignore_errors=True)
        raise


def write_model(weights: dict[str, torch.Tensor], folder: Path, *, config: PreTrainedConfig) -> None:
    """A whole model as `from_pretrained` reads it, all weights in one dtype."""
    dtype = next(iter(weights.values())).dtype
    # An empty twin writes the files: the trained model's own save_pretrained would gather again, on one process.
    with torch.device("meta"):
        twin = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](copy.deepcopy(config)).to(dtype)
    twin.save_pretrained(folder, state_dict=weights)


def write_generation_config(folder: Path, *, like: Path, end_of_turn: int | None) -> None:
    """How to generate, taken over from the model that was trained; it also stops at the end of a turn, which a base
    model never learned to do, and its own configuration does not name.
    """
    config = GenerationConfig()
    if (like / "generation_config.json").is_file():
        config = GenerationConfig.from_pretrained(like)
    elif (like / "config.json").is_file():
        config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(like))
    own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = list(dict.fromkeys(token for token in (*own, end_of_turn) if token is not None))
    config.eos_token_id = ends if len(ends) > 1 else ends[0] if ends else None
    config.save_pretrained(folder)
