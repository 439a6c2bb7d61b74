"""Changes what runs, one setting after another, and asks each time what `Engine.findings` says of it.

Usage: changed_settings.py [arguments of train.py], which ends when the engine is prepared. Prints CHANGED and, as JSON,
the findings that it cannot change, and those that say as before that all is well.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecision, OffloadPolicy, ShardingStrategy
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import train
from cookbook.training.engine import Engine

Change = Callable[[Any], AbstractContextManager]
"""While it is entered something of this engine is another."""


@contextlib.contextmanager
def of_another_limit(engine: Any) -> Iterator[None]:
    group = dist.new_group(timeout=timedelta(minutes=7))
    yield
    dist.barrier()  # who leaves first would cut the connections that others still make
    dist.destroy_process_group(group)


def of_another_class(engine: Any) -> AbstractContextManager:
    """The model outside its wrapper; a bare one in DDP's, of which it has nothing but the name."""
    kind, inside = type(engine.model), getattr(engine.model, "module", None)
    if inside is None:
        bases = kind.__mro__
        other = bases[bases.index(FSDPModule) + 1] if FSDPModule in bases else DistributedDataParallel
        inside = other.__new__(other)
        inside.__dict__ = engine.model.__dict__
    return patch.object(engine, "model", inside)


@contextlib.contextmanager
def with_parameter(engine: Any, parameter: torch.Tensor) -> Iterator[None]:
    """Among the weights of a 100th layer."""
    held, planted = torch.nn.Module(), torch.nn.Parameter(parameter)
    planted.ds_numel = 0  # type: ignore[attr-defined]
    held.layers = torch.nn.ModuleDict({"99": torch.nn.ParameterDict({"weight": planted})})
    engine.model.add_module("planted", held)
    yield
    del engine.model._modules["planted"]


def plain(engine: Any) -> AbstractContextManager:
    return with_parameter(engine, torch.zeros(2, 2, dtype=torch.bfloat16))


@contextlib.contextmanager
def with_shard(engine: Any) -> Iterator[None]:
    """A parameter whose mesh is this process alone, in three dimensions."""
    is_alone = not dist.is_initialized()
    if is_alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    own = DeviceMesh("cpu", [[[dist.get_rank()]]], _init_backend=False)
    with with_parameter(engine, DTensor.from_local(torch.zeros(2, 2), own, [Shard(0)] * 3, run_check=False)):
        yield
    if is_alone:
        dist.destroy_process_group()


@contextlib.contextmanager
def of_other_partitions(engine: Any) -> Iterator[None]:
    """A whole parameter among those of ZeRO-3; what looks like ZeRO-3's of every other."""
    with contextlib.ExitStack() as stack:
        if engine._is_stage3:
            stack.enter_context(plain(engine))
        else:
            for parameter in engine.model.parameters():
                stack.enter_context(patch.object(parameter, "ds_tensor", None, create=True))
        yield


def of_optimizer(engine: Any) -> AbstractContextManager:
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return patch.dict(optimizer.param_groups[0], weight_decay=99.0)


def of_unit(name: str, value: Any) -> Change:
    return lambda engine: patch.object(next(unit for unit, _ in engine._units()), name, value)


@contextlib.contextmanager
def without_a_unit(engine: Any) -> Iterator[None]:
    layers = engine.transformer().model.layers
    unit = layers[0]
    layers[0] = unit.module
    yield
    layers[0] = unit


@contextlib.contextmanager
def without_a_layers_unit(engine: Any) -> Iterator[None]:
    layer = engine.model.model.layers[0]
    kind = type(layer)
    layer.__class__ = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
    yield
    layer.__class__ = kind


def of_group(name: str, value: Any) -> Change:
    """Another value of a layer's group of parameters under FSDP2. `value`: from what it is."""

    def change(engine: Any) -> AbstractContextManager:
        group = engine.model.model.layers[0]._get_fsdp_state()._fsdp_param_group
        return patch.object(group, name, value(getattr(group, name)))

    return change


def with_another_policy(engine: Any) -> AbstractContextManager:
    group = engine.model.model.layers[0]._get_fsdp_state()._fsdp_param_group
    place = group if hasattr(group, "mp_policy") else group.fsdp_params[0]  # of torch 2.15
    policy = SimpleNamespace(param_dtype=torch.float16, reduce_dtype=None, output_dtype=None)
    return patch.object(place, "mp_policy", policy)


def of_wrapper(name: str, value: Any) -> Change:
    return lambda engine: patch.object(engine.model, name, value)


def of_zero_config(name: str, value: Any) -> Change:
    def change(engine: Any) -> AbstractContextManager:
        config = engine.model._config.zero_config
        fields = {field.alias or own: own for own, field in type(config).model_fields.items()}
        return patch.dict(vars(config), {fields[name]: value})

    return change


def of_parameter(**changed: Any) -> Change:
    return lambda engine: patch.multiple(next(iter(engine.model.parameters())), **changed)


def of_experts(change: Change) -> Change:
    def changed(engine: Any) -> AbstractContextManager:
        return change(next(module for module in engine.model.modules() if hasattr(module, "_is_expert_parallel")))

    return changed


@contextlib.contextmanager
def of_another_pipeline(engine: Any) -> Iterator[None]:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    with patch.object(engine.transformer()._pp_stage, "pp_group", groups[dist.get_rank()]):
        yield


class OtherSwapFile:
    def __getattr__(self, name: str) -> Callable[[], int]:
        return many


