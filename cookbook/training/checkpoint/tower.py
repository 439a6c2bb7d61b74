"""Weights and settings in a model's files beside the language part that is trained, written back as they were."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from cookbook.facts.language_part import language_config, language_key, whole_config
from cookbook.facts.score_head import backbone_name, backbone_of
from cookbook.training.checkpoint.tensors import Tensor, Weight, as_weight, files_of, room_for, write_tensors

TOWER = "tower.safetensors"
"""In `model/` of a run that trains all weights of a language part."""
PROCESSORS = "*processor*.json"
"""Files of a folder that prepare images and sound."""


class Tower(NamedTuple):
    """The part of a model that no run changes."""

    tensors: dict[str, Weight]
    """Weights by their names in the files; mapped into memory, in their own dtypes."""
    roots: dict[str, str]
    """First part of a name in the language part -> its counterpart in the files."""
    config: dict[str, Any]
    """The `config.json` of the whole model."""

    @classmethod
    def of(cls, folder: Path) -> "Tower | None":
        """The tower of a model's folder; None if the language model is all there is."""
        config = whole_config(folder)
        if config is None:
            return None
        with torch.device("meta"):
            text = language_config(config)
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)](text)
        own = {f"{backbone_name(model)}.{name}" for name, _ in backbone_of(model).named_children()} | {"lm_head"}
        tensors, roots = {}, {}
        for key, file in files_of(folder).items():
            name = language_key(key)
            if any(name.startswith(f"{part}.") for part in own):
                root = name.partition(".")[0]
                roots[root] = key.removesuffix(name.removeprefix(root))
            else:
                tensors[key] = _map_weights(file.path, key)
        return cls(tensors, roots, _values(folder))

    @classmethod
    def read_kept(cls, model_files: Path) -> "Tower | None":
        """The tower that `keep` has written."""
        path = model_files / TOWER
        if not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            roots = {root: of for root, of in file.metadata().items() if root != "format"}
            keys = list(file.keys())
        return cls({key: _map_weights(path, key) for key in keys}, roots, _values(model_files))

    def keep(self, model_files: Path) -> None:
        """Write it into a run's folder, which then needs the model's own no longer."""
        tensors = (
            Tensor(
                key, weight.shape, weight.own_dtype or torch.float32, weight.parts(weight.own_dtype or torch.float32)
            )
            for key, weight in self.tensors.items()
        )
        metadata = {"format": "pt", **self.roots}
        write_tensors(model_files / TOWER, tensors, room=room_for(self.tensors) + 4096, metadata=metadata)

    def key(self, name: str) -> str:
        """The name in the files of a tensor of the language part."""
        root, _, rest = name.partition(".")
        return f"{self.roots[root]}.{rest}"

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the whole model's `config.json`, as it was but for the language part's dtype."""
        named = str(dtype).removeprefix("torch.")
        values = copy.deepcopy(self.config)
        for part in (values, values["text_config"]):
            part |= {key: named for key in ("dtype", "torch_dtype") if key in part}
        if "torch_dtype" not in values:
            values["dtype"] = named
        (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_processors(folder: Path, target: Path) -> None:
    """Copy what prepares images and sound beside a model with a tower."""
    for path in sorted(folder.glob(PROCESSORS)):
        shutil.copyfile(path, target / path.name)


def _values(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _map_weights(path: Path, key: str) -> Weight:
    with safe_open(path, framework="pt") as file:
        return as_weight(file.get_tensor(key))
