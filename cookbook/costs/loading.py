"""What a machine needs: its host memory and disk, and what the start of a run takes while weights are read and shared
out."""

from dataclasses import dataclass

from cookbook.costs.inputs import CostInputs, Skeleton
from cookbook.costs.memory import FLOAT32, States, constants, resident

BROADCAST_BUCKETS = 2 * 250 * 2**20
"""torch/nn/parallel/distributed.py, broadcast_bucket_size."""
READERS = 4
"""Threads that read weights, each one of them (transformers 5.23, core_model_loading.py, GLOBAL_WORKERS)."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """The most, for a while. What is but mapped from files is not in it: the system takes that back as it likes."""

    host: int
    """Bytes of a machine, of all its processes."""
    gpu: int
    """Bytes of each GPU; 0 where it is less than the shares that stay."""


def loading(skeleton: Skeleton, inputs: CostInputs, states: States, local: int) -> Loading:
    """The start of a run on GPUs.

    Args:
        states: of one process.
        local: processes of a machine.
    """
    strategy = inputs.strategy
    is_quantized = any(weight.is_quantized for weight in skeleton.weights)
    stays = states.host.weights * local
    if strategy.kind == "zero" and strategy.zero_stage == 3 and not is_quantized:
        # The first process maps the files; each weight is on the GPU, and cut, before the next one is made.
        return Loading(host=stays, gpu=0)
    whole = _as_read(skeleton, inputs)
    if strategy.fsdp is not None and not is_quantized:
        # A machine's first process has all of it until the last weight is sent (accelerate 1.15, fsdp_utils.py,
        # fsdp2_load_full_state_dict), and offloaded shares come beside it.
        copies = 1 if strategy.fsdp.fsdp_cpu_ram_efficient_loading else local
        return Loading(host=copies * whole + stays, gpu=0)
    # Read straight to the GPU. A number on its way there is converted on the host first, where the file has another
    # dtype (aten/src/ATen/native/cuda/Copy.cu, copy_requires_temporaries). What is quantised comes one by one.
    is_cut = strategy.kind == "tp"
    if strategy.kind == "ddp":
        # Before the first step it sends its weights to all in buckets, of which two are on their way at once
        # (torch/distributed/utils.py, _sync_module_states; csrc/distributed/c10d/comm.cpp, kMaxInFlight).
        whole += min(whole, BROADCAST_BUCKETS)
    largest = sorted((weight.num_elements for weight in skeleton.weights), reverse=True)
    on_the_way = FLOAT32 * sum(largest[: 1 if is_quantized else READERS])
    return Loading(host=on_the_way * local + stays, gpu=0 if is_cut else whole)


def _as_read(skeleton: Skeleton, inputs: CostInputs) -> int:
    """Bytes of the whole model as `load_model` makes it, with its adapter."""
    if inputs.strategy.kind == "fsdp1" or inputs.adapter is None:  # in one dtype; see `Engine.frozen_dtype`
        return FLOAT32 * sum(weight.num_elements for weight in skeleton.weights)
    return resident(skeleton.weights, inputs) + constants(skeleton)


def machine_bytes(
    skeleton: Skeleton, inputs: CostInputs, states: States, local: int, *, on_gpus: bool
) -> tuple[int, int, int]:
    """Of a machine's `local` processes: host memory, the part of it that is offloaded for the whole run, and disk.

    Host memory is what is offloaded, or the start of the run on GPUs if that takes more.
    """
    offloaded = states.host.total * local
    start = loading(skeleton, inputs, states, local).host if on_gpus else 0
    return max(offloaded, start), offloaded, states.disk.total * local
