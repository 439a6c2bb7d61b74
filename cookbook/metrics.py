"""What a run writes down about itself: metrics.jsonl, run.json, recipe.yaml, and a progress bar for people."""

import contextlib
import itertools
import json
import math
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cookbook import simulated_gpus
from cookbook.costs.flops import Sizes, Step, work
from cookbook.hardware import GIB, peak_flops

SPEEDS = ("step_seconds", "tokens_per_second", "mfu")
"""What a run on simulated GPUs does not write down: it would look like a measurement."""
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "peft", "tokenizers", "numpy")


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory of this process so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB


def device_peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a known GPU."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_reserved_gib(device: torch.device) -> float:
    """Largest memory that torch has taken from the GPU so far, fragments and all; 0 where that is not known: on a CPU,
    and on simulated GPUs.
    """
    is_known = device.type == "cuda" and not simulated_gpus.is_active()
    return torch.cuda.max_memory_reserved(device) / GIB if is_known else 0.0


@dataclass(frozen=True, kw_only=True)
class FlopCounter:
    """Model FLOPs utilisation by the rules of docs/flops.md; recomputation is not counted."""

    sizes: Sizes | None
    """None: not known, and nothing is logged."""
    peak: float | None
    """FLOP/s of a GPU; None as above."""

    def mfu(self, batch: Any, seconds: float, num_processes: int) -> dict[str, float]:
        """`{"mfu": fraction of the peak}`, or nothing.

        Args:
            batch: a `cookbook.data.batches.StepBatch`.
        """
        if self.sizes is None or self.peak is None:
            return {}
        length = batch.num_tokens / batch.num_sequences
        step = Step(num_tokens=batch.num_tokens, num_labelled=batch.num_targets, length=length)
        return {"mfu": work(self.sizes, step).total / seconds / (self.peak * num_processes)}


