"""Results of earlier questions, kept on disk, such as traces: they take seconds, and no machine changes them."""

import contextlib
import functools
import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from cookbook.system.record_files import replace_file
from cookbook.system.shipped import PACKAGE
from cookbook.system.versions import LIBRARIES, installed_version

Kept = TypeVar("Kept")
_form_of: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)
_FOLDERS: list[Path] = []


@contextlib.contextmanager
def kept_results(cache: Path | None) -> Iterator[None]:
    """Find results in `cache`, and keep there what is made, inside of this context; None: keep none."""
    folders = [] if cache is None else [cache / "traces" / _code_digest()]
    _FOLDERS.extend(folders)
    try:
        yield
    finally:
        del _FOLDERS[len(_FOLDERS) - len(folders) :]


@functools.cache
def _code_digest() -> str:
    """A digest of what makes a result out of a configuration and a recipe: this package and the libraries."""
    digest = hashlib.sha256(
        repr([platform.python_version(), *((name, installed_version(name)) for name in LIBRARIES)]).encode()
    )
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def find(form: type[Kept], key: tuple[Any, ...]) -> Kept | None:
    """A result of this form that was kept, if any; one that is damaged is made again."""
    for folder in _FOLDERS[-1:]:
        with contextlib.suppress(OSError, ValidationError):
            result: Kept = _form_of(form).validate_json((folder / _name(form, key)).read_bytes())
            return result
    return None


def keep(key: tuple[Any, ...], value: Any) -> None:
    """Keep it, and remove what other code and other versions made. A folder that cannot be written keeps none."""
    form = type(value)
    for folder in _FOLDERS[-1:]:
        with contextlib.suppress(OSError):
            if not folder.is_dir():
                shutil.rmtree(folder.parent, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / _name(form, key), _form_of(form).dump_json(value).decode())


def find_or_make(key: tuple[Any, ...], make: Callable[[], Kept], form: type[Kept]) -> Kept:
    """The result of this form that was kept, else a new one, which is kept."""
    if (result := find(form, key)) is None:
        keep(key, result := make())
    return result


def _name(form: type[Any], key: tuple[Any, ...]) -> str:
    return f"{hashlib.sha256(json.dumps([form.__name__, *key]).encode()).hexdigest()[:32]}.json"
