"""Runs a strategy: starts it on GPU or CPU, owns all forwards and backwards of a step, and proves what is in force.

`train.py` knows no strategy; it says `gradients`, `step`, `evaluate`. What differs between engines lies here, in one
table of facts (`Gradients`) and in `_start`, `_prepare` and `_findings`.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from cookbook.launch import World
from cookbook.plan import Plan
from cookbook.strategy import Strategy

TIMEOUT = timedelta(minutes=10)
"""Of a collective. Data is prepared before the process group exists, so nothing in a step takes minutes."""

Batch = dict[str, torch.Tensor]
Objective = Callable[[torch.nn.Module, Batch], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Where this process stands among those that see different samples."""

    size: int
    rank: int


class Engine:
    """One strategy in force. All methods are collective: every process calls them."""

    def __init__(
        self, strategy: Strategy, plan: Plan, world: World, *, mixed_precision: str, micro_batch_size: int, max_grad_norm: float
    ) -> None:
        self.strategy, self.plan, self.world = strategy, plan, world
        self.mixed_precision, self.max_grad_norm = mixed_precision, max_grad_norm
        self.notes: list[str] = []
        self.deepspeed_config = _deepspeed_config(strategy, plan, mixed_precision, micro_batch_size, max_grad_norm)
        self.accelerator = _start(self)
        self.device: torch.device = self.accelerator.device
        self.data_parallel = DataParallel(size=plan.data_parallel_size, rank=world.rank // strategy.tp_size)
        self.model: torch.nn.Module
        self.optimizer: Any

    @property
    def is_main(self) -> bool:
        """True on the one process that prints and writes."""
        return self.world.rank == 0

    def load_options(self) -> dict[str, Any]:
        """What `from_pretrained` must be told. Tensor parallel cuts the model while it is read."""
        if self.strategy.kind != "tp":
            return {}
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=self.strategy.tp_size)}

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Wraps model and optimizer, then asserts that what runs is what was asked for.

        Raises:
            RuntimeError: another strategy is in force; lists every difference.
        """
        if self.strategy.kind == "tp":
            # transformers has cut the model already; accelerate's own preparation would wrap it in DDP.
            self.model = model if self.device.type == "cpu" else model.to(self.device)
            self.optimizer = self.accelerator.prepare(optimizer)
        else:
            if self.strategy.kind == "fsdp1" and self.device.type == "cpu":
                model = _wrap_fsdp1_on_cpu(self, model)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.assert_in_force()

    def assert_in_force(self) -> None:
        """Compares the running state with strategy, recipe and plan.

        Raises:
            RuntimeError: lists every difference.
        """
        wrong = [f"  {what}: asked for {asked!r}, found {found!r}" for what, asked, found in _findings(self) if asked != found]
        if wrong:
            raise RuntimeError(f"{self.strategy.path} is not what runs:\n" + "\n".join(wrong))

    def gradients(self, objective: Objective, micro_batches: list[Batch], num_targets: int) -> float:
        """Runs every forward and backward of one optimizer step. Returns the loss: the token mean of the global batch.

        Every engine divides the gradient sum over the data-parallel processes by their number D, and we want
        d(sum of all nll)/N. Hence each process runs backward on  nll x D / N,  N counting the targets of the whole
        global batch. Accumulation adds up micro-batches and needs no factor: accelerate is told 1, and DeepSpeed
        `scale_wrt_gas=False`.
        """
        scale = self.data_parallel.size / num_targets
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            with self._synchronise(last):
                loss_sum = self._forward(objective, batch)
                total += loss_sum.detach()
                if self.strategy.kind == "zero":
                    self.model.backward(loss_sum * scale, scale_wrt_gas=False)
                else:
                    self.accelerator.backward(loss_sum * scale)
        return float(self.sum_over_data(total)) / num_targets

    def step(self) -> float:
        """Clips, updates the weights and clears the gradients. Returns the gradient norm before clipping."""
        if self.strategy.kind == "zero":
            self.model.step()
            norm = self.model.get_global_grad_norm()
            return float(norm)
        if self.accelerator.scaler is not None:
            self.accelerator.unscale_gradients()
        norm = self._gradient_norm()
        if self.max_grad_norm and norm > self.max_grad_norm:
            # The same epsilon as torch.nn.utils.clip_grad_norm_ and DeepSpeed's unscale_and_clip_grads.
            factor = self.max_grad_norm / (norm + 1e-6)
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    _local(parameter.grad).mul_(factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def evaluate(self, objective: Objective, batches: Iterable[Batch]) -> tuple[float, int]:
        """Sum of losses and number of targets over all processes; the same number of batches on each of them."""
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            totals[0] += self._forward(objective, batch)
            totals[1] += (batch["targets"] != -100).sum()
        self.model.train()
        loss_sum, num_targets = self.sum_over_data(totals).tolist()
        return loss_sum, round(num_targets)

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over data-parallel processes; a tensor-parallel group computes one value together and counts once."""
        if dist.is_initialized() and self.data_parallel.size > 1:
            dist.all_reduce(values)
        return values

    def max_over_processes(self, value: float) -> float:
        """The largest of the processes' values."""
        if not dist.is_initialized():
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every parameter whole: (name, float32 tensor on CPU), the tensor on the main process only.

        Tied parameters come once. Under mixed precision these are the float32 master weights.
        """
        for name, parameter in self.unwrapped().named_parameters():
            full = _gather(self, parameter)
            yield name, full.detach().to("cpu", torch.float32) if self.is_main else None

    def unwrapped(self) -> torch.nn.Module:
        """The transformers model inside the wrapper."""
        return self.model.module if self.strategy.kind in ("ddp", "fsdp1", "zero") else self.model

    def close(self) -> None:
        """Leaves together. A process that exits while another still reads its last message breaks a run that was right.

        A barrier is not enough: with gloo its own last message is lost when the sender's sockets close too soon. So
        each process says in the store that it is past the barrier, and waits for the others to say so.
        """
        if not dist.is_initialized():
            return
        dist.barrier()
        store = dist.distributed_c10d._get_default_store()
        store.set(f"cookbook/left/{self.world.rank}", "1")
        store.wait([f"cookbook/left/{rank}" for rank in range(self.world.num_processes)])
        dist.destroy_process_group()

    def _forward(self, objective: Objective, batch: Batch) -> torch.Tensor:
        batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        # Only what accelerate has not prepared lacks its autocast.
        with self.accelerator.autocast() if self.strategy.kind == "tp" else contextlib.nullcontext():
            return objective(self.model, batch)

    def _synchronise(self, last: bool) -> contextlib.AbstractContextManager:
        """Communicates gradients when that is needed, and not before.

        DDP waits for the last micro-batch. What shards gradients (FSDP, ZeRO-2, -3) reduces each one: keeping whole
        gradients until the last would cost the memory that the strategy is there to save. HSDP reduces inside the
        shard group each time and between the replicas at the last.
        """
        if self.strategy.kind == "ddp" and not last:
            return self.model.no_sync()
        if self.strategy.kind == "fsdp2":
            self.model.set_requires_all_reduce(last)
        if self.strategy.kind == "zero":
            # Our windows may be shorter at the end of an epoch than gradient_accumulation_steps.
            self.model.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def _gradient_norm(self) -> float:
        """The norm over all parameters, in float64.

        torch's float32 norm on CPU is off by 5e-5 for a tensor of a million elements; DeepSpeed's is float64.
        """
        whole = torch.zeros((), dtype=torch.float64, device=self.device)
        shards = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                gradient = _local(parameter.grad)
                square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square().to(self.device)
                if _is_sharded(parameter) or self.strategy.kind == "fsdp1":
                    shards += square
                else:
                    whole += square
        if dist.is_initialized() and self.world.num_processes > 1:
            dist.all_reduce(shards)
            shards /= self.strategy.dp_replicate_size
        return float((whole + shards).sqrt())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(isinstance(placement, Shard) for placement in tensor.placements)


def _deepspeed_config(
    strategy: Strategy, plan: Plan, mixed_precision: str, micro_batch_size: int, max_grad_norm: float
) -> dict[str, Any] | None:
    """The JSON with every "auto" replaced by the recipe's value, so that nothing is left for a library to guess."""
    if strategy.deepspeed is None:
        return None
    accumulation = plan.gradient_accumulation_steps
    return {
        **strategy.deepspeed,
        "bf16": {"enabled": mixed_precision == "bf16"},
        "fp16": {"enabled": mixed_precision == "fp16"},
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro_batch_size * accumulation * plan.data_parallel_size,
        "gradient_clipping": max_grad_norm,
        "zero_allow_untested_optimizer": True,  # torch's AdamW and SGD; DeepSpeed knows its own only
        "steps_per_print": 2**31,
    }


