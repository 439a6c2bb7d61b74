"""What this machine has. No torch: the answer must come in a moment."""

import os
import shutil
import subprocess

CPU_PROCESSES = 2
"""Processes of a run on a machine without GPUs: enough to be a distributed run, few enough for any laptop."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_gpus() -> int:
    """NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible; 0 where there is no driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
    return count if visible is None else min(count, len([part for part in visible.split(",") if part.strip()]))
