"""Protects the commands and pages that use simulated GPUs; `simulated_gpus/tests` protects the simulation itself.

python -m pytest -q -m "slow or not slow" tests/test_simulated_gpus.py
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment

import simulated_gpus
from tests.needs import need_simulated_gpus

SMALL = ["run.max_steps=3", "run.eval_every_steps=3", "schedule.warmup_steps=1", "batch.global_batch_size=8"]
SMALL += ["run.check_export=false"]


def run(*command: str, memory: int = 1 << 20) -> subprocess.CompletedProcess:
    """A program with two simulated GPUs, of 1 MiB unless given."""
    need_simulated_gpus()
    variables = clean_environment() | simulated_gpus.environment(2, memory=memory)
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)


def test_the_loss_keeps_no_logits_in_float32_under_autocast_of_cuda():
    """There `softmax` makes its result float32, other than under that of the CPU. fp16 needs its loss scale first."""
    program = """
import json, os, sys, torch
from cookbook.training.models.loss import LossHead
told = []
for dtype in (torch.bfloat16, torch.float16):
    head = torch.nn.Linear(8, 16, device="cuda")
    head.__class__ = LossHead
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one)
    with torch.autocast("cuda", dtype=dtype), hooks:
        head(torch.ones(4, 8, device="cuda", requires_grad=True), torch.arange(4, device="cuda"))
    told.append([str(one.dtype) for one in kept if one.shape == (4, 16)])
print("TOLD" + json.dumps(told), flush=True)
os._exit(0)
"""
    done = run(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.split("TOLD")[1]) == [["torch.bfloat16"], ["torch.float32"]]


@pytest.mark.parametrize("count", ["0", "65", "-1"])
def test_a_count_that_cannot_be_is_refused(count: str):
    done = subprocess.run(
        [sys.executable, "-m", "cookbook", "launch", "recipes/quickstart.yaml", "--simulate-gpus", count],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and f"{count} simulated GPUs; write a number from 1 to 64" in done.stderr


@pytest.mark.slow
def test_a_launched_run_says_that_it_was_simulated_and_measures_nothing(tmp_path: Path):
    """The whole way of a user: accelerate's launcher, DeepSpeed, then a report of it and an answer of its export."""
    need_simulated_gpus()
    settings = [word for setting in [*SMALL, f"run.output_dir={tmp_path / 'run'}"] for word in ("--set", setting)]
    command = [sys.executable, "-m", "cookbook", "launch", "recipes/quickstart.yaml", "--strategy", "zero3"]
    done = subprocess.run(
        [*command, "--simulate-gpus", "2", *settings],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 simulated GPUs" in done.stdout
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["hardware"]["simulated"] is True and record["hardware"]["gpu"] == "Simulated GPU"
    assert record["strategy"]["processes"] == 2
    assert record["peak_memory_gib"]["allocated"] > 0 and record["peak_memory_gib"]["reserved"] is None
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    told = {key for line in lines for key in line}
    assert "peak_memory_gib" in told and not {"tokens_per_second", "step_seconds", "mfu"} & told
    variables = simulated_gpus.environment(1)
    for (verb, *flags), wanted in ((("report",), "Simulated GPU"), (("chat", "--prompt", "x"), "--- answer")):
        shown = subprocess.run(
            [sys.executable, "-m", "cookbook", verb, str(tmp_path / "run"), *flags],
            cwd=ROOT,
            env=clean_environment() | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert shown.returncode == 0 and wanted in shown.stdout, shown.stderr[-2000:]


@pytest.mark.slow
def test_doctor_looks_at_simulated_gpus_as_at_others():
    shown = run(sys.executable, "-m", "cookbook", "doctor", "--json", memory=80 << 30)
    findings = json.loads(shown.stdout)["findings"]
    told = [(finding["check"], finding["status"], finding["text"]) for finding in findings]
    assert ("torch", "ok", "computes on 2 GPUs") in told


def test_the_page_shows_the_files_that_there_are():
    page = (ROOT / "docs/simulated_gpus.md").read_text()
    picture = page.split("```")[1]
    named = set(re.findall(r"\b[\w/]+\.(?:cpp|py)\b", picture)) - {"train.py"}
    folder = ROOT / "simulated_gpus"
    there = {path.name for path in folder.glob("**/*") if path.suffix in (".cpp", ".py") and "build" not in path.parts}
    assert {Path(name).name for name in named} == there - {"__init__.py", "__main__.py", "test_simulation.py"}
    assert os.access(folder / "bin/nvidia-smi", os.X_OK)
