"""Functions of libraries that are replaced while something runs: each only as it was read.

The replacement relies on what the function does and on who calls it. A release that changes the function leaves the
replacement in its place, and nothing fails.
"""

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from cookbook.system.files import RecipeError

TABLE = Path(__file__).with_suffix(".json")
"""Digests of the functions by library and version, which `python benchmarks/upgrade_places.py` writes."""
UPGRADE = "see docs/upgrade.md"
_ours: list[Any] = []
_calls: dict[str, int] = {}
"""Number of calls of hooks, by place."""
KNOWN: dict[str, dict[str, list[str]]] = json.loads(TABLE.read_text(encoding="utf-8"))


def replace_function(owner: Any, name: str, function: Any) -> Callable[[], None]:
    """Put `function` in the place of a library's. Returns what puts the library's back.

    Args:
        owner: the module or class that has it.

    Raises:
        RecipeError: it is not there, or not as it was read.
    """
    check_function(owner, name)
    before = getattr(owner, name)
    setattr(owner, name, function)
    _ours.append(function)
    return lambda: setattr(owner, name, before)


def set_values(owner: Any, **values: Any) -> None:
    """Set values of a library's module.

    Raises:
        RecipeError: one is not there, so that nothing would read it.
    """
    if gone := [place_of(owner, name) for name in values if not hasattr(owner, name)]:
        library = owner.__name__.partition(".")[0]
        where = f"not in {library} {metadata.version(library)}"
        raise RecipeError(f"{' and '.join(gone)} is {where}, and a run sets it; {UPGRADE}")
    for name, value in values.items():
        setattr(owner, name, value)


@contextlib.contextmanager
def replace_functions(owner: Any, **functions: Any) -> Iterator[None]:
    """`replace_function` of functions of a module or class while this is open."""
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            stack.callback(replace_function(owner, name, function))
        yield


def count_calls(hook: Callable[..., Any], place: str) -> Callable[..., Any]:
    """A hook that the first step of a run has to call, see `check_hooks`.

    Args:
        place: what it is registered on. Of several hooks on one place one has to be called.
    """
    _calls.setdefault(place, 0)

    @functools.wraps(hook)
    def call(*arguments: Any, **options: Any) -> Any:
        _calls[place] += 1
        return hook(*arguments, **options)

    return call


def forget_hooks() -> None:
    """Start over with no hook. To be called before a model is prepared."""
    _calls.clear()


def check_hooks() -> None:
    """Raise RecipeError if no hook of a place has been called. To be called after the gradients of the first step."""
    if silent := [place for place, num_calls in _calls.items() if not num_calls]:
        raise RecipeError(f"the first step called no hook on {', '.join(silent)}; {UPGRADE}")


def check_function(owner: Any, name: str) -> None:
    """Raise RecipeError if a function that is to be replaced is not there, or not as it was read."""
    if any(getattr(owner, name, None) is function for function in _ours):
        return
    place = place_of(owner, name)
    library = place.partition(".")[0]
    version = metadata.version(library)
    if not hasattr(owner, name):
        raise RecipeError(f"{place} is not in {library} {version}, and a run replaces it; {_way_out(place)}")
    if digest_of(owner, name) not in KNOWN.get(place, {}):
        raise RecipeError(f"{place} of {library} {version} is not as it was read; {_way_out(place)}")


def place_of(owner: Any, name: str) -> str:
    """The name of a function in the table."""
    home = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    return f"{home}.{name}"


def digest_of(owner: Any, name: str) -> str:
    """SHA-256 of a function's code, without its comments, docstring and layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(owner, name))))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def _way_out(place: str) -> str:
    versions = sorted({version for versions in KNOWN.get(place, {}).values() for version in versions})
    read = f"it was read in {', '.join(versions)}: install one of these" if versions else "it was read in no version"
    return f"{read} (docs/upgrade.md)"
