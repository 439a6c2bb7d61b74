"""Sizes of a mesh that suit a model and machines better than those in a strategy's file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.forecast.order import rank
from cookbook.forecast.verdict import MAY_RUN, Forecast, TraceCache, forecast
from cookbook.system.hardware import Machines
from cookbook.training.models.structure import config_of

KEYS = ("tp_size", "sp_size", "pp_size", "ep_size")
"""Sizes that are tried; the processes that these leave are copies or shards."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The forecasts of a strategy under other sizes of its mesh."""

    name: str
    """Name of the strategy."""
    written: dict[str, int]
    """Sizes by key, as in the strategy's file."""
    forecasts: list[tuple[dict[str, int], Forecast]]
    """Forecasts by sizes, ascending."""

    @property
    def best(self) -> Forecast:
        return min((forecast for _, forecast in self.forecasts), key=rank)

    @property
    def as_written(self) -> Forecast:
        return next(forecast for sizes, forecast in self.forecasts if sizes == self.written)

    def is_resharded(self, forecast: Forecast) -> bool:
        """True if another size of the mesh is not that of the file either."""
        return forecast.strategy.dp_shard_size != self.as_written.strategy.dp_shard_size


def better_sizes(recipe: Recipe, strategies: list[Strategy], machines: Machines, recipe_name: str) -> list[Sizes]:
    """List the strategies for which other sizes than those of the file are best and may run.

    The sizes are powers of two, for heads and layers are seldom divisible by others, up to the GPUs of a machine, or of
    stages up to all: what those send is little. Two sizes of a mesh are varied together.
    """
    traces = TraceCache(config_of(recipe)[0], recipe, recipe_name)
    varied = []
    for strategy in strategies:
        if written := sizes_of_mesh(strategy):
            tried = resize(strategy, machines)
            forecasts = [(sizes, forecast(traces, other, machines, limits=False)) for sizes, other in tried]
            varied.append(Sizes(name=strategy.name, written=written, forecasts=forecasts))
    return [sizes for sizes in varied if sizes.best.verdict in MAY_RUN and sizes.best is not sizes.as_written]


def sizes_of_mesh(strategy: Strategy) -> dict[str, int]:
    """The sizes that may be varied, by key."""
    keys = (key for key in KEYS if key not in strategy.open_sizes)
    return {key: getattr(strategy, key) for key in keys if getattr(strategy, key) > 1}


def resize(strategy: Strategy, machines: Machines) -> list[tuple[dict[str, int], Strategy]]:
    """The strategy with other sizes, and as it is; of two keys those that the GPUs suffice for."""
    written = sizes_of_mesh(strategy)
    strategies = []
    for values in product(*(_powers(key, size, machines) for key, size in written.items())):
        sizes = dict(zip(written, values, strict=True))
        if len(sizes) == 1 or sizes == written or math.prod(values) <= machines.num_gpus:
            strategies.append((sizes, _resize(strategy, sizes, machines.num_gpus)))
    return strategies if written else []


def _powers(key: str, written: int, machines: Machines) -> Sequence[int]:
    most = machines.num_gpus if key == "pp_size" else machines.gpus_each
    return sorted({2**power for power in range(1, most.bit_length())} | {written})


def _resize(strategy: Strategy, sizes: dict[str, int], num_gpus: int) -> Strategy:
    """The strategy with other sizes; of experts without further shards where both are more than the GPUs."""
    values: dict[str, Any] = dict(sizes)
    changed = replace(strategy, **values)
    if "ep_size" in sizes and changed.written_mesh.num_processes > num_gpus:
        return replace(changed, dp_shard_size=1)
    return changed


def changed_sizes(strategies: Sequence[Strategy], changed: Strategy) -> dict[str, int]:
    """The sizes of a strategy's mesh, by key, that are not as in the file of its path, which is that of one of the
    strategies.
    """
    written = next(strategy for strategy in strategies if strategy.path == changed.path)
    keys = [*sizes_of_mesh(written), *({"dp_shard_size"} - written.open_sizes)]
    return {key: getattr(changed, key) for key in keys if getattr(changed, key) != getattr(written, key)}


def in_words(sizes: dict[str, int]) -> str:
    """`tp_size 4 and pp_size 2`; empty for none."""
    return " and ".join(f"{key} {size}" for key, size in sizes.items())
