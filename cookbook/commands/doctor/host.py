"""The host: cores, memory, shared memory, open files, and disk for checkpoints; with what a container allows of it."""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from cookbook.commands.doctor.finding import Finding, failure, ok, warning
from cookbook.commands.doctor.storage import Sizes
from cookbook.system.console import in_bytes, several
from cookbook.system.machine import num_cores

SHM = Path("/dev/shm")  # noqa: S108  measured, not written
LEAST_SHM = 1 << 30
"""NCCL between GPUs that are not peers, and gloo, exchange data there. Docker's 64 MiB are known to be too few."""
LEAST_FILES = 1024
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that the control groups of this process set; None for no limit."""

    memory_bytes: int | None
    cores: float | None


def read_limits(groups: str, root: Path = CGROUPS) -> Limits:
    """The tightest limits of a process's control groups and all above them.

    Args:
        groups: /proc/self/cgroup.
    """
    memory: list[int] = []
    cores: list[float] = []
    for line in groups.splitlines():
        _, controllers, name = line.split(":", 2)
        names = controllers.split(",")
        if not controllers:
            for folder in _upwards(root, name):
                memory += _numbers(folder / "memory.max")[:1]
                cores += _share(_numbers(folder / "cpu.max"))
        if "memory" in names:
            for folder in _upwards(root / "memory", name):
                memory += _numbers(folder / "memory.limit_in_bytes")
        if "cpu" in names:
            for folder in _upwards(root / "cpu", name):
                cores += _share(_numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us"))
    # Version 1 writes "no limit" as the largest page-aligned number.
    memory = [limit for limit in memory if limit < 1 << 60]
    return Limits(memory_bytes=min(memory, default=None), cores=min(cores, default=None))


def _upwards(root: Path, name: str) -> list[Path]:
    """The group's folder and those above; inside a container the name may be the host's, and only the root exists."""
    folder = root / name.strip("/")
    return [folder, *(parent for parent in folder.parents if parent == root or root in parent.parents)]


def _numbers(path: Path) -> list[int]:
    try:
        words = path.read_text(encoding="utf-8").split()
    except OSError:
        return []
    return [int(word) for word in words if word.lstrip("-").isdigit()]


def _share(quota_and_period: list[int]) -> list[float]:
    """`max 100000` leaves one number: no limit."""
    if len(quota_and_period) != 2 or quota_and_period[0] <= 0:
        return []
    return [quota_and_period[0] / quota_and_period[1]]


def check_cpu(processes: int, limits: Limits, offloads: bool) -> Iterator[Finding]:
    """Cores against the threads that the processes will start."""
    cores = num_cores()
    every = os.cpu_count() or cores
    summary = f"{cores} cores" + (f" of {every} (affinity)" if cores < every else "")
    usable = cores
    if limits.cores is not None and limits.cores < cores:
        usable = max(1, int(limits.cores))
        summary += f", limited to {limits.cores:g} by a quota"
    threads = max(1, usable // processes)
    text = os.environ.get("OMP_NUM_THREADS")
    if text is None:
        if usable < cores:
            text = f"{summary}: each of {processes} processes would start {max(1, cores // processes)} threads"
            yield warning("CPU", text, f"export OMP_NUM_THREADS={threads}")
        else:
            yield ok("CPU", f"{summary}; {processes} processes of {several(threads, 'thread')}")
        return
    if not text.isdecimal() or not int(text):
        yield failure("CPU", f"OMP_NUM_THREADS={text} is no number", f"export OMP_NUM_THREADS={threads}")
    elif int(text) * processes > usable:
        text = f"{summary}: OMP_NUM_THREADS={text} x {processes} processes is more"
        yield warning("CPU", text, f"export OMP_NUM_THREADS={threads}")
    elif int(text) == 1 and offloads and threads > 1:
        text = f"{summary}: OMP_NUM_THREADS=1 leaves the offloaded optimizer one core a process"
        yield warning("CPU", text, f"export OMP_NUM_THREADS={threads}")
    else:
        yield ok("CPU", f"{summary}; OMP_NUM_THREADS={text} x {processes} processes")


def check_memory(limits: Limits, needs: Sizes | None) -> Iterator[Finding]:
    """Host memory that is free, against what the strategy keeps there."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    summary = f"{in_bytes(free)} free of {in_bytes(total)}"
    if limits.memory_bytes is not None and limits.memory_bytes < total:
        free = min(free, limits.memory_bytes)
        summary = f"{in_bytes(limits.memory_bytes)} allowed by the control group of {in_bytes(total)}"
    if needs is not None and needs.host:
        summary += f"; the run takes about {in_bytes(needs.host)} ({needs.host_why})"
    if needs is not None and needs.host > free:
        yield failure("memory", summary, "--strategy zero3_nvme, or a machine with more")
    else:
        yield ok("memory", summary)


def check_shared_memory(num_gpus: int, folder: Path = SHM) -> Iterator[Finding]:
    try:
        free = psutil.disk_usage(str(folder)).free
    except OSError as error:
        yield failure("shm", f"{folder}: {error.strerror}", f"mount -t tmpfs tmpfs {folder}")
        return
    if free < LEAST_SHM:
        text = f"{folder} has {in_bytes(free)} free; processes exchange data there"
        more = f"docker run --shm-size=8g, or mount -o remount,size=8g {folder}"
        # gloo, of a run on CPU, goes through sockets.
        yield warning("shm", text, more) if num_gpus > 1 else ok("shm", text)
    else:
        yield ok("shm", f"{folder} has {in_bytes(free)} free")


def check_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        more = LEAST_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)
        yield warning("files", f"a process may open {soft} files; a run opens hundreds", f"ulimit -n {more}")
    else:
        yield ok("files", f"a process may open {'any number of' if soft == resource.RLIM_INFINITY else soft} files")


def check_disk(output_dir: Path, needs: Sizes | None) -> Iterator[Finding]:
    """Free space on the disk of run.output_dir."""
    folder = nearest_folder(output_dir)
    free = psutil.disk_usage(str(folder)).free
    summary = f"{in_bytes(free)} free for {output_dir}"
    if needs is not None and needs.disk:
        summary += f"; checkpoints and model take about {in_bytes(needs.disk)} ({needs.disk_why})"
    if not os.access(folder, os.W_OK | os.X_OK):
        yield failure("disk", f"{folder} cannot be written to", "change run.output_dir in the recipe")
    elif needs is not None and needs.disk > free:
        yield failure("disk", summary, "free space, or --set run.output_dir=... on a larger disk")
    else:
        yield ok("disk", summary)


def nearest_folder(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
