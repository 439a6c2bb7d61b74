"""Environment variables, often left over from another program, that would change a run or slow it down."""

import os
from collections.abc import Iterator
from pathlib import Path

from cookbook.commands.doctor.finding import Finding, failure, ok, warning
from cookbook.config.strategy import Strategy
from cookbook.start import hosts
from cookbook.start.launchers import Launcher, check_environment

SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "NCCL_P2P_DISABLE": "GPUs talk through host memory",
    "NCCL_SHM_DISABLE": "GPUs that are not peers talk through the network",
    "NCCL_IB_DISABLE": "machines talk through sockets, not InfiniBand",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is allocated by the driver",
}
"""Variables with the effect of "1"."""


def check_variables(strategy: Strategy | None, mixed_precision: str) -> Iterator[Finding]:
    """Variables that override the recipe's and strategy's files, or slow a run down."""
    findings = list(_variables(strategy or Strategy(path="", kind="single", num_processes=1), mixed_precision))
    yield from findings or [ok("environment", "no variable overrides the files or slows a run down")]


def _variables(strategy: Strategy, mixed_precision: str) -> Iterator[Finding]:
    for mistake in check_environment(strategy, Launcher(), mixed_precision):
        yield failure("environment", mistake.split("; ")[0], f"unset {mistake.split('=')[0]}")
    names = [name for name in hosts.TORCHRUN if name in os.environ]
    if {"RANK", "WORLD_SIZE"} & set(names):
        text = f"{', '.join(names)} set: `python train.py` would act as one process of a launch"
        yield failure("environment", text, f"unset {' '.join(names)}")
    for name, what in SLOWING.items():
        if os.environ.get(name, "0") not in ("", "0"):
            yield warning("environment", f"{name}={os.environ[name]}: {what}", f"unset {name}")
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "DETAIL":
        text = "TORCH_DISTRIBUTED_DEBUG=DETAIL: every collective is checked by a second one"
        yield warning("environment", text, "unset TORCH_DISTRIBUTED_DEBUG")
    for variable in hosts.INTERFACES:
        if problem := hosts.interface_problem(variable):
            yield failure("environment", problem, f"unset {variable}, or name one of those")
    home = os.environ.get("CUDA_HOME")
    if home and not Path(home).is_dir():
        yield warning(
            "environment", f"CUDA_HOME={home}: no such folder; extensions would not compile", "unset CUDA_HOME"
        )


def hidden_gpus(visible: str | None, num_left: int, num_gpus: int) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES, and how many of this machine's GPUs it leaves."""
    if visible is None:
        return
    names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    if num_left < len(names):
        text = f"CUDA_VISIBLE_DEVICES={visible} names {len(names)} GPUs, and CUDA sees {num_left} of {num_gpus}"
        why = "a name that is not there hides itself and all after it, one that comes twice hides all"
        yield failure("environment", f"{text}: {why}", "unset CUDA_VISIBLE_DEVICES")
    elif num_left < num_gpus:
        text = f"CUDA_VISIBLE_DEVICES={visible!r} leaves {num_left} of {num_gpus} GPUs"
        yield warning("environment", text, "unset CUDA_VISIBLE_DEVICES, if that is not meant")
