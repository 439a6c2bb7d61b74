"""The scaling efficiency of strategies: tokens/s of a GPU beside those of the fewest GPUs on which a run fits."""

from collections.abc import Sequence
from dataclasses import dataclass

from cookbook.config.strategy import Strategy
from cookbook.forecast.any_gpus import simple
from cookbook.forecast.order import best_that_fits
from cookbook.forecast.other_machines import fewer_gpus
from cookbook.forecast.ranking import PlanReport
from cookbook.forecast.verdict import UNKNOWN, Forecast, TraceCache
from cookbook.system.hardware import Machines
from cookbook.training.models.structure import config_of


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The best strategy on the fewest of the GPUs, a power of two or all, on which a run fits without offloading."""

    machines: Machines
    forecast: Forecast

    @property
    def words(self) -> str:
        """`1 GPU with single`, or `4 GPUs with fsdp2: the least that fits`."""
        count, name = self.machines.num_gpus, self.forecast.strategy.name
        return f"1 GPU with {name}" if count == 1 else f"{count} GPUs with {name}: the least that fits"

    def efficiency(self, forecast: Forecast) -> tuple[float, float] | None:
        """Tokens/s of a GPU over those of the reference, between the slow ends and the fast ends; the lesser first.
        None without a time.
        """
        own, other = self.forecast.time, forecast.time
        if own is None or other is None:
            return None
        share = self.forecast.num_processes / forecast.num_processes
        low, high = sorted((share * own.high / other.high, share * own.low / other.low))
        return low, high


def find_reference(report: PlanReport, strategies: Sequence[Strategy], recipe_name: str) -> Reference | None:
    """The reference of a report's rows, with the settings that these have. None: there is no time to compare, or
    nothing fits without offloading.

    Args:
        strategies: that it may have; those without a mesh or offloading are tried.
    """
    machines = report.machines
    if report.no_time is not None:
        return None
    fewer = list(fewer_gpus(machines, machines.num_gpus - 1)) if machines.num_gpus > 1 else []
    traces = TraceCache(config_of(report.recipe)[0], report.recipe, recipe_name)
    tried = [strategy for strategy in simple(strategies) if not strategy.offloads]
    for way in (*reversed(fewer), machines):
        if best := best_that_fits(traces, tried, way, ("fits", *UNKNOWN)):
            return Reference(machines=way, forecast=best)
    return None
