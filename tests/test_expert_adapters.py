"""Adapters on experts that are stacked in one tensor: peft's own numbers, under every strategy.

pytest -m "slow or not slow" tests/test_expert_adapters.py
"""

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts

from benchmarks.architectures import tiny_config, tiny_model
from cookbook.commands.evaluate import evaluate_model
from cookbook.commands.export import merge_adapter
from cookbook.config.recipe import load_recipe
from cookbook.config.sections import AdapterSection
from cookbook.config.strategy import find_strategy, load_strategy
from cookbook.facts.model_types import TYPES
from cookbook.forecast.costs.flops import sizes_of
from cookbook.forecast.costs.inputs import cost_inputs
from cookbook.forecast.costs.states import resident
from cookbook.forecast.ranking import forecast_all
from cookbook.forecast.skeleton import skeleton
from cookbook.system.files import RecipeError
from cookbook.system.hardware import parse_machines
from cookbook.training.adapters import (
    adapted_layers,
    adapter_files,
    base_model,
    four_bit_experts,
    insertion,
    peft_folder,
)
from cookbook.training.adapters.stacked import use_own_forward
from cookbook.training.checkpoint import write_model as checkpoint
from cookbook.training.engine.as_read import each_weight
from cookbook.training.models.model_source import weights_digest
from cookbook.training.models.tokenizer_files import train_tokenizer
from tests.conftest import ROOT
from tests.curves import Curve, Lab, distance
from tests.experts import experts
from tests.test_equivalence import SGD_LOSS, SGD_NORM
from tests.turns import others_by_turn

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ADAPTER = {
    "adapter": "{name: lora, rank: 4, targets: [all-linear, gate_up_proj, down_proj]}",
    "optim.learning_rate": "0.1",
}
PACKED = ADAPTER | {"adapter": ADAPTER["adapter"].replace("lora", "qlora")}
"""With experts in 4 bits."""
SLOW = pytest.mark.slow
STACKED = ["qwen3_moe", "gpt_oss"]
"""Experts as rows of outputs; and as rows of inputs, with biases and a gate of their own."""


def settings(targets: list[str], **others: Any) -> AdapterSection:
    return AdapterSection(**{"name": "lora", "rank": 4, "targets": targets, **others})


