"""The loss inside the model is the one of the full logits, in chunks or not. pytest tests/test_models.py"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from target_grid import IGNORE_INDEX, from_grid
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MllamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from benchmarks.tiny_models import tiny_config, tiny_model
from cookbook.config.mesh import Mesh
from cookbook.config.objectives import Objective
from cookbook.config.sections import ModelSection, ScratchModel
from cookbook.facts.meshes import mesh_problem
from cookbook.system.files import RecipeError
from cookbook.training.models import loss
from cookbook.training.models.experts import PRODUCTS, autocast_products
from cookbook.training.models.language_model import load_config, load_model
from cookbook.training.models.loss import add_loss
from cookbook.training.models.model_source import new_model, resolve_model, weights_digest
from cookbook.training.models.sample_draws import drawn_parts
from cookbook.training.models.structure import LogitTransform
from cookbook.training.models.tokenizer_files import load_tokenizer, train_tokenizer
from tests.turns import TRAINED, others_by_turn

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


def padded(lengths: list[int], labelled_from: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded random samples and the grid of their targets; positions from `labelled_from` on are labels."""
    generator = torch.Generator().manual_seed(1)
    width = max(lengths)
    ids = torch.randint(0, 384, (len(lengths), width), generator=generator)
    targets = torch.full_like(ids, IGNORE_INDEX)
    for row, length in enumerate(lengths):
        targets[row, labelled_from : length - 1] = ids[row, labelled_from + 1 : length]
    return ids, targets


def batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    ids, targets = padded(lengths)
    return {"input_ids": ids, **from_grid(targets)}


def reference(model: LlamaForCausalLM, lengths: list[int]) -> torch.Tensor:
    """Full logits of the unchanged model; (L,) negative log-likelihoods."""
    ids, targets = padded(lengths)
    logits = model(input_ids=ids).logits
    nll = -logits.float().log_softmax(-1).gather(2, targets.clamp(min=0)[..., None]).squeeze(2)
    return nll[targets != IGNORE_INDEX]


CHANGED = {
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5},
    "cohere2": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 1.7},
}
"""Model types that change the logits of their head, and of their attention."""


@pytest.mark.parametrize("chunked", [False, True], ids=["at once", "chunked"])
@pytest.mark.parametrize("model_type", CHANGED)
def test_what_a_model_does_to_its_logits_is_in_loss_and_gradients(
    model_type: str, chunked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = AutoConfig.for_model(model_type, **SIZES, head_dim=8, pad_token_id=0, **CHANGED[model_type])
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for weight in plain.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    plain.save_pretrained(tmp_path)
    ours = load_model(str(tmp_path), ModelSection(name_or_path=str(tmp_path)), packing=False).double()
    plain = plain.double()
    if chunked:
        lower_the_budget(monkeypatch)
    expected, losses = reference(plain, [9, 5, 12]), ours(**batch([9, 5, 12]))
    assert torch.allclose(losses, expected, rtol=1e-6)
    weights = torch.linspace(-1, 2, len(losses))
    (expected * weights).sum().backward()
    (losses * weights).sum().backward()
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6 * p.grad.abs().max()), name
    ids, targets = padded([9, 5, 12])
    chosen = plain(input_ids=ids).logits.argmax(-1)[targets != IGNORE_INDEX]
    assert torch.equal(ours(**batch([9, 5, 12]) | {"targets": None}), chosen)
    ours.logit_transform = None
    assert not torch.allclose(ours(**batch([9, 5, 12])), expected, rtol=0.01)


