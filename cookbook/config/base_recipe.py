"""A recipe over another one: `base: other.yaml` names the file that has all keys which the recipe does not write."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cookbook.system.files import (
    Document,
    KeyPath,
    RecipeError,
    apply_overrides,
    find_file,
    path_problem,
    read_document,
    refuse,
    show,
)

KEY = "base"
SCHEMA = {
    "description": "The path of another recipe, from this file's folder, which has the keys that this one does not\n"
    "write. Mappings are merged; a list or another value takes the place of the base's, and null takes it out.",
    "examples": ["other.yaml"],
    "title": "Base",
    "type": "string",
}
"""The schema of the key, for editors."""


def over_base(path: Path, assignments: Iterable[str]) -> Document:
    """The values in a recipe's file and in that of its base, with `section.key=value` over both.

    Raises:
        RecipeError: a file that cannot be read, or a base that the recipe cannot have.
    """
    own, assignments = read_document(path), [*assignments]
    of_base = [words for words in assignments if words.partition("=")[0].strip().partition(".")[0] == KEY]
    refuse([f"--set {words}: a base is named in the recipe's file; write it there" for words in of_base])
    return apply_overrides(_merge_over(own, _read_base(own, path)), assignments)


def _read_base(document: Document, path: Path) -> Document:
    """The file that a recipe names as its base.

    Raises:
        RecipeError: it is none, or has a base itself.
    """
    named, place = document.values[KEY], document.place(KEY)
    if not isinstance(named, str):
        what = document.none_at(KEY) if named is None else show(named)
        raise RecipeError(f"{place} is {what}; write the path of one recipe, or take the line out")
    if (problem := path_problem(named)) is not None:
        raise RecipeError(f"{place} {problem}")
    file = path.parent / named
    if mistakes := find_file(named, lambda: place, beside=path.parent):
        raise RecipeError(mistakes)
    if file.samefile(path):
        raise RecipeError(f"{place} is {named!r}, the recipe itself; write another one's path, or take the line out")
    base = read_document(file)
    if KEY in base.values:
        above = f"has a base itself ({base.place(KEY)} is {show(base.values[KEY])})"
        raise RecipeError(f"{place} is {named!r}, which {above}; a base has none: write what it holds into one file")
    return base


def _merge_over(own: Document, base: Document) -> Document:
    """A recipe's document over its base's: mappings are merged, a list or another value takes the place of the base's,
    and null takes it out.
    """
    kept, mistakes = dict(base.lines), [*own.mistakes]

    def drop(path: KeyPath) -> None:
        for key in [key for key in kept if key[: len(path)] == path]:
            del kept[key]

    def merge(values: dict[str, Any], others: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        merged = dict(others)
        for key, value in values.items():
            here = (*path, key)
            if value is None and key in others and here in own.empty:
                mistakes.append(
                    f"{own.place(*here)} is empty; write null to take out what {base.at(*here)} has, or take the line"
                    " out"
                )
            elif value is None and key in others:
                del merged[key]
                drop(here)
            elif isinstance(value, dict) and isinstance(others.get(key), dict):
                merged[key] = merge(value, others[key], here)
            else:
                merged[key] = value
                drop(here)
        return merged

    written = {key: value for key, value in own.values.items() if key != KEY}
    values = merge(written, base.values, ())
    return Document(
        own.name,
        values,
        kept | own.lines,
        mistakes=mistakes,
        inherited=dict.fromkeys(kept.keys() - own.lines.keys(), base.name),
        digests=own.digests | base.digests,
        empty=own.empty | (base.empty & kept.keys() - own.lines.keys()),
    )
