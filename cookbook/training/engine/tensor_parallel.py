"""Tensor parallel: transformers shards each layer's matrices, and all ranks of a group compute the same samples.

Groups that see other samples hold copies (`TensorParallel`), or share each shard by FSDP2 (`ShardedTensorParallel`).
"""

import contextlib
from collections.abc import Iterator

from cookbook.training.engine.copies import Copies, shards_of_matrices
from cookbook.training.engine.findings import Comparison
from cookbook.training.engine.fsdp2 import Fsdp2WhileRead


class TensorParallel(Copies):
    @contextlib.contextmanager
    def _synchronise(self, last: bool) -> Iterator[None]:
        """Average over the copies after the last micro-batch."""
        with self._backward_apart():
            yield
        if last:
            self._average_over_copies()


class ShardedTensorParallel(Fsdp2WhileRead):
    """FSDP2 over tensor parallel."""

    def _findings(self) -> Iterator[Comparison]:
        yield from super()._findings()
        yield from shards_of_matrices(self)
