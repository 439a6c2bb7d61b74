"""`--json`: one JSON object on stdout and nothing else there, with mistakes and warnings as objects."""

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from cookbook.commands.shared.answer_forms import Answer, Message
from cookbook.config.recipe import Recipe, read_recipe
from cookbook.system.console import heard_by, say
from cookbook.system.files import RecipeError, read_document

FLAG = "--json"
OPTION = re.compile(r"(--(?!set\b)[\w-]+|[A-Z]+)(?=:? )")
ASSIGNED = re.compile(r"--set ([\w.]+)(?:=.*?(?=: ))?(?:: )?")
FILE = re.compile(r"([^:]+?)(?::(\d+))?(?: under [^:]+)?: ")
KEY = re.compile(r"([a-z]\w*(?:\.\w+)*)(?=: | is | has | and )")
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\([^()]*\)")


@dataclass
class _JsonCommand:
    """A command whose words ask for JSON, as far as it has got."""

    words: Sequence[str]
    answer: Answer | None = None
    mistakes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


_asked: _JsonCommand | None = None


def answer(values: Answer) -> int:
    """Give the answer of a command that was asked for JSON. Returns its exit code, 0."""
    assert _asked is not None, f"without {FLAG}"
    _asked.answer = values
    return 0


def report_mistakes(mistakes: list[str]) -> None:
    """Report the mistakes that end a command: on stderr, or to a program."""
    if _asked is not None:
        _asked.mistakes += mistakes
    else:
        for text in mistakes:
            say(text, file=sys.stderr)


def warn(text: str) -> None:
    """Report what works, and may not be what the user wants."""
    if _asked is not None:
        _asked.warnings.append(text)
    else:
        say(f"warning: {text}")


@contextmanager
def answer_program(words: Sequence[str]) -> Iterator[None]:
    """Print what a command answers a program, if its words ask for that; what it says on stderr is a warning then."""
    global _asked
    if FLAG not in words:
        yield
        return
    asked = _asked = _JsonCommand(words)

    def listen(text: str, is_on_stderr: bool) -> None:
        if is_on_stderr:
            asked.warnings.append(text)

    try:
        with _stdout_kept(), heard_by(listen):
            yield
        messages = {
            "errors": [as_object(text) for text in asked.mistakes],
            "warnings": [as_object(text) for text in dict.fromkeys(asked.warnings)],
        }
    finally:
        _asked = None
    given = (asked.answer or Answer()).model_copy(update=messages)
    say(json.dumps(_finite(given.model_dump(mode="json", exclude_unset=asked.answer is None)), indent=1), flush=True)


@contextmanager
def _stdout_kept() -> Iterator[None]:
    """Send to stderr what libraries print, from C too."""
    with redirect_stdout(sys.stderr):
        kept = None
        with suppress(OSError):
            kept = os.dup(1)
            os.dup2(2, 1)
        try:
            yield
        finally:
            if kept is not None:
                os.dup2(kept, 1)
                os.close(kept)


def _finite(value: Any) -> Any:
    """A value in which null stands for numbers that JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_object(text: str) -> Message:
    """A mistake or a warning, taken apart by the form that all have: `place: what is wrong; what to write instead`."""
    rest, file, line, key = text, None, None, None
    if (match := ASSIGNED.match(rest)) or (match := OPTION.match(rest)):
        key, rest = match[1], rest[match.end() :]
    elif (match := FILE.match(rest)) and _is_file(match[1]):
        file, line, rest = match[1], int(match[2]) if match[2] else None, rest[match.end() :]
    named = KEY.match(rest)
    if named is not None and (_is_key(named[1]) or (line is not None and key is None)):
        key, rest = named[1], rest[named.end() :]
    masked = QUOTED.sub(lambda match: "x" * len(match[0]), rest)  # a semicolon in them ends nothing
    end = re.search("; ", masked) or re.search(r"\. (?=[A-Z])", masked)
    problem, instead = (rest, None) if end is None else (rest[: end.start()], rest[end.end() :])
    value = _value(file, key, () if _asked is None else _asked.words)
    return Message(text=text, file=file, line=line, key=key, value=value, problem=problem.strip(": "), instead=instead)


def _is_key(name: str) -> bool:
    return name.partition(".")[0] in Recipe.model_fields


def _is_file(name: str) -> bool:
    """Return whether a name at the beginning of a message is that of a file, which may not be there."""
    return Path(name).exists() or (" is " not in name and not _is_key(name) and bool(re.search(r"[./]", name)))


def _value(file: str | None, key: str | None, words: Sequence[str]) -> Any:
    """The value that a key has on the command line or in a file; None where it has none."""
    if key is None or key.startswith("--"):
        return next((word for flag, word in pairwise(words) if flag == key), None)
    assigned = [word.partition("=")[2] for flag, word in pairwise(words) if flag == "--set" and f"{key}=" in word]
    with suppress(yaml.YAMLError, RecipeError, OSError):
        if assigned:
            return yaml.safe_load(assigned[-1])
        if file is not None and Path(file).is_file():
            value = _value_in(read_document(Path(file)).values, key)
            return _value_in(read_recipe(Path(file)).values, key) if value is None else value
    return None


def _value_in(values: Any, key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    for part in key.split("."):
        if isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            values = values.get(part) if isinstance(values, dict) else None
    return values
