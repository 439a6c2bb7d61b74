"""Imports the files in a recipe's `plugins`, which add objectives, optimizers, schedules and kinds of rows. No torch.

A plugin is Python code and runs with the user's rights. Only the recipe itself can name one: never a checkpoint, a
model, a data set or the environment.
"""

import ast
import hashlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from cookbook.system import registry
from cookbook.system.files import refuse
from cookbook.system.shipped import PACKAGE
from cookbook.system.signals import no_exit

_imported: dict[str, tuple[str, list[Any]]] = {}
"""SHA-256 of the imported content by file, and the entries it registered."""
_own_modules: dict[str, dict[str, str]] = {}
"""Files of the user's own modules that a file imports, with their SHA-256, in the order of their names."""


def use(files: Iterable[str]) -> None:
    """Registers the entries of these files and unregisters those of other plugins; imports each version once.

    Raises:
        RecipeError: a file cannot be read or imported, registers nothing, or uses a name that is taken.
    """
    for other in registry.plugin_files():
        registry.take_plugin(other)
    refuse([mistake for file in files for mistake in _use(file)])


def digest(files: Iterable[str]) -> str:
    """SHA-256 over the imported plugins in their order, each with its own modules, independent of their paths."""
    return hashlib.sha256(" ".join(entry["sha256"] for entry in record(files)).encode()).hexdigest()


def record(files: Iterable[str]) -> list[dict[str, str]]:
    """Each file with its SHA-256, and behind it the user's own modules that it imports, for run.json."""
    return [
        {"file": name, "sha256": sha256}
        for file in files
        for name, sha256 in ((file, _imported[file][0]), *_own_modules[file].items())
    ]


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
    own: dict[str, Path] = {}
    _add_own_modules(content, "", own)
    _own_modules[file] = {str(own[name]): hashlib.sha256(own[name].read_bytes()).hexdigest() for name in sorted(own)}


def _add_own_modules(content: bytes, package: str, own: dict[str, Path]) -> None:
    """Add the modules that code imports, and those that these import, unless they are installed.

    Args:
        package: where its relative imports start.
    """
    for name in _imported_names(content, package):
        parent = name.rpartition(".")[0]
        if name in own or (parent and parent not in own):
            continue
        if (spec := _spec_of(name)) is not None and spec.origin is not None and _is_own(Path(spec.origin)):
            own[name] = Path(spec.origin)
            _add_own_modules(own[name].read_bytes(), spec.parent or "", own)


def _imported_names(content: bytes, package: str) -> Iterator[str]:
    """Yield the names of modules that code may import, each behind the packages around it."""
    for node in ast.walk(ast.parse(content)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            start = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = [start, *(f"{start}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _spec_of(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # no package, or a module without a spec
        return None


def _is_own(path: Path) -> bool:
    """Return whether a module's file is the user's: no library that is installed, whose versions are recorded apart."""
    folders = (PACKAGE, Path(sysconfig.get_path("stdlib")))
    is_installed = any(path.resolve().is_relative_to(folder) for folder in folders)
    is_file = path.suffix == ".py" and path.is_file()
    return is_file and not is_installed and not {"site-packages", "dist-packages"} & {*path.parts}
