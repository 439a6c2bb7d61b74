"""Strategy and processes that a launcher passes to a run, and a check that nothing else overrides the files.

accelerate prefers environment variables over a program's arguments, and `accelerate launch` turns its YAML into such
variables. They are compared with the strategy file here and then removed; the engine passes plugins instead.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from cookbook.config.foreign import owner_of
from cookbook.config.strategy import Strategy, load_strategy, strategy_path
from cookbook.start import hosts
from cookbook.system import faults
from cookbook.system.files import RecipeError, refuse
from cookbook.system.machine import CPU_PROCESSES, fp8_problems, toolkit_problem, torch_cuda

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")
"""Workspaces for reproducible results (NVIDIA's cuBLAS documentation). The first takes 32 MiB for each handle and is
faster."""

NOTE_FILE = "COOKBOOK_SHORTAGE_FILE"
"""Environment variable with the file by which `cookbook launch` learns of a shortage that it may answer."""
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")

# Variables that do not affect what is computed.
HARMLESS = {
    "ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_CPU_AFFINITY", "ACCELERATE_DEBUG_MODE", "ACCELERATE_DISABLE_RICH",
    "ACCELERATE_DYNAMO_MODE", "ACCELERATE_DYNAMO_USE_DYNAMIC", "ACCELERATE_DYNAMO_USE_FULLGRAPH",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "ACCELERATE_LOG_LEVEL", "FSDP_MIN_NUM_PARAMS",
    "PARALLELISM_CONFIG_CP_BACKEND", "PARALLELISM_CONFIG_SP_BACKEND",
}  # fmt: skip


# Flags of `accelerate launch` that control where and how processes start; the files own everything else.
STARTING_FLAGS = {
    "config_file", "debug", "deepspeed_multinode_launcher", "enable_cpu_affinity", "gpu_ids", "log_dir", "machine_rank",
    "main_process_ip", "main_process_port", "max_restarts", "monitor_interval", "num_cpu_threads_per_process",
    "num_machines", "num_processes", "q", "quiet", "rdzv_backend", "rdzv_conf", "role", "same_network", "t", "tee",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The launcher of this process, from the command lines of its ancestors."""

    is_accelerate: bool = False
    config_file: str | None = None
    num_processes: int | None = None
    """On the command line; None if not given."""
    flags: tuple[tuple[str, str], ...] = ()
    """All flags but `STARTING_FLAGS`, with their values."""

    @property
    def is_on_cpu(self) -> bool:
        """True with --cpu: accelerate 1.15 then starts one process (accelerate/commands/launch.py, launch_command)."""
        return "cpu" in dict(self.flags)


@dataclass(frozen=True, kw_only=True)
class World:
    """Rank and world size, from torchrun's variables."""

    rank: int
    local_rank: int
    num_processes: int
    num_local: int
    """Processes on this machine."""
    is_launched: bool
    """False for plain `python train.py`, which is one process."""


LAUNCHERS = (
    "accelerate-launch",
    "accelerate_cli.py",
    "accelerate.commands.accelerate_cli",
    "accelerate.commands.launch",
)


def find_launcher() -> Launcher:
    """The `accelerate launch` among this process's ancestors, if any."""
    # accelerate hands on what --config_file has, in variables, not its name; and by name it is read strictly.
    for words in _list_ancestors():
        for i, word in enumerate(words):
            name = Path(word).name
            if (name == "accelerate" and words[i + 1 : i + 2] == ["launch"]) or name in LAUNCHERS:
                return _read_flags(words[i + 1 :])
            if word.endswith(os.path.join("accelerate", "commands", "launch.py")):
                return _read_flags(words[i + 1 :])
    return Launcher()


def _list_ancestors() -> Iterator[list[str]]:
    """Command lines of the processes above this one."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents()[:4]:
            with contextlib.suppress(psutil.Error):
                yield process.cmdline()


def _read_flags(words: list[str]) -> Launcher:
    given: dict[str, str] = {}
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if word in ("-m", "--module") or (word.endswith(".py") and not word.startswith("-")):
            break  # the program's name and its own arguments follow
        if word.startswith("-"):
            following = "".join(words[i + 1 : i + 2])
            is_value = not following.startswith("-") and not following.endswith(".py")
            given[flag.lstrip("-").replace("-", "_")] = value if equals else following if is_value else ""
    count = given.get("num_processes", "")
    return Launcher(
        is_accelerate=True,
        config_file=given.get("config_file"),
        num_processes=int(count) if count.isdigit() else None,
        flags=tuple((flag, value) for flag, value in given.items() if flag and flag not in STARTING_FLAGS),
    )


def strategy_in_force(launcher: Launcher, world: World, named: Path | None) -> Path | None:
    """The strategy file of this run.

    Args:
        named: by the recipe; None, as the result: none that exists, which is for whoever reads the recipe to report.

    Raises:
        RecipeError: `accelerate launch` without --config_file, which would use the defaults of the user account; or the
            mistakes of the recipe's strategy.
    """
    if not launcher.is_accelerate:
        if named is None or world.is_launched:
            return named
        load_strategy(named)  # its mistakes are reported now, not only when a launcher uses it
        return strategy_path("single")
    if launcher.config_file is None:
        raise RecipeError(
            "accelerate launch: without --config_file it uses this user account's defaults, not the recipe's"
            " strategy. Write --config_file accelerate_configs/<name>.yaml, or use cookbook launch"
        )
    if launcher.is_on_cpu and not world.is_launched:
        load_strategy(Path(launcher.config_file))
        return strategy_path("single")
    return Path(launcher.config_file)


def strategy_note(launcher: Launcher, path: str, named: str) -> list[str]:
    """A note for the user where the strategy in force is not the one that the recipe names."""
    if Path(path).resolve() == Path(named).resolve():
        return []
    if launcher.is_accelerate:
        return [f"strategy {path} (from the command line) instead of the recipe's {named}"]
    return [f"one process: no launcher started this run; cookbook launch uses the recipe's {named}"]


def shortage_note(on_out_of_memory: str) -> list[str]:
    """A note for a run that nobody will start again as run.on_out_of_memory says."""
    if on_out_of_memory == "stop" or NOTE_FILE in os.environ:
        return []
    return [
        f"run.on_out_of_memory {on_out_of_memory}: cookbook launch starts a run again; started otherwise, it ends with"
        " the line to go on"
    ]


def read_world(environment: Mapping[str, str] = os.environ) -> World:
    """The world described by torchrun's variables; one process without them.

    Raises:
        RecipeError: inconsistent variables, or one that a later step could not read.
    """
    refuse(_check_variables(environment))
    rank, local_rank, size = (
        environment.get(*pair) for pair in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
    )
    local_size = environment.get("LOCAL_WORLD_SIZE", size)
    are_numbers = all(value.isdecimal() for value in (rank, local_rank, size, local_size))
    if not (are_numbers and int(rank) < int(size) and int(local_rank) < int(local_size) <= int(size)):
        raise RecipeError(
            f"environment: RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={size} LOCAL_WORLD_SIZE={local_size} do"
            f" not fit together; unset them or use cookbook launch"
        )
    return World(
        rank=int(rank),
        local_rank=int(local_rank),
        num_processes=int(size),
        num_local=int(local_size),
        is_launched="WORLD_SIZE" in environment,
    )


def _check_variables(environment: Mapping[str, str]) -> list[str]:
    restarts, planned = (environment.get(name) for name in ("TORCHELASTIC_RESTART_COUNT", faults.VARIABLE))
    mistakes = []
    if restarts is not None and not restarts.isdecimal():
        mistakes.append(f"environment: TORCHELASTIC_RESTART_COUNT is {restarts!r}, no number as torchrun's; unset it")
    if planned and not faults.is_plan(planned):
        mistakes.append(f"environment: {faults.VARIABLE} is {planned!r}, no list of faults for the tests; unset it")
    return mistakes


def elastic_sizes(world: World) -> list[int]:
    """Each number of processes that the run may come to have: of `torchrun --nnodes 1:2` those of one machine and of
    two. Empty for a fixed number.
    """
    lines = [" ".join(words) for words in _list_ancestors()] + [f"--nnodes {os.environ.get('PET_NNODES')}"]
    sizes = next(filter(None, (re.search(r"--nnodes[ =](\d+):(\d+)(?!\S)", line) for line in lines)), None)
    return [count * world.num_local for count in range(int(sizes[1]), int(sizes[2]) + 1)] if sizes else []


def check_elastic(sizes: list[int], resume: str) -> list[str]:
    """Mistakes that keep a changing group of processes from resuming where it was. `sizes`: see `elastic_sizes`."""
    mistakes = []
    if sizes and resume != "auto":
        mistakes.append(f"run.resume is {resume}: each time the group changes it would start there; write auto")
    if sizes and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        why = "without it torch 2.13 gives a group that has changed the addresses of the one before (pytorch#135712)"
        mistakes.append(f"torchrun --nnodes MIN:MAX: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each machine; {why}")
    return mistakes


def trim_world(world: World, strategy: Strategy, launcher: Launcher, num_gpus: int) -> World:
    """Ends the excess processes that torchrun starts for `num_processes: auto` on a machine without GPUs.

    There torchrun starts one per core. The first CPU_PROCESSES, or those of the mesh, continue; the others exit with 0,
    before any process group exists.
    """
    wanted = max(CPU_PROCESSES, strategy.written_mesh.num_processes)
    counted = strategy.num_processes is not None or launcher.num_processes is not None or not launcher.is_accelerate
    if num_gpus or counted or world.num_processes <= wanted:
        return world
    if world.rank >= wanted:
        raise SystemExit(0)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(wanted)
    return read_world()


def check_shares(strategy: Strategy, world: World, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Machines with other numbers of processes, each of which would fill the open sizes of a mesh in another way."""
    machines = environment.get("GROUP_WORLD_SIZE", "")
    alike = world.num_processes % world.num_local == 0
    if machines.isdecimal():
        alike = world.num_local * int(machines) == world.num_processes
    if alike or not (strategy.open_sizes or strategy.written_secondary_group_size == "auto"):
        return []
    here = f"{world.num_local} of {world.num_processes} processes on this machine"
    return [f"{strategy.path}: {here}: a size that is auto needs as many on each machine; write numbers instead"]


def choose_network(world: World) -> list[str]:
    """On several machines, makes this process use the network that leads to machine 0; see `hosts.set_interfaces`. On
    one, checks the interfaces that the environment names. Before torch is imported.
    """
    if world.num_processes == 1:
        return []
    if world.num_local == world.num_processes:
        return hosts.interface_problems()
    return hosts.set_interfaces(os.environ.get("MASTER_ADDR", ""))


def check_machine(
    strategy: Strategy | None, num_gpus: int, *, deterministic: bool, mixed_precision: str = "bf16"
) -> list[str]:
    """Mistakes about kernels of the run that this machine lacks; found early, before downloads and imports."""
    mistakes = [f"{what}; {remedy}" for what, remedy in fp8_problems()] if mixed_precision == "fp8" and num_gpus else []
    given = os.environ.get(CUBLAS_VARIABLE)
    if deterministic and given not in (None, *CUBLAS_DETERMINISTIC):
        allowed = " or ".join(CUBLAS_DETERMINISTIC)
        mistakes.append(f"run.deterministic and {CUBLAS_VARIABLE}={given}: cuBLAS is deterministic with {allowed}")
    if not num_gpus or strategy is None or not strategy.offloads_to_nvme:
        return mistakes
    try:
        problem = toolkit_problem(torch_cuda())
    except ImportError:
        return mistakes
    if problem:
        mistakes.append(f"{strategy.path}: offload to NVMe compiles code: {problem[0]}; {problem[1]}")
    return mistakes


def check_cpu(launcher: Launcher, num_gpus: int) -> list[str]:
    """One mistake if --cpu would not be obeyed."""
    if not launcher.is_on_cpu or not num_gpus:
        return []
    return ["--cpu: a run uses all visible GPUs; hide them with CUDA_VISIBLE_DEVICES="]


def check_count(world: World, launcher: Launcher) -> list[str]:
    """One mistake if accelerate ignored --num_processes, as it does with distributed_type NO."""
    if launcher.num_processes is None or launcher.num_processes == world.num_processes:
        return []
    return [f"--num_processes {launcher.num_processes}: {world.num_processes} started; {launcher.config_file} runs one"]


def check_environment(strategy: Strategy | None, launcher: Launcher, mixed_precision: str | None) -> list[str]:
    """One mistake for each variable and flag that contradicts the recipe or the strategy file.

    Args:
        strategy: None: not known, and so nothing is compared where accelerate hands on its keys in variables.
        mixed_precision: None: not known.
    """
    if strategy is None and launcher.is_accelerate:
        return []
    expected = {} if strategy is None or not launcher.is_accelerate else _expected_variables(strategy)
    if launcher.is_on_cpu:
        expected["ACCELERATE_USE_CPU"] = "true"
    mistakes = []
    for name, value in sorted(os.environ.items()):
        if not name.startswith(PREFIXES) or name in HARMLESS:
            continue
        if name == "ACCELERATE_MIXED_PRECISION" and launcher.is_accelerate:
            if value not in ("no", mixed_precision or value):  # accelerate's default is "no"
                mistakes.append(f"--mixed_precision {value}: the recipe has {mixed_precision}; change it there")
        elif name not in expected:
            origin = "environment or a flag of accelerate launch" if launcher.is_accelerate else "environment"
            mistakes.append(f"{name}={value} ({origin}): it would override the files; take it out")
        elif strategy is not None and value.lower() != expected[name].lower():
            mistakes.append(
                f"{name}={value} (environment or a flag of accelerate launch), but {strategy.path} means"
                f" {expected[name].lower()}; change the file instead"
            )
    compared = " ".join([*expected, *mistakes])
    return mistakes + _check_flags(launcher, mixed_precision, compared)


def _check_flags(launcher: Launcher, mixed_precision: str | None, compared: str) -> list[str]:
    """One mistake for each flag that accelerate turned into no variable, or into one with its default.

    Args:
        compared: names of the variables and flags that have been checked.
    """
    mistakes = []
    for flag, value in launcher.flags:
        is_checked = flag.upper() in compared or f"--{flag} " in compared
        if is_checked or (flag, value) == ("mixed_precision", mixed_precision or value):
            continue
        if flag == "mixed_precision":
            mistakes.append(f"--{flag} {value}: the recipe has {mixed_precision}; change it there")
        else:
            owner = owner_of(flag) or "the strategy file owns it"
            mistakes.append(f"--{flag}{' ' * bool(value)}{value} (accelerate launch): {owner}; take the flag out")
    return mistakes


def clear_environment() -> None:
    """Removes the launcher's variables, so that only what the engine passes has effect."""
    kept = ("ACCELERATE_LOG_LEVEL", "ACCELERATE_DEBUG_MODE", "ACCELERATE_CPU_AFFINITY")
    for name in [name for name in os.environ if name.startswith(PREFIXES) and name not in kept]:
        del os.environ[name]


VARIABLES = {
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    **{
        key: f"ACCELERATE_DEEPSPEED_{key.upper()}"
        for key in ("offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model")
    },
}
"""The variables of keys of a YAML's sections, where that is not the key in capitals."""


def _expected_variables(strategy: Strategy) -> dict[str, str]:
    """The variables that `accelerate launch` 1.15 sets for this file (utils/launch.py, prepare_multi_gpu_env)."""
    expected = {"ACCELERATE_DYNAMO_BACKEND": "no", "ACCELERATE_USE_CPU": str(strategy.use_cpu)}
    written = {VARIABLES.get(key, key.upper()): str(value) for key, value in strategy.written.items()}
    if strategy.kind == "zero":
        expected |= {"ACCELERATE_USE_DEEPSPEED": "true"}
    if strategy.fsdp is not None:
        block = strategy.fsdp
        expected |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": str(block.fsdp_version),
            "FSDP_AUTO_WRAP_POLICY": block.fsdp_auto_wrap_policy,
            "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
            "FSDP_RESHARD_AFTER_FORWARD": str(block.fsdp_reshard_after_forward is not False),
            "FSDP_OFFLOAD_PARAMS": str(block.fsdp_offload_params),
            "FSDP_BACKWARD_PREFETCH": block.fsdp_backward_prefetch or "BACKWARD_PRE",
            "FSDP_FORWARD_PREFETCH": str(bool(block.fsdp_forward_prefetch)),
            "FSDP_USE_ORIG_PARAMS": "true",
            "FSDP_CPU_RAM_EFFICIENT_LOADING": str(block.fsdp_cpu_ram_efficient_loading),
            "FSDP_SYNC_MODULE_STATES": str(block.fsdp_sync_module_states is not False),
            "FSDP_ACTIVATION_CHECKPOINTING": "false",
            "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
        }
    if strategy.has_parallelism_block:
        expected |= {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": _write_size(strategy, "dp_replicate_size"),
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": _write_size(strategy, "dp_shard_size"),
            "PARALLELISM_CONFIG_TP_SIZE": _write_size(strategy, "tp_size"),
            "PARALLELISM_CONFIG_CP_SIZE": "1",
            "PARALLELISM_CONFIG_SP_SIZE": str(strategy.sp_size),
        }
    if strategy.sp_size > 1:  # defaults of accelerate's own sequence parallelism, which does not run
        expected |= {
            "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "None",
            "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "True",
            "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
        }
    return expected | written


def _write_size(strategy: Strategy, size: str) -> str:
    return "auto" if size in strategy.open_sizes else str(getattr(strategy, size))
