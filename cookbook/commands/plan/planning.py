"""`cookbook plan`: what is asked, of which machines, and the answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from cookbook.commands.plan.model_recipe import Method, is_model, recipe_of_model
from cookbook.commands.plan.submitted_row import in_csv, row_of
from cookbook.commands.shared.answer_forms import PlanAnswer
from cookbook.commands.shared.arguments import QUICKSTART, AsJson, Assignments, Strategies, positive, recipes
from cookbook.commands.shared.find_model import CACHE
from cookbook.commands.shared.for_programs import answer
from cookbook.commands.shared.html_page import beginning
from cookbook.commands.shared.labels import read_label, read_needs
from cookbook.commands.shared.named_file import problem_of_name, write_named_file
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy, find_strategy, known_strategies, load_known, load_strategy
from cookbook.start.run_plan import load_pair
from cookbook.system.console import say
from cookbook.system.files import RecipeError, refuse
from cookbook.system.hardware import GIB, GPUS, Machines, parse_machines, this_machine, with_room
from cookbook.system.imports import import_models, import_validators, imports, quiet_deepspeed, rare_collections
from cookbook.system.kept_results import kept_results
from cookbook.system.late_compiler import compiled_when_called
from cookbook.system.masking import mask_secrets
from cookbook.system.prices import PRICES
from cookbook.system.shipped import path_from_here, short

ANY = "any"


def plan(
    what: Annotated[
        str, Argument(metavar="RECIPE|MODEL", autocompletion=recipes, help="a model: a folder, config.json or name")
    ] = str(QUICKSTART),
    *,
    method: Annotated[Method | None, Option(help="of a model; default: lora")] = None,
    length: Annotated[int | None, Option(callback=positive, help="of a model: tokens of a sample")] = None,
    gpus: Annotated[
        list[str] | None,
        Option(metavar="8xH100", help="or 2x8x80GB, cpu, any; default: here, or the label, or any; may be repeated"),
    ] = None,
    strategy: Strategies = None,
    host_gib: Annotated[float | None, Option(help="memory of each machine, for offloading")] = None,
    nvme_gib: Annotated[float | None, Option(help="free on the disk of each machine, for offloading")] = None,
    fabric: Annotated[float | None, Option(help="Gbit/s of each GPU's network card; default: 100 to 400")] = None,
    samples: Annotated[int | None, Option(callback=positive, help="rows of data.train, for the run's time")] = None,
    price: Annotated[
        float | None, Option(callback=positive, help="of a GPU for an hour; default: the recipe's")
    ] = None,
    is_all: Annotated[bool, Option("--all", help="the table; of --gpus any, every GPU")] = False,
    html: Annotated[Path | None, Option(metavar="FILE", help="a page with memory by part, time and price")] = None,
    submit_row: Annotated[
        Path | None, Option(metavar="RUN", help="print an anonymous row of a run's forecast and measurement, and end")
    ] = None,
    as_json: AsJson = False,
    assignments: Assignments,
) -> int:
    """Forecast memory, speed and price; 1 if nothing fits."""
    if submit_row is not None:
        others = (method, length, gpus, strategy, host_gib, nvme_gib, fabric, samples, price, html, *assignments)
        if what != str(QUICKSTART) or is_all or as_json or any(option is not None for option in others):
            raise RecipeError(f"--submit-row {submit_row} asks nothing else; leave out the other words")
        say(in_csv(row_of(submit_row)), end="")
        return 0
    path = Path(path_from_here(what))
    of_model = is_model(what, path)
    if not of_model and (method or length):
        adapter = "adapter=null" if method == "full" else f"adapter.name={method}"
        keys = [adapter] * (method is not None) + [f"data.max_length={length}"] * (length is not None)
        instead = " ".join(f"--set {key}" for key in keys)
        raise RecipeError(f"--method and --length are of a model, and {what} is a recipe; write {instead}")
    if html is not None:
        refuse(problem_of_name(html, beginning("plan"), "--html"))
    paths = [find_strategy(name) for name in strategy or known_strategies()]
    room = {"fabric_gbits": fabric, "host_gib": host_gib, "nvme_gib": nvme_gib}
    written = None if of_model else load_pair(path, assignments, paths[0] if strategy else None)[0]
    places = [machines_or_any(None if of_model else path, text, room) for text in _each(gpus, as_json=as_json)]
    question = _Question(
        what=what,
        name=what if of_model else str(path),
        of_model=of_model,
        asked=[
            *(["--method", method] if method is not None else []),
            *(["--length", str(length)] if length is not None else []),
            *(word for assignment in assignments for word in ("--set", assignment)),
        ],
        strategies=[load_strategy(path) for path in paths],
        named=[word for name in strategy or () for word in ("--strategy", name)],
        num_samples=samples,
        price=price,
        of_recipe=None if written is None else written.run.price_per_gpu_hour,
        as_json=as_json,
        is_all=is_all,
        html=html,
    )
    quiet_deepspeed()
    with imports():
        import_models()
        import_validators()
        from transformers.utils import logging

        from cookbook.forecast.second_process import second_process

    logging.set_verbosity_error()  # of kernels that are not installed where the plan is made
    with compiled_when_called(), rare_collections(), kept_results(CACHE), second_process():
        asked = [(written or recipe_of_model(what, method, length, place, assignments), place) for place in places]
        if places[0] is None:
            lacks = "without --gpus, and without a GPU here" + " or in the recipe's label" * (not of_model)
            return _of_any_gpus(asked[0][0], question, room, None if gpus else f"{lacks}: any GPUs")
        return _of_machines([(recipe, place) for recipe, place in asked if place is not None], question)


@dataclass(frozen=True, kw_only=True)
class _Question:
    """The question of a user, whatever the machines."""

    what: str
    name: str
    of_model: bool
    asked: list[str]
    """Words that make the run another than recipe or model alone."""
    strategies: list[Strategy]
    named: list[str]
    """The user's `--strategy`, in words of a command line."""
    num_samples: int | None
    price: float | None
    of_recipe: float | None
    """The price that the recipe has, which is that of the machines on which it is to run."""
    as_json: bool
    is_all: bool
    html: Path | None


