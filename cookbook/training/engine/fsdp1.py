"""FSDP1: the parameters of a layer in one flat tensor, of which each rank holds a part."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cookbook.training.engine import state
from cookbook.training.engine.findings import Comparison
from cookbook.training.engine.fsdp import Fsdp


class Fsdp1(Fsdp):
    def _scaler_class(self, accelerator: Accelerator) -> type:
        return ScalarFoundInf

    def _plugin(self, *, on_cpu: bool) -> Any:
        block, low, reduce = self._block, self.low_dtype, self._reduce_dtype
        # FSDP1 broadcasts weights between GPUs only; on CPU every process has read the same file.
        synchronises = not on_cpu
        return FullyShardedDataParallelPlugin(
            fsdp_version=1,
            sharding_strategy=block.fsdp_sharding_strategy,
            auto_wrap_policy=block.fsdp_auto_wrap_policy,
            use_orig_params=True,
            cpu_ram_efficient_loading=block.fsdp_cpu_ram_efficient_loading and synchronises,
            sync_module_states=bool(block.fsdp_sync_module_states) and synchronises,
            backward_prefetch=block.fsdp_backward_prefetch,
            forward_prefetch=bool(block.fsdp_forward_prefetch),
            mixed_precision_policy=reduce and MixedPrecision(param_dtype=low, reduce_dtype=reduce),
        )

    @property
    def frozen_dtype(self) -> torch.dtype:
        """Frozen and trained weights are flattened together, in one dtype."""
        return torch.float32

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        if self.device.type == "cpu":
            self._name_layers(model)
            model = _wrap_on_cpu(self.accelerator, model)
        return super()._wrap(model, optimizer)

    def _num_shards(self, gradient: torch.Tensor) -> int:
        return self.world.num_processes

    def _end_evaluation(self) -> None:
        from torch.distributed.fsdp._runtime_utils import _reshard

        super()._end_evaluation()
        for unit, handle in self._units():
            if handle is not None and handle.uses_sharded_strategy:
                _reshard(unit, handle, True)

    def _units(self) -> list[tuple[Any, Any]]:
        """FSDP units and their handles; None where a unit has no parameter of its own."""
        return [(unit, unit._handle) for unit in FullyShardedDataParallel.fsdp_modules(self.model)]

    def held_pieces(self, create: state.KindsOf | None = None) -> Iterator[state.Piece]:
        infos: dict[int, tuple[Any, torch.Size]] = {}
        for _, handle in self._units():
            if handle is not None:
                flat = handle.flat_param  # its attributes: torch/distributed/fsdp/_flat_param.py, class FlatParameter
                for parameter, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
                    infos[id(parameter)] = info, shape
        moments = state.Moments(self.base_optimizer)
        for name, parameter in self.trained_parameters():
            info, shape = infos[id(parameter)]
            if info.in_shard:
                parts = {state.WEIGHT: parameter.detach(), **moments.of(parameter, create and create(name))}
                yield from state.flat_pieces(name, shape, info.intra_param_start_idx, parts)
                moments.keep(create)

    def _findings(self) -> Iterator[Comparison]:
        yield from super()._findings()
        yield "wrapper", "FullyShardedDataParallel", type(self.model).__name__
        if not isinstance(self.model, FullyShardedDataParallel):
            return
        block, low, units = self._block, self.low_dtype, [unit for unit, _ in self._units()]
        model: Any = self.transformer()
        # Mamba names its mixers too, which lie in its layers.
        num_layers = sum(type(module).__name__ in model._no_split_modules for module in model.modules())
        yield "FSDP units: one per layer and the root", num_layers + 1, len(units)
        asked = block.fsdp_sharding_strategy if self.plan.num_processes > 1 else "NO_SHARD"
        yield "sharding", {asked}, {unit.sharding_strategy.name for unit in units}
        backward = None if block.fsdp_backward_prefetch == "NO_PREFETCH" else block.fsdp_backward_prefetch
        prefetch = {(unit.backward_prefetch and unit.backward_prefetch.name, unit.forward_prefetch) for unit in units}
        yield "prefetch, backward and forward", {(backward, bool(block.fsdp_forward_prefetch))}, prefetch
        policies = {(unit.mixed_precision.param_dtype, unit.mixed_precision.reduce_dtype) for unit in units}
        yield "dtypes of a unit's weights and reductions", {(low, self._reduce_dtype)}, policies


class ScalarFoundInf(ShardedGradScaler):
    """FSDP1's scaler, which shares overflows between the ranks, in a form that fused AdamW accepts.

    torch 2.13's (distributed/fsdp/sharded_grad_scaler.py, ShardedGradScaler.unscale_) gives `found_inf` the shape (1,),
    and fused AdamW subtracts it from counts of shape () (optim/adam.py, _fused_adam), which fails. It also sums it over
    the ranks, while the fused kernel skips an update for exactly 1 only: with 2 it would write the overflow into the
    weights.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        found_inf = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for device, value in found_inf.items():
            found_inf[device] = value.reshape(()).clamp(max=1)


def _wrap_on_cpu(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """Wrap as accelerate's `prepare_model` does, but with "cpu" as `device_id`, which to FSDP1 is not "cpu:0"."""
    plugin = accelerator.state.fsdp_plugin
    plugin.set_auto_wrap_policy(model)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=plugin.sharding_strategy,
        auto_wrap_policy=plugin.auto_wrap_policy,
        mixed_precision=plugin.mixed_precision_policy,
        use_orig_params=True,
        backward_prefetch=plugin.backward_prefetch,
        forward_prefetch=plugin.forward_prefetch,
        device_id=torch.device("cpu"),
    )
