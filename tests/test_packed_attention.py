"""In a packed row each sample attends to itself only. python -m pytest tests/test_packed_attention.py"""

import contextlib
import inspect
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from target_grid import from_grid, packed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_flash_attention_utils import _process_flash_attention_kwargs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks import tiny_models
from cookbook.commands.shared import labels
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.sections import ModelSection
from cookbook.facts import language_part, tiny_types
from cookbook.facts.language_part import language_config
from cookbook.facts.model_types import TYPES, look_up
from cookbook.facts.packing import Packing, decide, known_config, packing_problem
from cookbook.system import optional
from cookbook.system.files import RecipeError
from cookbook.training.models import attention, efficiency, mixers
from cookbook.training.models import stateful_layers as stateful
from cookbook.training.models.attention import PACKED, Kind, Lengths, Segments, _varlen, attend
from cookbook.training.models.efficiency import save_activations
from cookbook.training.models.language_model import load_config, load_model
from cookbook.training.models.loss import add_loss
from cookbook.training.models.mixers import is_kept_apart, keep_apart
from cookbook.training.models.stateful_layers import check_padded, stateful_layers, try_two_samples
from cookbook.training.models.structure import find_config, not_served
from tests.needs import lacked_types
from tests.turns import FAMILIES, others_by_turn

PACKABLE = [name for name, facts in TYPES.items() if facts.packed is True]
LENGTHS = [7, 1, 12, 3, 9, 5, 2, 8]
WINDOW = 4
"""Tokens, fewer than most samples have."""
# Of the benchmark's tiny models: sizes that suit one another, and each kind of layer.
CHANGES: dict[str, dict] = {
    "bailing_hybrid": {"num_key_value_heads": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 8, "num_experts_per_tok": 2},
    "git": {"vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {
        "num_key_value_heads": 4,
        "num_experts_per_tok": 2,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mellum": {"layer_types": ["sliding_attention", "full_attention"]},
    "minicpm3": {"num_key_value_heads": 4, "head_dim": 8},
    "qwen2": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    "xlm": {"emb_dim": 64},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 2},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 2,
        "mamba_ngroups": 1,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}


def config_of(model_type: str) -> PreTrainedConfig:
    """A tiny model's, with a window that is less than a sample if the architecture has one."""
    with pytest.MonkeyPatch.context() as patch:
        if model_type in CHANGES:
            patch.setitem(TYPES, model_type, replace(look_up(model_type), tiny=CHANGES[model_type]))
        patch.setitem(tiny_types.SIZES, "sliding_window", WINDOW)
        return tiny_models.tiny_config(model_type)


def tiny(model_type: str, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)  # some draw weights of one dimension
    model = AutoModelForCausalLM.from_config(config_of(model_type), attn_implementation=attention, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1 or not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)  # large enough for attention to matter
    return model


def for_packing(model_type: str) -> PreTrainedModel:
    model = tiny(model_type, PACKED)
    keep_apart(model, stateful_layers(model.config))
    return model


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (length + 1,), generator=generator) for length in LENGTHS]


def packed_row() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.cat([sample[:-1] for sample in samples()])[None],
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
        **from_grid(torch.cat([sample[1:] for sample in samples()])[None]),
        **packed(LENGTHS),
    }


def segments() -> Segments:
    return Segments(packed(LENGTHS)["offsets"], max(LENGTHS), Lengths(tuple(LENGTHS)))


def alone(model: PreTrainedModel) -> torch.Tensor:
    """Each sample by itself through the unchanged model, and its full logits."""
    nll = []
    for sample in samples():
        logits = model(input_ids=sample[None, :-1], use_cache=False).logits[0]
        nll.append(torch.nn.functional.cross_entropy(logits, sample[1:], reduction="none"))
    return torch.cat(nll)


def distance(model: PreTrainedModel, other: PreTrainedModel) -> float:
    """Error of the gradients, relative to the largest."""
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True)]
    assert all((p is None) == (q is None) for p, q in pairs)
    largest = max(float(p.abs().max()) for p, _ in pairs if p is not None)
    return max(float((p - q).abs().max()) for p, q in pairs if p is not None) / largest


