"""The scaling efficiency of a plan's rows is their speed over that of the fewest GPUs that fit, divided by hand.

python -m pytest -q tests/test_scaling.py
"""

import json
from pathlib import Path

import pytest
from conftest import ROOT

from cookbook.commands.cli import main
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.strategy import load_strategy
from cookbook.forecast.ranking import forecast_all
from cookbook.forecast.scaling import find_reference
from cookbook.forecast.show import as_record, in_words
from cookbook.system import console
from cookbook.system.hardware import parse_machines

SMALL = "recipes/sums/sft.yaml"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(console, "WIDTH", 160)


def answer(recipe: Recipe, gpus: str, *names: str) -> tuple[dict, str]:
    """The record and the words, of which the reference's strategies are those that are asked about."""
    strategies = [load_strategy(Path(f"accelerate_configs/{name}.yaml")) for name in names]
    report = forecast_all(recipe, strategies, parse_machines(gpus), "", limits=False)
    reference = find_reference(report, strategies, "")
    said = in_words(report, "", num_samples=None, price=None, reference=reference)
    return as_record(report, "", num_samples=None, price=None, reference=reference), said


def by_hand(row: dict, tokens: int, reference: list[float], gpus: int) -> list[float]:
    """Tokens of a second and GPU over those of the reference, at the slow ends and at the fast ends."""
    ends = []
    for seconds, of_reference in zip(row["step_seconds"], reference, strict=True):
        ends.append((tokens / seconds / row["num_processes"]) / (tokens / of_reference / gpus))
    return sorted(ends)


def test_the_efficiency_is_by_hand_and_one_gpu_has_100_percent():
    recipe = load_recipe(
        Path(SMALL), ["mixed_precision=bf16", "batch.global_batch_size=32", "batch.micro_batch_size=8"]
    )
    record, said = answer(recipe, "4xH100", "ddp", "fsdp2", "single")
    of_one, _ = answer(recipe, "1xH100", "single")
    (alone,) = of_one["forecasts"]
    assert record["scaling_reference"]["gpus"] == 1 and "those of 1 GPU with single" in said
    assert record["scaling_reference"]["step_seconds"] == alone["step_seconds"]
    assert list(alone["scaling_efficiency"]) == [1.0, 1.0]
    tokens = 32 * recipe.data.max_length
    rows = {Path(row["strategy"]).stem: row for row in record["forecasts"]}
    assert len(rows) == 3
    for row in rows.values():
        assert row["scaling_efficiency"] == pytest.approx(by_hand(row, tokens, alone["step_seconds"], 1))
    assert list(rows["single"]["scaling_efficiency"]) == [1.0, 1.0] and " 100 % " in said
    assert rows["fsdp2"]["scaling_efficiency"][1] < 1, "messages take time"


def test_what_does_not_fit_on_one_gpu_is_compared_with_the_fewest_that_fit():
    """Llama-3.1-8B, all weights: 16 bytes of each of 8.03 billion are 120 GiB."""
    settings = ["data.max_length=512", "batch.global_batch_size=16", "batch.micro_batch_size=1"]
    recipe = load_recipe(Path("recipes/llama31_8b/sft.yaml"), [*settings, "model.gradient_checkpointing=true"])
    record, said = answer(recipe, "8xH100", "single", "fsdp2", "zero3_offload")
    count = record["scaling_reference"]["gpus"]
    assert count > 1 and f"{count} GPUs with fsdp2: the least that fits" in said
    verdicts = {}
    for number in (count, count // 2):
        of_fewer, _ = answer(recipe, f"{number}xH100", "single", "fsdp2")
        verdicts[number] = {Path(row["strategy"]).stem: row for row in of_fewer["forecasts"]}
    assert verdicts[count]["fsdp2"]["verdict"] in ("fits", "host memory unknown")
    assert not {row["verdict"] for row in verdicts[count // 2].values()} & {"fits", "host memory unknown"}
    seconds = verdicts[count]["fsdp2"]["step_seconds"]
    (row,) = [row for row in record["forecasts"] if Path(row["strategy"]).stem == "fsdp2"]
    assert row["scaling_efficiency"] == pytest.approx(by_hand(row, 16 * 512, seconds, count))
    (offloads,) = [row for row in record["forecasts"] if Path(row["strategy"]).stem == "zero3_offload"]
    assert offloads["scaling_efficiency"][1] < row["scaling_efficiency"][1]


def test_without_a_time_there_is_no_efficiency():
    recipe = load_recipe(Path(SMALL), ["mixed_precision=bf16"])
    record, said = answer(recipe, "2x80GB", "ddp")
    assert record["scaling_reference"] is None and "tokens/s a GPU beside" not in said
    assert "scaling_efficiency" not in record["forecasts"][0]


def test_the_command_compares_with_strategies_that_nobody_named(capsys):
    sets = ("mixed_precision=bf16", "batch.global_batch_size=32", "batch.micro_batch_size=8")
    words = ["plan", SMALL, *(f"--set={assignment}" for assignment in sets), "--gpus", "2xH100"]
    assert main([*words, "--strategy", "ddp", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["scaling_reference"]["machines"] == "1xH100"
    assert Path(record["scaling_reference"]["strategy"]).stem == "single"
    rates = record["forecasts"][0]["tokens_per_second_a_gpu"], record["scaling_reference"]["tokens_per_second_a_gpu"]
    expected = sorted(own / of_one for own, of_one in zip(*rates, strict=True))
    assert record["forecasts"][0]["scaling_efficiency"] == pytest.approx(expected)
