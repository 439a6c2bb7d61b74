"""The folder that a strategy offloads to: space, direct access, measured speed, and the `aio` block that suits it.

The file is unlinked as soon as it is open, so that nothing of it stays behind however this ends.
"""

import contextlib
import itertools
import mmap
import os
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import psutil

from cookbook.commands.doctor.finding import Finding, failure, ok, warning
from cookbook.commands.doctor.software import find_built_op
from cookbook.commands.doctor.storage import Sizes
from cookbook.config.strategy import Strategy
from cookbook.system.console import in_bytes

FILE_BYTES = 256 << 20
LEAST_BYTES = 16 << 20
PHASE_SECONDS = 2.0
"""For each of writing, and of reading in one way."""
BLOCKS = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
DEPTHS = (8, 32)
GAIN = 1.25
"""How much faster another block must be to be suggested; disks vary from one second to the next."""
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "glusterfs", "9p", "virtiofs"}


def nvme_folders(strategy: Strategy) -> list[Path]:
    """The folders that the strategy's JSON names, once each."""
    zero = (strategy.deepspeed or {}).get("zero_optimization", {})
    blocks = [zero.get(key) or {} for key in ("offload_optimizer", "offload_param")]
    names = [block["nvme_path"] for block in blocks if block.get("device") == "nvme"]
    return [Path(name).expanduser() for name in dict.fromkeys(names)]


def check_nvme(folder: Path, strategy: Strategy, needs: Sizes | None) -> Iterator[Finding]:
    made: list[Path] = []
    try:
        for path in reversed([folder, *folder.parents]):
            if not path.exists():
                path.mkdir()
                made.append(path)
        yield from _check_folder(folder, strategy, needs)
    except OSError as error:
        place = f"zero_optimization.*.nvme_path in {strategy.deepspeed_file or strategy.path}"
        yield failure("NVMe", f"{folder}: {error.strerror or error}", f"name a folder on an NVMe disk: {place}")
    finally:
        for path in reversed(made):
            with contextlib.suppress(OSError):  # a run has come in between
                path.rmdir()


def _check_folder(folder: Path, strategy: Strategy, needs: Sizes | None) -> Iterator[Finding]:
    place = f"zero_optimization.*.nvme_path in {strategy.deepspeed_file or strategy.path}"
    free = psutil.disk_usage(str(folder)).free
    kind = filesystem(folder)
    seen = f"{folder} ({kind}): {in_bytes(free)} free"
    if needs is not None and needs.nvme:
        seen += f"; offloaded states take about {in_bytes(needs.nvme)} ({needs.nvme_why})"
    if needs is not None and needs.nvme > free:
        yield failure("NVMe", seen, f"free space, or name another folder: {place}")
    elif kind in NETWORK or kind.startswith("fuse"):
        yield warning("NVMe", f"{seen}; a network file system", f"name a folder on a disk of this machine: {place}")
    else:
        yield ok("NVMe", seen)
    size = min(FILE_BYTES, free // 20 // BLOCKS[-1] * BLOCKS[-1])
    if size < LEAST_BYTES:
        yield failure("NVMe", f"{folder}: too full to write {in_bytes(LEAST_BYTES)}", "free space there")
        return
    name = folder / f".doctor-{os.getpid()}"
    try:
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError:
        with contextlib.suppress(OSError):
            name.unlink()
        text = f"{folder} ({kind}) does not support direct access (O_DIRECT), which DeepSpeed uses"
        yield failure("NVMe", text, f"name a folder on another file system, such as ext4 or xfs: {place}")
        return
    try:
        name.unlink()
        yield from _measure(file, size, strategy)
    finally:
        os.close(file)


def filesystem(folder: Path) -> str:
    """The type of the file system that holds a folder."""
    place = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if place.is_relative_to(mount.mountpoint)]
    # Of several at one place the last one mounted is in effect.
    return max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype if mounts else "unknown"