def _each(gpus: list[str] | None, *, as_json: bool) -> Sequence[str | None]:
    """The machines that were asked for; None: the default."""
    if gpus is None or len(gpus) == 1:
        return gpus or [None]
    written = " ".join(gpus)
    if len(set(gpus)) < len(gpus):
        raise RecipeError(f"--gpus {written}: one is named twice; name each once")
    if ANY in map(str.lower, gpus):
        raise RecipeError(f"--gpus {written}: {ANY} is all of them; write it alone, or name machines")
    if as_json:
        raise RecipeError(f"--gpus {written}: --json answers for one; write a command for each")
    return gpus


def _of_machines(asked: list[tuple[Recipe, Machines]], question: _Question) -> int:
    """Answer for one kind of machines after another."""
    with imports():
        from cookbook.forecast import headline
        from cookbook.forecast.fitting import by_auto, is_settled
        from cookbook.forecast.mesh_sizes import better_sizes
        from cookbook.forecast.ranking import forecast_all
        from cookbook.forecast.scaling import find_reference
        from cookbook.forecast.show import as_record, in_words
        from cookbook.forecast.verdict import MAY_RUN

        if question.html is not None:
            from cookbook.commands.plan.forecast_page import Answer, page_of_machines

    name, strategies, is_long = question.name, question.strategies, question.as_json or question.is_all
    is_whole, every = is_long or question.html is not None, bool(question.named) or question.html is not None
    others = load_known() if question.named else []
    price = question.of_recipe if question.price is None else question.price
    of_run: dict[str, Any] = {"num_samples": question.num_samples, "price": price}
    answers: list[Answer] = []
    may_run = False
    for i, (recipe, machines) in enumerate(asked):
        options: dict[str, Any] = {"limits": is_long, "suggests": "all" if is_long else "first"}
        of_auto: dict[str, Any] = {"all_of_them": every, "best_alone": not is_whole}
        outlook = forecast_all(recipe, strategies, machines, name, others, **options, first_alone=not is_whole)
        settings = by_auto(outlook, name, **of_auto)
        if not is_settled(outlook, settings, name):
            outlook = forecast_all(recipe, strategies, machines, name, others, **options)
            settings = by_auto(outlook, name, **of_auto)
        sizes = better_sizes(recipe, strategies, machines, name) if is_long else []
        reference = find_reference(outlook, [*strategies, *others], name) if is_long else None
        details: dict[str, Any] = {"sizes": sizes, "settings": settings, "reference": reference}
        trains = bool(headline.best_by_auto(outlook, settings)) or outlook.forecasts[0].verdict in MAY_RUN
        may_run = may_run or (trains and (outlook.sampler is None or outlook.sampler.fits))
        follows = ["init", question.what, "ROWS", "--gpus", machines.text]
        verb = "launch" if recipe.rounds is None else "rounds"
        next_step = ["cookbook", *(follows if question.of_model else [verb, question.what])]
        said = of_run | {"asked": question.asked}
        lines = headline.in_words(outlook, settings, next_step=next_step, is_recipe=not question.of_model, **said)
        if question.html is not None:
            answers.append(Answer(outlook=outlook, settings=settings, text=short(lines)))
        if question.as_json:
            page = str(question.html) if question.html else None
            answer(PlanAnswer(**as_record(outlook, name, **details, **of_run), page=page))
        else:
            table = ["", in_words(outlook, name, **details, **of_run)] if question.is_all else []
            say(short("\n".join([*[""] * (i > 0), lines, *table])), is_coloured=True)
    if question.html is not None:
        _write(question.html, page_of_machines(answers, short(name), **of_run))
    return 0 if may_run else 1


