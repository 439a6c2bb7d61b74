"""Shares of a run's time, and advice on what to change first."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

from cookbook.commands.shared.answer_forms import AdviceForPrograms, StepTime, TimeShares, WhySlow
from cookbook.commands.shared.arguments import AsJson, run_folder
from cookbook.commands.shared.for_programs import answer
from cookbook.commands.shared.history import History, read_history, read_ranks
from cookbook.config.strategy import Strategy, load_strategy
from cookbook.system.console import page, say
from cookbook.system.files import RecipeError
from cookbook.system.hardware import GIB, find_gpu, in_gib
from cookbook.system.record_forms import OfRank
from cookbook.system.step_phases import PARTS, in_words

GROUPS = {
    "compute": ("compute", "GPU memory"),
    "communication": ("NVLink", "Infinity Fabric", "PCIe between GPUs", "network"),
    "copies": ("PCIe to the host", "activations to the host", "disk"),
    "update": ("update", "CPU update"),
}
"""Parts of a profile and those of the forecast (`cookbook.forecast.step_time`) that they are held against."""
WARM_UP = 2
"""Steps of a run that are not counted: they compile and allocate."""
PAUSES = {"data": "data_seconds", "evaluation": "eval_seconds", "saving": "save_seconds"}
WORTH = 0.03
"""A share of the time below which nothing is advised."""
MOST_ADVICE = 3


@dataclass(frozen=True, kw_only=True)
class Advice:
    what: str
    """The part that takes the time, and what to change."""
    gain: float
    """The share of the time that this can save."""
    about: str = "up to"
    """The word before `gain` in print: an upper limit, or an estimate."""


def why_slow(folder: Annotated[Path, run_folder()], *, as_json: AsJson = False) -> int:
    """Show where a run's time goes, and what to change first."""
    run = read_history(folder)
    steps = run.steps[WARM_UP:] or run.steps
    if "step_seconds" not in steps[0]:
        raise RecipeError(f"{folder}: ran on simulated GPUs, whose times mean nothing")
    times = _times(steps)
    say(page(f"TIME of {folder}, {len(steps)} steps", *_rows(times), *_compilation_rows(run)))
    profiles = read_ranks(folder / "profile", OfRank)
    for record in profiles:
        title = f"PROFILE of steps {record['first_step']} to {record['last_step']}, rank {record['rank']}"
        say(in_words(record, title))
    say(beside_forecast(run, steps, profiles))
    best = sorted(advice(run, profiles), key=lambda item: -item.gain)[:MOST_ADVICE]
    rows = [(f"{number}.", item.what, f"{item.about} {item.gain:.0%}") for number, item in enumerate(best, 1)]
    say(page("CHANGE FIRST", *rows) if rows else "Nothing stands out.")
    if not profiles:
        ranks = list(range(min(8, run.record.get("strategy", {}).get("processes", 1))))
        say(f"For more, profile some steps: --set 'run.profile={{steps: [10, 14], ranks: {ranks}}}'")
    if as_json:
        forecast, no_forecast = step_times(run, steps, profiles)
        answer(
            WhySlow(
                run=str(folder),
                num_steps=len(steps),
                shares=times.shares,
                seconds_a_step=times.seconds_a_step,
                tokens_per_second=times.tokens_per_second,
                mfu=times.mfu,
                compiled=next(iter(_compilations(run)), None),
                profiles=profiles,
                forecast=forecast,
                no_forecast=no_forecast,
                advice=[AdviceForPrograms(what=item.what, gain_ratio=item.gain, about=item.about) for item in best],
            )
        )
    return 0


