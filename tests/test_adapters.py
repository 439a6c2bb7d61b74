"""Adapters: names are checked without weights, first weights follow from the seed, merging proves itself, and a fresh
process computes from a saved one what the run computed at its end.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from cookbook.commands.cli import main
from cookbook.commands.export import merge_adapter
from cookbook.config.sections import AdapterSection
from cookbook.system.files import RecipeError
from cookbook.training.adapters import adapted_layers, adapter_files, base_model, continued, insertion, peft_folder
from cookbook.training.checkpoint import write_model as checkpoint
from cookbook.training.models.model_source import weights_digest
from cookbook.training.models.tokenizer_files import train_tokenizer
from tests.conftest import ROOT
from tests.curves import Lab

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def config(**changes: object) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, **HEADS, "tie_word_embeddings": False, **changes})


def new_model(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config(**changes))


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


MISTAKES = {
    "a target that is nowhere": ({"targets": ["q_prj", "v_proj"]}, "targets has 'q_prj', which is no linear layer"),
    "a target that is no matrix": ({"targets": ["input_layernorm"]}, "'input_layernorm', which is no linear layer"),
    "the head as a target": ({"targets": ["lm_head"]}, "write adapter.modules_to_save: [lm_head]"),
    "a norm, whose name others end with": ({"modules_to_save": ["norm"]}, "modules_to_save has 'norm'; of Llama"),
    "what has no weights": ({"modules_to_save": ["act_fn"]}, "can be trained whole: embed_tokens, lm_head"),
    "a part of each layer": ({"modules_to_save": ["mlp"]}, "modules_to_save has 'mlp'"),
    "a module that is nowhere": ({"modules_to_save": ["head"]}, "modules_to_save has 'head'"),
}


@pytest.mark.parametrize(("settings", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_name_that_matches_nothing_is_refused(settings: dict, expected: str):
    with pytest.raises(RecipeError) as caught:
        adapter_files.check_names(config(), AdapterSection(name="lora", **settings))
    (mistake,) = caught.value.mistakes
    assert expected in mistake


def test_all_wrong_names_are_reported_together():
    settings = AdapterSection(name="lora", targets=["a", "q_proj", "b"], modules_to_save=["c"])
    with pytest.raises(RecipeError) as caught:
        adapter_files.check_names(config(), settings)
    assert len(caught.value.mistakes) == 3 and "q_proj, v_proj" not in caught.value.mistakes[2]


def test_half_of_a_tied_matrix_cannot_be_trained_whole():
    settings = AdapterSection(name="lora", modules_to_save=["lm_head"])
    adapter_files.check_names(config(), settings)
    with pytest.raises(RecipeError, match="one matrix"):
        adapter_files.check_names(config(tie_word_embeddings=True), settings)


@pytest.mark.parametrize(("name", "per_layer"), [("lora", 2), ("dora", 3)])
def test_only_the_adapter_is_trained_in_float32_and_counts_are_right(name: str, per_layer: int):
    model = new_model().to(torch.bfloat16)
    insertion.add_adapter(model, AdapterSection(name=name, rank=4), seed=7)
    tensors = trained(model)
    assert len(tensors) == 7 * per_layer * SIZES["num_hidden_layers"], "q k v o gate up down in each layer, no head"
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    shapes = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]
    expected = sum(4 * (fan_in + fan_out) + (fan_out if name == "dora" else 0) for fan_in, fan_out in shapes)
    assert sum(tensor.numel() for tensor in tensors.values()) == expected * SIZES["num_hidden_layers"]


def test_first_weights_follow_from_the_seed_alone_and_change_nothing_yet():
    ids = torch.arange(12)[None]
    model, other = new_model(), new_model()
    before = model(input_ids=ids).logits
    insertion.add_adapter(model, AdapterSection(name="lora"), seed=7)
    torch.manual_seed(99)
    insertion.add_adapter(other, AdapterSection(name="lora"), seed=7)
    assert all(torch.equal(tensor, trained(other)[name]) for name, tensor in trained(model).items())
    assert torch.equal(model(input_ids=ids).logits, before)
    third = new_model()
    insertion.add_adapter(third, AdapterSection(name="lora"), seed=8)
    assert not all(torch.equal(tensor, trained(third)[name]) for name, tensor in trained(model).items())


def test_no_two_layers_begin_with_the_same_numbers():
    model = new_model()
    insertion.add_adapter(model, AdapterSection(name="lora"), seed=7)
    first = {p.flatten()[:4].tolist().__str__() for name, p in model.named_parameters() if "lora_A" in name}
    assert len(first) == 7 * SIZES["num_hidden_layers"]


def test_dropout_is_that_of_the_recipe():
    """As many of the inputs of a matrix as asked for are 0, and the others larger."""
    model = new_model()
    insertion.add_adapter(model, AdapterSection(name="lora", dropout=0.25), seed=7)
    dropped = model.model.layers[0].self_attn.q_proj.lora_dropout["default"](torch.ones(10_000))
    assert dropped.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)


def test_four_bits_are_those_of_the_qlora_paper():
    options = insertion.quantization_options(AdapterSection(name="qlora"), "bf16")["quantization_config"]
    assert (options.load_in_4bit, options.bnb_4bit_quant_type, options.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert options.bnb_4bit_compute_dtype == torch.bfloat16
    assert insertion.quantization_options(AdapterSection(name="lora"), "bf16") == {}


def test_all_linear_beside_experts_leaves_the_head_alone():
    sizes = {**SIZES, **HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    settings = adapted_layers.lora_config(AdapterSection(name="lora", targets=["all-linear", "gate_up_proj"]), model)
    assert sorted(settings.target_modules) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert settings.target_parameters == ["experts.gate_up_proj"]


def test_first_weights_are_as_wide_as_those_of_peft():
    ours, theirs = new_model(), new_model()
    insertion.add_adapter(ours, AdapterSection(name="lora", rank=64), seed=7)
    get_peft_model(theirs, LoraConfig(r=64, target_modules="all-linear"))
    for fan_in in (32, 48):
        widths = []
        for model in (ours, theirs):
            first = [p for name, p in model.named_parameters() if "lora_A" in name and p.shape[1] == fan_in]
            widths.append(torch.cat([p.detach().flatten() for p in first]).abs().max().item())
        assert widths[0] == pytest.approx(widths[1], rel=0.01) == pytest.approx(fan_in**-0.5, rel=0.01)


def test_rank_stabilised_scaling_divides_by_the_square_root():
    for rslora, expected in ((False, 8 / 16), (True, 8 / 4)):
        model = new_model()
        insertion.add_adapter(model, AdapterSection(name="lora", rank=16, alpha=8.0, rslora=rslora), seed=0)
        assert model.model.layers[0].self_attn.q_proj.scaling["default"] == expected


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with an adapter whose weights were moved, as training would."""
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 5, 300)
    base = tmp_path / "base"
    new_model().save_pretrained(base)
    settings = AdapterSection(name="dora", rank=4, modules_to_save=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(base)
    insertion.add_adapter(model, settings, seed=0)
    chance = torch.Generator().manual_seed(1)
    weights = {name: t + 0.05 * torch.randn(t.shape, generator=chance) for name, t in trained(model).items()}
    folder = tmp_path / "run" / "export"
    folder.mkdir(parents=True)
    record = base_model.Base(str(base), None, weights_digest(base))
    adapter_files.write_adapter(weights, folder, config=config(), settings=settings, base=record)
    tokenizer.save_pretrained(folder)
    checkpoint.write_generation_config(folder, like=base, end_of_turn=7)
    return tmp_path / "run"


def test_a_saved_adapter_gives_its_tensors_back(run: Path):
    saved = load_file(run / "export" / "adapter_model.safetensors")
    model = AutoPeftModelForCausalLM.from_pretrained(run / "export")
    tensors = {name.replace(".default", "").replace(".modules_to_save", ""): p for name, p in model.named_parameters()}
    assert len(saved) == 7 * 3 * 2 + 1
    for name, tensor in saved.items():
        assert torch.equal(tensors.get(name, tensors.get(f"{name}.weight")), tensor), name


def test_an_adapter_that_is_trained_further_is_not_rounded_to_the_model_s_16_bits(run: Path):
    model = new_model().to(torch.bfloat16)
    insertion.open_adapter(model, run / "export")
    saved = load_file(run / "export" / "adapter_model.safetensors")
    tensors = {f"base_model.model.{peft_folder.name_in_file(name)}": tensor for name, tensor in trained(model).items()}
    assert tensors.keys() == saved.keys() and all(torch.equal(tensors[name], tensor) for name, tensor in saved.items())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values()), (
        "which has more than 16"
    )


