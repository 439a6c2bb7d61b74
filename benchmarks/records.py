"""Common parts of benchmarks' records: which rows may stand together in one, the processor, how it is written."""

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def differences(recorded: dict[str, Any], new: dict[str, Any], keys: Iterable[str]) -> list[str]:
    """How new figures differ from recorded ones in machine, versions and the like; none where they may stand together.

    Args:
        recorded: without a key, there is nothing of it that new figures could differ from.
        keys: of what has to be the same.
    """
    changes = []
    for key in keys:
        old, now = recorded.get(key), new[key]
        if isinstance(old, dict) and isinstance(now, dict):
            for name in dict.fromkeys([*old, *now]):
                if old.get(name) != now.get(name):
                    changes.append(f"{key}: {name} is {now.get(name)}, in the record {old.get(name)}")
        elif old not in (None, now):
            changes.append(f"{key} is {now}, in the record {old}")
    return changes


def dump(value: Any, margin: str = "") -> str:
    """JSON with a line for each row, so that a new run reads as a difference of these."""
    line = json.dumps(value)
    if len(line) < 500 or not isinstance(value, dict | list):
        return line
    inner, (begin, end) = margin + " ", "{}" if isinstance(value, dict) else "[]"
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {dump(item, inner)}" for key, item in value.items()]
    else:
        parts = [dump(item, inner) for item in value]
    return f"{begin}\n{inner}" + f",\n{inner}".join(parts) + f"\n{margin}{end}"


def processor() -> str:
    """Its name."""
    path = Path("/proc/cpuinfo")
    names = (
        (line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("model name"))
        if path.exists()
        else ()
    )
    return next((line.split(":", 1)[1].strip() for line in names), platform.machine())
