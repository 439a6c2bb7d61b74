"""Adapters of peft's own: each key of adapter_config.json is followed, or refused by name. Run:

python -m pytest -q tests/test_saved_adapters.py
"""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    BOFTConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cookbook.commands.shared.find_model import name_of_base
from cookbook.config.sections import AdapterSection
from cookbook.system.files import RecipeError
from cookbook.training.adapters import adapter_files, insertion
from cookbook.training.adapters.base_model import Base
from cookbook.training.adapters.saved_settings import WRITTEN
from cookbook.training.models.tokenizer_files import train_tokenizer
from tests.conftest import ROOT

IDS = torch.arange(3, 40)[None]
PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
OWN = {"name": "lora", "rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
OTHERS: dict[str, list[Any]] = {
    "task_type": ["SEQ_CLS", "FEATURE_EXTRACTION"],
    "peft_type": ["VERA"],
    "auto_mapping": [{"base_model_class": "LlamaForCausalLM"}],
    "peft_version": ["0.1"],
    "base_model_name_or_path": ["another"],
    "revision": ["another"],
    "inference_mode": [True],
    "r": [2],
    "target_modules": [["q_proj"], r".*\.(q|v)_proj"],
    "exclude_modules": [["model.layers.0.self_attn.q_proj"]],
    "lora_alpha": [16],
    "lora_dropout": [0.5],
    "fan_in_fan_out": [True],
    "bias": ["all", "lora_only"],
    "use_rslora": [True],
    "modules_to_save": [["lm_head"]],
    "init_lora_weights": [
        *(False, "gaussian", "eva", "olora", "pissa", "pissa_niter_2", "corda", "loftq", "orthogonal", "mica"),
        "lora_ga",
    ],
    "layers_to_transform": [[0]],
    "layers_pattern": ["layers"],
    "rank_pattern": [{"q_proj": 8}],
    "alpha_pattern": [{"q_proj": 16}],
    "megatron_config": [{"hidden_size": 8}],
    "megatron_core": ["another.core"],
    "trainable_token_indices": [[5, 6], [9, 5, 6], {"embed_tokens": [5, 30], "lm_head": [30, 7]}],
    "loftq_config": [{"loftq_bits": 8}],
    "eva_config": [{"rho": 1.0}],
    "corda_config": [{"corda_method": "kpm"}],
    "lora_ga_config": [{"direction": "random"}],
    "use_dora": [True],
    "velora_config": [{"num_groups": 8}],
    "alora_invocation_tokens": [[5, 6]],
    "use_qalora": [True],
    "qalora_group_size": [8],
    "monteclora_config": [{}],
    "layer_replication": [[[0, 2], [1, 2]]],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "lora_bias": [True],
    "target_parameters": [["mlp.gate_proj.weight"]],
    "use_bdlora": [{"target_modules_bd_b": ["q_proj", "v_proj"], "nblocks": 2}],
    "arrow_config": [{"top_k": 2}],
    "kasa_config": [{"beta": 1e-3}],
    "ensure_weight_tying": [True],
}
"""Values other than peft's default for each key of its configuration."""
CASES = [pytest.param(key, value, id=f"{key}-{value}") for key, values in OTHERS.items() for value in values]


def config() -> LlamaConfig:
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**sizes, **heads, tie_word_embeddings=False)


def base() -> LlamaForCausalLM:
    # Each opening draws numbers of its own, as each process does.
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config()).eval()
    torch.set_rng_state(state)
    return model


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def save_trained(folder: Path, model: Any = None, **settings: Any) -> torch.Tensor:
    """Save an adapter whose weights were moved, as training would; returns the logits with it."""
    model = get_peft_model(base() if model is None else model, LoraConfig(**PLAIN | settings))
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "trainable_tokens" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=chance))
    model.save_pretrained(folder)
    return logits(model)


def test_each_key_of_peft_is_tried():
    assert {field.name for field in dataclasses.fields(LoraConfig)} == OTHERS.keys()


