"""Collectives besides those of gradients and parameters, and an orderly end of the process group."""

import itertools
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from cookbook.config.mesh import Mesh
from cookbook.facts.meshes import in_buckets
from cookbook.start.launchers import World
from cookbook.training.engine.norm import local

EXPORT_TIMEOUT = timedelta(days=1)
"""For the main process to write the model, longer than any collective may take."""
LEAVE_SECONDS = 1.0
"""Delay of rank 0's exit after the other machines' processes. Its torchrun holds the store: one that still enters
torchrun's exit barrier (torch 2.13, elastic/agent/server/api.py, _exit_barrier) when it ends prints a traceback of a
good run."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy without blocking the host, which a copy from pageable memory would."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def average_gradients(
    parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype | None
) -> None:
    """Average gradients, or the shards that the ranks hold of them, over a group, in place; see `add_up`."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    add_up(gradients, group, dtype)
    torch._foreach_div_(gradients, group.size())


def add_up(gradients: list[torch.Tensor], group: dist.ProcessGroup, dtype: torch.dtype | None) -> None:
    """Replace gradients by their sums over a group, in flat buckets, of which one is in memory at a time.

    Args:
        dtype: in which they are sent and added; None for their own.
    """
    for own, alike in itertools.groupby(gradients, lambda gradient: gradient.dtype):
        tensors, sent = list(alike), dtype or own
        for numbers in in_buckets(tensor.numel() * sent.itemsize for tensor in tensors):
            bucket = [tensors[i] for i in numbers]
            if len(bucket) == 1 and sent == own:
                dist.all_reduce(bucket[0], group=group)
                continue
            # Only what is sent is rounded; micro-batches were added up in float32.
            flat = torch.empty(sum(tensor.numel() for tensor in bucket), dtype=sent, device=bucket[0].device)
            parts = [
                part.view(tensor.shape)
                for part, tensor in zip(flat.split([tensor.numel() for tensor in bucket]), bucket, strict=True)
            ]
            torch._foreach_copy_(parts, bucket)
            dist.all_reduce(flat, group=group)
            torch._foreach_copy_(bucket, parts)
            del flat, parts  # else the next bucket is allocated beside this one


class Collectives:
    """Exchange of small values and texts. Every rank must call each method, with the same number of values; a single
    process needs no group.
    """

    def __init__(self, world: World, mesh: Mesh, device: torch.device, beat: Callable[[str], None]) -> None:
        """
        Args:
            beat: called with the name of a wait that may be long, before it.
        """
        self.world, self.mesh, self.device, self.beat = world, mesh, device, beat
        self._num_texts = 0
        self._gathered: str | None = None

    def all_gather(self, *values: torch.Tensor | float) -> np.ndarray:
        """The values of every rank, float64 [ranks, values]. Synchronizes with the device once."""
        numbers = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
        mine = to_device(torch.tensor(numbers, dtype=torch.float64), self.device)
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                mine[i] = value
        if not dist.is_initialized():
            return mine.cpu().numpy()[None]
        rows = mine.new_empty(self.world.num_processes * len(values))
        dist.all_gather_into_tensor(rows, mine)
        return rows.view(-1, len(values)).cpu().numpy()

    def sums(self, rows: np.ndarray) -> list[float]:
        """Sum of each column of an `all_gather` over the ranks that see different tokens; see `all_reduce_sum`. Of a
        pipeline only the last stage computes losses.
        """
        return rows[-self.mesh.stage_size :: self.mesh.tensor].sum(0).tolist()

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that see different tokens, in place. A tensor-parallel group computes one value together,
        which counts once. The stages of a pipeline but the last must pass zeros.
        """
        if dist.is_initialized():
            dist.all_reduce(values)
            values /= self.mesh.tensor
        return values

    def all_reduce_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over all ranks, in place."""
        if dist.is_initialized():
            dist.all_reduce(values)
            values /= self.world.num_processes
        return values

    def all_reduce_max(self, *values: float) -> list[float]:
        """Maximum of each value over the ranks."""
        return self.all_gather(*values).max(0).tolist() if dist.is_initialized() else [float(value) for value in values]

    def all_true(self, value: bool) -> bool:
        """Return whether `value` is true on every rank."""
        return -self.all_reduce_max(-float(value))[0] > 0

    def broadcast_text(self, text: str) -> str:
        """The main process's text, on every rank."""
        if not dist.is_initialized():
            return text
        store = dist.distributed_c10d._get_default_store()
        self._num_texts += 1
        key = f"cookbook/text/{self._num_texts}"
        if self.world.rank == 0:
            store.set(key, text)
        else:
            self.beat("waiting for the main process")
        return store.get(key).decode()

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, in their order."""
        if not dist.is_initialized():
            return [text]
        store, rank = dist.distributed_c10d._get_default_store(), self.world.rank
        self._num_texts += 1
        keys = [f"cookbook/text/{self._num_texts}/{other}" for other in range(self.world.num_processes)]
        store.set(keys[rank], text)
        self.beat("waiting for the others")
        texts = [store.get(key).decode() for key in keys]
        if self._gathered is not None:  # all have written this text, and so have read the one before
            store.delete_key(self._gathered)
        self._gathered = keys[rank]
        return texts

    def leave(self, timeout: timedelta) -> None:
        """End the process group. A rank that exits while another still reads its last message would fail a run that
        succeeded.

        A barrier is not enough: gloo loses its own last message if the sender's sockets close too soon. So each rank
        notes in the store that it passed the barrier, and waits for the notes of the others. The store may live in the
        main process, where no launcher holds it (srun, ranks in the environment), so rank 0 exits last.

        Args:
            timeout: limit of each wait, except that for rank 0, which may still be writing the model.
        """
        if not dist.is_initialized():
            return
        self.beat("meeting the others")
        store, is_main = dist.distributed_c10d._get_default_store(), self.world.rank == 0
        self._store_barrier(store, "done", timeout if is_main else EXPORT_TIMEOUT)
        # Without the device, NCCL's barrier guesses it and warns. `device_id` in init_process_group would do too, but
        # connects at once, before a mistake that any rank may find is reported; DeepSpeed passes it (0.19.8,
        # comm/torch.py, TorchBackend.init_process_group), so that under ZeRO NCCL starts with the process group, and a
        # new group is a split of it.
        dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)
        self._store_barrier(store, "left", timeout)
        try:
            dist.destroy_process_group()
        finally:
            if not is_main:
                # Only now: before, a rank that rank 0 waits for could wait for rank 0 inside NCCL.
                store.set(f"cookbook/gone/{self.world.rank}", "1")
        if is_main:
            self._store_barrier(store, "gone", timeout)
            if self.world.num_local < self.world.num_processes:
                time.sleep(LEAVE_SECONDS)

    def _store_barrier(self, store: dist.Store, place: str, timeout: timedelta) -> None:
        """Barrier without a collective."""
        store.set(f"cookbook/{place}/{self.world.rank}", "1")
        store.wait([f"cookbook/{place}/{rank}" for rank in range(self.world.num_processes)], timeout)
