"""A model with rows for new tokens: a copy of its folder, built once per machine and then loaded like any other. Every
strategy so meets the same model.
"""

import copy
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from cookbook.facts.language_part import has_tower, language_key, whole_config, with_rows
from cookbook.facts.model_files import read_config
from cookbook.system import lock
from cookbook.system.files import RecipeError, make_folder
from cookbook.training.models.folder_facts import ROWS_AT_ONCE, read_headers, renamed_keys
from cookbook.training.models.new_tokens import ROWS_MULTIPLE, grown_rows

FORMAT = 1
COPY_BYTES = 2**24


class Growth(NamedTuple):
    """Change of a matrix that has a row for each token."""

    rows: int
    grown: int
    """Rows afterwards."""
    new: frozenset[int]
    """Rows that start at the mean."""
    known: frozenset[int]
    """Rows of which the mean is taken."""


def grown_folder(base: str, tokenizer: PreTrainedTokenizerBase, new: Mapping[str, int], *, cache: Path) -> str:
    """The folder of the model in `base` with rows for new tokens, built into the cache; without its tokenizer. Files
    that stay as they are are links.

    The rows of the new tokens, and those after them up to `ROWS_MULTIPLE`, are the mean of the rows of the tokens that
    the tokenizer had (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"), in float64 and
    rounded once. transformers would draw them around it (modeling_utils.py, _init_added_embeddings_weights_with_mean),
    in each process for itself.

    Args:
        tokenizer: with the new tokens.
        new: the new tokens and their ids.

    Raises:
        RecipeError: a model that has more than embedding and head by the vocabulary.
    """
    known = frozenset(tokenizer.get_vocab().values()) - {*new.values()}
    files = [path for path in sorted(Path(base).iterdir()) if path.is_file()]
    signs = [(path.name, str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    description = json.dumps([FORMAT, signs, sorted(new.values()), sorted(known)])
    key = hashlib.sha256(description.encode()).hexdigest()[:16]
    built = cache / f"model-{key}"
    make_folder(cache)
    with lock.making(cache / f"model-{key}.lock"):
        if not built.is_dir():
            with tempfile.TemporaryDirectory(prefix=f"model-{key}.", dir=cache) as build:
                config = read_config(base)
                rows = config.get_text_config().vocab_size
                grown = grown_rows(rows, tokenizer)
                growth = Growth(rows, grown, frozenset({*new.values(), *range(rows, grown)}), known)
                _build(Path(base), config, growth, Path(build))
                Path(build).rename(built)
    return str(built)


def first_rows(folder: str, config: PreTrainedConfig, row: int) -> dict[str, torch.Tensor]:
    """A row of each matrix with a row for each token, by the names in the model, as the folder's files have it."""
    stored, _ = read_headers(Path(folder))
    model, names = _matrices(config)
    own = {language_key(key): key for key in stored} if whole_config(folder) else {key: key for key in stored}
    rows = {}
    for own_name, name in renamed_keys(model, own).items():
        if name in names:
            key = own[own_name]
            with safe_open(stored[key].path, framework="pt") as file:
                rows[name] = file.get_slice(key)[row]
    return rows


def _build(base: Path, config: PreTrainedConfig, growth: Growth, build: Path) -> None:
    stored, _ = read_headers(base)
    model, names = _matrices(config)
    keys = {key for key, name in renamed_keys(model, stored).items() if name in names}
    for path in {tensor.path for tensor in stored.values()}:
        if any(stored[key].path == path for key in keys):
            _rewrite(path, build / path.name, keys, growth)
        else:
            (build / path.name).symlink_to(path.resolve())
    for name in (SAFE_WEIGHTS_INDEX_NAME, GENERATION_CONFIG_NAME):
        if (base / name).is_file():
            shutil.copyfile(base / name, build / name)
    if not has_tower(config):
        _empty_model(config, growth.grown).config.save_pretrained(build)
        return
    values = json.loads((base / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(with_rows(values, growth.grown), indent=2)
    (build / "config.json").write_text(text + "\n", encoding="utf-8")


def _empty_model(config: PreTrainedConfig, rows: int) -> PreTrainedModel:
    own = copy.deepcopy(config)
    own.get_text_config().vocab_size = rows
    kinds = MODEL_FOR_MULTIMODAL_LM_MAPPING if has_tower(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    with torch.device("meta"):
        return kinds[type(config)](own)


def _matrices(config: PreTrainedConfig) -> tuple[PreTrainedModel, set[str]]:
    """The model of a configuration, without values, and the names of its parameters with a row for each token:
    embedding, and weight and bias of the head.

    Raises:
        RecipeError: others change with the vocabulary too, as tables of tokens do, or an embedding with a row more.
    """
    rows = config.get_text_config().vocab_size
    model, larger = _empty_model(config, rows), _empty_model(config, rows + ROWS_MULTIPLE)
    ends = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    own = {id(parameter) for module in ends for parameter in module.parameters(recurse=False)}
    named, others = model.state_dict(keep_vars=True), larger.state_dict(keep_vars=True)
    names = {name for name, tensor in named.items() if id(tensor) in own and len(tensor) == rows}
    differ = {name for name in named if named[name].shape != others[name].shape} - names
    if differ:
        what = f"{sorted(differ)[0]} of {model.config.model_type} has a size by the vocabulary too"
        raise RecipeError(f"model.new_tokens: {what}, which is not served; take the key out")
    return model, names


def _rewrite(source: Path, target: Path, keys: set[str], growth: Growth) -> None:
    """Write a safetensors file again with other rows in the tensors of `keys`, a part at a time."""
    with source.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", None)
        changed: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        offset, pieces = 0, []
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            size = end - begin
            if key in keys:
                size = size // growth.rows * growth.grown
                entry = entry | {"shape": [growth.grown, *entry["shape"][1:]]}
            changed[key] = entry | {"data_offsets": [offset, offset + size]}
            offset += size
            pieces.append((key, 8 + length + begin, end - begin))
        text = json.dumps(changed, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data of a file begin at a multiple of 8 bytes
        with target.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for key, begin, size in pieces:
                if key in keys:
                    for part in _grown_parts(source, key, growth):
                        out.write(part.contiguous().view(torch.uint8).numpy().data)
                    continue
                file.seek(begin)
                while size:
                    size -= out.write(file.read(min(size, COPY_BYTES)))


def _grown_parts(source: Path, key: str, growth: Growth) -> Iterator[torch.Tensor]:
    """The rows of a grown tensor, in order, some at a time."""
    with safe_open(source, framework="pt") as file:
        old = file.get_slice(key)
        spans = [range(begin, min(begin + ROWS_AT_ONCE, growth.rows)) for begin in range(0, growth.rows, ROWS_AT_ONCE)]
        total, count = torch.zeros((), dtype=torch.float64), 0
        for span in spans:
            of_tokens = [row - span.start for row in span if row in growth.known]
            total = total + old[span.start : span.stop][of_tokens].double().sum(0)
            count += len(of_tokens)
        mean = total / count
        for span in spans:
            part = old[span.start : span.stop]
            new = [row - span.start for row in span if row in growth.new]
            part[new] = mean.to(part.dtype)
            yield part
        if growth.grown > growth.rows:
            yield mean.to(part.dtype).expand(growth.grown - growth.rows, *part.shape[1:])
