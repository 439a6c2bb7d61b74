# SPDX-License-Identifier: Apache-2.0
"""Hook that Python imports at its start from a folder on PYTHONPATH: with SIMULATED_GPUS set, `import torch` then finds
that many simulated GPUs.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


class _Loader(importlib.abc.Loader):
    """The module's own loader, with something before and after."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Torch(_Loader):
    def exec_module(self, module: ModuleType) -> None:
        spec = importlib.util.spec_from_file_location("simulated_cuda", Path(__file__).parents[1] / "cuda.py")
        assert spec is not None and spec.loader is not None
        cuda: Any = importlib.util.module_from_spec(spec)
        sys.modules["simulated_cuda"] = cuda
        spec.loader.exec_module(cuda)
        cuda.library = cuda.load_library()
        self.inner.exec_module(module)
        cuda.install(module, cuda.library)


class _Bitsandbytes(_Loader):
    """Loader of bitsandbytes. Its CUDA kernels cannot run, so it loads those for the CPU, to which the simulated device
    falls back. Functions that it would compile, for a minute, stay as they are.
    """

    def exec_module(self, module: ModuleType) -> None:
        with _without_cuda() as torch:
            compiles, torch.compile = torch.compile, lambda function=None, **options: function or (lambda inner: inner)
            try:
                self.inner.exec_module(module)
            finally:
                torch.compile = compiles


class _Builder(_Loader):
    """Loader of DeepSpeed's builders. They compile as on a CPU, with the CPU's own builder where it has one: there is
    no toolkit, tensors lie in host memory, and operations that a run on the CPU has compiled serve here too.
    """

    def exec_module(self, module: Any) -> None:
        self.inner.exec_module(module)
        load = module.OpBuilder.jit_load

        def jit_load(builder: Any, verbose: bool = True) -> Any:
            of_the_cpu = importlib.import_module("deepspeed.ops.op_builder.cpu")
            twin = getattr(of_the_cpu, type(builder).__name__, None)
            with _without_cuda():
                return load(twin() if twin is not None else builder, verbose)

        module.OpBuilder.jit_load = jit_load


@contextlib.contextmanager
def _without_cuda() -> Iterator[Any]:
    import torch

    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    try:
        yield torch
    finally:
        torch.cuda.is_available = is_available


LOADERS = {"torch": _Torch, "bitsandbytes": _Bitsandbytes, "deepspeed.ops.op_builder.builder": _Builder}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        loader = LOADERS.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if loader else None
        if loader and spec is not None:
            spec.loader = loader(spec.loader)
        return spec


if os.environ.get("SIMULATED_GPUS", "0") != "0":
    sys.meta_path.insert(0, _Finder())
