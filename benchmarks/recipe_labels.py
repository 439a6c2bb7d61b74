"""Writes `Fits` in the labels of recipes: which strategies fit which machines, as `plan` forecasts it.

    python benchmarks/recipe_labels.py [RECIPE ...]

The label names the machines, one a line; this fills in the rest. Some 20 s a recipe on two cores. tests/test_recipes.py
compares each label with it.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else deepspeed, which transformers may import, warns
sys.path.insert(0, str(Path(__file__).parents[1]))

from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.sections import Auto
from cookbook.config.strategy import Strategy, load_strategy
from cookbook.forecast.fitting import fitting
from cookbook.forecast.ranking import forecast_all
from cookbook.forecast.verdict import MAY_RUN, Forecast
from cookbook.start.run_plan import KINDS, autos, even
from cookbook.system.files import RecipeError
from cookbook.system.hardware import GIB, Machines, parse_machines

LONG = 16384
"""Tokens of a sample from which sequence parallel is worth its messages; our choice."""
FITS = r"(?m)^# Fits:.*\n(?:# {12}.*\n)*"
"""The lines of a label that this program writes."""
HEADER = "GiB of each GPU at the peak + of a machine's memory + of its disk. Forecast by plan, not measured."
AUTO = "With the least that it can take; in brackets micro-batch and checkpointing by auto, under the first."


def fits(path: Path) -> str:
    """The lines of `Fits` for a recipe, with the machines that its label has."""
    recipe, label = load_recipe(path), path.read_text(encoding="utf-8")
    labelled = re.search(FITS, label)
    if labelled is None:
        raise RecipeError([f"{path}: no `# Fits:` in its label, with lines such as `#            8x80GB`"])
    names = re.findall(r"(?m)^# {12}(\S+GB)\b", labelled[0])
    rows = [(name, ", ".join(_of(recipe, parse_machines(name), str(path)))) for name in names]
    header = [f"# {'Fits:':10} {HEADER}", *([f"#{'':12}{AUTO}"] if autos(recipe) else [])]
    lines = [*header, *(f"#{'':12}{name:9} {text}" for name, text in rows)]
    return "\n".join(lines) + "\n"


def _of(recipe: Recipe, machines: Machines, name: str) -> Iterator[str]:
    """Strategies that fit there, the recipe's own first, then in plan's order; offloading if nothing fits without. Of
    meshes of several dimensions only for a recipe that has one.
    """
    strategies = [load_strategy(path) for path in sorted(Path("accelerate_configs").glob("*.yaml"))]
    is_long = recipe.data.max_length >= LONG
    useful = [
        strategy for strategy in strategies if _spreads(strategy, machines) and (is_long or strategy.sp_size == 1)
    ]
    if any(strategy.path == recipe.strategy and strategy.is_sharded_while_read for strategy in strategies):
        useful += [
            strategy for strategy in strategies if strategy.is_sharded_while_read and strategy.dp_replicate_size == 1
        ]
    ranked = forecast_all(recipe, useful, machines, name, limits=False).forecasts
    able = [outcome for outcome in ranked if outcome.verdict in MAY_RUN and outcome.verdict != "tight"]
    own = [outcome for outcome in able if outcome.strategy.path == recipe.strategy]
    shown = own + ([outcome for outcome in able if not outcome.strategy.offloads] or able)
    if not shown:
        yield "nothing"
        return
    first, *others = dict.fromkeys(map(_entry, shown))
    yield from (first + _by_auto(recipe, shown[0], machines, name), *others)


def _by_auto(recipe: Recipe, outcome: Forecast, machines: Machines, name: str) -> str:
    """Settings that `launch` would take there for the recipe's `auto`, in brackets."""
    if not autos(recipe) or outcome.plan is None:
        return ""
    is_auto = isinstance(recipe.model.gradient_checkpointing, Auto)
    kinds = KINDS if is_auto else [recipe.model.gradient_checkpointing]
    sizes = even(recipe.batch.global_batch_size // outcome.plan.data_parallel_size)
    batches = [recipe.batch.model_copy(update={"micro_batch_size": size}) for size in sizes]
    best = next(iter(fitting(recipe, outcome.strategy, machines, name, batches, kinds)), None)
    kind = f", {str(best.checkpointing).lower()}" if best and is_auto else ""
    return f" ({best.batch.micro_batch_size}{kind})" if best else ""


def _spreads(strategy: Strategy, machines: Machines) -> bool:
    """True if it is of use there as its file is: it takes every GPU, needs no links or layers of a special kind, and on
    one GPU has something to offload.
    """
    if strategy.kind == "fsdp1":
        return False  # a new run takes fsdp2
    if machines.num_gpus == 1:
        return strategy.kind == "single" or strategy.offloads
    sizes = (strategy.dp_replicate_size, strategy.tp_size, strategy.pp_size, strategy.ep_size)
    return strategy.num_processes is None and set(sizes) == {strategy.written_secondary_group_size} == {1}


def _entry(outcome: Forecast) -> str:
    assert outcome.memory is not None
    sizes = [outcome.memory.needed[1]]
    if outcome.strategy.offloads:
        sizes += [outcome.host, *([outcome.disk] if outcome.disk else [])]
    return f"{outcome.strategy.name} {' + '.join(f'{size / GIB:,.0f}' for size in sizes)}"


def main() -> int:
    named, every = [Path(name) for name in sys.argv[1:]], sorted(Path("recipes").rglob("*.yaml"))
    for path in named or [path for path in every if re.search(FITS, path.read_text())]:
        text = re.sub(FITS, fits(path), path.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
