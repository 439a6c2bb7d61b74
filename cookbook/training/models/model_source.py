"""Folder of a model: a local one, one from the Hub, or a new one that is built into the cache."""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cookbook.config.sections import ModelSection, ScratchModel
from cookbook.system import lock
from cookbook.system.digests import sha256_of
from cookbook.system.files import RecipeError, first_line, make_folder, refuse
from cookbook.system.tensor_files import weight_files, why_no_file
from cookbook.training.models.structure import scratch_config
from cookbook.training.models.tokenizer_files import CHATML, train_tokenizer

SCRATCH_FORMAT = 2
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""Files of a model, without weights in formats that can contain code."""
ADAPTER_FILE = "adapter_config.json"
"""A file by which transformers recognizes an adapter in a model's folder."""


def resolve_model(model: ModelSection, *, seed: int, texts: Iterable[str], fingerprint: str, cache: Path) -> str:
    """The folder to load from. A `from_scratch` model is built into the cache, once per machine; one from the Hub is
    downloaded here, before a process group could time out over it, so that all ranks load the same commit.

    Args:
        texts: training data of a new tokenizer; read only if the model must be built.
        fingerprint: SHA-256 of the rows behind `texts`.
    """
    if model.from_scratch is None:
        assert model.name_or_path is not None
        folder, place = fetch_model(model.name_or_path, model.revision), f"model.name_or_path is {model.name_or_path!r}"
        refuse_adapter(folder)
        if (why := weight_files(Path(folder))[1]) is not None:
            raise RecipeError(f"{place}: {why}")
        if (Path(folder) / ADAPTER_FILE).exists():
            why = f"{ADAPTER_FILE} lies beside the weights, and transformers would load that adapter unasked"
            raise RecipeError(f"{place}: {why}; move its files to another folder, or merge it into the weights")
        return folder
    sizes = model.from_scratch
    description = [SCRATCH_FORMAT, sizes.model_dump(mode="json"), seed, fingerprint, CHATML.read_text()]
    key = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]
    built = cache / f"model-{key}"
    make_folder(cache)
    with lock.making(cache / f"model-{key}.lock"):
        if not built.is_dir():
            with tempfile.TemporaryDirectory(prefix=f"model-{key}.", dir=cache) as build:
                tokenizer = train_tokenizer(texts, sizes.vocab_size)
                tokenizer.save_pretrained(build)
                # Saved, then loaded like any other: ZeRO-3 and tensor parallel, which cut a model while it is read,
                # meet nothing special.
                new_model(sizes, tokenizer, seed).save_pretrained(build)
                Path(build).rename(built)
    return str(built)


def refuse_adapter(name: str, key: str = "model.name_or_path") -> None:
    """Refuse an adapter's own folder, as a run exports it, in the place of a model. It may have a config.json."""
    folder = Path(name)
    if (folder / ADAPTER_FILE).is_file() and not ((folder / "config.json").is_file() and weight_files(folder)[0]):
        how = "`cookbook export --merged`, or with peft's `merge_and_unload` if no run here made it"
        problem = f"an adapter without its base; write both as one with {how}, and name that"
        raise RecipeError(f"{key} is {name!r}: {problem}")


def fetch_model(
    name: str, revision: str | None, patterns: list[str] = HUB_FILES, *, key: str = "model.name_or_path"
) -> str:
    """The folder of a local model, or of a model downloaded from the Hub.

    Args:
        key: the recipe's, for mistakes.
    """
    if Path(name).is_dir():
        return name
    try:
        return snapshot_download(name, revision=revision, allow_patterns=patterns)
    except (OSError, ValueError) as error:  # the Hub's errors are OSErrors, a malformed name is a ValueError
        mistake = f"{key} is {name!r}: not a folder, and not fetched ({first_line(error)})"
        raise RecipeError(f"{mistake}; a folder with the model's files serves as well") from None


def new_model(sizes: ScratchModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A new model of the given sizes, its weights drawn from `seed`."""
    config = scratch_config(sizes, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)


def revision_of(folder: str) -> str | None:
    """The commit of a folder in the Hub's cache."""
    match = re.search(r"/snapshots/([0-9a-f]{40})/?$", folder)
    return match.group(1) if match else None


def weights_digest(folder: Path, *, cache: Path | None = None) -> str:
    """SHA-256 over names and digests of a model's configuration and safetensors files; for `cache` see `sha256_of`."""
    paths = sorted((*folder.glob("*.safetensors"), folder / "config.json"))
    refuse([f"{path}: {why}" for path in paths if (why := why_no_file(path)) is not None])
    digests = sha256_of(paths, cache=cache)
    lines = "".join(f"{path.name} {digests[path]}\n" for path in paths)
    return hashlib.sha256(lines.encode()).hexdigest()
