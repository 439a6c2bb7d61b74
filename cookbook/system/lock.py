"""File locks: for one run per output folder, and for results that one process makes while others wait."""

import contextlib
import hashlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cookbook.system import faults
from cookbook.system.console import say
from cookbook.system.files import RecipeError

RETRY_SECONDS = 0.1
"""Between two attempts to take a lock."""
NO_LOCKS = (ENOSYS, EOPNOTSUPP, ENOLCK)
"""Errors of a file system without locks."""

_held_locks: list[FileLock] = []  # a lock without references is released
_making: list[Path] = []
_waited: Path | None = None


def hold(folder: Path, seconds: float = 0) -> None:
    """Locks an output folder until this process ends. On the main process, before it touches the folder.

    Args:
        seconds: how long another process that holds the lock is waited for.

    Without it two runs would mix their metrics and overwrite each other's checkpoints. The kernel releases it (flock)
    however the process dies. It is next to the folder, so it survives renaming the folder.

    Raises:
        RecipeError: another process, which is named, holds the lock; or the parent folder is not writable.
    """
    folder, path = folder.resolve(), _path(folder)
    lock = FileLock(path, timeout=seconds, fallback_to_soft=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(poll_interval=RETRY_SECONDS)
    except Timeout:
        raise RecipeError(f"run.output_dir {folder} is in use{_owner(path)}; wait, or name another") from None
    except OSError as error:
        if error.errno in NO_LOCKS:
            say(f"{path}: this file system has no locks; nothing keeps a second run out of {folder}", file=sys.stderr)
        else:
            problem = f"cannot write to {folder.parent} ({error.strerror})"
            raise RecipeError(f"run.output_dir {folder}: {problem}") from None
    else:
        _held_locks.append(lock)
    _sign(path)


def wait_for(folder: Path, seconds: float) -> None:
    """Wait until no process holds a folder.

    Raises:
        RecipeError: as `hold`.
    """
    count = len(_held_locks)
    hold(folder, seconds)
    while len(_held_locks) > count:
        _held_locks.pop().release()


def signature(folder: Path) -> str:
    """The text that the holder of an output folder wrote next to it; empty if this machine sees nothing there."""
    try:
        return _path(folder).read_text(encoding="utf-8")
    except OSError:
        return ""


def _path(folder: Path) -> Path:
    folder = folder.resolve()  # one lock for all spellings and links
    return folder.parent / f".{folder.name}.lock"


@contextlib.contextmanager
def making(path: Path) -> Iterator[None]:
    """Holds the lock `path` while this process makes a shared result or finds it made; others wait.

    On a file system without locks only processes of this machine wait. Waiting counts as progress for
    `cookbook.system.watchdog` as long as the holder calls `give_signs`.
    """
    lock, path = _acquire(path)
    try:
        _sign(path)
        _making.append(path)
        faults.at(f"{path.name.partition('-')[0]}.held", 0)
        yield
    finally:
        if path in _making:
            _making.remove(path)
        lock.release()


def _acquire(path: Path) -> tuple[FileLock, Path]:
    """A lock once this process holds it, and its file, which is not `path` on a file system without locks."""
    try:
        return _wait_for(path), path
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    whose = hashlib.sha256(f"{os.getuid()} {path.resolve()}".encode()).hexdigest()[:16]
    of_machine = Path(tempfile.gettempdir()) / f"{path.stem}-{whose}.lock"
    try:
        return _wait_for(of_machine), of_machine
    except OSError as error:
        where = f"{path.parent} cannot lock files, nor can {of_machine.parent} ({error.strerror})"
        raise RecipeError(f"{where}; let TMPDIR name a folder of a local disk") from None


def _wait_for(path: Path) -> FileLock:
    global _waited
    lock, _waited = FileLock(path, fallback_to_soft=False), path
    try:
        lock.acquire(poll_interval=RETRY_SECONDS)
    finally:
        _waited = None
    return lock


def give_signs() -> None:
    """Signals progress to the processes that wait for a lock of this one. Thread-safe."""
    for path in list(_making):
        with contextlib.suppress(OSError):
            os.utime(path)


def sign_of_waited() -> int | None:
    """A number that changes with each sign of the holder of the lock that this process waits for; None if none."""
    try:
        return None if _waited is None else _waited.stat().st_mtime_ns
    except OSError:
        return 0


def owner_of_waited() -> dict[str, Any] | None:
    """The lock that this process waits for: its `path`, and its `owner` as the end of a sentence; None if none."""
    path = _waited
    return None if path is None else {"path": str(path), "owner": _owner(path)}


def _sign(path: Path) -> None:
    record = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    with contextlib.suppress(OSError):  # on a full disk the lock still holds
        path.write_text(json.dumps(record) + "\n", encoding="utf-8")


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return f" by process {owner['pid']} on {owner['host']}, since {owner['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # the owner has not written its identity yet
