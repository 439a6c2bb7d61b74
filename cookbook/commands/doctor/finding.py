"""The result of a check: ok, warning or failure, with a remedy."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failure"]
EXIT_CODES: dict[Status, int] = {"ok": 0, "warning": 1, "failure": 2}


@dataclass(frozen=True, kw_only=True)
class Finding:
    check: str
    """One word, the same for all findings of a check."""
    status: Status
    text: str
    remedy: str = ""
    """A command, or what to write where; empty for ok alone."""


def ok(check: str, text: str) -> Finding:
    return Finding(check=check, status="ok", text=text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check=check, status="warning", text=text, remedy=remedy)


def failure(check: str, text: str, remedy: str) -> Finding:
    return Finding(check=check, status="failure", text=text, remedy=remedy)
