"""What runs, against what was asked for: the libraries change strategies, precision and clipping without a word."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

if TYPE_CHECKING:
    from cookbook.engine import Engine


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor of which each process holds a piece."""
    return isinstance(tensor, DTensor) and any(isinstance(placement, Shard) for placement in tensor.placements)


def find(engine: "Engine") -> Iterator[tuple[str, Any, Any]]:
    """(what, asked for, found) for everything that a library could have changed behind our back."""
    strategy, plan, model = engine.strategy, engine.plan, engine.model
    yield "processes", plan.num_processes, dist.get_world_size() if dist.is_initialized() else 1
    yield "processes seen by accelerate", plan.num_processes, engine.accelerator.num_processes
    yield "optimizer and its groups", engine.asked_optimizer, describe_optimizer(engine.optimizer)
    if strategy.kind == "zero":
        yield from _deepspeed_findings(engine)
        return
    yield "precision", engine.mixed_precision, engine.accelerator.mixed_precision
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(engine.mixed_precision)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    yield "dtype of the trained weights", {torch.float32}, {parameter.dtype for parameter in trainable}
    owned = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    yield "trained parameters or others in the optimizer alone", 0, len(owned ^ {id(p) for p in trainable})
    sharded = sum(is_sharded(parameter) for parameter in trainable)
    if strategy.kind in ("single", "ddp"):
        wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        # One process under ddp has nobody to synchronise with, wrapped or not.
        yield "wrapper", strategy.kind == "ddp" and (wrapped or plan.num_processes > 1), wrapped
        yield "sharded parameters", 0, sharded
        if wrapped:
            asked = {"gradient_as_bucket_view": True, "broadcast_buffers": False, "find_unused_parameters": False}
            yield "DDP", asked, {name: getattr(model, name) for name in asked}
    if strategy.kind == "fsdp1":
        yield from _fsdp1_findings(engine, low)
    if strategy.kind == "fsdp2":
        yield from _fsdp2_findings(engine, trainable, low)
    if strategy.kind == "tp":
        meshes = {parameter.device_mesh.size() for parameter in model.parameters() if is_sharded(parameter)}
        yield "tensor-parallel mesh", {strategy.tp_size}, meshes
        # Norms stay whole, and of an adapter's two small matrices one; every matrix of the model itself must be cut.
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        yield "whole matrices", 0, sum(not is_sharded(p) for p in frozen or trainable if p.ndim >= 2)


