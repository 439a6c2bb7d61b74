"""Layout of weights and optimizer state under each strategy, in one description: runs of the elements of a parameter.

However a parameter is sharded, a rank holds `count` runs of `length` consecutive elements of the flattened tensor, at
distances of `stride`: one run under data parallelism, one per row under tensor parallelism by columns. So each rank can
write its state without communication, and any other strategy can read it. Weights are the float32 masters that the
optimizer updates; each tensor of the optimizer's state is sharded like its weight.

    W, 4 x 6, its elements by          DTensor, rows (fsdp2)      DTensor, columns (tensor parallel)
    their place in the flattened
    whole:                             rank 0 |  0 ........ 5     rank 0 |  0  1  2   rank 1 |  3  4  5
                                              |  6 ....... 11            |  6  7  8          |  9 10 11
     0  1  2  3  4  5                  -------+--------------            | 12 13 14          | 15 16 17
     6  7  8  9 10 11                  rank 1 | 12 ....... 17            | 18 19 20          | 21 22 23
    12 13 14 15 16 17                         | 18 ....... 23
    18 19 20 21 22 23                  Piece of rank 1:           Piece of rank 1:
                                       start 12, data (1, 12)     start 3, stride 6, data (4, 3)

    Flat (fsdp1: the parameters of a unit; zero1, zero2: of an optimizer group): end to end, padded, then split evenly
    over the ranks. A parameter may cross the border, or lie on one rank alone.

    |  A, 8 elements  |  W, 24 elements                     |  B, 6 elements  | 2 of padding |
    |  partition of rank 0         |  partition of rank 1                                    |
       Pieces: all of A;              W: start 12, data (1, 12);
       W: start 0, data (1, 12)       all of B

    Each parameter by itself (zero3): split evenly, the last part padded. A rank holds its parts of a sub-group's
    parameters end to end in one flat tensor, which may lie on NVMe.

    A: | rank 0: 0-3 | rank 1: 4-7 |    W: | rank 0: 0-11 | rank 1: 12-23 |    B: | rank 0: 0-2 | rank 1: 3-5 |
    flat tensor of rank 1: | A: 4-7 | W: 12-23 | B: 3-5 |

    Replicated (ddp, hsdp, norms under tensor parallel, a tied embedding at both ends of a pipeline): several ranks have
    a Piece of the same elements; `copies` is their number, `copy` the index of this rank among them, and `share` the
    part that this rank writes.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cookbook.training.engine.findings import sharded_dims
from cookbook.training.engine.norm import local

WEIGHT = "weight"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """This rank's shard of one tensor of the state."""

    name: str
    """The parameter's name in the transformers model."""
    kind: str
    """`weight`, or the optimizer's name for it: exp_avg, exp_avg_sq, momentum_buffer."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """Index of the first element in the flattened whole."""
    stride: int
    """Distance between the beginnings of two runs."""
    data: torch.Tensor
    """(count, length) float32, a view: writing to it changes the running state."""
    copies: int = 1
    """Number of ranks that hold the same elements."""
    copy: int = 0
    """Index of this rank among them."""

    def share(self) -> "Piece":
        """The part that this rank writes where several hold the same elements; it can be empty."""
        count, length = self.data.shape
        if self.copies == 1:
            return self
        if count == 1:
            low, high = (length * i // self.copies for i in (self.copy, self.copy + 1))
            return replace(self, start=self.start + low, data=self.data[:, low:high], copies=1, copy=0)
        low, high = (count * i // self.copies for i in (self.copy, self.copy + 1))
        return replace(self, start=self.start + low * self.stride, data=self.data[low:high], copies=1, copy=0)


KindsOf = Callable[[str], Collection[str]]
"""From a parameter's name to the kinds of its optimizer state, without the weight."""


