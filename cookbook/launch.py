"""The border between a launcher and the run: which strategy is in force, and nothing from outside that changes it.

accelerate obeys environment variables over what a program passes, and `accelerate launch` turns its YAML into such
variables. So they are read here once, compared with the strategy file, and taken out; the engine passes plugins.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from cookbook.files import RecipeError
from cookbook.machine import CPU_PROCESSES, toolkit_problem, torch_cuda
from cookbook.strategy import OWNED_BY_THE_RECIPE, Strategy

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")
"""Workspaces with which cuBLAS gives the same bits each time (NVIDIA's cuBLAS documentation, results reproducibility).
The first costs about 24 MiB of the GPU and is faster."""

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")

# Set by `accelerate launch` or by people, without a say in what is computed.
HARMLESS = {
    "ACCELERATE_CONFIG_DS_FIELDS",
    "ACCELERATE_CPU_AFFINITY",
    "ACCELERATE_DEBUG_MODE",
    "ACCELERATE_DISABLE_RICH",
    "ACCELERATE_DYNAMO_MODE",
    "ACCELERATE_DYNAMO_USE_DYNAMIC",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    "ACCELERATE_LOG_LEVEL",
    "FSDP_MIN_NUM_PARAMS",
    "PARALLELISM_CONFIG_CP_BACKEND",
    "PARALLELISM_CONFIG_SP_BACKEND",
}


# Flags of `accelerate launch` that say where and how processes start. What the others say, the files own.
STARTING_FLAGS = {
    "config_file",
    "debug",
    "enable_cpu_affinity",
    "gpu_ids",
    "log_dir",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "max_restarts",
    "monitor_interval",
    "num_cpu_threads_per_process",
    "num_machines",
    "num_processes",
    "q",
    "quiet",
    "rdzv_backend",
    "rdzv_conf",
    "role",
    "same_network",
    "t",
    "tee",
}


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Who started this process, read from the command line of its ancestors."""

    is_accelerate: bool = False
    config_file: str | None = None
    num_processes: int | None = None
    """Of the command line; None if it does not say."""
    flags: tuple[tuple[str, str], ...] = ()
    """Others of the command line that say what is computed, with their values."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the others, from torchrun's variables."""

    rank: int
    local_rank: int
    num_processes: int
    is_launched: bool
    """False for plain `python train.py`, which is one process."""


def find_launcher() -> Launcher:
    """The `accelerate launch` among this process's ancestors, if there is one."""
    try:
        ancestors = psutil.Process().parents()[:4]
    except psutil.Error:
        return Launcher()
    for process in ancestors:
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        for i, word in enumerate(words):
            name = Path(word).name
            if (name == "accelerate" and words[i + 1 : i + 2] == ["launch"]) or name == "accelerate-launch":
                return _read_flags(words[i + 1 :])
            if Path(word).name == "accelerate_cli.py" or word == "accelerate.commands.accelerate_cli":
                return _read_flags(words[i + 1 :])
            if word == "accelerate.commands.launch" or word.endswith(
                os.path.join("accelerate", "commands", "launch.py")
            ):
                return _read_flags(words[i + 1 :])
    return Launcher()


def _read_flags(words: list[str]) -> Launcher:
    given: dict[str, str] = {}
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if word.endswith(".py") and not word.startswith("-"):
            break
        if word in ("-m", "--module"):  # the program's name and its own arguments follow
            break
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


def strategy_in_force(launcher: Launcher, world: World, recipe_strategy: str) -> tuple[Path, str | None]:
    """The strategy file of this run, and a line for the user when it is not the recipe's.

    Raises:
        RecipeError: `accelerate launch` without --config_file, which would use accelerate's own default file.
    """
    if launcher.is_accelerate:
        if launcher.config_file is None:
            raise RecipeError(
                [
                    "accelerate launch: without --config_file it takes the defaults of this user account, which no"
                    " recipe knows. Write --config_file accelerate_configs/<name>.yaml, or use make train"
                ]
            )
        path = Path(launcher.config_file)
        if path.resolve() == Path(recipe_strategy).resolve():
            return path, None
        return path, f"strategy {path} (from the command line) instead of the recipe's {recipe_strategy}"
    if world.is_launched:
        return Path(recipe_strategy), None
    single = Path("accelerate_configs/single.yaml")
    if single.resolve() == Path(recipe_strategy).resolve():
        return single, None
    return single, f"one process: no launcher started this run, so the recipe's {recipe_strategy} waits for make train"


def read_world(environment: Mapping[str, str] = os.environ) -> World:
    """The world that torchrun describes; one process without it.

    Raises:
        RecipeError: variables that no launcher would set so.
    """
    rank, local_rank, size = (
        environment.get(*pair) for pair in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
    )
    if not (rank.isdecimal() and local_rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise RecipeError(
            [
                f"environment: RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={size} do not fit together; unset them,"
                " or start with make train"
            ]
        )
    return World(
        rank=int(rank), local_rank=int(local_rank), num_processes=int(size), is_launched="WORLD_SIZE" in environment
    )


def trim_world(world: World, strategy: Strategy, launcher: Launcher, num_gpus: int) -> World:
    """The world without the processes that torchrun's `auto` started in excess on a machine without GPUs.

    `num_processes: auto` means one process per GPU; with none, torchrun starts one per core. The first CPU_PROCESSES
    stay; the others end here, successfully, before any process group exists.
    """
    counted = strategy.num_processes is not None or launcher.num_processes is not None or not launcher.is_accelerate
    if num_gpus or counted or world.num_processes <= CPU_PROCESSES:
        return world
    if world.rank >= CPU_PROCESSES:
        raise SystemExit(0)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(CPU_PROCESSES)
    return read_world()


def check_machine(strategy: Strategy, num_gpus: int, *, deterministic: bool) -> list[str]:
    """What is missing here for the run's kernels; told early, as they come after downloads and imports."""
    mistakes = []
    given = os.environ.get(CUBLAS_VARIABLE)
    if deterministic and given not in (None, *CUBLAS_DETERMINISTIC):
        allowed = " or ".join(CUBLAS_DETERMINISTIC)
        mistakes.append(f"run.deterministic and {CUBLAS_VARIABLE}={given}: cuBLAS is deterministic with {allowed}")
    if not num_gpus or "nvme" not in (strategy.offload_optimizer, strategy.offload_param):
        return mistakes
    try:
        problem = toolkit_problem(torch_cuda())
    except ImportError:
        return mistakes
    if problem:
        mistakes.append(f"{strategy.path}: offload to NVMe compiles code: {problem[0]}; {problem[1]}")
    return mistakes


def check_count(world: World, launcher: Launcher) -> list[str]:
    """A count on the command line that accelerate did not obey: with distributed_type NO it starts one process."""
    if launcher.num_processes is None or launcher.num_processes == world.num_processes:
        return []
    return [f"--num_processes {launcher.num_processes}: {world.num_processes} started; {launcher.config_file} runs one"]


def check_environment(strategy: Strategy, launcher: Launcher, mixed_precision: str) -> list[str]:
    """Variables that would change the run behind the files' back, worded as mistakes."""
    expected = _expected_variables(strategy) if launcher.is_accelerate else {}
    mistakes = []
    for name, value in sorted(os.environ.items()):
        if not name.startswith(PREFIXES) or name in HARMLESS:
            continue
        if name == "ACCELERATE_MIXED_PRECISION" and launcher.is_accelerate:
            if value not in ("no", mixed_precision):  # "no" is also what it sets where nobody wrote anything
                mistakes.append(f"--mixed_precision {value}: the recipe says {mixed_precision}; change it there")
        elif name not in expected:
            origin = "environment or a flag of accelerate launch" if launcher.is_accelerate else "environment"
            mistakes.append(f"{name}={value} ({origin}): accelerate would obey it over the files; take it out")
        elif value.lower() != expected[name].lower():
            mistakes.append(
                f"{name}={value} (environment or a flag of accelerate launch), but {strategy.path} means"
                f" {expected[name].lower()}; change the file instead"
            )
    compared = " ".join([*expected, *mistakes])
    return mistakes + _check_flags(launcher, mixed_precision, compared)


def _check_flags(launcher: Launcher, mixed_precision: str, compared: str) -> list[str]:
    """Flags that became no variable, or one that says its default: accelerate would drop them without a word.

    Args:
        compared: names of variables and flags on which there is an answer.
    """
    mistakes = []
    for flag, value in launcher.flags:
        if (
            flag.upper() in compared
            or f"--{flag} " in compared
            or (flag, value) == ("mixed_precision", mixed_precision)
        ):
            continue
        if flag == "mixed_precision":
            mistakes.append(f"--{flag} {value}: the recipe says {mixed_precision}; change it there")
        else:
            owner = OWNED_BY_THE_RECIPE.get(flag, "the strategy file owns it")
            mistakes.append(f"--{flag}{' ' * bool(value)}{value} (accelerate launch): {owner}; take the flag out")
    return mistakes


def clear_environment() -> None:
    """Takes the launcher's variables out, so that only what the engine passes has effect."""
    for name in list(os.environ):
        if name.startswith(PREFIXES) and name not in (
            "ACCELERATE_LOG_LEVEL",
            "ACCELERATE_DEBUG_MODE",
            "ACCELERATE_CPU_AFFINITY",
        ):
            del os.environ[name]


def _expected_variables(strategy: Strategy) -> dict[str, str]:
    """What `accelerate launch` 1.15 sets for this file (accelerate/utils/launch.py, prepare_multi_gpu_env)."""
    expected = {"ACCELERATE_DYNAMO_BACKEND": "no", "ACCELERATE_USE_CPU": "false"}
    if strategy.kind == "zero":
        expected |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": strategy.deepspeed_file or "",
        }
    if strategy.fsdp is not None:
        block = strategy.fsdp
        expected |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": str(block.fsdp_version),
            "FSDP_AUTO_WRAP_POLICY": block.fsdp_auto_wrap_policy,
            "FSDP_SHARDING_STRATEGY": block.fsdp_sharding_strategy or "FULL_SHARD",
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
    if strategy.written_mesh.num_processes > 1:
        expected |= {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(strategy.dp_replicate_size),
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(strategy.dp_shard_size),
            "PARALLELISM_CONFIG_TP_SIZE": str(strategy.tp_size),
            "PARALLELISM_CONFIG_CP_SIZE": "1",
            "PARALLELISM_CONFIG_SP_SIZE": "1",
        }
    return expected
