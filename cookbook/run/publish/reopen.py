"""Opens an export with plain transformers and peft, and compares it with the checkpoint. A process of its own:

    python -m cookbook.run.publish.reopen EXPORT MODEL CHECKPOINT DTYPE

Prints what was compared as JSON, or exits with 1 and the difference in the last line. Tensors are compared in parts,
from memory-mapped files. Models are opened one after the other, and only if they fit into memory.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoModelForMultimodalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.utils import logging

from cookbook.facts.language_part import has_tower, open_config, whole_config
from cookbook.facts.model_files import values_of
from cookbook.facts.score_head import auto_class, is_scored
from cookbook.facts.tokenizer_rules import PROBES, other_tokens, rules_of_file
from cookbook.system.console import say
from cookbook.system.files import RecipeError
from cookbook.system.masking import mask_streams
from cookbook.training.adapters.adapter_files import in_whole, module_roots
from cookbook.training.adapters.base_model import Base
from cookbook.training.adapters.peft_folder import name_in_file
from cookbook.training.checkpoint.folder import open_checkpoint
from cookbook.training.checkpoint.tensors import CHUNK, Reader, Weight
from cookbook.training.checkpoint.tower import Tower
from cookbook.training.checkpoint.write_model import BUFFERS
from cookbook.training.models.folder_facts import check_folder
from cookbook.training.models.language_model import open_language_model
from cookbook.training.models.model_source import HUB_FILES

LIMIT_GIB = 4.0
"""Largest model, in float32, that is opened: above it, opening it twice takes longer than a check should."""
TOLERANCE = 1e-5
"""Relative to the largest logit: both models compute in float32 with the same weights."""
OPEN: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True}


class ExportDifference(Exception):
    """A difference between export and checkpoint."""


class ExpectedWeights:
    """The checkpoint's weights in the exported dtype."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype) -> None:
        opened = open_checkpoint(checkpoint)
        self.reader, self.state, self.dtype = Reader(opened.pieces), opened.state(), dtype
        self.shapes: dict[str, list[int]] = self.state["parameters"]

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """The elements of a parameter, in order."""
        return self.reader.parts(name, "weight", math.prod(self.shapes[name]), self.dtype)

    def compare(self, name: str, tensor: torch.Tensor, key: str) -> None:
        """Raise the first difference of a tensor, reading the checkpoint in parts."""
        if list(tensor.shape) != self.shapes[name]:
            raise ExportDifference(f"{key} has the shape {list(tensor.shape)}, and {self.shapes[name]} was trained")
        if tensor.is_meta:  # the model was not opened; its files were compared
            return
        for part, expected in zip(tensor.detach().reshape(-1).split(CHUNK), self.parts(name), strict=True):
            if not torch.equal(part.float(), expected.float()):
                raise ExportDifference(f"{key} is not what the checkpoint holds")

    @torch.no_grad()
    def fill(self, model: torch.nn.Module) -> None:
        """Copy the checkpoint into the trained parameters of a model."""
        parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if different := sorted(parameters.keys() ^ self.shapes.keys()):
            raise ExportDifference(f"the model has other parameters than the checkpoint: {different}")
        for name, parameter in parameters.items():
            at = 0
            for part in self.parts(name):
                parameter.view(-1)[at : at + len(part)] = part.float()
                at += len(part)


def reopen(export: Path, model_files: Path, checkpoint: Path, dtype: torch.dtype) -> dict[str, str]:
    """Sentences on what was compared: `tensors` and `logits`.

    Raises:
        Wrong: the export differs from what was trained.
    """
    expected = ExpectedWeights(checkpoint, dtype)
    settings = expected.state["recipe"].get("adapter")
    config = open_config(model_files)
    tokenizer = AutoTokenizer.from_pretrained(export, trust_remote_code=False)
    if tokenizer.get_vocab() != AutoTokenizer.from_pretrained(model_files, trust_remote_code=False).get_vocab():
        raise ExportDifference("the tokenizer has another vocabulary")
    if tokenizer.is_fast and (text := other_tokens(tokenizer, rules_of_file(export), PROBES)) is not None:
        raise ExportDifference(f"transformers makes other tokens of {text!a} than tokenizer.json")
    if not is_scored(config):
        GenerationConfig.from_pretrained(export)
    too_large = _too_large(config)
    if settings is None:
        tensors, logits = _check_model(export, config, expected, too_large, model_files)
    else:
        tensors, logits = _check_adapter(export, config, expected, too_large, settings, model_files)
    return {"tensors": tensors, "logits": logits}


