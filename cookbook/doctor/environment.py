"""Variables that people set for another program and forget: what they do to a run, before it does."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from cookbook.doctor.finding import Finding, failure, ok, warning
from cookbook.launch import Launcher, check_environment
from cookbook.strategy import Strategy

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "NCCL_P2P_DISABLE": "GPUs talk through host memory",
    "NCCL_SHM_DISABLE": "GPUs that are not peers talk through the network",
    "NCCL_IB_DISABLE": "machines talk through sockets, not InfiniBand",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is allocated by the driver",
}
"""What "1" does."""


def check_variables(strategy: Strategy | None, mixed_precision: str) -> Iterator[Finding]:
    """What would change the run behind the files' back, or slow it down."""
    found = [*_overriding(strategy, mixed_precision), *_of_a_launcher(), *_slowing(), *_interfaces(), *_cuda_home()]
    yield from found or [ok("environment", "no variable overrides the files or slows a run down")]


def _overriding(strategy: Strategy | None, mixed_precision: str) -> Iterator[Finding]:
    plain = strategy or Strategy(path="", kind="single", num_processes=1)
    for mistake in check_environment(plain, Launcher(), mixed_precision):
        yield failure("environment", mistake.split("; ")[0], f"unset {mistake.split('=')[0]}")


def _of_a_launcher() -> Iterator[Finding]:
    names = [name for name in TORCHRUN if name in os.environ]
    if {"RANK", "WORLD_SIZE"} & set(names):
        says = f"{', '.join(names)} set: `python train.py` would take itself for one process of a launcher's"
        yield failure("environment", says, f"unset {' '.join(names)}")


def _slowing() -> Iterator[Finding]:
    for name, what in SLOWING.items():
        if os.environ.get(name, "0") not in ("", "0"):
            yield warning("environment", f"{name}={os.environ[name]}: {what}", f"unset {name}")
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "DETAIL":
        says = "TORCH_DISTRIBUTED_DEBUG=DETAIL: every collective is checked by a second one"
        yield warning("environment", says, "unset TORCH_DISTRIBUTED_DEBUG")


def _interfaces() -> Iterator[Finding]:
    """Names of network interfaces that are not here: processes then fail to connect, or wait."""
    here = {name for _, name in socket.if_nameindex()}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        if not value or value.startswith("^"):  # ^ names those to leave out
            continue
        exact = variable.startswith("GLOO") or value.startswith("=")
        wanted = [name for name in value.lstrip("=").split(",") if name]
        if not any(name == one if exact else one.startswith(name) for name in wanted for one in here):
            says = f"{variable}={value}: no such network interface; here are {', '.join(sorted(here))}"
            yield failure("environment", says, f"unset {variable}, or name one of those")


def _cuda_home() -> Iterator[Finding]:
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
        says = f"CUDA_VISIBLE_DEVICES={visible} names {len(names)} GPUs, and CUDA sees {num_left} of {num_gpus}"
        why = "a name that is not there hides itself and all after it, one that comes twice hides all"
        yield failure("environment", f"{says}: {why}", "unset CUDA_VISIBLE_DEVICES")
    elif num_left < num_gpus:
        says = f"CUDA_VISIBLE_DEVICES={visible!r} leaves {num_left} of {num_gpus} GPUs"
        yield warning("environment", says, "unset CUDA_VISIBLE_DEVICES, if that is not meant")
