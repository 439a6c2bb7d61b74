"""What the processes of a run exchange besides gradients and parameters, and how they leave together."""

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from cookbook.launch import World
from cookbook.mesh import Mesh

PATIENCE = timedelta(days=1)
"""For the main process to write the model, which no collective could wait for."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without waiting: from memory that is not pinned, a copy is done before the host goes on."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Collectives:
    """Small values and texts. Every process calls each method, with as many values; one process needs no group."""

    def __init__(self, world: World, mesh: Mesh, device: torch.device, beat: Callable[[str], None]) -> None:
        """
        Args:
            beat: called before a wait that may be long.
        """
        self.world, self.mesh, self.device, self.beat = world, mesh, device, beat
        self._num_texts = 0

    def all_gather(self, *values: torch.Tensor | float) -> np.ndarray:
        """These values, of every process: float64 [processes, values]. Waits for the device, once."""
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
        """Of each column of an `all_gather`, the sum over those who see different tokens; see `all_reduce_sum`."""
        return rows[:: self.mesh.tensor].sum(0).tolist()

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over those who see different tokens; a tensor-parallel group computes one value together, which
        counts once. In place.
        """
        if dist.is_initialized() and self.mesh.token_parallel_size > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_max(self, *values: float) -> list[float]:
        """Of each value, the largest over the processes."""
        return self.all_gather(*values).max(0).tolist() if dist.is_initialized() else [float(value) for value in values]

    def all_true(self, value: bool) -> bool:
        """Whether `value` is true on every process."""
        return -self.all_reduce_max(-float(value))[0] > 0

    def broadcast_text(self, text: str) -> str:
        """The main process's text, on every process."""
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

    def leave(self, timeout: timedelta) -> None:
        """Ends the process group. A process that exits while another still reads its last message breaks a run that
        was right.

        A barrier is not enough: with gloo its own last message is lost when the sender's sockets close too soon. So
        each process notes in the store that it is past the barrier, and waits for the notes of the others. The store
        may lie in the main process, where no launcher holds it (srun, ranks in the environment): that one leaves last.

        Args:
            timeout: of each wait, but for that for the main process, which may still be writing the model.
        """
        if not dist.is_initialized():
            return
        self.beat("meeting the others")
        store, is_main = dist.distributed_c10d._get_default_store(), self.world.rank == 0
        self._store_barrier(store, "done", timeout if is_main else PATIENCE)
        # Without the device, NCCL's barrier guesses it and warns.
        dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)
        self._store_barrier(store, "left", timeout)
        try:
            dist.destroy_process_group()
        finally:
            if not is_main:
                store.set(f"cookbook/gone/{self.world.rank}", "1")
        if is_main:
            self._store_barrier(store, "gone", timeout)

    def _store_barrier(self, store: dist.Store, place: str, timeout: timedelta) -> None:
        """Waits for every process without a collective."""
        store.set(f"cookbook/{place}/{self.world.rank}", "1")
        store.wait([f"cookbook/{place}/{rank}" for rank in range(self.world.num_processes)], timeout)
