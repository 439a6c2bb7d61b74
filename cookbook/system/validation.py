"""Documents validated by any pydantic model, with the place of every mistake and what to write instead."""

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from cookbook.system.files import MAX_CHOICES, Document, KeyPath, closest, flatten, name_some, nearest, show, type_name

WRITE_OR_LEAVE_OUT = "write a value, or leave the key out for its default"
Model = TypeVar("Model", bound=BaseModel)


def validate(
    document: Document,
    model: type[Model],
    answer_to: Callable[[str], str | None] = lambda key: None,
    meaning_of: Callable[[str, str], str | None] = lambda key, value: None,
) -> tuple[Model | None, list[str]]:
    """Validates a document as `model`. Returns the model, None if it is invalid, and the mistakes.

    Misspelt keys do not hide other mistakes: the rest is validated as if they had their nearest valid names, or the
    places that they are told to have, and once without them. A mistake that one of the two does not have comes from the
    guess, and nothing is said of it; nor of a missing key that another message says to write.

    Args:
        answer_to: what to write instead of a key that this file may not set; asked about a key that is not the model's.
        meaning_of: what to write instead of a wrong value of a key; it is given in small letters.
    """
    mistakes: list[str] = []
    parsed, problems = _try(document.values, model)
    homes = _homes(model) if problems else {}
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    if unknown:
        named = [key for problem in unknown for key in _unknown_keys(document, model, problem, answer_to, homes)]
        mistakes = [_word_problem(document, model, key, answer_to, homes) for key in named]
        values, rest = _use_nearest_names(document.values, model, unknown, answer_to)
        _use_told_homes(values, zip(named, mistakes, strict=True))
        parsed, problems = _try(values, model)
        others = {_sign(problem) for problem in _try(rest, model)[1]}
        missing = {path for kind, path, _ in others if kind == "missing"}
        told = {path for mistake in mistakes for path in _told_keys(mistake)}
        problems = [
            problem
            for problem in problems
            if (_sign(problem) in others or _is_in_missing(problem, missing))
            and not _is_told(document, model, problem, told)
        ]
    mistakes += [
        _explain_value(document, problem, meaning_of) or _word_problem(document, model, problem, answer_to, homes)
        for problem in problems
    ]
    return parsed, list(dict.fromkeys(mistakes))