OTHERS = {
    "whose r is 4, and adapter.rank is 8; write adapter.rank: 4": {"rank": 8},
    "whose lora_alpha is 12, and adapter.alpha is 32.0": {"alpha": 32.0},
    "whose use_dora is False, and adapter.name is dora": {"name": "dora"},
    "an adapter of other layers (base_model.model.model.layers.0.mlp.down_proj": {"targets": ["all-linear"]},
    "no adapter_model.safetensors in it": {"path": "recipes"},
}


def test_an_adapter_begins_with_the_weights_of_another_that_fits(tmp_path):
    """One of peft's own, in its logits; each other setting is refused with what to write."""
    peft = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    theirs = get_peft_model(new_model(), peft)
    theirs.save_pretrained(tmp_path)
    own = {"name": "lora", "path": str(tmp_path), "rank": 4, "alpha": 12, "targets": ["q_proj", "v_proj"]}
    assert adapter_files.check_names(config(), AdapterSection(**own)) == []
    ours, ids = new_model(), torch.arange(12)[None]
    before = ours(input_ids=ids).logits
    insertion.add_adapter(ours, AdapterSection(**own), seed=7)
    logits = ours(input_ids=ids).logits
    assert torch.equal(logits, theirs(input_ids=ids).logits) and (logits - before).abs().max() > 1e-3
    for message, changed in OTHERS.items():
        with pytest.raises(RecipeError) as error:
            adapter_files.check_names(config(), AdapterSection(**own | changed))
        assert message in str(error.value)
    base_model.Base("org/base", None, "0").write(tmp_path)
    base_model.check_base(AdapterSection(**own), "0")
    with pytest.raises(RecipeError, match="trained on org/base with other weights"):
        base_model.check_base(AdapterSection(**own), "1")


