"""A short all-reduce and all-gather between real processes: how fast, how even, and which rank hangs."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

import simulated_gpus
from cookbook.commands.doctor.driver import Link
from cookbook.commands.doctor.finding import Finding, failure, ok, warning
from cookbook.system.machine import num_cores

ROOT = Path(__file__).parents[3]
LOOK_SECONDS = 0.05
SILENT_SECONDS = 5.0
"""Without a heartbeat, of which there are five a second: the process is stopped, or stuck inside a call."""
STALL_SECONDS = 20.0
"""Without a next stage anywhere, though all hearts beat. NCCL's first connection takes several seconds."""
SLOW_RATIO = 2.0
"""A rank's own work against the fastest rank's. The best of five counts, so that a moment's noise does not."""
LEAST_SHARE = {"NVLink": 0.5, "PCIe": 0.25}
"""Least bus bandwidth as a share of the link's rate in one direction, below which something is wrong. Chosen, not
measured."""


def bus_bandwidth(collective: str, num_bytes: int, seconds: float, count: int) -> float:
    """GB/s that each link carries, as nccl-tests computes it (doc/PERFORMANCE.md): comparable with a link's rate,
    whatever the number of processes.

    Args:
        collective: all_reduce, all_gather, reduce_scatter, all_to_all or send_recv.
        num_bytes: of the whole tensor, on each process before or after the collective, whichever has more.
    """
    factors = {"all_reduce": 2 * (count - 1) / count, "send_recv": 1.0}
    return factors.get(collective, (count - 1) / count) * num_bytes / seconds / 1e9


def check_collective(
    count: int, backend: str, link: Link | None, folder: Path, seconds: float, stall_seconds: float = STALL_SECONDS
) -> Iterator[Finding]:
    """Starts `count` processes and waits for them, `seconds` at most. None of them is left behind.

    Args:
        folder: a temporary one.
    """
    limit = time.monotonic() + seconds
    ranks = [_start(rank, count, backend, folder) for rank in range(count)]
    try:
        trouble = _watch(ranks, folder, limit, stall_seconds)
    finally:
        for one in ranks:
            one.kill()
        for one in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                one.wait(1)
    if trouble is not None:
        yield trouble
        return
    times = [json.loads((folder / f"times-{rank}").read_text()) for rank in range(count)]
    yield from judge(times, backend, link)


