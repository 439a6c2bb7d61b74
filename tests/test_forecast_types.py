"""The forecast from a few layers is that of all, for every model type that is trained, or there is none.

python -m pytest -q tests/test_forecast_types.py
python -m pytest -q -m "slow or thorough or not slow" tests/test_forecast_types.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from turns import others_by_turn

from benchmarks.tiny_models import default_config, tiny_config
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import load_strategy
from cookbook.facts.meshes import EXPERTS, EXPERTS_OF_A_TOKEN, size_of_experts
from cookbook.forecast import ledger, verdict
from cookbook.forecast import trace as tracing
from cookbook.forecast.costs.flops import sizes_of
from cookbook.forecast.layer_kinds import ShortModel
from cookbook.forecast.skeleton import skeleton
from cookbook.forecast.trace import Untraceable
from cookbook.forecast.verdict import TraceCache, forecast
from cookbook.system.files import RecipeError
from cookbook.system.hardware import parse_machines

RECORD = json.loads(Path("benchmarks/results/architectures.json").read_text(encoding="utf-8"))
TRAINED = [name for name, row in RECORD["rows"].items() if "plain" in row]
OFTEN = "gemma3_text", "jetmoe"
FSDP2 = load_strategy(Path("accelerate_configs/fsdp2.yaml"))
KEEPS = "jetmoe", "ctrl", "openai-gpt"
"""Types that transformers cannot recompute."""
TOO_LONG = "longcat_flash", "rwkv", "zamba"
"""Types that are not traced with transformers' sizes (docs/plan.md)."""
UNNAMED = "biogpt", "ctrl", "openai-gpt"
"""Types whose layers transformers does not name."""
UNBUILT = "cohere_compass_text", "dbrx", "deepseek_v2", "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe"
UNBUILT += ("ministral", "nemotron")
"""Types of which transformers has sizes that its own code does not take."""


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


@pytest.mark.parametrize("model_type", others_by_turn(TRAINED, ("aria_text", "dbrx", "llama", "qwen3_moe")))
def test_the_experts_of_a_configuration_are_those_of_its_model(model_type: str):
    """The keys for them have other names in some types, of which nothing fails: the forecast would take all experts of
    DBRX for those of a token."""
    config = tiny_config(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = [name for name, _ in model.named_parameters() if ".experts." in name]
    modules = [module for module in model.modules() if isinstance(getattr(module, "top_k", None), int)]
    if not weights:
        assert model_type not in ("aria_text", "dbrx", "qwen3_moe")
        return
    stacked = {len(weight) for name, weight in model.named_parameters() if name in weights and weight.dim() == 3}
    counts = stacked | {getattr(module, "num_experts", None) for module in model.modules()}
    assert size_of_experts(config, EXPERTS) in counts - {None}
    assert {size_of_experts(config, EXPERTS_OF_A_TOKEN)} == {module.top_k for module in modules}


def test_without_a_number_of_experts_of_a_token_there_is_no_forecast():
    config = tiny_config("hunyuan_v1_moe")
    weights = skeleton(config, recipe("hunyuan_v1_moe", 64))
    assert sizes_of(config, weights).share_routed == 0.5
    config.moe_topk = [2, 2]
    assert sizes_of(config, weights).share_routed == 0.5
    config.moe_topk = [1, 2]
    with pytest.raises(RecipeError, match="the forecast knows no key of its configuration for experts"):
        sizes_of(config, weights)


@pytest.mark.parametrize("model_type", others_by_turn(TRAINED, OFTEN))
def test_with_the_sizes_of_transformers_few_layers_tell_of_all_or_there_is_no_forecast(model_type, monkeypatch):
    without = (*TOO_LONG, *UNNAMED, *UNBUILT)
    assert few_tell_of_all(model_type, default_config(model_type), 2048, monkeypatch) == (model_type not in without)


@pytest.mark.parametrize("model_type", others_by_turn(TRAINED, OFTEN))
def test_with_few_sizes_few_layers_tell_of_all(model_type, monkeypatch):
    assert few_tell_of_all(model_type, tiny_config(model_type), 64, monkeypatch) == (model_type not in UNNAMED)


def few_tell_of_all(model_type: str, config: PreTrainedConfig, length: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if there is a forecast, whose peak is held against that of the trace of all layers."""
    settings, machines = recipe(model_type, length), parse_machines("8xH100")
    monkeypatch.setattr(verdict, "TRACES", {})
    try:
        traces = TraceCache(config, settings)
    except RecipeError:
        return False
    try:
        of_few = traces.work(FSDP2, 1)
    except Untraceable:
        outlook = forecast(traces, FSDP2, machines, limits=False)
        assert outlook.verdict in ("no forecast", "cannot run") and outlook.memory is outlook.time is None
        return False

    def all_layers(config: PreTrainedConfig, start: int = 0) -> ShortModel:
        layers = [*range(traces.skeleton.num_layers)]
        return ShortModel(config, layers, layers)

    monkeypatch.setattr(verdict, "TRACES", {})
    monkeypatch.setattr(tracing, "few_layers", all_layers)
    monkeypatch.setattr(ledger, "MOST_OPERATIONS", 10**7)
    of_all = traces.work(FSDP2, 1)
    assert [(phase.name, phase.layer) for phase in of_few.phases] == [
        (phase.name, phase.layer) for phase in of_all.phases
    ]
    peak, expected = (max(phase.peak for phase in work.phases) for work in (of_few, of_all))
    assert 0.99 * expected <= peak <= 1.02 * expected
    return True
