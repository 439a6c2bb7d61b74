"""Draws in training belong to the tokens of samples: dropout and noise, however these are spread.

python -m pytest -q -m "slow or not slow" tests/test_draws.py
"""

import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_data import PAD, token_set
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from benchmarks import architectures
from benchmarks.tiny_models import default_config, tiny_config, tiny_model
from cookbook.config import draws
from cookbook.config.objectives.forward import negative_log_likelihood
from cookbook.config.sections import AdapterSection, ModelSection
from cookbook.facts.packing import packing_problem
from cookbook.run.stages import has_draws
from cookbook.system.files import RecipeError
from cookbook.training.adapters.insertion import add_adapter
from cookbook.training.data import batches
from cookbook.training.data.batches import Layout, sequence_part, train_steps
from cookbook.training.models import sample_draws
from cookbook.training.models.attention import PACKED
from cookbook.training.models.efficiency import save_activations
from cookbook.training.models.loss import add_loss
from cookbook.training.models.mixers import keep_apart
from cookbook.training.models.stateful_layers import stateful_layers
from tests.oracle import draws_of

CPU = torch.device("cpu")
LENGTHS = [9, 4, 7, 12, 5, 8, 3, 6]


def dropped(name: str, words: np.ndarray, start: int, width: int, p: float) -> np.ndarray:
    layer = torch.tensor(draws.name_word(name), dtype=torch.int32)
    features = draws.feature_words(layer, start, width, CPU)
    mask = draws.dropout_mask(torch.from_numpy(words), features, draws.threshold(p))
    return mask[:, start % 2 : start % 2 + width].numpy()


