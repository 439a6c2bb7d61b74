"""Steps of an engine are those of plain torch: gradients, norm, clipping, update and means, one process and no run.
What a save leaves is what torch's optimizer holds, and a restored engine goes on with it.

python -m pytest -q tests/test_engine_step.py
"""

import contextlib
import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from transformers import LlamaConfig, LlamaForCausalLM

from cookbook.config.objectives import Objective
from cookbook.config.optim.groups import build_optimizer
from cookbook.start.launchers import World
from cookbook.start.run_plan import load_pair, make_plan
from cookbook.system.files import RecipeError
from cookbook.training.checkpoint import resume
from cookbook.training.checkpoint.saver import Saver
from cookbook.training.data.batches import collate
from cookbook.training.data.tokens import TokenSet, join
from cookbook.training.engine import Engine, engine_class, fsdp2
from cookbook.training.engine.fsdp import Fsdp
from cookbook.training.engine.fsdp2 import Fsdp2
from cookbook.training.engine.state import Piece
from cookbook.training.models.loss import add_loss

VOCAB, LEARNING_RATE, BETAS, EPS = 61, 1e-2, (0.8, 0.95), 1e-4
LENGTHS = (9, 4, 12, 7, 5)
MICRO_BATCHES = ([0], [1, 2], [3, 4])
OBJECTIVE = Objective.of(name="sft")
CLIP = 0.5


@pytest.fixture(autouse=True)
def no_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End with the test what an engine sets for its whole process."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def new_model(**sizes: int) -> LlamaForCausalLM:
    torch.manual_seed(4)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, initializer_range=0.2, **SIZES | sizes))


def samples() -> TokenSet:
    """Each sequence has a prompt without labels, and the rest with."""
    chance = np.random.default_rng(5)
    pieces = [(chance.integers(0, VOCAB, n, dtype=np.int32), np.arange(n) >= 2 + n % 3) for n in LENGTHS]
    return join(pieces)


def engine_of(model: LlamaForCausalLM, clip: float) -> Engine:
    recipe, strategy = load_pair(
        Path("recipes/small.yaml"),
        [
            f"optim.max_grad_norm={clip}",
            f"optim.learning_rate={LEARNING_RATE}",
            f"optim.betas={list(BETAS)}",
            f"optim.eps={EPS}",
            "optim.weight_decay=0.1",
        ],
        Path("accelerate_configs/single.yaml"),
    )
    plan = make_plan(recipe, strategy, num_processes=1, num_gpus=0, recipe_name="recipes/small.yaml")
    world = World(rank=0, local_rank=0, num_processes=1, num_local=1, is_launched=False)
    engine = engine_class(strategy)(strategy, plan, world, recipe, timeout=timedelta(minutes=5))
    add_loss(model)
    engine.prepare(model, build_optimizer(model, recipe.optim, "no"), counts_beside="exp_avg")
    return engine


def losses_of(model: LlamaForCausalLM, tokens: TokenSet) -> list[torch.Tensor]:
    """The loss of each label, by the logits of its whole sequence alone."""
    losses = []
    for start, end in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True):
        ids = torch.from_numpy(tokens.ids[start:end].astype(np.int64))
        labelled = torch.from_numpy(np.array(tokens.is_label[start + 1 : end]))
        logits = model(input_ids=ids[None]).logits[0, :-1]
        losses.append(F.cross_entropy(logits[labelled], ids[1:][labelled], reduction="none"))
    return losses


class Plain:
    """torch's own loop, and its optimizer."""

    def __init__(self, model: LlamaForCausalLM, clip: float) -> None:
        self.model, self.clip = model, clip
        matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS)

    def step(self, tokens: TokenSet) -> tuple[float, float, int]:
        """Loss, norm before clipping, and number of labels."""
        every = torch.cat(losses_of(self.model, tokens))
        every.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or 1e9)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return every.mean().item(), norm.item(), len(every)


def steps(engine: Engine, tokens: TokenSet, numbers: range) -> list:
    """Results of these steps."""
    batches = [collate(tokens, mine, pad_id=0) for mine in MICRO_BATCHES]
    count, results = sum(len(batch["targets"]) for batch in batches), []
    for number in numbers:
        engine.begin_step(number)
        results.append(engine.step(engine.gradients(OBJECTIVE.compute, batches, count), 7.0))
    return results


