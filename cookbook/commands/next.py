"""`next`: one verdict about a run, with the command to type now."""

import json
import shlex
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import psutil

from cookbook.commands.shared.answer_forms import NextStep, Verdict
from cookbook.commands.shared.arguments import AsJson, holds_no_run, run_folder, which_run
from cookbook.commands.shared.for_programs import answer
from cookbook.commands.shared.history import state_of
from cookbook.commands.shared.labels import recipe_files
from cookbook.config.recipe import load_recipe, read_recipe
from cookbook.config.strategy import known_strategies, strategy_path
from cookbook.system import lock, status
from cookbook.system.console import page, say
from cookbook.system.files import RecipeError, flatten, refuse
from cookbook.system.record_files import METRICS, ROUNDS, RUN, read_lines
from cookbook.system.record_forms import Record, damage, read_form
from cookbook.system.shipped import short
from cookbook.training.checkpoint.resume import newest


def next(folder: Annotated[Path, run_folder()], *, as_json: AsJson = False) -> int:
    """Say how a run stands, and the one command to type now."""
    if folder.is_file():
        raise RecipeError(f"{folder}: is a file; {which_run(folder)}")
    step = next_step(folder)
    rows = [("run", step.run), (step.verdict, step.why)]
    rows += [] if step.price is None else [("price so far", f"{step.price:.2f}")]
    rows += [("first", step.advice)] if step.advice else []
    rows += [("type", step.command)] if step.command else []
    say(short(page(*rows, indent=0)))
    return answer(step) if as_json else 0


def next_step(folder: Path) -> NextStep:
    """The verdict about a folder, and what follows from it.

    Raises:
        RecipeError: it is neither a run's folder nor one that a run may begin in.
    """
    verdict, why = _verdict(folder)
    if verdict == "never started" and folder.is_dir():
        refuse(holds_no_run(folder))
    record = _record(folder)
    checkpoint, _ = newest(folder / "checkpoints")
    command, advice = WAYS[verdict](folder, record)
    return NextStep(
        run=str(folder),
        verdict=verdict,
        why=why,
        step=status.last_step(folder / METRICS),
        max_steps=record.get("max_steps"),
        checkpoint=None if checkpoint is None else str(checkpoint.path),
        price=status.price_so_far(folder, read_lines(folder / METRICS)),
        command=command,
        advice=advice,
    )


def _verdict(folder: Path) -> tuple[Verdict, str]:
    """The verdict, and why it is so."""
    state = state_of(folder)
    reason = (state.reason or "").strip()
    match state.name:
        case "starting" if _is_held(folder):
            return "starting", "a process has the folder, and has written no state yet"
        case "starting":
            return "never started", "no run has begun there"
        case "unknown":
            return "damaged", reason
        case "killed":
            return "killed", "its process is gone, and wrote no last state: it was killed, or the machine went down"
        case "running" | "exporting" as name:
            return name, f"process {(status.read(folder) or {}).get('pid')} is at work"
        case "stopped":
            return "stopped", f"{reason or 'asked to'}; {_describe_saved(folder)}"
        case "finished":
            return "finished", reason or "its last step is done, and the model is exported"
    if reason.startswith(FloatingPointError.__name__):
        return "diverged", reason
    if "out of memory" in reason:
        return "out of memory", reason
    return ("hung" if reason.startswith("hang: ") else "failed"), reason or "without a message"


def _record(folder: Path) -> dict[str, Any]:
    """run.json, or its copy in the newest checkpoint if it is missing or damaged; else empty."""
    record, _ = read_form(folder / RUN, Record)
    checkpoint, _ = (None, []) if record else newest(folder / "checkpoints")
    copy = checkpoint.state()["run"] if checkpoint else {}
    return record if damage(copy, Record) else copy


def _describe_saved(folder: Path) -> str:
    """Tell what a stopped run has saved."""
    checkpoint, broken = newest(folder / "checkpoints")
    if checkpoint is None and not (folder / ROUNDS).is_file():
        return "what it saved is broken, and it cannot go on" if broken else "it saved nothing, and begins at step 0"
    return "it saved, and can go on"


def _is_held(folder: Path) -> bool:
    """Return whether a process of this machine has the folder."""
    with suppress(ValueError, KeyError, TypeError):
        owner = json.loads(lock.signature(folder))
        return owner["host"] == socket.gethostname() and psutil.pid_exists(owner["pid"])
    return False


Way = tuple[str | None, str | None]
"""The command, and the advice before it."""


