"""The order of forecasts, the best first."""

from collections.abc import Sequence

from cookbook.config.strategy import Strategy
from cookbook.forecast.verdict import MAY_RUN, Forecast, TraceCache, Verdict, forecast, least_time, may_fit
from cookbook.system.hardware import Machines

SIMPLICITY = ("single", "ddp", "fsdp2", "zero", "fsdp1", "tp", "pp")


BEST = 0
"""The first number of `rank` of what fits without a doubt."""


def rank(forecast: Forecast) -> tuple:
    """A key by which the best forecast is the least."""
    order = {"fits": BEST, "not judged": BEST, "tight": 2, "does not fit": 3, "no forecast": 4, "cannot run": 5}.get(
        forecast.verdict, 1
    )
    strategy = forecast.strategy
    offload = sum(kind is not None for kind in (strategy.offload_optimizer, strategy.offload_param))
    offload += 2 * (strategy.offload_param == "nvme") + bool(strategy.fsdp and strategy.fsdp.fsdp_offload_params)
    seconds = forecast.time.low + forecast.time.high if forecast.time else 0.0
    if forecast.verdict == "does not fit":  # the nearest first
        return order, forecast.shortage, 0, 0, strategy.name
    simplicity = strategy.sp_size, SIMPLICITY.index(strategy.kind)
    return order, round(seconds, 3), offload, simplicity, strategy.zero_stage, strategy.name


def in_order(forecasts: Sequence[Forecast], machines: Machines) -> list[Forecast]:
    """Forecasts by `rank`, but on one GPU one process without an engine comes before what is faster by less than the
    forecast's own width."""
    ranked = sorted(forecasts, key=rank)
    best = next(iter(ranked), None)
    if best is None or best.verdict not in MAY_RUN:  # then the nearest comes first
        return ranked
    alike = (other for other in ranked if other.verdict == best.verdict)
    simple = next((other for other in alike if other.strategy.kind == "single"), None)
    if machines.num_gpus != 1 or simple is None or simple.time is None or best.time is None:
        return ranked
    if simple.time.low > best.time.high:
        return ranked
    return [simple, *(other for other in ranked if other is not simple)]


def plain_first(
    traces: TraceCache, strategies: Sequence[Strategy], machines: Machines, *, limits: bool
) -> Forecast | None:
    """The forecast of one process without an engine, if `in_order` surely has it first on one GPU, by bounds of the
    others' times that need no trace.
    """
    plain = [strategy for strategy in strategies if strategy.kind == "single"]
    if len(plain) != 1 or machines.num_gpus != 1:
        return None
    own = forecast(traces, plain[0], machines, limits=limits)
    if own.verdict != "fits":
        return None
    if own.time is None:  # no time is forecast, and the simplest comes first
        return own
    bounds = (least_time(traces, other, machines) for other in strategies if other is not plain[0])
    return own if all(bound is None or own.time.low <= bound.high for bound in bounds) else None


def best_that_fits(
    traces: TraceCache, strategies: Sequence[Strategy], machines: Machines, verdicts: Sequence[Verdict]
) -> Forecast | None:
    """The best forecast with one of these verdicts."""
    possible = [strategy for strategy in strategies if may_fit(traces, strategy, machines)]
    forecasts = [forecast(traces, strategy, machines, limits=False) for strategy in possible]
    return next(iter(in_order([judged for judged in forecasts if judged.verdict in verdicts], machines)), None)
