"""Base of FSDP1 and FSDP2: how accelerate starts them, and which ranks read the weights."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig

from cookbook.config.accelerate_yaml import FsdpBlock
from cookbook.system.files import RecipeError
from cookbook.training.engine.base import Engine
from cookbook.training.engine.start import start_processes


class Fsdp(Engine):
    @property
    def _block(self) -> FsdpBlock:
        assert self.strategy.fsdp is not None
        return self.strategy.fsdp

    def _start(self, *, on_cpu: bool, **options: Any) -> Accelerator:
        # PartialState reads the environment, not the plugin, to learn of CPU offload, which adds gloo to NCCL.
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        os.environ["FSDP_OFFLOAD_PARAMS"] = str(self._block.fsdp_offload_params).lower()
        start_processes(self.timeout, as_gpus=True)
        # Only now: the plugin reads the device of the process.
        options["fsdp_plugin"] = self._plugin(on_cpu=on_cpu)
        if self.mesh.replicate > 1:
            options["parallelism_config"] = ParallelismConfig(
                dp_replicate_size=self.mesh.replicate, dp_shard_size=self.mesh.shard
            )
        return super()._start(on_cpu=on_cpu, **options)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        # By which transformers leaves the weights of all processes but one empty.
        value = os.environ.pop("ACCELERATE_USE_FSDP", None)
        try:
            yield
        finally:
            if value is not None:
                os.environ["ACCELERATE_USE_FSDP"] = value

    @property
    def _reduce_dtype(self) -> torch.dtype | None:
        """Float32 by default: a strategy must not round what DDP does not. None: that of the float32 gradients."""
        return self.gradient_dtype or (torch.float32 if self.low_dtype else None)

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        self._name_layers(model)
        return super()._wrap(model, optimizer)

    def _name_layers(self, model: torch.nn.Module) -> None:
        """Leave in a model's list of classes of layers those that it has. Gemma 4's language model names layers of
        images too, and accelerate refuses a class that is not there.

        Raises:
            RecipeError: it has none.
        """
        untyped: Any = model
        there = {type(module).__name__ for module in model.modules()}
        untyped._no_split_modules = [name for name in untyped._no_split_modules or () if name in there]
        if not untyped._no_split_modules:
            kind = type(model).__name__
            raise RecipeError(f"{self.strategy.path}: transformers names no layers of {kind} to shard; use zero3")

    def _plugin(self, *, on_cpu: bool) -> Any:
        """accelerate's FullyShardedDataParallelPlugin."""
        raise NotImplementedError

    def load_options(self, *, is_quantized: bool) -> dict[str, Any]:
        """Keep all but the first process of a machine from the files: rank 0 sends every rank its shards, but
        transformers 5.23 reads the files everywhere (modeling_utils.py, _load_pretrained_model).

        4-bit weights are not sent (accelerate 1.15, fsdp_utils.py, fsdp2_prepare_model): see `Fsdp2.reading`.
        """
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        receives = plugin is not None and plugin.cpu_ram_efficient_loading and self.world.local_rank != 0
        return {"device_map": {"": "meta"}} if receives and not is_quantized else {}
