"""Paths in a recipe: those into its own output folder, which a start that does not resume sets aside, and those of
what was written since a run began.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cookbook.config.recipe import Recipe
from cookbook.system.files import path_problem
from cookbook.system.record_files import ROUNDS


def reads_own_folder(recipe: Recipe) -> list[str]:
    """Mistakes of keys whose path leads into the folder of an earlier run that a start would rename.

    The export of the run before, say: its folder would be gone when the model is read.
    """
    folder, resume = Path(recipe.run.output_dir), recipe.run.resume
    has_begun = any(folder.glob("checkpoints/step-*")) or (folder / ROUNDS).is_file()
    goes_on = has_begun and (resume == "auto" or (resume != "never" and _is_in(resume, folder)))
    if goes_on or not folder.is_dir():
        return []
    free = f"name another run.output_dir, as {folder}-2"
    return [
        f"{key} is {text!r}, in run.output_dir {str(folder)!r}, which this start sets aside; {free}"
        for key, text in _texts("", recipe.model_dump(mode="json", exclude_none=True))
        if key not in ("run.output_dir", "run.resume") and _is_in(text, folder)
    ]


def paths_changed_since(recipe: Recipe, record: Path) -> list[str]:
    """Paths in a recipe at which a file was written later than the record that a run writes when it starts; of a folder
    its own files count. A path that cannot be looked at is left out.
    """
    begun, folder = record.stat().st_mtime, Path(recipe.run.output_dir)
    changed: dict[str, None] = {}
    for _, text in _texts("", recipe.model_dump(mode="json", exclude_none=True)):
        with contextlib.suppress(OSError):
            if path_problem(text) is None and (path := Path(text)).exists() and not _is_in(text, folder):
                files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]
                if any(each.stat().st_mtime > begun for each in files):
                    changed[text] = None
    return list(changed)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Each text in a recipe's values, by its key; a key of a list is that of the list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(f"{key}.{name}".strip("."), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(key, inner)
    elif isinstance(value, str):
        yield key, value


def _is_in(text: str, folder: Path) -> bool:
    return path_problem(text) is None and Path(text).resolve().is_relative_to(folder.resolve())
