"""Where each strategy keeps weights and optimizer state, in one language: runs of the elements of a parameter.

Whatever shards a parameter, a process holds `count` runs of `length` consecutive elements of the flattened whole, each
`stride` after the one before: one run under data parallelism, one for each row under tensor parallelism by columns. So
state can be written where it lies, without communication, and read by any other strategy. Weights are the float32
masters that the optimizer updates; each tensor of the optimizer's state lies as its weight does.

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
    over the processes. A parameter may cross the border, or lie on one process alone.

    |  A, 8 elements  |  W, 24 elements                     |  B, 6 elements  | 2 of padding |
    |  partition of rank 0         |  partition of rank 1                                    |
       Pieces: all of A;              W: start 12, data (1, 12);
       W: start 0, data (1, 12)       all of B

    Each parameter by itself (zero3): split evenly, the last part padded. A process holds its parts of a sub-group's
    parameters end to end in one flat tensor, which may lie on NVMe.

    A: | rank 0: 0-3 | rank 1: 4-7 |    W: | rank 0: 0-11 | rank 1: 12-23 |    B: | rank 0: 0-2 | rank 1: 3-5 |
    flat tensor of rank 1: | A: 4-7 | W: 12-23 | B: 3-5 |

    Held whole or by several (ddp, hsdp's replicas, norms under tensor parallel): each process has a Piece of the same
    elements, with its place among the `copies`, and `share` is the part of it that this process writes.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from cookbook.engine.norm import local
from cookbook.launch import World

WEIGHT = "weight"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What this process holds of one tensor of the state: `data` is the memory itself, and writing changes the run."""

    name: str
    """Of the parameter, as the transformers model names it."""
    kind: str
    """`weight`, or the optimizer's name for it: exp_avg, exp_avg_sq, momentum_buffer."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """Where the first run begins in the flattened whole."""
    stride: int
    """From the beginning of one run to that of the next."""
    data: torch.Tensor
    """(count, length) float32."""
    copies: int = 1
    """How many processes hold these very elements."""
    copy: int = 0
    """Which of them this process is."""

    def share(self) -> "Piece":
        """The part that this process writes, where several hold the same; it can be empty."""
        count, length = self.data.shape
        if self.copies == 1:
            return self
        if count == 1:
            low, high = (length * i // self.copies for i in (self.copy, self.copy + 1))
            return replace(self, start=self.start + low, data=self.data[:, low:high], copies=1, copy=0)
        low, high = (count * i // self.copies for i in (self.copy, self.copy + 1))
        return replace(self, start=self.start + low * self.stride, data=self.data[low:high], copies=1, copy=0)


KindsOf = Callable[[str], Collection[str]]
"""From a parameter's name to the kinds of its optimizer state."""


class Moments:
    """What an optimizer keeps for each parameter, or flat group of them, in float32.

    Of an optimizer that keeps it in 8 bits these are copies, and `keep` gives them back.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._copies: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []

    def of(self, parameter: torch.Tensor, kinds: Collection[str] | None) -> dict[str, torch.Tensor]:
        """By kind.

        Args:
            kinds: to be made in zeros if they are not there.
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
        copies |= self.optimizer.moments(parameter)
        self._copies.append((parameter, copies))
        return copies

    def keep(self, create: KindsOf | None) -> None:
        """After the pieces so far were written, if they were."""
        for parameter, copies in self._copies:
            if create is not None and copies:
                self.optimizer.set_moments(parameter, copies)
        self._copies.clear()


def held_pieces(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], moments: Moments, world: World, create: KindsOf | None
) -> Iterator[Piece]:
    """Of whole parameters and DTensors, by name; see `Engine.held_pieces`."""
    for name, parameter in parameters:
        start, stride, count, copies, copy = _placement(parameter, world)
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
    """Of one parameter of this shape, of which this process holds one run from `start` on, by kind."""
    for kind, part in parts.items():
        yield Piece(name=name, kind=kind, shape=tuple(shape), start=start, stride=0, data=part.view(1, -1))


def _placement(parameter: torch.Tensor, world: World) -> tuple[int, int, int, int, int]:
    """Start, stride and number of the runs that this process holds, and its place among those that hold the same."""
    if not isinstance(parameter, DTensor):
        return 0, 0, 1, world.num_processes, world.rank
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, shape = parameter.device_mesh, parameter.shape
    _, offset = compute_local_shape_and_global_offset(shape, mesh, parameter.placements)
    cut = {placement.dim for placement in parameter.placements if isinstance(placement, Shard)}
    assert len(cut) <= 1, f"a parameter cut along several dimensions: {parameter.placements}"
    copies, copy = 1, 0
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for size, place, placement in zip(mesh.shape, coordinate, parameter.placements, strict=True):
        if placement.is_replicate():
            copies, copy = copies * size, copy * size + place
    if not cut:
        return 0, 0, 1, copies, copy
    (dim,) = cut
    inner = math.prod(shape[dim + 1 :])
    count = math.prod(shape[:dim])
    return offset[dim] * inner, shape[dim] * inner, count, copies, copy