@pytest.mark.parametrize("words_at_a_time", [1, 7, 2**18])
def test_the_draws_are_those_of_the_published_mixer(words_at_a_time: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(draws.WORDS_AT_A_TIME, "cpu", words_at_a_time)
    seed, place, sequence = 2**32 + 5, 2**33 + 9, 1
    words = draws.token_words(seed, place, sequence, 6)
    expected = draws_of(seed, place, sequence, 6, "a.layer", 11)
    for start, width in ((0, 11), (3, 5), (4, 2), (10, 1)):  # parts of the features, at odd borders too
        kept = dropped("a.layer", words, start, width, 0.3)
        assert (kept == (expected[:, start : start + width] < round(0.3 * 2**16))).all(), (start, width)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # compiled code has operations of its own
    assert (dropped("a.layer", words, 3, 5, 0.3) == (expected[:, 3:8] < round(0.3 * 2**16))).all()
    monkeypatch.undo()
    layer = torch.tensor(draws.name_word("a.layer"), dtype=torch.int32)
    even = draws.noise(torch.from_numpy(words), draws.feature_words(layer, 0, 11, CPU))[:, :11]
    assert np.allclose(even.numpy(), (expected + 0.5) / 2**15 - 1, atol=1e-7) and -1 < even.min() < even.max() < 1


def shares() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Masks of 2^18 values each, and those of a neighbour."""
    p, length, width = 0.1, 512, 512
    mask = dropped("layers.3.q_proj", draws.token_words(7, 1000, 0, length), 0, width, p)
    yield "feature", mask[:, :-1], mask[:, 1:]
    yield "position", mask[:-1], mask[1:]
    yield "pair of features", mask[:, :-2], mask[:, 2:]
    for name, words, layer in (
        ("sample", draws.token_words(7, 1001, 0, length), "layers.3.q_proj"),
        ("step", draws.token_words(7, 1016, 0, length), "layers.3.q_proj"),
        ("sequence", draws.token_words(7, 1000, 1, length), "layers.3.q_proj"),
        ("seed", draws.token_words(8, 1000, 0, length), "layers.3.q_proj"),
        ("layer", draws.token_words(7, 1000, 0, length), "layers.4.q_proj"),
        ("matrix", draws.token_words(7, 1000, 0, length), "layers.3.k_proj"),
    ):
        yield name, mask, dropped(layer, words, 0, width, p)


def test_neighbours_are_independent_and_the_share_is_that_asked_for():
    """The number dropped of n draws, and of n pairs those of which both are, within five standard deviations."""
    p = draws.threshold(0.1) / 2**16
    for name, first, second in shares():
        for share, mask in ((p, first), (p, second), (p * p, first & second)):
            z = (mask.sum() - share * mask.size) / np.sqrt(mask.size * share * (1 - share))
            assert abs(z) < 5, (name, z)


def test_draws_are_uniform_over_all_values():
    layer = torch.tensor(draws.name_word("a"), dtype=torch.int32)
    words = torch.from_numpy(draws.token_words(3, 4, 0, 4096))
    even = draws.noise(words, draws.feature_words(layer, 0, 1024, CPU))
    counts = np.bincount(((even.numpy().ravel() + 1) * 2**7).astype(int), minlength=256)  # of 16384 expected
    z = (((counts - 2**14) ** 2 / 2**14).sum() - 255) / np.sqrt(2 * 255)  # chi square of 255 degrees
    assert len(counts) == 256 and abs(z) < 5


def steps_of(rank: int = 0, num_ranks: int = 1, *, consumed: int = 0, **layout: Any) -> batches.StepBatch:
    given = {"micro_batch_size": 8, "packing": False, "draw_seed": 7} | layout
    whole = Layout(num_ranks=num_ranks, rank=rank, pad_id=PAD, **given)
    steps = train_steps(token_set(LENGTHS), whole, seed=3, global_batch_size=8, num_samples_consumed=consumed)
    return next(steps)


def words_by_sample(steps: list[batches.StepBatch]) -> dict[int, list[int]]:
    """The words of the tokens of each sample, by its first token."""
    by_sample = {}
    for batch in (batch for step in steps for batch in step.micro_batches):
        ids, words, lengths = (batch[key].flatten() for key in ("input_ids", "draw_words", "token_lengths"))
        begins = (
            np.cumsum([0, *batch["lengths"]])[:-1]
            if "lengths" in batch
            else range(0, ids.numel(), batch["input_ids"].shape[1])
        )
        for begin in begins[: batch["num_sequences"]]:
            length = int(lengths[begin])
            by_sample[int(ids[begin])] = words[begin : begin + length].tolist()
    return by_sample


def test_a_sample_has_the_same_words_however_the_step_is_spread():
    reference = words_by_sample([steps_of()])
    assert sorted(map(len, reference.values())) == sorted(LENGTHS)
    for layout in ({"micro_batch_size": 1}, {"micro_batch_size": 3, "packing": True}, {"micro_batch_tokens": 24}):
        layout = {"micro_batch_size": None} | layout
        for num_ranks in (1, 2, 3):
            by_sample = words_by_sample([steps_of(rank, num_ranks, **layout) for rank in range(num_ranks)])
            assert by_sample == reference, (layout, num_ranks)
    next_step = words_by_sample([steps_of(consumed=8)])
    assert not {words[0] for words in reference.values()} & {words[0] for words in next_step.values()}


def test_ranks_that_share_a_row_have_its_words_in_order():
    whole = steps_of(length_multiple=4).micro_batches[0]
    parts = [sequence_part(whole, 4, rank, group_size=None) for rank in range(4)]
    for key in ("draw_words", "token_lengths"):
        assert torch.cat([part[key] for part in parts], 1).equal(whole[key])


def test_without_something_to_draw_a_batch_has_no_words():
    assert "draw_words" not in steps_of(draw_seed=None).micro_batches[0]


def model_of(
    config: PreTrainedConfig, *, packed: bool = False, recompute: bool = False, alpha: float = 0.0
) -> PreTrainedModel:
    config = type(config)(**(config.to_dict() | {"attn_implementation": PACKED} if packed else config.to_dict()))
    if packed:
        config._attn_implementation = PACKED
    torch.manual_seed(0)
    model = tiny_model(config)
    if packed:
        keep_apart(model, stateful_layers(config))
    if recompute and model.supports_gradient_checkpointing:
        save_activations(model, selective=False, has_draws=True)
    add_loss(model)
    sample_draws.draw_for_tokens(model, alpha, 0, 1)
    # In float32 a unit of its ReLU is within a last bit of 0.
    return model.train().double() if config.model_type == "ctrl" else model.train()


def gradients(model: PreTrainedModel, step: batches.StepBatch) -> dict[str, Tensor]:
    model.zero_grad()
    for batch in step.micro_batches:
        (negative_log_likelihood(model, batch).sum() / step.num_targets).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest difference, by the largest gradient of all."""
    assert first.keys() == second.keys()
    largest = max(float(weight.abs().max()) for weight in first.values())
    return max(float((first[name] - second[name]).abs().max()) for name in first) / largest


def test_noise_of_the_embeddings_is_that_of_the_paper_in_training_alone():
    """NEFTune (Jain et al. 2023, algorithm 1): uniform in (-1, 1), times alpha / sqrt(L d), by the draws of numpy."""
    alpha, config = 5.0, tiny_config("llama")
    model, embedded = model_of(config, alpha=alpha), []
    embeddings = model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, ids, out: embedded.append(out - module.weight[ids[0]]))
    step = steps_of(micro_batch_size=8)
    whole, batch = gradients(model, step), step.micro_batches[0]
    for noise, words, lengths in zip(embedded[0], batch["draw_words"], batch["token_lengths"], strict=True):
        length, width = int(lengths[0]), noise.shape[-1]
        places = [i for i in range(8) if draws.token_words(7, i, 0, length).tolist() == words[:length].tolist()]
        even = (draws_of(7, *places, 0, length, "neftune", width) + 0.5) / 2**15 - 1
        by_hand = even * alpha / math.sqrt(length * width)
        assert np.allclose(noise[:length].detach(), by_hand, atol=1e-6) and np.abs(by_hand).max() > 0.1
    hook.remove()
    ids = batch["input_ids"]
    with sample_draws.drawn_row(batch["draw_words"], batch["token_lengths"]):
        assert (model.eval().get_input_embeddings()(ids) == embeddings.weight[ids]).all()
    for packing in (False, True):
        model = model_of(config, packed=packing, alpha=alpha)
        assert apart(whole, gradients(model, steps_of(micro_batch_size=2, packing=packing))) < 1e-5


