"""GPU memory of a process that no tensor of the run takes: cuBLAS workspaces, CUDA context, NCCL buffers.

torch allocates the workspaces, so its statistics include them. The rest, bytes, least and most, is used to judge
whether a run fits a GPU and nowhere else. tests/test_forecast_outside.py has the measurements behind the figures.
"""

import simulated_gpus
from cookbook.config.strategy import Strategy
from cookbook.forecast.memory import CONTEXT
from cookbook.system.hardware import Gpu, Machines

MIB = 2**20

WORKSPACE, LARGE_WORKSPACE, ROCM_WORKSPACE = 8_519_680, 32 * MIB, 128 * MIB
"""cuBLAS, per handle: the second from Hopper on, the third on an MI300X (PyTorch, CublasHandlePool.cpp,
`parseChosenWorkspaceSize`)."""

CONNECTION = 10 * MIB
"""NCCL's receive buffers per neighbour and channel: 512 KiB for protocol LL, 4,800 for LL128, 4 MiB (NCCL_BUFFSIZE) for
Simple (NCCL, init.cc, `computeBuffSizes`), in pages of 2 MiB: allocations of 10,485,760 bytes in its issue 1685."""
TO_NEIGHBOUR = 2 * MIB
"""The sender's buffer of a connection, by the same issue."""
CHANNELS_LINKED, CHANNELS = (16, 32), (2, 8)
"""With NVLink, and over PCIe or a network only. Issue 892 has 16 on 8 H800, issue 1685 has 32 on 8 H100; "the memory
usage is linearly tied to the number of channels", issue 986."""
NEIGHBOURS = (2, 3)
"""Neighbours per channel: the previous rank of a ring, or parent and two children of a tree."""
NEIGHBOURS_ABROAD = 2
"""Additional neighbours on other machines: one of a ring and one of a tree."""
SHARP = 2 * 32 * MIB
"""Per GPU of a machine, if NVSwitch reduces (NVLS): twice 1 MiB in up to 32 channels (NCCL, nvls.cc,
`ncclNvlsBufferSetup`); until NCCL 2.26 it was 288 (vLLM issue 9699), PyTorch 2.13 has 2.29."""
CODE = round(0.73 * 2**30)
"""NCCL's kernels, at most: what remained when a group of two was destroyed (ml-engineering, debug/pytorch.md, read
2026-11: 0.55 GB before, 2.00 with the group, 1.28 after it)."""


def workspaces(gpu: Gpu | None) -> int:
    """Bytes of cuBLAS's workspaces, the larger for an unknown GPU. The threads of forward and of backward have a handle
    each: of 86 runs on one H100, 59 peaked 64 MiB (to 0.25) above the same run on simulated GPUs
    (benchmarks/results/real_gpus.json).
    """
    if simulated_gpus.is_active():
        return 0
    if gpu is not None and gpu.is_amd:
        return 2 * ROCM_WORKSPACE
    return 2 * (LARGE_WORKSPACE if gpu is None or gpu.generation in ("hopper", "blackwell") else WORKSPACE)


def outside(strategy: Strategy, machines: Machines, num_processes: int) -> tuple[int, int]:
    """Memory of one process outside torch's allocator, least and most."""
    if simulated_gpus.is_active():  # they have none of these
        return 0, 0
    if num_processes == 1:
        return CONTEXT, CONTEXT
    local = min(num_processes, max(1, machines.gpus_each))
    least, most = _communicator(machines.gpu, local, is_alone=num_processes <= local)
    return CONTEXT + least, CONTEXT + most * _num_communicators(strategy, num_processes, local) + CODE


def _communicator(gpu: Gpu | None, local: int, *, is_alone: bool) -> tuple[int, int]:
    """Memory of one communicator, least and most; an unknown GPU may have NVLink or not.

    Args:
        is_alone: whether it spans one machine only.
    """
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


def _num_communicators(strategy: Strategy, num_processes: int, local: int) -> int:
    """Maximum number of communicators, each with its own buffers: the world, one per dimension of a mesh of several,
    and for DeepSpeed a clone of the world (utils/groups.py, `_clone_world_group`)."""
    sequence = int(strategy.sp_size > 1)
    if strategy.kind == "zero":
        return sequence + (3 if strategy.secondary_group_size(local) > 1 else 2)
    mesh = strategy.mesh(num_processes)
    num_dims = sum(size > 1 for size in (mesh.replicate, mesh.shard, mesh.expert, mesh.tensor))
    if strategy.kind == "pp":  # for hidden states, for the gradients of a tied embedding, and inside a stage
        return 3 + num_dims
    return 1 + sequence + (num_dims if num_dims > 1 else 0)
