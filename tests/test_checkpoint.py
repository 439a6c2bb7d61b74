"""Weights of a checkpoint become files that transformers reads, whole or not at all. pytest tests/test_checkpoint.py

What `cookbook export` makes of them: tests/test_export.py. The format: tests/test_checkpoint_format.py.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from cookbook.training.checkpoint import folder
from cookbook.training.checkpoint.folder import BrokenCheckpoint, Checkpoint
from cookbook.training.checkpoint.saver import Saver
from cookbook.training.checkpoint.tensors import StagedPiece
from cookbook.training.checkpoint.write_model import building, weights_of, write_generation_config, write_model
from cookbook.training.models.tokenizer_files import end_of_turn, train_tokenizer

TOKENIZER = train_tokenizer(["def f(x):\n    return x\n"] * 5, 300)


def model(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}))


def save(trained: PreTrainedModel, root: Path, *, without: str | None = None) -> Checkpoint:
    """As one process saves it; optimizer state lies beside the weights."""
    tensors = {name: parameter.detach() for name, parameter in trained.named_parameters()}
    state = {"parameters": {name: list(tensor.shape) for name, tensor in tensors.items()}}
    pieces = [
        StagedPiece(name, kind, 0, 0, tensor.reshape(1, -1) if kind == "weight" else torch.ones(1, tensor.numel()))
        for name, tensor in tensors.items()
        for kind in ("weight", "exp_avg")
        if name != without
    ]
    saver = Saver(
        root, rank=0, num_ranks=1, attempt="a", keep_last=2, keep_best=0, in_background=False, say=lambda _: None
    )
    saver.save(1, pieces, state)
    return folder.open_checkpoint(root / folder.folder_name(1))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_folder_gives_the_weights_back_in_the_dtype_asked_for(tmp_path: Path, tied: bool, dtype: torch.dtype):
    trained = model(tie_word_embeddings=tied)
    target = tmp_path / "export"
    with building(target) as build:
        write_model(weights_of(save(trained, tmp_path / "saved")), build, config=trained.config, dtype=dtype)
    assert {path.name for path in target.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    again = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert again.dtype == dtype and again.config.dtype == dtype
    expected = dict(trained.to(dtype).named_parameters())
    weights = dict(again.named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("shard_size", ["5GB", "4KB"])
def test_the_files_are_those_of_save_pretrained(tmp_path: Path, shard_size: str):
    trained = model()
    (tmp_path / "ours").mkdir()
    weights = weights_of(save(trained, tmp_path / "saved"))
    write_model(weights, tmp_path / "ours", config=trained.config, dtype=torch.bfloat16, shard_size=shard_size)
    trained.to(torch.bfloat16).save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
    files = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert len(files) == 3 or "model.safetensors.index.json" in files
    for name in files:
        ours, theirs = tmp_path / "ours" / name, tmp_path / "theirs" / name
        if name.endswith(".json"):
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text())
            continue
        with safe_open(ours, "pt") as own, safe_open(theirs, "pt") as other:
            assert own.metadata() == other.metadata() and sorted(own.keys()) == sorted(other.keys())
            assert all(torch.equal(own.get_tensor(key), other.get_tensor(key)) for key in other.keys())  # noqa: SIM118


def test_experts_that_are_stacked_in_memory_are_apart_in_the_files(tmp_path: Path):
    """By the way of two writes; the check of an export opens such a model as any other."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    trained = Qwen3MoeForCausalLM(config)
    (tmp_path / "ours").mkdir()
    write_model(weights_of(save(trained, tmp_path / "saved")), tmp_path / "ours", config=config, dtype=torch.float32)
    with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as file:
        assert any("experts.3." in key for key in file.keys())  # noqa: SIM118
    again = dict(Qwen3MoeForCausalLM.from_pretrained(tmp_path / "ours").named_parameters())
    assert all(torch.equal(again[name], parameter) for name, parameter in trained.named_parameters())
    assert not (tmp_path / "ours" / "whole.tmp").exists()


def test_missing_elements_are_reported_and_the_older_folder_stays(tmp_path: Path):
    target = tmp_path / "export"
    target.mkdir()
    (target / "older").touch()
    broken = save(model(), tmp_path / "saved", without="model.norm.weight")
    with (
        pytest.raises(BrokenCheckpoint, match=r"model.norm.weight: 0 of 16 elements"),
        building(target) as build,
    ):
        write_model(weights_of(broken), build, config=model().config, dtype=torch.float32)
    assert [path.name for path in target.iterdir()] == ["older"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "saved"]


def test_a_folder_takes_the_place_of_an_older_one_as_a_whole(tmp_path: Path):
    for word in ("older", "newer"):
        with building(tmp_path / "export") as build:
            (build / word).touch()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["export", "export/newer"]


def test_how_to_generate_is_taken_over_from_the_model_that_was_trained(tmp_path: Path):
    GenerationConfig(eos_token_id=[1, 2], temperature=0.5, do_sample=True).save_pretrained(tmp_path)
    write_generation_config(tmp_path / "export", like=tmp_path, end_of_turn=None)
    settings = GenerationConfig.from_pretrained(tmp_path / "export")
    assert (settings.eos_token_id, settings.temperature) == ([1, 2], 0.5)


@pytest.mark.parametrize(("own", "expected"), [(1, [1, 5]), ([1, 2], [1, 2, 5]), (5, 5)])
def test_the_saved_model_also_stops_at_the_end_of_a_turn(
    tmp_path: Path, own: int | list[int], expected: int | list[int]
):
    GenerationConfig(eos_token_id=own).save_pretrained(tmp_path)
    write_generation_config(tmp_path / "export", like=tmp_path, end_of_turn=5)
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == expected


def test_the_end_of_a_turn_is_what_the_template_writes_there():
    assert end_of_turn(TOKENIZER) == TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    plain = train_tokenizer(["a"], 300)
    plain.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert end_of_turn(plain) is None
    plain.chat_template = None
    assert end_of_turn(plain) is None
