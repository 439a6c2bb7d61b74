"""A run's records: metrics.jsonl, run.json, recipe.yaml, and lines for users."""

import contextlib
import itertools
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

import simulated_gpus
from cookbook.system.console import say
from cookbook.system.files import RecipeError
from cookbook.system.hardware import GIB
from cookbook.system.machine import allocator_settings
from cookbook.system.masking import masked_values
from cookbook.system.monitor import Monitor
from cookbook.system.record_files import EVENTS, METRICS, ROUNDS, RUN, SAMPLES, replace_file
from cookbook.system.screen import Screen
from cookbook.system.shipped import IS_INSTALLED
from cookbook.system.tensor_files import why_no_file

SPEEDS = ("step_seconds", "tokens_per_second", "mfu", "data_seconds", "eval_seconds", "save_seconds")
"""Not logged on simulated GPUs, where they would look like measurements."""
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "peft", "tokenizers", "numpy")

SHOWN = 60
"""Characters of a prompt's end and of its continuation that the screen shows."""


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def peak_reserved_gib(device: torch.device) -> float:
    """Peak memory that torch has reserved on the GPU, with fragments; 0 if unknown: on CPU and on simulated GPUs."""
    is_known = device.type == "cuda" and not simulated_gpus.is_active()
    return torch.cuda.max_memory_reserved(device) / GIB if is_known else 0.0


