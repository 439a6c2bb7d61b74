"""The learning rate is a function of the step, and weight decay leaves norms alone. pytest tests/test_optim.py"""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cookbook.optim import build_optimizer, learning_rate, parameter_groups, set_learning_rate
from cookbook.recipe import OptimSection, ScheduleSection

OPTIM = OptimSection(learning_rate=0.8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # warm-up 2 of 6 steps: 1/2, 2/2, then progress 0, 1/4, 2/4, 3/4 of the way down
        ("constant", [0.4, 0.8, 0.8, 0.8, 0.8, 0.8]),
        ("linear", [0.4, 0.8, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.4, 0.8, 0.8] + [0.4 * (1 + math.cos(math.pi * p)) for p in (0.25, 0.5, 0.75)]),
    ],
)
def test_learning_rates_by_hand(name: str, expected: list[float]):
    schedule = ScheduleSection(name=name, warmup_steps=2)
    assert [learning_rate(step, 6, OPTIM, schedule) for step in range(6)] == pytest.approx(expected)


def test_the_first_step_of_a_warm_up_trains():
    assert learning_rate(0, 100, OPTIM, ScheduleSection(warmup_steps=10)) == pytest.approx(0.08)


def test_weight_decay_applies_to_matrices_only():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2, bias=False))
    decayed, plain = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 3), (2, 4)]
    assert [tuple(p.shape) for p in plain["params"]] == [(4,), (4,), (4,)]


def test_frozen_parameters_stay_out_of_the_optimizer():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert sum(len(group["params"]) for group in build_optimizer(model, OPTIM).param_groups) == 2


def test_cut_and_whole_parameters_go_into_groups_of_their_own():
    """Tensor parallel cuts a bias and leaves a norm whole; no fused update takes both."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    model[0].bias = torch.nn.Parameter(distribute_tensor(model[0].bias.detach(), mesh, [Shard(0)]))
    groups = parameter_groups(model, 0.1)
    assert [len({type(p.data) for p in group["params"]}) for group in groups] == [1] * len(groups)
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.0, 0.1]
    dist.destroy_process_group()


def test_a_partitioned_parameter_is_judged_by_its_true_shape():
    matrix = torch.nn.Parameter(torch.empty(0))
    matrix.ds_shape = torch.Size([4, 4])
    model = torch.nn.Module()
    model.weight = matrix
    assert parameter_groups(model, 0.1)[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_update_is_the_one_of_the_paper(name: str):
    parameter = torch.nn.Parameter(torch.tensor([[2.0]], dtype=torch.float64))
    model = torch.nn.Module()
    model.weight = parameter
    settings = OptimSection(name=name, learning_rate=0.5, weight_decay=0.1)
    optimizer = build_optimizer(model, settings)
    set_learning_rate(optimizer, 0.25)
    parameter.grad = torch.tensor([[0.5]], dtype=torch.float64)
    optimizer.step()
    # Loshchilov and Hutter 2019, algorithm 2: the first bias-corrected step is g / (|g| + eps). SGD: g + wd * w.
    expected = 2.0 - 0.25 * 0.1 * 2.0 - 0.25 * 0.5 / (0.5 + 1e-8) if name == "adamw" else 2.0 - 0.25 * (0.5 + 0.1 * 2.0)
    assert parameter.item() == pytest.approx(expected, abs=1e-12)
