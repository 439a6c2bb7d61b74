"""Protects the time to the first step and that of a step: a run imports what it uses, and its steps hide no waiting.

python -m pytest -q tests/test_start.py
"""

import json
import subprocess
import sys

from conftest import ROOT, clean_environment

from tests.curves import RECIPE
from tests.small_data import chat

HEAVY = ("deepspeed", "mlflow", "pandas", "peft", "datasets", "torch._inductor.compile_fx", "tensorboard", "wandb")
"""Each takes 0.1 to 3 s."""
MUON = "from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam"


def heavy_after(code, *arguments):
    """Those of HEAVY that a fresh process has imported after `code`."""
    code += f"\nimport sys; print('HEAVY', *[name for name in {HEAVY} if sys.modules.get(name)])"
    environment = clean_environment() | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return next(line for line in reversed(done.stdout.splitlines()) if line.startswith("HEAVY")).split()[1:]


def test_a_run_in_one_process_imports_nothing_that_it_does_not_use(tmp_path):
    recipe, rows = tmp_path / "recipe.yaml", tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(chat("Count.", f"one two three {i}")) + "\n" for i in range(32)))
    recipe.write_text(RECIPE.replace("DATA", str(rows)).replace("OUTPUT", str(tmp_path / "out")))
    code = "import sys, train; sys.argv[0] = 'train.py'; assert train.main() == 0"
    assert heavy_after(code, str(recipe), "--set", "run.max_steps=1", "--set", "schedule.warmup_steps=0") == []
    assert (tmp_path / "out" / "export" / "model.safetensors").is_file()


def test_deepspeed_comes_without_autotuner_and_compiler_and_its_own_muon_is_whole():
    code = f"""
import gc
from cookbook.training.engine.zero import import_deepspeed
import_deepspeed()
assert gc.isenabled() and gc.get_freeze_count() > 100_000
{MUON}
import inspect, torch
assert issubclass(MuonWithAuxAdam, torch.optim.Optimizer)
from deepspeed.runtime import compiler
assert compiler.compile() is torch.compile or callable(compiler.compile())
"""
    assert heavy_after(code) == ["deepspeed"]


def test_by_itself_it_imports_the_compiler():
    """Else the test above would pass for nothing."""
    assert "torch._inductor.compile_fx" in heavy_after(MUON)


def test_the_time_of_a_step_has_the_wait_for_its_batch(lab):
    """Six batches take three seconds at least, made one after the other and one step ahead."""
    settings = {"run.max_steps": "6", "batch.micro_batch_size": "16"}
    found = lab.run("single", settings, sabotage="batches_take_half_a_second")
    seconds = [step["step_seconds"] for step in found.steps]
    assert len(seconds) == 6 and sum(seconds) >= 3.0