def set_aside(folder: Path) -> Path | None:
    """Rename a folder with an earlier run to the first free `folder.N`; returns the new path."""
    if not (folder / RUN).is_file() and not (folder / ROUNDS).is_file():
        return None
    number = next(n for n in itertools.count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
    # Kept: the second command that somebody tries must not destroy the result of the first.
    return folder.rename(folder.with_name(f"{folder.name}.{number}"))


def _truncate_lines(path: Path, last: tuple[int, bool]) -> str | None:
    """Remove the lines after `last`, and unreadable ones. Returns a warning about the latter, of which a copy is kept,
    or None; a last line that a crash cut off needs no warning.

    Args:
        last: as `_place_of`.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    places = [_place_of(line) for line in lines]
    kept = b"".join(line for line, place in zip(lines, places, strict=True) if place is not None and place <= last)
    num_damaged = sum(place is None and line.endswith(b"\n") for line, place in zip(lines, places, strict=True))
    if not num_damaged and b"".join(lines).startswith(kept):
        if lines:
            os.truncate(path, len(kept))  # works on a full disk too
        return None
    build, damaged = path.with_suffix(".tmp"), path.with_name(f"{path.stem}.damaged.jsonl")
    build.write_bytes(kept)
    path.replace(damaged)
    build.replace(path)
    return f"{path}: {num_damaged} lines cannot be read and were removed; the original is {damaged}"


def _place_of(line: bytes) -> tuple[float, bool] | None:
    """A line's step, and whether it is of the evaluation after that step."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else {}
        step = record["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (step, "eval_loss" in record) if isinstance(step, int | float) else None


class _Lines:
    """Appends to a file; what a full disk refuses is kept and written later."""

    def __init__(self, path: Path, mode: str, say: Callable[[str], None]) -> None:
        """
        Args:
            mode: of `open`, w or a.
            say: logs when writing fails, once, and when it works again.
        """
        self.path, self.say = path, say
        self._waiting, self._is_stuck = b"", False
        if path.exists() and (why := why_no_file(path)) is not None:  # to open a pipe waits without end
            raise RecipeError(f"{path} {why}; remove it")
        self._file = path.open(f"{mode}b", buffering=0)

    def append(self, text: str) -> None:
        self._waiting += text.encode()
        self.flush()

    def flush(self) -> None:
        """Try to write what is pending."""
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._file.close()
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)
                self.say(f"{self.path} was removed during the run; a new one is started")
            while self._waiting:
                # Kept in memory while a full disk refuses them: a run that ended for a line of its log would lose days.
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not self._is_stuck:
                self.say(f"{self.path} could not be written: {error}; the run continues, and retries with each line")
            self._is_stuck = True
        else:
            if self._is_stuck:
                self.say(f"{self.path} is written again, with all pending lines")
            self._is_stuck = False

    def close(self) -> None:
        self.flush()
        if self._waiting:
            self.say(f"{self.path}: the last {self._waiting.count(bytes([10]))} lines are lost")
        self._file.close()


def _in_one_line(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Follower(Protocol):
    """Gets the lines of metrics.jsonl and events.jsonl; no call may raise but what is to end the run."""

    def log(self, line: dict[str, Any]) -> None: ...

    def event(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Writes into the output folder from rank 0; does nothing on the others."""

    def __init__(
        self,
        folder: Path,
        *,
        is_main: bool,
        max_steps: int,
        resumed_step: int | None = None,
        is_evaluated: bool = True,
        is_sampled: bool = True,
        log_every_steps: int = 1,
        counted: str = "tokens",
    ) -> None:
        """Set an earlier run aside, or continue its log.

        Args:
            resumed_step: step of the checkpoint in `folder` that this run resumes from; later lines are removed.
            is_evaluated: False if the evaluation after that step runs again, so that its lines are removed too.
            is_sampled: likewise of the continuations.
            log_every_steps: see `RunSection`.
            counted: what `num_tokens` counts, in words.
        """
        self.folder, self.is_main, self.counted = folder, is_main, counted
        self.followers: list[Follower] = []
        self.monitor: Monitor | None = None
        if not is_main:
            return
        earlier = set_aside(folder) if resumed_step is None else None
        folder.mkdir(parents=True, exist_ok=True)
        path, samples = folder / METRICS, folder / SAMPLES
        damages: list[str | None] = []
        if resumed_step is not None:
            damages.append(_truncate_lines(path, (resumed_step, is_evaluated)))
            damages.append(_truncate_lines(samples, (resumed_step if is_sampled else resumed_step - 1, True)))
        self._texts: dict[str, str] = {}
        self.screen = Screen(max_steps=max_steps, first_step=resumed_step or 0, every=log_every_steps)
        self._lines = _Lines(path, "w" if resumed_step is None else "a", self.say)
        self._samples: _Lines | None = None
        for damage in filter(None, damages):
            self.say(damage)
        if earlier is not None:
            self.say(f"{folder} held an earlier run, which was moved to {earlier}")

    def write(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl at full precision, and show it."""
        if not self.is_main:
            return
        if simulated_gpus.is_active():
            line = {key: value for key, value in line.items() if key not in SPEEDS}
        # JSON has no nan.
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}
        self._lines.append(json.dumps(finite) + "\n")
        self._write_texts()
        for follower in self.followers:
            follower.log(finite)
        if "loss" in line:
            self.screen.step(finite, hardware=self.monitor.words if self.monitor else str)
        else:
            name = f"{line['eval_set']}: " if "eval_set" in line else ""
            accuracy = line.get("eval_reward_accuracy", line.get("eval_accuracy"))
            shown = "" if accuracy is None else f", accuracy {accuracy:.2f}"
            text = f"held-out loss {line['eval_loss']:.4f}{shown} ({line['eval_num_tokens']} {self.counted})"
            self.say(f"step {line['step']}: {name}{text}", "bold green")

    def samples(self, lines: list[dict[str, Any]]) -> None:
        """Append continuations to samples.jsonl, and show them."""
        if not self.is_main:
            return
        self._samples = self._samples or _Lines(self.folder / SAMPLES, "a", self.say)
        self._samples.append("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        for line in lines:
            shown = (_in_one_line(line["prompt"][-SHOWN:]), _in_one_line(line["completion"][:SHOWN]))
            self.say(f"step {line['step']}: sample {line['sample']}: ...{shown[0]} -> {shown[1]}")

    def event(self, what: str, step: int, **details: Any) -> None:
        """Append to events.jsonl, which keeps the events of all starts; from any thread. A full disk loses one."""
        if self.is_main:
            line = {"event": what, "step": step, "time": time.time(), **masked_values(details)}
            with contextlib.suppress(OSError), (self.folder / EVENTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            for follower in self.followers:
                follower.event(line)

    def say(self, text: str, style: str = "") -> None:
        """Print a line for users; see `Screen.say`."""
        if self.is_main:
            self.screen.say(text, style)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file in the output folder atomically, now or when the disk has room."""
        if self.is_main:
            self._texts[name] = text
            self._write_texts(is_new=True)

    def _write_texts(self, *, is_new: bool = False) -> None:
        for name, text in list(self._texts.items()):
            try:
                replace_file(self.folder / name, text)
                del self._texts[name]
            except OSError as error:
                if is_new:
                    self.say(f"{self.folder / name} could not be written: {error}; the run continues, and retries")

    def write_record(self, name: str, record: dict[str, Any]) -> None:
        """Write a JSON file in the output folder."""
        self.write_text(name, json.dumps(masked_values(record), indent=2) + "\n")

    def end_monitor(self) -> None:
        """Measure the hardware no longer."""
        if self.monitor is not None:
            self.monitor.close()

    def close(self) -> None:
        self.end_monitor()
        if self.is_main:
            self._lines.close()
            if self._samples is not None:
                self._samples.close()
            self._write_texts(is_new=True)
            for follower in self.followers:
                follower.close()
            self.screen.close()


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
    """Print and write to a file the samples of this rank's micro-batches that are not finite.

    Args:
        batch: a `cookbook.training.data.batches.StepBatch`.
        bad: indices of the micro-batches.
        decode: from token ids to text.
        what: what is not finite: "loss", or "gradient" if every loss is finite.
    """
    for i in bad:
        text = decode(batch.micro_batches[i]["input_ids"].flatten().tolist())
        record = {"step": step, "process": rank, "not_finite": what, "samples": batch.sample_numbers[i], "text": text}
        path = folder / f"nonfinite-step-{step}-process-{rank}-{i}.json"
        try:
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            where = f"see {path}"
        except OSError as error:
            where = f"{path} could not be written: {error}"
        samples = batch.sample_numbers[i]
        say(f"step {step}: the {what} of samples {samples} is not finite; {where}", file=sys.stderr)


def environment_record(device: torch.device) -> dict[str, Any]:
    """Command, versions, commit and hardware of this run."""
    hardware = {"machine": platform.machine(), "cores": os.cpu_count(), "device": device.type}
    if device.type == "cuda":
        name, count = torch.cuda.get_device_name(device), torch.cuda.device_count()
        hardware |= {"gpu": name, "gpus": count, "cuda": torch.version.cuda, "simulated": simulated_gpus.is_active()}
        hardware["allocator"] = allocator_settings()
    versions: dict[str, str | None] = {"python": platform.python_version()} | dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    versions["torch"] = torch.__version__  # with its build, as in 2.13.0+cu130, which PyPI's metadata lack
    return {"command": sys.argv, "versions": versions, "commit": _commit(), "hardware": hardware}


def _commit() -> str | None:
    if IS_INSTALLED:  # whatever repository holds the virtual environment, it is not this project's
        return None
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None
