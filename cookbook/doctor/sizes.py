"""What a strategy keeps on host and disk: upper bounds by formula, of states alone, without buffers."""

from dataclasses import dataclass

from cookbook.library import known_model
from cookbook.recipe import Recipe
from cookbook.strategy import Strategy

OPTIMIZER_BYTES = 16
"""A parameter's weight, two moments and gradient in fp32. Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1,
count 12 for the first three."""
CHECKPOINT_BYTES = 12
"""The first three of them."""


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
    places = {"host": 0, "nvme": 0}
    whole = strategy.fsdp is not None and strategy.fsdp.fsdp_offload_params
    for device, each in (
        ("cpu" if whole else strategy.offload_optimizer, OPTIMIZER_BYTES),
        (strategy.offload_param, weights),
    ):
        if device is not None:
            places["host" if device == "cpu" else "nvme"] += each
    run = recipe.run
    saves_often = run.save_every_steps is not None or run.save_every_minutes is not None
    kept = run.keep_last + run.keep_best + 1 if saves_often else 1  # the next one is written before the oldest goes
    return Sizes(
        host=round(per_machine * places["host"]),
        host_why=f"{billions} x {places['host']} bytes",
        nvme=round(per_machine * places["nvme"]),
        nvme_why=f"{billions} x {places['nvme']} bytes",
        disk=round(count * (kept * CHECKPOINT_BYTES + weights)),
        disk_why=f"{kept} x {CHECKPOINT_BYTES} + {weights} bytes x {billions}",
    )
