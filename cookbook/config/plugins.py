"""Imports the files in a recipe's `plugins`, which add objectives, optimizers, schedules and kinds of rows. No torch.

A plugin is Python code and runs with the user's rights. Only the recipe itself can name one: never a checkpoint, a
model, a data set or the environment.
"""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from cookbook.system import registry
from cookbook.system.files import refuse
from cookbook.system.signals import no_exit

_imported: dict[str, tuple[str, list[Any]]] = {}
"""By file: the SHA-256 of the imported content, and the entries it registered."""


def use(files: Iterable[str]) -> None:
    """Registers the entries of these files and unregisters those of other plugins; imports each version once.

    Raises:
        RecipeError: a file cannot be read or imported, registers nothing, or uses a name that is taken.
    """
    for other in registry.plugin_files():
        registry.take_plugin(other)
    refuse([mistake for file in files for mistake in _use(file)])


def digest(files: Iterable[str]) -> str:
    """SHA-256 over the imported plugins in their order, independent of their paths."""
    return hashlib.sha256(" ".join(_imported[file][0] for file in files).encode()).hexdigest()


def record(files: Iterable[str]) -> list[dict[str, str]]:
    """Each file with its SHA-256, for run.json."""
    return [{"file": file, "sha256": _imported[file][0]} for file in files]


def _use(file: str) -> list[str]:
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        return [f"{file}: cannot be read ({error.strerror})"]
    registry.begin_plugin(file)
    try:
        sha256 = hashlib.sha256(content).hexdigest()
        if file not in _imported or _imported[file][0] != sha256:
            with no_exit():
                _import(file, content, sha256)
        else:
            for entry in _imported[file][1]:
                registry.register(entry)
    except Exception as error:
        registry.take_plugin(file)
        if isinstance(error.__cause__, SystemExit):
            return [str(error)]
        return [f"{place_of(error, file)}: cannot be imported: {type(error).__name__}: {error}"]
    finally:
        registry.begin_plugin(None)
    return [] if _imported[file][1] else [f"{file}: registers nothing; see docs/recipes.md, Plugins"]


def place_of(error: BaseException, file: str) -> str:
    """The file of a plugin, with the last of its lines that the error came by."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = lines[-1] if lines else getattr(error, "lineno", None)
    return f"{file}:{line}" if line else file


class _BytesLoader(SourceFileLoader):
    """Executes exactly the bytes whose digest is recorded, bypassing Python's cache of compiled files."""

    def __init__(self, name: str, file: str, content: bytes) -> None:
        super().__init__(name, file)
        self.content = content

    def path_stats(self, path: Any) -> Any:
        raise OSError

    def get_data(self, path: Any) -> bytes:
        return self.content


def _import(file: str, content: bytes, sha256: str) -> None:
    name = f"cookbook_plugin_{sha256[:16]}"
    loader = _BytesLoader(name, file, content)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks annotations up there
    loader.exec_module(module)
    _imported[file] = sha256, registry.entries_of(file)
