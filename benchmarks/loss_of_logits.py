"""Cost of the loss beside plain torch's: CPU seconds and peak bytes of a forward and a backward of a head.

    python benchmarks/loss_of_logits.py

Each loss has the same head, hidden states and targets, in float32 and in bf16; plain is `cross_entropy` of the whole
logits in float32. The best of some rounds: seconds of CPU time on all threads, and how far the process grew. --quick
takes a small vocabulary once.
"""

import argparse
import copy
import os
import re
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from cookbook.config.objectives import Objective
from cookbook.training.models.loss import LossHead

TOP_K = 64
"""Tokens of a teacher."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    vocab, rounds = (2_000, 1) if args.quick else (args.vocab, args.rounds)
    print(f"{args.targets} targets, {vocab:,} tokens, hidden size {args.hidden}; torch {version('torch')}")
    print(f"{torch.get_num_threads()} threads on {os.cpu_count()} cores\n")
    print("| dtype | loss | CPU seconds | peak, MiB |\n|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for name, step in steps(dtype, args.targets, vocab, args.hidden).items():
            seconds, peak = measure(step, rounds)
            print(f"| {str(dtype).removeprefix('torch.')} | {name} | {seconds:.2f} | {peak / 2**20:,.0f} |", flush=True)


def steps(dtype: torch.dtype, count: int, vocab: int, width: int) -> dict[str, Callable[[], Any]]:
    """A forward and a backward of each loss."""
    torch.manual_seed(0)
    head = torch.nn.Linear(width, vocab, bias=False, dtype=dtype)
    own = torch.nn.Linear(width, vocab, bias=False, dtype=dtype)
    own.weight = head.weight
    own.__class__ = LossHead
    frozen = copy.deepcopy(own).requires_grad_(False)
    hidden = torch.randn(count, width).to(dtype).requires_grad_()
    batch = {
        "targets": torch.randint(vocab, (count,)),
        "teacher_tokens": torch.rand(count, vocab).topk(TOP_K, 1).indices.int(),
        "teacher_logps": torch.randn(count, 1 + TOP_K).log_softmax(1),
    }

    def whole() -> torch.Tensor:
        return F.cross_entropy(head(hidden).float(), batch["targets"], reduction="sum")

    def by_function(**keys: Any) -> Callable[[], torch.Tensor]:
        objective = Objective.of(**keys)
        return lambda: own(hidden, batch["targets"], function=objective.function(batch))[0].sum()

    losses = {
        "plain": whole,
        "sft": lambda: own(hidden, batch["targets"]).sum(),
        "sft, frozen head": lambda: frozen(hidden, batch["targets"]).sum(),
        "sft, smoothed": by_function(name="sft", label_smoothing=0.1),
        "distill": by_function(name="distill", teacher="teacher", loss_top_k=TOP_K, temperature=2.0),
    }

    def step(loss: Callable[[], torch.Tensor]) -> None:
        hidden.grad = head.weight.grad = None
        loss().backward()
        hidden.grad = head.weight.grad = None

    return {name: partial(step, loss) for name, loss in losses.items()}


def measure(step: Callable[[], Any], rounds: int) -> tuple[float, int]:
    """CPU seconds and bytes of the fastest and of the smallest round, after one that is not measured."""
    step()
    seconds, peaks = [], []
    for _ in range(rounds):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # sets VmHWM back
        before, began = memory("VmRSS"), time.process_time()
        step()
        seconds.append(time.process_time() - began)
        peaks.append(max(0, memory("VmHWM") - before))  # the kernel counts in steps, of which a small one may see none
    return min(seconds), min(peaks)


def memory(key: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    (kibibytes,) = re.findall(rf"(?m)^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(kibibytes) * 1024


if __name__ == "__main__":
    main()
