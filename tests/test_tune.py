"""`tune` tries what the forecast puts first, and writes the fastest into the recipe, whose comments stay.

python -m pytest -q tests/test_tune.py
"""

import json
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from cookbook.commands import tune
from cookbook.commands.cli import main
from cookbook.config.strategy import load_strategy
from cookbook.start.run_plan import load_pair
from cookbook.system import status
from cookbook.system.hardware import parse_machines

LLAMA = Path("recipes/llama31_8b/sft.yaml")
FLOW = """\
strategy: ddp   # of before
model:
  # small
  from_scratch: {vocab_size: 512, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2,
                 num_attention_heads: 4, num_key_value_heads: 2}
data: {train: ROWS, max_length: 64}
batch: {global_batch_size: 16, micro_batch_size: 2}   # as published
optim: {learning_rate: 1e-3}
mixed_precision: 'no'
run: {max_steps: 20, output_dir: OUTPUT, check_export: false}
"""
KEYS = {"strategy": "zero3", "batch.micro_batch_size": "8", "model.gradient_checkpointing": "true"}


def comments(text: str) -> list[str]:
    return [line[line.index("#") :] for line in text.splitlines() if "#" in line]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_recipe_is_changed_in_these_keys_alone(path):
    before = path.read_text()
    after = tune.with_values(before, KEYS)
    old, new = yaml.safe_load(before), yaml.safe_load(after)
    assert new["model"].pop("gradient_checkpointing") is True
    old["model"].pop("gradient_checkpointing", None)
    old["strategy"], old["batch"]["micro_batch_size"] = "zero3", 8
    assert new == old
    assert comments(after) == comments(before)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    row = {"messages": [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two three four"}]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 64)
    path = tmp_path / "recipe.yaml"
    path.write_text(FLOW.replace("ROWS", str(tmp_path / "rows.jsonl")).replace("OUTPUT", str(tmp_path / "run")))
    return path


def test_without_the_gpus_it_tells_what_it_would_try_and_leaves_the_recipe(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    before = LLAMA.read_text()
    assert main(["tune", str(LLAMA), "--gpus", "8xH100", "--strategy", "fsdp2", "--strategy", "ddp"]) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("  strategy ")]
    assert 1 < len(lines) <= 4 and all("strategy fsdp2" in line for line in lines), "DDP does not fit"
    assert "the recipe's own" in lines[0] and "s a step by the forecast" in lines[0]
    assert "nothing was tried: this machine has 0 GPUs" in printed
    assert LLAMA.read_text() == before


def test_candidates_are_ranked_by_time_and_split_the_batch(monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe, own = load_pair(LLAMA)
    names = ("zero3", "fsdp2", "ddp")
    strategies = [load_strategy(Path(f"accelerate_configs/{name}.yaml")) for name in names]
    candidates = tune.candidates(recipe, own, strategies, parse_machines("8xH100"), str(LLAMA))
    assert [candidate.rank[1] for candidate in candidates[1:]] == sorted(
        candidate.rank[1] for candidate in candidates[1:]
    )
    for candidate in candidates:
        assert recipe.batch.global_batch_size % (8 * candidate.settings.micro_batch) == 0, candidate
    assert {candidate.settings.checkpointing for candidate in candidates} > {True}
    refused = [candidate for candidate in candidates if candidate.settings.strategy.name == "zero3"]
    assert "selective" not in {candidate.settings.checkpointing for candidate in refused}, "ZeRO-3 refuses it"


def test_the_fastest_of_real_runs_is_written(recipe, lab, tmp_path, monkeypatch, capsys):
    speeds = {}

    def run(command, environment, output_dir):
        program = command.index("train.py")
        logs = tmp_path / f"logs-{len(speeds)}"
        logs.mkdir()
        lab.parent.run(logs, command[program:], accelerate=command[2:program], cwd=str(ROOT), limit=300)
        size = next(word for word in command if word.startswith("batch.micro_batch_size="))
        speeds[int(size.partition("=")[2])] = tune._speed(output_dir / "metrics.jsonl")
        return {"stopped": 75, "finished": 0}.get(status.read(output_dir)["state"], 1)

    monkeypatch.setattr(tune, "run_command", run)
    before = recipe.read_text()
    assert main(["tune", str(recipe), "--gpus", "cpu", "--strategy", "ddp", "--trials", "2", "--steps", "3"]) == 0
    assert set(speeds) == {2, 8}
    best = max(speeds, key=speeds.get)
    after = recipe.read_text()
    assert f"micro_batch_size: {best}}}   # as published" in after
    assert comments(after) == comments(before)
    assert not list(tmp_path.glob("tune-*")), "what the trials wrote"
    assert f"{speeds[best]:,.0f} tokens/s" in capsys.readouterr().out


def test_a_budget_of_tokens_is_not_tuned(recipe, capsys):
    recipe.write_text(recipe.read_text().replace("micro_batch_size: 2", "micro_batch_tokens: 256"))
    assert main(["tune", str(recipe), "--gpus", "cpu"]) == 2
    assert "write batch.micro_batch_size" in capsys.readouterr().err
