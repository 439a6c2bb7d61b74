"""Mistakes of a recipe that no section can find alone: in several keys, or on the disk."""

import difflib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cookbook.config import tracker_options
from cookbook.config.chat_templates import missing_template
from cookbook.config.objectives import Objective
from cookbook.config.optim import Optimizer
from cookbook.config.schedule import Schedule, peak_learning_rate
from cookbook.config.sections import (
    BUILTIN_SOURCE,
    TEXT_FORMATS,
    BatchSection,
    DataSection,
    ModelSection,
    RunSection,
    Source,
    data_format,
    is_pattern,
)
from cookbook.config.strategy import missing_strategy
from cookbook.system import registry
from cookbook.system.files import Document, find_file, nearest, path_problem
from cookbook.system.shipped import pip_install

KINDS: dict[str, type[BaseModel]] = {
    "batch": BatchSection,
    "data": DataSection,
    "model": ModelSection,
    "objective": Objective,
    "optim": Optimizer,
    "run": RunSection,
    "schedule": Schedule,
}


def check_across_keys(document: Document, sections: Mapping[str, Any], known: Callable[[], set[str]]) -> Iterator[str]:
    """Mistakes that involve several keys or the disk.

    Args:
        sections: the section of each name in KINDS; None: it has mistakes of its own, and is left out.
        known: the dotted keys of a recipe; called only where one is looked up.
    """
    place = document.place
    model, data, run = (sections[name] for name in ("model", "data", "run"))
    strategy = document.values.get("strategy")
    if isinstance(strategy, str) and path_problem(strategy) is None:
        yield from missing_strategy(strategy, lambda: place("strategy"))
    precision = document.values.get("mixed_precision", "bf16")
    if document.values.get("loss_scale") is not None and precision != "fp16":
        yield f"{place('loss_scale')}: would be ignored with mixed_precision {precision}; take it out, or write fp16"
    optim = sections["optim"]
    if optim is not None and optim.gradient_dtype == "fp16" and precision != "fp16":
        problem = "small gradients would be 0 without a loss scale; write bf16, or mixed_precision: fp16"
        yield f"{place('optim', 'gradient_dtype')} is fp16 with mixed_precision {precision}: {problem}"
    yield from _check_rates(
        optim, sections["schedule"], sections["batch"], lambda: place("schedule", "min_learning_rate")
    )
    name = model.name_or_path if model is not None else None
    if name is not None:
        yield from _check_model(name, lambda: place("model", "name_or_path"))
    if sections["objective"] is not None and (asked := sections["objective"].asks) is not None:
        yield from _check_model(asked.teacher, lambda: place("objective", "teacher"))
    if data is not None:
        if data.chat_template is not None:
            named = document.values["data"].get("chat_template", data.chat_template)  # absent if it is misspelt
            yield from missing_template(named, lambda: place("data", "chat_template"))
        is_list = isinstance(document.values["data"].get("train"), list)
        for i, source in enumerate(data.train):
            yield from _check_source(source, place, ("data", "train", *([i] if is_list else [])))
        for name, source in data.eval.items():
            yield from _check_source(source, place, ("data", "eval", *([name] if name else [])))
        yield from _check_data(data, run, sections["objective"], sections["batch"], place)
    if run is not None:
        yield from _check_output_dir(run.output_dir, lambda: place("run", "output_dir"))
        schedule = sections["schedule"]
        is_shortened = ("run", "max_steps") in document.overrides  # a trial, which has no need of the peak
        if schedule is not None and run.max_steps is not None and not is_shortened:
            rounds = document.values.get("rounds")
            times = rounds.get("num_rounds") if isinstance(rounds, dict) else None
            for mistake in schedule.misfits(run.max_steps * (times if isinstance(times, int) and times > 0 else 1)):
                key, _, problem = mistake.partition(" ")
                yield f"{place('schedule', key)} {problem}"
        yield from _check_saving(run, data, place, known)
        yield from _check_trackers(run, partial(place, "run", "trackers"))
        yield from _check_registered("callback", run.callbacks, partial(place, "run", "callbacks"))
        yield from _check_registered("metric", run.metrics, partial(place, "run", "metrics"))
        if run.profile is not None and run.max_steps is not None and run.profile.steps[1] > run.max_steps:
            given = f"{place('run', 'profile', 'steps')} is {run.profile.steps}"
            yield f"{given}, but the run has {run.max_steps} steps; name earlier ones"
        if data is not None and not data.eval and not data.holdout:
            keys = ("eval_every_steps", "evals_per_epoch", "early_stopping_patience", "sample_every_steps", "metrics")
            for key in keys:
                if every := getattr(run, key):
                    given = f"{place('run', key)} is {every}"
                    yield f"{given}, but there is no data.eval; add it, or take this key out"


