"""In a packed row each sample attends to itself only. python -m pytest tests/test_packed_attention.py"""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from target_grid import from_grid, packed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cookbook.commands.shared import labels
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.sections import ModelSection
from cookbook.planning.packing import PACKABLE, Packing, decide, known_config
from cookbook.system.files import RecipeError
from cookbook.training.models import attention, load_config, load_model
from cookbook.training.models.attention import PACKED, Lengths, Segments, _varlen, attend
from cookbook.training.models.efficiency import save_activations
from cookbook.training.models.loss import add_loss
from cookbook.training.models.structure import find_config

LENGTHS = [7, 1, 12, 3, 9, 5, 2, 8]
SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
MIXTURE = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "moe_k": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
# Windows at least as long as the samples: no sample differs.
WINDOWED = {"exaone4", "exaone_moe", "gemma3_text", "ministral", "mistral", "olmo3"}


def tiny(model_type: str, attention: str) -> PreTrainedModel:
    sizes: dict = dict(SIZES)
    known = AutoConfig.for_model(model_type).to_dict()
    sizes |= {name: size for name, size in MIXTURE.items() if name in known}
    if model_type in WINDOWED:
        sizes["sliding_window"] = max(LENGTHS)
    config = AutoConfig.for_model(model_type, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)  # large enough for attention to matter
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
        logits = model(input_ids=sample[None, :-1]).logits[0]
        nll.append(torch.nn.functional.cross_entropy(logits, sample[1:], reduction="none"))
    return torch.cat(nll)


@pytest.mark.parametrize("model_type", PACKABLE)
def test_each_sample_alone_gives_what_the_packed_row_gives(model_type: str):
    expected = alone(tiny(model_type, "eager"))
    ours = tiny(model_type, PACKED)
    add_loss(ours)
    row = packed_row()
    assert (ours(**row) - expected).abs().max() < 2e-5
    row |= packed([sum(LENGTHS)])
    assert (ours(**row) - expected).abs().max() > 0.1, "samples that see one another would not be noticed"


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_the_gradients_are_those_of_the_samples_alone(checkpointing: bool):
    plain, ours = tiny("qwen3", "sdpa"), tiny("qwen3", PACKED)
    if checkpointing:
        save_activations(ours, selective=False)
    add_loss(ours.train())
    alone(plain).sum().backward()
    ours(**packed_row()).sum().backward()
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-4 * p.grad.abs().max().item()), name


@pytest.mark.parametrize("model_type", PACKABLE)
def test_padded_rows_through_the_same_attention_give_what_each_sample_alone_gives(model_type: str):
    model, plain = tiny(model_type, PACKED), tiny(model_type, "eager")
    add_loss(model)
    width = max(LENGTHS)
    ids, targets = torch.zeros(len(LENGTHS), width, dtype=torch.int64), torch.full((len(LENGTHS), width), -100)
    for row, sample in enumerate(samples()):
        ids[row, : len(sample) - 1], targets[row, : len(sample) - 1] = sample[:-1], sample[1:]
    found = model(input_ids=ids, **from_grid(targets))
    assert (found - alone(plain)).abs().max() < 2e-5


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
    found = _varlen(*(x[0].transpose(0, 1) for x in (query, key, value)), parts, 0.2)
    assert torch.allclose(found[None], expected, atol=1e-6)


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
            found, _ = attend(torch.nn.Module(), query, key, value, None, scaling=0.2, segments=parts)
    assert found.shape == (1, 47, 4, head_size) and found.dtype == torch.bfloat16 and found.is_cuda
    assert ("_varlen_attn" in operations.names) == is_called
    assert len(attentions.calls) == (0 if is_called else len(LENGTHS))


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
            found, _ = attend(torch.nn.Module(), query, key, value, None, scaling=0.2)
    assert attentions.calls == [expected] and found.shape == (1, 47, 4, 16)


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
        leaves = [one.clone().requires_grad_() for one in inputs]
        found, _ = attend(torch.nn.Module(), *leaves, None, scaling=0.2, segments=segments() if is_packed else None)
        return [found, *torch.autograd.grad(found, leaves, upstream.to(found.dtype))]

    wide = [one.float() for one in low_inputs]
    expected = [one.to(low) for one in results(wide)]
    with torch.autocast("cpu", dtype=low, enabled=autocast), Attentions() as attentions:
        found = results(wide if autocast else low_inputs)  # rotary embeddings raise them to float32 under autocast
    assert found[0].dtype == low
    assert all(torch.equal(a.to(low), b) for a, b in zip(found, expected, strict=True))
    assert attentions.dtypes == {torch.float32}


def test_on_cpu_long_samples_in_16_bits_are_not_raised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "LONG_ON_CPU", max(LENGTHS))
    query = torch.randn(1, 4, sum(LENGTHS), 16, dtype=torch.bfloat16)
    with Attentions() as attentions:
        found, _ = attend(torch.nn.Module(), query, query, query, None, segments=segments())
    assert found.dtype == torch.bfloat16 and attentions.dtypes == {torch.bfloat16}


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


@pytest.mark.parametrize("name", sorted(attention.CHANGES_ATTENTION))
def test_what_asks_for_another_attention_is_noticed(name: str):
    """gpt-oss passes sinks so; without them its packed loss was off by 1.8, and nothing failed."""
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    attend(torch.nn.Module(), query, key, key, None, **{name: None})
    with pytest.raises(AssertionError, match=f"{name} reached the packed attention"):
        attend(torch.nn.Module(), query, key, key, None, **{name: torch.ones(4)})


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
    ("mistral", {"sliding_window": 32}, "window is 32 tokens, less than data.max_length 64"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, "window is 32"),
    ("gemma3_text", {"sliding_window": 32}, "window is 32"),
    ("qwen3_next", {}, "layers of linear_attention"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of conv"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
    ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "gpt_oss is not among"),
    ("mamba", {}, "layers of linear_attention"),
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


def test_a_window_that_holds_a_whole_sample_is_no_obstacle(tmp_path: Path):
    config = AutoConfig.for_model("mistral", num_hidden_layers=2, sliding_window=64)
    assert decide(recipe_with("true", tmp_path), config).is_on and decide(recipe_with("auto", tmp_path), config).is_on


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
    assert decide(recipe_with("auto", tmp_path, compiled | {"mixed_precision": "bf16"}), config).is_on


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
