"""Steps of ZeRO's engine in one process are those of plain torch, and a restored one goes on with it. No run.

python -m pytest -q tests/test_engine_zero.py
"""

import contextlib
import copy
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

from cookbook.config.optim.groups import build_optimizer
from cookbook.start.launchers import World
from cookbook.start.run_plan import load_pair, make_plan
from cookbook.system.files import RecipeError
from cookbook.training.checkpoint import resume
from cookbook.training.engine import Engine, engine_class
from cookbook.training.engine.zero import Zero, import_deepspeed
from cookbook.training.models.loss import add_loss
from tests.test_engine_step import BETAS, CLIP, EPS, LEARNING_RATE, Plain, new_model, samples, save, saver_in, steps

TIMEOUT = timedelta(minutes=5)
ODD = {"hidden_size": 25, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 6}
"""Sizes of a model with an odd number of weights in norms, to which ZeRO-2 adds one."""


@pytest.fixture
def alone(book, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    # The last by accelerate, and for the whole process.
    for name, value in (ranks | {"ACCELERATE_USE_DEEPSPEED": "true"}).items():
        monkeypatch.setenv(name, value)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # which an engine sets for its whole process
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # ZeRO-3 replaces it for good
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield
    AcceleratorState._reset_state(True)
    dist.destroy_process_group()


def engine_of(name: str, model: torch.nn.Module) -> Engine:
    keys = {"learning_rate": LEARNING_RATE, "betas": [*BETAS], "eps": EPS, "weight_decay": 0.1, "max_grad_norm": CLIP}
    recipe, strategy = load_pair(
        Path("recipes/small.yaml"),
        [f"optim.{key}={value}" for key, value in keys.items()],
        Path(f"accelerate_configs/{name}.yaml"),
    )
    plan = make_plan(recipe, strategy, num_processes=1, num_gpus=0, recipe_name="recipes/small.yaml")
    world = World(rank=0, local_rank=0, num_processes=1, num_local=1, is_launched=True)
    AcceleratorState._reset_state(True)
    engine = engine_class(strategy)(strategy, plan, world, recipe, timeout=TIMEOUT)
    add_loss(model)
    engine.prepare(model, build_optimizer(model, recipe.optim, "no"), counts_beside="exp_avg")
    return engine


@pytest.mark.core
def test_zero_steps_as_plain_torch_and_goes_on_from_its_checkpoint(alone):
    # In one test: DeepSpeed keeps what it made of the first process group.
    for name, sizes in {"zero2": ODD, "zero3": {}}.items():
        assert_as_plain_torch(name, sizes)


def assert_as_plain_torch(name: str, sizes: dict[str, int]) -> None:
    model, tokens, other = new_model(**sizes), samples(), new_model(**sizes)
    plain = Plain(copy.deepcopy(model), CLIP)
    engine, saver = engine_of(name, model), saver_in(Path(name))
    expected = [plain.step(tokens), plain.step(tokens)]
    engine._usual = SimpleNamespace(median=1.0, begins=lambda norm: True)  # as if each norm were out of the usual
    results = steps(engine, tokens, range(1, 3))
    for result in results:
        assert sum(result.unusual.squares.values()) == pytest.approx(result.grad_norm**2, rel=1e-5)
    engine.assert_in_force()
    if name == "zero3":
        engine.model._config.zero_config.param_persistence_threshold = 0
        with pytest.raises(RuntimeError, match=r"between steps: asked for {'NOT_AVAILABLE'}, found {'AVAILABLE'}"):
            engine.assert_in_force()  # since these weights are so small that they stay whole
    (file,) = save(saver, engine, 2).glob("*.safetensors")
    held = load_file(file)
    assert len(held) == 3 * len(list(plain.model.parameters()))
    for key, weight in plain.model.named_parameters():
        for kind, tensor in ({"weight": weight} | plain.optimizer.state[weight]).items():
            if kind != "step":
                scale = tensor.detach().abs().max().item()
                saved = held[f"{key}|{kind}|0"]
                torch.testing.assert_close(saved, tensor.detach().flatten(), rtol=1e-4, atol=1e-5 * scale)
    torch.nn.init.zeros_(other.lm_head.weight)
    restored = engine_of(name, other)
    resume.load(saver.newest, restored.parameter_shapes(), restored.restore)
    expected += [plain.step(tokens), plain.step(tokens)]
    results += steps(restored, tokens, range(3, 5))
    for result, (loss, norm, _) in zip(results, expected, strict=True):
        assert result.means == {"loss": pytest.approx(loss, rel=1e-6)}
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)


def test_a_model_whose_files_are_divided_by_the_sizes_of_cut_weights_is_refused():
    zero = object.__new__(Zero)
    zero.strategy = SimpleNamespace(path="zero3.yaml")
    said = r"zero3\.yaml: .* divides a matrix .* which are cut here; use fsdp2"
    with pytest.raises(RecipeError, match=said), zero._partition_at_creation():
        torch.split(torch.ones(4), [0, 0])
    with pytest.raises(RuntimeError, match="shape"), zero._partition_at_creation():
        torch.ones(4).view(3)


@pytest.mark.parametrize(("numel", "block_size", "is_missing"), [(2**19, 1, 1), (2**19 - 1, 1, 0), (2**19, 2**21, 0)])
def test_weights_that_reach_no_disk_end_the_run_if_deepspeed_swaps_their_size(
    numel: int, block_size: int, is_missing: int, tmp_path: Path
):
    """Two bytes each: DeepSpeed swaps what has a mebibyte, and a block of the JSON's `aio` if that is larger."""
    swapping = import_deepspeed().runtime.swap_tensor
    swapper = object.__new__(swapping.partitioned_param_swapper.AsyncPartitionedParameterSwapper)
    swapper.min_aio_bytes, swapper.swap_element_size = max(swapping.utils.MIN_AIO_BYTES, block_size), 2
    weight = torch.nn.Parameter(torch.empty(0))
    weight.nvme_swapper, weight.ds_tensor = swapper, SimpleNamespace(ds_numel=numel, element_size=lambda: 2)
    zero = object.__new__(Zero)
    zero.world, zero.strategy = SimpleNamespace(rank=0), SimpleNamespace(path="a.yaml")
    zero.model, zero.swap_folders = SimpleNamespace(parameters=lambda: [weight]), {"offload_param": tmp_path}
    with pytest.raises(RuntimeError, match="no parameter reached") if is_missing else contextlib.nullcontext():
        zero._assert_swapped()
    file = tmp_path / "zero_stage_3" / "bfloat16params" / "rank0" / "0_param.tensor.swp"
    file.parent.mkdir(parents=True)
    file.touch()
    zero._assert_swapped()