def _measure(file: int, size: int, strategy: Strategy) -> Iterator[Finding]:
    block = BLOCKS[-1]
    buffer = mmap.mmap(-1, block)  # aligned to a page, as direct access wants it
    pattern = os.urandom(4096) * (block // 4096)
    buffer[:] = pattern
    begun, written = time.perf_counter(), 0
    while written < size and (written < LEAST_BYTES or time.perf_counter() - begun < PHASE_SECONDS):
        written += os.pwritev(file, [buffer], written)
    os.fsync(file)
    write_rate = written / (time.perf_counter() - begun)
    read_rates, intact = {}, True
    for block in BLOCKS:
        read_rates[block], same = _read(file, written, block, pattern)
        intact &= same
    if not intact:
        yield failure("NVMe", "what was read is not what was written", "do not use this disk; see dmesg")
        return
    best = max(read_rates, key=read_rates.__getitem__)
    rates = f"writes {write_rate / 1e9:.2f} GB/s, reads {read_rates[best] / 1e9:.2f} GB/s, one request at a time"
    yield ok("NVMe", f"{rates}, directly ({in_bytes(written)})")
    aio, is_built = (strategy.deepspeed or {}).get("aio") or {}, find_built_op() is not None
    aio_block, depth = aio.get("block_size"), aio.get("queue_depth") if is_built else 1
    now = (aio_block, depth) if aio_block and depth else None
    ways: dict[tuple[int, int], float] = {(size, 1): rate for size, rate in read_rates.items()}
    if is_built:
        ways = _with_deepspeed(file, written, now)
    yield from suggest(ways, now, strategy.deepspeed_file or strategy.path, knows_depth=is_built)


def _read(file: int, size: int, block: int, pattern: bytes) -> tuple[float, bool]:
    """Bytes a second, and whether all of them match the pattern."""
    buffer = mmap.mmap(-1, block)
    done, busy, same = 0, 0.0, True
    while done < size and busy < PHASE_SECONDS / len(BLOCKS):
        begun = time.perf_counter()
        count = os.preadv(file, [buffer], done)
        busy += time.perf_counter() - begun
        if count != block:
            break
        same &= buffer[:4096] == pattern[:4096] and buffer[-4096:] == pattern[:4096]
        done += count
    return done / busy, same


def _with_deepspeed(file: int, size: int, now: tuple[int, int] | None) -> dict[tuple[int, int], float]:
    """(block size, queue depth) -> bytes a second, read by DeepSpeed's own operations as a run has built them."""
    import torch

    module = _load_op()
    size = min(size, 64 << 20)
    target = torch.zeros(size, dtype=torch.uint8)
    rates: dict[tuple[int, int], float] = {}
    ways = [*itertools.product(BLOCKS[:3], DEPTHS), *([now] if now else [])]
    for block, depth in dict.fromkeys(ways):
        handle = module.aio_handle(block, depth, False, True, 1)
        for _ in range(2):
            begun = time.perf_counter()
            handle.sync_pread(target, f"/proc/self/fd/{file}", 0)
            rate = size / (time.perf_counter() - begun)
            rates[block, depth] = max(rate, rates.get((block, depth), 0.0))
    return rates


def _load_op() -> Any:
    """The compiled module. DeepSpeed's own loader might rebuild it, and a build that is cut short
    by our time limit would leave a lock behind."""
    path = find_built_op()
    assert path is not None
    for name in ("pin_memory", "async_io"):  # the second needs symbols of the first
        source = path.parents[1] / name / f"{name}.so"
        sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
        spec = spec_from_file_location(name, source, loader=ExtensionFileLoader(name, str(source)))
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def suggest(
    rates: dict[tuple[int, int], float], now: tuple[int, int] | None, file: str | None, *, knows_depth: bool
) -> Iterator[Finding]:
    """The fastest way to read, against the one that the JSON has.

    Args:
        rates: (block size, queue depth) -> bytes a second.
        knows_depth: False if requests were made one at a time, so that nothing is known about depths.
    """
    block, depth = max(rates, key=rates.__getitem__)
    best = rates[block, depth]
    words = f'"block_size": {block}' + (f', "queue_depth": {depth}' if knows_depth else "")
    how = "by DeepSpeed's operations" if knows_depth else "one request at a time"
    if now in rates and best < GAIN * rates[now]:
        text = f"aio block_size {now[0]}" + (f", queue_depth {now[1]}" if knows_depth else "")
        yield ok("NVMe", f"{text} suits: {rates[now] / 1e9:.2f} GB/s {how}, at best {best / 1e9:.2f}")
    else:
        here = f", {rates[now] / 1e9:.2f} as it stands" if now in rates else ""
        yield warning(
            "NVMe", f"reads {best / 1e9:.2f} GB/s {how} with {words}{here}", f'{file}: "aio": {{{words}, ...}}'
        )
