"""Reads what a command prints with --json, and holds it against the schema that docs/for_programs.json promises."""

import json
from functools import cache
from typing import Any

import jsonschema
from conftest import ROOT


@cache
def schemas() -> dict[str, Any]:
    return json.loads((ROOT / "docs/for_programs.json").read_text())


def documented(command: str, printed: str, *, is_refused: bool = False) -> dict[str, Any]:
    """The one object of what a command has printed.

    Args:
        is_refused: the command ended with mistakes.
    """
    answer = json.loads(printed)
    assert bool(answer["errors"]) == is_refused, answer["errors"]
    is_whole = answer.keys() != {"errors", "warnings"}
    jsonschema.validate(answer, schemas()[command if is_whole else "refused"])
    assert is_whole or is_refused, f"{command} has answered nothing"
    return answer