def test_peft_is_told_of_which_revision_of_its_base_an_adapter_is():
    base = base_model.Base("org/base", "c0ffee", "0")
    settings = adapted_layers.lora_config(AdapterSection(name="lora"), new_model(), base)
    assert (settings.base_model_name_or_path, settings.revision) == ("org/base", "c0ffee")


@pytest.mark.parametrize("other", [{"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"intermediate_size": 40}])
def test_an_adapter_of_a_model_of_another_size_is_refused(run: Path, other: dict):
    adapter_files.check_fits(run / "export", config())
    with pytest.raises(RecipeError, match="not an adapter of"):
        adapter_files.check_fits(run / "export", config(**other))


def test_the_merged_model_answers_as_base_and_adapter_do(run: Path, capsys):
    merge_adapter(run, run / "merged", "as-is")
    assert "reopened" in capsys.readouterr().out
    ids = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = AutoPeftModelForCausalLM.from_pretrained(run / "export").eval()(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(run / "merged").eval()(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained(run.parent / "base").eval()(input_ids=ids).logits
    assert torch.allclose(merged, expected, atol=1e-4)
    assert (base - expected).abs().max() > 0.1, "the adapter does something"
    assert GenerationConfig.from_pretrained(run / "merged").eos_token_id == [2, 7], "it stops where the adapter does"


def test_merging_into_another_base_is_refused_and_nothing_is_written(run: Path):
    new_model(tie_word_embeddings=True).save_pretrained(run.parent / "base")
    with pytest.raises(RecipeError, match="not those that"):
        merge_adapter(run, run / "merged", "as-is")
    assert sorted(path.name for path in run.iterdir()) == ["export"]


def test_merging_what_is_no_adapter_is_refused_with_exit_code_2(tmp_path: Path):
    command = [sys.executable, "-m", "cookbook", "export", str(tmp_path), "--merged"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "no adapter there" in done.stderr and "Traceback" not in done.stderr


def test_the_record_of_the_base_is_a_digest_of_its_weights(run: Path):
    record = json.loads((run / "export" / base_model.BASE_RECORD).read_text())
    assert record["sha256"] == weights_digest(run.parent / "base")
    path = run.parent / "base" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert record["sha256"] != weights_digest(run.parent / "base")


# No code of ours: what anybody would write.
REOPEN = """
import json, sys
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file

file, *folders = sys.argv[1:]
found = load_file(file)
for folder in folders:
    saved = load_file(folder + "/adapter_model.safetensors")
    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    own = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
    own = {name.removesuffix(".weight") if "magnitude" in name else name: p for name, p in own.items()}
    with torch.no_grad():
        error = (model(input_ids=found["input_ids"]).logits - found["logits"]).abs().max()
        with model.disable_adapter():
            moved = (model(input_ids=found["input_ids"]).logits - found["logits"]).abs().max()
    print(json.dumps({
        "same names": sorted(own) == sorted(saved),
        "empty": [name for name, tensor in saved.items() if not tensor.numel()],
        "differ": [name for name in saved if not torch.equal(own[name], saved[name])],
        "error": float(error),
        "moved": float(moved),
        "tensors": len(saved),
    }))
"""


def reopened(logits: Path, *folders: Path) -> list[dict]:
    """Findings of a fresh process in the folder from which the run named its base model."""
    command = [sys.executable, "-c", REOPEN, str(logits), *map(str, folders)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(folders) :]]


PAIRS = [
    ("zero3", "lora"),
    ("fsdp2", "dora"),
    pytest.param("zero3", "dora", marks=[pytest.mark.slow, pytest.mark.thorough]),
    pytest.param("fsdp2", "lora", marks=[pytest.mark.slow, pytest.mark.thorough]),
]


@pytest.mark.parametrize(("strategy", "name"), PAIRS)
def test_a_fresh_process_computes_what_the_run_did(lab: Lab, tmp_path: Path, strategy: str, name: str):
    output, logits = tmp_path / "out", tmp_path / "logits.safetensors"
    settings = {"adapter.name": name, "adapter.rank": "4", "run.max_steps": "5", "schedule.warmup_steps": "0"}
    settings["run.output_dir"] = str(output)
    done = lab.start(strategy, settings, 2, program=("tests/logits.py", str(logits)))
    assert done.returncode == 0, done.stdout[-4000:]
    # A tensor that is not what was trained must be seen.
    shutil.copytree(output / "export", tmp_path / "changed")
    path = tmp_path / "changed" / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if "lora_B" in key)
    save_file({**tensors, key: tensors[key] * 1.1}, path, metadata={"format": "pt"})
    reread, changed = reopened(logits, output / "export", tmp_path / "changed")
    error, moved = reread["error"], reread["moved"]
    print(f"{strategy} {name}: logits within {error:.1e} of the run's; without the adapter {moved:.1e} off")
    assert json.loads((output / "run.json").read_text())["strategy"]["processes"] == 2
    assert reread["tensors"] == 7 * 2 * (3 if name == "dora" else 2)
    assert reread["same names"] and not reread["empty"] and not reread["differ"]
    assert error < 1e-5
    assert moved > 1e-2, "the adapter does something"
    assert changed["error"] > 1e-5


def test_check_knows_the_layers_of_a_model_of_which_only_the_structure_is_here(capsys):
    recipe = str(ROOT / "recipes/qwen3_30b_a3b/sft_lora.yaml")
    assert main(["check", recipe, "--set", "adapter.targets=[gate_up_proj, foo_proj]"]) == 2
    said = capsys.readouterr().err
    assert "'foo_proj', which is no linear layer of Qwen3MoeForCausalLM; it has q_proj" in said
    assert "has 'gate_up_proj'" not in said


def test_check_compares_a_saved_adapter_with_a_model_of_which_only_the_structure_is_here(tmp_path, capsys):
    """As a start does, which fetches the model first."""
    peft = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"])
    get_peft_model(new_model(), peft).save_pretrained(tmp_path)
    recipe = ["check", str(ROOT / "recipes/sums/sft.yaml"), "--set", f"adapter.path={tmp_path}"]
    settings = ["adapter.name=lora", "adapter.rank=8", "adapter.alpha=12", "adapter.targets=[q_proj, v_proj]"]
    assert main([*recipe, *(word for setting in settings for word in ("--set", setting))]) == 2
    assert "whose r is 4, and adapter.rank is 8; write adapter.rank: 4" in capsys.readouterr().err


def test_an_adapter_from_before_rslora_does_not_go_on_with_its_scale(tmp_path: Path):
    """A key that its file lacks has peft's default."""
    older = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    get_peft_model(new_model(), older).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    values = json.loads(path.read_text())
    assert values.pop("use_rslora") is LoraConfig().use_rslora is False
    path.write_text(json.dumps(values))
    asked = {"name": "lora", "rank": 4, "alpha": 8.0, "targets": ["q_proj"], "path": str(tmp_path)}
    for rslora in (False, True):
        settings = AdapterSection(**asked, rslora=rslora)
        empty = new_model()
        insertion.add_adapter(empty, settings, seed=0)
        refused = pytest.raises(RecipeError, match="whose use_rslora is False, and")
        with refused if rslora else contextlib.nullcontext():
            continued.check(empty, settings)