class Moments:
    """Optimizer state in float32, of a parameter or a flat group of them.

    For an optimizer that keeps 8 bits these are copies, which `keep` writes back.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._copies: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []

    def of(self, parameter: torch.Tensor, kinds: Collection[str] | None) -> dict[str, torch.Tensor]:
        """The state of a parameter, by kind.

        Args:
            kinds: created in zeros if they do not exist.
        """
        if hasattr(self.optimizer, "set_moments"):
            return self._copies_of(parameter, kinds or ())
        if kinds is None and parameter not in self.optimizer.state:
            return {}
        state = self.optimizer.state[parameter]
        for kind in kinds or ():
            if kind not in state:
                state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return {kind: value for kind, value in state.items() if kind != "step" and isinstance(value, torch.Tensor)}

    def _copies_of(self, parameter: torch.Tensor, kinds: Collection[str]) -> dict[str, torch.Tensor]:
        for known, copies in self._copies:
            if known is parameter:
                return copies
        copies = {kind: torch.zeros_like(local(parameter), device="cpu") for kind in kinds}
        # In 32 bits: the scales of 8 belong to blocks of a shard, and another strategy's shards have other blocks.
        copies |= self.optimizer.moments(parameter)
        self._copies.append((parameter, copies))
        return copies

    def keep(self, create: KindsOf | None) -> None:
        """Write copies back to the optimizer, if `create` let the pieces so far be written."""
        for parameter, copies in self._copies:
            if create is not None and copies:
                self.optimizer.set_moments(parameter, copies)
        self._copies.clear()


def held_pieces(
    parameters: Iterable[tuple[str, torch.nn.Parameter, Sequence[int]]],
    moments: Moments,
    rank: int,
    create: KindsOf | None,
) -> Iterator[Piece]:
    """Pieces of whole parameters and DTensors; see `Engine.held_pieces`.

    Args:
        parameters: name, parameter, and the ranks that hold it or parts of it, `rank` among them.
    """
    for name, parameter, ranks in parameters:
        start, stride, count, copies, copy = _placement(parameter, ranks, rank)
        for kind, tensor in {WEIGHT: parameter.detach(), **moments.of(parameter, create and create(name))}.items():
            part = local(tensor)
            if part.numel():
                yield Piece(
                    name=name,
                    kind=kind,
                    shape=tuple(parameter.shape),
                    start=start,
                    stride=stride,
                    data=part.view(count, -1),
                    copies=copies,
                    copy=copy,
                )
        moments.keep(create)


def flat_pieces(name: str, shape: Sequence[int], start: int, parts: dict[str, torch.Tensor]) -> Iterator[Piece]:
    """Pieces of a parameter of which this rank holds one run, from element `start` on.

    Args:
        parts: the run by kind.
    """
    for kind, part in parts.items():
        yield Piece(name=name, kind=kind, shape=tuple(shape), start=start, stride=0, data=part.view(1, -1))


def _placement(parameter: torch.Tensor, ranks: Sequence[int], rank: int) -> tuple[int, int, int, int, int]:
    """Start, stride and number of the runs that this rank holds; number of ranks with the same runs, and its index."""
    if not isinstance(parameter, DTensor):
        return 0, 0, 1, len(ranks), ranks.index(rank)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, shape = parameter.device_mesh, parameter.shape
    part, offsets = compute_local_shape_and_global_offset(shape, mesh, parameter.placements)
    strides = tuple((_distance(mesh.mesh, dim), mesh.size(dim)) for dim in sharded_dims(parameter))
    holders = _holders(strides, ranks, rank)
    copies, copy = len(holders), holders.index(rank)
    dims = [dim for dim, (length, full) in enumerate(zip(part, shape, strict=True)) if length != full]
    if not dims:
        return 0, 0, 1, copies, copy
    # Along the last of them lie the runs; one before it must be the first, or their distances would differ.
    assert dims[:-1] in ([], [0]), f"a parameter sharded along several inner dimensions: {parameter.placements}"
    inner = math.prod(shape[dims[-1] + 1 :])
    start = sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))
    return start, shape[dims[-1]] * inner, math.prod(part[: dims[-1]]), copies, copy


def _distance(ranks: torch.Tensor, dim: int) -> int:
    """Distance between neighbouring ranks along a dimension of a mesh."""
    line = ranks.movedim(dim, 0).flatten(1)[:, 0] if ranks.ndim > 1 else ranks
    return int(line[1] - line[0]) if len(line) > 1 else 1


@functools.cache
def _holders(strides: tuple[tuple[int, int], ...], ranks: Sequence[int], rank: int) -> list[int]:
    """Return the members of `ranks` that hold the same part as `rank`.

    Args:
        strides: distance between neighbouring ranks, and number of ranks, of each dimension that shards.
    """

    def place(other: int) -> list[int]:
        return [other // distance % size for distance, size in strides]

    return [other for other in ranks if place(other) == place(rank)]