def _check_rates(
    optim: Optimizer | None, schedule: Schedule | None, batch: BatchSection | None, place: Callable[[], str]
) -> Iterator[str]:
    if optim is None or schedule is None or batch is None:
        return
    peak = peak_learning_rate(optim, schedule, batch.global_batch_size)
    if schedule.least > peak:
        problem = f"above the peak, {peak:g}; write a rate below it, as {peak / 10:g} for a tenth"
        yield f"{place()} is {schedule.least:g}, {problem}"


def _check_model(name: str, place: Callable[[], str]) -> Iterator[str]:
    folder = Path(name)
    if not folder.is_dir():
        if name.startswith((".", "/")) or name.count("/") > 1:  # the Hub has NAME and OWNER/NAME
            yield f"{place()} is {name!r}: no such folder (looked in {Path.cwd()})"
    elif (folder / "export").is_dir() and not (folder / "config.json").is_file():
        yield f"{place()} is {name!r}, the folder of a run; name its model: {folder / 'export'}"


def _check_data(
    data: DataSection,
    run: RunSection | None,
    objective: Objective | None,
    batch: BatchSection | None,
    place: Callable[..., str],
) -> Iterator[str]:
    if data.streaming and run is not None and run.num_epochs is not None:
        problem = "the length of a stream is not known before its end; write run.max_steps instead"
        yield f"{place('run', 'num_epochs')} is {run.num_epochs}, but {problem}"
    if data.streaming and run is not None:
        for steps, key in run.cadences.items():
            if (count := getattr(run, key)) is not None:
                yield f"{place('run', key)} is {count}, but the length of a stream is not known; write {steps} instead"
    if data.streaming and objective is not None and objective.needs_reference:
        problem = f"computes the reference of all {objective.sample}s before the first step; take it out"
        yield f"{place('data', 'streaming')} is true, but {objective.name} {problem}"
    if data.streaming and objective is not None and objective.asks is not None:
        problem = "asks a teacher about all rows before the first step; take it out"
        yield f"{place('data', 'streaming')} is true, but {objective.name} {problem}"
    if objective is not None and objective.num_scores is not None and run is not None and run.sample_every_steps:
        problem = f"{objective.name} trains a head that writes no text; take it out"
        yield f"{place('run', 'sample_every_steps')} is {run.sample_every_steps}, but {problem}"
    if objective is not None and objective.num_scores is not None and run is not None and run.metrics:
        problem = f"{objective.name} trains a head of scores, which has no logits of tokens; take it out"
        yield f"{place('run', 'metrics')} is {run.metrics}, but {problem}"
    if data.too_long == "split" and objective is not None and not objective.takes_parts:
        problem = f"{objective.name} compares whole answers; write cut, drop or error"
        yield f"{place('data', 'too_long')} is 'split', but {problem}"
    if batch is not None and batch.micro_batch_tokens is not None:
        num_sequences = len(objective.sequences) if objective is not None else 1
        longest = data.max_length * num_sequences
        if batch.micro_batch_tokens < longest:
            what = f"a sample of {num_sequences} sequences of" if num_sequences > 1 else "one sample of"
            given = f"{place('batch', 'micro_batch_tokens')} is {batch.micro_batch_tokens}"
            yield f"{given}, too few for {what} data.max_length {data.max_length}; write at least {longest}"


def _check_output_dir(name: str, place: Callable[[], str]) -> Iterator[str]:
    here, folder = Path.cwd(), Path(name).resolve()
    existing = next((path for path in (Path(name), *Path(name).parents) if path.is_symlink() or path.exists()), here)
    if folder == here or folder in here.parents:
        what = "the current folder" if folder == here else "a parent of the current folder"
        yield f"{place()} is {name!r}, {what}; name one of its own, as outputs/mine"
    elif not existing.exists():
        yield f"{place()} is {name!r}, but {existing} is a broken link"
    elif not existing.is_dir():
        yield f"{place()} is {name!r}, but {existing} is a file; name a folder"
    elif folder.is_dir() and (others := names_of_no_run(folder)):
        yield (
            f"{place()} is {name!r}, which is no run's folder and not empty (it has {', '.join(others)}); name a new"
            " one, as outputs/mine"
        )


RUN_RECORDS = ("run.json", "status.json", "rounds.json")
BEFORE_RECORDS = ("checkpoints", "events.jsonl", "metrics.jsonl", "model", "hang", "logs")
"""Files and folders that a run that was killed at its start may have left without a record."""


