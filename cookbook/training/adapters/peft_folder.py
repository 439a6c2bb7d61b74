"""Names in the files of a peft folder. No peft."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cookbook.planning.language_part import language_key

ADAPTER_NAME = "default"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@contextlib.contextmanager
def in_language_names(folder: Path) -> Iterator[Path]:
    """A peft folder as one of a language part, if it is one of the whole model, else the folder itself."""
    path, prefix = folder / ADAPTER_WEIGHTS, "base_model.model."
    with safe_open(path, framework="pt") as file:
        names = {key: prefix + language_key(key.removeprefix(prefix)) for key in sorted(file.keys())}
    if all(key == name for key, name in names.items()):
        yield folder
        return
    saved = load_file(path)
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    parents = tuple(f".{name.rpartition('.')[0]}" for name in settings.get("target_parameters") or ())
    adapted = (name.removeprefix(prefix).partition(".lora_") for name in names.values())
    modules = {module.removesuffix(".base_layer") for module, found, _ in adapted if found}
    settings["target_modules"] = sorted(name for name in modules if not name.endswith(parents))
    rows = settings.get("trainable_token_indices") or {}
    settings["trainable_token_indices"] = {language_key(name): of for name, of in rows.items()} or None
    with tempfile.TemporaryDirectory(prefix="adapter.") as made:
        save_file({name: saved[key] for key, name in names.items()}, Path(made) / path.name)
        (Path(made) / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        yield Path(made)


def name_in_file(name: str) -> str:
    """peft's name in its file for a tensor of the model (peft/utils/save_and_load.py)."""
    name = name.replace(f".{ADAPTER_NAME}", "").replace(".modules_to_save", "")
    return name.removesuffix(".weight") if "lora_magnitude_vector" in name else name
