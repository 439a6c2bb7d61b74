"""Agreement of the ranks: what several of them hold, they must hold alike, to the bit."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from cookbook.training.engine.collectives import Collectives

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**24
"""Elements that are digested at once: each takes 16 bytes more meanwhile."""
MOST_NAMED = 5


def digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Two sums of each tensor's bits, modulo 2^64: of its elements, and of each times its place. Computed where the
    tensors are, and copied to the host together.
    """
    names, sums = [], []
    for name, tensor in tensors:
        names.append(name)
        sums.append(_sums(tensor.detach()))
    if not sums:
        return {}
    together = torch.stack([part.to(sums[0].device) for part in sums])  # some may be offloaded
    return dict(zip(names, together.tolist(), strict=True))


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.contiguous().view(-1).view(INTEGERS[tensor.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), CHUNK):
        part = bits[start : start + CHUNK].long()
        places = torch.arange(start + 1, start + 1 + len(part), device=tensor.device)
        total += torch.stack([part.sum(), (part * places).sum()])
    return total


def check(values: dict[str, Any], collectives: Collectives, step: int) -> None:
    """Compare what each rank has found. Every rank must call.

    Raises:
        RuntimeError: on every rank, with the names of what differs and the ranks.
    """
    texts = collectives.gather_texts(json.dumps(values))
    verdict = collectives.broadcast_text("\n".join(differences([json.loads(text) for text in texts])))
    if verdict:
        raise RuntimeError(f"step {step}: the ranks no longer agree (run.check_ranks_every_steps):\n{verdict}")


def differences(of_ranks: list[dict[str, Any]]) -> list[str]:
    """Name what differs between the ranks that have it, by rank; the values of the most ranks count as right."""
    lines = []
    for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
        values = {rank: json.dumps(of_rank[name]) for rank, of_rank in enumerate(of_ranks) if name in of_rank}
        usual, _ = Counter(values.values()).most_common(1)[0]
        others = [rank for rank, value in values.items() if value != usual]
        if others:
            right = next(rank for rank, value in values.items() if value == usual)
            ranks = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
            lines.append(f"  {name}: {ranks} unlike rank {right}")
    return lines[:MOST_NAMED] + [f"  and {len(lines) - MOST_NAMED} more"] * (len(lines) > MOST_NAMED)
