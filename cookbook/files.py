"""Reads YAML and JSON the strict way, and words every mistake with its place.

Nothing here knows what a recipe or a strategy is; `recipe` and `strategy` bring their pydantic models.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

MAX_FILE_BYTES = 1_000_000

Model = TypeVar("Model", bound=BaseModel)
KeyPath = tuple[str | int, ...]


class RecipeError(ValueError):
    """What a user can fix by editing a file or a command line; ends a program with exit code 2 and no traceback."""

    def __init__(self, mistakes: list[str]) -> None:
        assert mistakes
        self.mistakes = mistakes
        super().__init__("\n".join(mistakes))


@dataclass
class Document:
    """A parsed file: plain values, and where each key stands."""

    name: str
    values: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overrides: set[KeyPath] = field(default_factory=set)

    def place(self, path: KeyPath) -> str:
        """`file:line: section.key`, with the nearest known line when the key itself is missing."""
        dotted = ".".join(str(part) for part in path)
        for length in range(len(path), -1, -1):
            if path[:length] in self.overrides:
                return f"--set {dotted}"
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}: {dotted}".removesuffix(": ")
        return f"{self.name}: {dotted}".removesuffix(": ")


def nearest(word: str, choices: list[str]) -> str:
    """`"; did you mean 'x'?"` for a near miss, the list of choices otherwise."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"known here: {', '.join(choices)}"


# YAML 1.1 wants a dot in a float, so PyYAML reads 2e-5 as text. YAML 1.2 does not, and neither do people.
_FLOAT = re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.\d*)?[eE][-+]?\d+$")


class _StrictLoader(yaml.SafeLoader):
    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported; write the value", problem_mark=mark)
        return super().compose_node(parent, index)


_StrictLoader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
for _first in "-+0123456789":
    _StrictLoader.yaml_implicit_resolvers.setdefault(_first, []).insert(0, ("tag:yaml.org,2002:float", _FLOAT))


def read_document(path: Path) -> Document:
    """The mapping in a `.yaml` or `.json` file.

    Raises:
        RecipeError: missing, too large, not UTF-8, not YAML (or JSON), empty, not a mapping, or a key given twice.
    """
    name = str(path)
    if not path.is_file():
        raise RecipeError([f"{name}: no such file (looked in {Path.cwd()})"])
    if path.stat().st_size > MAX_FILE_BYTES:
        raise RecipeError([f"{name}: {path.stat().st_size} bytes is too large for a settings file"])
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError([f"{name}: not UTF-8 text ({error})"]) from None
    document = _parse_json(name, text) if path.suffix == ".json" else _parse_yaml(name, text)
    if document.values is None:
        raise RecipeError([f"{name}: the file is empty"])
    if not isinstance(document.values, dict):
        raise RecipeError([f"{name}: expected `key: value` lines, found a {_kind(document.values)}"])
    return document


