"""Runs a training program, unchanged, and holds each of its steps until the race lets it go on.

    [accelerate launch ...] benchmarks/race/gate.py SOCKET MODULE [ARGUMENTS ...]

A step ends with the optimizer's update: there this process sends the other side of the socket its CPU time and memory,
and waits for an order. So everything that a program does between two updates counts, whatever its loop is.
benchmarks/vs_peers.py gives the orders.
"""

import importlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

PARTS = ("head", "matrices", "attention", "optimizer", "rest")
"""Parts of a step. `head`: logits and loss, with their gradients, and the embedding, which shares its weight.
`matrices`: of the layers. `attention`: its kernel."""


class Gate:
    """One process's end of the socket."""

    def __init__(self, address: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        self.lines = connection.makefile("rw", encoding="utf-8")
        self.profiler: torch.profiler.profile | None = None
        self.vocab_size = 0

    def stop(self, *_: Any) -> None:
        """Reports the end of a step, and waits for an order: "go", or "profile" and the vocabulary's size."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        report: dict[str, Any] = {"cpu": time.process_time(), "memory": peak_memory()}
        if self.profiler is not None:
            self.profiler.stop()
            report["parts"] = parts(self.profiler, self.vocab_size)
            self.profiler = None
        self.lines.write(json.dumps(report) + "\n")
        self.lines.flush()
        order, *arguments = self.lines.readline().split() or ["go"]
        if order == "profile":
            self.vocab_size = int(arguments[0])
            self.profiler = torch.profiler.profile(record_shapes=True)
            self.profiler.start()


def peak_memory() -> int:
    """Bytes: of the GPU what was allocated at most, without one the most that was resident since the program started.
    `ru_maxrss` would be that of the parent before it, if larger.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def parts(profiler: torch.profiler.profile, vocab_size: int) -> dict[str, float]:
    """Seconds of the operations, by part of the model; the head is what has a dimension of the vocabulary."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for event in profiler.key_averages(group_by_input_shape=True):
        name = event.key.lower()
        if "adam" in name:
            part = "optimizer"
        elif "attention" in name:
            part = "attention"
        elif any(vocab_size in shape for shape in event.input_shapes if isinstance(shape, list)):
            part = "head"
        else:
            part = "matrices" if name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear") else "rest"
        seconds[part] += (event.self_device_time_total or event.self_cpu_time_total) / 1e6
    return {part: round(value, 4) for part, value in seconds.items()}


def stop_after_updates(gate: Gate) -> None:
    """At the end of torch's `Optimizer.step`; under DeepSpeed, which calls that several times, of its engine's."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        register_optimizer_step_post_hook(gate.stop)
        return
    from deepspeed.runtime.engine import DeepSpeedEngine

    step = DeepSpeedEngine.step

    def step_and_stop(*arguments: Any, **options: Any) -> Any:
        result = step(*arguments, **options)
        gate.stop()
        return result

    DeepSpeedEngine.step = step_and_stop


def lend_to_cpus() -> None:
    """Add what accelerate and DeepSpeed leave out without a GPU, and this project's engines add: gloo, also in place of
    a collective in shared memory that takes 80 s to compile, and FSDP (accelerate/state.py:974, 1010).
    """
    is_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    is_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if not is_deepspeed and not is_fsdp:
        return
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    if is_deepspeed:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        PartialState(backend="gloo")
    else:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def main() -> None:
    _, address, module, *arguments = sys.argv
    stop_after_updates(Gate(address))
    if not torch.cuda.is_available() and module != "train":
        lend_to_cpus()
    del sys.path[0]  # this folder
    sys.argv = [module, *arguments]
    sys.exit(importlib.import_module(module).main())


if __name__ == "__main__":
    main()
