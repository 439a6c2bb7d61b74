"""Writes a trained adapter and its base model as one model, after making sure that it is the right base."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from cookbook.adapters import BASE_RECORD, Base
from cookbook.checkpoint.export import SHARD_SIZE, building
from cookbook.files import RecipeError
from cookbook.models import fetch_model, weights_digest

PROBE = 16
"""Tokens of the input on which the merged model must answer as the adapter did."""


def merge(run: Path, dtype: str | None) -> int:
    """Writes `merged/` beside the run's `export/`, and reopens it. Returns the exit code.

    Raises:
        RecipeError: no adapter there, or its base model is not the one that it was trained on.
    """
    folder, target = run / "export", run / "merged"
    if not (folder / BASE_RECORD).is_file():
        raise RecipeError([f"{folder}: no adapter there; name the run.output_dir of a finished run with an adapter"])
    with building(target) as build:
        said = write_merged(folder, build, getattr(torch, dtype) if dtype else None)
        for name in ("README.md", "export.json"):  # of an adapter that `cookbook.publish` wrote
            if (folder / name).is_file():
                shutil.copyfile(folder / name, build / name)
    print(f"{target}: {_base_of(folder).name_or_path} with the adapter in it, {said}")
    return 0


def write_merged(folder: Path, build: Path, dtype: torch.dtype | None) -> str:
    """Writes the adapter of `folder` and its base model into `build` as one model, with the tokenizer; reopens it.

    Merging happens in float32 on the CPU, which must hold the whole model three times; the result is stored in `dtype`,
    or in the base model's own. Of qlora, the base is the unquantised model.

    Returns:
        In which dtype, and how far its logits lie from the adapter's.

    Raises:
        RecipeError: its base model is not the one that it was trained on.
        RuntimeError: the logits are not those of the adapter.
    """
    from peft import PeftModel

    base = _base_of(folder)
    base_folder = Path(fetch_model(base.name_or_path, base.revision))
    if weights_digest(base_folder) != base.sha256:
        raise RecipeError(
            [f"{base.name_or_path}: its weights are not those that {folder} was trained on (another SHA-256)"]
        )
    logging.disable_progress_bar()
    stored: torch.dtype = (
        dtype or AutoConfig.from_pretrained(base_folder, trust_remote_code=False).dtype or torch.float32
    )
    options: dict[str, Any] = {"dtype": torch.float32}
    whole = AutoModelForCausalLM.from_pretrained(base_folder, trust_remote_code=False, use_safetensors=True, **options)
    model = PeftModel.from_pretrained(whole, str(folder))
    expected = _answer(model)
    merged: PreTrainedModel = model.merge_and_unload(safe_merge=True)
    merged.to(stored).save_pretrained(build, max_shard_size=SHARD_SIZE)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(build)
    shutil.copyfile(folder / "generation_config.json", build / "generation_config.json")
    again = AutoModelForCausalLM.from_pretrained(build, trust_remote_code=False, use_safetensors=True, **options)
    error = (_answer(again) - expected).abs().max().item() / expected.abs().max().item()
    limit = {torch.float32: 1e-4, torch.float16: 1e-2}.get(stored, 5e-2)
    if not error < limit:
        raise RuntimeError(f"{build}: its logits are {error:.1e} from those of the adapter; it was removed")
    return f"{str(stored).removeprefix('torch.')}; reopened, its logits are within {error:.0e} of the adapter's"


def _base_of(folder: Path) -> Base:
    return Base(**json.loads((folder / BASE_RECORD).read_text(encoding="utf-8")))


@torch.no_grad()
def _answer(model: Any) -> torch.Tensor:
    """Logits (1, PROBE, V) on the first tokens of the vocabulary."""
    return model.eval()(input_ids=torch.arange(PROBE)[None]).logits.float()
