"""Tensor parallel: transformers shards each layer's matrices, and a group of processes computes the same samples."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cookbook.engine.base import Batch, Engine
from cookbook.engine.findings import Finding, is_sharded
from cookbook.engine.start import start_processes


class TensorParallel(Engine):
    def _start(self, *, on_cpu: bool) -> Any:
        from accelerate import Accelerator

        start_processes(self.timeout, as_gpus=True)
        return Accelerator(cpu=on_cpu, mixed_precision=self.mixed_precision)

    def load_options(self, *, is_quantized: bool) -> dict[str, Any]:
        """transformers shards the model while it is read, and puts each shard on its GPU."""
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=self.mesh.tensor)}

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        # accelerate's own preparation would wrap the model in DDP.
        return model if self.device.type == "cpu" else model.to(self.device), self.accelerator.prepare(optimizer)

    def _forward(self, function: Callable[[Any, Batch], Any], batch: Batch) -> Any:
        with self.accelerator.autocast():  # which accelerate puts into the models that it prepares
            return super()._forward(function, batch)

    @contextlib.contextmanager
    def _synchronise(self, last: bool) -> Iterator[None]:
        """Keeps the gradients of earlier micro-batches out of a tensor-parallel backward, for whole parameters.

        transformers 5.23 sums some of them over the mesh after each backward (Qwen3's q_norm and k_norm; class
        ReplicatedWithGradAllReduce): with what was accumulated before, that part would be summed again each time.
        """
        earlier = [(p, p.grad) for p in self.model.parameters() if p.grad is not None and not isinstance(p, DTensor)]
        for parameter, _ in earlier:
            parameter.grad = None
        yield
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _findings(self) -> Iterator[Finding]:
        yield from super()._findings()
        meshes = {parameter.device_mesh.size() for parameter in self.model.parameters() if is_sharded(parameter)}
        yield "tensor-parallel mesh", {self.mesh.tensor}, meshes
        # Norms stay whole, and of an adapter's two small matrices one; every matrix of the model itself is sharded.
        frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        yield "whole matrices", 0, sum(not is_sharded(p) for p in frozen or self._trained() if p.ndim >= 2)
