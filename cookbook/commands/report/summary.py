"""A run in a few lines: losses, time, speed, memory, and where its model is."""

from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter, itemgetter
from statistics import mean, median
from typing import Any, NamedTuple

from cookbook.commands.shared.answer_forms import (
    BestBy,
    HeldOut,
    LossDifference,
    ReportAnswer,
    RunSummary,
    SettingThatDiffers,
)
from cookbook.commands.shared.history import History
from cookbook.system import status
from cookbook.system.console import several
from cookbook.system.shipped import short

JUDGED = ("reward_accuracy", "accuracy", "absolute_error")
"""Metrics of steps and evaluations that say how often, or how far, a model is wrong."""


LAST = 10
"""Steps at the end, of which means are shown."""


def measure(run: History) -> RunSummary:
    """The numbers of a run."""
    steps, record = run.steps, run.record
    first, last = steps[0], steps[-1]
    # On simulated GPUs there is nothing to measure.
    is_measured = all({"step_seconds", "tokens_per_second"} <= line.keys() for line in steps)
    peaks = [line["peak_memory_gib"] for line in steps if line.get("peak_memory_gib") is not None]
    rows = (record or {}).get("rows") or {}
    held_out = []
    for name in dict.fromkeys(line.get("eval_set", "") for line in run.evaluations):
        of_set = [line for line in run.evaluations if line.get("eval_set", "") == name]
        means = {key.removeprefix("eval_"): value for key, value in of_set[-1].items() if key.startswith("eval_")}
        means = {key: value for key, value in means.items() if isinstance(value, int | float)}
        losses = {"first_loss": of_set[0]["eval_loss"], "last_loss": of_set[-1]["eval_loss"]}
        held_out.append(
            HeldOut(
                set=name,
                **losses,
                first_step=of_set[0]["step"],
                step=of_set[-1]["step"],
                metrics=means,
                rows=rows.get("held_out", {}).get(name),
            )
        )
    export = run.folder / "export"
    return RunSummary(
        run=str(run.folder),
        state=run.state.name,
        reason=run.state.reason,
        first_step=first["step"],
        last_step=last["step"],
        first_loss=first["loss"],
        last_loss=mean(line["loss"] for line in steps[-LAST:]),
        epochs=last["epoch"],
        held_out=held_out,
        objective={key: value for key, value in run.settings.items() if key.startswith("objective.")},
        rows=rows.get("train"),
        best_by=None if record is None else record.get("best_by"),
        training_seconds=sum(line["step_seconds"] for line in steps) if is_measured else None,
        tokens_per_second=median(line["tokens_per_second"] for line in steps) if is_measured else None,
        peak_memory_gib=max(peaks, default=None),
        price=status.price_so_far(run.folder, steps),
        strategy=record["strategy"]["file"] if record else None,
        processes=record["strategy"]["processes"] if record else None,
        model=str(export) if export.is_dir() else None,
    )


def summarize(run: History) -> dict[str, str]:
    """The value of each row in words, by the row's name."""
    numbers, record, tail = measure(run), run.record, run.steps[-LAST:]
    part = f"its {len(tail)} steps" if len(tail) == len(run.steps) else f"the last {len(tail)} steps"
    of_tail = f" (mean of {part})" if len(tail) > 1 else ""
    at_end = f", {numbers.last_loss:.3f} at the end{of_tail}" if len(tail) > 1 else ""
    rows = {"loss": f"{numbers.first_loss:.3f} at step {numbers.first_step}{at_end}"}
    if run.rounds:
        shown = [f"{line['reward']:.3f} in round {line['round']}" for line in (run.rounds[0], run.rounds[-1])]
        rows["mean reward"] = ", ".join(dict.fromkeys(shown))
    for held in numbers.held_out:
        of_set = held.set and f" of {held.set}"
        shown = [f"{held.first_loss:.3f} at step {held.first_step}", f"{held.last_loss:.3f} at step {held.step}"]
        rows[f"held-out loss{of_set}"] = ", ".join(dict.fromkeys(shown))
        for key in JUDGED:
            if key in held.metrics:
                rows[f"held-out {key.replace('_', ' ')}{of_set}"] = f"{held.metrics[key]:.2f} at step {held.step}"
    for key in JUDGED:
        if key in tail[-1]:
            rows[key.replace("_", " ")] = f"{mean(line[key] for line in tail):.2f}{of_tail}"
    time_taken = "" if numbers.training_seconds is None else f" in {numbers.training_seconds:.0f} s"
    is_one = numbers.first_step == numbers.last_step
    steps = f"step {numbers.last_step}" if is_one else f"steps {numbers.first_step} to {numbers.last_step}"
    rows["training"] = f"{steps}{time_taken}, {numbers.epochs:.2f} epochs"
    ends = [event["reason"] for event in run.events if event.get("event") == "finish" and event.get("reason")]
    if ends:
        rows["end"] = ends[-1]
    if numbers.tokens_per_second is not None:
        rows["tokens/s"] = f"{numbers.tokens_per_second:,.0f} (median step, all processes)"
    if numbers.peak_memory_gib is not None:
        rows["peak memory"] = f"{numbers.peak_memory_gib:.2f} GiB (largest process)"
    if numbers.price is not None:
        rows["price"] = f"{numbers.price:.2f} so far" if run.state.name != "finished" else f"{numbers.price:.2f}"
    if record:
        strategy, hardware = record["strategy"], record["hardware"]
        device = hardware.get("gpu") or f"{hardware['cores']} CPU cores"
        placed = f"{strategy['file']}, {several(strategy['processes'], 'process')} on {device}"
        rows["strategy"] = with_earlier(short(placed), run)
    rows["model"] = numbers.model or "none: the run was not finished"
    return rows


