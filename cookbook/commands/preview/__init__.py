"""`preview`: what a recipe would train on."""

from pathlib import Path
from typing import Annotated

from cookbook.commands.shared.arguments import QUICKSTART, RECIPE, Assignments
from cookbook.system.files import RecipeError


def preview(path: Annotated[Path, RECIPE] = QUICKSTART, *, samples: int = 3, assignments: Assignments) -> int:
    """Show samples as the model will see them, and their lengths."""
    if samples < 0:
        raise RecipeError(f"--samples is {samples}; it must be at least 0")
    from cookbook.commands.preview.sample_page import preview

    return preview(path, assignments, samples)
