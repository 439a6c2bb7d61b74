"""`merge`: a trained adapter and its base model as one model."""

import shutil
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from cookbook.commands.shared.arguments import run_folder
from cookbook.system.console import say
from cookbook.system.files import RecipeError
from cookbook.system.imports import quiet_deepspeed


def merge(
    folder: Annotated[Path, run_folder()],
    *,
    dtype: Annotated[Literal["bfloat16", "float16", "float32"] | None, Option(help="default: the base model's")] = None,
) -> int:
    """Write a trained adapter and its base model as one model."""
    quiet_deepspeed()
    return merge_run(folder, dtype)


def merge_run(run: Path, dtype: str | None) -> int:
    """Write `merged/` beside the run's `export/`, and reopen it. Returns the exit code.

    Raises:
        RecipeError: no adapter there, or its base model is not the one that it was trained on.
    """
    import torch

    from cookbook.run.publish.merged import write_merged
    from cookbook.training.adapters.base_model import BASE_RECORD, Base
    from cookbook.training.checkpoint.write_model import building

    folder, target = run / "export", run / "merged"
    if not (folder / BASE_RECORD).is_file():
        raise RecipeError(f"{folder}: no adapter there; name the run.output_dir of a finished run with an adapter")
    with building(target) as build:
        checked = write_merged(folder, build, getattr(torch, dtype) if dtype else None)
        for name in ("README.md", "export.json"):  # of an adapter that `cookbook.run.publish` wrote
            if (folder / name).is_file():
                shutil.copyfile(folder / name, build / name)
    say(f"{target}: {Base.read(folder).name_or_path} with the adapter in it, {checked}")
    return 0
