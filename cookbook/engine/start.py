"""Starts a strategy's Accelerator, on GPU and on CPU, with every value filled in and nothing left to guess."""

import importlib
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cookbook import lock
from cookbook.files import RecipeError
from cookbook.launch import CUBLAS_DETERMINISTIC, CUBLAS_VARIABLE
from cookbook.plan import Plan
from cookbook.strategy import Strategy


def build_ops(strategy: Strategy, cache: Path) -> None:
    """Compiles what a strategy needs, once per machine, before a process group could time out over it.

    Only NVMe needs something: DeepSpeed's asynchronous reads and writes (minutes, the first time). A killed build
    leaves a lock that torch waits for without end (torch/utils/cpp_extension.py, FileBaton); under our own lock it can
    only be a dead one.

    Raises:
        RecipeError: compiler or headers are missing. What a GPU needs besides, `launch.check_machine` has seen to.
    """
    if "nvme" not in (strategy.offload_optimizer, strategy.offload_param):
        return
    from deepspeed.ops.op_builder import AsyncIOBuilder

    # ninja stands beside the interpreter, which is not on PATH where the environment was not activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str((cache / "torch_extensions").resolve())))
    folder.mkdir(parents=True, exist_ok=True)
    with lock.making(folder / "cookbook.lock"):
        if not AsyncIOBuilder().is_compatible(verbose=False):
            needs = "a C++ compiler, libaio and its headers: apt-get install g++ libaio-dev"
            raise RecipeError([f"{strategy.path}: NVMe offload needs {needs}"])
        for stale in folder.glob("**/lock"):
            stale.unlink()
        AsyncIOBuilder().load(verbose=False)


def make_deterministic() -> None:
    """Lets torch run only what gives the same bits each time. Before CUDA starts: cuBLAS reads its variable then.

    Flash attention's backward and accumulating writes (index_add, the embedding's backward) add in any order
    otherwise. torch would also fill memory that it hands out with NaN, which is for finding mistakes and costs a pass.
    """
    os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_DETERMINISTIC[0])
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def start_accelerator(
    strategy: Strategy, plan: Plan, mixed_precision: str, deepspeed: dict[str, Any] | None, timeout: timedelta
) -> Any:
    """The Accelerator of a strategy.

    On CPU each family needs its own way in, or accelerate trains plain DDP without a word: accelerate 1.15,
    state.py:986 leaves FSDP out for MULTI_CPU, and :974 leaves DeepSpeed out for cpu=True.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
    from accelerate.utils import DistributedType, ParallelismConfig

    _separate_restarts()
    on_cpu = not torch.cuda.is_available()
    if on_cpu and plan.num_gpus:
        raise RecipeError([f"this machine has {plan.num_gpus} GPUs that this torch ({torch.__version__}) cannot use"])
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if not on_cpu and local_processes > torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise RecipeError([f"{local_processes} processes on this machine, but torch sees {seen} GPUs"])
    # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 retires: a line for each call, thousands in a run.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    # accelerate 1.15 has no argument for the successor.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
    options: dict[str, Any] = {"mixed_precision": mixed_precision}
    if strategy.kind == "single":
        return Accelerator(cpu=on_cpu, **options)
    if strategy.kind == "zero":
        options["deepspeed_plugin"] = _deepspeed_plugin(deepspeed)
        options["gradient_accumulation_steps"] = plan.gradient_accumulation_steps
        PartialState(timeout=timeout, **({"backend": "gloo"} if on_cpu else {}))
        return Accelerator(**options)
    if strategy.fsdp is not None:
        _tell_environment(strategy)
    if strategy.kind == "ddp":
        ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
        options["kwargs_handlers"] = [ddp]
    if strategy.dp_replicate_size > 1:
        options["parallelism_config"] = ParallelismConfig(
            dp_replicate_size=strategy.dp_replicate_size, dp_shard_size=strategy.dp_shard_size
        )
    if on_cpu:
        dist.init_process_group("gloo", timeout=timeout)
        PartialState(cpu=True)
        if strategy.kind != "ddp":
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    else:
        PartialState(timeout=timeout)
    if strategy.fsdp is not None:  # now that the process has its device, which the plugin asks for
        options["fsdp_plugin"] = _fsdp_plugin(strategy, mixed_precision, on_cpu)
    accelerator = Accelerator(cpu=on_cpu, **options)
    if strategy.kind == "fsdp1" and mixed_precision == "fp16":
        accelerator.scaler = _fsdp1_scaler()
    return accelerator


def _separate_restarts() -> None:
    """Gives processes that a launcher started again keys of their own in its store.

    torch takes it that each restart has a new store (distributed/rendezvous.py, _create_c10d_store). Under the static
    rendezvous, which is accelerate's default, it is the first one, with the addresses of the dead.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0":
        return
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the package has a function so named
    create = rendezvous._create_c10d_store
    rendezvous._create_c10d_store = lambda *args, **options: dist.PrefixStore(
        f"restart-{restarts}", create(*args, **options)
    )