def loss_and_gradients(model: PreTrainedModel, row: dict) -> torch.Tensor:
    model.zero_grad()
    losses = model(**row)
    losses.mean().backward()
    return losses.detach()


@pytest.mark.parametrize("model_type", others_by_turn(PACKABLE, FAMILIES))
def test_each_sample_alone_gives_what_the_packed_row_gives(model_type: str):
    """Losses and gradients, compared with transformers' own model and attention; padded rows through ours too."""
    plain, ours = tiny(model_type, "eager"), for_packing(model_type)
    assert TYPES[model_type].has_state == is_kept_apart(ours)
    expected = alone(plain.train())
    expected.mean().backward()
    add_loss(ours.train())
    row = packed_row()
    results = loss_and_gradients(ours, row)
    assert (results - expected).abs().max() < 1e-5 and abs(results.mean() - expected.mean()) < 2e-6
    assert distance(plain, ours) < 2e-5
    width = max(LENGTHS)
    ids, targets = torch.zeros(len(LENGTHS), width, dtype=torch.int64), torch.full((len(LENGTHS), width), -100)
    for number, sample in enumerate(samples()):
        ids[number, : len(sample) - 1], targets[number, : len(sample) - 1] = sample[:-1], sample[1:]
    with torch.no_grad():
        assert (ours(input_ids=ids, **from_grid(targets)) - expected).abs().max() < 1e-5
        row |= packed([sum(LENGTHS)])
        assert (ours(**row) - expected).abs().max() > 0.02, "samples that see one another would not be noticed"


@pytest.mark.parametrize("kind", ["checkpointed", "selective"])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text", "zamba2"])
def test_layers_that_are_computed_again_see_the_same_samples(model_type: str, kind: str):
    """As in a pipeline, another row has come in between."""
    plain, ours = for_packing(model_type), for_packing(model_type)
    save_activations(ours, selective=kind == "selective")
    for model in (plain, ours):
        add_loss(model.train())
    losses = [model(**packed_row()).mean() for model in (plain, ours)]
    with torch.no_grad():
        ours(**packed_row() | packed([sum(LENGTHS) - 1, 1]))
    for loss in losses:
        loss.backward()
    assert distance(plain, ours) < 2e-6


def test_layers_that_would_be_computed_again_without_the_samples_are_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(efficiency, "is_kept_apart", lambda model: False)
    with pytest.raises((AssertionError, CheckpointError)):
        test_layers_that_are_computed_again_see_the_same_samples("qwen3_5_text", "checkpointed")


def test_deepspeed_gathers_a_layer_with_a_state_once_and_another_by_its_modules():
    """By its own list: ranks with other numbers of samples would else gather another number of times, and wait."""
    from deepspeed.utils import get_z3_leaf_modules

    model = for_packing("lfm2_moe")
    assert [hasattr(layer, "conv") for layer in model.model.layers] == [True, False]
    assert get_z3_leaf_modules(model) == [model.model.layers[0]]


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "nemotron_h", "lfm2", "rwkv"])
def test_a_state_that_runs_on_into_the_next_sample_would_be_noticed(model_type: str):
    plain, ours = tiny(model_type, "eager"), tiny(model_type, PACKED)
    add_loss(ours)
    assert (ours(**packed_row()) - alone(plain)).abs().max() > 0.02


class Kernel:
    """Stands in for causal_conv1d's function, which takes the number of each token's sample."""

    def __init__(self, kind: str = "right") -> None:
        self.kind, self.rows = kind, list[int]()

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        seq_idx: torch.Tensor | None = None,
        **others: object,
    ) -> torch.Tensor:
        self.rows.append(x.shape[-1])
        if self.kind == "fails" and seq_idx is not None:
            raise ValueError("can't keep packed sequences apart")
        whole = self.convolve(x, weight, None)
        apart = whole if self.kind == "deaf" else self.convolve(x, weight, seq_idx)
        # The last has the right values, and gradients of tokens of other samples.
        return apart + (whole - whole.detach()) if self.kind == "wrong gradients" and seq_idx is not None else apart

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
        width, length = weight.shape[-1], x.shape[-1]
        result = torch.zeros_like(x)
        for i in range(width):
            part = torch.nn.functional.pad(x, (width - 1, 0))[..., i : i + length]
            if seq_idx is not None:
                numbers = torch.nn.functional.pad(seq_idx, (width - 1, 0), value=-1)[:, i : i + length]
                part = part * (numbers == seq_idx)[:, None]
            result = result + part * weight[:, i : i + 1]
        return result


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """As where a recipe names causal_conv1d in model.kernels."""
    function = Kernel(request.param)
    monkeypatch.setattr(lfm2, "causal_conv1d_fn", function)
    monkeypatch.setattr(optional, "_named", {"causal_conv1d"})
    return function


