"""The loss inside the model is the one of the full logits. pytest tests/test_models.py"""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cookbook.files import RecipeError
from cookbook.models import IGNORE_INDEX, add_loss, load_config, load_tokenizer, resolve_model
from cookbook.recipe import ModelSection, ScratchModel

SIZES = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).to(torch.float64)


def batch(lengths: list[int], labelled_from: int = 2) -> dict[str, torch.Tensor]:
    """Right-padded random samples; positions from `labelled_from` on are labels."""
    generator = torch.Generator().manual_seed(1)
    width = max(lengths)
    ids = torch.randint(0, 384, (len(lengths), width), generator=generator)
    targets = torch.full_like(ids, IGNORE_INDEX)
    for row, length in enumerate(lengths):
        targets[row, labelled_from : length - 1] = ids[row, labelled_from + 1 : length]
    return {"input_ids": ids, "position_ids": torch.arange(width).expand(len(lengths), -1), "targets": targets}


def reference(model: LlamaForCausalLM, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Full logits of the unchanged model and a plain sum."""
    logits = model(input_ids=inputs["input_ids"]).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), inputs["targets"].flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_loss_and_gradients_are_those_of_the_full_logits(tied: bool):
    plain, ours = tiny(tie_word_embeddings=tied), tiny(tie_word_embeddings=tied)
    add_loss(ours)
    inputs = batch([9, 5, 12])
    expected, found = reference(plain, inputs), ours(**inputs)
    expected.backward()
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7), name


def test_padding_is_never_seen():
    model = tiny()
    add_loss(model)
    together = batch([9, 5, 12])
    alone = 0.0
    for row, length in enumerate([9, 5, 12]):
        alone += model(**{name: tensor[row : row + 1, :length] for name, tensor in together.items()}).item()
    assert model(**together).item() == pytest.approx(alone, rel=1e-6)


def test_a_label_on_padding_would_be_noticed():
    model = tiny()
    add_loss(model)
    inputs = batch([9, 5, 12])
    right = model(**inputs).item()
    inputs["targets"][1, 8] = 3
    assert abs(model(**inputs).item() - right) > 1.0


def test_a_micro_batch_without_labels_is_a_zero_with_gradients():
    model = tiny()
    add_loss(model)
    inputs = batch([4])
    inputs["targets"].fill_(IGNORE_INDEX)
    loss = model(**inputs)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_new_model_is_built_once_and_only_its_seed_and_data_change_it(tmp_path: Path):
    model = ModelSection(from_scratch=ScratchModel(**SIZES))
    texts = ["def f(x):\n    return x\n"] * 20

    def build(seed: int, fingerprint: str) -> str:
        return resolve_model(model, seed=seed, texts=iter(texts), fingerprint=fingerprint, cache=tmp_path)

    def weights(folder: str) -> bytes:
        return (Path(folder) / "model.safetensors").read_bytes()

    first = build(1, "a")
    stamp = (Path(first) / "model.safetensors").stat().st_mtime_ns
    assert build(1, "a") == first and (Path(first) / "model.safetensors").stat().st_mtime_ns == stamp
    assert weights(build(2, "a")) != weights(first)
    assert weights(build(1, "b")) == weights(first) and build(1, "b") != first
    assert load_config(first, 64).vocab_size == SIZES["vocab_size"]
    assert [path.name for path in tmp_path.iterdir() if path.name.count(".") and path.is_dir()] == []


def test_a_new_tokenizer_gives_text_back(tmp_path: Path):
    model = ModelSection(from_scratch=ScratchModel(**SIZES))
    folder = resolve_model(model, seed=1, texts=iter(["some text"] * 5), fingerprint="x", cache=tmp_path)
    tokenizer = load_tokenizer(folder, None)
    text = "  tabs\tand ümläute, 日本語\n\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token_id != tokenizer.eos_token_id


def test_logits_that_are_changed_after_the_head_are_refused(tmp_path: Path):
    LlamaConfig(**SIZES, final_logit_softcapping=30.0).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="final_logit_softcapping"):
        load_config(str(tmp_path), 64)


def test_a_folder_without_a_model_is_one_clear_line(tmp_path: Path):
    with pytest.raises(RecipeError, match="no model there"):
        load_config(str(tmp_path), 64)


def test_more_tokens_than_positions_are_refused(tmp_path: Path):
    LlamaConfig(**SIZES, max_position_embeddings=32).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"data\.max_length is 64, but the model has 32 positions"):
        load_config(str(tmp_path), 64)


def test_a_model_that_is_no_folder_and_cannot_be_fetched_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = ModelSection(name_or_path="nobody/no-such-model")
    with pytest.raises(RecipeError, match=r"nobody/no-such-model.*not a folder, and not fetched"):
        resolve_model(model, seed=0, texts=iter([]), fingerprint="", cache=tmp_path)
