"""Runs train.py as users do, and measures how far two learning curves lie apart. Shared by the equivalence tests."""

import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from filelock import FileLock
from safetensors.numpy import load_file

from cookbook.system import signals
from tests.needs import need_builds_of
from tests.warm_parent import WarmParent

ROOT = Path(__file__).parent.parent
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "engineers", "count", "every", "token"]

# Small enough for seconds a run; 101 samples leave a last window of 5 in each epoch of global batches of 16.
RECIPE = """\
strategy: accelerate_configs/single.yaml
mixed_precision: 'no'
seed: 7
model:
  from_scratch: {vocab_size: 512, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2,
                 num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: true}
data:
  train: DATA
  eval: {path: DATA, max_rows: 21}
  max_length: 96
  packing: false
batch: {global_batch_size: 16, micro_batch_size: 4}
optim: {name: sgd, learning_rate: 0.1, weight_decay: 0.01, max_grad_norm: 1.0}
schedule: {name: cosine, warmup_steps: 4}
run: {max_steps: 20, output_dir: OUTPUT, check_export: false, monitor: false}
"""

SGD: dict[str, str] = {}
ADAMW = {
    "optim.name": "adamw",
    "optim.learning_rate": "3e-3",
    "optim.max_grad_norm": "0",
    "model.from_scratch.tie_word_embeddings": "false",
    "batch.micro_batch_size": "8",
}


def run_to_end(command: list[str], *, timeout: float, **extra: str) -> subprocess.CompletedProcess:
    """A launch with its output, of which nothing is left when it takes too long: workers outlive their launcher, and
    hold its output open.
    """
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, err = running.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        output = next((word for word in command if word.startswith("run.output_dir=")), None)
        for process in psutil.process_iter():  # its workers may have lost their launcher
            with contextlib.suppress(psutil.Error):
                if process.pid == running.pid or (output and output in process.cmdline()):
                    process.kill()
        out, err = running.communicate(timeout=60)
        pytest.fail(f"not within {timeout:.0f} s:\n{out[-3000:]}\n{err[-3000:]}")
    return subprocess.CompletedProcess(command, running.returncode, out, err)


def processes_of(strategy: str) -> int:
    """How many processes a test runs: those of the strategy's mesh, or two."""
    if strategy == "single":
        return 1
    if machines_of(strategy) > 1:
        return 2 * machines_of(strategy)
    return max(2, math.prod(sizes_of(strategy).values()))


def sizes_of(strategy: str) -> dict[str, int]:
    """How many processes a test has in each dimension of a strategy's mesh."""
    path = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    mesh = yaml.safe_load(path.read_text()).get("parallelism_config", {}) if path.exists() else {}
    return {name: 2 if size == "auto" else size for name, size in mesh.items()}


def machines_of(strategy: str) -> int:
    """Over how many machines the processes of a test believe to be spread."""
    return 2 if "hpz" in strategy else 1


@dataclass(frozen=True)
class Curve:
    """One finished run."""

    folder: Path

    @property
    def lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def events(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]

    @property
    def steps(self) -> list[dict]:
        return [line for line in self.lines if "loss" in line]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.steps]

    @property
    def evaluations(self) -> list[tuple[int, float, int]]:
        return [
            (line["step"], line["eval_loss"], line["eval_num_tokens"]) for line in self.lines if "eval_loss" in line
        ]

    @property
    def record(self) -> dict:
        return json.loads((self.folder / "run.json").read_text())

    @property
    def weights(self) -> dict[str, np.ndarray]:
        (path,) = (self.folder / "export").glob("*.safetensors")
        return load_file(path)


@dataclass(frozen=True)
class Distance:
    """The largest differences between two curves."""

    loss: float
    """Absolute, over all steps and evaluations."""
    norm: float
    """Relative, of the gradient norm."""
    weight: float
    """Absolute, of any final weight."""


