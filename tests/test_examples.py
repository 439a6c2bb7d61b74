"""Protects the programs of examples/: plain Accelerate, which shows the idea and lends the strategy files to others.

python -m pytest -q -m "slow or not slow" tests/test_examples.py
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment

import simulated_gpus
from cookbook.commands.cli import main
from tests.needs import need_simulated_gpus

EXAMPLES = {"one_curve": 165, "own_model": 75, "same_state": 150}
"""Most lines of each: a page that is read to its end."""


def imported(path: Path) -> set[str]:
    """The packages that a program imports."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_one_page_of_other_peoples_libraries(name: str) -> None:
    path = ROOT / f"examples/{name}.py"
    assert imported(path) - sys.stdlib_module_names <= {"torch", "accelerate"} and "torch" in imported(path)
    assert len(path.read_text().splitlines()) <= EXAMPLES[name]
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("loss", ["mse", "cross_entropy", "bce", "nll", "l1", "huber"])
def test_whoever_asks_for_a_loss_of_tensors_is_shown_the_program_for_them(loss: str, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["check", "recipes/quickstart.yaml", "--set", f"objective.name={loss}"]) == 2
    (answer,) = capsys.readouterr().err.splitlines()
    assert "not trained here; take examples/own_model.py, a program for it" in answer
    assert "regress" in answer and (ROOT / "examples/own_model.py").is_file()


@pytest.mark.slow
def test_one_curve_under_three_strategies_and_another_with_the_mean_of_means(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples/one_curve.py"]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = re.findall(r"(?m)^(.+?) +(\d\.[\d. ]+?) +(\d+) +(\d+e[+-]\d+)$", done.stdout)
    off = {name: float(difference) for name, *_, difference in rows}
    held = {name: int(weights) for name, _, weights, _ in rows}
    assert list(off)[:4] == ["one process", "DDP", "ZeRO-3", "FSDP2"] and len(off) == 7
    for strategy in ("DDP", "ZeRO-3", "FSDP2"):
        assert off[strategy] <= 1e-5 and off[f"{strategy}, mean of means"] >= 1e-3
    assert held["DDP"] == held["one process"]
    assert held["ZeRO-3"] < 0.6 * held["DDP"] > held["FSDP2"]


@pytest.mark.slow
def test_one_state_from_strategy_to_strategy_and_another_where_the_moments_are_forgotten(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples/same_state.py"]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = re.findall(r"(?m)^(\S.*?) +(\d+) of +(\d+) +(\d+e[+-]\d+)$", done.stdout)
    *kept, (name, changed, of_all, off) = rows
    assert len(kept) == 2 and {strategy for row in kept for strategy in row[0].split(", ")} == {
        *("one process", "DDP", "FSDP2")
    }
    assert all(int(row[1]) == 0 < int(row[2]) and float(row[3]) < 1e-6 for row in kept)
    assert name.endswith("weights alone") and 0 < int(changed) < int(of_all) and float(off) > 1e-4


def own_model(strategy: str, folder: Path, *flags: str) -> list[str]:
    """Epochs that examples/own_model.py prints under a strategy, on simulated GPUs."""
    need_simulated_gpus()
    folder.mkdir()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *flags]
    command += ["--config_file", f"{ROOT}/accelerate_configs/{strategy}.yaml", f"{ROOT}/examples/own_model.py"]
    (folder / "ds_configs").symlink_to(ROOT / "ds_configs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = clean_environment() | simulated_gpus.environment(2) | {"OMP_NUM_THREADS": "1", "PATH": path}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    saved = sorted(path.name for path in (folder / "outputs/own_model").iterdir())
    assert saved == ["epoch-10", "epoch-5"]
    return [line for line in done.stdout.splitlines() if line.startswith("epoch") or " processes, " in line]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    kind, *epochs = own_model("single", tmp_path_factory.mktemp("own") / "single")
    assert kind == "1 processes, NO" and len(epochs) == 10
    assert float(epochs[-1].split()[-1]) > 0.8 > float(epochs[0].split()[-1])
    return epochs


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "MULTI_GPU"), ("zero3", "DEEPSPEED"), ("fsdp2", "FSDP")])
def test_a_module_of_ones_own_has_one_accuracy_under_the_strategy_files(
    strategy: str, kind: str, reference: list[str], tmp_path: Path
) -> None:
    said = own_model(strategy, tmp_path / strategy, "--num_processes", "2")
    assert said == [f"2 processes, {kind}", *reference]