@pytest.mark.filterwarnings("ignore")  # peft's, of settings that it takes back
@pytest.mark.parametrize(("key", "value"), CASES)
def test_an_adapter_is_refused_or_computes_what_it_was_trained_to(tmp_path: Path, key: str, value: Any):
    try:
        wanted = save_trained(tmp_path, **{key: value})
    except Exception:  # peft cannot make it from these values alone: a plain one with the key written into its file
        wanted = save_trained(tmp_path)
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert (logits(base()) - wanted).abs().max() > 1e-3, "the adapter does something"
    settings = AdapterSection(**OWN, path=str(tmp_path))
    for way, check, opened in (
        (
            "a run",
            lambda: adapter_files.check_names(config(), settings),
            lambda ours: insertion.add_adapter(ours, settings, seed=7),
        ),
        (
            "evaluate",
            lambda: adapter_files.check_fits(tmp_path, config()),
            lambda ours: insertion.open_adapter(ours, tmp_path),
        ),
        (
            "merge",
            lambda: adapter_files.check_fits(tmp_path, config(), read=WRITTEN),
            lambda ours: adapter_files.open_beside(ours, tmp_path),
        ),
    ):
        if (refusal := refused(check)) is not None:
            assert re.search(rf"{key}|layers\.\d|modules_to_save", refusal), f"{way}: {refusal}"
            continue
        opened(ours := base())
        assert torch.allclose(logits(ours), wanted, atol=1e-5), way


@pytest.mark.parametrize(
    "settings",
    [
        IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        LoHaConfig(r=4, target_modules=["q_proj"]),
        OFTConfig(r=0, oft_block_size=8, target_modules=["q_proj"]),
    ],
    ids=lambda settings: settings.peft_type.value,
)
def test_an_adapter_of_another_kind_than_lora_is_evaluated_as_peft_computes_it(tmp_path: Path, settings: PeftConfig):
    theirs = get_peft_model(base(), settings)
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=chance))
    theirs.save_pretrained(tmp_path)
    adapter_files.check_fits(tmp_path, config())
    insertion.open_adapter(ours := base(), tmp_path)
    assert torch.allclose(logits(ours), logits(theirs), atol=1e-5)
    assert (logits(base()) - logits(theirs)).abs().max() > 1e-3, "the adapter does something"


@pytest.mark.parametrize(
    "settings", [BOFTConfig(target_modules=["q_proj"]), VeraConfig(r=4, target_modules=["q_proj"])]
)
def test_an_adapter_that_peft_cannot_open_without_data_is_refused_for_that(tmp_path: Path, settings: PeftConfig):
    """It is one of the base; an adapter that can be opened, and is of another base, is refused for that."""
    get_peft_model(base(), settings).save_pretrained(tmp_path / "own")
    refusal = refused(lambda: adapter_files.check_fits(tmp_path / "own", config())) or ""
    assert f"cannot put a {settings.peft_type.value} adapter" in refusal and "merge_and_unload" in refusal
    assert "not an adapter of" not in refusal
    get_peft_model(base(), LoHaConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path / "other")
    smaller = LlamaConfig(**config().to_dict() | {"num_hidden_layers": 1})
    assert "not an adapter of" in (refused(lambda: adapter_files.check_fits(tmp_path / "other", smaller)) or "")
    names = json.loads((tmp_path / "other/adapter_config.json").read_text()) | {"target_modules": ["query"]}
    (tmp_path / "other/adapter_config.json").write_text(json.dumps(names))
    assert "not an adapter of" in (refused(lambda: adapter_files.check_fits(tmp_path / "other", config())) or "")


def refused(check: Callable[[], object]) -> str | None:
    try:
        check()
    except RecipeError as error:
        return str(error)
    return None


def test_an_adapter_with_the_names_of_a_whole_model_is_that_of_its_language_part(tmp_path: Path):
    wanted = save_trained(tmp_path, target_modules=["q_proj", "down_proj"])
    path = tmp_path / "adapter_model.safetensors"
    whole = {name.replace(".model.layers.", ".model.language_model.layers."): t for name, t in load_file(path).items()}
    assert whole.keys().isdisjoint(load_file(path)), "each name was changed"
    save_file(whole, path)
    insertion.open_adapter(ours := base(), tmp_path)
    assert torch.equal(logits(ours), wanted)