@pytest.mark.parametrize("kernel", ["right"], indirect=True)
def test_a_layer_whose_kernels_are_told_of_the_samples_runs_once_a_row(kernel: Kernel, monkeypatch: pytest.MonkeyPatch):
    plain, ours, again = tiny("lfm2", "eager"), for_packing("lfm2"), for_packing("lfm2")
    save_activations(again, selective=False)
    expected = alone(plain.train())
    expected.mean().backward()
    for model in (ours, again):
        assert is_kept_apart(add_loss(model.train()) or model)
        kernel.rows.clear()
        results = model(**packed_row())
        assert set(kernel.rows) == {sum(LENGTHS)} and (results - expected).abs().max() < 1e-5
        with torch.no_grad():
            model(**packed_row() | packed([sum(LENGTHS) - 1, 1]))
        results.mean().backward()
        assert distance(plain, model) < 2e-5
    monkeypatch.setattr(optional, "_named", set())
    assert stateful_layers(ours.config) == {lfm2.Lfm2ShortConv: False}, "nothing is tried that the recipe does not name"


@pytest.mark.parametrize("kernel", ["deaf", "fails", "wrong gradients"], indirect=True)
def test_a_layer_whose_kernels_mix_samples_all_the_same_runs_on_each_alone(kernel: Kernel):
    ours = for_packing("lfm2")
    assert stateful_layers(ours.config) == {lfm2.Lfm2ShortConv: False}
    add_loss(ours)
    kernel.rows.clear()
    assert (ours(**packed_row()) - alone(tiny("lfm2", "eager"))).abs().max() < 1e-5
    assert kernel.rows[: len(LENGTHS)] == LENGTHS


