"""`doctor`: is this machine ready?"""

import time
from pathlib import Path
from typing import Annotated

from typer import Option

from cookbook.commands.shared.arguments import RECIPE, AsJson, StrategyFile
from cookbook.config.strategy import load_strategy
from cookbook.start.run_plan import load_pair


def doctor(
    path: Annotated[Path | None, RECIPE] = None,
    *,
    strategy: StrategyFile = None,
    as_json: AsJson = False,
    deadline: Annotated[float, Option(help="in seconds")] = 60.0,
) -> int:
    """Is this machine ready: 0 yes, 1 with warnings, 2 no."""
    from cookbook.commands.doctor.examination import examine
    from cookbook.commands.doctor.examination import report as print_report

    start = time.monotonic()
    recipe, loaded = None, None
    if path is not None:
        recipe, loaded = load_pair(path, strategy=strategy)
    elif strategy is not None:
        loaded = load_strategy(strategy)
    return print_report(examine(recipe, loaded, path, deadline), time.monotonic() - start, as_json=as_json)