def of_swap_file(engine: Any) -> AbstractContextManager:
    from cookbook.training.engine import zero

    right = zero._aio_handles
    return patch.object(zero, "_aio_handles", lambda model: [(name, OtherSwapFile()) for name, _ in right(model)])


def many(*arguments: Any) -> int:
    return 99


CHANGES: dict[str, Change] = {
    "processes": lambda engine: patch.multiple(dist, get_world_size=many, is_initialized=lambda: True),
    "limit of a collective": of_another_limit,
    "processes seen by accelerate": lambda engine: patch.object(type(engine.accelerator), "num_processes", 99),
    "processes that share a row": lambda engine: patch.object(
        engine.transformer(), "sequence_mesh", SimpleNamespace(size=many), create=True
    ),
    "optimizer and its groups": of_optimizer,
    "precision": lambda engine: patch.object(type(engine.accelerator), "mixed_precision", "fp16"),
    "dtype of the trained weights": plain,
    "trained parameters or others in the optimizer alone": plain,
    "wrapper": of_another_class,
    "sharded parameters": with_shard,
    "DDP": of_wrapper("find_unused_parameters", True),
    "dtypes of exchanged gradients": of_wrapper("_comm_hooks", [(None, torch.float16)]),
    "FSDP units: one per layer and the root": without_a_unit,
    "sharding": of_unit("sharding_strategy", ShardingStrategy.NO_SHARD),
    "prefetch, backward and forward": of_unit("forward_prefetch", "another"),
    "dtypes of a unit's weights and reductions": of_unit("mixed_precision", MixedPrecision(torch.float16)),
    "whole parameters": plain,
    "mesh": with_shard,
    "layers that are units": without_a_layers_unit,
    "reshard after forward": of_group("post_forward_mesh_info", lambda was: None if was else "another"),
    "dtypes of a layer's weights, reductions and output": with_another_policy,
    "parameter offload": of_group(
        "offload_policy", lambda was: OffloadPolicy() if isinstance(was, CPUOffloadPolicy) else CPUOffloadPolicy()
    ),
    "processes with the same layers and other samples": lambda engine: patch.object(
        engine, "_copies", SimpleNamespace(size=many)
    ),
    "whole matrices": plain,
    "tensor-parallel group": with_shard,
    "stage": lambda engine: patch.object(engine.transformer()._pp_stage, "pp_rank", 99),
    "ranges of layers": plain,
    "ranks of the pipeline": of_another_pipeline,
    "experts of this process": of_experts(lambda experts: patch.object(experts, "num_experts", 99)),
    "divisor of the gradients of experts": of_experts(
        lambda experts: patch.object(experts._get_fsdp_state()._fsdp_param_group, "gradient_divide_factor", 99.0)
    ),
}
OF_ZERO: dict[str, Change] = {
    "ZeRO stage": of_wrapper("zero_optimization_stage", many),
    "offload_optimizer": of_zero_config("offload_optimizer", SimpleNamespace(device="another")),
    "offload_param": of_zero_config("offload_param", SimpleNamespace(device="another")),
    "micro-batch size": of_wrapper("train_micro_batch_size_per_gpu", many),
    "gradient accumulation": of_wrapper("gradient_accumulation_steps", many),
    "clipping": of_wrapper("gradient_clipping", many),
    "precision": of_wrapper("bfloat16_enabled", lambda: True),
    "dtype of exchanged gradients": lambda engine: patch.object(
        engine.model.optimizer, "communication_data_type", torch.float64
    ),
    "optimizer wrapper": of_wrapper("optimizer", SimpleNamespace()),
    "data-parallel processes": CHANGES["processes"],
    "elements of a buffer of weights": lambda engine: patch.object(
        next(engine.model.parameters()).nvme_swapper, "elements_per_buffer", 99
    ),
    "partitioned parameters": of_other_partitions,
    "parameters between steps": of_parameter(ds_status=SimpleNamespace(name="AVAILABLE"), ds_numel=10**9),
    "processes that share a second copy of the weights": of_parameter(ds_secondary_tensor_group_size=99),
}


def change_of(what: str, engine: Any) -> Change | None:
    if what.startswith("zero_optimization."):
        return of_zero_config(what.partition(".")[2], "another")
    if what.startswith("aio."):
        return of_swap_file
    return (CHANGES | OF_ZERO if engine.strategy.kind == "zero" else CHANGES).get(what)


def is_noticed(what: str, engine: Any) -> bool:
    return next((asked != in_force for name, asked, in_force in engine.findings() if name == what), False)


def change_each(engine: Any) -> None:
    right(engine)
    names = [what for what, *_ in engine.findings()]
    # FSDP2 names its wrapper only where it is missing.
    names += ["wrapper"] if isinstance(engine.model, FSDPModule) else []
    changes = {what: change_of(what, engine) for what in names}
    unnoticed = []
    for what, change in changes.items():
        if change is not None:
            with change(engine):
                unnoticed += [] if is_noticed(what, engine) else [what]
    right(engine)  # all is as it was
    if engine.is_main:
        result = {"unknown": [what for what, change in changes.items() if change is None], "unnoticed": unnoticed}
        print("\nCHANGED", json.dumps({"number": len(names), **result}), flush=True)
    if dist.is_initialized():
        dist.barrier()
    raise SystemExit(0)


right = Engine.assert_in_force

if __name__ == "__main__":
    Engine.assert_in_force = change_each  # type: ignore[method-assign]
    sys.exit(train.main())
