"""The simulated library of NVIDIA's driver with GPUs that a test describes, in the words of
`simulated_gpus/nvml.cpp`.
"""

import tempfile
from pathlib import Path

import pytest

import simulated_gpus
from cookbook.system.gpus import Driver, read_driver
from tests.needs import need_compiler

H200 = "gpu.*.name NVIDIA H200\ngpu.*.memory.total 150754820096\n"


def variables(folder: Path, facts: str) -> dict[str, str]:
    """With which a process finds such a driver."""
    need_compiler()
    path = folder / "driver.txt"
    path.write_text(facts)
    return simulated_gpus.nvml_environment(path)


def read(facts: str, seconds: float = 20) -> Driver:
    """Driver as `read_driver` reads it."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in variables(Path(folder), facts).items():
            patch.setenv(name, value)
        return read_driver(seconds)