def _deepspeed_plugin(config: dict[str, Any] | None) -> Any:
    import deepspeed
    from accelerate.utils import DeepSpeedPlugin

    if not torch.cuda.is_available():
        # A shared-memory collective that would be compiled for 80 s at first use; gloo serves as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # PartialState asks the environment, not the plugin
    return DeepSpeedPlugin(hf_ds_config=config)


def _tell_environment(strategy: Strategy) -> None:
    """PartialState asks the environment, not the plugin, whether parameters lie on CPU, and then adds gloo to NCCL."""
    assert strategy.fsdp is not None
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    os.environ["FSDP_OFFLOAD_PARAMS"] = str(strategy.fsdp.fsdp_offload_params).lower()


def _fsdp_plugin(strategy: Strategy, mixed_precision: str, on_cpu: bool) -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

    block = strategy.fsdp
    assert block is not None
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)
    # FSDP1 synchronises weights through an accelerator only; on CPU every process has read the same file.
    synchronises = not on_cpu or block.fsdp_version == 2
    shared: dict[str, Any] = {
        "auto_wrap_policy": block.fsdp_auto_wrap_policy,
        "cpu_ram_efficient_loading": block.fsdp_cpu_ram_efficient_loading and synchronises,
    }
    if block.fsdp_version == 1:
        # Reductions stay in float32: a strategy must not round what DDP does not.
        policy = low and MixedPrecision(param_dtype=low, reduce_dtype=torch.float32)
        return FullyShardedDataParallelPlugin(
            fsdp_version=1,
            sharding_strategy=block.fsdp_sharding_strategy,
            use_orig_params=True,
            sync_module_states=bool(block.fsdp_sync_module_states) and synchronises,
            backward_prefetch=block.fsdp_backward_prefetch,
            forward_prefetch=bool(block.fsdp_forward_prefetch),
            mixed_precision_policy=policy,
            **shared,
        )
    # accelerate's own policy rounds the returned loss sum to bf16 (8.3240 for 8.3414) and reduces gradients in it.
    policy2 = low and MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, output_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=not on_cpu) if block.fsdp_offload_params else None
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=block.fsdp_reshard_after_forward,
        cpu_offload=offload,
        mixed_precision_policy=policy2,
        **shared,
    )


def _fsdp1_scaler() -> Any:
    """FSDP1's loss scaler, which tells every process of an overflow, in the form that fused AdamW takes.

    torch 2.13's (distributed/fsdp/sharded_grad_scaler.py:254) gives `found_inf` the shape (1,), and fused AdamW
    subtracts it from counts of shape () (optim/adam.py:897), which fails. And it sums it over the processes, while the
    fused kernel skips an update for 1 alone: with 2 it would write the overflow into the weights.
    """
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    class ScalarFoundInf(ShardedGradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            super().unscale_(optimizer)
            found_inf = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            for device, value in found_inf.items():
                found_inf[device] = value.reshape(()).clamp(max=1)

    return ScalarFoundInf()


def wrap_fsdp1_on_cpu(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """What accelerate's `prepare_model` does, with a `device_id` without index: for FSDP1 "cpu" and "cpu:0" are two."""
    from torch.distributed.fsdp import FullyShardedDataParallel

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
