"""A model with a head that scores sequences: a folder with links to the files of the language model, built once per
machine and then loaded like any other. Every strategy so meets the same first weights.
"""

import hashlib
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from cookbook.facts.language_part import open_config
from cookbook.facts.score_head import HEAD, ScoreHead, is_scored, why_no_score, with_head
from cookbook.system import lock
from cookbook.system.files import RecipeError, make_folder
from cookbook.training.models.folder_facts import read_headers

FORMAT = 1
KEY = f"{HEAD}.weight"


def scored_folder(base: str, head: ScoreHead, *, seed: int, cache: Path) -> str:
    """The folder of the model in `base` with a head for sequences, built into the cache; without its tokenizer. Its
    weight files are links. The head of a folder that has one is kept; else it is drawn as transformers does, from the
    seed.

    Raises:
        RecipeError: a model that cannot have a head for sequences, or that has another one.
    """
    config = open_config(base)
    if problem := why_no_score(config) or _another_head(config, head):
        raise RecipeError(f"model.name_or_path is {base!r}: {problem}")
    files = [path for path in sorted(Path(base).iterdir()) if path.is_file()]
    signs = [(path.name, str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps([FORMAT, signs, asdict(head), seed]).encode()).hexdigest()[:16]
    built = cache / f"model-{key}"
    make_folder(cache)
    with lock.making(cache / f"model-{key}.lock"):
        if not built.is_dir():
            with tempfile.TemporaryDirectory(prefix=f"model-{key}.", dir=cache) as build:
                _build(Path(base), config, head, seed, Path(build))
                Path(build).rename(built)
    return str(built)


def _another_head(config: PreTrainedConfig, head: ScoreHead) -> str | None:
    """Why the head for sequences that a model has cannot be trained further as the objective's, or None."""
    if not is_scored(config):
        return None
    if config.num_labels != head.num_labels:
        return f"its head has {config.num_labels} numbers for a sequence, and the objective needs {head.num_labels}"
    names = [config.id2label[i] for i in range(config.num_labels)]
    are_named = names != [f"LABEL_{i}" for i in range(config.num_labels)]  # as transformers names them by itself
    if head.classes and are_named and names != list(head.classes):
        return f"the classes of its head are {', '.join(names)[:200]}; write them so in objective.classes"
    return None


def _build(base: Path, config: PreTrainedConfig, head: ScoreHead, seed: int, build: Path) -> None:
    stored, mistakes = read_headers(base)
    assert not mistakes, "the folder was checked"
    paths = sorted({tensor.path for tensor in stored.values()})
    # A name of no whole model: transformers would read that file alone.
    names = {path: f"model-{i:05}-of-{len(paths) + 1:05}.safetensors" for i, path in enumerate(paths, start=1)}
    for path, name in names.items():
        (build / name).symlink_to(path.resolve())
    places = {key: names[tensor.path] for key, tensor in stored.items()}
    if not is_scored(config):
        name = f"model-{len(paths) + 1:05}-of-{len(paths) + 1:05}.safetensors"
        save_file({KEY: first_weights(config, head, seed)}, build / name, metadata={"format": "pt"})
        places[KEY] = name
    index = {"metadata": {}, "weight_map": places}
    (build / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    with_head(config, head).save_pretrained(build)


def first_weights(config: PreTrainedConfig, head: ScoreHead, seed: int) -> torch.Tensor:
    """First weights of a head for sequences, float32 (num_labels, hidden size): normal, of the deviation that a
    configuration has for its linear layers (transformers 5.23, modeling_utils.py, `_init_weights`)."""
    deviation = getattr(config, "initializer_range", None) or 0.02
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(head.num_labels, config.hidden_size, generator=chance) * deviation
