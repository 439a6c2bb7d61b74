"""Names that libraries read of us, or answer for, and do not promise: each is tried on the library itself.

python -m pytest -q tests/test_library_names.py
"""

import inspect
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from deepspeed.runtime.swap_tensor.utils import MIN_AIO_BYTES
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.distributed import distributed_c10d
from torch.nn import Linear
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM
from transformers.models.falcon.modeling_falcon import FalconLinear

from benchmarks.tiny_models import tiny_config
from benchmarks.upgrade_places import places
from cookbook.facts import meshes
from cookbook.facts.served_code import served_code
from cookbook.forecast.compiled import _Forward
from cookbook.forecast.ledger import Unit, experts_of
from cookbook.forecast.skeleton import skeleton
from cookbook.forecast.trace import _cast_at_ends, trace
from cookbook.start.launchers import CUBLAS_DETERMINISTIC, CUBLAS_VARIABLE
from cookbook.system import replaced
from cookbook.system.files import RecipeError
from cookbook.system.step_phases import LAYER
from cookbook.training.adapters.adapted_layers import _is_linear
from cookbook.training.checkpoint.streamed import StreamedModel
from cookbook.training.engine.start import make_deterministic
from cookbook.training.profiling import _annotate
from tests.experts import experts_config
from tests.test_forecast_trace import recipe


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "qwen3_moe"])
def test_attention_holds_its_scores_where_transformers_takes_no_kernel(model_type: str):
    config = tiny_config(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert served_code(config).holds_scores == (model.config._attn_implementation == "eager")


def test_a_name_asked_of_a_configuration_is_that_of_a_model_type():
    """It is declared, or set, in a configuration class of transformers or peft. The control is a name of none."""
    folders = [Path(inspect.getfile(library)).parent for library in (transformers, peft)]
    files = [file for folder in folders for file in folder.rglob("*config*.py")]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    declared = set(re.findall(r"^ +(?:self\.|def |kwargs\.setdefault\(.)?(\w+)", source, re.MULTILINE))
    names = {place.name for place in places() if place.kind == "name in a configuration"}
    assert len(names) > 20 and names <= declared, names - declared
    assert "num_key_value_head" not in declared


def test_modules_of_experts_are_found():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(experts_config(num_hidden_layers=2))
    expected = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    assert expected and experts_of(model) == expected


def test_a_traced_model_has_parameters_without_gradients_and_exchanges_tokens_of_its_experts():
    """Gradients are dropped as they come: a ledger that counts them too would have each twice."""
    models: list[Any] = []
    config = experts_config(num_hidden_layers=1)
    work = trace(
        config,
        recipe(precision="bf16"),
        rows=1,
        length=16,
        num_targets=16,
        autocast=False,
        tp_size=1,
        fsdp=2,
        ep_size=2,
        is_sharded_while_read=True,
        change=models.append,
    )
    assert {"experts forward", "experts backward"} <= {phase.name for phase in work.phases}
    parameters = [parameter for model in models for parameter in model.parameters()]
    assert parameters and all(isinstance(parameter, torch.nn.Parameter) for parameter in parameters)
    assert all(parameter.grad is None for parameter in parameters)


def test_ends_take_16_bits_and_return_what_their_unit_does():
    """torch multiplies no float32 by a weight of 16 bits."""
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.bfloat16)
    head = model.get_output_embeddings()
    with pytest.raises(RuntimeError, match="dtype"):
        head(torch.ones(1, 64))
    _cast_at_ends(model, Unit(torch.bfloat16, torch.float32))
    for module in (head, model.model.norm):
        assert module(torch.ones(1, 64)).dtype == torch.float32
    assert model.get_input_embeddings()(torch.ones(1, 1, dtype=torch.long)).dtype == torch.float32
    finer = torch.ones(1, 64)
    finer[0, 0] += 2**-12  # which 16 bits do not hold
    assert torch.equal(model.model.norm(finer), model.model.norm(torch.ones(1, 64)))


