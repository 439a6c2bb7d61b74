"""Steps of an engine are those of plain torch: gradients, norm, clipping, update and means, one process and no run.

python -m pytest -q tests/test_engine_step.py
"""

import copy
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from torch.distributed import distributed_c10d
from transformers import LlamaConfig, LlamaForCausalLM

from cookbook.config.objectives import Objective
from cookbook.config.optim.groups import build_optimizer
from cookbook.planning.launchers import World
from cookbook.planning.run_plan import load_pair, make_plan
from cookbook.training.data.batches import collate
from cookbook.training.data.tokens import TokenSet, join
from cookbook.training.engine import Engine, engine_class
from cookbook.training.models.loss import add_loss

VOCAB, LEARNING_RATE = 61, 1e-2
LENGTHS = (9, 4, 12, 7, 5)
MICRO_BATCHES = ([0], [1, 2], [3, 4])
OBJECTIVE = Objective.of(name="sft")


@pytest.fixture(autouse=True)
def no_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an engine sets for its whole process ends with the test."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(4)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, initializer_range=0.2, **sizes))


def samples() -> TokenSet:
    """Of each sequence a prompt without labels, and the rest with."""
    chance = np.random.default_rng(5)
    pieces = [(chance.integers(0, VOCAB, n, dtype=np.int32), np.arange(n) >= 2 + n % 3) for n in LENGTHS]
    return join(pieces)


def engine_of(model: LlamaForCausalLM, clip: float) -> Engine:
    recipe, strategy = load_pair(
        Path("recipes/small.yaml"),
        [f"optim.max_grad_norm={clip}", f"optim.learning_rate={LEARNING_RATE}", "optim.weight_decay=0.1"],
        Path("accelerate_configs/single.yaml"),
    )
    plan = make_plan(recipe, strategy, num_processes=1, num_gpus=0, recipe_name="recipes/small.yaml")
    world = World(rank=0, local_rank=0, num_processes=1, num_local=1, is_launched=False)
    engine = engine_class(strategy)(strategy, plan, world, recipe, timeout=timedelta(minutes=5))
    add_loss(model)
    engine.prepare(model, build_optimizer(model, recipe.optim, "no"), counts_beside="exp_avg")
    return engine


def losses_of(model: LlamaForCausalLM, tokens: TokenSet) -> list[torch.Tensor]:
    """Of each label, by the logits of its whole sequence alone."""
    found = []
    for start, end in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True):
        ids = torch.from_numpy(tokens.ids[start:end].astype(np.int64))
        labelled = torch.from_numpy(np.array(tokens.is_label[start + 1 : end]))
        logits = model(input_ids=ids[None]).logits[0, :-1]
        found.append(F.cross_entropy(logits[labelled], ids[1:][labelled], reduction="none"))
    return found


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e3], ids=["off", "clipped", "not reached"])
def test_steps_are_those_of_plain_torch(book, clip: float):
    model = new_model()
    plain, tokens = copy.deepcopy(model), samples()
    engine = engine_of(model, clip)
    matrices, others = ([p for p in plain.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)
    batches = [collate(tokens, mine, pad_id=0) for mine in MICRO_BATCHES]
    count = sum(len(batch["targets"]) for batch in batches)
    for step in range(3):
        engine.begin_step(step + 1, seed=0)
        result = engine.step(engine.gradients(OBJECTIVE.compute, batches, count), 7.0)
        every = torch.cat(losses_of(plain, tokens))
        assert len(every) == count
        every.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or 1e9)
        assert clip != 0.5 or norm > 2 * clip, "nothing was clipped"
        optimizer.step()
        optimizer.zero_grad()
        assert result.means == {"loss": pytest.approx(every.mean().item(), rel=1e-6)}
        assert (result.grad_norm, result.maxima) == (pytest.approx(norm.item(), rel=1e-5), [7.0])
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=2e-3 * LEARNING_RATE), name


def test_a_held_out_loss_is_the_mean_over_all_labels_of_all_batches(book):
    model = new_model()
    plain, tokens = copy.deepcopy(model), samples()
    engine = engine_of(model, 1.0)
    found = engine.evaluate(OBJECTIVE.compute, (collate(tokens, mine, pad_id=0) for mine in MICRO_BATCHES))
    every = torch.cat(losses_of(plain, tokens))
    assert found == {"loss": pytest.approx(every.mean().item(), rel=1e-6), "num_tokens": len(every)}
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
