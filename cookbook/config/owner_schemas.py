"""Keys, types and defaults of other projects' files, as `benchmarks/owner_schemas.py` read them in their sources."""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWNERS = Path(__file__).with_name("owners")
MAX_DEPTH = 4
CONFIG = "Config"
OF_ALL_METHODS = "TrainingArguments"
"""The class that the settings of each method extend."""

Classes = Mapping[str, Mapping[str, list[Any]]]
"""Type by class and key, and the default unless the key is required or its owner computes it."""


@dataclass(frozen=True)
class Field:
    """A key of another project's file."""

    of_class: str
    """The class that declares it."""
    kind: str
    """Type, as the source has it."""
    default: tuple[Any, ...] = ()
    """Default; empty where the key is required, or its owner computes it."""


def version_of(owner: str) -> str:
    """The version of an owner's schema, or the day of the commit that it was read from."""
    version: str = json.loads((OWNERS / f"{owner}.json").read_text(encoding="utf-8"))["version"]
    return version.partition(" ")[0]


@functools.cache
def read_classes(owners: tuple[str, ...]) -> Classes:
    """The classes of several owners; a later one extends those of the same name."""
    classes: dict[str, Mapping[str, list[Any]]] = {}
    for owner in owners:
        own = json.loads((OWNERS / f"{owner}.json").read_text(encoding="utf-8"))["classes"]
        classes |= {name: {**classes.get(name, {}), **keys} for name, keys in own.items()}
    return classes


@functools.cache
def others_of(owners: tuple[str, ...]) -> dict[str, list[str]]:
    """Keys, by dotted path, that no class has which is read, with the owner's classes and functions that have them."""
    files = (json.loads((OWNERS / f"{owner}.json").read_text(encoding="utf-8")) for owner in owners)
    return {path: names for own in files for path, names in own.get("others", {}).items()}


@functools.cache
def methods_of(owners: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """The classes that have the settings of a method, by name, each with its keys: its own, those of what it extends up
    to what all methods have, and those of its script."""
    extends: dict[str, list[str]] = {}
    for owner in owners:
        extends |= json.loads((OWNERS / f"{owner}.json").read_text(encoding="utf-8")).get("extends", {})
    classes = read_classes(owners)

    def line_of(name: str) -> list[str]:
        return [name, *(above for base in extends.get(name, ()) for above in line_of(base))]

    methods = {name: line_of(name) for name in extends if name.endswith(CONFIG) and not name.startswith("_")}
    methods = {name: line for name, line in methods.items() if line[-1] == OF_ALL_METHODS}
    of_all = {key for line in methods.values() for own in line if own[0] == "_" for key in classes.get(own, ())}
    of_all |= classes.get(OF_ALL_METHODS, {}).keys()  # also those whose default a method has changed
    return {
        name: frozenset(
            key
            for own in line
            if not own.startswith("_") and own != OF_ALL_METHODS
            for part in (own, f"{own.removesuffix(CONFIG)}ScriptArguments")
            for key in classes.get(part, ())
            if key not in of_all
        )
        for name, line in methods.items()
    }


@functools.cache
def fields_of(owners: tuple[str, ...]) -> dict[str, Field]:
    """All keys of a project by dotted path; of a key that several classes have, that of the first.

    Args:
        owners: those whose classes the project extends, and the project itself.
    """
    classes = read_classes(owners)
    sections = {name for keys in classes.values() for kind, *_ in keys.values() for name in re.findall(r"\w+", kind)}
    fields: dict[str, Field] = {}

    def add(name: str, start: str) -> None:
        for key, (kind, *default) in classes[name].items():
            fields.setdefault(f"{start}{key}", Field(name, kind, tuple(default)))
            inner = [] if "list[" in kind.lower() else [word for word in re.findall(r"\w+", kind) if word in classes]
            for section in inner if start.count(".") < MAX_DEPTH else ():
                add(section, f"{start}{key}.")

    for name in classes:
        if name not in sections:
            add(name, "")
    return fields
