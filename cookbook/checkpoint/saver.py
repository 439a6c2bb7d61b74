"""Saves: every process writes what it holds, and the main process makes a checkpoint of it."""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cookbook import faults
from cookbook.checkpoint import folder
from cookbook.checkpoint.tensors import Piece, StagedPiece, room_for, write_pieces

RECEIPT_SECONDS = 10.0
"""For which a process tries to tell that it could not save. Less than the main process waits for it."""


class Saver:
    """Writes the checkpoints of a run. Every process has one, and calls the same methods at the same steps."""

    def __init__(
        self,
        root: Path,
        *,
        rank: int,
        num_ranks: int,
        attempt: str,
        keep_last: int,
        keep_best: int,
        in_background: bool,
        say: Callable[[str], None],
        patience_seconds: float = 1800.0,
        beat: Callable[[], None] = lambda: None,
        is_hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        """On the main process, `root` is swept of unfinished saves.

        Args:
            root: a folder that all processes see.
            attempt: the same on all processes, another at each start: no save of an earlier one is taken for this.
            keep_last: at least 2.
            in_background: a step waits for a copy of the state to host memory only, not for the disk.
            say: tells people; of the main process.
            patience_seconds: see `folder.read_receipts`.
            beat: called on the main thread while a save goes on, so that whoever watches this process does not take it
                for dead.
            is_hurried: see `folder.read_receipts`.
        """
        self.root, self.rank, self.num_ranks, self.attempt = root, rank, num_ranks, attempt
        self.keep_last, self.keep_best, self.in_background = keep_last, keep_best, in_background
        self.say, self.beat, self.is_hurried, self.patience_seconds = say, beat, is_hurried, patience_seconds
        self.last_step: int | None = None
        """Of the last save that was begun, or of the checkpoint resumed from."""
        self.keep: set[str] = set()
        """Names of folders that stay: the one resumed from."""
        self.newest: folder.Checkpoint | None = None
        """On the main process: what was saved last, or resumed from."""
        self.failed: str | None = None
        """Why the last save came to nothing, as far as this process knows."""
        self._saved_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._build = root
        """Where the last save's files grow."""
        self._broken: OSError | None = None
        if rank == 0:
            folder.sweep(root, attempt)

    @property
    def newest_path(self) -> str | None:
        """On the main process: the folder of `newest`."""
        return None if self.newest is None else str(self.newest.path)

    def start_from(self, checkpoint: folder.Checkpoint) -> None:
        """This one stays, and its step needs no save of its own."""
        if checkpoint.path.resolve().parent == self.root.resolve():
            self.last_step = checkpoint.step
            self.keep.add(checkpoint.path.name)
            if self.rank == 0:
                for left in folder.leave_later(self.root, checkpoint, self.attempt):
                    self.say(f"{left.name} is of steps that this start makes anew; it is kept under this name")
        self.newest = checkpoint

    def is_time(self, every_minutes: float | None) -> bool:
        """Whether the last save, or the start, is so long ago."""
        return every_minutes is not None and time.monotonic() - self._saved_at >= every_minutes * 60

    def save(self, step: int, pieces: Iterable[Piece], state: dict[str, Any], *, best_by: float | None = None) -> None:
        """Saves the state after `step`. A save that fails is told and leaves nothing behind; the run may go on.

        Raises:
            OSError: this process can't even tell the main one that it failed. Here or in the next `wait`.

        Args:
            pieces: what this process is to write.
            state: all that is not a tensor, with `parameters`, shapes by name; the main process's counts.
            best_by: see `folder.prune`.
        """
        self.wait()
        self.last_step, self._saved_at = step, time.monotonic()
        self.failed = f"the save of step {step} did not end"
        self._build = self.root / f"{folder.SAVING}{step:08d}-{self.attempt}"
        if not self.in_background:
            self._save(step, pieces, state, best_by)
            self._raise_if_broken()
            return
        staged = [StagedPiece.copy_of(piece) for piece in pieces]
        self._thread = threading.Thread(target=self._save, args=(step, staged, state, best_by), name="save")
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is done.

        Raises:
            OSError: see `save`.
        """
        size = -1
        while self._thread is not None:
            self._thread.join(timeout=1.0)
            if not self._thread.is_alive():
                self._thread = None
            now_size = folder.size_of(self._build)
            if now_size != size or self._thread is None:
                size = now_size
                self.beat()
        self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _save(self, step: int, pieces: Iterable[Piece], state: dict[str, Any], best_by: float | None) -> None:
        started, build = time.monotonic(), self._build
        receipt = self._write_part(step, build, pieces, state)
        if self.rank != 0:
            self.failed = receipt.get("error")
            return
        try:
            files = folder.read_receipts(
                build,
                receipt,
                self.num_ranks,
                patience_seconds=self.patience_seconds,
                # A thread must not give signs of life for a main thread that hangs.
                beat=self.beat if not self.in_background else lambda: None,
                is_hurried=self.is_hurried,
            )
            manifest = {
                "step": step,
                "attempt": self.attempt,
                "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "best_by": best_by,
                "files": files,
            }
            self.newest = folder.commit(build, self.root, manifest)
        except Exception as error:
            shutil.rmtree(build, ignore_errors=True)
            self.failed = str(receipt.get("error", error))
            last = f"; the last checkpoint is {self.newest.path}" if self.newest else ""
            self.say(f"step {step} could not be saved: {self.failed}{last}")
            return
        self.failed = None
        try:
            folder.name_latest(self.root, self.newest)
        except OSError as error:
            self.say(f"step {step} is saved, but {folder.LATEST} does not name it: {error}")
        try:
            folder.sweep_before(build, self.attempt)
            folder.prune(self.root, keep_last=self.keep_last, keep_best=self.keep_best, keep=self.keep)
        except OSError as error:
            self.say(f"step {step} is saved, but an older checkpoint could not be removed: {error}")
        size = sum(record["bytes"] for record in files.values()) / 2**30
        self.say(f"step {step}: saved {size:.2f} GiB in {time.monotonic() - started:.1f} s")

    def _write_part(self, step: int, build: Path, pieces: Iterable[Piece], state: dict[str, Any]) -> dict[str, Any]:
        """Writes this process's files and its receipt; returns the receipt."""
        path = build / folder.pieces_name(self.rank, self.num_ranks)
        try:
            faults.at("save.begin", step)
            build.mkdir(parents=True, exist_ok=True)
            record = write_pieces(path, pieces, room=room_for(state["parameters"]), step=step)
            receipt: dict[str, Any] = {path.name: record._asdict()}
            faults.at("save.after_file", step)
            if self.rank == 0:
                file = build / folder.STATE
                folder.write_file(file, json.dumps(state, indent=1) + "\n")
                receipt[file.name] = {"bytes": file.stat().st_size, "digest": folder.digest_file(file)}
        except Exception as error:  # of any kind: the others must learn of it
            with contextlib.suppress(OSError):
                path.unlink()  # makes room for the receipt, if it was the room that lacked
            receipt = {"error": str(error)}
        if self.rank != 0:
            self._hand_in(step, build, receipt)
        faults.at("save.after_receipt", step)
        return receipt

    def _hand_in(self, step: int, build: Path, receipt: dict[str, Any]) -> None:
        """Leaves the receipt: an empty one where there is no room for a word."""
        begun = time.monotonic()
        while True:
            try:
                build.mkdir(parents=True, exist_ok=True)
                folder.write_receipt(build, self.rank, receipt)
                return
            except OSError as error:
                receipt.setdefault("error", str(error))
                with contextlib.suppress(OSError):
                    folder.leave_empty_receipt(build, self.rank)
                    return
                if time.monotonic() - begun >= RECEIPT_SECONDS:
                    self._broken = OSError(f"the save of step {step}: {receipt['error']}")
                    return
            time.sleep(0.1)