@pytest.mark.parametrize("clip", [0.0, CLIP, 1e3], ids=["off", "clipped", "not reached"])
def test_steps_are_those_of_plain_torch(book, clip: float):
    model = new_model()
    plain, tokens = Plain(copy.deepcopy(model), clip), samples()
    for result in steps(engine_of(model, clip), tokens, range(1, 4)):
        loss, norm, _ = plain.step(tokens)
        assert clip != CLIP or norm > 2 * CLIP, "nothing was clipped"
        assert result.means == {"loss": pytest.approx(loss, rel=1e-6)}
        assert (result.grad_norm, result.maxima) == (pytest.approx(norm, rel=1e-5), [7.0])
    for (name, weight), other in zip(model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(weight, other, rtol=1e-5, atol=2e-3 * LEARNING_RATE), name


def test_frozen_weights_are_not_counted_as_trained(book):
    model = new_model()
    model.model.layers[0].requires_grad_(False)
    engine = engine_of(model, CLIP)
    frozen = 2 * 24 * 24 + 2 * 24 * 12 + 3 * 24 * 40 + 2 * 24  # q and o, k and v, the MLP, two norms
    assert engine.num_parameters - engine.num_trained == frozen and 0 < engine.num_trained != frozen


def saver_in(folder: Path) -> Saver:
    options = {"rank": 0, "num_ranks": 1, "attempt": "a", "keep_last": 2, "keep_best": 0, "say": print}
    return Saver(folder, in_background=True, **options)


def save(saver: Saver, engine: Engine, step: int) -> Path:
    saver.save(step, engine.pieces(), {"parameters": engine.parameter_shapes(), "counts": engine.counts()})
    saver.wait()
    return saver.newest.path


def test_a_checkpoint_holds_the_weights_moments_and_count_of_plain_torch(book):
    model = new_model()
    plain, tokens = Plain(copy.deepcopy(model), CLIP), samples()
    engine = engine_of(model, CLIP)
    steps(engine, tokens, range(1, 4))
    for _ in range(3):
        plain.step(tokens)
    folder = save(saver_in(Path("checkpoints")), engine, 3)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    assert len(tensors) == 3 * len(list(plain.model.parameters()))
    for name, weight in plain.model.named_parameters():
        moments = plain.optimizer.state[weight]
        for kind, tensor in (("weight", weight), *((kind, moments[kind]) for kind in ("exp_avg", "exp_avg_sq"))):
            scale = float(tensor.detach().abs().max())
            assert torch.allclose(tensors[f"{name}|{kind}|0"], tensor.flatten(), rtol=1e-4, atol=1e-5 * scale), (
                name,
                kind,
            )
    counts = json.loads((folder / "state.json").read_text())["counts"]
    assert counts == {"updates": int(moments["step"]), "loss_scaler": None} and counts["updates"] == 3


@pytest.mark.parametrize("change", [{"lm_head.weight": [VOCAB, 25]}, {"another.weight": [1]}], ids=["width", "name"])
def test_a_checkpoint_of_another_model_is_not_read(book, change: dict):
    engine, saver = engine_of(new_model(), CLIP), saver_in(Path("checkpoints"))
    save(saver, engine, 3)
    with pytest.raises(RecipeError, match=f"of another model: {next(iter(change))} is "):
        resume.load(saver.newest, engine.parameter_shapes() | change, engine.restore)


@pytest.mark.parametrize("copies", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 5])
def test_of_what_several_ranks_hold_each_writes_a_part_and_all_write_everything(rows: int, copies: int):
    """A run of 35 elements from 4 on, or rows of 7 elements, 10 apart."""
    data = torch.arange(35.0).view(rows, -1)
    place = {"name": "a", "kind": "weight", "shape": (6, 10), "start": 4, "stride": 10 * (rows > 1)}
    written = {}
    for copy_ in range(copies):
        share = Piece(data=data, copies=copies, copy=copy_, **place).share()
        assert share.share() is share, "what one rank writes is not shared again"
        for i, run in enumerate(share.data):
            for k, value in enumerate(run.tolist()):
                assert share.start + i * share.stride + k not in written, "it is written once"
                written[share.start + i * share.stride + k] = value
    expected = {4 + 10 * i + k: 7.0 * i + k for i in range(5) for k in range(7)}
    assert written == (expected if rows > 1 else {4 + i: float(i) for i in range(35)})


def test_a_restored_engine_goes_on_as_if_it_had_not_stopped(book):
    model, tokens, other = new_model(), samples(), new_model()
    engine, saver = engine_of(model, CLIP), saver_in(Path("checkpoints"))
    steps(engine, tokens, range(1, 4))
    save(saver, engine, 3)
    expected = steps(engine, tokens, range(4, 6))
    torch.nn.init.zeros_(other.lm_head.weight)
    restored = engine_of(other, CLIP)
    resume.load(saver.newest, restored.parameter_shapes(), restored.restore)
    assert steps(restored, tokens, range(4, 6)) == expected
    assert all(torch.equal(weight, two) for weight, two in zip(model.parameters(), other.parameters(), strict=True))


