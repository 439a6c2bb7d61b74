"""The forecast from a few layers is that of all, for every model type that is trained, or there is none.

python -m pytest -q tests/test_forecast_types.py
python -m pytest -q -m "slow or thorough or not slow" tests/test_forecast_types.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig
from turns import others_by_turn

from benchmarks.tiny_models import default_config, tiny_config
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import load_strategy
from cookbook.forecast import ledger, verdict
from cookbook.forecast import trace as tracing
from cookbook.forecast.layer_kinds import ShortModel
from cookbook.forecast.trace import Untraceable
from cookbook.forecast.verdict import TraceCache, forecast
from cookbook.system.files import RecipeError
from cookbook.system.hardware import parse_machines

RECORD = json.loads(Path("benchmarks/results/architectures.json").read_text(encoding="utf-8"))
TRAINED = [name for name, row in RECORD["rows"].items() if "plain" in row]
OFTEN = "gemma3_text", "jetmoe"
FSDP2 = load_strategy(Path("accelerate_configs/fsdp2.yaml"))
KEEPS = "jetmoe", "ctrl", "openai-gpt"
"""Those that transformers cannot recompute."""
TOO_LONG = "longcat_flash", "rwkv", "zamba"
"""Those that are not traced with transformers' sizes (docs/plan.md)."""
UNNAMED = "biogpt", "ctrl", "openai-gpt"
"""Those whose layers transformers does not name."""
UNBUILT = "cohere_compass_text", "dbrx", "deepseek_v2", "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe"
UNBUILT += ("ministral", "nemotron")
"""Those of which transformers has sizes that its own code does not take."""


def recipe(model_type: str, length: int) -> Recipe:
    values: dict[str, Any] = {
        "strategy": FSDP2.path,
        "mixed_precision": "bf16",
        "model": {"name_or_path": "x/y", "gradient_checkpointing": model_type not in KEEPS},
        "data": {"train": "python-stdlib", "max_length": length},
        "batch": {"global_batch_size": 8, "micro_batch_size": 1},
        "optim": {"learning_rate": 1e-4},
        "run": {"max_steps": 1, "output_dir": "out"},
    }
    return Recipe(**values)


@pytest.mark.parametrize("model_type", others_by_turn(TRAINED, OFTEN))
def test_with_the_sizes_of_transformers_few_layers_tell_of_all_or_there_is_no_forecast(model_type, monkeypatch):
    without = (*TOO_LONG, *UNNAMED, *UNBUILT)
    assert few_tell_of_all(model_type, default_config(model_type), 2048, monkeypatch) == (model_type not in without)


@pytest.mark.parametrize("model_type", others_by_turn(TRAINED, OFTEN))
def test_with_few_sizes_few_layers_tell_of_all(model_type, monkeypatch):
    assert few_tell_of_all(model_type, tiny_config(model_type), 64, monkeypatch) == (model_type not in UNNAMED)


def few_tell_of_all(model_type: str, config: PreTrainedConfig, length: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is a forecast; if so, holds its peak against that of the trace of all layers."""
    settings, machines = recipe(model_type, length), parse_machines("8xH100")
    monkeypatch.setattr(verdict, "TRACES", {})
    try:
        traces = TraceCache(config, settings)
    except RecipeError:
        return False
    try:
        of_few = traces.work(FSDP2, 1)
    except Untraceable:
        found = forecast(traces, FSDP2, machines, limits=False)
        assert found.verdict in ("no forecast", "cannot run") and found.memory is found.time is None
        return False

    def all_layers(config: PreTrainedConfig, start: int = 0) -> ShortModel:
        layers = [*range(traces.skeleton.num_layers)]
        return ShortModel(config, layers, layers)

    monkeypatch.setattr(verdict, "TRACES", {})
    monkeypatch.setattr(tracing, "few_layers", all_layers)
    monkeypatch.setattr(ledger, "MOST_OPERATIONS", 10**7)
    of_all = traces.work(FSDP2, 1)
    assert [(one.name, one.layer) for one in of_few.phases] == [(one.name, one.layer) for one in of_all.phases]
    peak, expected = (max(one.peak for one in found.phases) for found in (of_few, of_all))
    assert 0.99 * expected <= peak <= 1.02 * expected
    return True
