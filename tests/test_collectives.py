"""Sums and means over the ranks are those by hand, where each of four ranks has the same values. No run.

python -m pytest -q tests/test_collectives.py
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from cookbook.config.mesh import Mesh
from cookbook.start.launchers import World
from cookbook.training.engine.collectives import Collectives, average_gradients

WORLD = World(rank=0, local_rank=0, num_processes=4, num_local=4, is_launched=True)


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor.mul_(dist.get_world_size(group)))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("values", [[3.0], [1.5, 12.0]], ids=["alone", "several"])
def test_the_mean_of_equal_gradients_over_a_part_of_the_ranks_is_each(four_ranks, values, dtype):
    """Several are sent as one; another parameter has none."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 5, 2)]
    for parameter, value in zip(parameters, values, strict=False):
        parameter.grad = torch.full_like(parameter, value)
    average_gradients(parameters, dist.new_group([0, 2]), dtype)
    assert [parameter.grad.unique().tolist() for parameter in parameters if parameter.grad is not None] == [
        [value] for value in values
    ]


def test_what_ranks_compute_together_counts_once(four_ranks):
    """Two pairs of tensor parallel see other samples; of two stages of a pipeline, the last has the losses."""

    def of(**mesh: int) -> Collectives:
        return Collectives(WORLD, Mesh(**mesh), torch.device("cpu"), lambda doing: None)

    rows = np.array([[1.0], [1.0], [10.0], [10.0]])
    assert of(replicate=2, tensor=2).sums(rows) == [11] and of(tensor=2, pipeline=2).sums(rows) == [10]
    assert of(replicate=4).sums(rows) == [22] and of(replicate=2, pipeline=2).sums(rows) == [20]
    assert of(replicate=2, tensor=2).all_reduce_sum(torch.tensor([3.0])).tolist() == [6]
    assert of(replicate=4).all_reduce_sum(torch.tensor([3.0])).tolist() == [12]
    assert of(replicate=2, tensor=2).all_reduce_mean(torch.tensor([3.0])).tolist() == [3]