def _check_model(
    export: Path, config: PreTrainedConfig, expected: ExpectedWeights, too_large: str | None, model_files: Path
) -> tuple[str, str]:
    same = {name: name for name in expected.shapes}
    tower = Tower.read_kept(model_files)
    in_files = same if tower is None else {tower.key(name): name for name in same}
    names = _check_tensor_files(export, expected, in_files, strict=False)
    where = {"device_map": "meta"} if too_large else {}
    model, info = open_language_model(export, output_loading_info=True, **where, **OPEN)
    if tower is not None:
        info["unexpected_keys"] = {*info["unexpected_keys"]} - _check_tower(export, tower)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            keys = ", ".join(map(str, sorted(info[what])[:5]))
            raise ExportDifference(f"transformers finds {what.replace('_', ' ')}: {keys}")
    count = f"{len(same)} tensors equal to the checkpoint's"
    if too_large:
        if len(names) < len(same):
            count = f"{len(names)} of {count}; the others have other names in files"
        return count, f"logits not compared: {too_large}"
    _compare_all(dict(model.named_parameters()), same, expected)
    logits = _sample_logits(model)
    del model
    reference = auto_class(config).from_config(config, dtype=torch.float32)
    expected.fill(reference)
    if (model_files / BUFFERS).is_file():
        reference.load_state_dict(load_file(model_files / BUFFERS), strict=False)
    return count, _compare_logits(logits, _sample_logits(reference))


def _check_tower(export: Path, tower: Tower) -> set[str]:
    """Compare what was not trained; returns its keys. The folder must be one of transformers' class for the whole."""
    check_folder(export, open_config(export), place=str(export))
    written = Tower.of(export)
    assert written is not None
    for key, weight in tower.tensors.items():
        dtype = weight.own_dtype or torch.float32
        if key not in written.tensors or written.tensors[key].own_dtype != dtype:
            raise ExportDifference(f"{key}, which was not trained, is missing or of another dtype")
        if not torch.equal(_bytes(written.tensors[key], dtype), _bytes(weight, dtype)):
            raise ExportDifference(f"{key}, which was not trained, has changed")
    return {*tower.tensors}


