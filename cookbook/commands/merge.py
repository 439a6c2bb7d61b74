"""Merges a trained adapter into its base model, after checking that it is the right base."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from cookbook.system.files import RecipeError
from cookbook.training.adapters import BASE_RECORD, Base
from cookbook.training.checkpoint.export import Weight, as_weight, building, saved_buffers, write_model
from cookbook.training.checkpoint.tensors import CHUNK
from cookbook.training.models import fetch_model, weights_digest

PROBE_TOKENS = 16
"""Length of the input on which the logits of merged model and adapter are compared."""


def merge(run: Path, dtype: str | None) -> int:
    """Write `merged/` beside the run's `export/`, and reopen it. Returns the exit code.

    Raises:
        RecipeError: no adapter there, or its base model is not the one that it was trained on.
    """
    folder, target = run / "export", run / "merged"
    if not (folder / BASE_RECORD).is_file():
        raise RecipeError(f"{folder}: no adapter there; name the run.output_dir of a finished run with an adapter")
    with building(target) as build:
        checked = write_merged(folder, build, getattr(torch, dtype) if dtype else None)
        for name in ("README.md", "export.json"):  # of an adapter that `cookbook.commands.publish` wrote
            if (folder / name).is_file():
                shutil.copyfile(folder / name, build / name)
    print(f"{target}: {_base_of(folder).name_or_path} with the adapter in it, {checked}")
    return 0


def write_merged(folder: Path, build: Path, dtype: torch.dtype | None) -> str:
    """Write the adapter of `folder` and its base model into `build` as one model, with the tokenizer, and reopen it.

    Merges in float32 on the CPU, which must hold the whole model once, and stores `dtype`, by default that of
    the base model. For qlora, the base is the unquantized model.

    Returns:
        A sentence with the dtype and the largest difference of the logits.

    Raises:
        RecipeError: its base model is not the one that it was trained on.
        RuntimeError: the logits are not those of the adapter.
    """
    from peft import PeftModel

    base = _base_of(folder)
    base_folder = Path(fetch_model(base.name_or_path, base.revision))
    if weights_digest(base_folder) != base.sha256:
        raise RecipeError(
            f"{base.name_or_path}: its weights are not those that {folder} was trained on (another SHA-256)"
        )
    logging.disable_progress_bar()
    own_dtype = AutoConfig.from_pretrained(base_folder, trust_remote_code=False).dtype
    stored: torch.dtype = dtype or own_dtype or torch.float32
    base_model = AutoModelForCausalLM.from_pretrained(
        base_folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    model = PeftModel.from_pretrained(base_model, str(folder))
    expected = _probe_logits(model)
    merged: PreTrainedModel = model.merge_and_unload(safe_merge=True)
    weights = {name: _as_weight(parameter.detach()) for name, parameter in merged.named_parameters()}
    weights |= {name: as_weight(buffer) for name, buffer in saved_buffers(merged).items()}
    write_model(weights, build, config=merged.config, dtype=stored)
    del base_model, model, merged, weights  # before it is opened again
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(build)
    shutil.copyfile(folder / "generation_config.json", build / "generation_config.json")
    reopened = AutoModelForCausalLM.from_pretrained(
        build, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    error = (_probe_logits(reopened) - expected).abs().max().item() / expected.abs().max().item()
    limit = {torch.float32: 1e-4, torch.float16: 1e-2}.get(stored, 5e-2)
    if not error < limit:
        raise RuntimeError(f"{build}: its logits are {error:.1e} from those of the adapter; it was removed")
    return f"{str(stored).removeprefix('torch.')}; reopened, its logits are within {error:.0e} of the adapter's"


def _as_weight(tensor: torch.Tensor) -> Weight:
    return Weight(list(tensor.shape), lambda dtype: (part.to(dtype) for part in tensor.reshape(-1).split(CHUNK)))


def _base_of(folder: Path) -> Base:
    return Base(**json.loads((folder / BASE_RECORD).read_text(encoding="utf-8")))


@torch.no_grad()
def _probe_logits(model: Any) -> torch.Tensor:
    """Logits (1, PROBE_TOKENS, V) on the first tokens of the vocabulary."""
    return model.eval()(input_ids=torch.arange(PROBE_TOKENS)[None]).logits.float()