class Recurrent(torch.nn.Module):
    """A layer with a state as no transformers has it: no name of argument, class or attribute is one of theirs."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner(values).cumsum(1)


def with_recurrence(monkeypatch: pytest.MonkeyPatch, layer: type[torch.nn.Module] = Recurrent) -> PreTrainedConfig:
    """The configuration of a Llama whose layers multiply in such a layer."""
    config, made = config_of("llama"), LlamaDecoderLayer.__init__

    def make(self: LlamaDecoderLayer, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)
        self.mlp = layer(self.mlp)

    monkeypatch.setattr(LlamaDecoderLayer, "__init__", make)
    return config


def test_a_layer_with_a_state_is_found_by_what_it_does(monkeypatch: pytest.MonkeyPatch):
    assert stateful_layers(config_of("llama")) == {}
    assert stateful_layers(with_recurrence(monkeypatch)) == {Recurrent: False}


class Told(torch.nn.Module):
    """A layer whose kernel is told where samples begin."""

    def forward(
        self, states: Any, mask: Any = None, cu_seq_lens_q: Any = None, seq_idx: Any = None, **kwargs: Any
    ) -> Any:
        return states, mask, cu_seq_lens_q, seq_idx, kwargs


def test_a_layer_whose_kernel_knows_of_samples_runs_once_and_is_told_where_each_begins():
    """By the names that transformers has for it, and without keywords that its kernel may not take."""
    model: Any = torch.nn.Sequential(Told())
    keep_apart(model, {Told: True})
    assert is_kept_apart(model) and not is_kept_apart(torch.nn.Sequential(Told()))
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    with mixers.packed_row((2, 3), offsets):
        states, mask, begins, numbers, others = model[0]("states", mask="mask", unknown=1)
    assert (states, mask, others) == ("states", "mask", {}) and begins is offsets
    assert numbers.tolist() == [[0, 0, 1, 1, 1]] and numbers.dtype == torch.int32
    with mixers.packed_row((5,), offsets[:2]):
        assert model[0]("states", "mask", unknown=1) == ("states", "mask", None, None, {}), (
            "one sample is no row of them"
        )


def test_a_type_with_a_state_of_which_no_layer_is_found_does_not_start(monkeypatch: pytest.MonkeyPatch):
    """As under a transformers that keeps the samples apart in a way that we do not know, or hides the layer."""
    config = config_of("lfm2")
    monkeypatch.setattr(mixers, "_each_alone", lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs))
    with pytest.raises(RecipeError, match=r"lfm2 under transformers .* the first sample .* write data.packing: false"):
        stateful_layers(config)
    monkeypatch.setattr(stateful, "_mixing_layers", lambda model: frozenset())
    with pytest.raises(RecipeError, match=r"carry a state along a row, and none was found; write data.packing: false"):
        stateful_layers(config)
    assert stateful_layers(config_of("llama")) == {}


def test_a_model_of_which_nothing_can_be_tried_does_not_start(monkeypatch: pytest.MonkeyPatch):
    class Silent(Recurrent):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values * torch.nan

    with pytest.raises(RecipeError, match=r"write data.packing: false"):
        stateful_layers(with_recurrence(monkeypatch, Silent))

    class Broken(Recurrent):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            raise KeyError("past_key_values")

    with pytest.raises(RecipeError, match=r"no small model of it can be tried: KeyError: 'past_key_values'; write"):
        stateful_layers(with_recurrence(monkeypatch, Broken))


@contextlib.contextmanager
def lost(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """As under a transformers whose layers do not hand on this argument, or whose configurations lack these keys."""
    if name == "SCALES":
        monkeypatch.setattr(language_part, name, ())
        yield
        return

    def without(*args: object, **kwargs: object) -> object:
        kwargs.pop(name, None)
        return attend(*args, **kwargs)

    monkeypatch.setattr(stateful, "attend", without)
    AttentionInterface.register(PACKED, without)
    yield
    AttentionInterface.register(PACKED, attend)


PARTS = {"mistral": "sliding_window", "gemma2": "softcap", "gpt_oss": "s_aux", "cohere": "SCALES"}


@pytest.mark.parametrize("model_type", PARTS)
def test_a_model_that_loses_a_part_of_its_attention_or_logits_does_not_start(model_type, monkeypatch):
    config = config_of(model_type)
    stateful_layers(config)
    with (
        lost(monkeypatch, PARTS[model_type]),
        pytest.raises(RecipeError, match=r"attention or logits here are not the"),
    ):
        stateful_layers(config)


def test_padded_rows_are_tried_under_a_version_that_the_type_was_not_measured_with(monkeypatch: pytest.MonkeyPatch):
    def measured_with(version: str) -> None:
        monkeypatch.setattr(stateful, "look_up", lambda name: replace(TYPES[name], transformers=version))

    config = config_of("cohere")
    with lost(monkeypatch, "SCALES"):
        measured_with(metadata.version("transformers"))
        check_padded(config)
        measured_with("5.1")
        with pytest.raises(RecipeError, match=r"not the model's; install transformers 5.1, with which it was measured"):
            check_padded(config)
        check_padded(config_of("llama"))


def test_a_layer_that_keeps_the_ranks_that_share_a_row_to_itself_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Its attention would see the tokens of one rank alone."""
    model = AutoModelForCausalLM.from_config(config_of("llama"), attn_implementation=PACKED)
    mesh: Any = SimpleNamespace(size=lambda: 2)
    place = torch.ones(1, dtype=torch.long)
    row = {"input_ids": torch.arange(4)[None], "targets": place, "target_positions": place}
    add_loss(model, mesh)
    with lost(monkeypatch, "sequence_mesh"):
        with pytest.raises(AssertionError, match="a layer did not hand on sequence_mesh"):
            model(**row)
        model.sequence_mesh = None
        assert model(**row).isfinite().all()