def _start(engine: Engine) -> Any:
    """The Accelerator. On CPU each family needs its own way in, or accelerate trains plain DDP without a word.

    accelerate 1.15, state.py:986 leaves FSDP out for MULTI_CPU and :974 leaves DeepSpeed out for cpu=True.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
    from accelerate.utils import DistributedType, ParallelismConfig

    strategy, on_cpu = engine.strategy, not torch.cuda.is_available()
    options: dict[str, Any] = {"mixed_precision": engine.mixed_precision}
    if on_cpu:
        torch.set_num_threads(max(1, _cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    if strategy.kind == "single":
        return Accelerator(cpu=on_cpu, **options)
    if strategy.kind == "zero":
        options["deepspeed_plugin"] = _deepspeed_plugin(engine)
        options["gradient_accumulation_steps"] = engine.plan.gradient_accumulation_steps
        PartialState(timeout=TIMEOUT, **({"backend": "gloo"} if on_cpu else {}))
        return Accelerator(**options)
    if strategy.fsdp is not None:
        options["fsdp_plugin"] = _fsdp_plugin(engine, on_cpu)
    if strategy.kind == "ddp":
        ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
        options["kwargs_handlers"] = [ddp]
    if strategy.dp_replicate_size > 1:
        options["parallelism_config"] = ParallelismConfig(
            dp_replicate_size=strategy.dp_replicate_size, dp_shard_size=strategy.dp_shard_size
        )
    if not on_cpu:
        PartialState(timeout=TIMEOUT)
        return Accelerator(**options)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    PartialState(cpu=True)
    if strategy.kind != "ddp":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Accelerator(cpu=True, **options)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _deepspeed_plugin(engine: Engine) -> Any:
    import deepspeed
    from accelerate.utils import DeepSpeedPlugin

    if not torch.cuda.is_available():
        # A shared-memory collective that would be compiled for 80 s at first use; gloo serves as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # PartialState asks the environment, not the plugin
    return DeepSpeedPlugin(hf_ds_config=engine.deepspeed_config)


def _fsdp_plugin(engine: Engine, on_cpu: bool) -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

    block = engine.strategy.fsdp
    assert block is not None
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(engine.mixed_precision)
    rank_zero_loads = block.fsdp_cpu_ram_efficient_loading
    if on_cpu and rank_zero_loads:
        rank_zero_loads = False
        engine.notes.append("fsdp_cpu_ram_efficient_loading needs a GPU: every process reads the weights")
    shared: dict[str, Any] = {
        "auto_wrap_policy": block.fsdp_auto_wrap_policy,
        "cpu_ram_efficient_loading": rank_zero_loads,
    }
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(rank_zero_loads).lower()  # from_pretrained asks the environment
    if block.fsdp_version == 1:
        # Reductions stay in float32: a strategy must not round what DDP does not.
        policy = None if low is None else MixedPrecision(param_dtype=low, reduce_dtype=torch.float32, cast_root_forward_inputs=False)
        return FullyShardedDataParallelPlugin(
            fsdp_version=1,
            sharding_strategy=block.fsdp_sharding_strategy,
            use_orig_params=True,
            sync_module_states=bool(block.fsdp_sync_module_states) and not on_cpu,
            backward_prefetch=block.fsdp_backward_prefetch,
            forward_prefetch=bool(block.fsdp_forward_prefetch),
            mixed_precision_policy=policy,
            **shared,
        )
    # accelerate's own policy rounds the returned loss sum to bf16 (8.3240 for 8.3414) and reduces gradients in it.
    policy2 = None if low is None else MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, output_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=not on_cpu) if block.fsdp_offload_params else None
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=block.fsdp_reshard_after_forward,
        cpu_offload=offload,
        mixed_precision_policy=policy2,
        **shared,
    )


def _wrap_fsdp1_on_cpu(engine: Engine, model: torch.nn.Module) -> torch.nn.Module:
    """What accelerate's `prepare_model` does, with a `device_id` without index: for FSDP1 "cpu" and "cpu:0" are two."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    plugin = engine.accelerator.state.fsdp_plugin
    plugin.set_auto_wrap_policy(model)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=plugin.sharding_strategy,
        auto_wrap_policy=plugin.auto_wrap_policy,
        mixed_precision=plugin.mixed_precision_policy,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def _gather(engine: Engine, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The whole parameter. Collective."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor()
    if engine.strategy.kind == "zero":
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        if parameter.requires_grad:
            return safe_get_full_fp32_param(parameter)
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.strategy.zero_stage == 3):
            return parameter.detach().clone()
    return parameter


