"""How a checkpoint comes to be and goes: whole or absent at every moment, whatever dies. No torch.

    checkpoints/
        LATEST                      the name of the newest
        step-00000100/
            manifest.json           every file with its size and digest; written last
            state.json              all that is not a tensor
            pieces-00000-of-00004.safetensors ...
        .saving-00000200-<attempt>/ not yet one

Processes meet in the folder alone: each writes its file, then a receipt; the main process, which leaves none,
waits for them, writes the manifest, flushes it to the disk and renames the folder.
"""

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from cookbook import faults

FORMAT = 1
MANIFEST, STATE, LATEST = "manifest.json", "state.json", "LATEST"
SAVING, TRASH = ".saving-", ".trash-"
NO_ROOM = '{"error": "it had no room even to say why"}'
"""What an empty receipt means."""
HURRIED_PATIENCE = 15.0
"""Seconds without progress after which a process is given up, if the save is lost anyway or the run is to end."""


class BrokenCheckpoint(Exception):
    """A checkpoint that is not whole; says what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose manifest was read and fits its files' sizes; `verify` reads them."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def pieces(self) -> list[Path]:
        """The files of tensors."""
        return [self.path / name for name in self.manifest["files"] if name.endswith(".safetensors")]

    def state(self) -> dict[str, Any]:
        """All that is not a tensor.

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


def pieces_name(rank: int, num_ranks: int) -> str:
    return f"pieces-{rank:05d}-of-{num_ranks:05d}.safetensors"


def write_file(path: Path, text: str) -> None:
    """Writes a small file that is there whole or not at all, and flushes it to the disk."""
    build = path.with_name(f".{path.name}.{os.getpid()}")
    with build.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(build, path)


