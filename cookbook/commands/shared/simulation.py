"""Simulated GPUs for a command: what keeps this machine from simulating them is a mistake that the user can fix."""

import contextlib
from collections.abc import Iterator

from cookbook.system.files import RecipeError
from simulated_gpus import SimulationError


@contextlib.contextmanager
def as_mistakes() -> Iterator[None]:
    """Turns the errors of `simulated_gpus` into RecipeErrors."""
    try:
        yield
    except SimulationError as error:
        raise RecipeError(str(error)) from None
