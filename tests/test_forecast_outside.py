"""Memory of a GPU beside torch's own lies where others measured it, and counts only where a run must fit.

python -m pytest -q tests/test_forecast_outside.py
"""

from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.config.strategy import load_strategy
from cookbook.forecast.memory import CONTEXT, GIB, Memory
from cookbook.forecast.outside import outside, workspaces
from cookbook.system.hardware import parse_machines

MB = 2**20  # as nvidia-smi counts


def of_nccl(gpus, num_processes=None, strategy="ddp"):
    machines = parse_machines(gpus)
    low, high = outside(shipped(strategy), machines, num_processes or machines.num_gpus)
    return low - CONTEXT, high - CONTEXT


def shipped(name):
    return load_strategy(Path(f"accelerate_configs/{name}.yaml"))


@pytest.mark.parametrize(
    ("gpus", "measured"),
    [
        ("2xA100", 544 * MB),  # NVIDIA/nccl issue 964, groups of 2 and of 4 A100 with NVLink
        ("4xA100", 688 * MB),
        ("2xH100", round(1.45 * GIB)),  # ml-engineering, debug/pytorch.md: 0.55 before the first barrier, 2.00 after it
        ("8xA100", round(1.6e9)),  # NVIDIA/nccl issue 864: one communicator and an all-reduce
    ],
)
def test_what_was_measured_lies_between_the_ends(gpus, measured):
    low, high = of_nccl(gpus)
    assert low <= measured <= high


def test_a_process_alone_has_no_buffers_of_nccl():
    assert of_nccl("1xH100") == (0, 0)
    assert of_nccl("8xH100", 1) == (0, 0)


def test_pcie_takes_less_than_nvlink_and_an_unknown_gpu_may_have_either():
    pcie, nvlink, unknown = (of_nccl(gpus) for gpus in ("8xL40S", "8xH100", "8x80GB"))
    assert pcie[1] < nvlink[1] and pcie[0] < nvlink[0]
    assert unknown == (pcie[0], nvlink[1])


def test_the_buffers_by_hand():
    """NCCL's init.cc: 8 lines x 512 threads x 8 steps x 16 bytes; 120 x 640 x 8 x 8; 4 MiB. 9.2 MiB, in pages of 2."""
    fifo = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + (4 << 20)
    pages = -(-fifo // (2 * MB)) * 2 * MB
    assert of_nccl("2xL40S")[0] == 2 * 2 * pages
    assert of_nccl("2xA100")[0] == 16 * 2 * pages


def test_each_group_has_its_own():
    low, high = of_nccl("4xA100", strategy="fsdp2")
    meshed = of_nccl("4xA100", strategy="hsdp")
    assert meshed[0] == low and meshed[1] > 2.5 * (high - 0.73 * GIB)
    assert of_nccl("4xA100", strategy="zero3")[1] > high


def test_several_machines_take_more():
    assert of_nccl("2x8xH100")[1] > of_nccl("8xH100")[1]


def test_two_threads_have_a_workspace_each_larger_from_hopper_on():
    """Runs on an H100 allocated 64 MiB beyond their tensors: 2 handles x 8 buffers of 4,096 KiB."""
    h100, a100 = (parse_machines(name).gpu for name in ("1xH100", "1xA100"))
    assert workspaces(h100) == workspaces(None) == 2 * 8 * 4096 * 1024
    assert workspaces(a100) == 2 * (2 * 4096 + 8 * 16) * 1024


def test_it_is_needed_and_not_reserved():
    sizes = dict.fromkeys(("parameters", "gradients", "optimizer", "gathered", "activations", "logits"), GIB)
    memory = Memory(moment="", is_sharded=False, **sizes)
    more = replace(memory, outside=(2 * GIB, 3 * GIB))
    assert more.allocated == memory.allocated and more.reserved == memory.reserved
    assert more.needed == (memory.reserved[0] + 2 * GIB, memory.reserved[1] + 3 * GIB)
