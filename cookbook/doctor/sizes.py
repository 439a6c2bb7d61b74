"""What a strategy keeps on host and disk: by formula, of states alone, without buffers. `make plan` counts all."""

from dataclasses import dataclass

from cookbook.explain.costs import setting_of, shares
from cookbook.library import known_model
from cookbook.recipe import Recipe
from cookbook.strategy import Strategy

CHECKPOINT_BYTES = 12
"""A parameter's weight and two moments in float32."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes on this machine, and how they came about."""

    host: int = 0
    host_why: str = ""
    nvme: int = 0
    nvme_why: str = ""
    disk: int = 0
    disk_why: str = ""


def num_parameters(recipe: Recipe) -> int | None:
    """Of a model whose size recipes/offline_facts.json has; else None."""
    known = known_model(recipe.model.name_or_path) if recipe.model.name_or_path else None
    return known.get("num_parameters") if known else None


def sizes(recipe: Recipe, strategy: Strategy) -> Sizes | None:
    """None where the model's size is not known, or an adapter leaves hardly any state to count."""
    count = num_parameters(recipe)
    if count is None or recipe.adapter is not None:
        return None
    billions = f"{count / 1e9:.2f} billion parameters"
    per_machine = count / strategy.num_machines
    weights = 4 if recipe.mixed_precision == "no" else 2
    # Of all processes together, with gradients that add up over micro-batches.
    copies = strategy.dp_replicate_size
    states = shares(setting_of(recipe, strategy, num_processes=copies, accumulation=2))
    places = {
        where: round(copies * sum(one.num_bytes for one in states if one.where == where)) for where in ("host", "disk")
    }
    run = recipe.run
    saves_often = run.save_every_steps is not None or run.save_every_minutes is not None
    kept = run.keep_last + run.keep_best + 1 if saves_often else 1  # the next one is written before the oldest goes
    return Sizes(
        host=round(per_machine * places["host"]),
        host_why=f"{billions} x {places['host']} bytes",
        nvme=round(per_machine * places["disk"]),
        nvme_why=f"{billions} x {places['disk']} bytes",
        disk=round(count * (kept * CHECKPOINT_BYTES + weights)),
        disk_why=f"{kept} x {CHECKPOINT_BYTES} + {weights} bytes x {billions}",
    )
