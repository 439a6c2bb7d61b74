"""File of a teacher's answers for each target of a token set: safetensors, written piece by piece, and read
as memory maps, since it may be larger than memory.
"""

import json
import os
from pathlib import Path

import numpy as np

from cookbook.system.tensor_files import BadHeader, read_header
from cookbook.training.data.tokens import digest_of

TOKENS, LOGPS = "tokens", "logps"


class AnswersFile:
    """The file while it is written."""

    def __init__(self, path: Path, num_targets: int, top_k: int) -> None:
        """
        Raises:
            OSError: the disk has no room for it.
        """
        self._path, self._unfinished = path, path.with_suffix(f".{os.getpid()}")
        self._shapes = {TOKENS: (num_targets, top_k), LOGPS: (num_targets, 1 + top_k)}
        self._start = len(self._header())
        size = self._start + sum(4 * rows * columns for rows, columns in self._shapes.values())
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._unfinished.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a map of a file without its room ends the process
        self._tokens, self._logps = _maps(self._unfinished, self._start, num_targets, top_k, "r+")

    def put(self, targets: np.ndarray, tokens: np.ndarray, logps: np.ndarray) -> None:
        """Write the answers for these targets, by their numbers in the set."""
        self._tokens[targets], self._logps[targets] = tokens, logps

    def finish(self) -> None:
        """Seal the file and give it its name."""
        header = self._header(digest_of(self._tokens) + digest_of(self._logps))
        self._tokens.flush()
        self._logps.flush()
        with self._unfinished.open("r+b") as file:
            file.write(header)
        self._unfinished.replace(self._path)

    def discard(self) -> None:
        self._unfinished.unlink(missing_ok=True)

    def _header(self, digest: str = "0" * 64) -> bytes:
        tensors, begin = {}, 0
        for (name, shape), dtype in zip(self._shapes.items(), ("I32", "F32"), strict=True):
            end = begin + 4 * shape[0] * shape[1]
            tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            begin = end
        text = json.dumps({"__metadata__": {"digest": digest}, **tensors}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def load_answers(path: Path, num_targets: int, top_k: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Tokens, int32 [targets, top_k], the most probable first; and log-probabilities, float32 [targets, 1 + top_k], of
    all other tokens together and of these. None if the file is missing or damaged.
    """
    try:
        tensors, start = read_header(path)
        with path.open("rb") as file:
            digest = json.loads(file.read(start)[8:])["__metadata__"]["digest"]
        if [tensors[TOKENS]["shape"], tensors[LOGPS]["shape"]] != [[num_targets, top_k], [num_targets, 1 + top_k]]:
            return None
    except (OSError, BadHeader, ValueError, KeyError):
        return None
    tokens, logps = _maps(path, start, num_targets, top_k, "r")
    return (tokens, logps) if digest == digest_of(tokens) + digest_of(logps) else None


def _maps(path: Path, start: int, num_targets: int, top_k: int, mode: str) -> tuple[np.memmap, np.memmap]:
    tokens = np.memmap(path, np.int32, mode, start, (num_targets, top_k))  # type: ignore[call-overload]
    logps = np.memmap(path, np.float32, mode, start + tokens.nbytes, (num_targets, 1 + top_k))  # type: ignore[call-overload]
    return tokens, logps
