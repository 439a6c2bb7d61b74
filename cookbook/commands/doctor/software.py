"""Versions against those that the project was tested with, and what compiles DeepSpeed's NVMe operations."""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from filelock import FileLock, Timeout

import simulated_gpus
from cookbook.commands.doctor.finding import Finding, failure, ok, warning
from cookbook.system.machine import toolkit_problem, torch_cuda
from cookbook.system.shipped import in_repository

REQUIREMENTS = Path("requirements.txt")
EXTENSIONS = Path(".cache/torch_extensions")
"""Where a run builds, as `build_ops` and train.py say, unless TORCH_EXTENSIONS_DIR is set."""
TESTED_PYTHON = (3, 11)

KNOWN_BAD = (
    ("torch", "2.6", "its reader of weights could run code (CVE-2025-32434)"),
    ("torch", "2.10", "torch.nn.attention.varlen, which packing calls, came with 2.10"),
    ("transformers", "5", "the project uses calls that came with 5.0"),
)
"""(package, first version without the problem, the problem): a failure, where another untested version is a warning."""

KERNEL = (5, 5)
"""accelerate 1.15, utils/other.py, check_os_kernel: below, a run may hang."""

DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the oldest driver branch that runs it: docs.nvidia.com/deploy/cuda-compatibility, table 1."""


def version_numbers(text: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0); the rest is dropped."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:4])


def read_pins(text: str) -> dict[str, str]:
    """The `name==version` lines of a requirements file."""
    return dict(re.findall(r"(?m)^([\w.-]+)==([^\s;#]+)", text))


def check_python() -> Iterator[Finding]:
    here, tested = platform.python_version(), ".".join(map(str, TESTED_PYTHON))
    if sys.version_info < TESTED_PYTHON:
        elsewhere = f"install the project into an environment of Python {tested} or newer"
        way_out = f"make setup PYTHON=python{tested}" if in_repository() else elsewhere
        yield failure("Python", f"{here}; the project needs {tested}", way_out)
    else:
        yield ok("Python", here if sys.version_info[:2] == TESTED_PYTHON else f"{here}; figures are from {tested}")
    kernel = version_numbers(platform.release())[:2]
    if platform.system() != "Linux":
        yield failure("system", f"{platform.system()}; runs need Linux", "use a Linux machine, or WSL 2 on Windows")
    elif kernel < KERNEL:
        yield warning("system", f"Linux {platform.release()}: below 5.5 runs may hang", "update the kernel")


def check_versions(requirements: Path = REQUIREMENTS) -> Iterator[Finding]:
    """The installed packages against the pins."""
    try:
        pins = read_pins(requirements.read_text(encoding="utf-8"))
    except OSError as error:
        yield failure("versions", f"{requirements}: {error.strerror}", "run this in the project's folder")
        return
    same = 0
    for name, pin in pins.items():
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield failure("versions", f"{name} is not installed", f"pip install {name}=={pin}")
            continue
        bad = [why for package, first, why in KNOWN_BAD if package == name and _is_before(here, first)]
        if bad:
            yield failure("versions", f"{name} {here} is known to be bad: {bad[0]}", f"pip install {name}=={pin}")
        elif here.split("+")[0] != pin.split("+")[0]:
            yield warning("versions", f"{name} {here} is not tested; {pin} is", f"pip install {name}=={pin}")
        else:
            same += 1
    if same == len(pins):
        yield ok("versions", f"all {same} packages are those of {requirements.name}")


def _is_before(version: str, first: str) -> bool:
    return version_numbers(version) < version_numbers(first)


def check_torch_build(num_gpus: int, driver: str | None) -> Iterator[Finding]:
    """Check that this build of torch can use the GPUs and their driver."""
    try:
        cuda, version = torch_cuda(), metadata.version("torch")
    except (ImportError, metadata.PackageNotFoundError):
        return  # `check_versions` reports it
    if not num_gpus:
        yield ok("torch", f"{version}, {f'for CUDA {cuda}' if cuda else 'for CPU'}")
        return
    if simulated_gpus.is_active():
        yield ok("torch", f"{version}, on simulated GPUs")
        return
    if cuda is None:
        gpus = f"{num_gpus} GPU{'s are' if num_gpus > 1 else ' is'} here"
        again = f"pip install --force-reinstall --index-url https://pypi.org/simple torch=={version.split('+')[0]}"
        yield failure("torch", f"{version} is built for CPU only, and {gpus}", again)
        return
    oldest = DRIVER_OF_CUDA.get(version_numbers(cuda)[0])
    if driver and oldest and version_numbers(driver)[0] < oldest:
        text = f"{version} for CUDA {cuda} needs driver {oldest} or newer; here is {driver}"
        yield failure("torch", text, f"update the driver to {oldest} or newer")
        return
    yield ok("torch", f"{version} for CUDA {cuda}" + (f", driver {driver}" if driver else ""))


def check_build(needs_nvme: bool, on_gpus: bool, folder: Path) -> Iterator[Finding]:
    """Compiler, ninja and headers, by compiling a few lines, and with GPUs the CUDA toolkit; a failure only for a
    strategy that builds something.

    Args:
        folder: a temporary one.
    """
    missing, toolkit = [], None
    if on_gpus:
        with contextlib.suppress(ImportError):  # `check_versions` reports it
            toolkit = toolkit_problem(torch_cuda())
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        missing.append((f"C++ compiler ({compiler})", "apt-get install g++"))
    else:
        for header, call, flags, package in (
            ("libaio.h", "io_context_t c = 0; return io_setup(1, &c);", ["-laio"], "libaio-dev"),
            ("Python.h", "return 0;", ["-I", sysconfig.get_paths()["include"]], "python3-dev"),
        ):
            if not _compiles(compiler, header, call, flags, folder):
                missing.append((header, f"apt-get install {package}"))
    beside = str(Path(sys.executable).parent)  # where a run finds it first
    if shutil.which("ninja", path=os.pathsep.join([beside, os.environ.get("PATH", "")])) is None:
        missing.append(("ninja", "pip install ninja"))
    built = find_built_op()
    for what, remedy in missing:
        if needs_nvme and built is None:
            yield failure("build", f"no {what}: DeepSpeed's NVMe reads and writes cannot be built", remedy)
        else:
            yield ok("build", f"no {what}, which only offload to NVMe would need ({remedy})")
    if not missing:
        yield ok("build", f"{compiler}, ninja, libaio and Python.h")
    if toolkit is not None and needs_nvme:  # also where they are built: torch checks the toolkit before it loads them
        yield failure("build", f"{toolkit[0]}: DeepSpeed's NVMe reads and writes cannot be built", toolkit[1])
    elif toolkit is not None:
        yield ok("build", f"{toolkit[0]}; only offload to NVMe would need it ({toolkit[1]})")
    elif needs_nvme and built is not None:
        yield ok("build", f"DeepSpeed's NVMe operations are built: {built}")
    elif needs_nvme and not missing:
        yield ok("build", "DeepSpeed's NVMe operations can be built; the first run does, which takes minutes")
    yield from check_locks()


def _compiles(compiler: str, header: str, call: str, flags: list[str], folder: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        source = Path(place) / "try.cpp"
        source.write_text(f"#include <{header}>\nint main() {{ {call} }}\n")
        command = [compiler, str(source), "-o", str(Path(place) / "try"), *flags]
        # Ended at the deadline, a compiler leaves its own temporary files: in a folder that goes.
        variables = {**os.environ, "TMPDIR": place}
        return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env=variables).returncode == 0


def extensions_folder() -> Path:
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or EXTENSIONS)


def find_built_op() -> Path | None:
    """DeepSpeed's compiled asynchronous input and output, if a run has built it."""
    path = extensions_folder() / "async_io" / "async_io.so"
    return path if path.is_file() else None


def check_locks() -> Iterator[Finding]:
    """torch waits for a lock in its build folder without end, whoever left it (cpp_extension.py, FileBaton)."""
    folder = extensions_folder()
    locks = sorted(folder.glob("*/lock"))
    if not locks:
        return
    guard = folder / "cookbook.lock"
    if guard.is_file():
        try:
            with FileLock(guard, timeout=0):
                pass
        except Timeout:
            yield ok("build", f"another run is building in {folder}")
            return
    for lock in locks:
        yield warning("build", f"{lock} was left by a build that died, and torch would wait for it", f"rm {lock}")
