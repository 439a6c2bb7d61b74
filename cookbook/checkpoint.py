"""The trained model as a Hugging Face folder, written the same under every strategy."""

import copy
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase


def export_model(
    parameters: Iterable[tuple[str, torch.Tensor | None]],
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    like: Path,
    dtype: torch.dtype,
    is_main: bool,
) -> None:
    """Writes weights (safetensors), configuration and tokenizer into `folder`, whole or not at all.

    Collective: every process must call, since `parameters` (names and whole tensors, on the main process only) gathers
    them one by one. The main process holds the whole model in `dtype` in host memory.

    Args:
        like: the folder of the model that was trained; how to generate is taken over from it.
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
        # An empty twin writes the files: the trained model's own save_pretrained would gather again, on one process.
        with torch.device("meta"):
            twin = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](copy.deepcopy(config)).to(dtype)
        twin.save_pretrained(build, state_dict=weights)
        tokenizer.save_pretrained(build)
        if (like / "generation_config.json").is_file():
            shutil.copyfile(like / "generation_config.json", build / "generation_config.json")
        shutil.rmtree(folder, ignore_errors=True)
        build.rename(folder)
    except BaseException:
        shutil.rmtree(build, ignore_errors=True)
        raise
