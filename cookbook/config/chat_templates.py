"""The chat templates in recipes/chat_templates, which a recipe gives by their names."""

import re
from collections.abc import Callable
from pathlib import Path

from cookbook.system.files import find_file, nearest
from cookbook.system.shipped import is_short, path_from_here, starts

FOLDER = Path("recipes/chat_templates")
CHATML, CHATML_TOOLS = "chatml", "chatml_tools"
"""Names of those that serve any model; the second writes tool calls and reasoning."""
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def is_marked(template: str) -> bool:
    """Return whether a template has markers around the assistant's part."""
    return _MARKER.search(template) is not None


def template_path(name: str) -> str:
    """The file of a template that is given by name or path. A bare name is a shipped one, whatever lies here."""
    return path_from_here(str(FOLDER / f"{name}.jinja")) if is_short(name) else name


def known_templates() -> list[str]:
    """The names of the files in recipes/chat_templates/, here and shipped."""
    return sorted({path.stem for start in starts() for path in (start / FOLDER).glob("*.jinja")})


def missing_template(name: str, place: Callable[[], str]) -> list[str]:
    """One mistake if the template that a recipe gives, by name or path, does not exist."""
    if not is_short(name):
        return find_file(name, place, FOLDER)
    if name in known_templates():
        return []
    hint = f"; to give a file of that name, write ./{name}" if Path(name).is_file() else ""
    return [f"{place()} is {name!r}: no such template; {nearest(name, known_templates())}{hint}"]