def parts(document: Document, models: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Sections, each validated by itself, independent of mistakes in the others; None where one is invalid."""
    return {name: part(document, name, model) for name, model in models.items()}


def part(document: Document, name: str, model: type[Model]) -> Model | None:
    """Validate one section of `parts`."""
    return validate(Document("", document.values.get(name, {})), model)[0]


def _try(values: Any, model: type[Model]) -> tuple[Model | None, list[Any]]:
    try:
        return model.model_validate(values), []
    except ValidationError as error:
        return None, [{**problem, "loc": _to_file_path(values, problem["loc"])} for problem in error.errors()]


def _to_file_path(values: Any, path: KeyPath) -> KeyPath:
    """A pydantic location as a path in the file, which may have one value in place of a list or of a named mapping; of
    a wrong name in a mapping the path of the mapping, in whose place the file may have a list of names.
    """
    written: list[str | int] = []
    for part in path[:-2] if path[-1:] == ("[key]",) else path:
        is_list = isinstance(values, list | tuple)
        if (part == "" and not (isinstance(values, dict) and "" in values)) or (isinstance(part, int) and not is_list):
            continue
        written.append(part)
        if isinstance(values, dict):
            values = values.get(part)
        else:
            values = values[part] if is_list and isinstance(part, int) and part < len(values) else None
    return tuple(written)


def _sign(problem: Any) -> tuple[Any, ...]:
    return problem["type"], problem["loc"], problem["msg"]


def _use_nearest_names(
    values: Any, model: type[BaseModel], unknown: list[Any], answer_to: Callable[[str], str | None]
) -> tuple[Any, Any]:
    """The values under the nearest names, and the values without what has an unknown name."""
    guessed, rest = copy.deepcopy(values), copy.deepcopy(values)
    for problem in unknown:
        *path, key = problem["loc"]
        section, other = guessed, rest
        for part_of_path in path:
            section, other = section[part_of_path], other[part_of_path]
        value = section.pop(key)
        del other[key]
        close = closest(key, _fields(model, tuple(path), values))
        if close and _answer(answer_to, problem["loc"]) is None and close not in section:
            section[close] = value
    return guessed, rest


def _use_told_homes(values: Any, told: Iterable[tuple[Any, str]]) -> None:
    """Add the values of unknown keys, each with its message, in the places that the messages name."""
    for problem, mistake in told:
        if (match := re.search(r"; write it as ([\w.]+)$", mistake)) is None:
            continue
        *path, key = match[1].split(".")
        section = values
        for part_of_path in path:
            section = section.setdefault(part_of_path, {}) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.setdefault(key, problem["input"])


def _told_keys(mistake: str) -> Iterator[str]:
    """Dotted keys that a message says to write."""
    for match in re.finditer(r"\bwrite (?:it as )?([a-z_]+(?:\.[a-z_]+)+)(?:: \{(\w+):)?", mistake):
        yield match[1]
        if match[2]:
            yield f"{match[1]}.{match[2]}"


def _is_in_missing(problem: Any, missing: Collection[KeyPath]) -> bool:
    """Return whether a key is missing in a section that is missing as a whole."""
    path = problem["loc"]
    return problem["type"] == "missing" and any(path[:length] in missing for length in range(1, len(path)))


def _is_told(document: Document, model: type[BaseModel], problem: Any, told: set[str]) -> bool:
    """Return whether a key is missing that another message says to write already."""
    path = tuple(map(str, problem["loc"]))
    if problem["type"] != "missing":
        return False
    needed = [key for key, field in _fields(model, path, document.values).items() if field.is_required()]
    return ".".join(path) in told or (bool(needed) and all(".".join((*path, key)) in told for key in needed))


def _unknown_keys(
    document: Document,
    model: type[BaseModel],
    problem: Any,
    answer_to: Callable[[str], str | None],
    homes: Mapping[str, list[tuple[str, ...]]],
) -> list[Any]:
    """An unknown key or, of an unknown section, the keys in it that are answered, and itself for the others."""
    *path, key = problem["loc"]
    is_misspelt = closest(str(key), _fields(model, tuple(path), document.values)) is not None
    if is_misspelt or not isinstance(problem["input"], dict) or key == "<<":  # YAML's merge, which is not read
        return [problem]
    leaves = flatten(problem["input"])
    inside = [
        {**problem, "loc": path, "input": value}
        for dotted, value in leaves.items()
        if _answer(answer_to, path := (*problem["loc"], *dotted.split(".")))
        or len({*homes.get(str(path[-1]), ())}) == 1
    ]
    return inside if inside and len(inside) == len(leaves) else [*inside, problem]


def _answer(answer_to: Callable[[str], str | None], path: KeyPath) -> str | None:
    """Advice for the key at a path: for the path as a whole, else for the end of it."""
    names = list(map(str, path))
    ends = (answer_to(".".join(names[start:])) for start in range(len(names)))
    return next(filter(None, ends), None)


# Expected types, where pydantic's own words would confuse the author of a YAML file.
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a section of `key: value` lines",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a section of `key: value` lines",
}


def _explain_value(document: Document, problem: Any, meaning_of: Callable[[str, str], str | None]) -> str | None:
    """The message for a wrong value with a known meaning; None for all others."""
    if problem["type"] != "literal_error" or isinstance(problem["input"], bool):
        return None
    key = ".".join(part for part in problem["loc"] if isinstance(part, str))
    meaning = meaning_of(key, str(problem["input"]).lower())
    return meaning and f"{document.place(*problem['loc'])} is {show(problem['input'])}: {meaning}"


def _word_problem(
    document: Document,
    model: type[BaseModel],
    problem: Any,
    answer_to: Callable[[str], str | None],
    known: Mapping[str, list[tuple[str, ...]]],
) -> str:
    """The message for a pydantic error; `known` is the result of `_homes`."""
    path, kind, value = tuple(problem["loc"]), problem["type"], problem["input"]
    place, context = document.place(*path), problem.get("ctx", {})
    if kind == "extra_forbidden":
        key = str(path[-1])
        if (answer := _answer(answer_to, path)) is not None:
            return f"{place}: does not belong here; {answer}"
        homes = [home for home in dict.fromkeys(known.get(key, [])) if home != path]
        here = _fields(model, path[:-1], document.values)
        if len(homes) == 1 and (key in here or closest(key, here) is None):  # in a section that there is not
            home = ".".join(homes[0])
            is_said = home in (there := flatten(document.values)) and there[home] == value
            way = "take it out" if is_said else f"write it as {home}"
            return f"{place}: does not belong here; {way}"
        return f"{place}: unknown key; {nearest(key, list(here))}"
    if kind == "missing" and isinstance(path[-1], int):
        return f"{document.place(*path[:-1])} has too few values"
    if kind == "missing":
        return f"{place}: is missing; this key has no default{_example(document, model, path)}"
    if kind == "value_error":
        message = str(context["error"])
        return f"{place}{' ' if message.startswith(('is ', 'has ')) else ': '}{message}"
    if value is None:
        is_required = _is_required(document, model, path)
        way = f"this key has no default{_example(document, model, path)}" if is_required else WRITE_OR_LEAVE_OUT
        return f"{place} is {document.none_at(*path)}; {way}"
    if kind == "literal_error":
        expected = context["expected"].replace("False", "false").replace("True", "true")
        choices = {word.strip("' ").lower(): word for word in re.split(r", | or ", expected)}
        if value is False and "no" in choices:
            return f"{place} is false (YAML reads a bare no so); write {choices['no']} in quotes"
        close = closest(str(value).lower(), choices) if len(choices) > 1 else None
        some = expected if len(choices) <= MAX_CHOICES else name_some(list(choices.values()))
        return f"{place} is {show(value)}; use {some}" + (f" (did you mean {choices[close]}?)" if close else "")
    if kind == "string_type" and isinstance(value, bool):
        return (
            f"{place} is {show(value)} (YAML reads a bare yes, no, on or off so); it must be text: write it in quotes"
        )
    if kind in _EXPECTED:
        way = _as_written(model, path, value, document) or f"it must be {_EXPECTED[kind]}"
        return f"{place} is {show(value)} ({type_name(value)}); {way}"
    if kind == "too_long":
        return f"{place} is {show(list(value))}; write {context['max_length']} values"
    return f"{place} is {show(value)}; it must be {problem['msg'].removeprefix('Input should be ')}"


def _as_written(model: type[BaseModel], path: KeyPath, value: Any, document: Document) -> str | None:
    """Advice for one word in the place of a section or a list: how to write it; None where that is not known."""
    field = _fields(model, path[:-1], document.values).get(str(path[-1])) if path else None
    if field is None or isinstance(value, dict | list):
        return None
    is_set, dotted = path in document.overrides, ".".join(map(str, path))
    sections = list(_models_in(field.annotation))
    names = [kind for kind in sections if "name" in kind.model_fields]
    if names and isinstance(value, str) and re.fullmatch(r"[\w.-]+", value):
        return f"write --set {dotted}.name={value}" if is_set else f"write {path[-1]}: {{name: {value}}}"
    if sections and field.examples:
        return f"write a section, for example {_flow(str(path[-1]), field.examples[0])}"
    if not sections and isinstance(value, str) and "list[" in str(field.annotation):
        return f"write a list: --set {dotted}=[{value}]" if is_set else f"write a list: {path[-1]}: [{value}]"
    return None


def _homes(model: type[BaseModel], path: tuple[str, ...] = ()) -> dict[str, list[tuple[str, ...]]]:
    """All valid paths of each key name."""
    homes: dict[str, list[tuple[str, ...]]] = {}
    for name, info in model.model_fields.items():
        homes.setdefault(name, []).append((*path, name))
        for candidate in _models_in(info.annotation):
            for key, places in _homes(candidate, (*path, name)).items():
                homes.setdefault(key, []).extend(places)
    return homes


def _is_required(document: Document, model: type[BaseModel], path: KeyPath) -> bool:
    field = _fields(model, path[:-1], document.values).get(str(path[-1])) if path else None
    return field is not None and field.is_required()


def _example(document: Document, model: type[BaseModel], path: KeyPath) -> str:
    """The end of a message about a missing key: a value that its field has as an example."""
    key = str(path[-1])
    field = _fields(model, path[:-1], document.values).get(key)
    if field is None or not field.examples:
        return ""
    return f", for example {_flow(key, field.examples[0])}"


def _flow(key: str, value: Any) -> str:
    """A key with its value in one line of YAML."""
    if isinstance(value, dict):
        value = "{" + ", ".join(f"{name}: {inner}" for name, inner in value.items()) + "}"
    return f"{key}: {value}"


def _fields(model: type[BaseModel], path: KeyPath, values: Any) -> dict[str, FieldInfo]:
    """Fields of the section at `path` inside `model`, for these values of the whole."""
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
        if part not in model.model_fields:  # an index, or a name that the user chose
            continue
        inner = next(_models_in(model.model_fields[part].annotation), None)
        if inner is None:
            return {}
        model = inner
    # The keys of some sections depend on their name (`registry.NamedSection`).
    return (model.kind_of(values) if hasattr(model, "kind_of") else model).model_fields


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        yield from annotation.kinds() if hasattr(annotation, "kinds") else ()
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)