def with_dropout(model_type: str) -> PreTrainedConfig | None:
    """A tiny configuration that drops where this type's own does by default, or can; None of one that cannot."""
    config = tiny_config(model_type)
    for key, value in default_config(model_type).to_dict().items():
        if key.endswith(("dropout", "pdrop", "dropout_prob")) and isinstance(value, float) and hasattr(config, key):
            setattr(config, key, 0.2)
    sample_draws.set_to_zero(config)
    return config if sample_draws.keys_drawn_by_model(config) else None


BY_DEFAULT = ("gpt2", "opt", "starcoder2")
"""Types whose configurations drop by default: by modules, and by functions."""
TRAINED = [name for name, row in json.loads(architectures.RESULTS.read_text())["rows"].items() if "plain" in row]


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(
            name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow, pytest.mark.thorough(turn=(i % 20, 20))]
        )
        for i, name in enumerate(TRAINED)
    ],
)
def test_a_model_s_own_dropout_is_the_same_in_any_micro_batch(model_type: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.nn.functional, "dropout", sample_draws._torch_dropout)  # and back afterwards
    config = with_dropout(model_type)
    if config is None:  # the most: this year's types drop nothing
        assert model_type not in BY_DEFAULT
        return
    model = model_of(config)
    state = torch.get_rng_state()
    whole = gradients(model, steps_of(micro_batch_size=8))
    assert torch.get_rng_state().equal(state), "something was drawn elsewhere"
    assert apart(whole, gradients(model, steps_of(micro_batch_size=1))) < 1e-5
    if model_type not in ("mpt", "nemotron_h"):  # which have the keys, and read others
        assert apart(whole, gradients(model, steps_of(micro_batch_size=8, consumed=8))) > 1e-2  # another step
    recomputed = model_of(config, recompute=True)
    assert apart(whole, gradients(recomputed, steps_of(micro_batch_size=2))) < 1e-5
    if packing_problem(config) is None:
        packed = model_of(config, packed=True)
        assert apart(whole, gradients(packed, steps_of(micro_batch_size=4, packing=True))) < 1e-5


