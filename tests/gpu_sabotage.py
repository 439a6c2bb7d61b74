"""Mistakes that no run on the CPU shows, put into a run on simulated GPUs, which must refuse each."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers import modeling_utils

from cookbook.run import shortage
from cookbook.training.checkpoint.tensors import StagedPiece
from cookbook.training.engine import Engine, base, ddp
from cookbook.training.engine.collectives import Collectives
from cookbook.training.engine.fsdp2 import Fsdp2
from cookbook.training.engine.zero import Zero
from cookbook.training.models import attention
from tests import sabotage, warm_parent


def host_tensor_in_a_collective() -> None:
    def all_reduce_max(self: Collectives, *values: float) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    Collectives.all_reduce_max = all_reduce_max


def strided_tensor_in_a_collective() -> None:
    def all_reduce_max(self: Collectives, *values: float) -> list[float]:
        tensor = torch.tensor([values, values], device=self.device).T[:, 0].expand(3, -1).T
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor[:, 0].tolist()

    Collectives.all_reduce_max = all_reduce_max


def result_read_before_its_wait() -> None:
    """The sum that every step asks for, begun and read at once. It is the right one here, where it is there at once."""

    def all_reduce_max(self: Collectives, *values: float) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
        listed = tensor.tolist()
        work.wait()
        return listed

    Collectives.all_reduce_max = all_reduce_max


def batch_in_the_memory_of_the_one_before() -> None:
    """Lay what goes to the GPU into pinned memory that the copy before may still read. Here it has the right
    numbers, since a copy has been made when it returns.
    """
    buffers: dict[Any, torch.Tensor] = {}

    def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.is_cuda:
            return tensor
        key = tensor.shape, tensor.dtype
        if key not in buffers:
            buffers[key] = torch.empty_like(tensor, pin_memory=True)
        return buffers[key].copy_(tensor).to(device, non_blocking=True)

    base.to_device = to_device


def saved_before_it_is_there() -> None:
    """A save in the background copies the state to pinned memory, and does not wait for that."""

    def copy_of(piece: Any, buffer: torch.Tensor | None = None) -> StagedPiece:
        data = torch.empty_like(piece.data, device="cpu", pin_memory=True).copy_(piece.data.detach(), non_blocking=True)
        return StagedPiece(piece.name, piece.kind, piece.start, piece.stride, data)

    StagedPiece.copy_of = copy_of  # type: ignore[method-assign]


def loss_scale_beside_gradients_of_the_host() -> None:
    """torch's own place for the loss scale, which copies it to where offloaded gradients are and does not wait."""
    Fsdp2._device_of_gradients = None


def told_before_it_waits() -> None:
    """No mistake: what a process asked for is written before it reports a shortage, or waits until another has and the
    launcher ends it. And transformers, which reserves what a model will take but 1.2 GiB, reserves nothing of a GPU of
    megabytes.
    """
    modeling_utils.caching_allocator_warmup = lambda *unused: None
    plain = shortage.end_run

    def end_run(error: BaseException, recipe: Any, *others: Any) -> int:
        warm_parent.report(int(os.environ["RANK"]), Path(recipe.run.output_dir).parent)
        return plain(error, recipe, *others)

    shortage.end_run = end_run


def gathers_in_turn() -> None:
    """FSDP2 gathers a layer when the one before has computed, and on its stream: the same numbers, and slower."""

    def streams(self: Any, *unused: Any) -> tuple[Any, Any]:
        current = self.device_handle.current_stream()
        return current, current

    _fsdp_param_group.FSDPCommContext.get_all_gather_streams = streams
    _fsdp_param_group.FSDPParamGroup._backward_prefetch = lambda self: None


def gathers_when_needed() -> None:
    """ZeRO-3 asks for a weight when its layer is to compute, and not for those of the next."""
    plain = PartitionedParameterCoordinator.__init__

    def init(self: Any, *others: Any, **options: Any) -> None:
        plain(self, *others, **options | {"prefetch_bucket_sz": 0})

    PartitionedParameterCoordinator.__init__ = init


def one_bucket() -> None:
    """DDP reduces all gradients when the backward has ended."""
    ddp.TORCHS_BUCKET_MIB = 1000


def gathers_beside_the_update() -> None:
    Zero._let_gathers_wait = lambda self: None  # type: ignore[method-assign]


def host_tensor_beside_the_loss() -> None:
    plain = Engine._backward
    Engine._backward = lambda self, loss: plain(self, loss * torch.ones(1))  # type: ignore[method-assign]


def two_processes_on_one_gpu() -> None:
    os.environ["LOCAL_RANK"] = "0"


def _with_varlen(change: Any) -> None:
    plain = attention._varlen

    def varlen(query: Any, key: Any, value: Any, segments: Any, scaling: Any) -> Any:
        return plain(*change(query, key, value, segments), scaling)

    attention._varlen = varlen


def offsets_of_64_bits() -> None:
    _with_varlen(lambda q, k, v, segments: (q, k, v, segments._replace(offsets=segments.offsets.long())))


def offsets_that_end_too_soon() -> None:
    _with_varlen(lambda q, k, v, segments: (q, k, v, segments._replace(offsets=segments.offsets[:-1])))


def float32_into_flash_attention() -> None:
    _with_varlen(lambda q, k, v, segments: (q.float(), k.float(), v.float(), segments))


def moments_of_zero() -> None:
    plain = Engine._finish_restore

    def finish(self: Engine, num_updates: int | None) -> None:
        plain(self, num_updates)
        for moments in self.base_optimizer.state.values():
            moments["exp_avg"].zero_()

    Engine._finish_restore = finish


def stop_before_the_first_step() -> None:
    """So that the peak is that of the start; under ZeRO before it has its buckets, which are far larger."""

    def stop(*arguments: Any, **options: Any) -> Any:
        raise SystemExit(0)

    Engine.gradients = Zero.prepare = stop  # type: ignore[assignment, method-assign]


def read_all_before_it_is_sharded() -> None:
    Fsdp2.reading = Zero.reading = Engine.reading  # type: ignore[method-assign]
    stop_before_the_first_step()


def draws_of_the_micro_batch() -> None:
    sabotage.draws_of_the_micro_batch()