def flush_folder(path: Path) -> None:
    """Flushes the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# One process's part of a save.


def write_receipt(build: Path, rank: int, record: dict[str, Any]) -> None:
    """Tells the main process that this process has written its file, or why it could not: {"error": ...}."""
    write_file(build / f"receipt-{rank:05d}.json", json.dumps(record))


def leave_empty_receipt(build: Path, rank: int) -> None:
    """Says that this process failed, without a block on the disk."""
    (build / f"receipt-{rank:05d}.json").touch()


def read_receipts(
    build: Path,
    own: dict[str, Any],
    num_ranks: int,
    *,
    patience_seconds: float,
    beat: Callable[[], None],
    is_hurried: Callable[[], bool],
) -> dict[str, dict[str, Any]]:
    """Waits for the receipts of the other processes, as long as their files grow: what all say, by file name.

    Args:
        own: the main process's receipt, which needs no file: a disk that refuses its part may refuse that too.
        patience_seconds: without progress, after which a process is given up.
        beat: called when files have grown, so that whoever watches this process does not take it for dead.
        is_hurried: whether this process was asked to stop. Then perhaps because another is dead, which will write no
            receipt.

    Raises:
        OSError: one of them could not write, or stopped writing.
    """
    files: dict[str, dict[str, Any]] = {}
    errors: list[str] = []
    size, grown_at = -1, time.monotonic()
    for rank in range(num_ranks):
        path = build / f"receipt-{rank:05d}.json"
        while rank > 0 and not path.exists():
            if not errors and not build.is_dir():
                raise OSError(f"{build} is gone")
            now_size = size_of(build)
            if now_size != size:
                size, grown_at = now_size, time.monotonic()
                beat()
            silent = time.monotonic() - grown_at
            if silent > (min(HURRIED_PATIENCE, patience_seconds) if errors or is_hurried() else patience_seconds):
                errors.append(f"process {rank} has written nothing for {silent:.0f} s, and did not finish its part")
                raise OSError("; ".join(errors))
            time.sleep(0.01)
        text = path.read_text(encoding="utf-8") if rank else ""
        record = own if rank == 0 else json.loads(text or NO_ROOM)
        if "error" in record:
            errors.append(f"process {rank}: {record['error']}")
        files |= record
    if errors:  # now that nobody writes into the folder any more
        raise OSError("; ".join(errors))
    return files


def size_of(build: Path) -> int:
    """Bytes of the files in a folder; 0 if it is not there."""
    with contextlib.suppress(OSError), os.scandir(build) as entries:
        return sum(entry.stat().st_size for entry in entries)
    return 0


def commit(build: Path, root: Path, manifest: dict[str, Any]) -> Checkpoint:
    """Makes a checkpoint of a folder in which all files lie; its name is not in LATEST yet. On the main process.

    Args:
        manifest: with `step`, `attempt` and `files`.
    """
    step = manifest["step"]
    for path in build.glob("receipt-*.json"):
        path.unlink()
    faults.at("save.before_manifest", step)
    write_file(build / MANIFEST, sealed({"format": FORMAT, **manifest}))
    flush_folder(build)
    faults.at("save.before_rename", step)
    final = root / folder_name(step)
    if final.exists() or final.is_symlink():
        _make_way(final, manifest["attempt"])
    os.rename(build, final)
    flush_folder(root)
    return Checkpoint(final, manifest)


def _make_way(path: Path, attempt: str) -> None:
    """What is broken goes; what is whole, of a run that went another way, keeps its bytes under another name."""
    try:
        open_checkpoint(path)
    except (BrokenCheckpoint, OSError):
        _discard(path)
    else:
        path.rename(_left(path, attempt))


def _left(path: Path, attempt: str) -> Path:
    return path.with_name(f"left-{path.name}-{attempt}")


def name_latest(root: Path, checkpoint: Checkpoint) -> None:
    """On the main process."""
    faults.at("save.before_latest", checkpoint.step)
    write_file(root / LATEST, checkpoint.path.name + "\n")
    flush_folder(root)
    faults.at("save.after_latest", checkpoint.step)


def sealed(manifest: dict[str, Any]) -> str:
    """The manifest with its own digest."""
    return json.dumps({**manifest, "seal": _seal(manifest)}, indent=1) + "\n"


def _seal(manifest: dict[str, Any]) -> str:
    text = json.dumps({key: value for key, value in manifest.items() if key != "seal"}, sort_keys=True)
    return xxhash.xxh3_128(text.encode()).hexdigest()


def digest_file(path: Path) -> str:
    """XXH3 with 128 bits: against flipped bits, not against forgery. Of safetensors the data comes before the header,
    in the order in which they are written.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else 0
        header = min(header, path.stat().st_size)  # of a damaged file it may be any number
        file.seek(header)
        while block := file.read(2**24):
            digest.update(block)
        file.seek(0)
        digest.update(file.read(header))
    return digest.hexdigest()


def verify(checkpoint: Checkpoint, *, rank: int = 0, num_ranks: int = 1) -> None:
    """Reads the files that fall to this process and compares their digests.

    Raises:
        BrokenCheckpoint: one differs.
    """
    for name in sorted(checkpoint.manifest["files"])[rank::num_ranks]:
        if digest_file(checkpoint.path / name) != checkpoint.manifest["files"][name]["digest"]:
            raise BrokenCheckpoint(f"{name} does not have the digest that it was written with")


