"""Content of a checkpoint's files, by their headers and `state.json`: the one reader of both. No torch."""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from cookbook.system.tensor_files import read_header
from cookbook.training.checkpoint import folder
from cookbook.training.checkpoint.folder import BrokenCheckpoint, Checkpoint

NEEDED = ("recipe", "made_from", "run", "parameters", "counts", "step", "num_samples")
"""Keys of `state.json` without which no run resumes."""
DTYPES = ("F32", "BF16", "F16", "I64")
"""Dtypes of the tensors that a save writes."""


class Run(NamedTuple):
    """Elements of a flattened parameter that a tensor of a file holds: `num_runs` of `length`, `stride` apart."""

    name: str
    kind: str
    start: int
    stride: int
    num_runs: int
    length: int
    key: str

    @property
    def end(self) -> int:
        """The element after the last."""
        return self.start + (self.num_runs - 1) * self.stride + self.length


def runs_of(tensors: Mapping[str, Mapping[str, Any]]) -> list[Run]:
    """The runs by a header of `read_header`; for their keys see `cookbook.training.checkpoint.tensors`.

    Raises:
        ValueError: a tensor that no save writes.
    """
    runs = []
    for key, entry in tensors.items():
        name, kind, place = key.rsplit("|", 2)
        start, _, stride = place.partition("/")
        *count, length = entry["shape"]
        run = Run(name, kind, int(start), int(stride or 0), count[0] if count else 1, length, key)
        is_one = run.num_runs == 1 and not count
        if run.start < 0 or len(count) > 1 or entry["dtype"] not in DTYPES or not (is_one or run.stride >= length > 0):
            raise ValueError(f"{key} of shape {entry['shape']} in {entry['dtype']} is none that a save writes")
        runs.append(run)
    return runs


def complete_kinds(paths: Iterable[Path], shapes: Mapping[str, list[int]]) -> set[str]:
    """The kinds of state in the files.

    Raises:
        BrokenCheckpoint: a parameter lacks elements of one, or has some twice.
    """
    runs: dict[tuple[str, str], list[Run]] = {(name, "weight"): [] for name in shapes}
    for path in paths:
        try:
            for run in runs_of(read_header(path)[0]):
                runs.setdefault((run.name, run.kind), []).append(run)
        except ValueError as error:
            raise BrokenCheckpoint(f"{path.name} {error}") from None
    for (name, kind), own in sorted(runs.items()):
        size, num_there = math.prod(shapes[name]), sum(run.num_runs * run.length for run in own)
        if num_there != size:
            raise BrokenCheckpoint(f"{name}: {num_there} of {size} elements of {kind} are there")
        in_order = sorted((run for run in own if run.num_runs == 1 and run.length), key=lambda run: run.start)
        if any(run.end > size for run in own) or any(first.end > second.start for first, second in pairwise(in_order)):
            raise BrokenCheckpoint(f"{name}: elements of {kind} are there twice, or beyond its {size}")
    return {kind for _, kind in runs}


def read_content(checkpoint: Checkpoint) -> tuple[dict[str, Any], set[str]]:
    """`state.json` and the kinds of state in the files, after a check of all that a restore or an export will read.

    Raises:
        BrokenCheckpoint: a value is missing or impossible, though the digests are right.
    """
    try:
        state = checkpoint.state()
        missing = [key for key in NEEDED if key not in state]
        if missing:
            raise BrokenCheckpoint(f"{folder.STATE} lacks {', '.join(missing)}")
        numbers = [state["step"], state["num_samples"], state["counts"]["updates"] or 0]
        if numbers[0] != checkpoint.step or not state["recipe"]["data"]:
            raise BrokenCheckpoint(f"{folder.STATE} and {folder.MANIFEST} are of different steps")
        if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
            raise BrokenCheckpoint(f"{folder.STATE} has a count that is none: {numbers}")
        if any(type(size) is not int or size < 0 for shape in state["parameters"].values() for size in shape):
            raise BrokenCheckpoint(f"{folder.STATE} has a shape that is none")
        return state, complete_kinds(checkpoint.pieces, state["parameters"])
    except (BrokenCheckpoint, OSError):
        raise
    except Exception as error:
        raise BrokenCheckpoint(f"its content is damaged ({type(error).__name__}: {error})") from None
