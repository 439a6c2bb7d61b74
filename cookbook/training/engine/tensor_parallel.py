"""Tensor parallel: transformers shards each layer's matrices, and all ranks of a group compute the same samples.

Groups that see other samples hold copies (`TensorParallel`), or share each shard by FSDP2 (`ShardedTensorParallel`).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator

from cookbook.training.engine.base import Engine
from cookbook.training.engine.copies import Copies, shards_of_matrices
from cookbook.training.engine.findings import Comparison
from cookbook.training.engine.fsdp2 import Fsdp2, gather_tied_once
from cookbook.training.engine.start import shard_while_loading, start_processes


class TensorParallel(Copies):
    @contextlib.contextmanager
    def _synchronise(self, last: bool) -> Iterator[None]:
        """Average over the copies after the last micro-batch."""
        with self._backward_apart():
            yield
        if last:
            self._average_over_copies()


class ShardedTensorParallel(Fsdp2):
    """FSDP2 over tensor parallel, both by transformers: accelerate has no part in it."""

    casts_output = False

    def _start(self, *, on_cpu: bool, **options: Any) -> Accelerator:
        start_processes(self.timeout, as_gpus=True)
        return Engine._start(self, on_cpu=on_cpu, **options)

    def load_options(self, *, is_quantized: bool) -> dict[str, Any]:
        return shard_while_loading(self.mesh, fsdp_mixed_precision=self.mixed_precision == "bf16")

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        gather_tied_once(model)
        self._reduce_in_gradient_dtype(model)
        return model, self.accelerator.prepare(optimizer)

    def _findings(self) -> Iterator[Comparison]:
        yield from super()._findings()
        yield from shards_of_matrices(self)
