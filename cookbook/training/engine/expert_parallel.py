"""Expert parallel: each process of a group holds some of a layer's experts, and tokens go to them and back.

transformers does both exchanges (distributed/expert_parallel.py, AllToAllEP), and FSDP2 over them: processes with the
same experts share those, all processes share every other parameter, and each sees other samples.
"""

from collections.abc import Iterator
from typing import Any

from torch.distributed.fsdp import FSDPModule

from cookbook.training.engine.findings import Comparison
from cookbook.training.engine.fsdp2 import Fsdp2WhileRead


class ExpertParallel(Fsdp2WhileRead):
    def _meshes(self) -> set[tuple[int, ...]]:
        return {*super()._meshes(), (self.mesh.shard, self.mesh.expert)}

    def _findings(self) -> Iterator[Comparison]:
        yield from super()._findings()
        experts: list[Any] = [module for module in self.model.modules() if hasattr(module, "_is_expert_parallel")]
        here = {(module._is_expert_parallel, module.num_experts) for module in experts}
        counts = {len(weight) for module in experts for weight in module.parameters(recurse=False)}
        yield "experts of this process", {(True, number // self.mesh.expert) for number in counts}, here
        # Tokens of the whole expert-parallel group reach an expert, so that its own group alone is no divisor.
        groups = [
            module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None for module in experts
        ]
        divisors = {group and group.gradient_divide_factor for group in groups}
        yield "divisor of the gradients of experts", {float(self.mesh.data_parallel_size)}, divisors
