"""Host memory and disk of a machine, and the peak while a run starts and weights are read and sharded."""

from dataclasses import dataclass
from functools import lru_cache

from cookbook.config.strategy import Strategy
from cookbook.facts.pipeline_stages import stage_chunks, stage_passes
from cookbook.forecast.costs.inputs import CostInputs, Skeleton, Weight, WeightsKey, hidden_bytes
from cookbook.forecast.costs.states import FLOAT32, States, constants, resident

BROADCAST_BUCKETS = 2 * 250 * 2**20
"""torch/nn/parallel/distributed.py, broadcast_bucket_size."""
READERS = 4
"""Threads that read one weight each (transformers 5.23, core_model_loading.py, GLOBAL_WORKERS)."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Peak memory of the start, without files that are only mapped, which the kernel can evict."""

    host: int
    """Bytes of a machine, over all its processes."""
    gpu: int
    """Bytes of each GPU; 0 if that is less than its final shards."""


def loading(skeleton: Skeleton, inputs: CostInputs, states: States, local: int) -> Loading:
    """The peak memory of the start of a run on GPUs, with `local` processes per machine."""
    return _loading(WeightsKey(skeleton, inputs), states, local)


@lru_cache(maxsize=1024)
def _loading(key: WeightsKey, states: States, local: int) -> Loading:
    skeleton, inputs = key.skeleton, key.inputs
    strategy = inputs.strategy
    is_quantized = any(weight.is_quantized for weight in skeleton.weights)
    stays = states.host.weights * local
    largest = sorted((weight.num_elements for weight in skeleton.weights), reverse=True)
    on_the_way = FLOAT32 * sum(largest[: 1 if is_quantized else READERS])
    if is_quantized and (_is_zero3(strategy) or strategy.fsdp is not None):
        return Loading(host=on_the_way * local + stays, gpu=_cut_as_read(skeleton, inputs))
    if _is_zero3(strategy):
        # The first process maps the files; each weight is sharded on the GPU before the next is created.
        return Loading(host=stays, gpu=0)
    whole = _as_read(skeleton, inputs)
    if strategy.fsdp is not None and not strategy.is_sharded_while_read:
        # A machine's first process holds the whole model until the last weight is sent (accelerate 1.15, fsdp_utils.py,
        # fsdp2_load_full_state_dict), in addition to offloaded shards.
        copies = 1 if strategy.fsdp.fsdp_cpu_ram_efficient_loading else local
        return Loading(host=copies * whole + stays, gpu=0)
    # Weights are read to the GPU. If the file has another dtype they are converted on the host first
    # (aten/src/ATen/native/cuda/Copy.cu, copy_requires_temporaries). Quantized weights are read one by one.
    if strategy.kind == "ddp":
        # DDP broadcasts its weights in buckets, two of them in flight (torch/distributed/utils.py, _sync_module_states;
        # csrc/distributed/c10d/comm.cpp, kMaxInFlight).
        whole += min(whole, BROADCAST_BUCKETS)
    if strategy.is_sharded_while_read:
        # peft adds an adapter to shards; it is whole until `engine.fsdp2.shard_late`, and then there once more.
        late = states.gpu.gradients * inputs.mesh.num_shards if inputs.adapter is not None else 0
        whole = late and states.gpu.weights + late
    elif strategy.tp_size > 1:
        whole = 0
    if any(map(_is_stacked, skeleton.weights)):
        whole = max(whole, _cut_as_read(skeleton, inputs))
    return Loading(host=on_the_way * local + stays, gpu=whole)


def _is_stacked(weight: Weight) -> bool:
    """Return whether a weight is a layer's experts in 4 bits."""
    return weight.is_quantized and len(weight.shape) == 3


def _is_zero3(strategy: Strategy) -> bool:
    return strategy.kind == "zero" and strategy.zero_stage == 3


