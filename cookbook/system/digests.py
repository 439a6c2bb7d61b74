"""Digests of large files, cached by path, size and modification time. No torch."""

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from cookbook.system.record_files import read_json, replace_file

CACHE_FILE = "digests.json"


def sha256_of(paths: Iterable[Path], *, cache: Path | None = None) -> dict[Path, str]:
    """The SHA-256 of each file; about a second per gigabyte that is not in the folder `cache`."""
    known: dict[str, str] = read_json(cache / CACHE_FILE) if cache is not None else {}
    if not all(isinstance(value, str) and len(value) == 64 for value in known.values()):
        known = {}
    digests = {}
    for path in paths:
        file = path.resolve()
        stat = file.stat()
        key = f"{file}|{stat.st_size}|{stat.st_mtime_ns}"
        if key not in known:
            with file.open("rb") as content:
                # Not the name of a blob in the Hub's cache, which is its digest: a damaged blob keeps its name.
                known[key] = hashlib.file_digest(content, "sha256").hexdigest()
        digests[path] = known[key]
    if cache is not None:
        with contextlib.suppress(OSError):  # the cache only saves time
            cache.mkdir(parents=True, exist_ok=True)
            replace_file(cache / CACHE_FILE, json.dumps(known, indent=1) + "\n")
    return digests
