"""`next`: one verdict about a run, with the command to type now."""

import json
import shlex
import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import psutil

from cookbook.commands.shared.answer_forms import NextStep, Verdict
from cookbook.commands.shared.arguments import AsJson, run_folder, which_run
from cookbook.commands.shared.for_programs import answer
from cookbook.commands.shared.history import state_of
from cookbook.commands.shared.labels import recipe_files
from cookbook.config.recipe import load_recipe, read_recipe
from cookbook.config.strategy import known_strategies, strategy_path
from cookbook.system import lock, status
from cookbook.system.console import page, say
from cookbook.system.files import RecipeError, flatten
from cookbook.system.record_files import METRICS, ROUNDS, RUN, read_lines
from cookbook.system.record_forms import Record, read_form
from cookbook.system.shipped import short
from cookbook.training.checkpoint.folder import whole_checkpoints


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
    """The verdict about a folder, and what follows from it."""
    verdict, why = _verdict(folder)
    record, _ = read_form(folder / RUN, Record)
    newest = [str(checkpoint.path) for checkpoint in whole_checkpoints(folder / "checkpoints")[:1]]
    command, advice = WAYS[verdict](folder, record)
    return NextStep(
        run=str(folder),
        verdict=verdict,
        why=why,
        step=status.last_step(folder / METRICS),
        max_steps=record.get("max_steps"),
        checkpoint="".join(newest) or None,
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
            return "stopped", f"{reason or 'asked to'}; it saved, and can go on"
        case "finished":
            return "finished", reason or "its last step is done, and the model is exported"
    if reason.startswith(FloatingPointError.__name__):
        return "diverged", reason
    if "out of memory" in reason:
        return "out of memory", reason
    return ("hung" if reason.startswith("hang: ") else "failed"), reason or "without a message"


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
        return _line("rounds", folder / "recipe.yaml", *_set(f"run.output_dir={folder}")), None
    if record.get("machines", 1) > 1:
        return None, "write on each machine the command that started the run there, with run.resume=auto"
    return again(folder, record, {"run.output_dir": str(folder), "run.resume": "auto"}), None


def _try_again(folder: Path, record: dict[str, Any]) -> Way:
    return _resume(folder, record)[0], "mend what the reason names, or the next start fails alike"


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
    return _resume(folder, record)[0], f"read {folder}/hang/report.txt, which names who is at fault"


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
    return _line("launch", recipe, *options, *_set(*(f"{key}={value}" for key, value in values.items())))


def _set(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


def _line(*words: object) -> str:
    return shlex.join(["cookbook", *map(str, words)])
