"""A live program of the race, which goes on step by step."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 900.0
"""For a step, or a start."""


class Failed(RuntimeError):
    """A program that ended before its time; the last error that it printed."""


class Runner:
    """A program of one or more processes, all of which stand at the gate whenever we have the word."""

    def __init__(
        self, shared: Path, program: str, settings: dict[str, Any], *, strategy: str, processes: int, on_cpu: bool
    ) -> None:
        """Starts it.

        Args:
            shared: the workplace, of which it gets a folder of its own: nothing is there that an earlier run tokenized.
            program: a module with a function `main`.
            settings: what the program reads, as a file.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="run-", dir=shared.parent))
        for path in shared.iterdir():
            (self.folder / path.name).symlink_to(path.resolve())
        (self.folder / "settings.yaml").write_text(json.dumps(settings, indent=1), encoding="utf-8")
        address = str(self.folder / "gate")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen()
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{strategy}.yaml"]
            command += ["--num_processes", str(processes), "--main_process_port", "0"]
        command += ["benchmarks/race/gate.py", address, program, "settings.yaml"]
        self.num_processes = processes
        with (self.folder / "log.txt").open("w") as log:
            environment = variables(self.folder, processes, on_cpu=on_cpu)
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self.lines: list[Any] = []
        self.laps: list[dict[str, float]] = []
        self.parts: dict[str, float] = {}

    def begin(self) -> None:
        """Waits for the end of its first step.

        Raises:
            Failed: as `step` and `finish`.
        """
        while len(self.lines) < self.num_processes:
            self.lines.append(self._accept())
        reports = self._wait()
        self.cpu = self.first_cpu = sum(report["cpu"] for report in reports)

    def _accept(self) -> Any:
        """The lines of one more process, when it comes to the gate."""
        self.listener.settimeout(1.0)
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(LIMIT_SECONDS)
            return connection.makefile("rw", encoding="utf-8")
        raise Failed(self._last_error())

    def _wait(self) -> list[dict[str, Any]]:
        """The reports of all processes, when the last stands at the gate."""
        reports = [lines.readline() for lines in self.lines]
        if not all(reports):
            raise Failed(self._last_error())
        return [json.loads(report) for report in reports]

    def _last_error(self) -> str:
        lines = [line for line in (self.folder / "log.txt").read_text().splitlines() if "Error" in line]
        return lines[-1].strip()[:300] if lines else f"ended with exit code {self.process.poll()}"

    def step(self) -> None:
        """Lets all processes make one step."""
        started = time.perf_counter()
        reports = self._order("go")
        clock = time.perf_counter() - started
        cpu = sum(report["cpu"] for report in reports)
        self.laps.append({"clock": clock, "cpu": cpu - self.cpu})
        self.cpu, self.memory = cpu, max(report["memory"] for report in reports)

    def profile(self, vocab_size: int) -> None:
        """Lets them make one, and reads where its time goes."""
        self.parts = self._order(f"profile {vocab_size}")[0]["parts"]

    def _order(self, order: str) -> list[dict[str, Any]]:
        self._say(order)
        return self._wait()

    def _say(self, order: str) -> None:
        for lines in self.lines:
            lines.write(order + "\n")
            lines.flush()

    def finish(self) -> None:
        """Lets it end by itself, and reads its log."""
        self._say("go")
        if self.process.wait(LIMIT_SECONDS):
            raise Failed(self._last_error())
        metrics, log = self.folder / "outputs" / "metrics.jsonl", self.folder / "log.json"
        if metrics.exists():
            self.log = [json.loads(line) for line in metrics.read_text().splitlines() if '"loss"' in line]
        else:
            self.log = json.loads(log.read_text())

    def found(self, num_warmup_steps: int) -> dict[str, Any]:
        """Clock, cpu, tokens of the measured steps; losses of all; what the start took; memory; parts of a step."""
        laps = self.laps[num_warmup_steps - 1 :]
        return {
            **{key: [round(lap[key], 4) for lap in laps] for key in ("clock", "cpu")},
            "losses": [round(line["loss"], 7) for line in self.log],
            "tokens": tokens_of(self.log)[num_warmup_steps:][: len(laps)],
            "first_cpu": round(self.first_cpu, 2),
            "memory": self.memory,
            "parts": self.parts,
        }

    def close(self) -> None:
        """Leaves nothing behind, whatever happened."""
        for lines in self.lines:
            lines.close()
        self.listener.close()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        shutil.rmtree(self.folder)


def variables(folder: Path, processes: int, *, on_cpu: bool) -> dict[str, str]:
    """Environment variables of a program."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if on_cpu:
        variables |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    elif processes == 1:  # else Trainer spreads a batch over all GPUs
        variables["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return variables


def tokens_of(log: list[dict[str, Any]]) -> list[int]:
    """Tokens of each step, where they are logged: ours logs those of the step, TRL their sum so far."""
    counts = [int(line["num_tokens"]) for line in log if "num_tokens" in line]
    if log and "step_seconds" in log[0]:
        return counts
    return [after - before for before, after in zip([0, *counts], counts, strict=False)]
