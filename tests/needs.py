"""What some tests need of the machine. Where it is missing they are skipped, by name and with what to install."""

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

from cookbook import simulated_gpus
from cookbook.doctor import software

ROOT = Path(__file__).parents[1]


def need_simulated_gpus() -> None:
    """Ends the test where GPUs cannot be simulated."""
    if why := simulated_gpus.problem():
        _end(f"needs simulated GPUs: {why}")


def need_compiler() -> None:
    """Ends the test where nothing can be compiled, such as a model's layers."""
    if why := simulated_gpus.compiler_problem():
        _end(f"needs a C++ compiler and Python's headers: {why}")


def need_builds_of(strategy: str, *, on_gpus: bool = False) -> None:
    """Ends the test where a strategy, a name or a path, compiles what cannot be compiled here; else has it compiled
    before the run, whose limit of time it would use up on a slow machine.
    """
    if not Path(strategy).stem.startswith("zero3_nvme"):
        return
    if why := _nvme_problem(on_gpus):
        _end(f"needs offload to NVMe: {why}")
    if not on_gpus:
        _build_nvme()


@cache
def _nvme_problem(on_gpus: bool) -> str | None:
    """Why DeepSpeed's reads and writes cannot be built, as `make doctor` says it."""
    with tempfile.TemporaryDirectory() as folder:
        found = list(software.check_build(True, on_gpus, Path(folder)))
    return "; ".join(f"{one.says} ({one.remedy})" for one in found if one.status == "failure") or None


@cache
def _build_nvme() -> None:
    if (ROOT / software.extensions_folder() / "async_io/async_io.so").is_file():
        return
    code = "build_ops(load_strategy(Path('accelerate_configs/zero3_nvme.yaml')), Path('.cache'))"
    imports = "from pathlib import Path; from cookbook.engine import build_ops; from cookbook.strategy import *"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", f"{imports}; {code}"], cwd=ROOT, env=hidden, check=True)


def _end(reason: str) -> NoReturn:
    """Where nothing may be missing, as in CI, the test fails."""
    (pytest.fail if "SKIP_NOTHING" in os.environ else pytest.skip)(reason)
