"""References `${key}` in a file, each to the value of another key there, as OmegaConf reads them."""

import re
from typing import Any

REFERENCE = re.compile(r"\$\{([\w.:/,-]+)\}")
DEPTH = 10
"""References in what another stands for; more are a circle."""


def resolve(value: Any, values: dict[str, Any], depth: int = DEPTH) -> Any:
    """The value with what its references stand for; those to keys that are not there stay."""
    if isinstance(value, list):
        return [resolve(item, values, depth) for item in value]
    if isinstance(value, dict):
        return {key: resolve(item, values, depth) for key, item in value.items()}
    if not isinstance(value, str) or depth == 0:
        return value
    if reference := REFERENCE.fullmatch(value):
        target = _find(reference[1], values)
        return value if target is None else resolve(target, values, depth - 1)
    text = REFERENCE.sub(lambda match: _as_text(_find(match[1], values), match[0]), value)
    return text if text == value else resolve(text, values, depth - 1)


def is_open(value: Any) -> bool:
    """Return whether references are left."""
    if isinstance(value, list | dict):
        return any(map(is_open, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and REFERENCE.search(value) is not None


def _find(path: str, values: dict[str, Any]) -> Any:
    node: Any = values
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node


def _as_text(target: Any, written: str) -> str:
    return written if target is None or isinstance(target, list | dict) else str(target)
