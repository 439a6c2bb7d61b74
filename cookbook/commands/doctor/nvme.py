"""The folder that a strategy offloads to: space, file system, direct access; DeepSpeed's `ds_nvme_tune` measures it."""

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import psutil

from cookbook.commands.doctor.finding import Finding, failure, ok, warning
from cookbook.commands.doctor.storage import Sizes
from cookbook.config.strategy import Strategy
from cookbook.system.console import in_bytes

KERNELS = Path("/proc/filesystems")
"""Lists the kernel's file systems, with `nodev` before each that is on no disk of this machine."""
LOCAL = {"tmpfs", "ramfs", "overlay", "zfs"}
"""File systems with `nodev` that are of no network either. Any other may be."""


def nvme_folders(strategy: Strategy) -> list[Path]:
    """The folders that the strategy's JSON names, once each."""
    zero = (strategy.deepspeed or {}).get("zero_optimization", {})
    blocks = [zero.get(key) or {} for key in ("offload_optimizer", "offload_param")]
    names = [block["nvme_path"] for block in blocks if block.get("device") == "nvme"]
    return [Path(name).expanduser() for name in dict.fromkeys(names)]


def check_nvme(folder: Path, strategy: Strategy, needs: Sizes | None) -> Iterator[Finding]:
    file = strategy.deepspeed_file or strategy.path
    place = f"zero_optimization.*.nvme_path in {file}"
    made: list[Path] = []
    try:
        for path in reversed([folder, *folder.parents]):
            if not path.exists():
                path.mkdir()
                made.append(path)
        kind = filesystem(folder)
        yield _check_space(folder, kind, needs, place)
        if not _has_direct_access(folder):
            text = f"{folder} ({kind}) does not support direct access (O_DIRECT), which DeepSpeed uses"
            yield failure("NVMe", text, f"name a folder on another file system, such as ext4 or xfs: {place}")
            return
    except OSError as error:
        yield failure("NVMe", f"{folder}: {error.strerror or error}", f"name a folder on an NVMe disk: {place}")
        return
    finally:
        for path in reversed(made):
            with contextlib.suppress(OSError):  # a run has come in between
                path.rmdir()
    aio = (strategy.deepspeed or {}).get("aio") or {}
    words = ", ".join(f"{key} {aio[key]}" for key in ("block_size", "queue_depth") if key in aio)
    measure = f"ds_nvme_tune --nvme_dir {shlex.quote(str(folder))}"
    yield ok(
        "NVMe", f"aio has {words or 'the defaults'}; `{measure}` measures the disk and prints what suits it ({file})"
    )


def _check_space(folder: Path, kind: str, needs: Sizes | None, place: str) -> Finding:
    free = psutil.disk_usage(str(folder)).free
    summary = f"{folder} ({kind}): {in_bytes(free)} free"
    if needs is not None and needs.nvme:
        summary += f"; offloaded states take about {in_bytes(needs.nvme)} ({needs.nvme_why})"
    if needs is not None and needs.nvme > free:
        return failure("NVMe", summary, f"free space, or name another folder: {place}")
    if kind not in LOCAL | _of_disks():
        return warning(
            "NVMe", f"{summary}; on no disk of this machine", f"name a folder on a disk of this machine: {place}"
        )
    return ok("NVMe", summary)


def _of_disks() -> set[str]:
    """Names of the file systems that are on disks."""
    return {line.strip() for line in KERNELS.read_text(encoding="utf-8").splitlines() if not line.startswith("nodev")}


def _has_direct_access(folder: Path) -> bool:
    """Opens a file of no bytes, which goes at once.

    Raises:
        OSError: no file can be made there.
    """
    path = folder / f".doctor-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            # Some file systems refuse O_DIRECT only when a file is opened, so one is opened.
            os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
        except OSError:
            return False
    finally:
        path.unlink(missing_ok=True)
    return True


def filesystem(folder: Path) -> str:
    """The type of the file system that holds a folder."""
    place = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if place.is_relative_to(mount.mountpoint)]
    # Of several at one place the last one mounted is in effect.
    return max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype if mounts else "unknown"
