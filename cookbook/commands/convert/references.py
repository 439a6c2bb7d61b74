"""`${key}` in a file, which stands for the value of another key there, as OmegaConf reads it."""

import re
from typing import Any

REFERENCE = re.compile(r"\$\{([\w.:/,-]+)\}")
DEPTH = 10
"""References in what another stands for; more are a circle."""


def resolved(value: Any, values: dict[str, Any], depth: int = DEPTH) -> Any:
    """The value with what its references stand for; those to keys that are not there stay."""
    if isinstance(value, list):
        return [resolved(one, values, depth) for one in value]
    if isinstance(value, dict):
        return {key: resolved(one, values, depth) for key, one in value.items()}
    if not isinstance(value, str) or depth == 0:
        return value
    if whole := REFERENCE.fullmatch(value):
        found = _find(whole[1], values)
        return value if found is None else resolved(found, values, depth - 1)
    text = REFERENCE.sub(lambda match: _as_text(_find(match[1], values), match[0]), value)
    return text if text == value else resolved(text, values, depth - 1)


def is_open(value: Any) -> bool:
    """Whether references are left."""
    if isinstance(value, list | dict):
        return any(map(is_open, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and REFERENCE.search(value) is not None


def _find(path: str, values: dict[str, Any]) -> Any:
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _as_text(found: Any, written: str) -> str:
    return written if found is None or isinstance(found, list | dict) else str(found)
