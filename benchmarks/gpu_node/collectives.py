"""One process of the bandwidths that run.py measures, under torchrun: FOLDER MEBIBYTES ...

Five collectives of each size, over all GPUs and over pairs of them. Rank 0 writes FOLDER/bandwidth.json.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

REPEATS = 5
NUMEL = 1 << 16
"""Numbers in the part of a process, where values are compared."""


def bus_bandwidth(collective: str, num_bytes: int, seconds: float, count: int) -> float:
    """GB/s that each link carries, as nccl-tests computes it (doc/PERFORMANCE.md): comparable with a link's rate,
    whatever the number of processes.

    Args:
        collective: all_reduce, all_gather, reduce_scatter, all_to_all or send_recv.
        num_bytes: of the whole tensor, on each process before or after the collective, whichever has more.
    """
    factors = {"all_reduce": 2 * (count - 1) / count, "send_recv": 1.0}
    return factors.get(collective, (count - 1) / count) * num_bytes / seconds / 1e9


def calls(whole: torch.Tensor, part: torch.Tensor, ranks: list[int], group: Any) -> dict[str, Callable[[], Any]]:
    """Calls of each collective in this process, `whole` being all of its tensor; the last two return what is made."""
    other = torch.empty_like(whole)

    def send_recv() -> torch.Tensor:
        mine = ranks.index(dist.get_rank())
        after, before = ranks[(mine + 1) % len(ranks)], ranks[mine - 1]
        both = [dist.P2POp(dist.isend, whole, after, group), dist.P2POp(dist.irecv, other, before, group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return other

    def all_to_all() -> torch.Tensor:
        dist.all_to_all_single(other, whole, group=group)
        return other

    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": all_to_all,
        "send_recv": send_recv,
    }


def measure(ranks: list[int], group: Any, mebibytes: list[int], device: torch.device) -> list[dict[str, Any]]:
    """A row for each collective and size; the seconds are those of the slowest process, of its best repeat."""
    rows, wrong = [], wrong_values(ranks, group, device)
    for size in mebibytes:
        numel = (size << 20) // 4 // len(ranks) * len(ranks)
        whole, part = torch.zeros(numel, device=device), torch.zeros(numel // len(ranks), device=device)
        for name, call in calls(whole, part, ranks, group).items():
            if dist.get_rank() == ranks[0]:  # the last words of what hangs
                print(f"GPUs {ranks}, {size} MiB: {name}", flush=True)
            best = float("inf")
            for _ in range(REPEATS + 1):  # the first, which connects, is never the best
                torch.cuda.synchronize()
                start = time.perf_counter()
                call()
                torch.cuda.synchronize()
                best = min(best, time.perf_counter() - start)
            slowest = torch.tensor([best], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
            seconds = slowest.item()
            speed = bus_bandwidth(name, numel * 4, seconds, len(ranks))
            row = {"ranks": ranks, "what": name, "mebibytes": size, "seconds": seconds, "bus_gb": speed}
            rows.append(row | {"is_right": name not in wrong})
    return rows


def wrong_values(ranks: list[int], group: Any, device: torch.device) -> list[str]:
    """Collectives after which a process has other numbers than it should: between some cards without NVLink peer access
    is offered, and copies zeros (NVIDIA/nccl-tests, issue 117).
    """
    mine, count = ranks.index(dist.get_rank()), len(ranks)
    part = torch.full((NUMEL,), mine + 1.0, device=device)
    expected = {
        "all_reduce": torch.full((NUMEL * count,), count * (count + 1) / 2, device=device),
        "all_gather": torch.arange(1.0, count + 1, device=device).repeat_interleave(NUMEL),
        "reduce_scatter": torch.full((NUMEL,), count * (count + 1) / 2, device=device),
        "all_to_all": torch.arange(1.0, count + 1, device=device).repeat_interleave(NUMEL),
        "send_recv": torch.full((NUMEL * count,), (mine - 1) % count + 1.0, device=device),
    }
    wrong = []
    for name, wanted in expected.items():
        whole = torch.full((NUMEL * count,), mine + 1.0, device=device)
        made = calls(whole, part, ranks, group)[name]()
        result = {"reduce_scatter": part, "all_reduce": whole, "all_gather": whole}.get(name, made)
        is_wrong = torch.tensor([not torch.equal(result, wanted)], dtype=torch.int32, device=device)
        is_wrong_here = bool(is_wrong.item())
        dist.all_reduce(is_wrong, dist.ReduceOp.MAX, group=group)
        if is_wrong_here or is_wrong.item():
            wrong.append(name)
        part.fill_(mine + 1.0)
    return wrong


def pairs(count: int, local: int) -> list[list[int]]:
    """All pairs of a machine's processes; of several machines each process and its like on the next, as the others are
    measured on one machine.
    """
    if count > local:
        return [[rank, rank + local] for rank in range(count - local)]
    return [list(pair) for pair in itertools.combinations(range(count), 2)] if count > 2 else []


def main() -> None:
    folder, mebibytes = Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    everyone = list(range(dist.get_world_size()))
    rows = measure(everyone, dist.group.WORLD, mebibytes, device)
    for pair in pairs(len(everyone), int(os.environ["LOCAL_WORLD_SIZE"])):
        group = dist.new_group(pair)  # which all enter
        told: list[Any] = [measure(pair, group, mebibytes, device) if dist.get_rank() in pair else None]
        dist.broadcast_object_list(told, src=pair[0], device=device)
        rows += told[0]
        if dist.get_rank() in pair:
            dist.destroy_process_group(group)
    if dist.get_rank() == 0:
        (folder / "bandwidth.json").write_text(json.dumps(rows))
    dist.barrier(device_ids=[device.index])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
