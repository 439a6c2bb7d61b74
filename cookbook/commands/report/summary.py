"""A run in a few lines: losses, time, speed, memory, and where its model is."""

from statistics import mean, median

from cookbook.commands.shared.history import History
from cookbook.system.console import several
from cookbook.system.shipped import short

JUDGED = ("reward_accuracy", "accuracy", "absolute_error")
"""Metrics of steps and evaluations that say how often, or how far, a model is wrong."""


def summarize(run: History) -> dict[str, str]:
    """The value of each row in words, by the row's name."""
    steps, evaluations, record = run.steps, run.evaluations, run.record
    first, last = steps[0], steps[-1]
    tail = steps[-10:]
    # On simulated GPUs there is nothing to measure.
    is_measured = all({"step_seconds", "tokens_per_second"} <= line.keys() for line in steps)
    rows = {
        "loss": f"{first['loss']:.3f} at step {first['step']}, {mean(line['loss'] for line in tail):.3f} at the end"
        f" (mean of the last {len(tail)} steps)"
    }
    if run.rounds:
        shown = [f"{line['reward']:.3f} in round {line['round']}" for line in (run.rounds[0], run.rounds[-1])]
        rows["mean reward"] = ", ".join(dict.fromkeys(shown))
    for name in dict.fromkeys(line.get("eval_set", "") for line in evaluations):
        of_set = [line for line in evaluations if line.get("eval_set", "") == name]
        shown = [f"{line['eval_loss']:.3f} at step {line['step']}" for line in (of_set[0], of_set[-1])]
        rows[f"held-out loss{name and f' of {name}'}"] = ", ".join(dict.fromkeys(shown))
        for key in JUDGED:
            if f"eval_{key}" in of_set[-1]:
                text = f"{of_set[-1][f'eval_{key}']:.2f} at step {of_set[-1]['step']}"
                rows[f"held-out {key.replace('_', ' ')}{name and f' of {name}'}"] = text
    for key in JUDGED:
        if key in last:
            rows[key.replace("_", " ")] = f"{mean(line[key] for line in tail):.2f} (mean of the last {len(tail)} steps)"
    time_taken = f" in {sum(line['step_seconds'] for line in steps):.0f} s" if is_measured else ""
    rows["training"] = f"steps {first['step']} to {last['step']}{time_taken}, {last['epoch']:.2f} epochs"
    ends = [event["reason"] for event in run.events if event.get("event") == "finish" and event.get("reason")]
    if ends:
        rows["end"] = ends[-1]
    if is_measured:
        rows["tokens/s"] = f"{median(line['tokens_per_second'] for line in steps):,.0f} (median step, all processes)"
    if peaks := [line["peak_memory_gib"] for line in steps if line.get("peak_memory_gib") is not None]:
        rows["peak memory"] = f"{max(peaks):.2f} GiB (largest process)"
    if record:
        strategy, hardware = record["strategy"], record["hardware"]
        device = hardware.get("gpu") or f"{hardware['cores']} CPU cores"
        rows["strategy"] = short(f"{strategy['file']}, {several(strategy['processes'], 'process')} on {device}")
    export = run.folder / "export"
    rows["model"] = str(export) if export.is_dir() else "none: the run was not finished"
    return rows