def new_model(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return tiny_model(tiny_config(model_type)).float()


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def losses(model: torch.nn.Module, steps: int = 5) -> list[float]:
    """The losses of a plain loop with SGD."""
    ids = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(trained(model).values(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("model_type", STACKED)
def test_a_plain_loop_with_peft_alone_has_the_same_losses(model_type: str):
    model = new_model(model_type)
    theirs, others = copy.deepcopy(model), copy.deepcopy(model)
    insertion.add_adapter(model, settings(["q_proj", *EXPERTS]), seed=7)
    first = {peft_folder.name_in_file(name): weight.detach().clone() for name, weight in trained(model).items()}
    curve = losses(model)
    config = {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj"]}

    def by_peft(base: torch.nn.Module, **more: Any) -> list[float]:
        peft = get_peft_model(base, LoraConfig(**config | more))
        for name, weight in trained(peft).items():
            weight.data.copy_(first[peft_folder.name_in_file(name.removeprefix("base_model.model."))])
        return losses(peft)

    expected = by_peft(theirs, target_parameters=EXPERTS)
    assert curve == pytest.approx(expected, rel=2e-6)
    assert curve[0] - curve[-1] > 0.1, "it learns"
    assert by_peft(others) != pytest.approx(curve, rel=1e-3), "the experts' adapters do something"


def test_experts_with_a_norm_after_them_are_those_of_transformers():
    config = tiny_config("muse_spark_text")
    generator = torch.Generator().manual_seed(4)
    theirs = MuseSparkExperts(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    hidden = torch.randn(9, theirs.hidden_dim, generator=generator)
    weights, chosen = torch.rand(9, config.num_local_experts, generator=generator).topk(2)
    ours = copy.deepcopy(theirs)
    use_own_forward(ours)
    with torch.no_grad():
        expected = theirs.forward.__wrapped__(theirs, hidden, chosen, weights)
        torch.testing.assert_close(ours(hidden, chosen, weights), expected, rtol=1e-4, atol=1e-4)


def moved(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Trained weights, away from their first values."""
    chance = torch.Generator().manual_seed(1)
    return {
        name: weight.detach() + 0.05 * torch.randn(weight.shape, generator=chance)
        for name, weight in trained(model).items()
    }


def finished(folder: Path, model_type: str, asked: AdapterSection) -> Path:
    """A finished run, as `merge_adapter` reads it."""
    base, export = folder / "base", folder / "run" / "export"
    model = new_model(model_type)
    model.save_pretrained(base)
    insertion.add_adapter(model, asked, seed=0)
    export.mkdir(parents=True)
    record = base_model.Base(str(base), None, weights_digest(base))
    adapter_files.write_adapter(moved(model), export, config=tiny_config(model_type), settings=asked, base=record)
    for place in (base, export):
        train_tokenizer(["def f(x):\n    return x\n"] * 5, 300).save_pretrained(place)
    checkpoint.write_generation_config(export, like=base, end_of_turn=2)
    return folder / "run"


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


# deepseek_v3 has layers without experts, and a shared expert, whose linear layers have the names of experts.
@pytest.mark.parametrize("model_type", [*STACKED, "deepseek_v3"])
def test_peft_opens_what_was_trained_and_the_merged_model_is_the_same(tmp_path: Path, model_type: str, capsys):
    asked = settings(["all-linear", *EXPERTS])
    run = finished(tmp_path, model_type, asked)
    ours = new_model(model_type)
    insertion.add_adapter(ours, asked, seed=0)
    for name, tensor in moved(ours).items():
        ours.get_parameter(name).data = tensor
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        opened = AutoPeftModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    expected = logits(ours)
    assert torch.allclose(logits(opened), expected, atol=5e-5)
    evaluated = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    insertion.open_adapter(evaluated, run / "export")
    assert torch.allclose(logits(evaluated), expected, atol=5e-5)
    assert (logits(new_model(model_type)) - expected).abs().max() > 0.1, "the adapter does something"
    merge_adapter(run, run / "merged", "fp32")
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(run / "merged")), expected, atol=1e-4)
    assert "reopened" in capsys.readouterr().out


def test_each_expert_is_merged_with_its_own_part_by_hand(tmp_path: Path):
    """In the files each expert has its own tensors, and gate and up are apart."""
    run = finished(tmp_path, "qwen3_moe", settings(EXPERTS, alpha=8.0))
    merge_adapter(run, run / "merged", "fp32")
    assert_each_has_its_own_part(tmp_path / "base", run, tiny_config("qwen3_moe").num_experts, scale=8 / 4, least=1e-3)


def assert_each_has_its_own_part(base_folder: Path, run: Path, count: int, *, scale: float, least: float) -> None:
    base, merged = (load_file(path / "model.safetensors") for path in (base_folder, run / "merged"))
    adapter = load_file(run / "export" / "adapter_model.safetensors")
    assert base.keys() == merged.keys()
    rank, compared = 4, 0
    for layer in range(2):
        place = f"model.layers.{layer}.mlp.experts"
        parts = {"gate_up_proj": f"base_model.model.{place}.base_layer", "down_proj": f"base_model.model.{place}"}
        for expert in range(count):
            change = {}
            for name, key in parts.items():
                a = adapter[f"{key}.lora_A.weight"][expert * rank : (expert + 1) * rank]
                b = adapter[f"{key}.lora_B.weight"][:, expert::count]
                change[name] = scale * b @ a
            gate, up = change["gate_up_proj"].chunk(2)
            for name, expected in {"gate_proj": gate, "up_proj": up, "down_proj": change["down_proj"]}.items():
                key = f"{place}.{expert}.{name}.weight"
                assert torch.allclose(merged[key] - base[key], expected, atol=1e-6), key
                assert expected.abs().max() > least
                compared += 1
    assert compared == 2 * count * 3


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"dropout": 0.1}, "write adapter.dropout: 0"),
        ({"name": "dora"}, "write adapter.name: lora"),
        (
            {"targets": ["gate"]},
            "'gate', which is no linear layer of MixtralForCausalLM; it has q_proj, k_proj, v_proj",
        ),
        ({"targets": ["w1"]}, "o_proj, and the experts' experts.gate_up_proj, experts.down_proj"),
    ],
)
def test_what_experts_cannot_have_is_refused_by_plan_and_run(asked: dict, expected: str):
    config = tiny_config("mixtral")
    bad = settings(asked.pop("targets", ["q_proj", "down_proj"]), **asked)
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", []).model_copy(update={"adapter": bad})
    for check in (lambda: adapter_files.check_names(config, bad), lambda: skeleton(config, recipe)):
        with pytest.raises(RecipeError) as caught:
            check()
        (mistake,) = caught.value.mistakes
        assert expected in mistake


@pytest.mark.parametrize("model_type", [*STACKED, "mixtral", "qwen3_next"])
def test_all_linear_leaves_experts_and_routers_frozen_and_says_so(model_type: str):
    config, model = tiny_config(model_type), new_model(model_type)
    asked = settings(["all-linear"])
    linear = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear} - {"lm_head"}
    share = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 3 and parameter.shape[1] > 1)
    share /= sum(parameter.numel() for parameter in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        (note,) = adapter_files.check_names(config, asked)
        insertion.add_adapter(model, asked, seed=0)
    assert {name.partition(".lora_")[0] for name in trained(model)} == linear
    assert f"the experts' experts.gate_up_proj, experts.down_proj, {share:.0%} of the weights, stay frozen" in note
    assert "write adapter.targets: [all-linear, experts.gate_up_proj, experts.down_proj]" in note
    assert adapter_files.check_names(config, settings(["all-linear", *EXPERTS])) == []


def in_4_bits(folder: Path, model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model as a run has it under `qlora`, and in float32 what bitsandbytes makes of each of its matrices in turn."""
    new_model(model_type).save_pretrained(folder)
    options = insertion.quantization_options(settings(EXPERTS, name="qlora"), "no")
    with each_weight(insertion.packing(options)):
        packed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    plain = new_model(model_type)
    linear = {f"{name}.weight" for name, module in plain.named_modules() if type(module) is torch.nn.Linear}
    for name, parameter in plain.named_parameters():
        if name in linear - {"lm_head.weight"} or (name.endswith(tuple(EXPERTS)) and parameter.ndim == 3):
            state = functional.quantize_4bit(parameter.data, quant_type="nf4", compress_statistics=True)
            parameter.data = functional.dequantize_4bit(*state)
    return packed, plain


@pytest.mark.parametrize("model_type", STACKED)
def test_experts_in_4_bits_train_as_those_that_bitsandbytes_makes_whole_again(tmp_path: Path, model_type: str):
    packed, plain = in_4_bits(tmp_path, model_type)
    others = new_model(model_type)
    asked = settings(["q_proj", *EXPERTS], name="qlora")
    held = {name: parameter for name, parameter in packed.named_parameters() if name.endswith(tuple(EXPERTS))}
    assert {weight.numel() * weight.element_size() for weight in held.values()} == {
        plain.get_parameter(name).numel() // 2 for name in held
    }
    for model in (packed, plain, others):
        insertion.add_adapter(model, asked, seed=7)
    assert {name: weight.shape for name, weight in trained(packed).items()} == {
        name: weight.shape for name, weight in trained(plain).items()
    }
    curve = losses(packed)
    assert curve == pytest.approx(losses(plain), rel=2e-6)
    assert curve[0] - curve[-1] > 0.1, "it learns"
    assert losses(others) != pytest.approx(curve, rel=1e-3), "4 bits are another base"


def test_no_layer_keeps_its_experts_whole_for_the_backward(tmp_path: Path):
    """The control is the same model with experts in float32, which autograd keeps; the first product needs none."""
    config = tiny_config("qwen3_moe")
    each = config.num_experts * config.moe_intermediate_size * config.hidden_size
    kept = []
    for model in in_4_bits(tmp_path, "qwen3_moe"):
        insertion.add_adapter(model, settings(EXPERTS, name="qlora"), seed=7)
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, torch.Tensor.view_as):
            model(input_ids=torch.randint(0, 256, (3, 20)))
        kept.append(sum(size in (each, 2 * each) for size in sizes))
    assert kept == [0, 2 * config.num_hidden_layers - 1]


def test_what_stays_out_of_4_bits_is_said(monkeypatch: pytest.MonkeyPatch):
    """Two layers of Qwen3-30B-A3B: 128 experts, each of three matrices of 2,048 x 768. A tensor of more numbers than
    bitsandbytes counts stays as it is; here that limit is lower.
    """
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 2, "num_experts": 128}
    config, asked = Qwen3MoeConfig(**sizes), AdapterSection(name="qlora")
    assert not any("in 16 bits" in note for note in adapter_files.check_names(config, asked))
    monkeypatch.setattr(four_bit_experts, "MOST_NUMBERS", 128 * 2048 * 768)
    assert 2 * 2 * 128 * 2 * 2048 * 768 / 2**30 == 1.5
    assert "the experts' experts.gate_up_proj in 16 bits, 1.5 GiB" in adapter_files.check_names(config, asked)[0]
    of_lora = adapter_files.check_names(tiny_config("qwen3_moe"), settings(["all-linear"]))
    assert not any("16 bits" in note for note in of_lora)


def test_the_forecast_has_experts_in_half_a_byte(monkeypatch: pytest.MonkeyPatch):
    config = tiny_config("qwen3_moe")
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", [])
    model = skeleton(config, recipe.model_copy(update={"adapter": settings(EXPERTS, name="qlora")}))
    packed = [weight for weight in model.weights if weight.is_quantized and len(weight.shape) == 3]
    assert len(packed) == 2 * config.num_hidden_layers
    inputs = cost_inputs(recipe, load_strategy(find_strategy("single")), 1)
    experts = config.num_hidden_layers * config.num_experts * 3 * config.moe_intermediate_size * config.hidden_size
    assert resident(packed, inputs) == experts // 2
    assert "of the weights are in 4 bits, the experts' among them" in model.notes[-1]
    monkeypatch.setattr(four_bit_experts, "MOST_NUMBERS", 1)
    model = skeleton(config, recipe.model_copy(update={"adapter": settings(EXPERTS, name="qlora")}))
    assert not any("among them" in note for note in model.notes)


def test_the_forecast_counts_a_rank_for_each_expert():
    config = tiny_config("qwen3_moe")
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", [])
    model = skeleton(config, recipe.model_copy(update={"adapter": settings(EXPERTS)}))
    experts, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
    each = 4 * (hidden + 2 * inner) + 4 * (inner + hidden)
    sizes = sizes_of(config, model)
    assert sizes.num_trained == config.num_hidden_layers * experts * each
    assert sizes.num_matrix_trained == config.num_hidden_layers * config.num_experts_per_tok * each
    assert sizes.num_of_experts == config.num_hidden_layers * experts * 3 * hidden * inner


def test_plan_suggests_an_adapter_for_a_mixture_that_fits_nowhere(tmp_path: Path, monkeypatch):
    """Its default targets once ended the plan in an error about a key that the recipe does not have."""
    config = tiny_config("qwen3_moe")
    config.num_experts, config.moe_intermediate_size, config.hidden_size = 64, 4096, 512
    config.save_pretrained(tmp_path)
    monkeypatch.chdir(ROOT)
    words = [f"model={{name_or_path: {tmp_path}}}", "mixed_precision=bf16", "model.gradient_checkpointing=true"]
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", words)
    single = load_strategy(find_strategy("single"))
    report = forecast_all(recipe, [single], parse_machines("1x8GB"), "here", limits=False, suggests="first")
    assert report.forecasts[0].verdict == "does not fit"
    assert report.suggestion is not None and "adapter: {name: lora}" in report.suggestion


@pytest.mark.parametrize(
    "strategy",
    [
        "zero3",
        *(pytest.param(name, marks=SLOW) for name in ("fsdp2_ep", "fsdp2", "ddp")),
        *(pytest.param(name, marks=[SLOW, pytest.mark.thorough]) for name in ("zero1", "zero2", "fsdp1")),
    ],
)
def test_the_curve_is_that_of_one_process(lab: Lab, strategy: str):
    model = experts(lab) | ADAPTER
    more = {"fsdp2_ep": {"batch.micro_batch_size": "2"}, "fsdp2": {"run.check_export": "true"}}.get(strategy, {})
    curve = lab.run(strategy, model | more)
    apart = distance(curve, lab.run("single", model))
    print(strategy, apart)
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM and apart.weight < 1e-6, apart
    written = json.loads((curve.folder / "export" / "adapter_config.json").read_text())
    assert sorted(written["target_parameters"]) == sorted(EXPERTS)
    if "run.check_export" in more:
        compared = json.loads((curve.folder / "export" / "export.json").read_text())["reopened"]
        assert "logits equal to those of the checkpoint" in compared["logits"], compared


@pytest.mark.parametrize("strategy", ["zero3", *others_by_turn(["ddp", "fsdp2"], [])])
def test_adapters_on_experts_alone_have_the_curve_of_one_process(lab: Lab, strategy: str):
    """Nothing before the first experts is trained, so that their input needs no gradient."""
    model = experts(lab) | ADAPTER | {"adapter": "{name: lora, rank: 4, targets: [gate_up_proj, down_proj]}"}
    apart = distance(lab.run(strategy, model), lab.run("single", model))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM and apart.weight < 1e-6, apart


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("fsdp2", marks=SLOW),
        *(
            pytest.param(name, marks=[SLOW, pytest.mark.thorough])
            for name in ("ddp", "zero1", "zero2", "zero3", "hsdp")
        ),
    ],
)
def test_the_curve_over_experts_in_4_bits_is_that_of_one_process(lab: Lab, strategy: str):
    model = experts(lab) | PACKED
    curve = lab.run(strategy, model)
    apart = distance(curve, lab.run("single", model))
    print(strategy, apart)
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM and apart.weight < 1e-6, apart
    written = json.loads((curve.folder / "export" / "adapter_config.json").read_text())
    assert sorted(written["target_parameters"]) == sorted(EXPERTS)


@pytest.mark.slow
def test_a_run_over_experts_in_4_bits_is_evaluated_over_them_and_merged_into_the_unquantized(lab: Lab):
    model = experts(lab) | PACKED
    run, base = lab.run("single", model).folder, Path(experts(lab)["model"].split(": ")[1].rstrip("}"))
    (reread,) = evaluate_model(run / "export", load_recipe(run / "recipe.yaml", []))
    assert reread["eval_loss"] == pytest.approx(Curve(run).evaluations[-1][1], abs=1e-6)
    merge_adapter(run, run / "merged", "fp32")
    assert_each_has_its_own_part(base, run, 6, scale=32 / 4, least=1e-4)
    (merged,) = evaluate_model(run / "merged", load_recipe(run / "recipe.yaml", ["adapter=null"]))
    assert 1e-5 < abs(merged["eval_loss"] - reread["eval_loss"]) < 0.05, "4 bits round the base, and change little"


@pytest.mark.slow
def test_a_process_with_the_adapters_of_other_experts_leaves_the_curve(lab: Lab):
    model = experts(lab) | ADAPTER
    wrong = lab.run("fsdp2_ep", model | {"batch.micro_batch_size": "2"}, sabotage="adapters_of_the_first_experts")
    assert distance(wrong, lab.run("single", model)).loss > 100 * SGD_LOSS


@pytest.mark.parametrize(
    ("model_type", "other"), [("phimoe", "PhimoeTopKRouter"), ("deepseek_v4", "DeepseekV4GroupedLinear")]
)
def test_what_is_a_linear_layer_by_its_class_alone_is_not_adapted(model_type, other):
    """Routers return several tensors, grouped layers multiply parts of their input."""
    torch.manual_seed(0)
    model = tiny_model(tiny_config(model_type))
    asked = AdapterSection(name="lora", rank=4)
    assert any(other in note for note in adapted_layers.examine(model, asked))
    insertion.inject(model, asked)
    adapted = {type(module.base_layer).__name__ for module in model.modules() if hasattr(module, "lora_A")}
    assert adapted == {"Linear"}
    ids = torch.randint(0, 100, (1, 16))
    assert torch.isfinite(model(input_ids=ids, use_cache=False).logits).all()
    with pytest.raises(RecipeError, match=f"{other} of this model .* write adapter.name: lora"):
        adapter_files.check_names(tiny_config(model_type), AdapterSection(name="qlora"))


@pytest.mark.parametrize("model_type", ["gemma3n_text", "jamba", "longcat_flash", "rwkv"])
def test_each_layer_that_all_linear_adapts_computes_in_the_forward(model_type: str, monkeypatch):
    """Also those whose weights the model's code reads past an adapter, as without the table some would be."""
    model = new_model(model_type)
    insertion.add_adapter(model, AdapterSection(name="lora", rank=4), seed=0)
    assert not without_gradient(model)
    if model_type == "rwkv":  # which calls its layers, and then scales their weights alone
        return
    monkeypatch.setitem(TYPES, model_type, replace(TYPES[model_type], reads_weights=[]))
    model = new_model(model_type)
    insertion.add_adapter(model, AdapterSection(name="lora", rank=4), seed=0)
    assert without_gradient(model)


def without_gradient(model: PreTrainedModel) -> set[str]:
    """Trained weights that a step of training does not reach."""
    ids = torch.randint(0, 100, (1, 16), generator=torch.Generator().manual_seed(1))
    model.train()(input_ids=ids, use_cache=False).logits.square().sum().backward()
    return {name for name, weight in trained(model).items() if weight.grad is None}


@pytest.mark.parametrize(("model_type", "kept"), [("bamba", {"in_proj", "q_proj"}), ("mamba", {"in_proj"})])
def test_what_kernels_of_a_model_read_by_themselves_is_left_out_of_all_linear_and_refused_by_name(model_type, kept):
    config, asked = tiny_config(model_type), AdapterSection(name="lora", rank=4)
    (note, *_) = adapter_files.check_names(config, asked)
    assert "all-linear leaves out" in note and "out_proj, whose weights the model's code reads by itself" in note
    model = new_model(model_type)
    insertion.add_adapter(model, asked, seed=0)
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in trained(model)}
    assert kept <= adapted and adapted.isdisjoint({"out_proj", "x_proj", "dt_proj"})
    with pytest.raises(RecipeError, match=f"the code of {model_type} reads out_proj by itself, past an adapter"):
        adapter_files.check_names(config, AdapterSection(name="lora", targets=["out_proj"]))
    with pytest.raises(RecipeError, match=r"reads .*out_proj by itself.* write adapter.name: lora"):
        adapter_files.check_names(config, AdapterSection(name="qlora"))