def _begin(folder: Path, _: dict[str, Any]) -> Way:
    for path in recipe_files():
        with suppress(RecipeError):
            if Path(load_recipe(path).run.output_dir).resolve() == folder.resolve():
                return _line("launch", path), None
    return None, f"no recipe here writes to it: cookbook launch RECIPE --set run.output_dir={folder}"


def _ask_again(folder: Path, _: dict[str, Any]) -> Way:
    return _line("next", folder), "wait until it has read its rows"


def _watch(folder: Path, _: dict[str, Any]) -> Way:
    return _line("watch", folder), None


def _resume(folder: Path, record: dict[str, Any]) -> Way:
    if (folder / ROUNDS).is_file():
        return _line("rounds", folder / "recipe.yaml", *_set({"run.output_dir": str(folder)})), None
    checkpoint, advice = newest(folder / "checkpoints")
    changed = {"run.output_dir": str(folder), "run.resume": "auto"}
    if advice and checkpoint is None:
        advice.append(
            "put its files back as they were saved, or take the version of this program that reads its format; else"
            " begin again, in a folder of its own"
        )
        changed = {"run.output_dir": f"{folder}-again"}
    elif advice and checkpoint is not None:
        advice.append(f"the run would go on from {checkpoint.path.name}")
    command = again(folder, record, changed)
    by_hand = f"the command that started the run there, with {shlex.join(_set(changed))}"
    if record.get("machines", 1) > 1:
        command = None
        advice.append(f"write on each machine {by_hand}")
    elif command is None:
        advice.append(f"{folder / RUN} or the recipe is missing or damaged: write {by_hand}")
    return command, "; ".join(advice) or None


def _try_again(folder: Path, record: dict[str, Any]) -> Way:
    return _after("mend what the reason names, or the next start fails alike", _resume(folder, record))


def _after(first: str, way: Way) -> Way:
    """A way with advice that comes before its own."""
    command, advice = way
    return command, first if advice is None else f"{first}; {advice}"


def _calm(folder: Path, record: dict[str, Any]) -> Way:
    rate = flatten(read_recipe(folder / "recipe.yaml").values).get("optim.learning_rate")
    advice = f"look at {folder}/nonfinite-step-*.json and at the loss before (cookbook report {folder})"
    if rate is None or record.get("machines", 1) > 1:
        return None, advice
    other = {"run.output_dir": f"{folder}-half-rate", "optim.learning_rate": f"{rate / 2:g}"}
    return again(folder, record, other), f"{advice}; half the learning rate, in a folder of its own, is the usual cure"


def _fit(folder: Path, record: dict[str, Any]) -> Way:
    return _line("plan", folder / "recipe.yaml"), "its last lines name the first change that makes the run fit"


def _unhang(folder: Path, record: dict[str, Any]) -> Way:
    return _after(f"read {folder}/hang/report.txt, which names who is at fault", _resume(folder, record))


def _mend(folder: Path, _: dict[str, Any]) -> Way:
    return _line("checkpoint", folder), "its checkpoints may be whole"


def _look(folder: Path, _: dict[str, Any]) -> Way:
    return _line("report", folder), None


WAYS: dict[Verdict, Callable[[Path, dict[str, Any]], Way]] = {
    "never started": _begin,
    "starting": _ask_again,
    "running": _watch,
    "exporting": _watch,
    "killed": _resume,
    "stopped": _resume,
    "finished": _look,
    "failed": _try_again,
    "diverged": _calm,
    "out of memory": _fit,
    "hung": _unhang,
    "damaged": _mend,
}


def again(folder: Path, record: dict[str, Any], changed: dict[str, str]) -> str | None:
    """The line that starts a run's recipe again on this machine with other values; None if it is not recorded."""
    words = record.get("command", [])
    recipe = words[1] if len(words) > 1 and Path(words[1]).is_file() else None
    settings = [assigned.partition("=")[::2] for flag, assigned in pairwise(words) if flag == "--set"]
    if recipe is None:  # its copy has all settings in it
        recipe, settings = str(folder / "recipe.yaml"), []
    if not record or not Path(recipe).is_file():
        return None
    strategy = record["strategy"]
    names = {str(strategy_path(name).resolve()): name for name in known_strategies()}
    file = names.get(str(Path(strategy["file"]).resolve()), strategy["file"])
    options = ["--strategy", file, "--processes", str(strategy["processes"])]
    if record.get("hardware", {}).get("simulated"):
        options += ["--simulate-gpus", str(strategy["processes"])]
    values = {key.strip(): value for key, value in settings} | changed
    return _line("launch", recipe, *options, *_set(values))


def _set(values: Mapping[str, str]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def _line(*words: object) -> str:
    return shlex.join(["cookbook", *map(str, words)])
