"""`cookbook plan`: what is asked, of which machines, and the answer."""

import shlex
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from cookbook.commands.plan.model_recipe import Method, is_model, recipe_of_model
from cookbook.commands.shared.answer_forms import Planned
from cookbook.commands.shared.arguments import QUICKSTART, AsJson, Assignments, Strategies, positive, recipes
from cookbook.commands.shared.for_programs import answer
from cookbook.commands.shared.labels import read_label, read_needs
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy, find_strategy, known_strategies, load_known, load_strategy
from cookbook.start.run_plan import load_pair
from cookbook.system.console import say
from cookbook.system.files import RecipeError
from cookbook.system.hardware import GIB, GPUS, Machines, parse_machines, this_machine, with_room
from cookbook.system.imports import imports, quiet_deepspeed
from cookbook.system.prices import PRICES
from cookbook.system.shipped import located, short

ANY = "any"


def plan(
    what: Annotated[
        str, Argument(metavar="RECIPE|MODEL", autocompletion=recipes, help="a model: a folder, config.json or name")
    ] = str(QUICKSTART),
    *,
    method: Annotated[Method | None, Option(help="of a model; default: lora")] = None,
    length: Annotated[int | None, Option(callback=positive, help="of a model: tokens of a sample")] = None,
    gpus: Annotated[
        str | None, Option(metavar="8xH100", help="or 2x8x80GB, cpu, any; default: here, or the label, or any")
    ] = None,
    strategy: Strategies = None,
    host_gib: Annotated[float | None, Option(help="memory of each machine, for offloading")] = None,
    nvme_gib: Annotated[float | None, Option(help="free on the disk of each machine, for offloading")] = None,
    fabric: Annotated[float | None, Option(help="Gbit/s of each GPU's network card; default: 100 to 400")] = None,
    samples: Annotated[int | None, Option(callback=positive, help="rows of data.train, for the run's time")] = None,
    price: Annotated[float | None, Option(callback=positive, help="of a GPU for an hour, in any currency")] = None,
    is_all: Annotated[bool, Option("--all", help="the table; of --gpus any, every GPU")] = False,
    as_json: AsJson = False,
    assignments: Assignments,
) -> int:
    """Forecast memory, speed and price; 1 if nothing fits."""
    path = Path(located(what))
    of_model = is_model(what, path)
    if not of_model and (method or length):
        instead = "--set data.max_length=8192 or --set adapter.name=qlora"
        raise RecipeError(f"--method and --length are of a model, and {what} is a recipe; write {instead}")
    paths = [find_strategy(name) for name in strategy or known_strategies()]
    name = what if of_model else str(path)
    room = {"fabric_gbits": fabric, "host_gib": host_gib, "nvme_gib": nvme_gib}
    if of_model:
        machines = machines_or_any(None, gpus, room)
        recipe = recipe_of_model(what, method, length, machines, assignments)
    else:
        recipe, _ = load_pair(path, assignments, paths[0] if strategy else None)
        machines = machines_or_any(path, gpus, room)
    strategies = [load_strategy(path) for path in paths]

    quiet_deepspeed()
    with imports():
        from transformers.utils import logging

        from cookbook.forecast import headline
        from cookbook.forecast.mesh_sizes import better_sizes
        from cookbook.forecast.ranking import by_auto, forecast_all
        from cookbook.forecast.second_process import second_process
        from cookbook.forecast.show import as_record, in_words
        from cookbook.forecast.verdict import MAY_RUN

    logging.set_verbosity_error()  # of kernels that are not installed where the plan is made
    if machines is None:
        next_step = f"cookbook {'init' if of_model else 'plan'} {shlex.quote(what)}{' ROWS' * of_model} --gpus {{}}"
        options: dict[str, Any] = {"num_samples": samples, "price": price, "as_json": as_json, "is_all": is_all}
        named = strategies if strategy else None
        return _of_any_gpus(recipe, name, named, next_step, is_free=of_model, room=room, **options)
    others = load_known() if strategy else []
    is_long = as_json or is_all
    with second_process():
        outlook = forecast_all(recipe, strategies, machines, name, others, limits=is_long, more=True, is_whole=is_long)
        sizes = better_sizes(recipe, strategies, machines, name) if is_long else []
        settings = by_auto(outlook, name, all_of_them=strategy is not None)
    best = headline.best_by_auto(outlook, settings)
    of_run: dict[str, Any] = {"num_samples": samples, "price": price}
    if as_json:
        answer(Planned(**as_record(outlook, name, sizes=sizes, settings=settings, **of_run)))
    else:
        follows = ["launch", what] if not of_model else ["init", what, "ROWS", "--gpus", machines.text]
        lines = headline.in_words(outlook, settings, next_step=["cookbook", *follows], is_recipe=not of_model, **of_run)
        table = ["", in_words(outlook, name, sizes=sizes, settings=settings, **of_run)] if is_all else []
        say(short("\n".join([lines, *table])), is_coloured=True)
    return 0 if best is not None or outlook.forecasts[0].verdict in MAY_RUN else 1


def _of_any_gpus(
    recipe: Recipe,
    name: str,
    strategies: list[Strategy] | None,
    next_step: str,
    *,
    is_free: bool,
    room: dict[str, float | None],
    num_samples: int | None,
    price: float | None,
    as_json: bool,
    is_all: bool,
) -> int:
    """Answer for each kind of GPU; arguments as of `for_each_card`."""
    from cookbook.forecast import card_table
    from cookbook.forecast.any_gpus import for_each_card, simple
    from cookbook.forecast.second_process import second_process

    listed = [gpu for gpu in GPUS if gpu.name in PRICES and (gpu.has_bf16 or recipe.mixed_precision != "bf16")]
    with second_process():
        report = for_each_card(
            recipe,
            strategies or simple(load_known()),
            name,
            GPUS if is_all or as_json else listed,
            price=price,
            is_free=is_free,
            room=room,
        )
    if as_json:
        answer(Planned(**card_table.as_record(report, name, num_samples=num_samples)))
    else:
        text = card_table.in_words(report, name, next_step, num_samples=num_samples, is_all=is_all)
        say(short(text), is_coloured=True)
    return 0 if report.cards else 1


def machines_or_any(recipe: Path | None, text: str | None, room: dict[str, float | None]) -> Machines | None:
    """Machines of the forecast: those asked for, else those here, else those that the recipe's label needs; None: any
    GPUs, as asked for or where none of the three has one.
    """
    if text is not None and text.lower() == ANY:
        with_room(Machines(text=ANY), **room)  # refuses numbers out of range
        return None
    if text is None and recipe is None:
        machines = with_room(this_machine(), **room)
    else:
        assert recipe is not None or text is not None
        machines = parse_machines(text or "", **room) if recipe is None else machines_for(recipe, text, room)
    return machines if machines.num_gpus or text is not None else None


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
