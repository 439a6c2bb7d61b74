"""`combinations`: the page of what is refused."""

from pathlib import Path

from cookbook.commands.shared.arguments import write_page
from cookbook.start.refusals import page


def combinations() -> int:
    """Write docs/combinations.md: what is refused, and why."""
    return write_page(Path("docs/combinations.md"), page)
