"""Sizes of what a run keeps on host and disk, by the ledger of costs."""

from dataclasses import dataclass

from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.facts.offline import known_model
from cookbook.forecast.costs.inputs import cost_inputs, sketch
from cookbook.forecast.costs.loading import machine_bytes
from cookbook.forecast.costs.per_parameter import Where, shares, total
from cookbook.forecast.costs.states import checkpoint_bytes, states


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes on this machine, and how they came about."""

    host: int = 0
    host_why: str = ""
    nvme: int = 0
    nvme_why: str = ""
    disk: int = 0
    disk_why: str = ""


def sizes(recipe: Recipe, strategy: Strategy, local: int, *, on_gpus: bool) -> Sizes | None:
    """None where the model's size is not in recipes/offline_facts.json, or an adapter leaves hardly any state to count.

    Args:
        local: processes of this machine, where the strategy leaves their number open.
    """
    known = known_model(recipe.model.name_or_path) if recipe.model.name_or_path else None
    if known is None or recipe.adapter is not None:
        return None
    count = known["num_parameters"]
    skeleton = sketch(known["config"], count)
    num_processes = strategy.num_processes or local * strategy.num_machines
    local = num_processes // strategy.num_machines
    inputs = cost_inputs(recipe, strategy, num_processes, num_local=local)
    model_states = states(skeleton, inputs)
    host, offloaded, nvme = machine_bytes(
        skeleton, inputs, model_states, local, hidden=known["config"]["hidden_size"], on_gpus=on_gpus
    )
    billions = f"{count / 1e9:.2f} billion parameters"
    waiting = " and inputs of layers" * (on_gpus and inputs.offloads_checkpoints)

    def why(where: Where) -> str:
        return f"{billions} x {local * total(shares(inputs), where):g} bytes, and buffers"

    run = recipe.run
    saves_often = (run.save_every_steps, run.saves_per_epoch, run.save_every_minutes) != (None, None, None)
    kept = run.keep_last + run.keep_best + 1 if saves_often else 1  # the next one is written before the oldest goes
    checkpoint = checkpoint_bytes(skeleton, recipe)
    return Sizes(
        host=host,
        host_why=why("host") + waiting if offloaded == host else f"to read {billions}",
        nvme=nvme,
        nvme_why=why("disk"),
        disk=kept * checkpoint + inputs.low_bytes * count,
        disk_why=f"{kept} x {checkpoint / count:.3g} + {inputs.low_bytes} bytes x {billions}",
    )