def test_the_small_model_leaves_the_random_numbers_of_a_run_as_they_are():
    torch.manual_seed(5)
    stateful_layers(config_of("lfm2"))
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))


def test_every_architecture_is_packed_or_says_why_not():
    """Each that is trained at all: by its name, or by the kinds of its layers."""
    unknown: list[str] = []
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with contextlib.suppress(Exception):  # sizes that do not suit it
            config = language_config(config_of(model_type))
            problem = not_served(config) or packing_problem(config) or ""
            unknown += [model_type] if "is not among" in problem else []
    assert set(unknown) <= {"phi4_multimodal"}, "not tried, since its tiny model has 29 layers"


@pytest.mark.parametrize("model_type", [name for name, facts in TYPES.items() if isinstance(facts.packed, str)])
def test_what_is_refused_by_name_does_mix_samples_or_fails(model_type: str):
    """Else it could be served. Another transformers may have changed that, which the reason says."""
    try:
        ours = tiny(model_type, PACKED)
        keep_apart(ours, try_two_samples(ours.config).layers)
        add_loss(ours)
        losses = ours(**packed_row())
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError):
        return
    if (losses - alone(tiny(model_type, "eager"))).abs().max() <= 0.02:
        measured, here = TYPES[model_type].transformers, metadata.version("transformers")
        assert measured != here
        assert f"that is so in transformers {measured}, and here is {here}" in str(
            packing_problem(config_of(model_type))
        )


@pytest.mark.parametrize("version", ["2.10", "2.13"])
def test_the_kernel_for_ragged_samples_is_called_right_under_each_signature(version, monkeypatch: pytest.MonkeyPatch):
    """A slow stand-in for the kernel, which has no CPU version: what is checked is the call around it."""

    def slow(query, key, value, offsets, scale):
        out = []
        for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            part = [x[start:end].transpose(0, 1) for x in (query, key, value)]
            out.append(torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, scale=scale))
        return torch.cat(out, dim=1).transpose(0, 1)

    def old(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        assert is_causal and max_q == max_k == 12 and query.shape == key.shape
        return slow(query, key, value, cu_seq_q, None)

    def new(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        assert window_size == (-1, 0) and enable_gqa and max_q == max_k == 12 and cu_seq_q.dtype == torch.int32
        groups = query.shape[1] // key.shape[1]
        return slow(query, *(x.repeat_interleave(groups, dim=1) for x in (key, value)), cu_seq_q, scale)

    kernel = {"2.10": old, "2.13": new}[version]
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "VARLEN_ARGUMENTS", frozenset(inspect.signature(kernel).parameters))
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 47, 8), torch.randn(1, 2, 47, 8), torch.randn(1, 2, 47, 8)
    parts = segments()
    expected, _ = attend(torch.nn.Module(), query, key, value, None, scaling=0.2, segments=parts)
    output = _varlen(*(x[0].transpose(0, 1) for x in (query, key, value)), parts, Kind(0.2))
    assert torch.allclose(output[None], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("capability", "head_size", "is_called"),
    [((8, 0), 16, True), ((9, 0), 256, True), ((7, 5), 16, False), ((8, 0), 20, False), ((8, 0), 512, False)],
)
def test_on_a_gpu_the_installed_kernel_takes_our_call_or_samples_go_one_by_one(
    capability: tuple[int, int], head_size: int, is_called: bool, monkeypatch: pytest.MonkeyPatch
):
    """Fake tensors have shape, type and device, and no data: torch checks the call, and no GPU is needed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode(), torch.no_grad():
        query = torch.empty(1, 4, 47, head_size, device="cuda", dtype=torch.bfloat16)
        key, value = (torch.empty(1, 2, 47, head_size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        parts = segments()._replace(offsets=torch.empty(len(LENGTHS) + 1, device="cuda", dtype=torch.int32))
        with Operations() as operations, Attentions() as attentions:
            output, _ = attend(torch.nn.Module(), query, key, value, None, scaling=0.2, segments=parts)
    assert output.shape == (1, 47, 4, head_size) and output.dtype == torch.bfloat16 and output.is_cuda
    assert ("_varlen_attn" in operations.names) == is_called
    assert len(attentions.calls) == (0 if is_called else len(LENGTHS))


@pytest.mark.parametrize("window", [1, WINDOW, 12])
def test_the_kernel_is_told_a_window_as_transformers_tells_flash_attention(window: int, monkeypatch):
    told = []

    def kernel(query, key, value, *others, scale=None, window_size=(-1, -1), enable_gqa=False):
        told.append(window_size)
        return query

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "VARLEN_ARGUMENTS", frozenset(inspect.signature(kernel).parameters))
    query = torch.randn(sum(LENGTHS), 4, 8)
    _varlen(query, query, query, segments(), Kind(window=window))
    supported = defaultdict(lambda: True)
    theirs = _process_flash_attention_kwargs(47, 47, True, sliding_window=window, supports_mapping=supported)
    left, _ = theirs["window_size"]  # what is right of a token its causality hides
    assert told == [(left, 0)]


@pytest.mark.parametrize("window", [None, WINDOW])
def test_what_no_kernel_computes_is_transformers_own(window: int | None):
    """Scores beyond the cap of Gemma 2, and gpt-oss's sinks, on samples of a packed row and on a row alone."""
    generator = torch.Generator().manual_seed(3)
    total, module = sum(LENGTHS), torch.nn.Module().eval()
    module.num_key_value_groups = 2
    query, key, value = (torch.randn(1, heads, total, 8, generator=generator) * 4 for heads in (4, 2, 2))
    module.sinks = torch.randn(4, generator=generator)
    for own, options in ((gemma2, {"softcap": 2.0}), (gpt_oss, {"s_aux": module.sinks})):
        theirs = {} if own is gpt_oss else options
        for parts, lengths in ((segments(), LENGTHS), (None, [total])):
            expected = []
            for q, k, v in zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True):
                seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
                mask = torch.where(seen if window is None else seen.triu(1 - window), 0.0, -torch.inf)
                expected.append(own.eager_attention_forward(module, q, k, v, mask, scaling=0.3, **theirs)[0])
            output, _ = attend(
                module, query, key, value, None, scaling=0.3, sliding_window=window, segments=parts, **options
            )
            torch.testing.assert_close(output, torch.cat(expected, dim=1), rtol=1e-5, atol=1e-5)
            plain, _ = attend(module, query, key, value, None, scaling=0.3, sliding_window=window, segments=parts)
            assert (plain - output).abs().max() > 0.1