def test_a_held_out_loss_is_the_mean_over_all_labels_of_all_batches(book):
    model = new_model()
    plain, tokens = copy.deepcopy(model), samples()
    engine = engine_of(model, 1.0)
    losses = engine.evaluate(OBJECTIVE.compute, (collate(tokens, mine, pad_id=0) for mine in MICRO_BATCHES))
    every = torch.cat(losses_of(plain, tokens))
    assert losses == {"loss": pytest.approx(every.mean().item(), rel=1e-6), "num_tokens": len(every)}
    assert model.training


def test_a_step_that_is_not_finite_leaves_the_weights(book):
    model = new_model()
    before, tokens = copy.deepcopy(model.state_dict()), samples()
    engine = engine_of(model, 1.0)
    batches = [collate(tokens, mine, pad_id=0) for mine in MICRO_BATCHES]

    def broken(given, batch):
        outcome = OBJECTIVE.compute(given, batch)
        return outcome if len(batch["targets"]) > 9 else type(outcome)(outcome.loss_sum * float("nan"), outcome.count)

    assert not np.isfinite(engine.step(engine.gradients(broken, batches, 20)).grad_norm)
    assert 0 < len(engine.nonfinite_micro_batches()) < len(batches)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("asked", "in_force"), [(0.0, 1.0), (None, "bf16"), (False, True), (2, 1)])
def test_what_should_be_off_and_is_on_is_a_difference_too(book, monkeypatch, asked, in_force):
    engine = engine_of(new_model(), CLIP)
    monkeypatch.setattr(engine, "_findings", lambda: iter([("the like", 0, 0), ("something", asked, in_force)]))
    with pytest.raises(RuntimeError, match=r"single\.yaml is not what runs:\n  something: asked for") as error:
        engine.assert_in_force()
    assert str(error.value).count("\n") == 1


def test_a_step_that_draws_numbers_of_its_own_is_refused(book):
    """A model's dropout that is not drawn for the tokens, as before `draws` were told of it."""

    engine, tokens = engine_of(new_model(), 0.0), samples()
    batches = [collate(tokens, mine, pad_id=0) for mine in MICRO_BATCHES]

    def noisy(model, batch):
        outcome = OBJECTIVE.compute(model, batch)
        return replace(outcome, loss_sum=outcome.loss_sum * (1 + 1e-3 * torch.rand(())))

    with pytest.raises(RecipeError, match="the first step drew random numbers of its own"):
        engine.gradients(noisy, batches, 10)


@pytest.mark.parametrize("is_quantized", [True, False])
def test_fsdp2_gathers_as_bytes_just_the_weights_that_are_in_4_bits(is_quantized: bool, monkeypatch):
    """FSDP2 takes bytes for a unit's dtype where its parameters have several, as in torch 2.13."""
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    if is_quantized:
        model.weight.quant_state = "of bitsandbytes"  # type: ignore[assignment]
    monkeypatch.setattr(collectives, "_get_all_gather_input_metadatas", collectives._get_all_gather_input_metadatas)
    monkeypatch.setattr(Fsdp, "_wrap", lambda _, *parts: parts)
    monkeypatch.setattr(Fsdp2, "_saved_buffers_sent", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(Fsdp2, "low_dtype", None)
    engine = Fsdp2.__new__(Fsdp2)
    engine._shards = None
    engine._wrap(model, torch.optim.SGD(model.parameters()))
    *_, dtype = collectives._get_all_gather_input_metadatas([[model.weight], [model.bias]])
    assert dtype == (torch.uint8 if is_quantized else torch.bfloat16)


@pytest.mark.parametrize("asked", [torch.bfloat16, None])
def test_gradients_are_reduced_as_the_key_asks_where_transformers_has_sharded_a_model(asked, monkeypatch):
    engine, layer = Fsdp2.__new__(Fsdp2), SimpleNamespace(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    monkeypatch.setattr(fsdp2, "_groups", lambda model: [layer] if model == "model" else [])
    monkeypatch.setattr(Fsdp2, "gradient_dtype", asked)
    engine._reduce_in_gradient_dtype("model")
    assert layer.mp_policy == MixedPrecisionPolicy(reduce_dtype=asked or torch.float32)
