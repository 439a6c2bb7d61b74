"""State that an engine leaves: of a model that is another in training, an evaluation before and after a resume is that
of a plain loop in eval mode, and the next steps are those of the uninterrupted engine, in each family that one process
can run.

python -m pytest -q tests/test_engine_goes_on.py
"""

import copy
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from torch.distributed import distributed_c10d
from transformers import LlamaConfig, LlamaForCausalLM

from cookbook.config.optim.groups import build_optimizer
from cookbook.start.launchers import World
from cookbook.start.run_plan import load_pair, make_plan
from cookbook.training.checkpoint import resume
from cookbook.training.data.batches import collate
from cookbook.training.engine import Engine, engine_class
from cookbook.training.models.loss import add_loss
from tests.test_engine_step import MICRO_BATCHES, OBJECTIVE, VOCAB, losses_of, samples, save, saver_in, steps

TOKENS = samples()


def new_model(seed: int) -> LlamaForCausalLM:
    """A model whose last norm has larger outputs in training mode, as dropout has, without random numbers."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, initializer_range=0.2, **sizes))
    model.model.norm.register_forward_hook(lambda norm, _, output: output * 1.25 if norm.training else output)
    return model


def engine_of(model: LlamaForCausalLM, strategy_name: str) -> Engine:
    recipe, strategy = load_pair(
        Path("recipes/small.yaml"), ["optim.max_grad_norm=0.5"], Path(f"accelerate_configs/{strategy_name}.yaml")
    )
    plan = make_plan(recipe, strategy, num_processes=1, num_gpus=0, recipe_name="recipes/small.yaml")
    world = World(rank=0, local_rank=0, num_processes=1, num_local=1, is_launched=True)
    engine = engine_class(strategy)(strategy, plan, world, recipe, timeout=timedelta(minutes=5))
    add_loss(model)
    engine.prepare(model, build_optimizer(model, recipe.optim, "no"), counts_beside="exp_avg")
    return engine


def end_processes() -> None:
    """End what an engine sets for its whole process; DeepSpeed keeps the group in two places of its own."""
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(True)
    import deepspeed.comm.comm
    import deepspeed.utils.groups

    deepspeed.comm.comm.cdb = None
    deepspeed.utils.groups._WORLD_GROUP = None


@pytest.fixture(autouse=True)
def one_process(book, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(F, "linear", F.linear)  # DeepSpeed puts its own there under ZeRO-3
    monkeypatch.setattr(os, "environ", os.environ)  # an engine writes variables of its own
    before = dict(os.environ)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    end_processes()
    yield
    end_processes()
    os.environ.clear()
    os.environ.update(before)


def evaluate(engine: Engine) -> float:
    means = engine.evaluate(OBJECTIVE.compute, (collate(TOKENS, mine, pad_id=0) for mine in MICRO_BATCHES))
    return means["loss"]


def plain_loss(model: LlamaForCausalLM) -> float:
    with torch.no_grad():
        return torch.cat(losses_of(model.eval(), TOKENS)).mean().item()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2", "zero2", "zero3"])
def test_evaluations_and_a_resume_leave_the_next_steps_as_they_were(strategy: str):
    first, other = (new_model(seed) for seed in (4, 9))
    expected = [plain_loss(copy.deepcopy(model)) for model in (first, other)]
    engine = engine_of(first, strategy)
    assert evaluate(engine) == pytest.approx(expected[0], rel=1e-5)
    trained = steps(engine, TOKENS, range(1, 3))
    assert abs(trained[0].means["loss"] - expected[0]) > 1e-3, "training mode changed nothing"
    held_out = evaluate(engine)
    saver = saver_in(Path("checkpoints"))
    save(saver, engine, 2)
    next_steps = steps(engine, TOKENS, range(3, 5))
    end_processes()

    resumed = engine_of(other, strategy)
    assert evaluate(resumed) == pytest.approx(expected[1], rel=1e-5)  # as a reference is asked before the state is read
    resume.load(saver.newest, resumed.parameter_shapes(), resumed.restore)
    assert evaluate(resumed) == held_out
    assert steps(resumed, TOKENS, range(3, 5)) == next_steps
