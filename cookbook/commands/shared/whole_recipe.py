"""A recipe with a base, written out as a single file."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cookbook.config.recipe import LOCAL, RECIPES, read_located, read_recipe
from cookbook.system.files import RecipeError, dump_yaml
from cookbook.system.shipped import is_short, own_folder, path_from_here


def whole_text(path: Path, out: Path) -> str:
    """The text of a recipe in the file `out` with all values of the recipe in `path` and of its base, under the comment
    at the top of the first. Relative paths lead from there to the same files.

    Raises:
        RecipeError: a file that cannot be read, or a recipe without a base.
    """
    written = read_recipe(path)
    if not written.inherited:
        raise RecipeError(f"{path}: has no base, and is a single file already; copy it as any other")
    draft = read_located(path)
    values, folder = draft.values, own_folder(out)
    if isinstance(named := written.values.get("strategy"), str) and is_short(named):
        values["strategy"] = named
    elif isinstance(named, str):
        values["strategy"] = _from(folder, values["strategy"])
    for section, key in LOCAL:
        if isinstance(values.get(section), dict) and key in values[section]:
            values[section][key] = _move(values[section][key], folder)
    if isinstance(plugins := values.get("plugins"), list):
        start = draft.file_of("plugins").parent
        values["plugins"] = [os.path.relpath(start / name, out.parent) for name in plugins]
    schema = os.path.relpath(path_from_here(str(RECIPES / "schema.json")), out.parent)
    head = [f"# yaml-language-server: $schema={schema}", *_comment(path, out)]
    return "\n".join([*head, dump_yaml(values)])


def _comment(path: Path, out: Path) -> Iterator[str]:
    """The lines of the comment at the top of a recipe, with the command that runs the other file."""
    for line in path.read_text(encoding="utf-8-sig").splitlines():
        if not line.startswith("#"):
            return
        if "yaml-language-server" not in line:
            yield line.replace(str(path), str(out)) if re.match(r"#\s*Run:", line) else line


def _move(value: Any, folder: Path) -> Any:
    """A source, or several, whose paths lead from another folder to the same files."""
    if isinstance(value, str):
        return _from(folder, value)
    if isinstance(value, dict):
        return {key: _move(inner, folder) if _leads(key, value) else inner for key, inner in value.items()}
    return [_move(inner, folder) for inner in value] if isinstance(value, list) else value


def _leads(key: str, source: dict[str, Any]) -> bool:
    return key == "path" or "path" not in source


def _from(folder: Path, name: str) -> str:
    """A path that leads from a folder to what is reached from the current one, if something is there."""
    path = Path(name)
    if path.is_absolute() or not path.exists() or folder == Path.cwd():
        return name
    return os.path.relpath(path, folder)