def _write(path: Path, text: str) -> None:
    write_named_file(path, mask_secrets(text), beginning("plan"), "--html")
    say(path)


def _of_any_gpus(recipe: Recipe, question: _Question, room: dict[str, float | None], why: str | None) -> int:
    """Answer for each kind of GPU.

    Args:
        why: no machines were taken, if nobody asked for any GPUs.
    """
    with imports():
        from cookbook.forecast import card_table
        from cookbook.forecast.any_gpus import for_each_card, simple

    name, num_samples = question.name, question.num_samples
    listed = [gpu for gpu in GPUS if gpu.name in PRICES and (gpu.has_bf16 or recipe.mixed_precision != "bf16")]
    report = for_each_card(
        recipe,
        question.strategies if question.named else simple(load_known()),
        name,
        GPUS if question.is_all or question.as_json else listed,
        price=question.price,
        is_free=question.of_model,
        room=room,
    )
    report = replace(report, why_any=why)
    follows = ["init", question.what, "ROWS"]
    if question.asked or not question.of_model:
        options = {"--samples": num_samples, "--price": question.price, "--fabric": room["fabric_gbits"]}
        options |= {"--host-gib": room["host_gib"], "--nvme-gib": room["nvme_gib"]}
        written = [word for name, value in options.items() if value is not None for word in (name, f"{value:.10g}")]
        follows = ["plan", question.what, *question.asked, *question.named, *written]
    next_step = ["cookbook", *follows, "--gpus"]
    text = short(card_table.in_words(report, name, next_step, num_samples=num_samples, is_all=question.is_all))
    if question.as_json:
        page = str(question.html) if question.html else None
        answer(PlanAnswer(**card_table.as_record(report, name, num_samples=num_samples), page=page))
    else:
        say(text, is_coloured=True)
    if question.html is not None:
        from cookbook.commands.plan.forecast_page import page_of_cards

        is_listed = question.price is None
        page = page_of_cards(report, short(name), text, num_samples=num_samples, is_listed=is_listed)
        _write(question.html, page)
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
    if text is None and machines.note:
        machines = replace(machines, note=f"{machines.note}; every kind of GPU: --gpus {ANY}")
    return machines if machines.num_gpus or text is not None else None


def machines_for(recipe: Path, text: str | None, options: dict[str, float | None]) -> Machines:
    """Machines of the forecast: those asked for, else those here, else those that the recipe's label needs."""
    if text is not None:
        return parse_machines(text, **options)
    here, needs = this_machine(), read_needs(read_label(recipe))
    if here.num_gpus or needs.num_gpus is None or needs.gpu_gb is None:
        return with_room(here, **options)
    asked = {"host_gib": needs.host_gb, "nvme_gib": needs.nvme_gb}
    options |= {name: gb * 1e9 / GIB for name, gb in asked.items() if gb is not None and options[name] is None}
    note = f"without --gpus and without a GPU here: {needs.machine}, which the recipe's label names"
    return replace(parse_machines(needs.machine, **options), note=note)