def _cut_as_read(skeleton: Skeleton, inputs: CostInputs) -> int:
    """Peak bytes of a GPU that keeps its part of each weight, or all of it, before the next is read and quantized
    (`engine.as_read`).
    """
    strategy, peak, kept = inputs.strategy, 0, 0
    count = inputs.num_shards if strategy.fsdp is not None else inputs.num_processes if _is_zero3(strategy) else 1
    is_offloaded = strategy.offload_param is not None or (strategy.fsdp and strategy.fsdp.fsdp_offload_params)
    has_whole = inputs.adapter is not None and bool(inputs.adapter.modules_to_save) and strategy.fsdp is not None
    # In transformers' order: by name, numbers as such (core_model_loading.py, dot_natural_key).
    frozen = sorted(
        (weight for weight in skeleton.weights if not weight.is_trained), key=lambda weight: _key(weight.name)
    )
    for weight in frozen:
        stored, scales = resident([weight], inputs), constants([weight])
        part = 0 if is_offloaded else stored // count
        read, made = inputs.low_bytes * weight.num_elements, 0
        if weight.is_quantized:  # a float32 scale for each 64, before these are quantized too
            read, made = read + stored, max(0, FLOAT32 * weight.num_elements // 64 - part)
        # Experts that lie apart in the files are stacked, then gate and up joined (transformers 5.23,
        # core_model_loading.py, MergeModulelist, Concatenate): what is made beside what it is made of.
        stacked = 2 * inputs.low_bytes * weight.num_elements * _is_stacked(weight)
        peak = max(peak, kept + stacked, kept + read + scales + part + made)
        stays_whole = has_whole and weight.layer is None and len(weight.shape) > 1
        kept += scales + (stored if stays_whole else part)
    trained_whole = sum(w.num_elements for w in skeleton.weights if w.is_trained and w.layer is None)
    return max(peak, kept + FLOAT32 * trained_whole)


def _key(name: str) -> list[tuple[bool, int, str]]:
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _as_read(skeleton: Skeleton, inputs: CostInputs) -> int:
    """Bytes of the whole model and its adapter as loaded."""
    if inputs.strategy.kind == "fsdp1" or inputs.adapter is None:  # in one dtype; see `Engine.frozen_dtype`
        return FLOAT32 * sum(weight.num_elements for weight in skeleton.weights)
    return resident(skeleton.weights, inputs) + constants(skeleton.weights)


def checkpoints_on_host(inputs: CostInputs, skeleton: Skeleton, hidden: int, local: int) -> int:
    """Bytes of a machine's pinned memory for the inputs of layers, which wait there for the backward; 0 if they stay on
    the GPU.

    torch rounds each block up to a power of two (ATen/core/CachingHostAllocator.h). A stage of a pipeline has begun
    several micro-batches (`stage_passes`).
    """
    if not inputs.offloads_checkpoints:
        return 0
    each = (
        inputs.num_tokens
        * hidden
        * hidden_bytes(inputs.strategy, inputs.mixed_precision, is_full=inputs.adapter is None)
    )
    block, stages, chunks = 1 << (each - 1).bit_length(), inputs.strategy.pp_size, inputs.strategy.pp_chunks

    def of_rank(rank: int) -> int:
        stage = rank * stages // inputs.num_processes
        own = stage_chunks(skeleton.num_layers, stage, stages, chunks, head_layers=skeleton.head_layers)
        kept = (
            sum(number * len(layers) for number, layers in zip(moment.counts, own, strict=True))
            for moment in stage_passes(inputs.accumulation, stage, stages, chunks)
        )
        return max(kept) * block

    return sum(map(of_rank, range(local)))


def machine_bytes(
    skeleton: Skeleton, inputs: CostInputs, states: States, local: int, *, hidden: int, on_gpus: bool
) -> tuple[int, int, int]:
    """Bytes of a machine with `local` processes: host memory, the offloaded part of it, and disk.

    Host memory is the maximum of what is offloaded and the start of the run on GPUs.

    Args:
        hidden: width of the hidden states.
    """
    offloaded = states.host.total * local
    if on_gpus:
        offloaded += checkpoints_on_host(inputs, skeleton, hidden, local)
    start = loading(skeleton, inputs, states, local).host if on_gpus else 0
    return max(offloaded, start), offloaded, states.disk.total * local
