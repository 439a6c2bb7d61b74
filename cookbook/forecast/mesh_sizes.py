"""Sizes of a mesh that suit a model and machines better than those in a strategy's file."""

from dataclasses import dataclass, replace
from typing import Any

from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.forecast.verdict import MAY_RUN, Forecast, TraceCache, forecast, rank
from cookbook.system.hardware import Machines
from cookbook.training.models.structure import config_of

KEYS = ("tp_size", "sp_size", "pp_size", "ep_size")
"""What is tried; the processes that these leave are copies or shards."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The forecasts of a strategy under each size of one dimension of its mesh."""

    name: str
    """Name of the strategy."""
    key: str
    written: int
    forecasts: list[tuple[int, Forecast]]
    """By size, ascending."""

    @property
    def best(self) -> Forecast:
        return min((one for _, one in self.forecasts), key=rank)

    def is_resharded(self, one: Forecast) -> bool:
        """Whether another size of the mesh is not that of the file either."""
        return one.strategy.dp_shard_size != dict(self.forecasts)[self.written].strategy.dp_shard_size


def better_sizes(recipe: Recipe, strategies: list[Strategy], machines: Machines, recipe_name: str) -> list[Sizes]:
    """Those of the strategies for which another size than that of the file is best and may run.

    The sizes are powers of two, for heads and layers are seldom divisible by others, up to the GPUs of a machine, or of
    stages up to all: what those send is little.
    """
    traces = TraceCache(config_of(recipe)[0], recipe, recipe_name)
    found = []
    for strategy in strategies:
        for key in (key for key in KEYS if getattr(strategy, key) > 1 and key not in strategy.open_sizes):
            most = machines.num_gpus if key == "pp_size" else machines.gpus_each
            tried = [2**power for power in range(1, most.bit_length())]
            sizes = sorted({*tried, getattr(strategy, key)})
            resized = {size: _resized(strategy, key, size, machines.num_gpus) for size in sizes}
            forecasts = [(size, forecast(traces, one, machines, limits=False)) for size, one in resized.items()]
            found.append(Sizes(name=strategy.name, key=key, written=getattr(strategy, key), forecasts=forecasts))
    return [one for one in found if one.best.verdict in MAY_RUN and one.best is not dict(one.forecasts)[one.written]]


def _resized(strategy: Strategy, key: str, size: int, num_gpus: int) -> Strategy:
    """The strategy with another size; of experts without further shards where both are more than the GPUs."""
    sizes: dict[str, Any] = {key: size}
    changed = replace(strategy, **sizes)
    if key == "ep_size" and changed.written_mesh.num_processes > num_gpus:
        return replace(changed, dp_shard_size=1)
    return changed
