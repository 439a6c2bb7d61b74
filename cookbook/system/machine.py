"""Cores, GPUs and software of this machine. No torch: the answer must come in a moment."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from cookbook.system.gpus import VARIABLE, InstalledGpu, read_driver, visible_gpus
from cookbook.system.imports import has_torchao
from cookbook.system.shipped import pip_install

CPU_PROCESSES = 2
"""Processes of a run on a machine without GPUs: enough to be a distributed run, few enough for any laptop."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_gpus() -> int:
    """NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible; 0 where there is no driver.

    Raises:
        RecipeError: the driver does not answer.
    """
    if os.environ.get(VARIABLE, "all").strip() in ("", "-1"):  # without asking the driver
        return 0
    return len(visible_gpus(read_driver().gpus))


ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""In torch 2.13's order: the first that is set counts (c10/cuda/CUDAAllocatorConfig.h). Before 2.9 it did not know
the last."""
EXPANDABLE = "expandable_segments:True"


def expand_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's CUDA allocator grow its segments, which leaves few fragments; not where a variable of the user
    configures it. For runs on GPUs, before torch is imported.
    """
    if allocator_settings(environment) is None:
        environment[ALLOCATOR_VARIABLES[-1]] = EXPANDABLE


def allocator_settings(environment: Mapping[str, str] = os.environ) -> str | None:
    """The configuration of torch's CUDA allocator; None for its defaults."""
    return next((environment[name] for name in ALLOCATOR_VARIABLES if name in environment), None)


FP8_CAPABILITY = (8, 9)
"""The least compute capability that multiplies rows of 8 bits with a scale each, that of Ada (torch 2.13,
RowwiseScaledMM.cu).
"""


def fp8_problems(gpus: list[InstalledGpu] | None = None) -> list[tuple[str, str]]:
    """List what this machine lacks for `mixed_precision: fp8`, each with what to do.

    Args:
        gpus: of a run; None asks the driver.
    """
    problems = []
    if not has_torchao():
        problems.append(("mixed_precision is fp8, and torchao is not installed", pip_install("fp8")))
    for gpu in visible_gpus(read_driver().gpus) if gpus is None else gpus:
        if gpu.capability is not None and gpu.capability < FP8_CAPABILITY:
            have, need = (".".join(map(str, pair)) for pair in (gpu.capability, FP8_CAPABILITY))
            why = f"GPU {gpu.index} ({gpu.name}) has compute capability {have}: products of 8 bits need {need}"
            problems.append((f"mixed_precision is fp8, and {why} (Ada, Hopper or later)", "mixed_precision: bf16"))
            break
    return problems


def torch_cuda() -> str | None:
    """The CUDA version that torch was built with, None for a CPU build. Read, not imported: that would take seconds.

    Raises:
        ImportError: torch is not installed.
    """
    text = _package_text("torch", "version.py")
    if text is None:
        raise ImportError("torch is not installed")
    match = re.search(r"(?m)^cuda\b[^=]*= *'([\d.]+)'", text)
    return match.group(1) if match else None


def cuda_home() -> Path | None:
    """The CUDA toolkit's folder that torch's builder takes (torch 2.13, utils/cpp_extension.py, _find_cuda_home)."""
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if given:
        return Path(given)
    if nvcc := shutil.which("nvcc"):
        return Path(nvcc).parents[1]
    usual = Path("/usr/local/cuda")
    return usual if usual.exists() else None


def toolkit_problem(cuda: str | None) -> tuple[str, str] | None:
    """Describe what keeps DeepSpeed from compiling its NVMe operations here, and what to do; None if nothing.

    With a GPU in sight it wants the toolkit's nvcc, headers and libcudart (deepspeed 0.19.8, op_builder/async_io.py,
    AsyncIOBuilder, and builder.py, nvcc_args), of which pip's wheels of torch bring none.

    Args:
        cuda: that torch was built with.
    """
    if cuda is None or "'async_io': True" in (_package_text("deepspeed", "git_version_info_installed.py") or ""):
        return None  # a torch for the CPU, or compiled when DeepSpeed was installed
    command = f"conda install -c nvidia cuda-toolkit={cuda}"
    remedy = f"install NVIDIA's CUDA toolkit {cuda} ({command}) and set CUDA_HOME to it"
    home = cuda_home()
    if home is None:
        return "no CUDA toolkit: CUDA_HOME is not set, nvcc not on PATH, and there is no /usr/local/cuda", remedy
    try:
        version = subprocess.run([home / "bin/nvcc", "-V"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return f"no CUDA toolkit in {home}: it has no bin/nvcc that runs", remedy
    if not (home / "include/cuda_runtime.h").is_file():
        return f"the CUDA toolkit in {home} has no headers (include/cuda_runtime.h)", remedy
    release = re.search(r"release (\d+)", version)
    if release and release[1] != cuda.split(".")[0]:
        return f"the CUDA toolkit in {home} is version {release[1]}, and torch is built for CUDA {cuda}", remedy
    return None


def _package_text(package: str, name: str) -> str | None:
    """A file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / name if spec and spec.origin else None
    return path.read_text(encoding="utf-8") if path and path.is_file() else None