def lower_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 positions."""
    monkeypatch.setattr(loss, "LOGITS_BUDGET", 4 * SIZES["vocab_size"])


@pytest.mark.parametrize("chunked", [False, True], ids=["at once", "chunked"])
@pytest.mark.parametrize("head", ["tied", "untied", "with a bias"])
def test_loss_and_gradients_are_those_of_the_full_logits(head: str, chunked: bool, monkeypatch: pytest.MonkeyPatch):
    plain, ours = (tiny(tie_word_embeddings=head == "tied") for _ in range(2))
    if head == "with a bias":  # as Phi's and GPT-J's
        for model in (plain, ours):
            model.lm_head.bias = torch.nn.Parameter(torch.linspace(-2, 2, SIZES["vocab_size"]).double())
    add_loss(ours)
    if chunked:
        lower_the_budget(monkeypatch)
    expected, losses = reference(plain, [9, 5, 12]), ours(**batch([9, 5, 12]))
    assert losses.shape == (6 + 2 + 9,) and losses.dtype == torch.float32
    assert torch.allclose(losses, expected, rtol=1e-6)
    assert losses._base is None, "a view, of which FSDP2 warns"
    weights = torch.linspace(-1, 2, len(losses))  # an objective may weigh each position by itself
    (expected * weights).sum().backward()
    (losses * weights).sum().backward()
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7), name


class Rows(TorchDispatchMode):
    """The most rows that a newly made tensor of so many columns had."""

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.num_columns, self.most = num_columns, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[1:] == (self.num_columns,) and not operation.is_view:
                self.most = max(self.most, tensor.shape[0])
        return result


@pytest.mark.parametrize(("chunk", "most"), [(64, 64), (None, 251)], ids=["chunked", "at once"])
def test_chunks_never_hold_all_logits(chunk: int | None, most: int, monkeypatch: pytest.MonkeyPatch):
    model = tiny()
    add_loss(model)
    if chunk:
        monkeypatch.setattr(loss, "LOGITS_BUDGET", chunk * SIZES["vocab_size"])
    with Rows(SIZES["vocab_size"]) as rows:
        model(**batch([90, 50, 120])).sum().backward()
    assert rows.most == most


@pytest.mark.parametrize("labels", [0, 1, 17])
def test_the_head_is_called_once_however_many_chunks(labels: int, monkeypatch: pytest.MonkeyPatch):
    """An engine gathers a sharded head at each call, and ranks with other counts of labels have other counts of
    chunks."""
    lower_the_budget(monkeypatch)
    model = tiny()
    add_loss(model)
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append("forward"))
    model.lm_head.register_full_backward_pre_hook(lambda *_: calls.append("backward"))
    inputs = batch([9, 5, 12])
    first = {name: inputs[name][:labels] for name in ("targets", "target_positions")}
    model(**inputs | first).sum().backward()
    assert calls == ["forward", "backward"]


def test_a_frozen_head_gets_no_gradient_and_no_work_for_one(monkeypatch: pytest.MonkeyPatch):
    lower_the_budget(monkeypatch)

    def most_rows_of_hidden_size(frozen: bool) -> int:
        model = tiny(tie_word_embeddings=False)
        model.model.embed_tokens.requires_grad_(False)
        model.lm_head.requires_grad_(not frozen)
        add_loss(model)
        nll = model(**batch([9, 5, 12]))
        with Rows(SIZES["hidden_size"]) as rows:
            nll.sum().backward()
        assert (model.lm_head.weight.grad is None) == frozen
        assert model.model.layers[0].mlp.up_proj.weight.grad.any()
        return rows.most

    assert most_rows_of_hidden_size(frozen=False) == SIZES["vocab_size"]
    assert most_rows_of_hidden_size(frozen=True) < SIZES["vocab_size"]


class ProductsOfHead(TorchDispatchMode):
    """The sizes of matrix products that make or take logits."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten.mm.default:
            left, right = args
            if SIZES["vocab_size"] in (left.shape[1], right.shape[1]):
                self.sizes.append((left.shape[0], right.shape[1]))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [None, Objective.of(name="sft", label_smoothing=0.1)], ids=["sft", "smoothed"])
