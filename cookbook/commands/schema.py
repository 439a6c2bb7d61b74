"""`schema`: what an editor needs to complete and check recipes."""

import json
from pathlib import Path

from cookbook.commands.shared.arguments import write_page
from cookbook.config.recipe import recipe_schema


def schema() -> int:
    """Write recipes/schema.json, for editors to check recipes."""
    return write_page(Path("recipes/schema.json"), lambda: json.dumps(recipe_schema(), indent=2) + "\n")