def set_aside(folder: Path) -> Path | None:
    """Renames a folder that holds an earlier run to the first free `folder.N`, and returns its new path."""
    if not (folder / "run.json").is_file():
        return None
    number = next(n for n in itertools.count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
    return folder.rename(folder.with_name(f"{folder.name}.{number}"))


def _cut_lines(path: Path, last_step: int) -> str | None:
    """Takes out the lines of steps after `last_step`, and what cannot be read. Returns a word on what a person should
    know: a line that a crash cut short is none, but others are kept beside it.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    steps = [_step_of(line) for line in lines]
    kept = b"".join(line for line, step in zip(lines, steps, strict=True) if step is not None and step <= last_step)
    num_damaged = sum(step is None and line.endswith(b"\n") for line, step in zip(lines, steps, strict=True))
    if not num_damaged and b"".join(lines).startswith(kept):
        if lines:
            os.truncate(path, len(kept))  # which a full disk allows
        return None
    build, damaged = path.with_suffix(".tmp"), path.with_name("metrics.damaged.jsonl")
    build.write_bytes(kept)
    path.replace(damaged)
    build.replace(path)
    return f"{path}: {num_damaged} lines cannot be read, and were taken out; as it was it lies in {damaged}"


def _step_of(line: bytes) -> float | None:
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int | float) else None


class _Lines:
    """Appends to a file, and keeps what a full disk refuses until it takes it."""

    def __init__(self, path: Path, mode: str, say: Callable[[str], None]) -> None:
        """Args: `mode` of `open`, w or a; `say` tells a person what is not written, once, and when it is."""
        self.path, self.say = path, say
        self._waiting, self._is_stuck = b"", False
        self._file = path.open(f"{mode}b", buffering=0)

    def append(self, text: str) -> None:
        self._waiting += text.encode()
        self.flush()

    def flush(self) -> None:
        """Tries to write what waits."""
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._open_again()
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not self._is_stuck:
                self.say(f"{self.path} could not be written: {error}; the run goes on, and tries again with each line")
            self._is_stuck = True
        else:
            if self._is_stuck:
                self.say(f"{self.path} is written again, with all that waited")
            self._is_stuck = False

    def _open_again(self) -> None:
        self._file.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)
        self.say(f"{self.path} was removed under the run; it goes on in a new one")

    def close(self) -> None:
        self.flush()
        if self._waiting:
            self.say(f"{self.path}: the last {self._waiting.count(bytes([10]))} lines are lost")
        self._file.close()


class RunLog:
    """Writes under the output folder from the main process; silent on the others."""

    def __init__(self, folder: Path, *, is_main: bool, max_steps: int, resumed_step: int | None = None) -> None:
        """Sets an earlier run aside, or goes on with it.

        Args:
            resumed_step: of the checkpoint in `folder` that this run goes on from; later lines are taken out.
        """
        self.folder, self.is_main = folder, is_main
        if not is_main:
            return
        earlier = set_aside(folder) if resumed_step is None else None
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        damage = _cut_lines(path, resumed_step) if resumed_step is not None else None
        self._texts: dict[str, str] = {}
        self._bar = tqdm(
            total=max_steps,
            initial=resumed_step or 0,
            unit="step",
            dynamic_ncols=True,
            mininterval=1.0,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}" if simulated_gpus.is_active() else None,
            file=sys.stderr,
        )
        self._lines = _Lines(path, "w" if resumed_step is None else "a", self.say)
        if damage is not None:
            self.say(damage)
        if earlier is not None:
            self.say(f"{folder} held an earlier run, which now lies in {earlier}")

    def write(self, line: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl, at full precision, and moves the bar on for a training line."""
        if not self.is_main:
            return
        if simulated_gpus.is_active():
            line = {key: value for key, value in line.items() if key not in SPEEDS}
        # JSON knows no nan.
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}
        self._lines.append(json.dumps(finite) + "\n")
        self._write_texts()
        if "loss" in line:
            speed = f", {line['tokens_per_second']:.0f} tokens/s" if "tokens_per_second" in line else ", simulated GPUs"
            self._bar.set_postfix_str(f"loss {line['loss']:.3f}{speed}", refresh=False)
            self._bar.update()
        else:
            name = f"{line['eval_set']}: " if "eval_set" in line else ""
            text = f"held-out loss {line['eval_loss']:.4f} ({line['eval_num_tokens']} tokens)"
            self.say(f"step {line['step']}: {name}{text}")

    def say(self, text: str) -> None:
        """A line for people, above the bar."""
        if self.is_main:
            tqdm.write(text, file=sys.stderr)

    def write_text(self, name: str, text: str) -> None:
        """A text file in the output folder, there whole or not at all; now, or when the disk has room."""
        if self.is_main:
            self._texts[name] = text
            self._write_texts(aloud=True)

    def _write_texts(self, *, aloud: bool = False) -> None:
        for name, text in list(self._texts.items()):
            build = self.folder / f".{name}.tmp"
            try:
                build.write_text(text, encoding="utf-8")
                build.replace(self.folder / name)
                del self._texts[name]
            except OSError as error:
                with contextlib.suppress(OSError):
                    build.unlink(missing_ok=True)
                if aloud:
                    self.say(f"{self.folder / name} could not be written: {error}; the run goes on, and tries again")

    def write_record(self, name: str, record: dict[str, Any]) -> None:
        """A JSON file in the output folder."""
        self.write_text(name, json.dumps(record, indent=2) + "\n")

    def close(self) -> None:
        """Ends the bar and the file."""
        if self.is_main:
            self._lines.close()
            self._write_texts(aloud=True)
            self._bar.close()


def record_nonfinite(
    folder: Path,
    step: int,
    rank: int,
    batch: Any,
    bad: list[int],
    decode: Callable[[list[int]], str],
    *,
    what: str,
) -> None:
    """Names the samples of this process's micro-batches whose loss was not finite, for people and in a file; or of all,
    where every loss was and the gradient of their sum was not.

    Args:
        batch: a `cookbook.data.batches.StepBatch`.
        bad: numbers of those micro-batches.
        decode: from token ids to text.
        what: loss or gradient.
    """
    for i in bad:
        text = decode(batch.micro_batches[i]["input_ids"].flatten().tolist())
        record = {"step": step, "process": rank, "not_finite": what, "samples": batch.sample_numbers[i], "text": text}
        path = folder / f"nonfinite-step-{step}-process-{rank}-{i}.json"
        told = f"step {step}: the {what} of samples {batch.sample_numbers[i]} is not finite"
        try:
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            print(f"{told}; see {path}", file=sys.stderr)
        except OSError as error:
            print(f"{told}; {path} could not be written: {error}", file=sys.stderr)


def environment_record(device: torch.device) -> dict[str, Any]:
    """Command, versions, commit and hardware of this run."""
    hardware = {"machine": platform.machine(), "cores": os.cpu_count(), "device": device.type}
    if device.type == "cuda":
        name, count = torch.cuda.get_device_name(device), torch.cuda.device_count()
        hardware |= {"gpu": name, "gpus": count, "cuda": torch.version.cuda, "simulated": simulated_gpus.is_active()}
    versions = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    return {"command": sys.argv, "versions": versions, "commit": _commit(), "hardware": hardware}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None