def test_a_frozen_head_makes_no_product_twice_and_the_same_gradient(function, monkeypatch: pytest.MonkeyPatch):
    """17 targets in chunks of 4, each with a weight of its own; a head that is trained makes logits twice."""
    inputs = batch([9, 5, 12])
    if function is not None:
        inputs |= {"function": function.function(inputs)}
    gradients, sizes = [], []
    for frozen in (False, True):
        model = tiny(tie_word_embeddings=False)
        model.lm_head.requires_grad_(not frozen)
        add_loss(model)
        monkeypatch.setattr(loss, "LOGITS_BUDGET", (4 * loss.OF_FROZEN if frozen else 4) * SIZES["vocab_size"])
        with ProductsOfHead() as products:
            result = model(**inputs)
            losses = result if function is None else result[0]
            (losses * torch.linspace(-1, 2, len(losses))).sum().backward()
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad)
        sizes.append(products.sizes)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)
    vocab, hidden = SIZES["vocab_size"], SIZES["hidden_size"]
    rows = [4, 4, 4, 4, 1]
    assert sizes[1] == [size for count in rows for size in ((count, vocab), (count, hidden))]
    assert sum(size[1] == vocab for size in sizes[0]) == 2 * len(rows)


@pytest.mark.parametrize("chunked", [False, True], ids=["at once", "chunked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("transform", [None, LogitTransform(scale=1.5, cap=40.0)], ids=["", "scaled and capped"])
def test_gradients_in_16_bits_are_rounded_once(
    transform: LogitTransform | None, dtype: torch.dtype, chunked: bool, monkeypatch: pytest.MonkeyPatch
):
    """The weight is the identity, so that the gradient of the hidden states is that of the logits. One target is
    certain to 1e-3: p - 1 of a p in bf16 is 0. In fp16 many probabilities are 0 without a loss scale."""
    vocab = 2048
    if chunked:
        monkeypatch.setattr(loss, "LOGITS_BUDGET", 3 * vocab)
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(2)).mul(3).to(dtype)
    targets = torch.arange(8) * 7
    logits[0, 0] = 19
    scale = torch.linspace(0.5, 1.5, 8) * (1e4 if dtype == torch.float16 else 1)
    with torch.enable_grad():
        inner = logits.double().requires_grad_()
        outer = inner if transform is None else 40 * torch.tanh(1.5 * inner / 40)
        (F.cross_entropy(outer, targets, reduction="none") * scale.double()).sum().backward()
    exact = inner.grad

    head = torch.nn.Linear(vocab, vocab, bias=False, dtype=dtype).requires_grad_(False)
    head.weight.copy_(torch.eye(vocab))
    head.__class__ = loss.LossHead
    (head(logits.requires_grad_(), targets, transform) * scale).sum().backward()
    assert -2e-3 < exact[0, 0] / scale[0] < 0
    # Two roundings where the scale comes after the product, and the smallest numbers that fp16 has.
    torch.testing.assert_close(logits.grad.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=6e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("rows", [3, 100], ids=["chunked", "at once"])
def test_label_smoothing_is_that_of_transformers(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Loss and gradients of Trainer's own class, in float64; without smoothing they are far away."""
    from transformers.trainer_pt_utils import LabelSmoother

    vocab, share = 97, 0.3
    monkeypatch.setattr(loss, "LOGITS_BUDGET", rows * vocab)
    chance = torch.Generator().manual_seed(4)
    weight = torch.randn(vocab, 16, generator=chance).to(dtype)
    hidden = torch.randn(7, 16, generator=chance).to(dtype)
    targets = torch.randint(vocab, (7,), generator=chance)
    with torch.enable_grad():
        wide = [values.double().requires_grad_() for values in (hidden, weight)]
        output = {"logits": F.linear(*wide)}
        expected, plain = (LabelSmoother(epsilon)(output, targets) * 7 for epsilon in (share, 0.0))
    gradients = torch.autograd.grad(expected, wide)

    head = torch.nn.Linear(16, vocab, bias=False)
    head.weight = torch.nn.Parameter(weight)
    head.__class__ = loss.LossHead
    function = Objective.of(name="sft", label_smoothing=share).function({"targets": targets})
    with torch.enable_grad():
        losses, nll = head(hidden.requires_grad_(), function=function)
        losses.sum().backward()
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(losses.sum().double(), expected, rtol=rounding, atol=0)
    torch.testing.assert_close(nll.sum().double(), plain, rtol=rounding, atol=0)
    assert abs(expected - plain) > 1 and not nll.requires_grad
    for gradient, exact in zip((hidden.grad, head.weight.grad), gradients, strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=8 * rounding, atol=8 * rounding)


@pytest.mark.parametrize("targets", ["head kept whole", "head with LoRA"])
def test_a_head_that_peft_wrapped_gives_the_same_loss(targets: str, monkeypatch: pytest.MonkeyPatch):
    from peft import LoraConfig, get_peft_model

    lower_the_budget(monkeypatch)
    plain, ours = tiny(tie_word_embeddings=False), tiny(tie_word_embeddings=False)
    expected = reference(plain, [9, 5, 12])
    add_loss(ours)
    options = {"modules_to_save": ["lm_head"]} if targets == "head kept whole" else {}
    names = ["q_proj"] if options else ["q_proj", "lm_head"]
    model = get_peft_model(ours, LoraConfig(target_modules=names, task_type="CAUSAL_LM", **options))
    losses = model(**batch([9, 5, 12]))
    assert torch.allclose(losses, expected, rtol=1e-6)  # new adapters add zero
    losses.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("lm_head" in name for name in trained) and any("q_proj" in name for name in trained)
    assert all(p.grad is None for name, p in model.named_parameters() if "original_module" in name)


def test_padding_is_never_seen():
    model = tiny()
    add_loss(model)
    ids, targets = padded([9, 5, 12])
    alone = [
        model(input_ids=ids[row : row + 1, :length], **from_grid(targets[row : row + 1, :length]))
        for row, length in enumerate([9, 5, 12])
    ]
    assert torch.allclose(model(input_ids=ids, **from_grid(targets)), torch.cat(alone), rtol=1e-6)


def test_a_label_on_padding_would_be_noticed():
    model = tiny()
    add_loss(model)
    ids, targets = padded([9, 5, 12])
    right = model(input_ids=ids, **from_grid(targets)).sum().item()
    targets[1, 8] = 3
    assert abs(model(input_ids=ids, **from_grid(targets)).sum().item() - right) > 1.0


def test_a_micro_batch_without_labels_is_nothing_with_gradients_of_zero():
    model = tiny()
    add_loss(model)
    ids, targets = padded([4])
    nll = model(input_ids=ids, **from_grid(targets.fill_(IGNORE_INDEX)))
    nll.sum().backward()
    assert nll.shape == (0,)
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


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MllamaConfig(), "mllama holds more than a language model"),
        (AutoConfig.for_model("t5"), "t5 is not a causal language model"),
        (AutoConfig.for_model("bert"), "attention looks ahead"),
        (AutoConfig.for_model("gemma3_text", use_bidirectional_attention=True), "attention looks ahead"),
        (LlamaConfig(**SIZES, unpadded_vocab_size=SIZES["vocab_size"] - 1), "leaves logits of the head out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_causal_language_model_is_refused(config, reason: str, tmp_path: Path):
    config.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=reason):
        load_config(str(tmp_path), 64)


@pytest.mark.parametrize(
    ("kind", "options"), [("dynamic", {}), ("longrope", {"short_factor": [1], "long_factor": [1]})]
)
def test_a_rotary_embedding_that_depends_on_the_longest_sample_is_refused(kind: str, options: dict, tmp_path: Path):
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32, **options}
    LlamaConfig(**SIZES, head_dim=2, max_position_embeddings=128, rope_parameters=rope).save_pretrained(tmp_path)
    load_config(str(tmp_path), 32)
    with pytest.raises(RecipeError, match=rf"above 32 tokens this model's rotary embedding \({kind}\).*at most 32"):
        load_config(str(tmp_path), 33)


def test_so_is_that_of_one_kind_of_layers_and_of_a_kind_that_transformers_may_come_to_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = {"rope_type": "default", "rope_theta": 1e4}
    of_long = {"factor": 4.0, "original_max_position_embeddings": 32, "short_factor": [1.0], "long_factor": [4.0]}

    def saved(kind: str) -> str:
        of_layers = {"full_attention": plain | {"rope_type": kind, **of_long}, "sliding_attention": plain}
        config = AutoConfig.for_model(
            "gemma3_text", **SIZES, head_dim=2, max_position_embeddings=128, rope_parameters=of_layers
        )
        config.save_pretrained(tmp_path / kind)
        return str(tmp_path / kind)

    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "next", ROPE_INIT_FUNCTIONS["longrope"])
    for kind in ("longrope", "next"):
        load_config(saved(kind), 32)
        with pytest.raises(RecipeError, match=rf"above 32 tokens .*\({kind}\) depends on the longest sample"):
            load_config(saved(kind), 33)
    load_config(saved("linear"), 33)