def earlier_strategies(run: History) -> list[tuple[str, int]]:
    """Strategies of a run before its last one, with the last step of each; those that trained no step are left out."""
    starts = [event for event in run.events if event.get("event") == "start"]
    spans: list[tuple[str, int]] = []
    for start, following in pairwise(starts):
        if following["strategy"] == start["strategy"] or following["step"] <= start["step"]:
            continue
        spans.append((start["strategy"], following["step"]))
    return spans


def with_earlier(strategy: Any, run: History) -> Any:
    """The strategy of a run's last start, with those before it."""
    earlier = ", ".join(f"{name} to step {step}" for name, step in earlier_strategies(run))
    return f"{strategy}; {earlier}" if earlier else strategy


def largest_loss_difference(runs: Sequence[History]) -> LossDifference | None:
    """The step at which the loss of another run is farthest from that of the first one; None where no run has a step
    in common with it.
    """
    losses = [{line["step"]: line["loss"] for line in run.steps} for run in runs]
    differences = [
        LossDifference(
            runs=[str(runs[0].folder), str(run.folder)], step=step, difference=abs(of_run[step] - losses[0][step])
        )
        for run, of_run in zip(runs[1:], losses[1:], strict=True)
        for step in of_run
        if step in losses[0]
    ]
    return max(differences, key=attrgetter("difference"), default=None)


def difference_in_words(farthest: LossDifference, num_runs: int) -> str:
    of = f" of {farthest.runs[1]}" if num_runs > 2 else ""
    return f"largest difference of the loss{of}: {farthest.difference:.1g}, at step {farthest.step}"


class Best(NamedTuple):
    """The best of several runs by their last evaluations."""

    run: str
    set: str
    what: str
    """The held-out loss, or the name of a metric."""
    value: float

    def words(self) -> str:
        return f"best held-out {self.what}{self.set and f' of {self.set}'}: {self.value:.4f}, at the end of {self.run}"


def best_run(runs: Sequence[RunSummary]) -> Best | None:
    """The run whose last evaluation is best, on the first set that all runs have, by the metric that all of them
    compare by, or else the loss; None where they share no set, or `why_no_best`.
    """
    last, by = _compare(runs)
    if not last or why_no_best(runs) is not None:
        return None
    pairs = [
        (of_set.last_loss if by is None else of_set.metrics[by.metric], run.run)
        for of_set, run in zip(last, runs, strict=True)
    ]
    value, run = (max if by is not None and by.greater_is_better else min)(pairs, key=itemgetter(0))
    return Best(run, last[0].set, "loss" if by is None else by.metric, value)


def why_no_best(runs: Sequence[RunSummary]) -> str | None:
    """Why the last evaluations of runs, or without a set that they share their training losses, do not compare; None
    where they do.
    """
    last, by = _compare(runs)
    keys = sorted({key for run in runs for key in run.objective})
    differ = [key for key in keys if any(run.objective.get(key) != runs[0].objective.get(key) for run in runs)]
    if differ and by is None:
        return f"no run is the best: a loss under another {' and another '.join(differ)} is another loss"
    digests = {of_set.rows for of_set in last} if last else {run.rows for run in runs}
    counts = {of_set.metrics.get("num_tokens") for of_set in last}
    if len(digests - {None}) > 1 or len(counts) > 1:
        of_set = f"held-out rows{last[0].set and f' of {last[0].set}'}" if last else "training rows"
        return f"no run is the best: the {of_set} are not the same in all"
    return None


def _compare(runs: Sequence[RunSummary]) -> tuple[list[HeldOut], BestBy | None]:
    """The last evaluation of each run on the first set that all have, and the metric that compares them; no evaluation
    where they share no set, no metric where the loss compares them.
    """
    held = [{evaluation.set: evaluation for evaluation in run.held_out} for run in runs]
    shared = [name for name in held[0] if all(name in of_run for of_run in held)]
    last, by = [of_run[shared[0]] for of_run in held] if shared else [], runs[0].best_by
    if by is None or any(run.best_by != by for run in runs) or any(by.metric not in of_set.metrics for of_set in last):
        return last, None
    return last, by if last else None


def make_report(
    runs: Sequence[History],
    rows: Sequence[Sequence[str]],
    best: str | None,
    farthest: LossDifference | None,
    page: str,
) -> ReportAnswer:
    """The report of runs, for programs.

    Args:
        rows: of `pages.differences`.
    """
    differing = [SettingThatDiffers(key=key, values=values, affects=effect) for key, *values, effect in rows]
    return ReportAnswer(
        runs=list(map(measure, runs)), differences=differing, best=best, loss_difference=farthest, page=page
    )
