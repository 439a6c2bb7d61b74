"""The life of a checkpoint on disk: complete or absent at every moment, whatever process dies. No torch.

    checkpoints/
        LATEST                      the name of the newest
        step-00000100/
            manifest.json           every file with its size and digest; written last
            state.json              everything that is not a tensor
            pieces-00000-of-00004.safetensors ...
        .saving-00000200-<attempt>/ a save in progress

Ranks synchronize through the folder alone: each writes its file, then a receipt. Rank 0, which needs no receipt, waits
for them, writes the manifest, flushes it to the disk and renames the folder.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from cookbook.system import faults
from cookbook.system.record_files import replace_file, seal_of

FORMAT = 1
MANIFEST, STATE, LATEST = "manifest.json", "state.json", "LATEST"
SAVING, TRASH = ".saving-", ".trash-"
NO_ROOM = '{"error": "the disk had no room even for the reason"}'
"""Meaning of an empty receipt."""
BLOCK = 2**19
"""Bytes that are hashed at a time: what was read is still in the core's cache, where hashing takes a sixth of reading's
time. A thread that reads ahead takes longer; the system reads ahead of both.
"""
SHORT_TIMEOUT_SECONDS = 15.0
"""Limit without progress once the save has failed anyway, or the run is to stop."""


class BrokenCheckpoint(Exception):
    """A checkpoint that is incomplete or damaged, with the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose manifest and file sizes are right; `verify` compares digests."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def pieces(self) -> list[Path]:
        """The files of tensors."""
        return [self.path / name for name in self.manifest["files"] if name.endswith(".safetensors")]

    def is_in(self, root: Path) -> bool:
        """Return whether the folder is one of a run's `checkpoints/`, where it may be a link to another disk."""
        return self.path.parent.resolve() == root.resolve()

    def state(self) -> dict[str, Any]:
        """Everything that is not a tensor.

        Raises:
            BrokenCheckpoint: it cannot be read.
        """
        try:
            state = json.loads((self.path / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BrokenCheckpoint(f"{STATE}: {error}") from None
        if not isinstance(state, dict):
            raise BrokenCheckpoint(f"{STATE} is damaged")
        return state


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def flush_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def receipt_path(build: Path, rank: int) -> Path:
    """The file in which a rank records that it has written its part, or why it could not: {"error": ...}."""
    return build / f"receipt-{rank:05d}.json"


def read_receipts(
    build: Path,
    own: dict[str, Any],
    num_ranks: int,
    *,
    timeout_seconds: float,
    beat: Callable[[], None],
    stop_requested: Callable[[], bool],
) -> dict[str, dict[str, Any]]:
    """Wait for the receipts of the other ranks, as long as their files grow; merges them by file name.

    Args:
        own: rank 0's receipt, which stays in memory: a disk that refuses its file may refuse a receipt too.
        timeout_seconds: limit without progress.
        beat: heartbeat for the watchdog, called when files have grown.
        stop_requested: whether this process was asked to stop. The reason may be that another rank died, and a dead
            rank writes no receipt.

    Raises:
        OSError: a rank could not write, or stopped writing.
    """
    files: dict[str, dict[str, Any]] = {}
    errors: list[str] = []
    size, grown_at = -1, time.monotonic()
    for rank in range(num_ranks):
        path = receipt_path(build, rank)
        while rank > 0 and not path.exists():
            if not errors and not build.is_dir():
                raise OSError(f"{build} is gone")
            now_size = size_of(build)
            if now_size != size:
                size, grown_at = now_size, time.monotonic()
                beat()
            silent = time.monotonic() - grown_at
            is_short = errors or stop_requested()
            if silent > (min(SHORT_TIMEOUT_SECONDS, timeout_seconds) if is_short else timeout_seconds):
                errors.append(f"process {rank} has written nothing for {silent:.0f} s, and did not finish its part")
                raise OSError("; ".join(errors))
            time.sleep(0.01)
        text = path.read_text(encoding="utf-8") if rank else ""
        record = own if rank == 0 else json.loads(text or NO_ROOM)
        if "error" in record:
            errors.append(f"process {rank}: {record['error']}")
        files |= record
    if errors:  # raised only here, when no rank writes into the folder any more
        raise OSError("; ".join(errors))
    return files


def size_of(build: Path) -> int:
    """Bytes of the files in a folder; 0 if it does not exist."""
    with contextlib.suppress(OSError), os.scandir(build) as entries:
        return sum(entry.stat().st_size for entry in entries)
    return 0


def commit(build: Path, root: Path, manifest: dict[str, Any]) -> Checkpoint:
    """Turn a folder with all files into a checkpoint, which LATEST does not name yet. Rank 0 calls.

    Args:
        manifest: with `step`, `attempt` and `files`.
    """
    step = manifest["step"]
    for path in build.glob("receipt-*.json"):
        path.unlink()
    faults.at("save.before_manifest", step)
    replace_file(build / MANIFEST, seal_manifest({"format": FORMAT, **manifest}), flush=True)
    flush_folder(build)
    faults.at("save.before_rename", step)
    final = root / folder_name(step)
    if final.exists() or final.is_symlink():
        _make_way(final, manifest["attempt"])
    os.rename(build, final)
    flush_folder(root)
    return Checkpoint(final, manifest)


def _make_way(path: Path, attempt: str) -> None:
    """Remove a broken checkpoint; rename a complete one, which a run that was resumed from earlier has left."""
    try:
        open_checkpoint(path)
    except (BrokenCheckpoint, OSError):
        _discard(path)
    else:
        path.rename(_path_aside(path, attempt))


def _path_aside(path: Path, attempt: str) -> Path:
    return path.with_name(f"left-{path.name}-{attempt}")


def name_latest(root: Path, checkpoint: Checkpoint) -> None:
    """Point LATEST to a checkpoint. Rank 0 calls."""
    faults.at("save.before_latest", checkpoint.step)
    replace_file(root / LATEST, checkpoint.path.name + "\n", flush=True)
    flush_folder(root)
    faults.at("save.after_latest", checkpoint.step)


def seal_manifest(manifest: dict[str, Any]) -> str:
    """The manifest as JSON, with its own digest as `seal`."""
    return json.dumps({**manifest, "seal": seal_of(manifest)}, indent=1) + "\n"


@contextlib.contextmanager
def hold_checkpoint(path: Path) -> Iterator[None]:
    """While it lasts, no run removes this checkpoint to make room for newer ones: a shared lock of the kernel, which
    `prune` respects. Does nothing on a file system without locks, or if there is no such folder.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _is_held(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def digest_file(path: Path) -> str:
    """XXH3 with 128 bits: against flipped bits, not against forgery. Of a safetensors file the data is hashed before
    the header, the order in which they are written.
    """
    # SHA-256 takes 15 times as long on a core, and without a signature protects no better.
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        header = 8 + int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else 0
        header = min(header, path.stat().st_size)  # any number in a damaged file
        file.seek(header)
        block = memoryview(bytearray(BLOCK))
        while count := file.readinto(block):
            digest.update(block[:count])
        file.seek(0)
        digest.update(file.read(header))
    return digest.hexdigest()


def verify(checkpoint: Checkpoint, *, rank: int = 0, num_ranks: int = 1) -> None:
    """Compare the digests of this rank's share of the files.

    Raises:
        BrokenCheckpoint: one differs.
    """
    for name in sorted(checkpoint.manifest["files"])[rank::num_ranks]:
        if digest_file(checkpoint.path / name) != checkpoint.manifest["files"][name]["digest"]:
            raise BrokenCheckpoint(f"{name} does not have the digest that it was written with")


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest, and check names and sizes of its files.

    Raises:
        BrokenCheckpoint: it is missing, incomplete, or of another format.
    """
    manifest = path / MANIFEST
    if not path.is_dir():
        raise BrokenCheckpoint("no such folder")
    if not manifest.is_file() or manifest.is_symlink():  # reading a pipe would never end
        there = manifest.exists() or manifest.is_symlink()
        raise BrokenCheckpoint(f"{MANIFEST} is no plain file" if there else f"no {MANIFEST} in it")
    try:
        text = manifest.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BrokenCheckpoint(f"{MANIFEST}: {error}") from None
    try:
        content = json.loads(text)
        version, seal, step, files = content["format"], content["seal"], content["step"], content["files"]
        sizes = {str(name): int(record["bytes"]) for name, record in files.items()}
        is_sealed = seal == seal_of(content)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise BrokenCheckpoint(f"{MANIFEST} is damaged") from None
    if version != FORMAT:
        raise BrokenCheckpoint(f"its format is {version!r}, and this program reads {FORMAT}")
    if not is_sealed:
        raise BrokenCheckpoint(f"{MANIFEST} is damaged: it does not have the digest that it names")
    if step_of(path) not in (None, step):
        raise BrokenCheckpoint(f"it is named {path.name}, and {MANIFEST} says step {step}")
    for name, size in sizes.items():
        if Path(name).name != name:
            raise BrokenCheckpoint(f"{MANIFEST} names {name!r}, which is not a file of this folder")
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise BrokenCheckpoint(f"{name} is missing")
        if file.stat().st_size != size:
            raise BrokenCheckpoint(f"{name} has {file.stat().st_size} bytes, and {size} were written")
    return Checkpoint(path, content)


def list_folders(root: Path) -> list[Path]:
    """Folders with a name of `folder_name`, broken or not, and links to folders with such a name; the newest first."""
    steps = {path: step for path in _folders(root) if (step := step_of(path)) is not None}
    return sorted(steps, key=steps.__getitem__, reverse=True)


def foreign_folders(root: Path) -> list[Path]:
    """Checkpoints under other names: copies and backups of users. They are never removed, and resumed from only if
    `run.resume` names them.
    """
    return sorted(
        path
        for path in _folders(root)
        if not path.name.startswith((".", "left-")) and step_of(path) is None and (path / MANIFEST).is_file()
    )


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def step_of(path: Path) -> int | None:
    """The step in a folder's name, or None if `folder_name` does not give such a name."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isascii() and number.isdecimal() and path.name == folder_name(int(number)) else None


def whole_checkpoints(root: Path) -> list[Checkpoint]:
    """Checkpoints whose manifest and sizes are right, the newest first."""
    checkpoints = []
    for path in list_folders(root):
        with contextlib.suppress(BrokenCheckpoint):
            checkpoints.append(open_checkpoint(path))
    return checkpoints


def sweep_unfinished(root: Path, attempt: str) -> None:
    """Remove the remains of interrupted saves and removals. Rank 0 calls.

    Args:
        attempt: id of this start, whose saves stay: another rank may have begun one.
    """
    if not root.is_dir():
        return
    for path in root.iterdir():
        if path.name.endswith(f"-{attempt}"):
            continue
        if path.name.startswith((SAVING, TRASH)) and not path.is_symlink() and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def sweep_before(build: Path, attempt: str) -> None:
    """Remove files of this start's earlier saves that arrived after those had been given up. Rank 0 calls, when all
    ranks have finished their part of this save: then none is writing an earlier one.
    """
    for path in build.parent.glob(f"{SAVING}*-{attempt}"):
        if path.name < build.name:
            shutil.rmtree(path, ignore_errors=True)


def leave_later(root: Path, checkpoint: Checkpoint, attempt: str) -> list[Path]:
    """Rename what was saved after the checkpoint that a run resumes from, so that it is not taken for the newest."""
    later = [path for path in list_folders(root) if (step_of(path) or 0) > checkpoint.step]
    return [path.rename(_path_aside(path, attempt)) for path in later]


def _discard(path: Path) -> None:
    """Remove a checkpoint, renaming it first so that no half of it is ever seen; of a link only the link."""
    if path.is_symlink():
        path.unlink()
        return
    trash = path.with_name(f"{TRASH}{path.name}-{os.getpid()}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def best_first(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Checkpoints with a finite `best_by` in their manifest, the smallest first; of equals the later first."""
    ratings = [(checkpoint.manifest.get("best_by"), -checkpoint.step, checkpoint) for checkpoint in checkpoints]
    rated = [row for row in ratings if isinstance(row[0], int | float) and abs(row[0]) < math.inf]
    return [checkpoint for *_, checkpoint in sorted(rated, key=lambda row: row[:2])]


def prune(root: Path, *, keep_last: int, keep_best: int, keep: set[str]) -> None:
    """Remove complete checkpoints except the last, the best, those named, and those that somebody reads, whose turn
    comes with a later save. Rank 0 calls.

    Args:
        keep_best: how many of `best_first`.
        keep: names of folders.
    """
    checkpoints = whole_checkpoints(root)
    kept = keep | {
        checkpoint.path.name for checkpoint in (*checkpoints[:keep_last], *best_first(checkpoints)[:keep_best])
    }
    for checkpoint in checkpoints:
        if checkpoint.path.name not in kept and not _is_held(checkpoint.path):
            _discard(checkpoint.path)
