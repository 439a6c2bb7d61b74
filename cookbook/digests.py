"""Digests of large files, each read to its end once: then its size and the time of its last change stand for it.

No torch.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

FILE = "digests.json"
"""In the cache."""


def sha256_of(paths: Iterable[Path], *, cache: Path | None = None) -> dict[Path, str]:
    """The SHA-256 of each file's content, about a second a gigabyte for what is not known yet.

    Args:
        cache: folder that remembers them. Without it all are read.
    """
    known, found = _read(cache), {}
    for path in paths:
        file = path.resolve()
        stat = file.stat()
        key = f"{file}|{stat.st_size}|{stat.st_mtime_ns}"
        if key not in known:
            with file.open("rb") as content:
                known[key] = hashlib.file_digest(content, "sha256").hexdigest()
        found[path] = known[key]
    if cache is not None:
        _write(cache, known)
    return found


def _read(cache: Path | None) -> dict[str, str]:
    try:
        known = json.loads((cache / FILE).read_text(encoding="utf-8")) if cache is not None else {}
    except (OSError, ValueError, RecursionError):
        return {}
    is_good = isinstance(known, dict) and all(isinstance(value, str) and len(value) == 64 for value in known.values())
    return known if is_good else {}


def _write(cache: Path, known: dict[str, str]) -> None:
    build = cache / f".{FILE}.{os.getpid()}"
    with contextlib.suppress(OSError):  # it saves time, and nothing else
        cache.mkdir(parents=True, exist_ok=True)
        build.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        build.replace(cache / FILE)
