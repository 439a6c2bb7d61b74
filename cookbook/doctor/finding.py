"""What a check says: fine, fine with a surprise, or in the way of a run; with what to do about it."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failure"]
EXIT_CODES: dict[Status, int] = {"ok": 0, "warning": 1, "failure": 2}


@dataclass(frozen=True, kw_only=True)
class Finding:
    check: str
    """One word, the same for all that a check says."""
    status: Status
    says: str
    remedy: str = ""
    """A command, or what to write where; never empty but for ok."""


def ok(check: str, says: str) -> Finding:
    return Finding(check=check, status="ok", says=says)


def warning(check: str, says: str, remedy: str) -> Finding:
    return Finding(check=check, status="warning", says=says, remedy=remedy)


def failure(check: str, says: str, remedy: str) -> Finding:
    return Finding(check=check, status="failure", says=says, remedy=remedy)


def worst(findings: list[Finding]) -> Status:
    return max((finding.status for finding in findings), key=EXIT_CODES.__getitem__, default="ok")


def in_bytes(count: float) -> str:
    """A size as one says it: 3.2 GiB, 64 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 10 or count == int(count) else f"{count:.1f} {unit}"