class Attentions(TorchFunctionMode):
    """Heads of key and value in each call of torch's attention, and whether it must group the query's itself; and the
    dtypes that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int, bool]] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append((args[1].shape[1], args[2].shape[1], kwargs["enable_gqa"]))
            self.dtypes.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cuda", torch.float32, (4, 4, False)),
        ("cuda", torch.bfloat16, (2, 2, True)),
        ("cpu", torch.float32, (2, 2, True)),
    ],
)
def test_in_float32_on_a_gpu_each_query_head_gets_a_key(device: str, dtype: torch.dtype, expected: tuple):
    """Else only the kernel is left that holds scores of T x T: flash knows no float32, the others know no groups."""
    with FakeTensorMode(), torch.no_grad():
        query = torch.empty(1, 4, 47, 16, device=device, dtype=dtype)
        key, value = (torch.empty(1, 2, 47, 16, device=device, dtype=dtype) for _ in range(2))
        with Attentions() as attentions:
            output, _ = attend(torch.nn.Module(), query, key, value, None, scaling=0.2)
    assert attentions.calls == [expected] and output.shape == (1, 47, 4, 16)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "low weights"])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
def test_on_cpu_short_samples_in_16_bits_are_computed_in_float32(low, autocast: bool, is_packed: bool):
    """The result, in the low dtype, and all gradients are those of float32 to the bit, rounded once at the end."""
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    low_inputs = [torch.randn(1, heads, total, 16, generator=generator).to(low) for heads in (4, 2, 2)]
    upstream = torch.randn(1, total, 4, 16, generator=generator).to(low)

    def results(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        output, _ = attend(torch.nn.Module(), *leaves, None, scaling=0.2, segments=segments() if is_packed else None)
        return [output, *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]

    wide = [leaf.float() for leaf in low_inputs]
    expected = [tensor.to(low) for tensor in results(wide)]
    with torch.autocast("cpu", dtype=low, enabled=autocast), Attentions() as attentions:
        outcome = results(wide if autocast else low_inputs)  # rotary embeddings raise them to float32 under autocast
    assert outcome[0].dtype == low
    assert all(torch.equal(a.to(low), b) for a, b in zip(outcome, expected, strict=True))
    assert attentions.dtypes == {torch.float32}


def test_on_cpu_long_samples_in_16_bits_are_not_raised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "LONG_ON_CPU", max(LENGTHS))
    query = torch.randn(1, 4, sum(LENGTHS), 16, dtype=torch.bfloat16)
    with Attentions() as attentions:
        output, _ = attend(torch.nn.Module(), query, query, query, None, segments=segments())
    assert output.dtype == torch.bfloat16 and attentions.dtypes == {torch.bfloat16}


class Operations(TorchDispatchMode):
    """The names of what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def test_a_packed_row_needs_a_model_that_was_loaded_for_it():
    model = tiny("llama", "sdpa")
    add_loss(model)
    with pytest.raises(AssertionError, match="not loaded for packing"):
        model(**packed_row())


