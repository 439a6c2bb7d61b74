"""The process before its Accelerator, on GPU and on CPU: nothing is left for a library to guess."""

import importlib
import os
import sys
import warnings
from datetime import timedelta
from functools import cache
from typing import Any

import accelerate.utils.other
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from accelerate.utils.environment import get_cpu_distributed_information
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from cookbook.config.mesh import Mesh
from cookbook.facts.pipeline_stages import head_in_layers, stage_chunks
from cookbook.facts.score_head import HEAD, is_scored
from cookbook.start.launchers import CUBLAS_DETERMINISTIC, CUBLAS_VARIABLE
from cookbook.start.run_plan import Plan
from cookbook.system import status
from cookbook.system.files import RecipeError
from cookbook.system.replaced import check_function, replace_function, set_values

# accelerate 1.15 imports DeepSpeed, which takes a second, to ask whether a model is one of its engines (utils/other.py,
# extract_model_from_parallel): none is while it is not imported. Here, since a new model is saved before any engine.
set_values(accelerate.utils.other, is_deepspeed_available=lambda: "deepspeed" in sys.modules)


def make_deterministic() -> None:
    """Restrict torch to deterministic kernels. Call before CUDA starts: cuBLAS reads its variable then.

    Otherwise flash attention's backward and accumulating writes (index_add, the embedding's backward) add in any order.
    """
    os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_DETERMINISTIC[0])
    torch.use_deterministic_algorithms(True)
    # Debugging aid that the line above switches on: it costs a pass over each new tensor.
    set_values(torch.utils.deterministic, fill_uninitialized_memory=False)
    set_values(torch.backends.cudnn, deterministic=True, benchmark=False)


def prepare_process(plan: Plan, timeout: timedelta) -> None:
    """Check the GPUs that torch sees, and silence and repair what the libraries do to a process.

    Args:
        timeout: limit of a collective in every process group, also in those that libraries make.

    Raises:
        RecipeError: as `check_launcher` and `check_products`; more processes than GPUs, or a torch that cannot use
            them.
    """
    check_launcher()
    _separate_restarts()
    on_cpu = not torch.cuda.is_available()
    if on_cpu and plan.num_gpus:
        raise RecipeError(f"this machine has {plan.num_gpus} GPUs that this torch ({torch.__version__}) cannot use")
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if not on_cpu and local_processes > torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise RecipeError(f"{local_processes} processes on this machine, but torch sees {seen} GPUs")
    check_products(torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))))
    # Of a group that a library makes without one: 30 minutes, or NCCL's 10 (torch 2.13, distributed_c10d.py,
    # _get_default_timeout), would be less than the watchdog's, which names who is at fault.
    set_values(distributed_c10d, default_pg_timeout=timeout, default_pg_nccl_timeout=timeout)
    # DeepSpeed calls collectives by names that torch retires: a line for each call, thousands in a run.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    # accelerate has no argument for the successor.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)


def check_launcher() -> None:
    """
    Raises:
        RecipeError: another launcher than torchrun started this process with others, each of which would train alone.
    """
    ours, counted = int(os.environ.get("WORLD_SIZE", 1)), get_cpu_distributed_information().world_size
    if counted != ours:
        raise RecipeError(
            f"environment: another launcher (mpirun, or srun with PMI) says that there are {counted} processes, and"
            f" this run has {ours}; start `cookbook launch` once on each machine, which starts its processes"
        )


def check_products(device: torch.device) -> None:
    """Compare a product in float32 with what it must be, to the last bit.

    Raises:
        RecipeError: the device multiplies float32 in fewer bits, whoever asked for it: a variable, as some containers
            set one, or a plugin. Rotary positions and routers are computed in float32 under bf16 as well.
    """
    thirds = torch.full((256, 256), 1 / 3, device=device)
    if not torch.equal(thirds @ torch.eye(256, device=device), thirds):
        raise RecipeError(
            f"environment: float32 products on {device.type} are computed in fewer bits than float32 has (TF32 or"
            " bfloat16); unset NVIDIA_TF32_OVERRIDE, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and ONEDNN_DEFAULT_FPMATH_MODE,"
            " and take torch.set_float32_matmul_precision out of plugins; mixed_precision: bf16 is what makes a run"
            " faster"
        )


def limits_of_collectives() -> set[timedelta]:
    """The limits in all process groups that this process belongs to."""
    groups = distributed_c10d._world.pg_map if dist.is_initialized() else ()
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    return {backend.options._timeout for backend in backends}


