"""Saves: every rank writes what it holds, and rank 0 turns the files into a checkpoint."""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch

from cookbook.system import faults
from cookbook.system.console import in_bytes
from cookbook.system.record_files import replace_file
from cookbook.training.checkpoint import folder
from cookbook.training.checkpoint.tensors import StagedPiece, StatePiece, room_for, write_pieces

RECEIPT_SECONDS = 10.0
"""Limit of a rank's tries to report that it could not save. Less than rank 0 waits for it."""


Pieces = Iterable[StatePiece]


@dataclass(eq=False)
class Saver:
    """Writes the checkpoints of a run. Every rank must call the same methods at the same steps.

    On rank 0, the beginning removes unfinished saves.
    """

    root: Path
    """A folder that all ranks see."""
    _: KW_ONLY
    rank: int
    num_ranks: int
    attempt: str
    """Id of this start, the same on all ranks, so that no file of an earlier start's save is used."""
    keep_last: int
    """At least 2."""
    keep_best: int
    in_background: bool
    """A step waits only for a copy of the state to host memory, not for the disk."""
    say: Callable[[str], None]
    """Logs a line for users."""
    on_save: Callable[[int], None] = lambda step: None
    """Called on rank 0 with the step of each complete checkpoint, from the thread that saved it."""
    timeout_seconds: float = 1800.0
    """See `folder.read_receipts`, as for `stop_requested`."""
    beat: Callable[[], None] = lambda: None
    """Heartbeat for the watchdog, called on the main thread during a save."""
    stop_requested: Callable[[], bool] = lambda: False
    last_step: int | None = field(default=None, init=False)
    """Step of the last save begun, or of the checkpoint resumed from."""
    keep: set[str] = field(default_factory=set, init=False)
    """Names of folders that are never pruned: the one resumed from."""
    newest: folder.Checkpoint | None = field(default=None, init=False)
    """The last checkpoint saved or resumed from; on rank 0."""
    failed: str | None = field(default=None, init=False)
    """Why the last save failed, as far as this rank knows."""

    def __post_init__(self) -> None:
        self._num_failed = 0
        """Saves in a row that failed; on rank 0."""
        self._saved_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._buffers: dict[tuple[str, str, int], torch.Tensor] = {}
        """Tensors that a save in the background writes from, kept for the next."""
        self._build = self.root
        """Folder of the last save's files."""
        self._broken: OSError | None = None
        if self.rank == 0:
            folder.sweep_unfinished(self.root, self.attempt)

    @property
    def newest_path(self) -> str | None:
        """Folder of `newest`; on rank 0."""
        return None if self.newest is None else str(self.newest.path)

    @property
    def way_on(self) -> str:
        """Advice for a run that ends unsaved; on rank 0."""
        if self.newest is None:
            return (
                "the run has no checkpoint: make room, or name another run.output_dir, and start it from the beginning"
            )
        is_here = self.newest.path.parent == self.root
        how = f"run.resume={'auto' if is_here else self.newest.path}"
        return f"make room and start it with {how}, from step {self.newest.step} in {self.newest.path}"

    def start_from(self, checkpoint: folder.Checkpoint) -> None:
        """Keep the checkpoint resumed from; its step is not saved again."""
        if checkpoint.is_in(self.root):
            self.last_step = checkpoint.step
            self.keep.add(checkpoint.path.name)
            if self.rank == 0:
                for left in folder.leave_later(self.root, checkpoint, self.attempt):
                    self.say(f"{left.name} holds steps that this run will repeat; it is kept under this name")
        self.newest = checkpoint

    def is_time(self, every_minutes: float | None) -> bool:
        """Return whether the last save, or the start, is at least this long ago."""
        return every_minutes is not None and time.monotonic() - self._saved_at >= every_minutes * 60

    def save(self, step: int, pieces: Pieces, state: dict[str, Any], *, best_by: float | None = None) -> None:
        """Save the state after `step`. A failed save is logged and removed; the run may continue.

        Args:
            pieces: what this rank writes.
            state: everything that is not a tensor, with `parameters`, shapes by name; rank 0's is written.
            best_by: see `folder.best_first`.

        Raises:
            OSError: this rank cannot even report its failure to rank 0. Here or in the next `wait`.
        """
        self.wait()
        self.last_step, self._saved_at = step, time.monotonic()
        self.failed = f"the save of step {step} did not end"
        self._build = self.root / f"{folder.SAVING}{step:08d}-{self.attempt}"
        if not self.in_background:
            self._save(step, pieces, state, best_by)
            self._raise_if_broken()
            return
        staged = []
        for piece in pieces:
            place = (piece.name, piece.kind, piece.start)
            staged.append(StagedPiece.copy_of(piece, self._buffers.get(place)))
            self._buffers[place] = staged[-1].data
        self._thread = threading.Thread(target=self._save, args=(step, staged, state, best_by), name="save")
        self._thread.start()

    def wait(self) -> None:
        """Wait for a save in the background.

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

    def _save(self, step: int, pieces: Pieces, state: dict[str, Any], best_by: float | None) -> None:
        started, build = time.monotonic(), self._build
        receipt = self._write_part(step, build, pieces, state)
        if self.rank != 0:
            self.failed = receipt.get("error")
            return
        try:
            # Through the folder and not by a collective: this may run in a thread, and a rank that dies in a save would
            # leave the others in it.
            files = folder.read_receipts(
                build,
                receipt,
                self.num_ranks,
                timeout_seconds=self.timeout_seconds,
                # A background thread must not send heartbeats for a main thread that hangs.
                beat=self.beat if not self.in_background else lambda: None,
                stop_requested=self.stop_requested,
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
            self._num_failed += 1
            in_a_row = f"; {self._num_failed} saves in a row have failed" if self._num_failed > 1 else ""
            last = f"the last checkpoint is {self.newest.path}, and the steps since" if self.newest else "all steps"
            self.say(f"step {step} could not be saved: {self.failed}{in_a_row}; {last} are lost if the run ends now")
            return
        self.failed, self._num_failed = None, 0
        try:
            folder.name_latest(self.root, self.newest)
        except OSError as error:
            self.say(f"step {step} is saved, but {folder.LATEST} does not name it: {error}")
        try:
            folder.sweep_before(build, self.attempt)
            folder.prune(self.root, keep_last=self.keep_last, keep_best=self.keep_best, keep=self.keep)
        except OSError as error:
            self.say(f"step {step} is saved, but an older checkpoint could not be removed: {error}")
        size = in_bytes(sum(record["bytes"] for record in files.values()))
        self.on_save(step)
        self.say(f"step {step}: saved {size} in {time.monotonic() - started:.1f} s")

    def _write_part(self, step: int, build: Path, pieces: Pieces, state: dict[str, Any]) -> dict[str, Any]:
        """Write this rank's files and its receipt; returns the receipt."""
        path = build / f"pieces-{self.rank:05d}-of-{self.num_ranks:05d}.safetensors"
        try:
            faults.at("save.begin", step)
            build.mkdir(parents=True, exist_ok=True)
            record = write_pieces(path, pieces, room=room_for(state["parameters"]), step=step)
            receipt: dict[str, Any] = {path.name: record._asdict()}
            faults.at("save.after_file", step)
            if self.rank == 0:
                file = build / folder.STATE
                replace_file(file, json.dumps(state, indent=1) + "\n", flush=True)
                receipt[file.name] = {"bytes": file.stat().st_size, "digest": folder.digest_file(file)}
        except Exception as error:  # of any kind: rank 0 must learn of it
            with contextlib.suppress(OSError):
                path.unlink()  # makes room for the receipt on a full disk
            receipt = {"error": str(error)}
        if self.rank != 0:
            self._hand_in(step, build, receipt)
        faults.at("save.after_receipt", step)
        return receipt

    def _hand_in(self, step: int, build: Path, receipt: dict[str, Any]) -> None:
        """Write the receipt, or an empty one where the disk has no room for its text."""
        begun, path = time.monotonic(), folder.receipt_path(build, self.rank)
        while True:
            try:
                build.mkdir(parents=True, exist_ok=True)
                replace_file(path, json.dumps(receipt), flush=True)
                return
            except OSError as error:
                receipt.setdefault("error", str(error))
                with contextlib.suppress(OSError):
                    path.touch()
                    return
                if time.monotonic() - begun >= RECEIPT_SECONDS:
                    self._broken = OSError(f"the save of step {step}: {receipt['error']}")
                    return
            time.sleep(0.1)