def test_dropout_of_other_values_than_a_row_s_tokens_is_refused():
    layer = sample_draws.SampleDropout(0.1)
    layer.word, layer.width, layer.shard = torch.tensor(1, dtype=torch.int32), 4, 0
    with sample_draws.drawn_row(torch.zeros(2, 3, dtype=torch.int32)):
        assert layer(torch.ones(2, 3, 4)).view(6, 4).equal(layer(torch.ones(6, 4)))
        with pytest.raises(RecipeError, match=r"dropout of values of the shape \(5, 4\).* 6 tokens"):
            layer(torch.ones(5, 4))
    with pytest.raises(RuntimeError, match="outside of a micro-batch"):
        layer(torch.ones(6, 4))
    assert layer.eval()(torch.ones(5, 4)).equal(torch.ones(5, 4))


def test_parts_of_the_features_drop_what_the_whole_layer_drops():
    """As tensor parallel divides them, at odd borders too."""
    words, whole = torch.from_numpy(draws.token_words(1, 2, 0, 6).reshape(2, 3)), torch.ones(2, 3, 15)

    def layer(shard: int) -> sample_draws.SampleDropout:
        made = sample_draws.SampleDropout(0.5)
        made.word, made.width, made.shard = torch.tensor(9, dtype=torch.int32), 15, shard
        return made

    with sample_draws.drawn_row(words):
        expected = layer(0)(whole)
        assert torch.cat([layer(shard)(part) for shard, part in enumerate(whole.split(5, -1))], -1).equal(expected)
        forgotten = torch.cat([layer(0)(part) for part in whole.split(5, -1)], -1)
    assert not forgotten.equal(expected) and 0 < float((expected == 0).float().mean()) < 1


def test_compiled_dropout_drops_the_same():
    words, hidden = torch.from_numpy(draws.token_words(1, 2, 0, 6).reshape(2, 3)), torch.randn(2, 3, 16)
    layer = sample_draws.SampleDropout(0.3)
    layer.word, layer.width, layer.shard = torch.tensor(9, dtype=torch.int32), 16, 0
    with sample_draws.drawn_row(words):
        assert torch.compile(layer, backend="aot_eager", fullgraph=True)(hidden).equal(layer(hidden))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"adapter": {"name": "lora", "dropout": 0.0}}, False),
        ({"adapter": {"name": "lora", "dropout": 0.01}}, True),
        ({"model": {"neftune_alpha": 5.0}}, True),
    ],
)
def test_a_batch_has_words_if_the_recipe_asks_for_draws(settings: dict, expected: bool):
    recipe = SimpleNamespace(
        model=ModelSection(name_or_path="a", **settings.get("model", {})),
        adapter=AdapterSection(**settings["adapter"]) if "adapter" in settings else None,
    )
    assert has_draws(recipe, LlamaConfig(attention_dropout=0.0)) is expected


