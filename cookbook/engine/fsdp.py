"""What FSDP1 and FSDP2 share: how accelerate starts them, and which process reads the weights."""

import os
from typing import Any

from cookbook.engine.base import Engine
from cookbook.engine.start import start_processes
from cookbook.strategy import FsdpBlock


class Fsdp(Engine):
    @property
    def _block(self) -> FsdpBlock:
        assert self.strategy.fsdp is not None
        return self.strategy.fsdp

    def _start(self, *, on_cpu: bool) -> Any:
        from accelerate import Accelerator
        from accelerate.utils import ParallelismConfig

        # PartialState asks the environment, not the plugin, whether parameters lie on CPU, and then adds gloo to NCCL.
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        os.environ["FSDP_OFFLOAD_PARAMS"] = str(self._block.fsdp_offload_params).lower()
        start_processes(self.timeout, as_gpus=True)
        # After it, when the process has its device, which the plugin asks for.
        options = {"fsdp_plugin": self._plugin(on_cpu=on_cpu)}
        if self.mesh.replicate > 1:
            options["parallelism_config"] = ParallelismConfig(
                dp_replicate_size=self.mesh.replicate, dp_shard_size=self.mesh.shard
            )
        return Accelerator(cpu=on_cpu, mixed_precision=self.mixed_precision, **options)

    def _plugin(self, *, on_cpu: bool) -> Any:
        """accelerate's FullyShardedDataParallelPlugin."""
        raise NotImplementedError

    def load_options(self, *, is_quantized: bool) -> dict[str, Any]:
        """The first process of a machine reads, and the first of all sends each its share; the others must be kept from
        the files, which transformers 5.23 reads everywhere (modeling_utils.py, _load_pretrained_model).

        No 4-bit weight is sent (accelerate 1.15, fsdp_utils.py, fsdp2_prepare_model): each process reads and quantises
        all.
        """
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        receives = plugin is not None and plugin.cpu_ram_efficient_loading and self.world.local_rank != 0
        return {"device_map": {"": "meta"}} if receives and not is_quantized else {}