def test_lengths_that_are_not_those_of_the_row_are_noticed():
    model = tiny("llama", PACKED)
    add_loss(model)
    with pytest.raises(AssertionError, match="not one row of"):
        model(**packed_row() | packed([7, 1]))


@pytest.mark.parametrize("name", ["block_indices", "indices", "position_bias", "sinks", "of_the_next_transformers"])
def test_what_asks_for_another_attention_is_noticed(name: str):
    """gpt-oss passes sinks so; without them its packed loss was off by 1.8, and nothing failed."""
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    for value in (None, False):
        attend(torch.nn.Module(), query, key, key, None, position_ids=torch.arange(5), is_causal=True, **{name: value})
    with pytest.raises(AssertionError, match=f"{name} reached the packed attention"):
        attend(torch.nn.Module(), query, key, key, None, **{name: torch.ones(4)})


def test_attention_that_looks_ahead_is_noticed():
    query = torch.randn(1, 2, 5, 8)
    with pytest.raises(AssertionError, match="is_causal reached the packed attention"):
        attend(torch.nn.Module(), query, query, query, None, is_causal=False)


def test_a_mask_that_reaches_the_attention_is_noticed():
    with pytest.raises(AssertionError, match="a mask reached the packed attention"):
        tiny("llama", PACKED)(input_ids=torch.ones(1, 4, dtype=torch.int64), attention_mask=torch.ones(1, 1, 4, 4))


def test_a_saved_model_does_not_name_our_attention(tmp_path: Path):
    tiny("llama", "sdpa").save_pretrained(tmp_path / "in")
    model = load_model(str(tmp_path / "in"), ModelSection(name_or_path="x"), packing=True)
    assert model.config._attn_implementation == PACKED and model(**packed_row()).shape == (sum(LENGTHS),)
    model.save_pretrained(tmp_path / "out")
    written = (tmp_path / "out" / "config.json").read_text()
    assert json.loads(written)["model_type"] == "llama" and "cookbook" not in written
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config._attn_implementation == "sdpa"


def recipe_with(packing: str, model: Path, others: dict[str, str] | None = None) -> Recipe:
    """The quickstart's recipe for another model, with samples of 64 tokens."""
    settings = {"data.packing": packing, "data.max_length": "64", "model": f"{{name_or_path: {model}}}"} | (
        others or {}
    )
    return load_recipe(Path("recipes/quickstart.yaml"), [f"{key}={value}" for key, value in settings.items()])


NOT_PACKABLE = [
    ("llama4_text", {}, "layers of chunked_attention"),
    ("deepseek_v32", {}, "layers of indexed_attention"),
    ("bloom", {}, "code of its own"),
]