def start_processes(timeout: timedelta, *, as_gpus: bool) -> None:
    """Start the process group and accelerate's PartialState, before there is an Accelerator.

    Args:
        as_gpus: make accelerate treat CPU processes as GPUs. Else it silently trains plain DDP (accelerate 1.15,
            state.py, AcceleratorState, excludes FSDP for MULTI_CPU).
    """
    if torch.cuda.is_available():
        PartialState(timeout=timeout)
        return
    dist.init_process_group("gloo", timeout=timeout)
    PartialState(cpu=True)
    if as_gpus:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def shard_while_loading(mesh: Mesh, **options: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained` that let transformers shard the model, or leave a stage's layers in it, before it
    reads the weights: each process reads its own, straight to its GPU.

    Args:
        options: further ones of transformers' DistributedConfig.

    Raises:
        RecipeError: a transformers that is too old for this.
    """
    import transformers
    from transformers.distributed import DistributedConfig

    if not hasattr(DistributedConfig, "dp_replicate_size"):
        here = transformers.__version__
        raise RecipeError(f"tensor, pipeline and expert parallel need transformers 5.23 or newer; here is {here}")

    class Config(DistributedConfig):
        chunks = mesh.chunks

        @property
        def dp_size(self) -> int:
            """With 1 transformers leaves copies alone. It would apply FSDP2 to them, before there is an adapter."""
            return 1 if self.fsdp_size == 1 else super().dp_size

        def _validate_mesh_config(self) -> None:
            """transformers 5.23 refuses FSDP2 with stages, in whose naive schedule nothing trains
            (distributed/configuration_utils.py, _validate_mesh_config)."""

    if mesh.pipeline > 1:
        _cut_by_cost()
    # Sizes of our mesh are factors; transformers' shards contain the groups of experts.
    sizes = {"dp_replicate_size": mesh.replicate, "fsdp_size": mesh.shard * mesh.expert, "ep_size": mesh.expert}
    return {"distributed_config": Config(**sizes, tp_size=mesh.tensor, pp_size=mesh.pipeline, **options)}


@cache
def _cut_by_cost() -> None:
    """Make transformers 5.23 cut a model into our stages, and not into as many layers each
    (distributed/pipeline_parallel.py, apply_pipeline_parallelism): one range of layers, of which those between the
    ranges of the stage are then taken out too. It lists the matrices that tensor parallel shards before it takes layers
    out of a stage, and then does not find them (distributed/mixin.py, maybe_distribute_model).
    """
    from transformers.distributed import mixin, pipeline_parallel

    apply_pipeline: Any = mixin.apply_pipeline_parallelism
    apply_tensor: Any = mixin.apply_tensor_parallelism
    base: Any = pipeline_parallel.PipelineStage

    def cut(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        untyped: Any = model
        layers, head, chunks = (
            untyped.base_model.layers,
            head_in_layers(model),
            untyped.config.distributed_config.chunks,
        )
        stages = [
            stage_chunks(len(layers), stage, mesh.size(), chunks, head_layers=head) for stage in range(mesh.size())
        ]

        class Stage(base):  # type: ignore[misc]
            def layer_range_for_rank(self, rank: int, num_layers: int) -> tuple[int, int]:
                return stages[rank][0].start, stages[rank][-1].stop

            def find_rank_for_key(self, key: str, num_layers: int, base_model_prefix: str) -> int | None:
                inside = key.removeprefix(f"{base_model_prefix}.layers.")
                if key.startswith(f"{HEAD}."):
                    return mesh.size() - 1
                if inside == key:
                    return super().find_rank_for_key(key, num_layers, base_model_prefix)
                layer = int(inside.partition(".")[0])
                return next((rank for rank, own in enumerate(stages) if any(layer in chunk for chunk in own)), None)

        pipeline_parallel.PipelineStage = Stage
        apply_pipeline(model, mesh)
        untyped._pp_stage.chunks = own = stages[mesh.get_local_rank()]
        if is_scored(untyped.config) and not untyped._pp_stage.pp_is_last_stage:
            setattr(untyped, HEAD, pipeline_parallel.PipelineIdentityLayer())
        for i in range(len(layers)):
            # Identities keep the names of all other layers, and with them checkpoints, adapters and optimizer groups.
            if not any(i in chunk for chunk in own):
                layers[i] = pipeline_parallel.PipelineIdentityLayer()
        return model

    def shard(model: torch.nn.Module, mesh: DeviceMesh, plan: dict[str, str]) -> torch.nn.Module:
        identity = pipeline_parallel.PipelineIdentityLayer
        there = {name for name, module in model.named_modules() if not isinstance(module, identity)}
        there |= {name for name, _ in model.named_parameters()}
        return apply_tensor(model, mesh, {name: style for name, style in plan.items() if name in there})

    check_function(pipeline_parallel, "PipelineStage")
    replace_function(mixin, "apply_pipeline_parallelism", cut)
    replace_function(mixin, "apply_tensor_parallelism", shard)


def _separate_restarts() -> None:
    """Give processes that a launcher restarted a key prefix of their own in its store.

    torch assumes a new store for each restart (distributed/rendezvous.py, _create_c10d_store). Under the static
    rendezvous, accelerate's default, it is the first one, with the addresses of the dead processes.
    """
    restarts = status.common_restarts()
    if restarts == "0":
        return
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the package has a function so named
    create = rendezvous._create_c10d_store

    def separate(*arguments: Any, **options: Any) -> Any:
        return dist.PrefixStore(f"restart-{restarts}", create(*arguments, **options))

    replace_function(rendezvous, "_create_c10d_store", separate)