def _findings(engine: Engine) -> Iterator[tuple[str, Any, Any]]:
    """(what, asked for, found) for everything that a library could have changed behind our back."""
    strategy, plan, model = engine.strategy, engine.plan, engine.model
    yield "processes", plan.num_processes, dist.get_world_size() if dist.is_initialized() else 1
    yield "processes seen by accelerate", plan.num_processes, engine.accelerator.num_processes
    if strategy.kind == "zero":
        yield from _deepspeed_findings(engine)
        return
    yield "precision", engine.mixed_precision, engine.accelerator.mixed_precision
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    yield "dtype of the trained weights", {torch.float32}, {parameter.dtype for parameter in trainable}
    owned = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    yield "parameters in the optimizer", {id(p) for p in trainable}, owned
    sharded = sum(_is_sharded(parameter) for parameter in trainable)
    if strategy.kind in ("single", "ddp"):
        yield "wrapper", strategy.kind == "ddp", isinstance(model, torch.nn.parallel.DistributedDataParallel)
        yield "sharded parameters", 0, sharded
    if strategy.kind == "fsdp1":
        yield from _fsdp1_findings(engine)
    if strategy.kind == "fsdp2":
        yield from _fsdp2_findings(engine, trainable)
    if strategy.kind == "tp":
        meshes = {parameter.device_mesh.size() for parameter in trainable if _is_sharded(parameter)}
        yield "tensor-parallel mesh", {strategy.tp_size}, meshes
        # Norms stay whole; every matrix must be cut.
        yield "whole matrices", 0, sum(not _is_sharded(p) for p in trainable if p.ndim >= 2)


