"""What some tests need of the machine. Where it is missing they are skipped, by name and with what to install."""

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

from cookbook import simulated_gpus
from cookbook.doctor import software


def need_simulated_gpus() -> None:
    """Ends the test where GPUs cannot be simulated."""
    if why := simulated_gpus.problem():
        _end(f"needs simulated GPUs: {why}")


def need_compiler() -> None:
    """Ends the test where nothing can be compiled, such as a model's layers."""
    if why := simulated_gpus.compiler_problem():
        _end(f"needs a C++ compiler and Python's headers: {why}")


def need_builds_of(strategy: str, *, on_gpus: bool = False) -> None:
    """Ends the test where a strategy, a name or a path, compiles what cannot be compiled here."""
    if Path(strategy).stem.startswith("zero3_nvme") and (why := _nvme_problem(on_gpus)):
        _end(f"needs offload to NVMe: {why}")


@cache
def _nvme_problem(on_gpus: bool) -> str | None:
    """Why DeepSpeed's reads and writes cannot be built, as `make doctor` says it."""
    with tempfile.TemporaryDirectory() as folder:
        found = list(software.check_build(True, on_gpus, Path(folder)))
    return "; ".join(f"{one.says} ({one.remedy})" for one in found if one.status == "failure") or None


def _end(reason: str) -> NoReturn:
    """Where nothing may be missing, as in CI, the test fails."""
    (pytest.fail if "SKIP_NOTHING" in os.environ else pytest.skip)(reason)