# Reading.


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, as far as its manifest, its list of files and their sizes tell.

    Raises:
        BrokenCheckpoint: it is none, or not whole, or of another format.
    """
    manifest = path / MANIFEST
    if not path.is_dir():
        raise BrokenCheckpoint("no such folder")
    if not manifest.is_file() or manifest.is_symlink():  # of a pipe nobody would ever have read the end
        there = manifest.exists() or manifest.is_symlink()
        raise BrokenCheckpoint(f"{MANIFEST} is no plain file" if there else f"no {MANIFEST} in it")
    try:
        text = manifest.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BrokenCheckpoint(f"{MANIFEST}: {error}") from None
    try:
        found = json.loads(text)
        version, seal, step, files = found["format"], found["seal"], found["step"], found["files"]
        sizes = {str(name): int(record["bytes"]) for name, record in files.items()}
        is_sealed = seal == _seal(found)
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
    return Checkpoint(path, found)


def list_folders(root: Path) -> list[Path]:
    """Folders that are named as `folder_name` names them, whole or not, the newest first. A link to one elsewhere is
    one; other names are people's own, see `foreign_folders`.
    """
    steps = {path: step_of(path) for path in _folders(root)}
    return sorted((path for path in steps if steps[path] is not None), key=lambda path: steps[path] or 0, reverse=True)


def foreign_folders(root: Path) -> list[Path]:
    """Folders that look like a checkpoint and are named otherwise: copies and backups of people. Nobody resumes from
    them unasked, and nobody removes them.
    """
    return sorted(
        path
        for path in _folders(root)
        if not path.name.startswith((".", "left-")) and step_of(path) is None and (path / MANIFEST).is_file()
    )


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def step_of(path: Path) -> int | None:
    """The step that a folder's name says, or None for a name that `folder_name` does not give."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isascii() and number.isdecimal() and path.name == folder_name(int(number)) else None


def whole_checkpoints(root: Path) -> list[Checkpoint]:
    """Those whose manifest and sizes are right, the newest first."""
    found = []
    for path in list_folders(root):
        with contextlib.suppress(BrokenCheckpoint):
            found.append(open_checkpoint(path))
    return found


# Going.


def sweep(root: Path, attempt: str) -> None:
    """Removes what saves and removals that were cut short have left. On the main process.

    Args:
        attempt: of this start, whose saves stay: another process may have begun one.
    """
    if not root.is_dir():
        return
    for path in root.iterdir():
        if path.name.endswith(f"-{attempt}"):
            continue
        if path.name.startswith((SAVING, TRASH)) and not path.is_symlink() and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def sweep_before(build: Path, attempt: str) -> None:
    """Removes parts of this start's earlier saves, which came after these had been given up. On the main process, when
    all have done their part of this save: then nobody is at an earlier one.
    """
    for path in build.parent.glob(f"{SAVING}*-{attempt}"):
        if path.name < build.name:
            shutil.rmtree(path, ignore_errors=True)


def leave_later(root: Path, checkpoint: Checkpoint, attempt: str) -> list[Path]:
    """Renames what was saved after a checkpoint from which a run goes on, so that nobody takes it for the newest."""
    left = []
    for path in list_folders(root):
        if (step_of(path) or 0) > checkpoint.step:
            left.append(path.rename(_left(path, attempt)))
    return left


def _discard(path: Path) -> None:
    """Removes a checkpoint so that it is never there in half. Of a link to one, the link."""
    if path.is_symlink():
        path.unlink()
        return
    trash = path.with_name(f"{TRASH}{path.name}-{os.getpid()}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def best_first(whole: list[Checkpoint]) -> list[Checkpoint]:
    """Those that were evaluated, by the smallest `best_by` of the manifest, of equals the later first. A loss that is
    not finite is no evaluation.
    """
    rated = [(rating, -one.step, one) for one in whole if (rating := _rating(one)) is not None]
    return [one for *_, one in sorted(rated, key=lambda item: item[:2])]


def _rating(checkpoint: Checkpoint) -> float | None:
    found = checkpoint.manifest.get("best_by")
    return found if isinstance(found, int | float) and math.isfinite(found) else None


def prune(root: Path, *, keep_last: int, keep_best: int, keep: set[str]) -> None:
    """Removes whole checkpoints but the last, the best and those named. On the main process.

    Args:
        keep_best: how many of `best_first`.
        keep: names of folders.
    """
    whole = whole_checkpoints(root)
    kept = keep | {checkpoint.path.name for checkpoint in (*whole[:keep_last], *best_first(whole)[:keep_best])}
    for checkpoint in whole:
        if checkpoint.path.name not in kept:
            _discard(checkpoint.path)
