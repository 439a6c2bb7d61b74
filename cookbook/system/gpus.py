"""The NVIDIA GPUs of this machine, from their driver, and which of them CUDA_VISIBLE_DEVICES leaves. No torch."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from cookbook.system.files import RecipeError

VARIABLE = "CUDA_VISIBLE_DEVICES"
TIMEOUT_SECONDS = 60.0
NO_LIBRARY, NOT_LOADED = 12, 9  # nvmlReturn_t


@dataclass(frozen=True, kw_only=True)
class InstalledGpu:
    index: int
    uuid: str = ""
    """Empty where there is no driver library to ask."""
    name: str = ""
    driver: str = ""
    capability: tuple[int, int] | None = None
    """Compute capability as (major, minor); None if not known."""
    total_bytes: int = 0
    """0 if not known: without the driver library, and for a slice (MIG)."""
    used_bytes: int = 0
    pcie_generation: int | None = None
    pcie_width: int | None = None
    """Lanes as the slot is wired."""
    pcie_width_max: int | None = None
    nvlink_gb: float | None = None
    """GB/s of one NVLink in one direction."""
    processes: list[str] = field(default_factory=list)
    """`name (pid)` of each that computes on it."""


@dataclass(frozen=True, kw_only=True)
class GpuPair:
    gpus: list[int]
    """Two indices."""
    nvlinks: int
    """Active between them, directly or through a switch."""
    ancestor: int | None
    """The level of the PCIe tree at which they meet: nvmlGpuTopologyLevel_t, larger is farther."""
    peer_status: int | None
    """Status of reading each other's memory: nvmlGpuP2PStatus_t, 0 if each can."""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """Report of the driver on all GPUs and their links."""

    gpus: list[InstalledGpu]
    """In NVML's order; none where the driver is not loaded. Without its library, those in /dev."""
    pairs: list[GpuPair] = field(default_factory=list)
    is_loaded: bool = True


LIBRARY_PATH = "LD_LIBRARY_PATH"
_searched_in_vain: set[str | None] = set()
"""Values of `LIBRARY_PATH` with which there was no driver library: a command asks for the GPUs several times."""


def read_driver(seconds: float = TIMEOUT_SECONDS) -> Driver:
    """Asks NVML in a child process (`nvml.py`), which may hang where the driver does.

    Raises:
        RecipeError: the driver does not answer, or with an error. Taken for no GPUs, a part of the processes would
            leave (`trim_world`).
    """
    if os.environ.get(LIBRARY_PATH) in _searched_in_vain:
        return Driver(gpus=unnamed_gpus())
    command = [sys.executable, "-P", str(Path(__file__).with_name("nvml.py"))]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    try:
        answer, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        problem = f"the NVIDIA driver does not answer within {seconds:.0f} s"
        raise RecipeError(f"{problem}; fix it, or hide the GPUs with CUDA_VISIBLE_DEVICES=") from None
    finally:
        child.kill()  # and not waited for: inside the driver it may never end
    if child.returncode:
        reason = (errors.strip() or f"exit code {child.returncode}").splitlines()[-1]
        raise RecipeError(f"the NVIDIA driver cannot be asked: {reason}; reinstall requirements.txt, or the driver")
    report = json.loads(answer)
    if "error" in report:
        if report["code"] == NO_LIBRARY:
            _searched_in_vain.add(os.environ.get(LIBRARY_PATH))
            return Driver(gpus=unnamed_gpus())
        if report["code"] == NOT_LOADED:
            return Driver(gpus=[], is_loaded=False)
        raise RecipeError(f"the NVIDIA driver fails: {report['error']}; reboot, or reinstall it")
    for gpu in report["gpus"]:
        gpu["capability"] = gpu["capability"] and tuple(gpu["capability"])  # JSON has lists alone
    return Driver(
        gpus=[InstalledGpu(**gpu) for gpu in report["gpus"]],
        pairs=[GpuPair(**pair) for pair in report["pairs"]],
    )


def unnamed_gpus() -> list[InstalledGpu]:
    """The GPUs of a container that has the devices but not the driver's library."""
    return [InstalledGpu(index=index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def visible_gpus(gpus: list[InstalledGpu], visible: str | None = None) -> list[InstalledGpu]:
    """The GPUs that CUDA would see, in its order.

    Names are all numbers or all UUIDs, as the first one is; the first that is not there hides itself and all after it,
    and one that comes twice hides all (torch 2.13, cuda/__init__.py, _parse_visible_devices, which follows CUDA). Of
    slices of a GPU (MIG) a process sees the first.

    Args:
        visible: CUDA_VISIBLE_DEVICES, unless it is this process's.
    """
    visible = os.environ.get(VARIABLE) if visible is None else visible
    if visible is None:
        return gpus
    words = [word.strip() for word in visible.split(",")]
    if words[0].startswith("MIG-"):
        return [InstalledGpu(index=0, uuid=words[0], name="MIG")] if gpus else []
    by_uuid = words[0].startswith("GPU-")
    chosen: list[InstalledGpu] = []
    for word in words:
        if not by_uuid:
            number = re.match(r"\d+", word)
            fitting = [gpu for gpu in gpus if number and gpu.index == int(number.group())]
        elif not word.startswith("GPU-"):
            break
        elif all(not gpu.uuid for gpu in gpus):  # not known whose it is
            fitting = gpus[len(chosen) :][:1]
        else:
            fitting = [gpu for gpu in gpus if gpu.uuid.startswith(word)]
        if len(fitting) != 1:
            break
        if fitting[0] in chosen:
            return []
        chosen += fitting
    return chosen
