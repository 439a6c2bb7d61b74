"""The norm of gradients is that of float64, whatever their size, without a second copy of them.

python -m pytest -q tests/test_norm.py
"""

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cookbook.training.engine.norm import norm_in_float64, square_sum


def largest_allocation(function: Callable[[], torch.Tensor]) -> int:
    """Bytes of the largest that is made, also inside of operations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events = profiled.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("shape", [(3, 5), (1024,), (64, 1024), (1000, 1001), (2048, 4096), (0, 7)], ids=str)
def test_the_norm_is_that_of_float64_without_a_copy_in_it(shape: tuple[int, ...]):
    """Rows of uneven size, as gradients have them; torch's own float32 norm shows that the numbers are hard enough."""
    torch.manual_seed(0)
    tensor = torch.randn(shape) * torch.rand(shape[0], *(1 for _ in shape[1:]))
    exact = float(tensor.double().square().sum().sqrt())
    norm = norm_in_float64(tensor)
    assert norm.dtype == torch.float64 and float(norm) == pytest.approx(exact, rel=2e-8, abs=0)
    if tensor.numel() > 10**6:
        assert abs(float(torch.linalg.vector_norm(tensor)) / exact - 1) > 1e-5
        assert largest_allocation(lambda: norm_in_float64(tensor)) < tensor.nbytes / 100
        avoided = largest_allocation(lambda: torch.linalg.vector_norm(tensor, dtype=torch.float64))
        assert avoided == 2 * tensor.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_close_where_rounding_does_not_even_out(dtype: torch.dtype):
    """Equal numbers, and a gradient of an embedding of which one row was used."""
    equal, sparse = torch.full((300, 1000), 0.1234, dtype=dtype), torch.zeros(128, 1000, dtype=dtype)
    sparse[7] = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    for tensor in (equal, sparse):
        assert float(norm_in_float64(tensor)) == pytest.approx(float(tensor.double().norm()), rel=5e-7, abs=0)


def test_numbers_of_16_bits_are_squared_in_32():
    tensor = torch.full((70, 1024), 300.0, dtype=torch.float16)  # whose squares are no such numbers
    assert float(norm_in_float64(tensor)) == pytest.approx(300 * (70 * 1024) ** 0.5, rel=1e-7)


def test_a_part_counts_as_often_as_there_are_different_ones():
    """The mean over four ranks of four times the squares of a part is the square of the whole."""
    weights = [torch.nn.Parameter(torch.zeros(8)) for _ in range(3)]
    weights[0].grad, weights[1].grad = torch.arange(8.0), torch.full((8,), 0.5)
    times = {id(weights[0].grad): 4.0, id(weights[1].grad): 1.0}
    square = square_sum(weights, lambda gradient: times[id(gradient)], lambda tensor: tensor)
    assert square.item() == 4 * sum(i * i for i in range(8)) + 8 * 0.25