def _bytes(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    return weight.read(dtype).reshape(-1).view(torch.uint8)


def _check_adapter(
    export: Path,
    config: PreTrainedConfig,
    expected: ExpectedWeights,
    too_large: str | None,
    settings: dict[str, Any],
    model_files: Path,
) -> tuple[str, str]:
    from peft import PeftModel  # for adapters only: importing it takes seconds

    from cookbook.config.sections import AdapterSection
    from cookbook.training.adapters import insertion

    whole_of = whole_config(model_files)
    roots = {} if whole_of is None else module_roots(whole_of)
    names = {in_whole(name_in_file(name), roots): name for name in expected.shapes}
    in_files = {f"base_model.model.{key}": name for key, name in names.items()}
    checked = _check_tensor_files(export, expected, in_files, strict=True)
    base, problem = (None, too_large) if too_large else _base_folder(export)
    tokens = len(AutoTokenizer.from_pretrained(export, trust_remote_code=False))
    model_in_memory = _open_base(base, config if whole_of is None else whole_of, tokens)
    model = PeftModel.from_pretrained(model_in_memory, str(export), low_cpu_mem_usage=base is None)
    opened = {
        name_in_file(name.removeprefix("base_model.model.")): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name or ".modules_to_save." in name or ".trainable_tokens_delta." in name
    }
    _compare_all(opened, names, expected)
    count = f"{len(checked)} tensors equal to the checkpoint's"
    if base is None:
        return count, f"logits not compared: {problem}"
    logits = _sample_logits(model)
    del model, model_in_memory, opened
    reference = _open_base(base, config, tokens)
    rows = Base.read(model_files).new_rows
    insertion.add_adapter(reference, AdapterSection.model_validate(settings), seed=0, new_rows=rows)
    expected.fill(reference)
    return count, _compare_logits(logits, _sample_logits(reference))


def _base_folder(export: Path) -> tuple[Path | None, str]:
    """The folder on this machine of the base model that peft reads of an adapter's settings, or why there is none."""
    from huggingface_hub import snapshot_download

    settings = values_of(export / "adapter_config.json")
    name = settings["base_model_name_or_path"]
    path = Path(name)
    if not path.is_dir():
        local: dict[str, Any] = {"allow_patterns": HUB_FILES, "local_files_only": True}
        try:
            path = Path(snapshot_download(name, revision=settings["revision"], **local))
        except (OSError, ValueError):
            return None, f"the base model {name} is not on this machine"
    return path, ""


def _open_base(folder: Path | None, config: PreTrainedConfig, tokens: int) -> Any:
    """The model of this configuration, with rows for so many tokens: the whole one with its tower, or its language
    part."""
    kind: Any = AutoModelForMultimodalLM if has_tower(config) else auto_class(config)
    if folder is None:
        with torch.device("meta"):
            return kind.from_config(config)
    if has_tower(config):
        model = kind.from_pretrained(folder, trust_remote_code=False, use_safetensors=True, **OPEN)
    else:
        model = open_language_model(folder, **OPEN, **({"config": config} if is_scored(config) else {}))
    if model.config.get_text_config().vocab_size < min(tokens, config.get_text_config().vocab_size):
        model.resize_token_embeddings(tokens, mean_resizing=False)  # as whoever uses the adapter does
    return model


def _check_tensor_files(export: Path, expected: ExpectedWeights, names: dict[str, str], *, strict: bool) -> list[str]:
    """Compare every tensor in the files; returns the keys that the checkpoint has.

    Args:
        names: from keys in the files to names in the checkpoint.
        strict: refuse other keys. transformers stores some models under other names than they have in memory.
    """
    keys = []
    for path in sorted(export.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(key)  # memory-mapped
                if not tensor.numel():
                    raise ExportDifference(f"{key} is empty")
                if not all(part.isfinite().all() for part in tensor.reshape(-1).split(CHUNK)):
                    raise ExportDifference(f"{key} has values that are not finite")
                if key in names:
                    if tensor.dtype != expected.dtype:
                        raise ExportDifference(f"{key} is {tensor.dtype}, and {expected.dtype} was asked for")
                    expected.compare(names[key], tensor, key)
                keys.append(key)
    if not keys:
        raise ExportDifference("there are no weights in it")
    ours = [key for key in keys if key in names]
    if strict and (len(ours) < len(keys) or len(ours) < len(names)):
        raise ExportDifference(f"its tensors are not those that were trained: {sorted(set(keys) ^ names.keys())[:5]}")
    return ours


def _compare_all(opened: dict[str, torch.nn.Parameter], names: dict[str, str], expected: ExpectedWeights) -> None:
    """Compare the parameters of an opened model with the checkpoint."""
    if opened.keys() != names.keys():
        raise ExportDifference(
            f"opened, it has other parameters than were trained: {sorted(opened.keys() ^ names.keys())[:5]}"
        )
    for key, parameter in opened.items():
        expected.compare(names[key], parameter, key)


def _too_large(config: PreTrainedConfig) -> str | None:
    """Why the model is not opened on this machine, or None."""
    with torch.device("meta"):
        size = 4 * sum(p.numel() for p in auto_class(config).from_config(config).parameters()) / 2**30
    room = psutil.virtual_memory().available / 2**30
    if size > LIMIT_GIB:
        return f"{size:.1f} GiB of weights in float32 are more than {LIMIT_GIB:g}"
    return f"{size:.1f} GiB of weights, and {room:.1f} GiB of memory are free" if 2 * size > room else None


@torch.no_grad()
def _sample_logits(model: Any) -> torch.Tensor:
    """Logits (2, 16, V) on tokens drawn from a seed, and the last one, which may be new."""
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(rows, (2, 16), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = rows - 1
    return model.eval()(input_ids=ids).logits.float()


def _compare_logits(logits: torch.Tensor, reference: torch.Tensor) -> str:
    error = (logits - reference).abs().max().item() / max(1.0, reference.abs().max().item())
    if not error <= TOLERANCE:
        raise ExportDifference(f"its logits are {error:.1e} from those of the checkpoint")
    return f"logits equal to those of the checkpoint within {error:.0e}"


def main() -> int:
    mask_streams()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    export, model_files, checkpoint, dtype = sys.argv[1:]
    try:
        record = reopen(Path(export), Path(model_files), Path(checkpoint), getattr(torch, dtype))
    except (ExportDifference, RecipeError) as error:
        say(error, file=sys.stderr)
        return 1
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
