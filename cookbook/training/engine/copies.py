"""Parts of a model that transformers makes while it reads the weights, in plain torch: shards of matrices, stages of
layers, or both. Ranks that see other samples hold copies of a part.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from cookbook.config.objectives.forward import Batch
from cookbook.facts.score_head import HEAD
from cookbook.training.engine.base import Engine
from cookbook.training.engine.collectives import average_gradients
from cookbook.training.engine.findings import Comparison, is_sharded
from cookbook.training.engine.start import shard_while_loading, start_processes


def shards_of_matrices(engine: Engine) -> Iterator[Comparison]:
    """Compare the shards of this process with those that tensor parallel must have made."""
    # Norms stay whole, and so do one of an adapter's two matrices and a head for sequences, of a few rows; every other
    # matrix of the model itself is sharded.
    named = {name: parameter for name, parameter in engine.model.named_parameters() if not name.startswith(f"{HEAD}.")}
    frozen = [parameter for parameter in named.values() if not parameter.requires_grad]
    matrices = [p for p in frozen or named.values() if p.ndim >= 2]
    yield "whole matrices", 0, sum(not is_sharded(parameter) for parameter in matrices)
    last = {p.device_mesh.size(-1) for p in matrices if isinstance(p, DTensor)}
    yield "tensor-parallel group", {engine.mesh.tensor}, last


class Copies(Engine):
    """Base of tensor and pipeline parallel."""

    def _start(self, *, on_cpu: bool, **options: Any) -> Accelerator:
        start_processes(self.timeout, as_gpus=True)
        accelerator = Engine._start(self, on_cpu=on_cpu, **options)
        groups = [(ranks, dist.new_group(ranks)) for ranks in self.mesh.copies()]
        (self._copies,) = (group for ranks, group in groups if self.world.rank in ranks)
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
    def _backward_apart(self) -> Iterator[None]:
        """Keep earlier micro-batches' gradients of whole parameters out of a tensor-parallel backward, and after it
        this process's shards of the others.

        transformers 5.23 all-reduces some of them over the mesh after each backward (Qwen3's q_norm and k_norm;
        distributed/tensor_parallel.py, ReplicatedWithGradAllReduce), which would count the gradients accumulated so far
        again each time.
        """
        replicated = [p for p in self.model.parameters() if self.mesh.tensor > 1 and not isinstance(p, DTensor)]
        earlier = [(parameter, parameter.grad) for parameter in replicated if parameter.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        yield
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._keep_shards()

    def _keep_shards(self) -> None:
        """The gradient of the lookup of tokens comes whole, whatever the weight is."""
        for parameter in self.model.parameters():
            if isinstance(parameter.grad, DTensor) and is_sharded(parameter) and not is_sharded(parameter.grad):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    def _average_over_copies(self) -> None:
        if self.mesh.replicate > 1:
            average_gradients(self.model.parameters(), self._copies, self.gradient_dtype)

    def _findings(self) -> Iterator[Comparison]:
        yield from super()._findings()
        yield "processes with the same layers and other samples", self.mesh.token_parallel_size, self._copies.size()
        if self.mesh.tensor > 1:
            yield from shards_of_matrices(self)
