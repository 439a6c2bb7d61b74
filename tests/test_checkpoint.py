"""A trained model becomes a Hugging Face folder, whole or not at all. pytest tests/test_checkpoint.py"""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from cookbook import checkpoint
from cookbook.models import end_of_turn, train_tokenizer

TOKENIZER = train_tokenizer(["def f(x):\n    return x\n"] * 5, 300)


def model(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}))


def export(
    trained: LlamaForCausalLM,
    folder: Path,
    like: Path,
    dtype: torch.dtype = torch.float32,
    end_of_turn: int | None = None,
) -> None:
    parameters = [(name, parameter.detach().float()) for name, parameter in trained.named_parameters()]

    def write(weights: dict[str, torch.Tensor], build: Path) -> None:
        checkpoint.write_model(weights, build, config=trained.config)
        checkpoint.write_generation_config(build, like=like, end_of_turn=end_of_turn)

    checkpoint.export(parameters, write, TOKENIZER, folder, dtype=dtype, is_main=True)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_folder_gives_the_weights_back_in_the_dtype_asked_for(tmp_path: Path, tied: bool, dtype: torch.dtype):
    trained = model(tie_word_embeddings=tied)
    export(trained, tmp_path / "export", tmp_path, dtype)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert again.dtype == dtype and again.config.dtype == dtype
    expected = dict(trained.to(dtype).named_parameters())
    found = dict(again.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_how_to_generate_is_taken_over_from_the_model_that_was_trained(tmp_path: Path):
    GenerationConfig(eos_token_id=[1, 2], temperature=0.5, do_sample=True).save_pretrained(tmp_path)
    export(model(), tmp_path / "export", tmp_path)
    found = GenerationConfig.from_pretrained(tmp_path / "export")
    assert (found.eos_token_id, found.temperature) == ([1, 2], 0.5)


@pytest.mark.parametrize(("own", "expected"), [(1, [1, 5]), ([1, 2], [1, 2, 5]), (5, 5)])
def test_the_saved_model_also_stops_at_the_end_of_a_turn(
    tmp_path: Path, own: int | list[int], expected: int | list[int]
):
    GenerationConfig(eos_token_id=own).save_pretrained(tmp_path)
    export(model(), tmp_path / "export", tmp_path, end_of_turn=5)
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == expected


def test_the_end_of_a_turn_is_what_the_template_writes_there():
    assert end_of_turn(TOKENIZER) == TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    plain = train_tokenizer(["a"], 300)
    plain.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert end_of_turn(plain) is None
    plain.chat_template = None
    assert end_of_turn(plain) is None


def test_an_empty_weight_is_refused_and_the_older_export_stays(tmp_path: Path):
    trained = model()
    export(trained, tmp_path / "export", tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()}
    broken = [(name, parameter.detach()[:0]) for name, parameter in trained.named_parameters()]
    with pytest.raises(RuntimeError, match="came back empty"):
        checkpoint.export(broken, lambda *_: None, TOKENIZER, tmp_path / "export", dtype=torch.float32, is_main=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_processes_that_do_not_write_still_gather(tmp_path: Path):
    gathered = []
    parameters = ((name, gathered.append(name)) for name in ("a", "b"))
    write = partial(checkpoint.write_model, config=model().config)
    checkpoint.export(parameters, write, TOKENIZER, tmp_path / "export", dtype=torch.float32, is_main=False)
    assert gathered == ["a", "b"] and not list(tmp_path.iterdir())
