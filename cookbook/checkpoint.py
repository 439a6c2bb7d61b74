"""What a run leaves behind as a Hugging Face folder, written the same under every strategy."""

import copy
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase


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


def write_model(weights: dict[str, torch.Tensor], folder: Path, *, config: PreTrainedConfig, like: Path) -> None:
    """A whole model as `from_pretrained` reads it, all weights in one dtype.

    Args:
        like: the folder of the model that was trained; how to generate is taken over from it.
    """
    dtype = next(iter(weights.values())).dtype
    # An empty twin writes the files: the trained model's own save_pretrained would gather again, on one process.
    with torch.device("meta"):
        twin = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](copy.deepcopy(config)).to(dtype)
    twin.save_pretrained(folder, state_dict=weights)
    if (like / "generation_config.json").is_file():
        shutil.copyfile(like / "generation_config.json", folder / "generation_config.json")