def test_the_last_norm_is_no_part_of_the_layers_in_a_forecast():
    config = tiny_config("llama")
    parts = {weight.name: weight.part for weight in skeleton(config, recipe()).weights}
    assert parts.pop("model.norm.weight") == "norm" and "norm" not in parts.values()
    assert "model.layers.0.input_layernorm.weight" in parts


def test_layers_of_a_model_s_own_class_are_adapted_if_all_they_do_is_multiply():
    class Router(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden).softmax(-1)

    Router.__module__ = FalconLinear.__module__
    own, rows = FalconLinear(4, 2), torch.ones(1, 4)
    assert FalconLinear.forward is not Linear.forward and torch.equal(own(rows), Linear.forward(own, rows))
    assert [_is_linear(kind(4, 2)) for kind in (Linear, FalconLinear, Router)] == [True, True, False]


def test_a_layer_in_a_graph_computes_as_it_did_and_checkpointing_hears_of_its_operations():
    layer, told = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), list[str]()

    def kept(names: list[str]) -> list[bool]:
        told.extend(names)
        return [False] * len(names)

    inputs = torch.randn(4, 8)
    expected = layer(inputs)
    gradients = torch.autograd.grad(expected.sum(), layer.parameters())
    result = _Forward(layer, {}, kept, nullcontext)(inputs)
    assert torch.equal(result, expected) and {"addmm", "relu"} <= set(told) and "" not in told
    assert all(map(torch.equal, torch.autograd.grad(result.sum(), layer.parameters()), gradients))


def test_the_notes_of_a_layer_in_a_profile_hold_its_operations_and_no_others():
    layer = torch.nn.Linear(8, 8)
    hooks = _annotate(layer, "model.layers.0")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        layer(torch.ones(1, 8)).exp()
    for hook in hooks:
        hook.remove()
    ranges = {event.name: event.time_range for event in profiler.events()}
    note = ranges[f"{LAYER}model.layers.0"]
    assert note.start <= ranges["aten::addmm"].start and ranges["aten::addmm"].end <= note.end
    assert ranges["aten::exp"].start >= note.end


def test_a_merge_lets_a_layer_go_before_the_next(tmp_path: Path):
    with torch.random.fork_rng():
        AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32).save_pretrained(tmp_path)
    streamed = StreamedModel.open(tmp_path)
    assert streamed is not None
    first, second = streamed.model.model.layers
    are_empty: list[tuple[bool, bool]] = []
    for layer in (first, second):
        layer.mlp.register_forward_hook(
            lambda *_: are_empty.append((first.mlp.up_proj.weight.is_meta, second.mlp.up_proj.weight.is_meta))
        )
    streamed.probe_logits()
    assert are_empty == [(False, True), (True, False)]


def test_torch_is_deterministic_and_tries_no_other_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CUBLAS_VARIABLE, CUBLAS_DETERMINISTIC[0])
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        make_deterministic()
        assert torch.are_deterministic_algorithms_enabled() and torch._C._get_cudnn_deterministic()
        assert not torch._C._get_cudnn_benchmark() and not torch._C._get_deterministic_fill_uninitialized_memory()
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


def test_a_value_that_a_library_no_longer_has_is_not_set():
    with pytest.raises(RecipeError, match=r"c10d\.default_timeout is not in torch 2\.\S+, and a run sets it"):
        replaced.set_values(distributed_c10d, default_timeout=1)
    assert not hasattr(distributed_c10d, "default_timeout")


@pytest.mark.core
def test_deepspeed_has_the_sizes_and_takes_the_settings_that_the_checks_know():
    parameters = {
        stage: inspect.signature(optimizer).parameters
        for stage, optimizer in ((2, DeepSpeedZeroOptimizer), (3, DeepSpeedZeroOptimizer_Stage3))
    }
    for key in ("allgather_bucket_size", "round_robin_gradients"):
        assert key in parameters[2] and key not in parameters[3]
    assert "partition_grads" in parameters[2] and "allgather_partitions" not in parameters[3]
    assert DeepSpeedZeroOffloadParamConfig().buffer_size == meshes.BUFFER_SIZE
    assert MIN_AIO_BYTES == meshes.MIN_SWAP
