"""Reads what a command prints with --json, and holds it against the schema that docs/for_programs.json promises."""

import json
from functools import cache
from typing import Any

import jsonschema
from conftest import ROOT


@cache
def schemas() -> dict[str, Any]:
    return json.loads((ROOT / "docs/for_programs.json").read_text())


@cache
def validator(command: str) -> jsonschema.protocols.Validator:
    """Made once: to look whether a schema is one takes 20 ms."""
    schema = schemas()[command]
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


def documented(command: str, printed: str, *, is_refused: bool = False) -> dict[str, Any]:
    """The one object of what a command has printed.

    Args:
        is_refused: the command ended with mistakes.
    """
    answer = json.loads(printed)
    assert bool(answer["errors"]) == is_refused, answer["errors"]
    is_whole = answer.keys() != {"errors", "warnings"}
    validator(command if is_whole else "refused").validate(answer)
    assert is_whole or is_refused, f"{command} has answered nothing"
    return answer