def _parse_yaml(name: str, text: str) -> Document:
    document, mistakes = Document(name, None), []
    loader = _StrictLoader(text)

    def build(node: yaml.Node, path: KeyPath) -> Any:
        document.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            values: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = str(loader.construct_object(key_node, deep=True))
                line = key_node.start_mark.line + 1
                if key in values:
                    first = document.lines[(*path, key)]
                    dotted = ".".join(map(str, (*path, key)))
                    mistakes.append(f"{name}:{line}: {dotted}: given twice (first in line {first}); keep one of them")
                    continue
                document.lines[(*path, key)] = line
                values[key] = build(value_node, (*path, key))
            return values
        if isinstance(node, yaml.SequenceNode):
            return [build(child, (*path, i)) for i, child in enumerate(node.value)]
        return loader.construct_object(node, deep=True)

    try:
        node = loader.get_single_node()
        if node is not None:
            document.values = build(node, ())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise RecipeError([f"{name}:{line}: not valid YAML: {error.problem}"]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError([f"{name}: not valid YAML: {error}"]) from None
    if mistakes:
        raise RecipeError(mistakes)
    document.lines[()] = 1
    return document


def _parse_json(name: str, text: str) -> Document:
    mistakes: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        mistakes.extend(f"{name}: {key}: given twice; keep one of them" for key in sorted({k for k in keys if keys.count(k) > 1}))
        return dict(pairs)

    if not text.strip():
        return Document(name, None)
    try:
        values = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise RecipeError([f"{name}:{error.lineno}: not valid JSON: {error.msg}"]) from None
    except RecursionError:
        raise RecipeError([f"{name}: not valid JSON: nested too deeply"]) from None
    if mistakes:
        raise RecipeError(mistakes)
    try:  # JSON is YAML enough to find the lines; where it isn't (tabs), mistakes are told without them
        lines = _parse_yaml(name, text).lines
    except RecipeError:
        lines = {}
    return Document(name, values, lines)


def validate(
    document: Document, model: type[Model], owned_elsewhere: Mapping[str, str] | None = None
) -> tuple[Model | None, list[str]]:
    """The document as `model`, or None with all of its mistakes.

    Args:
        owned_elsewhere: what to write instead, by key name, for keys that this file may not set.
    """
    try:
        return model.model_validate(document.values), []
    except ValidationError as error:
        return None, [_word(document, model, problem, owned_elsewhere or {}) for problem in error.errors()]


def _word(document: Document, model: type[BaseModel], problem: Any, owned_elsewhere: Mapping[str, str]) -> str:
    path, kind, value = tuple(problem["loc"]), problem["type"], problem["input"]
    place, context = document.place(path), problem.get("ctx", {})
    if kind == "extra_forbidden":
        key = str(path[-1])
        if key in owned_elsewhere:
            return f"{place}: does not belong here; {owned_elsewhere[key]}"
        return f"{place}: unknown key; {nearest(key, _known_keys(model, path[:-1]))}"
    if kind == "missing":
        return f"{place}: is missing; this key has no default"
    if kind == "value_error":
        return f"{place}: {context['error']}".replace(": : ", ": ")
    if isinstance(value, bool) and kind in ("literal_error", "string_type"):
        return f"{place} is {str(value).lower()} (YAML reads a bare no, yes, on or off so). Write it in quotes: 'no'"
    if kind == "literal_error":
        expected = context["expected"]
        choices = [word.strip("' ") for word in re.split(r",| or ", expected)]
        hint = difflib.get_close_matches(str(value), choices, n=1)
        return f"{place} is {_show(value)}; use {expected}" + (f" (did you mean {hint[0]}?)" if hint else "")
    if value is None:
        return f"{place} is empty; write a value, or leave the key out for its default"
    message = problem["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{place} is {_show(value)} ({_kind(value)}); it must be {message}"


def _known_keys(model: type[BaseModel], path: KeyPath) -> list[str]:
    """The field names of the model that stands at `path` inside `model`."""
    for part in path:
        if isinstance(part, int):
            continue
        candidates: list[type[BaseModel]] = []
        _collect_models(model.model_fields[part].annotation, candidates)
        if not candidates:
            return []
        model = candidates[0]
    return list(model.model_fields)


def _collect_models(annotation: Any, found: list[type[BaseModel]]) -> None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        found.append(annotation)
    for argument in getattr(annotation, "__args__", ()):
        _collect_models(argument, found)


def apply_overrides(document: Document, assignments: list[str]) -> list[str]:
    """Writes `section.key=value` assignments into the document; the value is read as YAML. Returns the mistakes."""
    mistakes = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            mistakes.append(f"--set {assignment}: write it as section.key=value")
            continue
        try:
            value = _parse_yaml(f"--set {key}", text).values
        except RecipeError as error:
            mistakes.extend(error.mistakes)
            continue
        target = document.values
        for part in path[:-1]:
            if not isinstance(target.get(part), dict):
                target[part] = {}
            target = target[part]
        target[path[-1]] = value
        document.overrides.add(path)
    return mistakes


def find_file(name: str, place: Callable[[], str]) -> list[str]:
    """A mistake if there is no such file."""
    return [] if Path(name).is_file() else [f"{place()} is {name!r}: no such file (looked in {Path.cwd()})"]


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(value: Any) -> str:
    names = {dict: "mapping", list: "list", str: "text", int: "integer", float: "number", bool: "true/false", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)
