"""What a run has left: a summary, its checkpoints, and what they are exported as."""

import json
import sys
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Literal

from typer import Option

from cookbook.commands import report as pages
from cookbook.commands.arguments import AsJson, run_folder
from cookbook.commands.history import History, read_history
from cookbook.system.console import page, several
from cookbook.system.files import RecipeError, cannot_write
from cookbook.system.imports import quiet_deepspeed
from cookbook.system.shipped import short
from cookbook.training.checkpoint.listing import in_words, is_run, list_checkpoints


def summary(folder: Annotated[Path, run_folder()]) -> int:
    """Show what a run did: losses, speed, memory, its model."""
    print(page(f"SUMMARY of {folder}", *_summary(read_history(folder)).items()))
    return 0


OUT = Option(metavar="FILE", help="default: report.html in the run's folder, compare.html beside the first of several")


def report(folder: Annotated[Path, run_folder()], *, out: Annotated[Path | None, OUT] = None) -> int:
    """Write an HTML page: curves, events, settings of a run."""
    run = read_history(folder)
    return _write_page(out or folder / "report.html", pages.run_page(run, _summary(run).items()))


def compare(
    folders: Annotated[list[Path], run_folder("run.output_dir of two or more runs")],
    *,
    out: Annotated[Path | None, OUT] = None,
) -> int:
    """Write an HTML page that lays runs over one another."""
    runs = [read_history(folder) for folder in folders]
    if len(runs) < 2:
        raise RecipeError(f"{folders[0]} is one run; name two or more, or write: cookbook report {folders[0]}")
    if len(set(map(Path.resolve, folders))) < len(folders):
        raise RecipeError(f"{' '.join(map(str, folders))}: a run is named twice; name each once")
    rows = pages.differences(runs)
    print(page("WHAT DIFFERS", ("key", *map(str, folders), "affects"), *rows) if rows else "Nothing differs.")
    return _write_page(out or folders[0].resolve().parent / "compare.html", pages.compare_page(runs))


def _write_page(path: Path, text: str) -> int:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(cannot_write(path, error, "name another file with --out")) from None
    print(path)
    return 0


def _summary(run: History) -> dict[str, str]:
    steps, evaluations, record = run.steps, run.evaluations, run.record
    first, last = steps[0], steps[-1]
    tail = steps[-10:]
    is_measured = "step_seconds" in first  # on simulated GPUs there is nothing to measure
    rows = {
        "loss": f"{first['loss']:.3f} at step {first['step']}, {mean(line['loss'] for line in tail):.3f} at the end"
        f" (mean of the last {len(tail)} steps)"
    }
    for name in dict.fromkeys(line.get("eval_set", "") for line in evaluations):
        of_set = [line for line in evaluations if line.get("eval_set", "") == name]
        shown = [f"{line['eval_loss']:.3f} at step {line['step']}" for line in (of_set[0], of_set[-1])]
        rows[f"held-out loss{name and f' of {name}'}"] = ", ".join(dict.fromkeys(shown))
    if "reward_accuracy" in last:
        accuracy = mean(line["reward_accuracy"] for line in tail)
        rows["reward accuracy"] = f"{accuracy:.2f} (mean of the last {len(tail)} steps)"
    time_taken = f" in {sum(line['step_seconds'] for line in steps):.0f} s" if is_measured else ""
    rows["training"] = f"steps {first['step']} to {last['step']}{time_taken}, {last['epoch']:.2f} epochs"
    if is_measured:
        rows["tokens/s"] = f"{median(line['tokens_per_second'] for line in steps):,.0f} (median step, all processes)"
    rows["peak memory"] = f"{max(line['peak_memory_gib'] for line in steps):.2f} GiB (largest process)"
    if record:
        strategy, hardware = record["strategy"], record["hardware"]
        device = hardware.get("gpu") or f"{hardware['cores']} CPU cores"
        rows["strategy"] = short(f"{strategy['file']}, {several(strategy['processes'], 'process')} on {device}")
    export = run.folder / "export"
    rows["model"] = str(export) if export.is_dir() else "none: the run was not finished"
    return rows


def merge(
    folder: Annotated[Path, run_folder()],
    *,
    dtype: Annotated[Literal["bfloat16", "float16", "float32"] | None, Option(help="default: the base model's")] = None,
) -> int:
    """Write a trained adapter and its base model as one model."""
    quiet_deepspeed()
    from cookbook.commands.merge import merge

    return merge(folder, dtype)


def export(
    folder: Annotated[Path, run_folder()],
    *,
    step: Annotated[int | None, Option(help="default: the newest checkpoint")] = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16", "as-is"], Option(help="as-is: the base model's")] = "as-is",
    merged: Annotated[bool, Option("--merged", help="adapter and base model as one model")] = False,
    out: Annotated[Path | None, Option(help="default: RUN/export, or RUN/merged")] = None,
    push: Annotated[str | None, Option(metavar="OWNER/NAME", help="and upload it to the Hub, with HF_TOKEN")] = None,
    public: Annotated[bool, Option("--public", help="everybody may read a new repository on the Hub")] = False,
) -> int:
    """Write a checkpoint as a Hugging Face folder, reopened.

    The exit code is 1 if what was written is not what the checkpoint holds.
    """
    if public and not push:
        raise RecipeError("--public would be ignored without --push; take it out")
    if not is_run(folder):  # before seconds go into imports
        raise RecipeError(f"{folder}: not a run's folder; name its run.output_dir, as outputs/quickstart")
    quiet_deepspeed()
    from transformers.utils import logging

    from cookbook.commands import publish
    from cookbook.commands.publish import push as hub

    logging.disable_progress_bar()
    if push:
        hub.check_push(push)
    checkpoint = publish.find_checkpoint(folder, step)
    try:
        written = publish.export(folder, checkpoint, target=out, dtype=dtype, merged=merged)
    except publish.BrokenExport as error:
        print(error, file=sys.stderr)
        return 1
    if push:
        print(f"pushed: {hub.push(written, push, public=public)}")
    return 0


def checkpoint(
    path: Annotated[Path, run_folder("a run, its checkpoints/, or one checkpoint")], *, as_json: AsJson = False
) -> int:
    """List checkpoints and how to resume; 1 if one is broken."""
    found = list_checkpoints(path)
    print(json.dumps(found, indent=1) if as_json else in_words(found))
    return 1 if any(one["broken"] for one in found) else 0