def test_an_adapter_in_a_pickle_is_refused_with_a_way_that_peft_takes(tmp_path: Path):
    """As older versions of peft wrote it."""
    save_trained(tmp_path)
    base().save_pretrained(tmp_path / "base")
    weights, pickle = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_model.bin"
    torch.save(load_file(weights), pickle)
    weights.unlink()
    with pytest.raises(RecipeError, match=r"adapter_model.bin is not read; open the adapter with peft, whose save_pre"):
        adapter_files.check_fits(tmp_path, config())
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path)
    theirs.save_pretrained(tmp_path)
    adapter_files.check_fits(tmp_path, config())
    saved = torch.load(pickle)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in load_file(weights).items())


@pytest.mark.parametrize("name", [None, ""])
def test_an_adapter_that_names_no_base_is_told_to_or_has_it_from_its_record(tmp_path: Path, name: str | None):
    """peft writes no name, or an empty one, if it was given a model that was built in memory."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
    with pytest.raises(RecipeError, match=r"adapter_config.json: names no base model; write the name or the folder"):
        name_of_base(tmp_path)
    Base("org/base", None, "0").write(tmp_path)
    assert name_of_base(tmp_path) == "org/base"
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/other"}))
    assert name_of_base(tmp_path) == "org/other"


def test_the_keys_that_say_nothing_are_taken(tmp_path: Path):
    """An adapter as others write it, with what an older peft had and what a newer one leaves off."""
    wanted = save_trained(tmp_path, bias="lora_only", lora_dropout=0.1, init_lora_weights="gaussian")
    path = tmp_path / "adapter_config.json"
    values = {
        key: value for key, value in json.loads(path.read_text()).items() if key not in ("use_dora", "kasa_config")
    }
    foreign = {
        "enable_lora": None,
        "merge_weights": False,
        "use_something_new": False,
        "auto_mapping": {"unsloth": True},
    }
    path.write_text(json.dumps(values | foreign))
    settings, ours = AdapterSection(**OWN, path=str(tmp_path)), base()
    adapter_files.check_names(config(), settings)
    insertion.add_adapter(ours, settings, seed=7)
    assert torch.equal(logits(ours), wanted)
    path.write_text(json.dumps(values | {"use_something_new": [1]}))
    for check in (
        lambda: adapter_files.check_names(config(), settings),
        lambda: adapter_files.check_fits(tmp_path, config()),
    ):
        with pytest.raises(RecipeError, match=r"use_something_new: \[1\], which peft .* does not know; .* take it out"):
            check()


@pytest.mark.parametrize("begun", ["pissa", pytest.param("olora", marks=pytest.mark.slow)])
def test_what_the_page_advises_for_an_adapter_of_another_base_works(tmp_path: Path, monkeypatch, begun: str):
    """The snippets of docs/adapters.md, run."""
    monkeypatch.chdir(tmp_path)
    base().save_pretrained("base")
    train_tokenizer(["a text\n"] * 5, 300).save_pretrained("base")
    wanted = save_trained(tmp_path / "theirs", init_lora_weights=begun)
    page = (ROOT / "docs/adapters.md").read_text()
    convert, merge = (text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if '"theirs"' in text)
    names = {"name": "base", "PeftConfig": PeftConfig, "PeftModel": PeftModel, "get_peft_model": get_peft_model}
    names |= {"AutoModelForCausalLM": AutoModelForCausalLM, "AutoTokenizer": AutoTokenizer}
    exec(convert, dict(names))
    exec(merge, dict(names))
    settings, ours = AdapterSection(**OWN | {"rank": 8, "alpha": 16}, path="converted"), base()
    adapter_files.check_names(config(), settings)
    insertion.add_adapter(ours, settings, seed=7)
    assert torch.allclose(logits(ours), wanted, atol=1e-5)
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained("merged")), wanted, atol=1e-5)
    assert AutoTokenizer.from_pretrained("merged").get_vocab()
