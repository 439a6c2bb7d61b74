"""Runs recipes on simulated GPUs, or on the CPU beside them, from warm parents. Shared by the tests test_gpu_*."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout

import simulated_gpus
from cookbook.system.machine import num_gpus
from cookbook.system.signals import EXIT_CODE
from tests.curves import ROOT, WORDS, Curve, environment, file_of, processes_of
from tests.exchanges import Asked, stuck
from tests.needs import need_builds_of, need_simulated_gpus
from tests.warm_parent import WarmParent

NUM_GPUS = 4
"""Simulated, for runs of so many processes at most."""
REAL = "REAL_GPUS" in os.environ
"""Set by `make test-gpu`: the same runs on the GPUs of this machine."""
LIMIT_SECONDS = 240.0
TINY = (
    "{vocab_size: 512, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2,"
    " num_attention_heads: 8, num_key_value_heads: 4}"
)
WIDE = (
    "{vocab_size: 512, hidden_size: 512, intermediate_size: 1536, num_hidden_layers: 4,"
    " num_attention_heads: 8, num_key_value_heads: 8}"
)
RECIPE = """\
strategy: accelerate_configs/ddp.yaml
mixed_precision: bf16
seed: 42
model:
  from_scratch: {model}
data: {data}
objective: {objective}
batch: {batch}
optim: {{learning_rate: 1e-3, weight_decay: 0.1}}
run: {{max_steps: {steps}{evaluations}, output_dir: OUTPUT, check_export: false, monitor: false}}
"""
RECIPES = {
    # Every part of a run in seconds: rows of uneven length, two micro-batches, evaluations.
    "sft": dict(
        model=TINY,
        data="{train: CHATS, eval: HELD_OUT, max_length: 64}",
        objective="{train_on: assistant}",
        batch="{global_batch_size: 8, micro_batch_size: 2}",
        steps=3,
        evaluations=", eval_every_steps: 3",
    ),
    "dpo": dict(
        model=TINY,
        data="{train: PAIRS, max_length: 96}",
        objective="{name: dpo}",
        batch="{global_batch_size: 4, micro_batch_size: 1}",
        steps=3,
        evaluations="",
    ),
    "kto": dict(
        model=TINY,
        data="{train: JUDGED, max_length: 96}",
        objective="{name: kto_zero}",
        batch="{global_batch_size: 4, micro_batch_size: 1}",
        steps=3,
        evaluations="",
    ),
    "grpo": dict(
        model=TINY,
        data="{train: GROUPS, max_length: 96}",
        objective="{name: grpo, beta: 0.1}",
        batch="{global_batch_size: 8, micro_batch_size: 2}",
        steps=3,
        evaluations="",
    ),
    # All rows at full length, as the forecast has them, and memory that is mostly the model's.
    "memory": dict(
        model=WIDE,
        data="{train: LONG, max_length: 192}",
        objective="{train_on: all}",
        batch="{global_batch_size: 8, micro_batch_size: 2}",
        steps=2,
        evaluations="",
    ),
}


@dataclass(frozen=True)
class GpuRun:
    """One run, ended well or not."""

    folder: Path
    codes: list[int]
    """Exit codes, by rank."""

    @property
    def output(self) -> Path:
        """The run's own folder."""
        return self.folder / "run"

    @property
    def curve(self) -> Curve:
        return Curve(self.output)

    @property
    def steps(self) -> list[dict]:
        return self.curve.steps

    @property
    def evaluations(self) -> list[tuple[int, float, int]]:
        return self.curve.evaluations

    @property
    def record(self) -> dict:
        return self.curve.record

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.steps]

    @property
    def norms(self) -> list[float]:
        return [line["grad_norm"] for line in self.steps]

    def log(self, rank: int = 0) -> str:
        """Output of a process."""
        return (self.folder / f"log_{rank}").read_text(errors="replace")

    def report(self, rank: int = 0) -> dict[str, Any]:
        """Record of a process's simulated GPU."""
        return json.loads((self.folder / f"rank_{rank}.json").read_text())

    def reports(self) -> list[dict[str, Any]]:
        """Records of all its processes; none if one was killed, or ended before it imported torch."""
        there = all((self.folder / f"rank_{rank}.json").exists() for rank in range(len(self.codes)))
        return [self.report(rank) for rank in range(len(self.codes))] if there else []

    def stuck(self) -> list[str]:
        """Waits of its processes if they were on NCCL, see `exchanges.stuck`. Where some failed, others may wait for
        them.
        """
        reports = self.reports()
        logs = [[Asked(*asked) for asked in report["asked"]] for report in reports]
        everyone = list(range(len(logs)))
        groups = {name: ranks or everyone for report in reports for name, ranks in report["groups"].items()}
        failed = {rank for rank, code in enumerate(self.codes) if reports and code not in (0, EXIT_CODE)}
        return stuck(logs, groups, failed)

    def races(self) -> set[str]:
        """Where a stream used what another may not have been done with."""
        races = [race for report in self.reports() for race in report["races"]]
        return {f"{race['why']} (ours {race['ours']}; at {race['at']})" for race in races}