def shares(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Shares of the time: `step`, without its wait for the batch, and what else takes time."""
    seconds = {name: sum(line.get(key, 0.0) for line in steps) for name, key in PAUSES.items()}
    seconds["step"] = sum(line["step_seconds"] for line in steps) - seconds["data"]
    total = sum(seconds.values()) or 1.0
    return {name: of / total for name, of in seconds.items()}


@dataclass(frozen=True, kw_only=True)
class _Times:
    """Where the time of counted steps goes; means of a step are with all pauses."""

    shares: TimeShares
    seconds_a_step: float
    tokens_per_second: float
    mfu: float | None


def _times(steps: list[dict[str, Any]]) -> _Times:
    total = sum(line["step_seconds"] + line.get("eval_seconds", 0.0) + line.get("save_seconds", 0.0) for line in steps)
    mfu = [line["mfu"] for line in steps if "mfu" in line]
    return _Times(
        shares=TimeShares(**shares(steps)),
        seconds_a_step=total / len(steps),
        tokens_per_second=sum(line.get("num_tokens", 0) for line in steps) / total,
        mfu=mean(mfu) if mfu else None,
    )


def _rows(times: _Times) -> Iterator[tuple[str, ...]]:
    for name, share in times.shares.model_dump().items():
        yield name, f"{share:.1%}", f"{share * times.seconds_a_step:.3f} s a step"
    yield "tokens/s", f"{times.tokens_per_second:,.0f}", "with all pauses"
    if times.mfu is not None:
        yield "MFU", f"{times.mfu:.1%}", "of the steps alone"


def _compilation_rows(run: History) -> Iterator[tuple[str, ...]]:
    """Yield rows on what torch's compiler made of the layers, after the first steps of the last start."""
    for event in _compilations(run):
        counts = {key: event.get(key) for key in ("graphs", "graph_breaks", "given_up", "recompilations")}
        broken = f"{counts['graph_breaks']} graph breaks, {counts['given_up']} calls given up"
        yield "compiled", f"{counts['graphs']} graphs", f"{broken}, {counts['recompilations']} recompilations"
        yield from (("", "", why) for why in event.get("reasons", []))


def _compilations(run: History) -> list[dict[str, Any]]:
    """The last event about the compiler, if there is one."""
    return [event for event in run.events if event["event"] == "compiled"][-1:]


def step_times(
    run: History, steps: list[dict[str, Any]], profiles: list[dict[str, Any]]
) -> tuple[list[StepTime], str | None]:
    """Times of a step with those that were forecast for this machine; or why there is no forecast."""
    expected = run.record.get("step_forecast", {"none": "the run has recorded none"})
    if "none" in expected:
        return [], expected["none"]
    taken = {"a step": mean(line["step_seconds"] - line.get("data_seconds", 0.0) for line in steps)}
    bounds = {"a step": (expected["low"], expected["high"])}
    parts = {part["name"]: part for part in expected["parts"]}
    for name, names in GROUPS.items():
        of_group = [parts[part] for part in names if part in parts]
        bounds[name] = sum(part["low"] for part in of_group), sum(part["high"] for part in of_group)
    if profiles:
        taken |= _of_a_step(profiles)
    return [
        StepTime(
            part=name,
            taken_seconds=seconds,
            forecast_low_seconds=bounds[name][0],
            forecast_high_seconds=bounds[name][1],
        )
        for name, seconds in taken.items()
    ], None


def beside_forecast(run: History, steps: list[dict[str, Any]], profiles: list[dict[str, Any]]) -> str:
    """A table of `step_times`."""
    forecast, no_forecast = step_times(run, steps, profiles)
    if no_forecast is not None:
        return f"FORECAST of a step: {no_forecast}"
    rows = []
    for time in forecast:
        taken, low, high = time.taken_seconds, time.forecast_low_seconds, time.forecast_high_seconds
        rows.append((time.part, f"{taken:.3f} s", f"{low:.3f} to {high:.3f} s", _verdict(taken, low, high)))
    return page("FORECAST of a step beside what it takes", ("", "takes", "forecast", ""), *rows)


def _of_a_step(profiles: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a profiled step by `GROUPS`, the mean of the ranks; of communication also what work hides."""
    seconds = {name: mean(_sum(record, name) for record in profiles) for name in ("compute", "copies")}
    updates = [record["phases"].get("update", {}).get("compute", 0.0) for record in profiles]
    hidden = mean(record["hidden"] for record in profiles)
    communication = mean(_sum(record, "communication") for record in profiles) + hidden
    seconds["compute"] -= mean(updates)
    return {**seconds, "communication": communication, "update": mean(updates)}


def _verdict(seconds: float, low: float, high: float) -> str:
    return f"{seconds / high:.1f} times the most" if high and seconds > high else "less" if seconds < low else ""


def advice(run: History, profiles: list[dict[str, Any]]) -> Iterator[Advice]:
    """Yield advice that would make the run faster, in no order."""
    steps = run.steps[WARM_UP:] or run.steps
    share, settings = shares(steps), run.settings
    if share["saving"] > WORTH:
        keys = ("run.saves_per_epoch", "run.save_every_steps", "run.save_every_minutes")
        every = next((f"{key} {settings[key]}" for key in keys if settings.get(key) is not None), None)
        less = f"save less often than {every}, or " if every else ""  # without a key it saves at the end alone
        what = f"saving takes {share['saving']:.0%}: {less}set run.save_in_background: true"
        yield Advice(what=what, gain=share["saving"])
    if share["evaluation"] > WORTH:
        ways = {"run.evals_per_epoch": "lower", "run.eval_every_steps": "raise", "data.holdout": "lower"}
        advised = [f"{way} {key} {settings[key]}" for key, way in ways.items() if settings.get(key)]
        if any(key.startswith("data.eval") and value for key, value in settings.items()):
            advised.append("lower data.eval.max_rows")
        if advised:  # rounds have no held-out rows
            what = f"evaluation takes {share['evaluation']:.0%}: {', or '.join(advised)}"
            yield Advice(what=what, gain=share["evaluation"])
    if share["data"] > WORTH:
        what = f"steps wait for their batch for {share['data']:.0%}: rows come too slowly; put them on a local disk,"
        yield Advice(what=f"{what} and take data.streaming out if they fit", gain=share["data"])
    yield from _of_padding(profiles, share["step"], run)
    if profiles:
        yield from _of_profiles(profiles, share["step"], run)
    else:
        yield from _of_micro_batches(steps, share["step"], run)


def _of_micro_batches(steps: list[dict[str, Any]], step: float, run: History) -> Iterator[Advice]:
    """Advise larger micro-batches that fit, where a step takes longer than the slow end of the forecast. The excess is
    taken for a cost of each micro-batch, however few its tokens are, so the gain is an upper bound.
    """
    expected, memory = run.record.get("step_forecast", {}), run.record.get("forecast", {})
    gpu, micro = find_gpu(run.record.get("hardware", {}).get("gpu", "")), run.settings.get("batch.micro_batch_size")
    accumulation = _accumulation(run)
    # Under pipeline parallel it is many micro-batches that keep all stages busy.
    known = "high" in expected and "needed" in memory and run.record["strategy"].get("kind") != "pp"
    if not known or gpu is None or not micro:
        return
    # No part of the memory grows faster than the micro-batch, so as many times as much is enough.
    most = memory["needed"][1]
    usable = gpu.usable_gib * GIB
    fits = [n for n in range(2, accumulation + 1) if accumulation % n == 0 and n * most <= usable]
    taken = mean(line["step_seconds"] - line.get("data_seconds", 0.0) for line in steps)
    if not fits or taken <= expected["high"]:
        return
    times = fits[-1]
    gain = step * (1 - expected["high"] / taken) * (1 - 1 / times)
    if gain > WORTH:
        tokens = mean(line.get("num_tokens", 0) for line in steps) / accumulation / run.record["strategy"]["processes"]
        what = f"a step has {accumulation} micro-batches of some {tokens:,.0f} tokens, and GPU memory is free:"
        what = f"{what} raise batch.micro_batch_size {micro} to {micro * times}, which changes no result"
        yield Advice(what=f"{what} (at most {in_gib(times * most)} GiB by the forecast)", gain=gain)


def _of_padding(profiles: list[dict[str, Any]], step: float, run: History) -> Iterator[Advice]:
    """Advise against padding: its share of the positions is about its share of the computing. Attention, which grows
    with the square of a row, has more.
    """
    packing = run.record.get("packing", {})
    padding = packing.get("padding") or 0.0  # of a stream it is not known
    gain = step * padding
    if profiles:
        # Padding costs only where the GPU computes, and the busiest rank would promise too much.
        gain *= min(_in_passes(record, "compute") / record["seconds"] for record in profiles)
    if gain > WORTH:
        what = f"{padding:.0%} of the positions are padding"
        if packing.get("can_pack"):
            yield Advice(what=f"{what}: set data.packing: true", gain=gain, about="about")
        else:
            way = f"{packing.get('why')}; a smaller batch.micro_batch_size pads less"
            yield Advice(what=f"{what}: {way}", gain=gain)


def _in_passes(record: dict[str, Any], part: str) -> float:
    """Seconds of a part in the forwards and backwards."""
    return sum(parts[part] for name, parts in record["phases"].items() if name in ("forward", "backward"))


def _of_profiles(profiles: list[dict[str, Any]], step: float, run: History) -> Iterator[Advice]:
    """Yield advice from the profiled steps; `step` is the share of the whole time that steps take."""
    seconds = max(record["seconds"] for record in profiles)
    own_seconds = {record["rank"]: record["seconds"] - _sum(record, "communication") for record in profiles}
    slowest = max(own_seconds, key=lambda rank: own_seconds[rank])
    # Communication is left out: a fast rank spends the wait for the slowest one in it.
    lost = (own_seconds[slowest] - min(own_seconds.values())) / seconds
    if lost > 2 * WORTH:
        phases = next(record for record in profiles if record["rank"] == slowest)["phases"]
        least = {name: min(_own(record["phases"].get(name, phases[name])) for record in profiles) for name in phases}
        where = max(phases, key=lambda name: _own(phases[name]) - least[name])
        what = f"rank {slowest} is slower than the others, in its {where}, and they wait for it: look at its GPU and"
        yield Advice(what=f"{what} machine (cookbook report, cookbook doctor)", gain=step * lost)
    # The rank that waits least has the price of sending; the others wait for it as well.
    exposed = min(_sum(record, "communication") for record in profiles) / seconds
    if exposed > WORTH:
        what = f"communication that nothing hides takes {exposed:.0%}: {_sends_less(run)}"
        yield Advice(what=what, gain=step * exposed)
    idle = min(_in_passes(record, "other") for record in profiles) / seconds
    accumulation, micro = _accumulation(run), run.settings.get("batch.micro_batch_size")
    if idle > WORTH and accumulation > 1:
        what = f"{idle:.0%} is Python between the operations of {accumulation} micro-batches a step: raise"
        what = f"{what} batch.micro_batch_size {micro}, which changes no result"
        yield Advice(what=what, gain=step * idle * (1 - 1 / accumulation))


def _sends_less(run: History) -> str:
    """Say how this run can send less, or faster."""
    strategy, ways = _strategy(run), []
    machines = run.record.get("machines", 1)
    if machines > 1:
        ways.append(f"measure the link of the {machines} machines (ping, iperf3)")
    if strategy is not None and strategy.sends_each_micro_batch and _accumulation(run) > 1:
        size = run.settings.get("batch.micro_batch_size")
        ways.append(f"raise batch.micro_batch_size from {size}, since each micro-batch sends")
    if strategy is not None and strategy.gathers_weights:
        ways.append("take strategy zero2 or fsdp2_grad_op if memory allows, which gather weights once")
    return "; ".join([*ways, "take a strategy that sends less (cookbook plan ranks them)"])


def _strategy(run: History) -> Strategy | None:
    try:
        return load_strategy(Path(run.record["strategy"]["file"]))
    except (RecipeError, OSError, KeyError):  # a file that was changed or moved since
        return None


def _accumulation(run: History) -> int:
    """Micro-batches of a step on a process; 1 if unknown."""
    size, micro = run.settings.get("batch.global_batch_size"), run.settings.get("batch.micro_batch_size")
    processes = run.record.get("strategy", {}).get("processes", 1)
    return max(1, size // (micro * processes)) if size and micro else 1


def _own(parts: dict[str, float]) -> float:
    return sum(parts[part] for part in PARTS if part != "communication")


def _sum(record: dict[str, Any], part: str) -> float:
    return sum(parts[part] for parts in record["phases"].values())
