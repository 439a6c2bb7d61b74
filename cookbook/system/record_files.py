"""JSON files that one process writes while others read them, or that a crash may cut."""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

METRICS, EVENTS, SAMPLES, RUN = "metrics.jsonl", "events.jsonl", "samples.jsonl", "run.json"
"""Names of files in a run's folder."""
ROUNDS = "rounds.json"
"""File of the rounds in the folder of `cookbook rounds`."""


def replace_file(path: Path, text: str, *, flush: bool = False) -> None:
    """Write a small file atomically.

    Args:
        flush: also wait until it is on the disk.

    Raises:
        OSError: it could not be written, and is as it was.
    """
    build = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with build.open("w", encoding="utf-8") as file:
            file.write(text)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.replace(build, path)
    except OSError:
        with contextlib.suppress(OSError):
            build.unlink(missing_ok=True)
        raise


def new_file(path: Path, text: str) -> None:
    """Write a file for the user, whole or not at all.

    Raises:
        FileExistsError: there is one by now, which stays as it is.
        OSError: it could not be written.
    """
    build = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        build.write_text(text, encoding="utf-8")
        try:
            os.link(build, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    finally:
        with contextlib.suppress(OSError):
            build.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if it is missing or damaged."""
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else None  # to open a pipe waits without end
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path, number: str | None = "step") -> list[dict[str, Any]]:
    """`parse_lines` of a file; none if it is missing."""
    try:
        return parse_lines(path.read_bytes().splitlines(), number) if path.is_file() else []
    except OSError:
        return []


def parse_lines(lines: Iterable[bytes], number: str | None = "step") -> list[dict[str, Any]]:
    """The objects of JSON lines; one that is not whole, as the last of a running run may be, is left out.

    Args:
        number: what every line must have; None: anything.
    """
    values = []
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and (number is None or isinstance(value.get(number), int | float)):
            values.append(value)
    return values


def seal_of(record: dict[str, Any]) -> str:
    """XXH3 with 128 bits of a record without its own `seal`: against damage, not against forgery."""
    text = json.dumps({key: value for key, value in record.items() if key != "seal"}, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())