@pytest.mark.parametrize(("model_type", "changes", "reason"), NOT_PACKABLE, ids=[row[0] for row in NOT_PACKABLE])
def test_what_cannot_keep_samples_apart_is_refused_with_the_way_out(tmp_path, model_type, changes, reason):
    AutoConfig.for_model(model_type, num_hidden_layers=2, **changes).save_pretrained(tmp_path)
    config = load_config(str(tmp_path), 64)
    off = decide(recipe_with("false", tmp_path), config)
    assert not off.is_on and not off.can_pack
    assert re.search(reason, decide(recipe_with("auto", tmp_path), config).why)
    with pytest.raises(RecipeError, match=f"{reason}.*data.packing: false"):
        decide(recipe_with("true", tmp_path), config)
    # From the file alone, as `explain` reads it.
    assert not decide(recipe_with("auto", tmp_path), known_config(ModelSection(name_or_path=str(tmp_path)))).is_on


def test_a_reason_that_another_transformers_gave_says_so(monkeypatch: pytest.MonkeyPatch):
    for version, words in {"99.1": ", and here is 99.1", str(TYPES["bloom"].transformers): "a sample begins"}.items():
        monkeypatch.setattr("cookbook.facts.packing.installed_version", {"transformers": version}.get)
        assert str(packing_problem(config_of("bloom"))).endswith(words)


def test_a_window_and_layers_with_a_state_are_no_obstacle(tmp_path: Path):
    for config in (
        AutoConfig.for_model("mistral", num_hidden_layers=2, sliding_window=32),
        AutoConfig.for_model("qwen3_5_text", num_hidden_layers=2),
    ):
        for packing in ("true", "auto"):
            assert decide(recipe_with(packing, tmp_path), config).is_on


def test_auto_keeps_what_a_run_had_and_what_its_recipe_asks_for(tmp_path: Path):
    config = AutoConfig.for_model("llama")
    recipe = recipe_with("auto", tmp_path)
    assert decide(recipe, config, before=True) == decide(recipe, config) == Packing(True, "")
    padded = decide(recipe, config, before=False)
    assert padded.why.startswith("the run was started with padded rows") and padded.can_pack
    assert decide(recipe_with("false", tmp_path), config).can_pack
    assert decide(recipe_with("true", tmp_path), config, before=False).is_on
    compiled = {"model.compile": "true", "model.gradient_checkpointing": "true"}
    in_float32 = decide(recipe_with("auto", tmp_path, compiled | {"mixed_precision": "'no'"}), config)
    assert "uncompiled" in in_float32.why and not in_float32.can_pack
    in_bf16 = recipe_with("auto", tmp_path, compiled | {"mixed_precision": "bf16"})
    assert decide(in_bf16, config).is_on
    for name in ("qwen3_next", "gpt_oss", "gemma2"):
        assert "uncompiled" in decide(in_bf16, AutoConfig.for_model(name)).why
    large = decide(in_bf16, AutoConfig.for_model("llama", head_dim=512))
    assert "uncompiled" in large.why and "these have 512" in large.why


def test_the_architectures_whose_attention_has_sinks_are_those_of_transformers():
    """An argument `s_aux` of the attention function."""
    with_sinks, lacked = set(), lacked_types().keys()
    for name in {*PACKABLE} - lacked:
        code = inspect.getsource(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(name))].__module__])
        with_sinks |= {name} if "s_aux=" in code else set()
    assert with_sinks == {name for name, facts in TYPES.items() if facts.has_sinks} - lacked


@pytest.mark.parametrize("path", labels.recipe_files(), ids=str)
def test_what_is_known_of_a_model_without_torch_decides_as_its_configuration(path: Path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe = load_recipe(path)
    known = known_config(recipe.model)
    assert known is not None and decide(recipe, known) == decide(recipe, find_config(recipe.model)[0])


def test_what_is_decided_does_not_count_as_written():
    recipe = load_recipe(Path("recipes/qwen3_4b/sft.yaml"))
    settled = Packing(True, "").settle(recipe)
    assert settled.data.is_packed and "packing" not in settled.data.model_fields_set
    assert recipe.data.packing == "auto"
    with pytest.raises(AssertionError, match="before it is decided"):
        assert recipe.data.is_packed