def test_frozen_weights_may_be_small_and_a_loss_is_float32_all_the_same(tmp_path: Path):
    tiny().save_pretrained(tmp_path)
    settings = ModelSection(name_or_path=str(tmp_path))
    model = load_model(str(tmp_path), settings, packing=False, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(**batch([9, 5, 12])).dtype == torch.float32
    model = load_model(str(tmp_path), settings, packing=False)
    assert {p.dtype for p in model.parameters()} == {torch.float32} and model.training


def test_a_model_that_is_no_folder_and_cannot_be_fetched_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = ModelSection(name_or_path="nobody/no-such-model")
    with pytest.raises(RecipeError, match=r"nobody/no-such-model.*not a folder, and not fetched"):
        resolve_model(model, seed=0, texts=iter([]), fingerprint="", cache=tmp_path)


def test_a_model_without_safetensors_is_refused(tmp_path: Path):
    tiny().save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    settings = ModelSection(name_or_path=str(tmp_path))
    with pytest.raises(RecipeError, match="no weights in safetensors"):
        resolve_model(settings, seed=0, texts=[], fingerprint="", cache=tmp_path / "cache")


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path):
    """transformers would load it unasked, and freeze all else."""
    tokenizer = train_tokenizer(["a b c"], 300)
    sizes = ScratchModel(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    new_model(sizes, tokenizer, 0).save_pretrained(tmp_path)
    section = ModelSection(name_or_path=str(tmp_path))
    assert resolve_model(section, seed=0, texts=[], fingerprint="", cache=tmp_path) == str(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"adapter_config\.json lies beside the weights"):
        resolve_model(section, seed=0, texts=[], fingerprint="", cache=tmp_path)


def test_a_blob_of_the_hub_s_cache_is_read_and_not_believed_by_its_name(tmp_path: Path):
    """And what was read once is read again when it has changed."""
    blob = tmp_path / "blobs" / ("a" * 64)
    folder = tmp_path / "snapshots" / "b"
    for path in (blob.parent, folder):
        path.mkdir(parents=True)
    blob.write_bytes(b"weights")
    (folder / "model.safetensors").symlink_to(blob)
    (folder / "config.json").write_text("{}")
    first = weights_digest(folder, cache=tmp_path / "cache")
    assert weights_digest(folder, cache=tmp_path / "cache") == weights_digest(folder) == first
    blob.write_bytes(b"weightz")
    assert weights_digest(folder, cache=tmp_path / "cache") == weights_digest(folder) != first


def test_dropout_of_a_configuration_is_found():
    assert drawn_parts(LlamaConfig(**SIZES)) == {}
    assert drawn_parts(LlamaConfig(**SIZES, attention_dropout=0.1)) == {"attention_dropout": 0.1}
    assert drawn_parts(AutoConfig.for_model("gpt2")).keys() == {"attn_pdrop", "embd_pdrop", "resid_pdrop"}


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "gpt_neo", "mamba"])
def test_a_mesh_of_one_suits_every_configuration(name: str):
    """Several of these classes have no field under the names that heads and inner features have elsewhere."""
    assert mesh_problem(AutoConfig.for_model(name), Mesh()) is None


