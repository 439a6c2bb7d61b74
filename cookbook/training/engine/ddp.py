"""One process, and DDP: every rank holds all weights, and gradients are averaged after the last micro-batch."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel

from cookbook.system.files import RecipeError
from cookbook.system.replaced import count_calls
from cookbook.training.engine.base import Engine
from cookbook.training.engine.findings import Comparison, in_words, is_sharded
from cookbook.training.engine.start import start_processes

TORCHS_BUCKET_MIB = 25
"""Torch's default, with which it makes the first bucket smaller."""


class Single(Engine):
    def _findings(self) -> Iterator[Comparison]:
        yield from super()._findings()
        yield "wrapper", False, isinstance(self.model, DistributedDataParallel)
        yield "sharded parameters", 0, sum(is_sharded(parameter) for parameter in self._trained_tensors())


class Ddp(Engine):
    def _start(self, *, on_cpu: bool, **options: Any) -> Accelerator:
        start_processes(self.timeout, as_gpus=False)
        ddp = DistributedDataParallelKwargs(**self._options)
        return super()._start(on_cpu=on_cpu, kwargs_handlers=[ddp])

    @property
    def _options(self) -> dict[str, Any]:
        """DDP's arguments. Gradients are views of its buckets, which saves a copy of them."""
        # No static_graph: under no_sync, which accumulation needs, torch 2.13 ends the first step with an internal
        # assert (reducer.cpp:1732). Parameters without a gradient are an error, see `unreached`.
        options = {"gradient_as_bucket_view": True, "broadcast_buffers": False, "find_unused_parameters": False}
        return {**options, "bucket_cap_mb": self.strategy.bucket_cap_mb or TORCHS_BUCKET_MIB}

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        wrapped, optimizer = super()._wrap(model, optimizer)
        if self.gradient_dtype is not None and isinstance(wrapped, DistributedDataParallel):
            # No PowerSGD: its error depends on gradients, step and rank of its factors, so no band can be stated; and
            # its state differs on each process, so no other strategy or number of processes could resume it.
            wrapped.register_comm_hook(self.gradient_dtype, count_calls(_exchange, "the buckets of DDP"))
        return wrapped, optimizer

    @property
    def _is_wrapped(self) -> bool:
        return isinstance(self.model, DistributedDataParallel)

    def _synchronise(self, last: bool) -> contextlib.AbstractContextManager:
        return self.model.no_sync() if self._is_wrapped and not last else contextlib.nullcontext()

    def unreached_parameters(self) -> list[str]:
        """DDP reduces a bucket when all its gradients have come. Those beside a parameter that gets none stay as each
        rank has them, and torch raises only in the next step, without names.
        """
        names = super().unreached_parameters()
        if names and self._is_wrapped:
            self.close()
            what = f"{len(names)} trained parameters got no gradient in the first step, and DDP waits for them"
            raise RecipeError(
                f"{self.strategy.path}: {what}: {in_words(names)}; take fsdp2 or zero2, or take them out of the model"
            )
        return names

    def _clear_gradients(self) -> None:
        # Gradients are views of DDP's buckets. Set to None, all but the last micro-batch would allocate copies of them.
        self.optimizer.zero_grad(set_to_none=not self._is_wrapped)

    def _findings(self) -> Iterator[Comparison]:
        yield from super()._findings()
        # With one process there is nothing to synchronize, wrapped or not.
        yield "wrapper", self._is_wrapped or self.plan.num_processes > 1, self._is_wrapped
        yield "sharded parameters", 0, sum(is_sharded(parameter) for parameter in self._trained_tensors())
        if self._is_wrapped:
            effects = {name: getattr(self.model, name, None) for name in self._options}
            effects["bucket_cap_mb"] = self.model.bucket_bytes_cap // 2**20
            yield "DDP", self._options, effects
            dtypes = [dtype for _, dtype in self.model._comm_hooks]
            yield "dtypes of exchanged gradients", [self.gradient_dtype] if self.gradient_dtype else [], dtypes


def _exchange(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket, the sums over micro-batches in float32, over the ranks in `dtype`. As torch's own hooks
    (ddp_comm_hooks/default_hooks.py, _allreduce_fut), of which torch 2.13 refuses bf16_compress_hook without NCCL.
    """
    gradients = bucket.buffer()
    sent = gradients.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))