def _deepspeed_findings(engine: Engine) -> Iterator[tuple[str, Any, Any]]:
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
    yield "micro-batch size", engine.deepspeed_config["train_micro_batch_size_per_gpu"], model.train_micro_batch_size_per_gpu()
    yield "gradient accumulation", plan.gradient_accumulation_steps, model.gradient_accumulation_steps()
    yield "clipping", engine.max_grad_norm, model.gradient_clipping()
    found_precision = "bf16" if model.bfloat16_enabled() else "fp16" if model.fp16_enabled() else "no"
    yield "precision", engine.mixed_precision, found_precision
    expected = {1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
    yield "optimizer wrapper", expected[strategy.zero_stage], type(model.optimizer).__name__
    yield "data-parallel processes", plan.data_parallel_size, dist.get_world_size(model.data_parallel_group)
    partitioned = [hasattr(parameter, "ds_tensor") for parameter in model.parameters()]
    yield "partitioned parameters", strategy.zero_stage == 3, all(partitioned)
    if strategy.zero_stage == 3:
        persistent = zero.param_persistence_threshold
        states = {p.ds_status.name for p in model.parameters() if p.ds_numel > persistent}
        yield "parameters between steps", {"NOT_AVAILABLE"}, states or {"NOT_AVAILABLE"}


def _fsdp1_findings(engine: Engine) -> Iterator[tuple[str, Any, Any]]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    yield "wrapper", True, isinstance(engine.model, FullyShardedDataParallel)
    units = FullyShardedDataParallel.fsdp_modules(engine.model)
    num_layers = engine.unwrapped().config.num_hidden_layers
    yield "FSDP units: one per layer and the root", num_layers + 1, len(units)
    assert engine.strategy.fsdp is not None
    asked = engine.strategy.fsdp.fsdp_sharding_strategy if engine.plan.num_processes > 1 else "NO_SHARD"
    yield "sharding", {asked}, {unit.sharding_strategy.name for unit in units}


def _fsdp2_findings(engine: Engine, trainable: list[torch.nn.Parameter]) -> Iterator[tuple[str, Any, Any]]:
    from torch.distributed.fsdp import FSDPModule

    strategy, block = engine.strategy, engine.strategy.fsdp
    assert block is not None
    yield "wrapper", True, isinstance(engine.model, FSDPModule)
    yield "whole parameters", 0, sum(not _is_sharded(parameter) for parameter in trainable)
    shards = strategy.dp_shard_size if strategy.dp_replicate_size > 1 else engine.plan.num_processes
    mesh = (strategy.dp_replicate_size, shards) if strategy.dp_replicate_size > 1 else (shards,)
    yield "mesh", {mesh}, {tuple(p.device_mesh.shape) for p in trainable if isinstance(p, DTensor)}
    units = [module for module in engine.model.modules() if isinstance(module, FSDPModule)]
    layers = [module for module in units if _is_layer(module, engine.model)]
    yield "layers that are units", engine.model.config.num_hidden_layers, len(layers)
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in layers]
    reshards = {group.post_forward_mesh_info is not None for group in groups}
    yield "reshard after forward", {block.fsdp_reshard_after_forward}, reshards
    offloaded = {type(group.offload_policy).__name__ for group in groups}
    yield "parameter offload", {"CPUOffloadPolicy" if block.fsdp_offload_params else "OffloadPolicy"}, offloaded


def _is_layer(module: torch.nn.Module, model: torch.nn.Module) -> bool:
    """FSDP2 renames a class; its bases tell what it was."""
    return any(base.__name__ in model._no_split_modules for base in type(module).__mro__)
