"""One run per output folder: two would mix their lines and overwrite each other's checkpoints."""

import contextlib
import json
import os
import socket
import sys
import time
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path

from filelock import FileLock, Timeout

from cookbook.files import RecipeError

_held: list[FileLock] = []  # until the process ends; a lock that nobody refers to is released


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
    record = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    with contextlib.suppress(OSError):  # a full disk; it has the lock all the same
        path.write_text(json.dumps(record) + "\n", encoding="utf-8")


def release() -> None:
    """Gives back what this process holds; for a process that goes on after its run."""
    while _held:
        _held.pop().release()


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return f" by process {owner['pid']} on {owner['host']}, which started at {owner['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # it has the lock, and has not written who it is
