"""Packages that transformers computes with wherever they are installed: a run sees those that its recipe names.

transformers looks for fla, causal_conv1d, mamba_ssm, flash_attn, kernels and others by name, and takes their
functions in the place of its own. A curve would depend on what a machine has, and nothing would tell.
"""

import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from cookbook.system.files import RecipeError
from cookbook.system.shipped import requirements

KEY = "model.kernels"
LIBRARY = "transformers"
IMPORT, LOOK_UP = "importlib", "importlib.util"
"""Modules of import_module and find_spec. A statement `import` of transformers is for what it requires, or follows a
find_spec."""

_named: set[str] = set()
_unused: set[str] = set()


class _Finder:
    """A finder of `sys.meta_path` that does not find optional packages for transformers."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = self.finder.find_spec(name, path, target)
        if spec is None or path is not None or name in _named:
            return spec
        way = _way_of_library()
        if way is None or name in _required_names() or _is_demanded(name):
            return spec
        if way == IMPORT:  # for functions that it would take
            _unused.add(name)
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def hide() -> None:
    """Hide optional packages from transformers in this process, from here on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # Those that are classes find what Python itself has, and the last one of these all that is installed.
        sys.meta_path[:] = [
            _Finder(finder) if finder is PathFinder or not isinstance(finder, type) else finder
            for finder in sys.meta_path
        ]


def use(names: Iterable[str]) -> None:
    """Let transformers find these packages. Call it before transformers is imported.

    Raises:
        RecipeError: one of them is not installed.
    """
    _named.clear()
    _named.update(names)
    if missing := [name for name in sorted(_named) if PathFinder.find_spec(name) is None]:
        raise RecipeError(f"{KEY} has {', '.join(missing)}, not installed here; install it, or remove it from the list")


def is_used() -> bool:
    """Return whether the recipe names packages."""
    return bool(_named)


def problem() -> str | None:
    """Why a model that is loaded does not use a package that the recipe names, or None. transformers keeps silent where
    an import fails, and computes with its own functions."""
    if idle := sorted(name for name in _named if sys.modules.get(name) is None):
        return (
            f"{KEY} has {', '.join(idle)}, and transformers has not imported it for this model: it asks for another"
            " name, or the import fails (try it in Python); remove it from the list"
        )
    return None


def unused_packages() -> list[str]:
    """Installed packages whose functions transformers would have taken."""
    return sorted(_unused)


def record() -> dict[str, dict[str, str | None]]:
    """Version and SHA-256 of each package that the recipe names."""
    return {name: {"version": _version(name), "digest": _digest(name)} for name in sorted(_named)}


def digest() -> str:
    """SHA-256 of `record`."""
    return hashlib.sha256(json.dumps(record()).encode()).hexdigest()


def _version(name: str) -> str | None:
    distributions = metadata.packages_distributions().get(name)
    return metadata.version(distributions[0]) if distributions else None


def _digest(name: str) -> str:
    spec, digest = PathFinder.find_spec(name), hashlib.sha256()
    assert spec is not None
    places = [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
    for place in places:
        for file in sorted(place.rglob("*") if place.is_dir() else [place]):
            if file.is_file() and file.suffix != ".pyc":
                digest.update(
                    f"{file.relative_to(place.parent)}\0".encode() + hashlib.sha256(file.read_bytes()).digest()
                )
    return digest.hexdigest()


def _way_of_library() -> str | None:
    """`IMPORT` or `LOOK_UP` if transformers asks for a module by its name; else None."""
    frame, way = sys._getframe(2), None
    while frame.f_back is not None and (module := frame.f_globals.get("__name__", "")).partition(".")[0] == "importlib":
        way = module if module in (IMPORT, LOOK_UP) else way
        frame = frame.f_back
    return way if frame.f_globals.get("__name__", "").partition(".")[0] == LIBRARY else None


def _is_demanded(name: str) -> bool:
    """Return whether transformers ends with an error where it needs this package, as timm for Gemma 3n's tower, and so
    never computes without it."""
    return name in getattr(sys.modules.get(f"{LIBRARY}.utils.import_utils"), "BACKENDS_MAPPING", ())


@functools.cache
def _required_names() -> frozenset[str]:
    """Names of what this project, torch and transformers require, as they are imported in most cases."""
    texts = [*requirements(), *(text for name in ("torch", LIBRARY) for text in metadata.requires(name) or ())]
    names = [re.split(r"[^\w.-]", text)[0] for text in texts if "extra ==" not in text]
    return frozenset(name.replace("-", "_") for name in names) | frozenset(name.lower() for name in names)
