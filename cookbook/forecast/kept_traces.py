"""Traces and skeletons of earlier questions, kept on disk: they take seconds, and are the same for every machine."""

import contextlib
import functools
import hashlib
import json
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from cookbook.forecast.activations import ActivationTrace
from cookbook.forecast.costs.inputs import Skeleton
from cookbook.system.record_files import replace_file
from cookbook.system.shipped import PACKAGE
from cookbook.system.versions import LIBRARIES, installed

Kept = TypeVar("Kept", ActivationTrace, Skeleton)
_FORMS: dict[Any, TypeAdapter[Any]] = {form: TypeAdapter(form) for form in (ActivationTrace, Skeleton)}
_FOLDERS: list[Path] = []


@contextlib.contextmanager
def kept_traces(cache: Path | None) -> Iterator[None]:
    """Find traces in `cache`, and keep there what is traced, inside of this context; None: keep none."""
    folders = [] if cache is None else [cache / "traces" / _code_digest()]
    _FOLDERS.extend(folders)
    try:
        yield
    finally:
        del _FOLDERS[len(_FOLDERS) - len(folders) :]


@functools.cache
def _code_digest() -> str:
    """A digest of what makes a trace out of a configuration and a recipe: this package and the libraries."""
    digest = hashlib.sha256(
        repr([platform.python_version(), *((name, installed(name)) for name in LIBRARIES)]).encode()
    )
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def find(form: type[Kept], key: tuple[Any, ...]) -> Kept | None:
    """A trace or skeleton that was kept, if any; one that is damaged is made again."""
    for folder in _FOLDERS[-1:]:
        with contextlib.suppress(OSError, ValidationError):
            return _FORMS[form].validate_json((folder / _name(form, key)).read_bytes())
    return None


def keep(key: tuple[Any, ...], value: ActivationTrace | Skeleton) -> None:
    """Keep it, and remove what other code and other versions made. A folder that cannot be written keeps none."""
    form = type(value)
    for folder in _FOLDERS[-1:]:
        with contextlib.suppress(OSError):
            if not folder.is_dir():
                shutil.rmtree(folder.parent, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / _name(form, key), _FORMS[form].dump_json(value).decode())


def _name(form: type[Any], key: tuple[Any, ...]) -> str:
    return f"{hashlib.sha256(json.dumps([form.__name__, *key]).encode()).hexdigest()[:32]}.json"
