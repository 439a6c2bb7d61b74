"""Locks of files. One run per output folder: two would mix their lines and overwrite each other's checkpoints. And what
several processes need is made by one of them, while the others wait.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cookbook import faults
from cookbook.files import RecipeError

LOOK_SECONDS = 0.1
"""Between two tries to get a lock that another process has."""

_held: list[FileLock] = []  # until the process ends; a lock that nobody refers to is released
_making: list[Path] = []
_waited: Path | None = None


def hold(folder: Path) -> None:
    """Takes the lock of an output folder for the rest of this process's life. On the main process, before anything
    under the folder is touched.

    The kernel holds it (flock), so that of a dead process it is free, whatever killed it. It lies beside the folder and
    survives that the folder is renamed.

    Raises:
        RecipeError: another process has it; names that process. Or nothing can be written there.
    """
    folder = folder.resolve()  # however it is written, and through links
    path = folder.parent / f".{folder.name}.lock"
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise RecipeError([f"run.output_dir {folder} is in use{_owner(path)}; wait, or name another"]) from None
    except OSError as error:
        if error.errno in (ENOSYS, EOPNOTSUPP, ENOLCK):
            print(f"{path}: this file system has no locks; nothing keeps a second run out of {folder}", file=sys.stderr)
            return
        raise RecipeError([f"run.output_dir {folder}: cannot write to {folder.parent} ({error.strerror})"]) from None
    _held.append(lock)
    _sign(path)


def release() -> None:
    """Gives back what this process holds; for a process that goes on after its run."""
    while _held:
        _held.pop().release()


@contextlib.contextmanager
def making(path: Path) -> Iterator[None]:
    """Holds the lock `path` while this process makes, or finds made, what several need. Whoever else wants it waits,
    which `cookbook.watch` bears as long as `give_signs` is called here.
    """
    global _waited
    lock = FileLock(path)
    _waited = path
    try:
        lock.acquire(poll_interval=LOOK_SECONDS)
    finally:
        _waited = None
    try:
        _sign(path)
        _making.append(path)
        faults.at("lock.held", 0)
        yield
    finally:
        if path in _making:
            _making.remove(path)
        lock.release()


def give_signs() -> None:
    """Tells those who wait for what this process makes that it gets on. Any thread may."""
    for path in list(_making):
        with contextlib.suppress(OSError):
            os.utime(path)


def sign_of_waited() -> int | None:
    """Of the lock that this process waits for: another number after each sign of its holder. None if for none."""
    path = _waited
    if path is None:
        return None
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def owner_of_waited() -> dict[str, Any] | None:
    """The lock that this process waits for: its `path`, and who has it, as the end of a sentence. None if for none."""
    path = _waited
    return None if path is None else {"path": str(path), "owner": _owner(path)}


def _sign(path: Path) -> None:
    record = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    with contextlib.suppress(OSError):  # a full disk; it has the lock all the same
        path.write_text(json.dumps(record) + "\n", encoding="utf-8")


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return f" by process {owner['pid']} on {owner['host']}, since {owner['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # it has the lock, and has not written who it is
