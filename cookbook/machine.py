"""What this machine has. No torch: the answer must come in a moment."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from cookbook.files import RecipeError

CPU_PROCESSES = 2
"""Processes of a run on a machine without GPUs: enough to be a distributed run, few enough for any laptop."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_gpus() -> int:
    """NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible; 0 where there is no driver.

    Raises:
        RecipeError: the driver does not answer. Taken for none, a part of the processes would leave (`trim_world`).
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0
    program = shutil.which("nvidia-smi")
    if program is None:  # some containers have the devices and not the program
        count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    else:
        try:
            listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RecipeError([f"nvidia-smi -L does not answer ({error}); mend the driver, or hide the GPUs"]) from None
        count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
    return count if visible is None else min(count, len([part for part in visible.split(",") if part.strip()]))


def torch_cuda() -> str | None:
    """The CUDA version that torch was built with, None for a CPU build. Read, not imported: that would take seconds.

    Raises:
        ImportError: torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError("torch is not installed")
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"(?m)^cuda\b[^=]*= *'([\d.]+)'", text)
    return found.group(1) if found else None