def _start(rank: int, count: int, backend: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cookbook.commands.doctor.rank", str(folder), str(rank), str(count), backend]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = str(max(1, num_cores() // count))
    with (folder / f"errors-{rank}").open("wb") as stream:
        return subprocess.Popen(
            [*command, str(os.getpid())],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )


def _watch(ranks: list[subprocess.Popen[bytes]], folder: Path, limit: float, stall_seconds: float) -> Finding | None:
    """None once all have written their times, or what keeps them from it."""
    seen: list[int] = []
    moved = time.monotonic()
    while True:
        unfinished = [rank for rank in range(len(ranks)) if not (folder / f"times-{rank}").exists()]
        if not unfinished:
            return None
        for rank in unfinished:
            # One that ends between both looks has written its times.
            if ranks[rank].poll() is not None and not (folder / f"times-{rank}").exists():
                return _died(rank, ranks[rank].returncode, folder)
        stages = [_lines(folder / f"stage-{rank}") for rank in range(len(ranks))]
        lengths = [len(stage) for stage in stages]
        now = time.monotonic()
        if lengths != seen:
            seen, moved = lengths, now
        has_stalled = min(lengths) > 2 and now - moved > stall_seconds  # the import and joining may take long
        alive = [(rank, folder / f"alive-{rank}") for rank in range(len(ranks))]
        silent = [rank for rank, beat in alive if beat.exists() and time.time() - beat.stat().st_mtime > SILENT_SECONDS]
        if now >= limit or has_stalled or silent:
            return name_the_silent(stages, silent, [_state(one.pid) for one in ranks])
        time.sleep(LOOK_SECONDS)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _state(pid: int) -> str:
    """The state of a process in the kernel: running, sleeping, stopped, disk-sleep."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def _died(rank: int, code: int, folder: Path) -> Finding:
    last = next(filter(str.strip, reversed(_lines(folder / f"errors-{rank}"))), "no message")
    return failure(
        "collective",
        f"rank {rank} ended with code {code}: {last.rstrip()[:300]}",
        f"{Path(sys.executable).name} -c 'import torch.distributed'; with GPUs also export NCCL_DEBUG=INFO",
    )


def name_the_silent(stages: list[list[str]], silent: list[int], states: list[str]) -> Finding:
    """Who keeps the others waiting: a process without heartbeat or stopped by the kernel; else those that are behind.

    Args:
        stages: of each rank, what it has entered so far.
        silent: ranks without a heartbeat.
        states: of each rank, the kernel's word for its process.
    """
    at = [stage[-1] if stage else "its start" for stage in stages]
    lengths = [len(stage) for stage in stages]
    stopped = [rank for rank, state in enumerate(states) if state in ("stopped", "tracing-stop", "disk-sleep")]
    behind = [rank for rank, length in enumerate(lengths) if length < max(lengths)]
    named = stopped or silent or behind
    if not named:
        text = f"all {len(at)} ranks wait for each other in {at[0]}: the link between them is silent"
        return failure(
            "collective", text, "export NCCL_DEBUG=INFO; export NCCL_P2P_DISABLE=1 shows whether it is peer access"
        )
    words = [
        f"rank {rank} is silent: it did not get past {at[rank]}" + (f" ({states[rank]})" if states[rank] else "")
        for rank in named
    ]
    others = sorted({at[rank] for rank in range(len(at)) if rank not in named})
    waits = f"; the others wait in {', '.join(others)}" if others else ""
    remedy = "see what stops or starves it: debugger, full cgroup, on a GPU dmesg | grep -i xid"
    return failure("collective", "; ".join(words) + waits, remedy)


def judge(times: list[dict[str, Any]], backend: str, link: Link | None) -> Iterator[Finding]:
    """Bandwidth, evenness and correctness of what every rank measured."""
    count = len(times)
    wrong = [str(rank) for rank, one in enumerate(times) if not one["right"]]
    if wrong:
        text = f"wrong sums over {backend} on rank {', '.join(wrong)}"
        yield failure("collective", text, "train nothing here; export NCCL_P2P_DISABLE=1 and try again")
    if count == 1:
        yield ok("collective", f"{backend} starts; a single process exchanges nothing")
        return
    if simulated_gpus.is_active():
        yield ok("collective", f"{count} processes over simulated {backend}: the sums are right")
        return
    rates = {
        name: bus_bandwidth(name, times[0]["bytes"], max(one[name] for one in times), count)
        for name in ("all_reduce", "all_gather")
    }
    text = f"{count} processes over {backend}: " + ", ".join(f"{n} {rate:.3g} GB/s" for n, rate in rates.items())
    if link is None or link.gb is None:
        yield ok("collective", f"{text} (bus bandwidth)")
    else:
        least = LEAST_SHARE[link.kind.split()[0].split("(")[0]] * link.gb
        text += f" (bus bandwidth); {link.kind} has {link.gb:.0f}"
        if min(rates.values()) < least:
            remedy = "export NCCL_DEBUG=INFO shows the way that NCCL takes; nvidia-smi topo -m the way there is"
            yield warning("collective", f"{text}, at least {least:.0f} would be expected", remedy)
        else:
            yield ok("collective", text)
    fastest = min(one["work"] for one in times)
    for rank, one in enumerate(times):
        if one["work"] > SLOW_RATIO * fastest:
            text = f"rank {rank} is slow: {one['work'] * 1e3:.1f} ms for what takes the fastest {fastest * 1e3:.1f} ms"
            what = f"nvidia-smi -i {rank} -q -d PERFORMANCE,CLOCK" if backend == "nccl" else "top"
            yield warning("collective", text, f"{what} shows what else runs there; every step waits for it")
