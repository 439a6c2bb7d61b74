"""Traces of earlier questions, kept on disk: a trace takes seconds, and is the same for every machine."""

import contextlib
import functools
import hashlib
import json
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cookbook.forecast.activations import ActivationTrace
from cookbook.system.record_files import replace_file
from cookbook.system.shipped import PACKAGE
from cookbook.system.versions import LIBRARIES, installed

_FORM = TypeAdapter(ActivationTrace)
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


def find(key: tuple[Any, ...]) -> ActivationTrace | None:
    """The trace that was kept, if any; one that is damaged is made again."""
    for folder in _FOLDERS[-1:]:
        with contextlib.suppress(OSError, ValidationError):
            return _FORM.validate_json((folder / _name(key)).read_bytes())
    return None


def keep(key: tuple[Any, ...], trace: ActivationTrace) -> None:
    """Keep a trace, and remove those of other code and other versions. A folder that cannot be written keeps none."""
    for folder in _FOLDERS[-1:]:
        with contextlib.suppress(OSError):
            if not folder.is_dir():
                shutil.rmtree(folder.parent, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / _name(key), _FORM.dump_json(trace).decode())


def _name(key: tuple[Any, ...]) -> str:
    return f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"
