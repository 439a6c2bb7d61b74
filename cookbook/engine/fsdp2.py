"""FSDP2: each parameter a DTensor, sharded by rows, alone or with replicas of the shards (HSDP)."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cookbook.engine.findings import Finding, is_sharded
from cookbook.engine.fsdp import Fsdp


class Fsdp2(Fsdp):
    def _plugin(self, *, on_cpu: bool) -> Any:
        from accelerate.utils import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        block, low = self._block, self.low_dtype
        # accelerate's own policy rounds the returned loss sum to bf16 (8.3240 for 8.3414) and reduces gradients in it.
        policy = low and MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, output_dtype=torch.float32)
        return FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy=block.fsdp_auto_wrap_policy,
            reshard_after_forward=block.fsdp_reshard_after_forward,
            cpu_ram_efficient_loading=block.fsdp_cpu_ram_efficient_loading,
            cpu_offload=CPUOffloadPolicy(pin_memory=not on_cpu) if block.fsdp_offload_params else None,
            mixed_precision_policy=policy,
        )

    def _synchronise(self, last: bool) -> contextlib.AbstractContextManager:
        """Reduces inside a shard group each time, and between the replicas at the last."""
        self.model.set_requires_all_reduce(last)
        return contextlib.nullcontext()

    def _end_evaluation(self) -> None:
        super()._end_evaluation()
        for unit in self._units():
            unit.reshard()

    def _units(self) -> list[Any]:
        from torch.distributed.fsdp import FSDPModule

        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def _findings(self) -> Iterator[Finding]:
        from torch.distributed.fsdp import FSDPModule

        yield from super()._findings()
        model: Any = self.model
        if FSDPModule not in type(model).__mro__:
            yield "wrapper", "FSDPModule", type(model).__name__
            return
        yield "whole parameters", 0, sum(not is_sharded(parameter) for parameter in model.parameters())
        mesh = (self.mesh.replicate, self.mesh.shard) if self.mesh.replicate > 1 else (self.mesh.shard,)
        yield "mesh", {mesh}, {tuple(p.device_mesh.shape) for p in self._trained() if isinstance(p, DTensor)}
        layers = [unit for unit in self._units() if _is_layer(unit, model)]
        yield "layers that are units", model.config.num_hidden_layers, len(layers)
        groups: list[Any] = [unit._get_fsdp_state()._fsdp_param_group for unit in layers]
        reshards = {group.post_forward_mesh_info is not None for group in groups}
        yield "reshard after forward", {self._block.fsdp_reshard_after_forward}, reshards
        policies = {
            (group.mp_policy.param_dtype, group.mp_policy.reduce_dtype, group.mp_policy.output_dtype)
            for group in groups
        }
        full = torch.float32 if self.low_dtype else None
        yield "dtypes of a layer's weights, reductions and output", {(self.low_dtype, full, full)}, policies
        offloaded = {type(group.offload_policy).__name__ for group in groups}
        asked = "CPUOffloadPolicy" if self._block.fsdp_offload_params else "OffloadPolicy"
        yield "parameter offload", {asked}, offloaded


def _is_layer(module: Any, model: Any) -> bool:
    """FSDP2 renames a class; its bases tell what it was."""
    return any(base.__name__ in model._no_split_modules for base in type(module).__mro__)
