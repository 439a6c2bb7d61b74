"""`schema`: what an editor needs to complete and check recipes, and what programs read of each command."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cookbook.commands.shared.answer_forms import ANSWERS, Answer
from cookbook.commands.shared.arguments import write_page
from cookbook.config.recipe import recipe_schema

FOR_PROGRAMS = Path("docs/for_programs.md")
START = "<!-- Below: written by `cookbook schema` from cookbook/commands/shared/answer_forms.py -->\n"


def schema() -> int:
    """Write recipes/schema.json, and the pages of what --json prints."""
    write_page(Path("recipes/schema.json"), lambda: json.dumps(recipe_schema(), indent=2) + "\n")
    write_page(FOR_PROGRAMS.with_suffix(".json"), lambda: json.dumps(answer_schemas(), indent=1) + "\n")
    return write_page(FOR_PROGRAMS, for_programs)


def answer_schemas() -> dict[str, Any]:
    """The JSON Schema of each command's answer, by the command's name; "refused" is that of an answer with errors."""
    forms: dict[str, type[Answer]] = {**ANSWERS, "refused": Answer}
    return {name: form.model_json_schema() for name, form in forms.items()}


def for_programs() -> str:
    """The page, with its tables as the forms are now."""
    text = FOR_PROGRAMS.read_text(encoding="utf-8")
    kept = text[: text.index(START) + len(START)]
    return kept + "\n" + "\n\n".join(_sections()) + "\n"


def _sections() -> Iterator[str]:
    seen: set[str] = set()
    yield "\n".join(
        ["## Every answer", "", *_table(Answer.model_json_schema()), *_parts(Answer.model_json_schema(), seen)]
    )
    common = Answer.model_fields.keys()
    for name, form in ANSWERS.items():
        schema = form.model_json_schema()
        own = {key: value for key, value in schema["properties"].items() if key not in common}
        about = form.__doc__ or ""
        rest = about.partition("`")[2].partition("`")[2].strip(" ;:.")
        note = [f"{rest[0].upper()}{rest[1:]}.", ""] if rest else []
        yield "\n".join([f"## cookbook {name}", "", *note, *_table({"properties": own}), *_parts(schema, seen)])


def _parts(schema: dict[str, Any], seen: set[str]) -> Iterator[str]:
    """Yield a table for each object in an answer that no earlier table has."""
    for name, part in schema.get("$defs", {}).items():
        if name not in seen and "properties" in part:
            seen.add(name)
            about = part.get("description", "")
            yield from ["", f"`{name}`:{about and f' {about[0].lower()}{about[1:]}'}", "", *_table(part)]


def _table(schema: dict[str, Any]) -> list[str]:
    rows = [
        f"| `{key}` | {_type(value)} | {' '.join(value.get('description', '').split())} |"
        for key, value in schema["properties"].items()
    ]
    return ["| key | type | |", "|---|---|---|", *rows]


def _type(value: dict[str, Any]) -> str:
    if "anyOf" in value:
        return " or ".join(map(_type, value["anyOf"]))
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"`{name}`"
    if "enum" in value:
        return ", ".join(json.dumps(choice) for choice in value["enum"])
    if value.get("type") == "array":
        return f"list of {_type(value['items'])}"
    return value.get("type", "any")
