"""Requests of a run's processes to NCCL, carried out again as strictly as NCCL may: each waits for all it names.

On a GPU a collective or a message is a kernel that runs until all whom it concerns have begun it, and what a process
asks for after it may wait behind it. gloo lets messages pass each other, so a run on it ends where one on NCCL may not.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import count, groupby
from typing import NamedTuple

_MIRRORED = {"send": "recv", "recv": "send"}
MESSAGES = frozenset(_MIRRORED)


class Asked(NamedTuple):
    """One entry of a log, as nccl.cpp describes it."""

    group: str
    name: str
    type: str
    sizes: list[int]
    peer: int
    batch: int
    begun: int = 0
    done: int = 0

    def agrees(self, rank: int, other: "Asked", other_rank: int) -> bool:
        """True if NCCL would have these two meet: messages alone and those of a batch go by different communicators."""
        alike = (self.group, self.type, self.batch < 0) == (other.group, other.type, other.batch < 0)
        if self.name in MESSAGES:
            is_pair = (_MIRRORED[self.name], rank, self.peer) == (other.name, other.peer, other_rank)
            return alike and is_pair and self.sizes == other.sizes
        if (self.name, self.peer) != (other.name, other.peer):
            return False
        return alike and (self.name == "all_to_all" or self.sizes == other.sizes)


def stuck(logs: Sequence[Sequence[Asked]], ranks_of: dict[str, list[int]], failed: Collection[int] = ()) -> list[str]:
    """Wait of each process in the end; none if all come to theirs, or wait for one that failed.

    Args:
        logs: by rank.
        ranks_of: the ranks of each group.
        failed: ranks which ended before the others, who may wait for them, or for others that do.
    """
    rest = [_steps(log) for log in logs]
    heads = [next(steps, []) for steps in rest]
    moved = True
    while moved:
        moved = False
        for rank in range(len(logs)):
            while met := _met(rank, heads, ranks_of):
                moved = True
                for other, asked in met.items():
                    heads[other].remove(asked)
                    heads[other] = heads[other] or next(rest[other], [])
    ended = {rank for rank in failed if not heads[rank]}
    while more := {rank for rank, head in enumerate(heads) if rank not in ended and _waits_for(head, ended, ranks_of)}:
        ended |= more
    ends = [f"rank {rank}: {head[0] if head else 'at its end'}" for rank, head in enumerate(heads)]
    return ends if any(head for rank, head in enumerate(heads) if rank not in ended) else []


def _waits_for(head: list[Asked], ended: Collection[int], ranks_of: dict[str, list[int]]) -> bool:
    return any(
        {asked.peer} & {*ended} if asked.name in MESSAGES else {*ranks_of[asked.group]} & {*ended} for asked in head
    )


def _steps(log: Sequence[Asked]) -> Iterator[list[Asked]]:
    """One at a time, but those of a batch at once."""
    alone = count()
    for _, step in groupby(log, lambda asked: (asked.group, asked.batch) if asked.batch >= 0 else next(alone)):
        yield list(step)


def _met(rank: int, heads: list[list[Asked]], ranks_of: dict[str, list[int]]) -> dict[int, Asked]:
    """By rank, the first of a process's step for which all others are there."""
    for asked in heads[rank]:
        others = (
            [asked.peer] if asked.name in MESSAGES else [member for member in ranks_of[asked.group] if member != rank]
        )
        partners = {
            other: next((head for head in heads[other] if asked.agrees(rank, head, other)), None) for other in others
        }
        met = {rank: asked} | {other: partner for other, partner in partners.items() if partner is not None}
        if len(met) == len(others) + 1 and _sizes_agree(asked, met, ranks_of):
            return met
    return {}


def _sizes_agree(asked: Asked, met: dict[int, Asked], ranks_of: dict[str, list[int]]) -> bool:
    """True if for each pair of an all_to_all what one sends is what the other awaits."""
    if asked.name != "all_to_all":
        return True
    ranks = ranks_of[asked.group]
    return all(
        met[a].sizes[j] == met[b].sizes[len(ranks) + i] for i, a in enumerate(ranks) for j, b in enumerate(ranks)
    )