def names_of_no_run(folder: Path) -> list[str]:
    """Up to three names in a folder that no run has made. A start renames an earlier run's folder, and no other."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return [] if {*RUN_RECORDS} & {*names} else [name for name in names if name not in BEFORE_RECORDS][:3]


ONLY_EVALUATED = "only a checkpoint that is evaluated when it is saved can be the best"


def _check_saving(
    run: RunSection, data: DataSection | None, place: Callable[..., str], known: Callable[[], set[str]]
) -> Iterator[str]:
    if run.keep_best:
        best = f"{place('run', 'keep_best')} is {run.keep_best}"
        if data is not None and not data.eval and not data.holdout:
            yield f"{best}, but there is no data.eval to rank checkpoints by"
        elif run.saves_per_epoch is not None and not run.best_is_evaluated:
            yield (
                f"{best}, but saves_per_epoch is {run.saves_per_epoch} and evals_per_epoch {run.evals_per_epoch}:"
                f" {ONLY_EVALUATED}; make evals_per_epoch a multiple of saves_per_epoch"
            )
        elif not run.best_is_evaluated:
            yield (
                f"{best}, but save_every_steps is {run.save_every_steps} and eval_every_steps {run.eval_every_steps}:"
                f" {ONLY_EVALUATED}; make save_every_steps a multiple of eval_every_steps"
            )
    if run.early_stopping_patience is not None and run.eval_every_steps is None and run.evals_per_epoch is None:
        given = f"{place('run', 'early_stopping_patience')} is {run.early_stopping_patience}"
        yield f"{given}, but nothing is evaluated on the way; write run.eval_every_steps or run.evals_per_epoch"
    for key in run.allow_changes:
        keys = known()
        if not any(leaf == key or leaf.startswith(key + ".") for leaf in keys):
            near = difflib.get_close_matches(key, keys, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{place('run', 'allow_changes')} names {key!r}, which no recipe has{hint}"


def _check_registered(family: str, names: list[str], place: Callable[[], str]) -> Iterator[str]:
    """Mistakes of names that the recipe's plugins must have registered."""
    known = registry.members(family)
    for name in names:
        if name not in known:
            there = nearest(name, list(known)) if known else f"none registers a {family}"
            yield f"{place()} has {name!r}, which no file in plugins registers; {there}"


def _check_trackers(run: RunSection, place: Callable[..., str]) -> Iterator[str]:
    for name, options in sorted(run.trackers.items()):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # wandb leaves a folder of its name, which passes for a package
            yield f"{place()} has {name}, which is not installed: {pip_install(name)}"
        else:
            yield from tracker_options.check(name, options, partial(place, name))


def _check_source(source: Source, place: Callable[..., str], where: tuple[str | int, ...]) -> list[str]:
    path = Path(source.path)
    if source.path == BUILTIN_SOURCE:
        if source.split not in ("train", "test"):
            return [f"{place(*where, 'split')} is {source.split!r}; {BUILTIN_SOURCE} has train and test"]
    elif is_pattern(source.path):
        pass  # of which the files are found when they are read
    elif path.exists() and not path.is_file() and not path.is_dir():
        return [
            f"{place(*where)} is {source.path!r}: a pipe or a device, and rows are read more than once; write a file"
        ]
    elif data_format(source.path):
        if mistakes := find_file(source.path, lambda: place(*where)):
            return mistakes
    elif path.is_file():
        formats = ", ".join(TEXT_FORMATS)
        rest = f"a data file must end in {formats} (or these with .gz, .zst, .bz2), .parquet or .arrow"
        return [f"{place(*where)} is {source.path!r}: {rest}"]
    elif source.path.startswith((".", "/")) and not path.is_dir():
        return [f"{place(*where)} is {source.path!r}: no such folder (looked in {Path.cwd()})"]
    unused = ", ".join(sorted({"revision", *(() if path.is_dir() else ("name",))} & source.model_fields_set))
    if unused and (source.path == BUILTIN_SOURCE or path.exists()):
        return [f"{place(*where)}: {unused} would be ignored: {source.path} is not on the Hub; take it out"]
    is_file = data_format(source.path) and source.split != "train"  # which is what the Hub's library calls a file
    if is_file or ("[" in source.split and path.exists()):
        what = "a file is read whole" if is_file else "a slice is for the Hub"
        advice = "take it out, limit the rows with max_rows, and hold some out with data.holdout"
        return [f"{place(*where, 'split')} is {source.split!r}, but {what}; {advice}"]
    return []