def test_heads_that_tensor_parallel_cannot_divide_are_named():
    config = AutoConfig.for_model("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    assert mesh_problem(config, Mesh(tensor=2)) is None
    assert "6 query heads and 2 key heads cannot be divided" in str(mesh_problem(config, Mesh(tensor=4)))


@pytest.mark.parametrize(
    ("values", "mesh", "problem"),
    [
        ({"model_type": "qwen2", "num_attention_heads": 4, "sliding_window": 8}, Mesh(sequence=2), None),
        ({"model_type": "mistral", "num_attention_heads": 4, "sliding_window": 8}, Mesh(sequence=2), "window is 8 tok"),
        ({"model_type": "mixtral"}, Mesh(expert=3), None),
        ({"model_type": "mixtral", "num_local_experts": 1}, Mesh(expert=2), "1 expert cannot be divided"),
        ({"model_type": "llama"}, Mesh(expert=2), "llama has no experts"),
        ({"model_type": "llama", "num_hidden_layers": None}, Mesh(pipeline=2), None),
        ({"model_type": "llama", "num_hidden_layers": 3}, Mesh(pipeline=2, chunks=2), "3 layers cannot"),
        ({"model_type": "llama", "num_attention_heads": "x"}, Mesh(tensor=2), None),
    ],
)
def test_of_a_written_configuration_only_what_it_has_is_judged(values: dict, mesh: Mesh, problem: str | None):
    said = mesh_problem(SimpleNamespace(**values), mesh)
    assert said is None if problem is None else problem in str(said)


@pytest.mark.parametrize(
    ("model_type", "mesh", "problem"),
    [
        ("qwen2", Mesh(sequence=2), None),
        ("mistral", Mesh(sequence=2), "window is 8 tok"),
        ("mixtral", Mesh(expert=3), "8 experts cannot be divided"),
    ],
)
def test_of_a_whole_configuration_the_defaults_are_judged_too(model_type: str, mesh: Mesh, problem: str | None):
    said = mesh_problem(AutoConfig.for_model(model_type, num_attention_heads=4, sliding_window=8), mesh)
    assert said is None if problem is None else problem in str(said)


def products_of_experts(tokens: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(5, 8): the first two tokens times the first expert's matrix, the others times the second's."""
    parts = tokens.to(dtype).split([2, 3])
    return torch.cat([part @ matrix for part, matrix in zip(parts, weights.to(dtype), strict=True)])


@pytest.mark.parametrize("product", PRODUCTS)
def test_experts_are_multiplied_in_the_dtype_of_autocast_and_without_it_in_their_own(product: str):
    autocast_products()
    namespace, name = product.split("::")
    multiply = getattr(getattr(torch.ops, namespace), name)
    torch.manual_seed(0)
    tokens, weights = torch.randn(5, 8), torch.randn(2, 8, 8, requires_grad=True)
    ends = torch.tensor([2, 5], dtype=torch.int32)
    plain = multiply(tokens, weights, ends)
    torch.testing.assert_close(plain, products_of_experts(tokens, weights, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        products = multiply(tokens, weights, ends)
    assert products.dtype == torch.bfloat16 and not torch.allclose(products.float(), plain, atol=1e-3)
    torch.testing.assert_close(products, products_of_experts(tokens, weights, torch.bfloat16))
    (gradient,) = torch.autograd.grad(products.float().sum(), weights)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(
        gradient[0], tokens[:2].bfloat16().float().sum(0)[:, None].expand(8, 8), atol=0.02, rtol=0
    )


def test_what_experts_return_is_added_up_in_the_dtype_of_the_sum():
    autocast_products()
    index, source = torch.tensor([1, 1]), torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        sums = torch.zeros(2, 3).index_add_(0, index, source)
    torch.testing.assert_close(sums, torch.stack([torch.zeros(3), source.detach().float().sum(0)]))
    assert sums.dtype == torch.float32 and torch.autograd.grad(sums.sum(), source)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("model_type", others_by_turn(TRAINED, ["dbrx", "qwen3_moe"]))
def test_every_type_learns_in_16_bits_under_autocast_and_as_zero_holds_its_weights(model_type: str):
    autocast_products()
    model = tiny_model(tiny_config(model_type)).train()
    ids = torch.randint(5, 500, (2, 24), generator=torch.Generator().manual_seed(1))

    def loss_and_learning() -> tuple[float, set[str]]:
        logits = model(input_ids=ids, use_cache=False).logits.float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        return loss.item(), {name for name, parameter in model.named_parameters() if parameter.grad is not None}

    expected, learning = loss_and_learning()
    with torch.autocast("cpu", torch.bfloat16):
        outcomes = [loss_and_learning()]
    model.to(torch.bfloat16)
    outcomes.append(loss_and_learning())
    assert outcomes == [(pytest.approx(expected, abs=0.1), learning)] * 2