def test_what_kernels_or_whole_layers_draw_is_off_with_a_note():
    config = AutoConfig.for_model("gpt2")
    (note,) = sample_draws.notes(config, is_compiled=False)
    assert "gpt2 has attn_pdrop 0.1: off in this run" in note
    assert sample_draws.set_to_zero(config) and sample_draws.drawn_parts(config).keys() == {"embd_pdrop", "resid_pdrop"}
    assert not sample_draws.set_to_zero(config) and sample_draws.notes(config, is_compiled=False) == []
    with pytest.raises(RecipeError, match=r"model.compile is true, and the code of gpt2 drops values"):
        sample_draws.notes(config, is_compiled=True)
    assert sample_draws.notes(default_config("llama"), is_compiled=True) == []


def losses_after_training(seed: int, *, by_torch: bool, scale: float = 1.0) -> float:
    """The mean loss of the last ten of forty steps of a small adapter whose inputs lose a third."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.3,
        )
    )
    add_loss(model)
    add_adapter(model, AdapterSection(name="lora", rank=4, alpha=8.0 * scale, dropout=1 / 3), seed=0)
    if by_torch:
        torch.manual_seed(1000 + seed)
    else:
        sample_draws.draw_for_tokens(model, 0.0, 0, 1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    losses = []
    for number in range(40):
        step = steps_of(consumed=8 * number, draw_seed=None if by_torch else seed)
        loss = negative_log_likelihood(model.train(), step.micro_batches[0]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses[-10:]))


@pytest.mark.slow
def test_a_run_learns_as_with_torch_s_dropout():
    """The means over twelve seeds each lie within three of their standard errors; another alpha does not."""
    ours, torchs, others = (
        np.array([losses_after_training(seed, by_torch=by_torch, scale=scale) for seed in range(12)])
        for by_torch, scale in ((False, 1.0), (True, 1.0), (False, 0.5))
    )

    def errors_apart(first: np.ndarray, second: np.ndarray) -> float:
        return abs(first.mean() - second.mean()) / np.sqrt((first.var(ddof=1) + second.var(ddof=1)) / 12)

    assert ours.std() > 0
    assert errors_apart(ours, torchs) < 3, (ours.mean(), torchs.mean(), ours.std(), torchs.std())
    assert errors_apart(ours, others) > 6


def test_a_small_probability_is_not_taken_for_none():
    assert [draws.threshold(p) for p in (0.0, 1e-9, 0.1, 1 - 1e-9)] == [0, 1, 6554, 2**16 - 1]


def test_samples_that_pass_a_layer_one_by_one_are_at_the_same_call_of_it():
    """As mixers run them: their dropouts are those of the layer, and the next one is the call after."""
    words = torch.arange(5, dtype=torch.int32)[None]
    with sample_draws.drawn_row(words):
        sample_draws._PLACE.layer, sample_draws._PLACE.count = "layers.1", 2
        for part in sample_draws.rows_of_parts((2, 3)):
            with part:
                assert (sample_draws._PLACE.layer, sample_draws._PLACE.count) == ("layers.1", 2)
                sample_draws._PLACE.count += 1
        assert (sample_draws._PLACE.layer, sample_draws._PLACE.count) == ("layers.1", 3)
        assert sample_draws._NOW.tokens is words


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_s_dropout_is_the_same_in_any_micro_batch(kind: str):
    torch.manual_seed(0)
    model = tiny_model(tiny_config("llama"))
    add_loss(model)
    add_adapter(model, AdapterSection(name=kind, rank=4, alpha=8, dropout=0.3), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # as after some steps
            torch.nn.init.normal_(parameter, std=0.1)
    sample_draws.draw_for_tokens(model.train(), 0.0, 0, 1)
    state = torch.get_rng_state()
    whole = gradients(model, steps_of(micro_batch_size=8))
    assert apart(whole, gradients(model, steps_of(micro_batch_size=1))) < 1e-5
    assert apart(whole, gradients(model, steps_of(micro_batch_size=8, consumed=8))) > 1e-2  # another step
    assert torch.get_rng_state().equal(state)