def describe_optimizer(optimizer: Any) -> list[Any]:
    """The class of the optimizer inside the wrappers, and the settings of its groups that training does not change."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    fixed = ("weight_decay", "betas", "eps", "momentum")
    groups = [{name: group[name] for name in fixed if name in group} for group in optimizer.param_groups]
    return [type(optimizer).__name__, *groups]


def _deepspeed_findings(engine: "Engine") -> Iterator[tuple[str, Any, Any]]:
    from deepspeed import DeepSpeedEngine

    strategy, plan, model = engine.strategy, engine.plan, engine.model
    yield "wrapper", "DeepSpeedEngine", type(model).__name__
    if not isinstance(model, DeepSpeedEngine):
        return
    zero = model._config.zero_config
    yield "ZeRO stage", strategy.zero_stage, model.zero_optimization_stage()
    for name in ("offload_optimizer", "offload_param"):
        block = getattr(zero, name)
        found = None if block is None or block.device == "none" else str(getattr(block.device, "value", block.device))
        yield name, getattr(strategy, name), found
    config = engine.deepspeed_config or {}
    yield "micro-batch size", config["train_micro_batch_size_per_gpu"], model.train_micro_batch_size_per_gpu()
    yield "gradient accumulation", plan.gradient_accumulation_steps, model.gradient_accumulation_steps()
    yield "clipping", engine.max_grad_norm, model.gradient_clipping()
    found_precision = "bf16" if model.bfloat16_enabled() else "fp16" if model.fp16_enabled() else "no"
    yield "precision", engine.mixed_precision, found_precision
    expected = {1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
    yield "optimizer wrapper", expected[strategy.zero_stage], type(model.optimizer).__name__
    yield "data-parallel processes", plan.data_parallel_size, dist.get_world_size(model.data_parallel_group)
    asked, in_force = config["zero_optimization"], zero.model_dump(by_alias=True)
    for key in sorted(asked.keys() & in_force.keys() - {"stage", "offload_optimizer", "offload_param"}):
        if asked[key] != "auto":
            yield f"zero_optimization.{key}", asked[key], in_force[key]
    for name, handle in _aio_handles(model):
        for key, value in config.get("aio", {}).items():
            yield f"aio.{key}, {name}", value, getattr(handle, f"get_{key}")()
    partitioned = [hasattr(parameter, "ds_tensor") for parameter in model.parameters()]
    yield "partitioned parameters", strategy.zero_stage == 3, all(partitioned)
    if strategy.zero_stage == 3:
        persistent = zero.param_persistence_threshold
        states = {p.ds_status.name for p in model.parameters() if p.ds_numel > persistent}
        yield "parameters between steps", {"NOT_AVAILABLE"}, states or {"NOT_AVAILABLE"}


def _aio_handles(model: Any) -> Iterator[tuple[str, Any]]:
    """What reads and writes swap files, which holds the settings that its threads work with."""
    swappers = [getattr(model.optimizer, "optimizer_swapper", None)]
    swappers += [getattr(parameter, "nvme_swapper", None) for parameter in list(model.parameters())[:1]]
    for swapper in filter(None, swappers):
        for name in ("aio_handle", "read_aio_handle", "write_aio_handle", "aio_read_handle", "aio_write_handle"):
            handle = getattr(swapper, name, None)
            # The parameters' swapper has one under `aio_handle` that is the class.
            if hasattr(handle, "get_block_size") and not isinstance(handle, type):
                yield f"{type(swapper).__name__}.{name}", handle


def _fsdp1_findings(engine: "Engine", low: torch.dtype | None) -> Iterator[tuple[str, Any, Any]]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    yield "wrapper", "FullyShardedDataParallel", type(engine.model).__name__
    if not isinstance(engine.model, FullyShardedDataParallel):
        return
    units = FullyShardedDataParallel.fsdp_modules(engine.model)
    num_layers = engine.transformer().config.num_hidden_layers
    yield "FSDP units: one per layer and the root", num_layers + 1, len(units)
    assert engine.strategy.fsdp is not None
    asked = engine.strategy.fsdp.fsdp_sharding_strategy if engine.plan.num_processes > 1 else "NO_SHARD"
    yield "sharding", {asked}, {unit.sharding_strategy.name for unit in units}
    block = engine.strategy.fsdp
    backward = None if block.fsdp_backward_prefetch == "NO_PREFETCH" else block.fsdp_backward_prefetch
    prefetch = {(unit.backward_prefetch and unit.backward_prefetch.name, unit.forward_prefetch) for unit in units}
    yield "prefetch, backward and forward", {(backward, bool(block.fsdp_forward_prefetch))}, prefetch
    policies = {(unit.mixed_precision.param_dtype, unit.mixed_precision.reduce_dtype) for unit in units}
    yield "dtypes of a unit's weights and reductions", {(low, torch.float32 if low else None)}, policies


def _fsdp2_findings(
    engine: "Engine", trainable: list[torch.nn.Parameter], low: torch.dtype | None
) -> Iterator[tuple[str, Any, Any]]:
    from torch.distributed.fsdp import FSDPModule

    strategy, block = engine.strategy, engine.strategy.fsdp
    assert block is not None
    model: Any = engine.model
    if FSDPModule not in type(model).__mro__:
        yield "wrapper", "FSDPModule", type(model).__name__
        return
    yield "whole parameters", 0, sum(not is_sharded(parameter) for parameter in model.parameters())
    shards = strategy.dp_shard_size if strategy.dp_replicate_size > 1 else engine.plan.num_processes
    mesh = (strategy.dp_replicate_size, shards) if strategy.dp_replicate_size > 1 else (shards,)
    yield "mesh", {mesh}, {tuple(p.device_mesh.shape) for p in trainable if isinstance(p, DTensor)}
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    layers = [module for module in units if _is_layer(module, model)]
    yield "layers that are units", model.config.num_hidden_layers, len(layers)
    groups: list[Any] = [unit._get_fsdp_state()._fsdp_param_group for unit in layers]
    reshards = {group.post_forward_mesh_info is not None for group in groups}
    yield "reshard after forward", {block.fsdp_reshard_after_forward}, reshards
    policies = {
        (group.mp_policy.param_dtype, group.mp_policy.reduce_dtype, group.mp_policy.output_dtype) for group in groups
    }
    full = torch.float32 if low else None
    yield "dtypes of a layer's weights, reductions and output", {(low, full, full)}, policies
    offloaded = {type(group.offload_policy).__name__ for group in groups}
    yield "parameter offload", {"CPUOffloadPolicy" if block.fsdp_offload_params else "OffloadPolicy"}, offloaded


def _is_layer(module: Any, model: Any) -> bool:
    """FSDP2 renames a class; its bases tell what it was."""
    return any(base.__name__ in model._no_split_modules for base in type(module).__mro__)