@dataclass
class _RealGpus:
    """Fresh processes on the GPUs of this machine, which several share where there are fewer."""

    memory: int | None

    def ask(self, job: dict) -> dict:
        if self.memory is not None:
            pytest.skip("the memory of a real GPU is what it is")
        there = num_gpus()
        job["shared"] = job["processes"] > there
        with own_gpus(Path(job["folder"]).parent, 1 if job["shared"] else job["processes"], there) as gpus:
            return self._run(job, ",".join(map(str, gpus)))

    def _run(self, job: dict, gpus: str) -> dict:
        import torch.distributed as dist

        count = job["processes"]
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command, started = [sys.executable, str(ROOT / "tests/warm_parent.py"), json.dumps(job)], time.monotonic()
        running = [
            subprocess.Popen(
                [*command, str(rank), str(store.port)],
                cwd=ROOT,
                env=environment(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=gpus),
            )
            for rank in range(count)
        ]
        for process in running:
            try:
                process.wait(max(1.0, started + job["limit"] - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        return {"codes": [process.wait() for process in running], "seconds": round(time.monotonic() - started, 2)}


@contextlib.contextmanager
def own_gpus(folder: Path, count: int, there: int) -> Iterator[list[int]]:
    """So many GPUs that no run of another worker has meanwhile; waits for them, in the order of asking."""
    locks = [FileLock(folder / f"gpu_{i}.lock") for i in range(there)]
    held: list[int] = []
    with contextlib.ExitStack() as stack:
        with FileLock(folder / "gpus.lock"):
            while len(held) < count:
                time.sleep(0.05)
                for i in set(range(there)) - set(held):
                    with contextlib.suppress(Timeout):
                        if len(held) < count:
                            stack.enter_context(locks[i].acquire(timeout=0))
                            held.append(i)
        yield sorted(held)


class GpuLab:
    """Where a run with the same arguments happens once, whatever test of whatever worker asks for it."""

    def __init__(self, folder: Path, on_cpu: WarmParent) -> None:
        """Args: the parent of runs on the CPU."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "data.lock"):
            if not (folder / "chats.jsonl").exists():
                _write_data(folder)
        self._parents = {"cpu": on_cpu}

    def run(
        self,
        strategy: str,
        settings: dict[str, str] | None = None,
        *,
        processes: int | None = None,
        recipe: str = "sft",
        on: str = "gpu",
        memory: int | None = None,
        sabotage: str | None = None,
        shared: bool = False,
        after: GpuRun | None = None,
        variables: dict[str, str] | None = None,
        ends: tuple[int, ...] | None = (0,),
    ) -> GpuRun:
        """A run of a shipped strategy.

        Args:
            settings: as for `--set`.
            processes: 2 unless given; 1 under `single`, 4 under `hsdp`.
            recipe: of RECIPES.
            on: gpu or cpu.
            memory: bytes of each GPU.
            sabotage: a deliberate mistake from tests/gpu_sabotage.py.
            shared: all processes on one GPU, with gloo in NCCL's place.
            after: an earlier run, whose folder this one goes on with.
            variables: of the environment of its processes.
            ends: exit codes that every process must end with; None to let the caller look.

        Raises:
            AssertionError: it ended with another code; carries the end of its output. Or it came to its end on
                simulated GPUs, but in an order that `assert_orderly` refuses.
        """
        processes = processes or processes_of(strategy)
        case = {"strategy": strategy, "settings": settings or {}, "processes": processes, "recipe": recipe, "on": on}
        case |= {"memory": memory, "sabotage": sabotage, "shared": shared, "variables": variables or {}}
        case["after"] = after and after.folder.name
        text = json.dumps([case, RECIPES[recipe]], sort_keys=True)  # recorded runs are found by it, of this recipe only
        key = hashlib.sha256(text.encode()).hexdigest()[:10]
        folder = self.folder / f"{strategy}-{recipe}-{on}-{key}"
        with FileLock(f"{folder}.lock"):
            if not (folder / "codes.json").exists():
                self._run(folder, case, after)
        result = GpuRun(folder, json.loads((folder / "codes.json").read_text()))
        if ends is not None and not set(result.codes) <= set(ends):
            bad = next(rank for rank, code in enumerate(result.codes) if code not in ends)
            pytest.fail(f"{strategy} {settings}: codes {result.codes}\n{result.log(bad)[-4000:]}")
        if on == "gpu" and not REAL and sabotage is None:
            assert_orderly(result)
        return result

    def _run(self, folder: Path, case: dict[str, Any], after: GpuRun | None) -> None:
        need_builds_of(case["strategy"], on_gpus=REAL and case["on"] == "gpu")
        shutil.rmtree(folder, ignore_errors=True)  # of a run whose asker was ended
        folder.mkdir()
        if after is not None:
            shutil.copytree(after.output, folder / "run")
        text = RECIPE.format(**RECIPES[case["recipe"]])
        for name in ("chats", "held_out", "pairs", "judged", "groups", "long"):
            text = text.replace(name.upper(), str(self.folder / f"{name}.jsonl"))
        (folder / "recipe.yaml").write_text(text.replace("OUTPUT", str(folder / "run")))
        words = ["train.py", str(folder / "recipe.yaml")]
        for name, value in {"strategy": file_of(case["strategy"], self.folder), **case["settings"]}.items():
            words += ["--set", f"{name}={value}"]
        job = {name: case[name] for name in ("processes", "sabotage", "shared", "variables")}
        if case["memory"] is not None:
            job["variables"] = {**job["variables"], "SIMULATED_GPU_MEMORY": str(case["memory"])}
        job |= {"folder": str(folder), "words": words, "limit": LIMIT_SECONDS}
        job["sabotage"] = case["sabotage"] and f"tests.gpu_sabotage:{case['sabotage']}"
        count = max(NUM_GPUS, case["processes"])
        asked = _RealGpus(case["memory"]) if REAL and case["on"] == "gpu" else self.parent(case["on"], count)
        answer = asked.ask(job)
        (folder / "case.json").write_text(json.dumps(case | {"seconds": answer["seconds"]}))
        (folder / "codes.json").write_text(json.dumps(answer["codes"]))

    def parent(self, on: str, num_gpus: int = NUM_GPUS) -> WarmParent:
        """The parent of runs on the CPU, or on so many simulated GPUs."""
        key = on if on == "cpu" else f"{num_gpus} {on}"
        if key not in self._parents:
            need_simulated_gpus()
            self._parents[key] = WarmParent(simulated_gpus.environment(num_gpus), self.folder)
        return self._parents[key]

    def close(self) -> None:
        for parent in self._parents.values():
            parent.close()


def assert_orderly(run: GpuRun) -> None:
    """A run on simulated GPUs, whatever it did, was in order up to its end: on NCCL no process would wait for ever for
    one that did not fail, and no stream uses what another may not be done with.
    """
    assert run.reports() or any(run.codes), f"{run.folder.name} left no log"
    waiting, races = run.stuck(), run.races()
    assert not waiting, "\n".join([f"{run.folder.name} would hang on NCCL:", *waiting])
    assert not races, "\n".join([f"{run.folder.name} has races between streams:", *sorted(races)])


def _write_data(folder: Path) -> None:
    chance = random.Random(0)

    def words(low: int, high: int) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(chance.randint(low, high)))

    def turn(role: str, low: int, high: int) -> dict[str, str]:
        return {"role": role, "content": words(low, high)}

    def chats(count: int) -> Iterator[dict]:
        for _ in range(count):
            turns = [(turn("user", 1, 8), turn("assistant", 1, 24)) for _ in range(chance.randint(1, 2))]
            yield {"messages": [message for pair in turns for message in pair]}

    def pairs(count: int) -> Iterator[dict]:
        for _ in range(count):
            prompt = [turn("user", 1, 8)]
            yield {"chosen": [*prompt, turn("assistant", 1, 12)], "rejected": [*prompt, turn("assistant", 1, 12)]}

    def groups(count: int) -> Iterator[dict]:
        for _ in range(count):
            answers = [[turn("assistant", 1, 12)] for _ in range(chance.randint(2, 4))]
            rewards = [chance.random() for _ in answers]
            yield {"prompt": [turn("user", 1, 8)], "completions": answers, "rewards": rewards}

    rows = {
        "held_out": chats(6),
        "pairs": pairs(24),
        "long": ({"messages": [turn("user", 8, 8), turn("assistant", 400, 400)]} for _ in range(32)),
        "chats": chats(64),
        "judged": ({**next(chats(1)), "label": i % 3 > 0} for i in range(24)),
        "groups": groups(12),
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
