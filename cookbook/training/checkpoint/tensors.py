"""The format: safetensors files in which every tensor is a run of a parameter's elements, or several runs.

The key `model.norm.weight|exp_avg|128` is the run of the flattened tensor from element 128 on, shape (length,).
`lm_head.weight|weight|128/4096` are runs at distances of 4096 elements, shape (count, length). The drawing in
`cookbook.training.engine.state` shows where they come from.
"""

import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import xxhash

from cookbook.system import faults
from cookbook.system.tensor_files import read_header, weight_files
from cookbook.training.checkpoint.content import runs_of
from cookbook.training.checkpoint.folder import BrokenCheckpoint

CHUNK = 2**24
"""Elements buffered in memory at a time."""

FLUSH, MAX_UNFLUSHED = 2**26, 2**29
"""Bytes after which a flush of a file to the disk begins, and after which writing waits for it."""

MAX_OPEN = 256
"""Files that a reader keeps open: a process may often open 1024, and a checkpoint has a file of each rank."""

PARALLEL = 2**22
"""Bytes from which on two threads write."""

SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
"""The last of buffers, such as DeepSeek-V4's table from a token to its experts."""
DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
OTHER_DTYPES = {
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes of tensors that are only copied."""


class StatePiece(Protocol):
    """The part of a `cookbook.training.engine.state.Piece` that is read: runs of a parameter's elements in memory."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def data(self) -> torch.Tensor: ...


class Tensor(NamedTuple):
    """A tensor to be written; `parts` are its elements, in order."""

    key: str
    shape: list[int]
    dtype: torch.dtype
    parts: Iterable[torch.Tensor]


@dataclass(frozen=True)
class StagedPiece:
    """A copy in host memory; pinned if it comes from a GPU."""

    name: str
    kind: str
    start: int
    stride: int
    data: torch.Tensor

    @classmethod
    def copy_of(cls, piece: StatePiece, buffer: torch.Tensor | None = None) -> "StagedPiece":
        """
        Args:
            buffer: that of an earlier copy, used again if it fits: fresh memory costs a page fault for every 4 KiB.
        """
        source = piece.data.detach()
        if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        return cls(piece.name, piece.kind, piece.start, piece.stride, buffer.copy_(source))


class FileRecord(NamedTuple):
    """Entry of a file in the manifest; for the digest see `folder.digest_file`."""

    bytes: int
    digest: str


def room_for(names: Iterable[str]) -> int:
    """Upper bound for the bytes of a header with the tensors of these parameters."""
    return -(-sum(6 * (len(name) + 160) for name in names) // 4096) * 4096 + 4096


def write_pieces(path: Path, pieces: Iterable[StatePiece], *, room: int, step: int) -> FileRecord:
    """Write pieces while they are drawn, and flush them to the disk.

    Args:
        room: bytes for the header, see `room_for`.

    Raises:
        OSError: a full disk, for example. Part of the file may then exist.
    """

    def tensors() -> Iterator[Tensor]:
        for piece in pieces:
            count, length = piece.data.shape
            place = str(piece.start) if count == 1 else f"{piece.start}/{piece.stride}"
            shape = [length] if count == 1 else [count, length]
            parts = piece.data.reshape(-1).split(CHUNK)
            yield Tensor(f"{piece.name}|{piece.kind}|{place}", shape, piece.data.dtype, parts)
            faults.at("save.in_file", step)

    return write_tensors(path, tensors(), room=room)


def write_tensors(
    path: Path, tensors: Iterable[Tensor], *, room: int, metadata: dict[str, str] | None = None
) -> FileRecord:
    """Write a safetensors file, holding one part of a tensor at a time.

    The header precedes the data but is known only after it, so its room is reserved and padded with spaces, as the
    format allows. The digest therefore hashes the data first, then the header.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    digest = xxhash.xxh3_128()
    offset = 0
    with path.open("wb") as file, _Writer(file.fileno()) as writer:
        for key, shape, dtype, parts in tensors:
            begin = offset
            for part in parts:
                view = part.to("cpu").contiguous().view(torch.uint8).numpy().data
                writer.write(view, room + offset, digest)
                offset += len(view)
            stored = (SAFETENSORS_DTYPES | OTHER_DTYPES)[dtype]
            header[key] = {"dtype": stored, "shape": shape, "data_offsets": [begin, offset]}
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) + 8 > room:
            raise ValueError(f"{path}: the header needs {len(text) + 8} bytes, and {room} were left for it")
        head = (room - 8).to_bytes(8, "little") + text.ljust(room - 8)
        digest.update(head)
        writer.finish(head)
    return FileRecord(room + offset, digest.hexdigest())


class Weight(NamedTuple):
    """A whole tensor that need not be in memory as a whole."""

    shape: list[int]
    parts: Callable[[torch.dtype], Iterable[torch.Tensor]]
    """Elements in order, in a dtype."""
    own_dtype: torch.dtype | None = None
    """In which it is written, whatever the model's."""

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it."""
        return torch.cat([torch.empty(0, dtype=dtype), *self.parts(dtype)]).view(self.shape)


def as_weight(tensor: torch.Tensor) -> Weight:
    """A tensor that is in memory, and is written in its own dtype."""
    return Weight(list(tensor.shape), lambda dtype: [tensor.to(dtype).reshape(-1)], tensor.dtype)


class _Writer:
    """Writes a file and flushes it meanwhile. When a call returns, what was given to it is written, and its memory may
    change then.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pool = ThreadPoolExecutor(max_workers=3, thread_name_prefix="write")
        self._flush: Future[None] | None = None
        self._unflushed = 0
        """Bytes since the flush under way, or the last, began."""

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def write(self, view: memoryview, at: int, digest: Any) -> None:
        """Write and hash `view` at once: a core copies into the page cache at a few GB/s, slower than many a disk."""
        if len(view) < PARALLEL:
            digest.update(view)
            self._write_at(view, at)
        else:
            half = len(view) // 2
            others = [
                self._pool.submit(digest.update, view),
                self._pool.submit(self._write_at, view[half:], at + half),
            ]
            try:
                self._write_at(view[:half], at)
            finally:
                wait(others)
            for other in others:
                other.result()
        self._unflushed += len(view)
        if self._unflushed >= FLUSH:  # rank 0 sees progress, and the last flush is short
            self._flush_behind()

    def finish(self, head: bytes) -> None:
        """Write the beginning of the file, and return when all of it is on the disk."""
        self._write_at(memoryview(head), 0)
        if self._flush is not None:
            self._flush.result()
        # accelerate's save_state returns when the page cache has its files, which a crash of the machine loses.
        os.fsync(self._descriptor)

    def _flush_behind(self) -> None:
        if self._flush is not None:
            if not self._flush.done() and self._unflushed < MAX_UNFLUSHED:
                return
            self._flush.result()
        self._flush, self._unflushed = self._pool.submit(os.fdatasync, self._descriptor), 0

    def _write_at(self, view: memoryview, at: int) -> None:
        while view:
            count = os.pwrite(self._descriptor, view, at)
            view, at = view[count:], at + count


class OpenFile:
    """A file, open for as long as this object lives."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


class TensorFile:
    """A file of tensors, read into memory that is there: pages of a mapped file would count as this process's own."""

    def __init__(self, path: Path, opened: Callable[[Path], OpenFile] = OpenFile) -> None:
        """Read the header.

        Raises:
            OSError, BadHeader: there is none.
        """
        self.path, self._opened = path, opened
        self.tensors, self._data = read_header(path)
        """`dtype`, `shape` and `data_offsets` by key, and where the data begins."""

    def read(self, key: str, first: int, out: torch.Tensor) -> None:
        """Elements of the flattened tensor, from `first` on, into a contiguous `out` on the CPU.

        Raises:
            BrokenCheckpoint: the file ends before.
        """
        dtype = DTYPES[self.tensors[key]["dtype"]]
        stored = out if out.dtype == dtype else torch.empty(out.shape, dtype=dtype)
        view = stored.view(-1).view(torch.uint8).numpy().data
        at = self._data + self.tensors[key]["data_offsets"][0] + first * dtype.itemsize
        opened = self._opened(self.path)
        while view:
            count = os.preadv(opened.descriptor, [view], at)
            if not count:
                raise BrokenCheckpoint(f"{key}: the file ends before it")
            view, at = view[count:], at + count
        if stored is not out:
            out.copy_(stored)


def files_of(folder: Path) -> dict[str, TensorFile]:
    """The file of each tensor of a model's folder by key, of those that transformers reads."""
    return {key: file for file in map(TensorFile, weight_files(folder)[0]) for key in file.tensors}


class _Source(NamedTuple):
    """Runs stored in a file."""

    start: int
    stride: int
    num_runs: int
    length: int
    file: TensorFile
    key: str


class Reader:
    """Reads any part of any tensor from the files of a checkpoint, whatever ranks wrote them."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Read the headers.

        Raises:
            BrokenCheckpoint: a file is missing, or is no safetensors file of ours.
        """
        self._sources: dict[tuple[str, str], list[_Source]] = {}
        opened = lru_cache(maxsize=MAX_OPEN)(OpenFile)
        for path in paths:
            try:
                file = TensorFile(path, opened)
                for run in runs_of(file.tensors):
                    source = _Source(run.start, run.stride, run.num_runs, run.length, file, run.key)
                    self._sources.setdefault((run.name, run.kind), []).append(source)
            except (OSError, ValueError) as error:
                raise BrokenCheckpoint(f"{path.name}: {error}") from error
        for sources in self._sources.values():
            sources.sort(key=lambda source: source.start)

    def kinds(self, name: str) -> list[str]:
        """The kinds of state stored for a parameter."""
        return [kind for key, kind in self._sources if key == name]

    def num_elements(self, name: str, kind: str) -> int:
        """Number of stored elements; a complete tensor has as many as its shape."""
        return sum(source.num_runs * source.length for source in self._sources.get((name, kind), []))

    def parts(self, name: str, kind: str, size: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The elements of a whole tensor, in order.

        Raises:
            BrokenCheckpoint: elements are missing.
        """
        for begin in range(0, size, CHUNK):
            part = torch.empty(min(CHUNK, size - begin))
            self._fill(name, kind, begin, part)
            yield part.to(dtype)

    def read_into(self, piece: StatePiece) -> None:
        """Fill a piece's memory.

        Raises:
            BrokenCheckpoint: elements are missing.
        """
        count, length = piece.data.shape
        if count == 1:
            run = piece.data[0]
            in_place = run.device.type == "cpu"
            for begin in range(0, length, CHUNK):
                part = run[begin : begin + CHUNK]
                buffer = part if in_place else torch.empty(len(part))
                self._fill(piece.name, piece.kind, piece.start + begin, buffer)
                if not in_place:
                    part.copy_(buffer)
            return
        num_rows = max(1, CHUNK // piece.stride)
        for row in range(0, count, num_rows):
            part = piece.data[row : row + num_rows]
            rows = len(part)
            low = piece.start + row * piece.stride
            buffer = torch.empty((rows - 1) * piece.stride + length)
            self._fill(piece.name, piece.kind, low, buffer)
            part.copy_(buffer.as_strided((rows, length), (piece.stride, 1)))

    def _fill(self, name: str, kind: str, low: int, out: torch.Tensor) -> None:
        """Read elements `low` to `low + len(out)` of the flattened tensor into `out`."""
        high = low + len(out)
        covered = 0
        for source in self._sources.get((name, kind), []):
            if source.num_runs > 1:
                covered += _fill_from_rows(source, low, out)
                continue
            begin, end = max(low, source.start), min(high, source.start + source.length)
            if begin < end:
                source.file.read(source.key, begin - source.start, out[begin - low : end - low])
                covered += end - begin
        if covered != len(out):
            raise BrokenCheckpoint(f"{name}: {covered} of {len(out)} elements of {kind} are there")


def _fill_from_rows(source: _Source, low: int, out: torch.Tensor) -> int:
    """Copy the elements from `low` on that several runs hold; returns their number."""
    high = low + len(out)
    # Runs (rows of the stored tensor) that overlap the wanted range.
    first = max(0, (low - source.start - source.length) // source.stride + 1)
    last = min(source.num_runs, (high - 1 - source.start) // source.stride + 1)
    if first >= last:
        return 0
    covered = 0
    rows = torch.empty(last - first, source.length)
    source.file.read(source.key, first * source.length, rows)
    begin = source.start + first * source.stride
    for edge in (0, len(rows) - 1):  # the first and the last may extend beyond it
        at = begin + edge * source.stride
        inside = max(low, at), min(high, at + source.length)
        out[inside[0] - low : inside[1] - low] = rows[edge, inside[0] - at : inside[1] - at]
        covered += inside[1] - inside[0]
        if len(rows) == 1:
            return covered
    between = rows[1:-1]
    if len(between):
        place = begin + source.stride - low
        out.as_strided((len(between), source.length), (source.stride, 1), place + out.storage_offset()).copy_(between)
    return covered + between.numel()
