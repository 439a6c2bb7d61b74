"""The NVIDIA GPUs of this machine: what nvidia-smi tells of them, and which CUDA_VISIBLE_DEVICES leaves. No torch."""

import csv
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cookbook.files import RecipeError

VARIABLE = "CUDA_VISIBLE_DEVICES"
FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
QUERY = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]


@dataclass(frozen=True, kw_only=True)
class InstalledGpu:
    index: int
    uuid: str = ""
    """Empty where there is no nvidia-smi to tell."""
    name: str = ""
    driver: str = ""
    total_bytes: int = 0
    """0 where the driver does not tell: without nvidia-smi, and for a slice (MIG)."""
    used_bytes: int = 0
    pcie_generation: int | None = None
    pcie_width: int | None = None
    """Lanes as the slot is wired."""
    pcie_width_max: int | None = None


def installed_gpus() -> list[InstalledGpu]:
    """All of them, in nvidia-smi's order; none where there is no driver.

    Raises:
        RecipeError: the driver does not answer. Taken for none, a part of the processes would leave (`trim_world`).
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return unnamed_gpus()
    told = _ask(program, *QUERY)
    if told is not None:
        return parse_gpus(told)
    # A driver that does not know a field that is asked for has GPUs all the same.
    lines = (_ask(program, "-L") or "").splitlines()
    return [InstalledGpu(index=index) for index in range(sum(line.startswith("GPU ") for line in lines))]


def _ask(*command: str) -> str | None:
    """What it prints; None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RecipeError([f"nvidia-smi does not answer ({error}); fix the driver, or hide the GPUs"]) from None
    return done.stdout if done.returncode == 0 else None


def unnamed_gpus() -> list[InstalledGpu]:
    """Those of a container that has the devices and not the program."""
    return [InstalledGpu(index=index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def parse_gpus(text: str) -> list[InstalledGpu]:
    """The answer to QUERY. nvidia-smi writes [N/A] or [Not Supported] for what it does not know."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(FIELDS):
            continue
        index, uuid, name, driver, total, used, generation, width, widest = (cell.strip() for cell in row)
        found.append(
            InstalledGpu(
                index=int(index),
                uuid=uuid,
                name=name,
                driver=driver,
                total_bytes=(_number(total) or 0) << 20,
                used_bytes=(_number(used) or 0) << 20,
                pcie_generation=_number(generation),
                pcie_width=_number(width),
                pcie_width_max=_number(widest),
            )
        )
    return found


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def visible_gpus(gpus: list[InstalledGpu], visible: str | None = None) -> list[InstalledGpu]:
    """Those that CUDA would see, in its order.

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
    found: list[InstalledGpu] = []
    for word in words:
        gpu = _by_uuid(gpus, word, len(found)) if by_uuid else _by_number(gpus, word)
        if gpu is None:
            break
        if gpu in found:
            return []
        found.append(gpu)
    return found


def _by_number(gpus: list[InstalledGpu], word: str) -> InstalledGpu | None:
    number = re.match(r"\d+", word)
    return next((gpu for gpu in gpus if number and gpu.index == int(number.group())), None)


def _by_uuid(gpus: list[InstalledGpu], word: str, position: int) -> InstalledGpu | None:
    if not word.startswith("GPU-"):
        return None
    if all(not gpu.uuid for gpu in gpus):  # nobody tells whose it is
        return gpus[position] if position < len(gpus) else None
    fitting = [gpu for gpu in gpus if gpu.uuid.startswith(word)]
    return fitting[0] if len(fitting) == 1 else None
