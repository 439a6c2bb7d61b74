"""Protects `mixed_precision: fp8`: no scale depends on the micro-batch or on how a strategy hands the weights over, and
what a machine lacks is reported before anything loads. Curves: the row fp8 of tests/test_gpu_features.py.

python -m pytest -q tests/test_fp8.py
"""

from pathlib import Path

import pytest
import torch

from benchmarks import tiny_models
from cookbook.commands.cli import main
from cookbook.forecast.step_time import no_forecast
from cookbook.start import launchers
from cookbook.system import machine
from cookbook.system.gpus import Driver, InstalledGpu
from cookbook.system.hardware import parse_machines
from tests import simulated_driver
from tests.conftest import RECIPE
from tests.gpu_runs import GpuLab
from tests.needs import need_torchao
from tests.test_gpu_matrix import BANDS, PACKED, assert_same_curve
from tests.turns import TRAINED, others_by_turn

FP8 = PACKED | {"mixed_precision": "fp8"}
TOKENS, LOUD = 8, 50.0


def tiny_model(**sizes: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(**settings | sizes))


def products(linear: torch.nn.Linear, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, gradient of the input, gradient of the weight, under autocast."""
    inputs, linear.weight.grad = inputs.clone().requires_grad_(), None
    with torch.autocast("cpu", torch.bfloat16):
        outputs = linear(inputs)
    outputs.float().pow(2).sum().backward()
    return outputs.detach(), inputs.grad, linear.weight.grad


@pytest.fixture(scope="module")
def linears():
    """Ours, and torchao's own whose scales span the whole tensor, with the same weight; and inputs of which the first
    token is loud."""
    need_torchao()
    from cookbook.training.models import fp8

    model = tiny_model()
    fp8.convert_layers(model)
    ours = model.model.layers[0].mlp.up_proj
    library = fp8._library()
    tensorwise = library.Float8Linear.from_float(ours, library.Float8LinearConfig.from_recipe_name("tensorwise"))
    inputs = torch.randn(TOKENS, 64)
    inputs[0] *= LOUD
    return ours, tensorwise, inputs


def distances(linear: torch.nn.Linear, inputs: torch.Tensor) -> list[float]:
    """How far two micro-batches lie from one, relative to the largest number: output, both gradients."""
    whole, parts = products(linear, inputs), [products(linear, part) for part in (inputs[:1], inputs[1:])]
    joined = [torch.cat([part[i] for part in parts]) for i in (0, 1)] + [parts[0][2] + parts[1][2]]
    return [float((a - b)[1:].abs().max() / b[1:].abs().max()) for a, b in zip(joined, whole, strict=True)]


def test_a_loud_token_does_not_change_the_eight_bits_of_its_neighbours(linears):
    ours, tensorwise, inputs = linears
    output, of_input, of_weight = distances(ours, inputs)
    assert output == of_input == 0 and of_weight < 2e-2, "rounding of the sum of two bf16 gradients"
    assert distances(tensorwise, inputs)[0] > 1e-2, "the control"


def test_a_float32_weight_has_the_same_eight_bits_as_its_rounding(linears):
    """DDP hands over float32, FSDP and ZeRO bf16."""
    ours, _, inputs = linears
    rounded = type(ours).from_float(torch.nn.Linear(64, 96, bias=False), ours.config)
    rounded.weight.data.copy_(ours.weight.detach().bfloat16())
    assert all(map(torch.equal, products(ours, inputs), products(rounded, inputs)))
    base = type(ours).__mro__[1]
    theirs = [base.from_float(layer, ours.config).forward(inputs.bfloat16()) for layer in (ours, rounded)]
    assert not torch.equal(*theirs), "the control: torchao's own would round twice under FSDP, once under DDP"


def test_only_matrices_of_the_layers_that_fit_multiply_in_eight_bits():
    need_torchao()
    from cookbook.system.files import RecipeError
    from cookbook.training.models import fp8

    model = tiny_model(intermediate_size=90)
    names = [name for name, _ in model.named_parameters()]
    fp8.convert_layers(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert fp8.num_converted(model) == 2 * 4, "90 is no multiple of 16"
    assert type(model.lm_head) is torch.nn.Linear
    with pytest.raises(RecipeError, match="sizes that 16 divides"):
        fp8.convert_layers(tiny_model(hidden_size=40, intermediate_size=90))


NO_LINEAR = "ctrl", "falcon", "gpt-sw3", "gpt2", "openai-gpt"
"""Types whose matrices are of classes of their own, or of sizes that 16 does not divide."""


@pytest.mark.parametrize("model_type", others_by_turn(sorted({*TRAINED} - {*NO_LINEAR}), ["llama4_text", "mamba"]))
def test_every_type_learns_in_eight_bits(model_type: str):
    """Also one that changes a product in place, and one whose products are of transposed inputs."""
    need_torchao()
    from cookbook.training.models import experts, fp8

    experts.autocast_products()
    model = tiny_models.tiny_model(tiny_models.tiny_config(model_type)).train()
    ids, runs = torch.randint(5, 500, (2, 24), generator=torch.Generator().manual_seed(1)), []
    for converts in (False, True):
        if converts:
            fp8.convert_layers(model)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        runs.append((loss.item(), {name for name, parameter in model.named_parameters() if parameter.grad is not None}))
    assert runs[1] == (pytest.approx(runs[0][0], abs=0.5), runs[0][1]) and runs[0][0] != runs[1][0]


@pytest.mark.slow
@pytest.mark.thorough
def test_layers_compile_around_it():
    need_torchao()
    from cookbook.training.models import fp8
    from cookbook.training.models.efficiency import compile_layers

    ids, losses = torch.arange(24).reshape(2, 12), []
    for compiles in (False, True):
        model = tiny_model()
        fp8.convert_layers(model)
        if compiles:
            compile_layers(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)


@pytest.mark.simulated
def test_on_gpus_the_curve_is_that_of_bf16_but_its_products_have_eight_bits(gpu_lab: GpuLab):
    need_torchao()
    run, reference = gpu_lab.run("single", FP8), gpu_lab.run("single", PACKED)
    assert_same_curve(run, reference, (3e-2, 1e-1))
    assert run.losses != reference.losses
    assert any("_scaled_mm" in name for name in run.report()["operations"])
    assert not any("_scaled_mm" in name for name in reference.report()["operations"])


@pytest.mark.thorough
@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_strategy_and_in_bf16(gpu_lab: GpuLab):
    need_torchao()
    saving = FP8 | {"run.save_every_steps": "2", "run.stop_after_steps": "2"}
    begun = gpu_lab.run("ddp", saving, ends=(75,))
    whole = gpu_lab.run("single", FP8)
    in_bf16 = {"mixed_precision": "bf16", "run.allow_changes": "[mixed_precision]"}
    for strategy, settings in (("fsdp2", {}), ("zero2", in_bf16)):
        went_on = gpu_lab.run(strategy, FP8 | {"run.resume": "auto"} | settings, after=begun)
        assert [line["step"] for line in went_on.steps] == [1, 2, 3]
        assert_same_curve(went_on, whole, (3e-2, 1e-1) if settings else BANDS["bf16"])
        assert all(weight.dtype.kind == "f" or weight.itemsize == 2 for weight in went_on.curve.weights.values())


# What a machine lacks.

OLD = InstalledGpu(index=0, name="NVIDIA A100", capability=(8, 0))


def test_an_older_gpu_and_a_missing_torchao_are_named_with_the_remedy(monkeypatch):
    gpus = simulated_driver.read("count 3\ngpu.0.capability 8 9\ngpu.1.capability 8 0\ngpu.1.name NVIDIA A100").gpus
    assert [gpu.capability for gpu in gpus] == [(8, 9), (8, 0), (9, 0)]
    monkeypatch.setattr(machine, "has_torchao", lambda: False)
    (package, gpu) = machine.fp8_problems(gpus)
    assert package[0] == "mixed_precision is fp8, and torchao is not installed"
    assert package[1].startswith("pip install torchao==")
    assert gpu[0].startswith("mixed_precision is fp8, and GPU 1 (NVIDIA A100) has compute capability 8.0: ")
    monkeypatch.setattr(machine, "has_torchao", lambda: True)
    assert machine.fp8_problems([gpus[0], InstalledGpu(index=1)]) == [], "one without NVML is not known"


def test_check_and_the_start_of_a_run_ask_the_driver(book, monkeypatch, capsys):
    from cookbook.config.strategy import load_strategy

    book.edit(RECIPE, ("mixed_precision: 'no'", "mixed_precision: fp8"))
    monkeypatch.setattr(machine, "read_driver", lambda: Driver(gpus=[OLD]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert main(["check", RECIPE]) == 2
    assert "compute capability 8.0: products of 8 bits need 8.9" in capsys.readouterr().err
    ddp = load_strategy(Path("accelerate_configs/ddp.yaml"))
    told = launchers.check_machine(ddp, 1, deterministic=False, mixed_precision="fp8")
    assert any("8.9 (Ada, Hopper or later); mixed_precision: bf16" in mistake for mistake in told)
    assert launchers.check_machine(ddp, 1, deterministic=False) == []


def test_no_time_is_forecast_and_no_other_gpu_accepted():
    assert "no forecast of time" in no_forecast(parse_machines("8xH100"), "fp8")
    assert parse_machines("H100").gpu.has_fp8 and parse_machines("L4").gpu.has_fp8
    assert not parse_machines("A100-80GB").gpu.has_fp8 and not parse_machines("MI300X").gpu.has_fp8


def test_explain_shows_the_products_in_eight_bits(book, capsys):
    assert main(["explain", "recipes/qwen25_7b/sft.yaml", "--strategy", "fsdp2", "--set", "mixed_precision=fp8"]) == 0
    assert "8 bits in the layers' matrices" in capsys.readouterr().out
