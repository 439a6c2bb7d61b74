"""Names in the files of a peft folder. No peft."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cookbook.facts.language_part import language_key
from cookbook.system.files import RecipeError
from cookbook.system.tensor_files import BadHeader, read_header

ADAPTER_NAME = "default"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def shapes_in(folder: Path, place: str) -> dict[str, list[int]]:
    """The shape of each tensor of a peft folder's weights, all of which are read.

    Args:
        place: where the folder is named, for messages.

    Raises:
        RecipeError: they are not there, or damaged, or hold what no adapter has: whole numbers, NaN, infinity.
    """
    path = folder / ADAPTER_WEIGHTS
    try:
        tensors, _ = read_header(path)
        with safe_open(path, framework="pt") as file:
            odd = [name for name, entry in sorted(tensors.items()) if not _is_weight(file, name, entry["dtype"])]
    except FileNotFoundError:
        advice = "name a peft folder, as the export of a run"
        if others := sorted(file.name for file in folder.glob(f"{path.stem}.*")):
            advice = f"{others[0]} is not read; open the adapter with peft, whose save_pretrained writes the other"
        raise RecipeError(f"{place}: no {ADAPTER_WEIGHTS} in it; {advice}") from None
    except OSError as error:
        raise RecipeError(f"{place}: {ADAPTER_WEIGHTS} cannot be read ({error.strerror}); fetch it again") from None
    except BadHeader as error:
        raise RecipeError(f"{place}: {ADAPTER_WEIGHTS} {error}; fetch it again") from None
    if odd:
        what = f"values in {odd[0]} ({tensors[odd[0]]['dtype']}) that are no finite fractions"
        raise RecipeError(f"{place}: {ADAPTER_WEIGHTS} has {what}; fetch it again, or take an earlier one")
    return {name: entry["shape"] for name, entry in tensors.items()}


def _is_weight(file: Any, name: str, dtype: str) -> bool:
    return dtype in ("F64", "F32", "F16", "BF16") and bool(torch.isfinite(file.get_tensor(name)).all())


@contextlib.contextmanager
def in_language_names(folder: Path) -> Iterator[Path]:
    """A peft folder with the names of a language part: a temporary one if the folder has those of a whole model, else
    the folder itself."""
    path, prefix = folder / ADAPTER_WEIGHTS, "base_model.model."
    with safe_open(path, framework="pt") as file:
        names = {key: key for key in sorted(file.keys())}
    names |= {key: prefix + language_key(key.removeprefix(prefix)) for key in names if key.startswith(prefix)}
    if all(key == name for key, name in names.items()):
        yield folder
        return
    saved = load_file(path)
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    parents = tuple(f".{name.rpartition('.')[0]}" for name in settings.get("target_parameters") or ())
    adapted = (name.removeprefix(prefix).partition(".lora_") for name in names.values())
    modules = {module.removesuffix(".base_layer") for module, separator, _ in adapted if separator}
    settings["target_modules"] = sorted(name for name in modules if not name.endswith(parents))
    rows = settings.get("trainable_token_indices") or {}
    settings["trainable_token_indices"] = {language_key(name): ids for name, ids in rows.items()} or None
    with tempfile.TemporaryDirectory(prefix="adapter.") as made:
        save_file({name: saved[key] for key, name in names.items()}, Path(made) / path.name)
        (Path(made) / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        yield Path(made)


def name_in_file(name: str) -> str:
    """peft's name in its file for a tensor of the model (peft/utils/save_and_load.py, get_peft_model_state_dict)."""
    name = name.replace(f".{ADAPTER_NAME}", "").replace(".modules_to_save", "")
    return name.removesuffix(".weight") if "lora_magnitude_vector" in name else name
