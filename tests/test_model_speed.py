"""Settings that make a model smaller or faster leave its results. pytest tests/test_model_speed.py"""

import collections
from pathlib import Path

import pytest
import torch
from target_grid import from_grid, packed
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.tiny_models import tiny_config, tiny_model
from cookbook.config.recipe import load_recipe
from cookbook.config.sections import ModelSection
from cookbook.system.files import RecipeError
from cookbook.training.models.efficiency import kernel_notes, save_activations, slow_kernel_notes
from cookbook.training.models.language_model import load_model
from tests.needs import need_compiler
from tests.turns import TRAINED, others_by_turn

KEEPS = "ctrl", "jetmoe", "openai-gpt"
"""Types that transformers cannot recompute."""
RECOMPUTED = [name for name in TRAINED if name not in KEEPS]
IN_PLACE = "gemma3n_text", "gpt_oss"
"""Types whose layers change a product in place, behind a reshape and directly."""
LENGTHS = [[5, 9, 3], [4, 4], [7, 8, 9, 10], [11, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def load(folder: Path, **settings: object):
    return load_model(str(folder), ModelSection(name_or_path=str(folder), **settings), packing=True)


def packed_row(lengths: list[int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (1, sum(lengths) + 1), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids[:, :-1], "position_ids": positions, **from_grid(ids[:, 1:]), **packed(lengths)}


class Operations(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


def backward(folder: Path, **settings: object) -> tuple[collections.Counter[str], list[torch.Tensor]]:
    """Operations in the backward pass, and the gradients."""
    model = load(folder, **settings)
    nll = model(**packed_row(LENGTHS[0]))
    with Operations() as operations:
        nll.sum().backward()
    return operations.counts, [nll, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("kind", [True, "selective", "offload"])
def test_checkpointing_changes_no_bit(folder: Path, kind: bool | str):
    _, expected = backward(folder)
    _, gradients = backward(folder, gradient_checkpointing=kind)
    assert all(torch.equal(p, q) for p, q in zip(expected, gradients, strict=True))


@pytest.mark.parametrize("model_type", others_by_turn(RECOMPUTED, IN_PLACE))
def test_recomputed_layers_of_every_type_have_the_gradients_of_those_that_are_kept(model_type: str):
    """torch's own checkpointing has others for one of IN_PLACE, and an error for the other (docs/upstream, 11)."""
    ids = torch.randint(5, 100, (2, 16), generator=torch.Generator().manual_seed(1))

    def gradients(kind: bool | str) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model = tiny_model(tiny_config(model_type)).train()
        if kind:
            save_activations(model, selective=kind == "selective")
        logits = model(input_ids=ids, use_cache=False).logits.float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        return [logits.detach(), *(parameter.grad for parameter in model.parameters())]

    expected = gradients(False)
    for kind in True, "selective":
        pairs = list(zip(expected, gradients(kind), strict=True))
        assert [p is None for p, _ in pairs] == [q is None for _, q in pairs]
        assert all(torch.equal(p, q) for p, q in pairs if p is not None), kind


def test_selective_checkpointing_recomputes_neither_products_nor_attention(folder: Path):
    plain, _ = backward(folder)
    selective, _ = backward(folder, gradient_checkpointing="selective")
    full, _ = backward(folder, gradient_checkpointing=True)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    layers, samples = 2, len(LENGTHS[0])
    assert plain["silu"] == plain["rsqrt"] == plain["addmm"] == plain[attention] == 0
    assert selective["silu"] == layers and selective["rsqrt"] == 2 * layers
    assert selective["addmm"] == selective[attention] == 0 and selective["mm"] == plain["mm"]
    # The counter sees a recomputed product: q, k, v, o have biases, and gate and up have none (down comes last, and
    # nothing needs its output).
    assert full["addmm"] == 4 * layers and full[attention] == samples * layers
    assert full["mm"] == plain["mm"] + 2 * layers


@pytest.mark.thorough
def test_compiled_layers_give_the_same_loss_and_are_compiled_once_for_all_lengths(folder: Path):
    need_compiler()
    plain, compiled = load(folder), load(folder, compile=True)
    torch._dynamo.utils.counters.clear()
    graphs = []
    for lengths in LENGTHS:
        expected, losses = plain(**packed_row(lengths)), compiled(**packed_row(lengths))
        assert torch.allclose(losses, expected, rtol=1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs[1] == graphs[-1], graphs


def test_fused_kernels_are_left_out_with_a_note_where_there_is_no_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = ModelSection(name_or_path=str(folder), liger_kernels=True)
    (note,) = kernel_notes(settings, LlamaConfig())
    assert "model.liger_kernels" in note and "GPU" in note
    assert load(folder, liger_kernels=True)(**packed_row(LENGTHS[0])).shape == (17,)
    assert kernel_notes(ModelSection(name_or_path=str(folder)), LlamaConfig()) == []


def test_fused_kernels_that_are_not_installed_are_refused_on_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="pip install liger-kernel"):
        kernel_notes(ModelSection(name_or_path=str(folder), liger_kernels=True), LlamaConfig())


@pytest.mark.parametrize(
    ("settings", "heads", "capability", "said"),
    [
        (["mixed_precision='no'"], 64, (9, 0), "mixed_precision is no"),
        (["mixed_precision=bf16"], 64, (7, 5), "capability 7.5"),
        (["mixed_precision=bf16"], 512, (9, 0), "these have 512"),
        (["mixed_precision=fp8"], 64, (9, 0), "fp8 without model.compile"),
        (["mixed_precision=fp8", "model.compile=true"], 64, (9, 0), None),
        (["mixed_precision='no'", "data.packing=false"], 64, (9, 0), None),
        (["mixed_precision=bf16"], 64, (9, 0), None),
        (["mixed_precision='no'"], 512, None, None),
    ],
)
def test_what_is_slow_on_a_gpu_is_said(settings: list[str], heads: int, capability, said: str | None):
    recipe = load_recipe(Path("recipes/quickstart.yaml"), ["data.packing=true", *settings])
    notes = slow_kernel_notes(recipe, LlamaConfig(head_dim=heads), capability)
    assert [said in note for note in notes] == ([True] if said else [])
