"""What comes before a strategy's Accelerator, on GPU and on CPU: nothing is left for a library to guess."""

import importlib
import os
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cookbook.files import RecipeError
from cookbook.launch import CUBLAS_DETERMINISTIC, CUBLAS_VARIABLE
from cookbook.plan import Plan


def make_deterministic() -> None:
    """Lets torch run only what gives the same bits each time. Before CUDA starts: cuBLAS reads its variable then.

    Flash attention's backward and accumulating writes (index_add, the embedding's backward) add in any order
    otherwise. torch would also fill memory that it hands out with NaN, which is for finding mistakes and costs a pass.
    """
    os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_DETERMINISTIC[0])
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def prepare_process(plan: Plan) -> None:
    """Checks the GPUs that torch sees, and works around what the libraries do with a process.

    Raises:
        RecipeError: more processes than GPUs, or a torch that cannot use them.
    """
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


def start_processes(timeout: timedelta, *, as_gpus: bool) -> None:
    """The process group, and accelerate's idea of this process, before there is an Accelerator.

    Args:
        as_gpus: lets accelerate treat CPU processes as GPUs. Else it trains plain DDP without a word (accelerate 1.15,
            state.py:986 leaves FSDP out for MULTI_CPU).
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    if torch.cuda.is_available():
        PartialState(timeout=timeout)
        return
    dist.init_process_group("gloo", timeout=timeout)
    PartialState(cpu=True)
    if as_gpus:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


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
