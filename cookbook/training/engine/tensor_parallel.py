"""Tensor parallel: transformers shards each layer's matrices, and all ranks of a group compute the same samples.

Groups that see other samples hold copies (`TensorParallel`), or share each shard by FSDP2 (`ShardedTensorParallel`).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from cookbook.config.objectives.forward import Batch
from cookbook.training.engine.base import Engine
from cookbook.training.engine.collectives import average_gradients
from cookbook.training.engine.findings import Comparison, is_sharded
from cookbook.training.engine.fsdp2 import Fsdp2, gather_tied_once
from cookbook.training.engine.start import shard_while_loading, start_processes


def _shards_of_matrices(engine: Engine) -> Iterator[Comparison]:
    # Norms stay whole, and so does one of an adapter's two matrices; every matrix of the model itself is sharded.
    frozen = [parameter for parameter in engine.model.parameters() if not parameter.requires_grad]
    matrices = [p for p in frozen or engine.model.parameters() if p.ndim >= 2]
    yield "whole matrices", 0, sum(not is_sharded(parameter) for parameter in matrices)
    last = {p.device_mesh.size(-1) for p in matrices if isinstance(p, DTensor)}
    yield "tensor-parallel group", {engine.mesh.tensor}, last


class TensorParallel(Engine):
    def _start(self, *, on_cpu: bool, **options: Any) -> Accelerator:
        start_processes(self.timeout, as_gpus=True)
        accelerator = super()._start(on_cpu=on_cpu, **options)
        step = self.mesh.tensor
        groups = [dist.new_group(range(i, self.mesh.num_processes, step)) for i in range(step)]
        self._replicas = groups[self.world.rank % step]
        return accelerator

    def load_options(self, *, is_quantized: bool) -> dict[str, Any]:
        return shard_while_loading(self.mesh)

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        # accelerate's own preparation would wrap the model in DDP.
        return model if self.device.type == "cpu" else model.to(self.device), self.accelerator.prepare(optimizer)

    def _forward(self, function: Callable[[Any, Batch], Any], batch: Batch) -> Any:
        with self.accelerator.autocast():  # accelerate adds it only to models that it prepares
            return super()._forward(function, batch)

    @contextlib.contextmanager
    def _synchronise(self, last: bool) -> Iterator[None]:
        """Keep earlier micro-batches' gradients of whole parameters out of a tensor-parallel backward, and average over
        the copies after the last.

        transformers 5.23 all-reduces some of them over the mesh after each backward (Qwen3's q_norm and k_norm; class
        ReplicatedWithGradAllReduce), which would count the gradients accumulated so far again each time.
        """
        earlier = [(p, p.grad) for p in self.model.parameters() if p.grad is not None and not isinstance(p, DTensor)]
        for parameter, _ in earlier:
            parameter.grad = None
        yield
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if last and self.mesh.replicate > 1:
            self._average_over_copies()

    def _average_over_copies(self) -> None:
        average_gradients(self.model.parameters(), self._replicas, self.gradient_dtype)

    def _findings(self) -> Iterator[Comparison]:
        yield from super()._findings()
        yield from _shards_of_matrices(self)
        yield "copies", self.mesh.replicate, self._replicas.size()


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

    def _meshes(self) -> set[tuple[int, ...]]:
        """Those of norms, which tensor parallel leaves whole, and of matrices."""
        (mesh,) = super()._meshes()
        return {mesh, (*mesh, self.mesh.tensor)}

    def _findings(self) -> Iterator[Comparison]:
        yield from super()._findings()
        yield from _shards_of_matrices(self)
