"""`preview`: what a recipe would train on."""

from pathlib import Path
from typing import Annotated

from cookbook.commands.shared.arguments import QUICKSTART, RECIPE, AsJson, Assignments
from cookbook.commands.shared.for_programs import answer
from cookbook.system.files import RecipeError


def preview(
    path: Annotated[Path, RECIPE] = QUICKSTART,
    *,
    samples: int = 3,
    as_json: AsJson = False,
    assignments: Assignments,
) -> int:
    """Show samples as the model will see them, and their lengths."""
    if samples < 0:
        raise RecipeError(f"--samples is {samples}; it must be at least 0")
    from cookbook.commands.preview.sample_page import preview

    shown = preview(path, assignments, samples)
    return answer(shown) if as_json else 0