def distance(curve: Curve, reference: Curve) -> Distance:
    """How far `curve` lies from `reference`; what must be equal exactly is asserted."""
    ours, theirs = curve.steps, reference.steps
    assert len(ours) == len(theirs) >= 10, "a curve is missing steps"
    for key in ("step", "epoch", "learning_rate", "num_tokens"):
        assert [line[key] for line in ours] == [line[key] for line in theirs], f"{key} differs"
    losses = [abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True)]
    for a, b in zip(curve.evaluations, reference.evaluations, strict=True):
        assert (a[0], a[2]) == (b[0], b[2]), "evaluations count other tokens"
        losses.append(abs(a[1] - b[1]))
    norms = [abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in zip(ours, theirs, strict=True)]
    weights, expected = curve.weights, reference.weights
    assert weights.keys() == expected.keys(), "other weights were saved"
    return Distance(
        loss=max(losses), norm=max(norms), weight=max(float(np.abs(weights[k] - expected[k]).max()) for k in weights)
    )


def write_chats(path: Path, num_rows: int = 101) -> None:
    """Chats of ragged lengths, so that processes train on unequal numbers of tokens."""
    chance = random.Random(0)

    def words(low: int, high: int) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(chance.randint(low, high)))

    with path.open("w") as file:
        for _ in range(num_rows):
            messages = []
            for _ in range(chance.randint(1, 3)):
                messages.append({"role": "user", "content": words(1, 12)})
                messages.append({"role": "assistant", "content": words(1, 40)})
            file.write(json.dumps({"messages": messages}) + "\n")


def environment(**extra: str) -> dict[str, str]:
    """With the compilers' ninja on PATH."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **extra}


ENDED = (signals.EXIT_CODE, -signal.SIGTERM, -signal.SIGKILL)
"""Exit codes of the processes that are ended because another failed."""


def done_of(job: dict[str, Any], answer: dict[str, Any]) -> subprocess.CompletedProcess:
    """A run of a warm parent: the exit code with which it failed, and what its processes printed, one after another."""
    printed = [path.read_text(errors="replace") for path in sorted(Path(job["folder"]).glob("log_*"))]
    codes = [code for code in answer["codes"] if code]
    code = next((code for code in codes if code not in ENDED), codes[0] if codes else 0)
    return subprocess.CompletedProcess(job["words"], code, "".join(printed), "")


FOR_SMALL_MODELS: dict[str, dict[str, Any]] = {
    # As the file is shipped, no trained weight of a small model is large enough for a second copy.
    "zero3_hpz": {"stage3_param_persistence_threshold": 0},
}
"""Other values in the `zero_optimization` of strategies. `make matrix` has one column of the files as they are."""


def file_of(strategy: str, folder: Path) -> str:
    """The path of a strategy, or of a copy with the values of FOR_SMALL_MODELS."""
    if strategy not in FOR_SMALL_MODELS:
        return f"accelerate_configs/{strategy}.yaml"
    copy = folder / "small_models" / f"{strategy}.yaml"
    with FileLock(folder / "small_models.lock"):
        if not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            config = json.loads((ROOT / "ds_configs" / f"{strategy}.json").read_text())
            config["zero_optimization"] |= FOR_SMALL_MODELS[strategy]
            copy.with_suffix(".json").write_text(json.dumps(config))
            text = (ROOT / "accelerate_configs" / f"{strategy}.yaml").read_text()
            copy.write_text(text.replace(f"ds_configs/{strategy}.json", str(copy.with_suffix(".json"))))
    return str(copy)


def with_stages(folder: Path, strategy: str, count: int = 2, chunks: int = 1) -> str:
    """The path of a copy of a pipeline's file with so many stages, each of so many ranges of layers."""
    path = folder / f"{strategy}_{count}x{chunks}.yaml"
    text = (ROOT / "accelerate_configs" / f"{strategy}.yaml").read_text()
    sizes = f"pp_size: {count}\n  parallelism_config_pp_chunks: {chunks}" if chunks > 1 else f"pp_size: {count}"
    path.write_text(text.replace("pp_size: 2", sizes))
    return str(path)


