# SPDX-License-Identifier: Apache-2.0
"""GPUs without a GPU: the CUDA paths of torch, accelerate and DeepSpeed, run for real on a machine that has none.

`device.cpp` registers a CUDA device whose bytes lie in host memory, `attention.cpp` its attention kernels, `nccl.cpp` a
process group over gloo; `races.cpp` and `pinned.cpp` find who does not wait; `cuda.py` is what torch.cuda answers, and
`nvml.cpp` the driver's library.
`inject/sitecustomize.py` puts all this into each Python that has the variables of `environment`.
See README.md for what that can show and what it cannot.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).resolve().parent
IN_CHECKOUT = (HERE / "pyproject.toml").is_file()
CACHE = (HERE.parent if IN_CHECKOUT else Path.cwd()) / ".cache" / "simulated_gpus"
"""Folder of the compiled libraries, unless the variable SIMULATED_GPUS_CACHE names another."""
DEVICE, NCCL = ("device.cpp", "attention.cpp", "races.cpp", "pinned.cpp"), ("nccl.cpp",)
HEADERS = ("device.h", "races.h", "pinned.h")
COUNT = "SIMULATED_GPUS"
"""The variable with the number of simulated GPUs."""
BUILD_SECONDS = 900
MOST = 64
"""The number of GPUs for which device.cpp counts memory."""


class SimulationError(RuntimeError):
    """Error where GPUs cannot be simulated, with the reason."""


def is_active() -> bool:
    """True in a process with simulated GPUs: no time that it takes is a measurement."""
    return os.environ.get(COUNT, "0") != "0"


def problem() -> str | None:
    """The reason why GPUs cannot be simulated here, or None."""
    if (cuda := torch_cuda()) is not None:
        return f"this torch is built for CUDA {cuda}, whose own device cannot be replaced"
    return compiler_problem()


def compiler_problem() -> str | None:
    """The reason why nothing can be compiled here, or None."""
    if _compiler() is None:
        return "there is no C++ compiler (apt-get install g++)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's headers are missing (apt-get install python3-dev)"
    return None


def check(count: int) -> None:
    """Check the number of GPUs and this machine, without building anything.

    Raises:
        SimulationError: `count` GPUs cannot be simulated here, see `problem`.
    """
    if not 1 <= count <= MOST:
        raise SimulationError(f"{count} simulated GPUs; write a number from 1 to {MOST}")
    if why := problem():
        raise SimulationError(f"GPUs cannot be simulated here: {why}")


def environment(count: int, *, memory: int | None = None, report: Path | None = None) -> dict[str, str]:
    """Variables with which a process, and those that it starts, see `count` GPUs. Builds the libraries, once.

    Args:
        memory: bytes of each GPU; 80 GiB unless given.
        report: folder in which each process leaves rank_<n>.json: peaks, waits, collectives, operations.

    Raises:
        SimulationError: see `check`; or the compiler failed.
    """
    check(count)
    library = build()
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables = {
        COUNT: str(count),
        "SIMULATED_GPUS_LIBRARY": str(library),
        "PYTHONPATH": os.pathsep.join([str(HERE / "inject"), *others]),
        "PATH": os.pathsep.join([str(HERE / "bin"), os.environ.get("PATH", "")]),
        **nvml_environment(),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count))),
    }
    if memory is not None:
        variables["SIMULATED_GPU_MEMORY"] = str(memory)
    if report is not None:
        variables["SIMULATED_GPUS_REPORT"] = str(report.resolve())
    return variables


def nvml_environment(facts: Path | None = None) -> dict[str, str]:
    """The variables under which pynvml finds the simulated library of the driver, which is built once.

    Args:
        facts: a file with its answers, as `nvml.cpp` describes; else it has as many GPUs as are simulated.

    Raises:
        SimulationError: the compiler failed.
    """
    folder = _built("nvml", ["nvml.cpp"], _compile_nvml)
    folders = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    variables = {"LD_LIBRARY_PATH": os.pathsep.join(folders)}
    return variables | ({"SIMULATED_NVML": str(facts.resolve())} if facts else {})


def build() -> Path:
    """The folder of the libraries for the installed torch, built if they are not there: about a minute of one core. Of
    a torch that has CUDA, the process group alone.

    Raises:
        SimulationError: the compiler failed.
    """
    name = f"torch-{metadata.version('torch')}-python-{sysconfig.get_python_version()}"
    return _built(name, [*DEVICE, *NCCL, *HEADERS], _compile)


def _built(name: str, sources: list[str], make: Callable[[Path], None]) -> Path:
    digest = hashlib.sha256(b"".join((HERE / source).read_bytes() for source in sources)).hexdigest()[:12]
    cache = Path(os.environ.get("SIMULATED_GPUS_CACHE") or CACHE)
    folder = cache / f"{name}-{digest}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            unfinished = Path(f"{folder}.part")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)  # a build that was killed leaves no folder of this name
    return folder


def _compile_nvml(folder: Path) -> None:
    library = str(folder / "libnvidia-ml.so.1")
    _run([[_compiler() or "c++", "-std=c++20", "-fPIC", "-shared", str(HERE / "nvml.cpp"), "-o", library]])


def _compile(folder: Path) -> None:
    compiler, spec = _compiler(), importlib.util.find_spec("torch")
    assert compiler is not None and spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    # Without NDEBUG some classes have members that those of the installed torch have not.
    flags = ["-std=c++20", "-O0", "-fPIC", "-DNDEBUG", "-DUSE_C10D_GLOO", "-DTORCH_EXTENSION_NAME=simulated_nccl"]
    flags += [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-I{sysconfig.get_path('include')}"]
    names = NCCL if torch_cuda() else (*DEVICE, *NCCL)
    objects = {name: str(folder / f"{name}.o") for name in names}
    print("building the simulated GPUs, once for this torch ...", file=sys.stderr, flush=True)
    _run([[compiler, *flags, "-c", str(HERE / name), "-o", path] for name, path in objects.items()])
    linking = [compiler, "-shared", f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"]
    module = folder / f"simulated_nccl{sysconfig.get_config_var('EXT_SUFFIX')}"
    _run([[*linking, objects[NCCL[0]], "-o", str(module), "-ltorch_cpu", "-ltorch_python", "-ltorch", "-lc10"]])
    if DEVICE[0] in objects:
        device = [objects[name] for name in DEVICE]
        _run([[*linking, *device, "-o", str(folder / "libsimulated_gpus.so"), "-ltorch_cpu", "-lc10"]])
    for path in objects.values():
        Path(path).unlink()


def _run(commands: list[list[str]]) -> None:
    """Run commands at the same time."""
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=BUILD_SECONDS)[1] for process in running]
    failed = [error for process, error in zip(running, errors, strict=True) if process.returncode]
    if failed:
        raise SimulationError(f"GPUs cannot be simulated here, since the compiler failed:\n{failed[0][-2000:]}")


def _compiler() -> str | None:
    names = filter(None, (os.environ.get("CXX"), "c++", "g++"))
    return next(filter(None, map(shutil.which, names)), None)


def torch_cuda() -> str | None:
    """The CUDA version that torch was built with, None for a CPU build. Read, not imported: that would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SimulationError("GPUs cannot be simulated here: torch is not installed")
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    version = re.search(r"(?m)^cuda\b[^=]*= *'([\d.]+)'", text)
    return version[1] if version else None
