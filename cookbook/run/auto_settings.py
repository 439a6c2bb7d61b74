"""Values for `auto` in `batch.micro_batch_size` and `model.gradient_checkpointing`, and advice on a small number."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any

from cookbook.config.recipe import Recipe, read_recipe
from cookbook.config.sections import Auto
from cookbook.config.strategy import Strategy
from cookbook.run import forecasts
from cookbook.run.next_start import machines_of
from cookbook.start.run_plan import CHECKPOINTING, KINDS, MICRO_BATCH, Plan, autos, even, make_plan
from cookbook.system import lock, status
from cookbook.system.files import RecipeError, first_line
from cookbook.system.hardware import Machines
from cookbook.system.record_files import read_json, replace_file

GAIN = 0.1
"""Share of a step that a larger micro-batch must save, by the forecast, to be worth a line of output."""


def choose(
    path: Path, recipe: Recipe, strategy: Strategy, plan: Plan, *, cache: Path | None = None
) -> dict[str, tuple[Any, str]]:
    """The value of each key that is `auto`, on GPUs like this machine's, and why it has this one: the fastest that fit
    by the forecast, of micro-batches that split the global batch the largest, or what the run that is resumed had.

    Args:
        path: of the recipe.
        cache: of traces; those of `cookbook plan` are there.
    """
    keys, micro = autos(recipe), recipe.batch.micro_batch_size
    sizes: list[Any] = even(recipe.batch.global_batch_size // plan.data_parallel_size)
    earlier = _earlier_settings(recipe)
    kept: dict[str, list[Any]] = {MICRO_BATCH: sizes, CHECKPOINTING: [*KINDS, "offload"]}
    chosen = {key: (earlier[key], "as in the run that is resumed") for key in keys if earlier.get(key) in kept[key]}
    if MICRO_BATCH in keys and MICRO_BATCH not in chosen and plan.num_gpus and strategy.pp_size > 1:
        chosen[MICRO_BATCH] = 1, "the more micro-batches, the less do the stages of a pipeline wait"
    # What the resumed run had comes first: another choice would change its memory in the middle of the run.
    left = [key for key in keys if key not in chosen]
    if not left:
        return chosen
    least = {MICRO_BATCH: 1, CHECKPOINTING: True}
    if not plan.num_gpus:
        return chosen | {key: (least[key], "no forecast says what a CPU holds") for key in left}
    machines = _machines(plan)
    if machines.usable_gib is None:
        return chosen | {key: (least[key], "the memory of this GPU is not known") for key in left}
    known = {MICRO_BATCH: micro, CHECKPOINTING: recipe.model.gradient_checkpointing}
    known |= {key: value for key, (value, _) in chosen.items()}
    sizes = sizes if MICRO_BATCH in left else [known[MICRO_BATCH]]
    kinds: Sequence[Any] = KINDS if CHECKPOINTING in left else [known[CHECKPOINTING]]
    batches = [recipe.batch.model_copy(update={"micro_batch_size": size}) for size in sizes]
    try:
        ranked = forecasts.fitting(recipe, strategy, machines, str(path), batches, kinds, cache=cache)
    except Exception as error:  # the run does not depend on it
        return chosen | {key: (least[key], f"there is no forecast: {first_line(error)}") for key in left}
    room = f"{machines.usable_gib:.0f} GiB of GPU memory"
    if not ranked:
        return chosen | {key: (least[key], f"by the forecast even that may exceed {room}") for key in left}
    best, *others = ranked
    if MICRO_BATCH in left:
        size = best.batch.micro_batch_size or 1
        larger = next((candidate for candidate in sizes if candidate > size), None)
        beyond = f"{larger} may not" if larger else "is all of a step"
        chosen[MICRO_BATCH] = size, f"it fits in {room} by the forecast, and {beyond}"
    if CHECKPOINTING in left:
        with_others = [
            f"{_words(other.time)} with {str(other.checkpointing).lower()}" for other in others if other.time
        ]
        why = "; ".join([f"{_words(best.time)} a step by the forecast", *with_others]) if best.time else ""
        chosen[CHECKPOINTING] = best.checkpointing, why or f"it fits in {room} by the forecast"
    return chosen


def settle(
    recipe_name: str, recipe: Recipe, strategy: Strategy, plan: Plan, *, cache: Path
) -> tuple[Recipe, Plan, list[str]]:
    """The recipe with a value for each `auto`, the plan that follows, and a note for each value. On each rank, before
    the run's folder is taken: the first process of a machine finds the values, and the others read them in `cache`.
    """
    if not autos(recipe):
        return recipe, plan, []
    if plan.num_gpus:
        chosen = _chosen_once(recipe_name, recipe, strategy, plan, cache)
    else:
        chosen = choose(Path(recipe_name), recipe, strategy, plan, cache=cache)
    changed: dict[str, dict[str, Any]] = {}
    for key, (value, _) in chosen.items():
        section, name = key.split(".")
        changed.setdefault(section, {})[name] = value
    sections = {name: getattr(recipe, name).model_copy(update=values) for name, values in changed.items()}
    recipe = recipe.model_copy(update=sections)
    counts = {"num_processes": plan.num_processes, "num_local": plan.num_local, "num_gpus": plan.num_gpus}
    plan = make_plan(recipe, strategy, **counts, recipe_name=recipe_name)
    return recipe, plan, [in_words(key, value, why) for key, (value, why) in chosen.items()]


def in_words(key: str, value: Any, why: str) -> str:
    """The value of an `auto` in a line."""
    return f"{key}: auto is {str(value).lower()}: {why}"


def _chosen_once(
    recipe_name: str, recipe: Recipe, strategy: Strategy, plan: Plan, cache: Path
) -> dict[str, tuple[Any, str]]:
    """The choice of the first process of this start on this machine."""
    # Not what another machine chose, whose GPUs may be larger: that such machines differ is told before a step.
    key = f"{gethostname()} {Path(recipe.run.output_dir).resolve()}"
    path = cache / f"auto-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    cache.mkdir(parents=True, exist_ok=True)
    with lock.making(path.with_suffix(".lock")):
        record = read_json(path)
        if record is None or record.get("attempt") != status.attempt_id():
            record = {
                "attempt": status.attempt_id(),
                "chosen": choose(Path(recipe_name), recipe, strategy, plan, cache=cache),
            }
            replace_file(path, json.dumps(record) + "\n")
    return {key: (value, why) for key, (value, why) in record["chosen"].items()}


def larger_micro_batch(
    path: Path, recipe: Recipe, strategy: Strategy, plan: Plan, *, cache: Path | None = None
) -> str | None:
    """Say how much time the largest micro-batch that fits would save, where the recipe has a smaller number.

    Returns None if the forecast saves little, or nothing larger fits. The forecast is for
    samples of full length: with shorter ones, the host limits a step at larger micro-batches too.
    """
    size = recipe.batch.micro_batch_size
    if size is None or isinstance(size, Auto) or not plan.num_gpus or strategy.pp_size > 1:
        return None
    machines = _machines(plan)
    if machines.usable_gib is None or machines.gpu is None:
        return None
    sizes = [larger for larger in even(recipe.batch.global_batch_size // plan.data_parallel_size) if larger > size]
    batches = [recipe.batch.model_copy(update={"micro_batch_size": larger}) for larger in sizes]
    kinds = [recipe.model.gradient_checkpointing]
    try:
        current = forecasts.fitting(recipe, strategy, machines, str(path), [recipe.batch], kinds, cache=cache)
        best = forecasts.fitting(recipe, strategy, machines, str(path), batches, kinds, cache=cache)
    except RecipeError:
        return None
    if (
        not current
        or not best
        or not current[0].time
        or not best[0].time
        or best[0].seconds > (1 - GAIN) * current[0].seconds
    ):
        return None
    return (
        f"{MICRO_BATCH} {size}: {best[0].batch.micro_batch_size} fits too, and by the forecast a step takes"
        f" {_words(best[0].time)} in the place of {_words(current[0].time)}, on the same curve; `auto` takes the most"
        " that fits"
    )


def _machines(plan: Plan) -> Machines:
    here = machines_of(plan)
    return replace(here, gpus_each=plan.num_local, num_machines=plan.num_processes // plan.num_local)


def _words(time: Any) -> str:
    return f"{time.low:.2g} to {time.high:.2g} s"


def _earlier_settings(recipe: Recipe) -> dict[str, Any]:
    """The values of the run in the folder that this run resumes."""
    written = Path(recipe.run.output_dir, "recipe.yaml")
    if recipe.run.resume == "never" or not written.is_file():
        return {}
    values = read_recipe(written).values
    return {
        key: values.get(section, {}).get(name)
        for key in (MICRO_BATCH, CHECKPOINTING)
        for section, name in [key.split(".")]
    }
