"""Finds the model that a command is to use, and the run that it comes from. No torch."""

from pathlib import Path

from cookbook.system.files import RecipeError
from cookbook.training.checkpoint.listing import is_run

ADAPTER = "adapter_config.json"
"""Marks a model's folder as an adapter, as peft writes it."""


def find_model(folder: Path) -> Path:
    """The Hugging Face folder of a run, or `folder` itself if it is one.

    Raises:
        RecipeError: neither.
    """
    found = folder / "export" if (folder / "export").is_dir() else folder
    if any((found / name).is_file() for name in ("config.json", ADAPTER)):
        return found
    if any(folder.glob("checkpoints/step-*")):
        raise RecipeError(
            f"{folder}: the run is not finished; write its newest checkpoint first: cookbook export {folder}"
        )
    raise RecipeError(f"{found}: no model there; name a run's folder, for example outputs/quickstart")


def find_run(folder: Path) -> Path | None:
    """The run that `folder` is, or in which it lies."""
    return next((path for path in (folder, folder.resolve().parent) if is_run(path)), None)