class Lab:
    """Runs recipes in a shared folder; a run with the same arguments happens once, whatever test asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.parent = WarmParent({"CUDA_VISIBLE_DEVICES": ""}, folder)
        data = folder / "chats.jsonl"
        with FileLock(folder / "chats.lock"):
            if not data.exists():
                write_chats(data)
                text = RECIPE.replace("DATA", str(data)).replace("OUTPUT", str(folder / "out"))
                (folder / "recipe.yaml").write_text(text)

    def run(
        self,
        strategy: str,
        settings: dict[str, str] | None = None,
        *,
        processes: int | None = None,
        sabotage: str | None = None,
        launched: bool = False,
    ) -> Curve:
        """The curve of a finished run.

        Args:
            strategy: the name of a shipped file, or a path.
            sabotage: a deliberate mistake from tests/sabotage.py.
            launched: by accelerate; see `start`.

        Raises:
            AssertionError: the run failed; carries the end of its output.
        """
        result, output = self.attempt(strategy, settings, processes=processes, sabotage=sabotage, launched=launched)
        assert (result / "exit_code").read_text() == "0", f"{strategy} failed:\n{output[-4000:]}"
        return Curve(result)

    def derive(self, strategy: str, **zero: object) -> str:
        """A copy of a DeepSpeed strategy with other values in its `zero_optimization`; returns the path of its YAML."""
        name = f"{strategy}-{'-'.join(f'{key}_{value}' for key, value in zero.items())}"
        config = json.loads((ROOT / "ds_configs" / f"{strategy}.json").read_text())
        config["zero_optimization"].update(zero)
        json_path, yaml_path = self.folder / f"{name}.json", self.folder / f"{name}.yaml"
        json_path.write_text(json.dumps(config))
        text = (ROOT / "accelerate_configs" / f"{strategy}.yaml").read_text()
        yaml_path.write_text(text.replace(f"ds_configs/{strategy}.json", str(json_path)))
        return str(yaml_path)

    def attempt(
        self,
        strategy: str,
        settings: dict[str, str] | None = None,
        *,
        processes: int | None = None,
        sabotage: str | None = None,
        launched: bool = False,
    ) -> tuple[Path, str]:
        """The folder of a run, successful or not, and what it printed."""
        key = json.dumps([strategy, settings or {}, processes, sabotage, launched], sort_keys=True)
        folder = self.folder / f"{Path(strategy).stem}-{hashlib.sha256(key.encode()).hexdigest()[:10]}"
        with FileLock(f"{folder}.lock"):
            if not (folder / "exit_code").exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a run whose asker was ended
                folder.mkdir()
                program = ("tests/sabotage.py", sabotage) if sabotage else ("train.py",)
                asked = {**(settings or {}), "run.output_dir": str(folder)}
                done = self.start(strategy, asked, processes, program=program, launched=launched)
                (folder / "output.txt").write_text(done.stdout)
                (folder / "exit_code").write_text(str(done.returncode))
            return folder, (folder / "output.txt").read_text(errors="replace")

    def start(
        self,
        strategy: str,
        settings: dict[str, str],
        processes: int | None = None,
        *,
        program: tuple[str, ...] = ("train.py",),
        launched: bool = False,
        limit: float = 600.0,
        **options: Any,
    ) -> subprocess.CompletedProcess:
        """One start of a run, its processes forked from a warm parent, which ends them as torchrun does.

        Args:
            program: and its own arguments, before those of train.py.
            launched: by accelerate, which reads the strategy's file itself.
            limit: seconds, after which all are killed.
            options: of `WarmParent.run`.

        Returns:
            the exit code with which it failed, or 0; what its processes printed, one after the other.
        """
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="logs-") as logs:
            job = self.job(Path(logs), strategy, settings, processes, program=program, launched=launched, limit=limit)
            return done_of(job, self.parent.ask(job | options))

    def start_all(
        self, strategy: str, starts: list[tuple[dict[str, str], dict[str, str]]], *, at_once: int, limit: float
    ) -> list[subprocess.CompletedProcess]:
        """Starts of as many runs, so many at once: each its settings, and variables of its processes; see `start`."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="logs-") as logs:
            jobs = []
            for number, (settings, variables) in enumerate(starts):
                folder = Path(logs) / str(number)
                folder.mkdir()
                jobs.append(self.job(folder, strategy, settings, limit=limit) | {"variables": variables})
            return list(map(done_of, jobs, self.parent.ask_all(jobs, at_once=at_once)))

    def job(
        self,
        logs: Path,
        strategy: str,
        settings: dict[str, str],
        processes: int | None = None,
        *,
        program: tuple[str, ...] = ("train.py",),
        launched: bool = False,
        limit: float,
    ) -> dict[str, Any]:
        """For `WarmParent.ask`; see `start`."""
        need_builds_of(strategy)
        shipped = f"accelerate_configs/{strategy}.yaml" if launched else file_of(strategy, self.folder)
        path = strategy if strategy.endswith(".yaml") else shipped
        words = [*program, str(self.folder / "recipe.yaml")]
        for name, value in (settings if launched else {"strategy": path, **settings}).items():
            words += ["--set", f"{name}={value}"]
        # bitsandbytes compiles what it has no CPU kernel for.
        eager = not {"qlora", "adamw_8bit"}.isdisjoint(settings.values())
        count = processes or processes_of(strategy)
        job: dict[str, Any] = {"folder": str(logs), "words": words, "processes": count, "limit": limit, "eager": eager}
        job["machines"] = machines_of(strategy)
        if launched:
            job["accelerate"] = ["--config_file", path, "--main_process_port", "0"]
            job["accelerate"] += ["--num_processes", str(processes)] if processes else []
        return job

    @property
    def small_data(self) -> list[str]:
        """For `--set`: rows that are read in no time."""
        chats = self.folder / "chats.jsonl"
        return [f"data.train={chats}", f"data.eval={{path: {chats}, max_rows: 8}}"]

    def accelerate(self, flags: list[str], words: list[str], cwd: Path, **options: Any) -> str:
        """Output of `accelerate launch`, its flags, a program and its arguments in a folder; see `start`."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="logs-") as logs:
            self.parent.run(Path(logs), words, accelerate=flags, cwd=str(cwd), limit=600, **options)
            return "".join(path.read_text(errors="replace") for path in sorted(Path(logs).glob("log_*")))

    def close(self) -> None:
        """Ends the warm parent."""
        self.parent.close()

    def command(
        self, strategy: str, settings: dict[str, str], processes: int | None = None, sabotage: str | None = None
    ) -> list[str]:
        """The line that trains the small recipe under a strategy; `sabotage` as for `run`."""
        command = [sys.executable]
        if strategy != "single":
            path = strategy if strategy.endswith(".yaml") else f"accelerate_configs/{strategy}.yaml"
            command += ["-m", "accelerate.commands.launch", "--config_file", path, "--main_process_port", "0"]
            command += ["--num_processes", str(processes)] if processes else []
        command += ["tests/sabotage.py", sabotage] if sabotage else ["train.py"]
        command += [str(self.folder / "recipe.yaml")]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        return command

    def held_out_loss(self, model: Any, tokenizer: Any) -> tuple[float, int]:
        """The library's own loss, one sample at a time, on the rows that every run evaluates; and their targets."""
        import torch

        rows = [json.loads(line) for line in (self.folder / "chats.jsonl").read_text().splitlines()][:21]
        loss_sum, count = 0.0, 0
        for row in rows:
            encoded = tokenizer.apply_chat_template(
                row["messages"], return_assistant_tokens_mask=True, return_dict=True, max_length=96, truncation=True
            )
            ids = torch.tensor([encoded["input_ids"]])
            labels = ids.masked_fill(torch.tensor([encoded["assistant_masks"]]) == 0, -100)
            num_targets = int((labels[:, 1:] != -100).sum())
            with torch.no_grad():
                loss_sum += float(model(input_ids=ids, labels=labels).loss) * num_targets
            count += num_targets
        return loss_sum / count, count
