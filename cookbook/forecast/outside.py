"""What a process takes of its GPU beside what is forecast as allocated: CUDA's own, cuBLAS' workspaces, NCCL's buffers.

Bytes, from the least to the most. torch's own figures of memory hold none of it but the workspaces, so it counts where
a run is held against a GPU, and nowhere else. What the figures were measured on is in tests/test_forecast_outside.py.
"""

from cookbook.forecast.memory import CONTEXT
from cookbook.hardware import Gpu, Machines
from cookbook.strategy import Strategy

MIB = 2**20

WORKSPACES = (2 * 8_519_680, 2 * 32 * MIB)
"""cuBLAS: 8 MiB a handle, and 32 from Hopper on (PyTorch, CublasHandlePool.cpp, `parseChosenWorkspaceSize`); forward
and backward run in two threads, with a handle each. torch's allocator gives them out; the trace has none."""

CONNECTION = 10 * MIB
"""Of NCCL, from one neighbour, in one channel: 512 KiB for protocol LL, 4,800 for LL128, 4 MiB (NCCL_BUFFSIZE) for
Simple (NCCL, init.cc, `computeBuffSizes`), in pages of 2 MiB: allocations of 10,485,760 bytes in its issue 1685."""
TO_NEIGHBOUR = 2 * MIB
"""The other allocation of that issue: what a sender keeps of a connection."""
CHANNELS_LINKED, CHANNELS = (16, 32), (2, 8)
"""With NVLink, and over PCIe or a network alone. Issue 892 has 16 on 8 H800, issue 1685 has 32 on 8 H100; "the memory
usage is linearly tied to the number of channels", issue 986."""
NEIGHBOURS = (2, 3)
"""Of a channel: the one before in a ring; or one above and two below in a tree."""
NEIGHBOURS_ABROAD = 2
"""More of them with several machines: a ring and a tree go on over the network."""
SHARP = 2 * 32 * MIB
"""For each GPU of a machine, where NVSwitch adds up (NVLS): twice 1 MiB in up to 32 channels (NCCL, nvls.cc,
`ncclNvlsBufferSetup`); until NCCL 2.26 it was 288 (vLLM issue 9699), PyTorch 2.13 has 2.29."""
CODE = round(0.73 * 2**30)
"""Of its kernels, at most: what stayed when a group of two was destroyed (ml-engineering, debug/pytorch.md, read
2026-11: 0.55 GB before, 2.00 with the group, 1.28 after it)."""


def outside(strategy: Strategy, machines: Machines, num_processes: int) -> tuple[int, int]:
    """Of one process."""
    low, high = (CONTEXT + size for size in WORKSPACES)
    if num_processes == 1:
        return low, high
    local = min(num_processes, max(1, machines.gpus_each))
    least, most = _group(machines.gpu, local, is_alone=num_processes <= local)
    return low + least, high + most * _groups(strategy) + CODE


def _group(gpu: Gpu | None, local: int, *, is_alone: bool) -> tuple[int, int]:
    """Of one communicator, `is_alone` on its machine. A GPU that is not known may have NVLink or not."""
    least, most = CHANNELS
    if local > 1 and (gpu is None or gpu.nvlink is not None):
        most = CHANNELS_LINKED[1]
        least = least if gpu is None else CHANNELS_LINKED[0]
    neighbours = NEIGHBOURS[1] + (0 if is_alone else NEIGHBOURS_ABROAD)
    low = least * NEIGHBOURS[0] * CONNECTION
    high = most * neighbours * (CONNECTION + TO_NEIGHBOUR)
    if local > 2 and (gpu is None or (gpu.nvlink is not None and gpu.generation in ("hopper", "blackwell"))):
        high += local * SHARP
    return low, high


def _groups(strategy: Strategy) -> int:
    """Communicators at most; each has its own buffers. accelerate has one of all processes and one for each side of a
    mesh, DeepSpeed a second one of all (utils/groups.py, `_clone_world_group`)."""
    if strategy.kind == "zero":
        hierarchical = strategy.secondary_group_size > 1
        return 3 if hierarchical else 2
    return 3 if strategy.dp_replicate_size > 1 else 1
