"""`cookbook plan`: a recipe's forecast under every strategy."""

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from cookbook.commands.shared.arguments import QUICKSTART, RECIPE, AsJson, Assignments, Strategies, positive
from cookbook.commands.shared.labels import read_label, read_needs
from cookbook.config.strategy import find_strategy, known_strategies, load_known, load_strategy
from cookbook.start.run_plan import load_pair
from cookbook.system.console import say
from cookbook.system.hardware import GIB, Machines, parse_machines, this_machine, with_room
from cookbook.system.imports import imports, quiet_deepspeed
from cookbook.system.shipped import short


def plan(
    path: Annotated[Path, RECIPE] = QUICKSTART,
    *,
    gpus: Annotated[str | None, Option(metavar="8xH100", help="or 2x8x80GB, cpu; default: here, or the label")] = None,
    strategy: Strategies = None,
    host_gib: Annotated[float | None, Option(help="memory of each machine, for offloading")] = None,
    nvme_gib: Annotated[float | None, Option(help="free on the disk of each machine, for offloading")] = None,
    fabric: Annotated[float | None, Option(help="Gbit/s of each GPU's network card; default: 100 to 400")] = None,
    samples: Annotated[int | None, Option(callback=positive, help="rows of data.train, for the run's time")] = None,
    price: Annotated[float | None, Option(callback=positive, help="of a GPU for an hour, in any currency")] = None,
    as_json: AsJson = False,
    assignments: Assignments,
) -> int:
    """Forecast memory, speed and price; 1 if nothing fits."""
    paths = [find_strategy(name) for name in strategy or known_strategies()]
    recipe, _ = load_pair(path, assignments, paths[0] if strategy else None)
    machines = machines_for(path, gpus, {"fabric_gbits": fabric, "host_gib": host_gib, "nvme_gib": nvme_gib})
    strategies = [load_strategy(path) for path in paths]

    quiet_deepspeed()
    with imports():
        from transformers.utils import logging

        from cookbook.forecast.mesh_sizes import better_sizes
        from cookbook.forecast.ranking import by_auto, forecast_all
        from cookbook.forecast.second_process import second_process
        from cookbook.forecast.show import as_record, in_words
        from cookbook.forecast.verdict import MAY_RUN

    logging.set_verbosity_error()  # of kernels that are not installed where the plan is made
    others = load_known() if strategy else []
    with second_process():
        outlook = forecast_all(recipe, strategies, machines, str(path), others, more=True)
        sizes = better_sizes(recipe, strategies, machines, str(path))
        settings = by_auto(outlook, str(path), all_of_them=strategy is not None)
    if as_json:
        record = as_record(outlook, str(path), num_samples=samples, price=price, sizes=sizes, settings=settings)
        say(json.dumps(record, indent=1))
    else:
        text = in_words(outlook, str(path), num_samples=samples, price=price, sizes=sizes, settings=settings)
        say(short(text), is_coloured=True)
    return 0 if outlook.forecasts[0].verdict in MAY_RUN else 1


def machines_for(recipe: Path, text: str | None, options: dict[str, float | None]) -> Machines:
    """Machines of the forecast: those asked for, else those here, else those that the recipe's label needs."""
    if text is None:
        here = this_machine()
        needs = read_needs(read_label(recipe))
        if here.num_gpus or needs.num_gpus is None or needs.gpu_gb is None:
            return with_room(here, **options)
        text = needs.machine
        asked = {"host_gib": needs.host_gb, "nvme_gib": needs.nvme_gb}
        options |= {name: gb * 1e9 / GIB for name, gb in asked.items() if gb is not None and options[name] is None}
    return parse_machines(text, **options)
