"""Rehearsal of a recipe: where it runs, the run itself, and what its outputs are compared with."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

import simulated_gpus
from cookbook.commands.rehearse.small_recipe import Place, Rehearsal, write_small_recipe
from cookbook.commands.rehearse.standins import (
    synthetic_rows,
    write_jsonl,
)
from cookbook.commands.shared.arguments import RECIPE, Assignments, StrategyFile, process_count
from cookbook.commands.shared.labels import read_label, read_needs
from cookbook.commands.shared.simulation import as_mistakes
from cookbook.config.objectives.token_loss import LabelLoss
from cookbook.config.recipe import read_recipe
from cookbook.config.sections import Source
from cookbook.start.run_plan import describe_batch, launch_command, load_pair, make_plan
from cookbook.system.console import page, say, several
from cookbook.system.files import RecipeError, read_document
from cookbook.system.imports import quiet_deepspeed
from cookbook.system.machine import CPU_PROCESSES, num_cores, num_gpus, torch_cuda
from cookbook.system.record_files import METRICS, RUN, read_lines
from cookbook.system.shipped import short

MADE_UP_TOKENS = 256
"""For a made-up prompt and answer, even where a character is a token."""
LIMIT_SECONDS = 600
LOSS_TOLERANCE = {"no": 1e-3, "bf16": 3e-2, "fp16": 3e-2, "fp8": 3e-2}
"""Largest difference of the recomputed loss by mixed_precision: kernels differ, and exported weights may be bf16."""


def rehearse(
    path: Annotated[Path, RECIPE],
    *,
    strategy: StrategyFile = None,
    on: Annotated[Literal["gpus", "cpu"] | None, Option(help="default: gpus, simulated ones if possible")] = None,
    processes: Annotated[int | None, process_count("two, or what the strategy's mesh needs")] = None,
    assignments: Assignments,
) -> int:
    """Run a recipe with a tiny model on simulated GPUs."""
    started = time.perf_counter()
    quiet_deepspeed()
    recipe, loaded = load_pair(path, assignments, strategy)
    place, why = _choose_place(on)
    here = num_gpus() if place == "GPUs" else CPU_PROCESSES
    smallest = max(min(here, CPU_PROCESSES), loaded.written_mesh.num_processes)
    count = processes or loaded.num_processes or smallest
    folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    rehearsal = Rehearsal(recipe=recipe, strategy=loaded, num_processes=count, place=place, folder=folder)
    if why:
        say(why)
    say(short(f"Rehearsing {path} under {loaded.path}, {several(count, 'process')} on {place} ..."))
    try:
        _plan_full_size(rehearsal, path)
        rehearsal = _of_one_round(rehearsal)
        log = folder / "log.txt"
        code = _run(rehearsal, write_small_recipe(rehearsal, path), log)
        if mistake := _find_error(log) if code else _check_outputs(rehearsal):
            say(f"\n{mistake}\n\nREHEARSAL of {path}: failed", file=sys.stderr)
            return code or 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(short(f"REHEARSAL of {path}: fine ({time.perf_counter() - started:.0f} s)"))
    beyond = {
        "CPU": "the GPU's code paths, NCCL",
        "simulated GPUs": "errors inside real kernels and NCCL",
        "GPUs": "more GPUs than are here",
    }[place]
    rehearsal.notes.missing.append(f"{beyond}, memory and speed at full size, the recipe's own learning rate")
    covered, missing = ("\n".join(lines) for lines in (rehearsal.notes.covered, rehearsal.notes.missing))
    say(page(("covered", covered), ("not covered", missing)))
    return 0


def _choose_place(on: str | None) -> tuple[Place, str | None]:
    """Choose where to rehearse, with a reason if that falls back to the CPU.

    Raises:
        RecipeError: GPUs were asked for, and there are neither real nor simulated ones.
    """
    if on == "cpu":
        return "CPU", None
    if torch_cuda() is not None and num_gpus():
        return "GPUs", None
    why = simulated_gpus.problem()
    if why is None:
        return "simulated GPUs", None
    if on == "gpus":
        raise RecipeError(f"--on gpus: there are none, and they cannot be simulated: {why}")
    return "CPU", f"GPUs cannot be simulated here: {why}. Rehearsing on the CPU instead."


def _plan_full_size(rehearsal: Rehearsal, recipe_path: Path) -> None:
    """Check the recipe's own batch on the GPUs that its label names.

    Raises:
        RecipeError: the batch does not fit the processes.
    """
    strategy = rehearsal.strategy
    needs = read_needs(read_label(recipe_path))
    count = strategy.num_processes or needs.num_gpus
    if count is None:
        rehearsal.notes.missing.append(
            "the batch at full size: the label names no number of GPUs (Needs: 8 GPUs of 80 GB)"
        )
        return
    plan = make_plan(
        rehearsal.recipe,
        strategy,
        num_processes=count,
        num_local=needs.num_local(count),
        num_gpus=count,
        recipe_name=str(recipe_path),
    )
    rehearsal.notes.covered.append(
        f"its own batch on {several(count, 'GPU')}: {describe_batch(rehearsal.recipe, plan)}"
    )


def _of_one_round(rehearsal: Rehearsal) -> Rehearsal:
    """The run of one round, if the recipe has rounds, on made-up rows in the place of samples."""
    recipe = rehearsal.recipe
    if recipe.rounds is None:
        return rehearsal
    path = rehearsal.folder / "groups.jsonl"
    write_jsonl(path, synthetic_rows(recipe.objective.rows[0], recipe.rounds.prompts_per_round))
    others = {"columns": None, "ignore": None, "max_length": max(recipe.data.max_length, MADE_UP_TOKENS)}
    data = recipe.data.model_copy(update={"train": [Source(path=str(path))], **others})
    rehearsal.notes.missing.append("sampling and rewards: made-up rows stood in for a round's answers")
    return replace(rehearsal, recipe=recipe.model_copy(update={"rounds": None, "data": data}))


def _run(rehearsal: Rehearsal, small: Path, log: Path) -> int:
    """Launch the small recipe, its output in `log`. Returns 0, 1 or 2."""
    strategy, num_processes = rehearsal.strategy, rehearsal.num_processes
    shown = launch_command(str(small), strategy, num_processes=num_processes, assignments=[])
    command = [sys.executable, "-m", "accelerate.commands.launch", *shown[2:]]
    environment = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_processes)), **os.environ}  # the user's count wins
    if rehearsal.place == "CPU":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        environment.pop("DS_ACCELERATOR")  # set for this process alone
    if rehearsal.place == "simulated GPUs":
        with as_mistakes():
            environment |= simulated_gpus.environment(num_processes, report=rehearsal.folder)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"  # for ninja
    with log.open("w", encoding="utf-8") as output:
        run = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            code = run.wait(timeout=LIMIT_SECONDS)
        except BaseException as error:
            os.killpg(run.pid, signal.SIGKILL)  # killing the launcher alone would leave its workers running
            run.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            output.write(f"\nstopped after {LIMIT_SECONDS} s\n")
            return 1
    if code == 0:
        return 0
    # The forms of torchrun's report, and of accelerate's for a single process.
    printed = log.read_text(encoding="utf-8", errors="replace")
    return 2 if re.search(r"exitcode\s*:\s*2\b|exit status 2\.", printed) else 1


def _find_error(log: Path) -> str:
    """The part of a run's output with the reason for its end: the last error before the launcher's own report."""
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    if lines and lines[-1].startswith("subprocess.CalledProcessError"):  # accelerate's, for a single process
        while not lines.pop().startswith("Traceback"):
            pass
    elastic = re.compile(r"[EW]\d{4} .*torch/distributed/elastic")
    lines = list(takewhile(lambda line: not elastic.match(line), lines))
    while lines and not lines[-1].strip():
        lines.pop()
    tracebacks = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if tracebacks:
        return "\n".join([lines[tracebacks[-1]], *lines[tracebacks[-1] + 1 :][-12:]])
    blank = max((i for i, line in enumerate(lines) if not line.strip()), default=-1)
    return "\n".join(lines[blank + 1 :][-20:]) or "the run ended without a message"


def _check_outputs(rehearsal: Rehearsal) -> str | None:
    """The first fault of the run's outputs, or None; notes what was covered."""
    from cookbook.commands.rehearse.recompute import recompute  # imports numpy, which `check` starts without
    from cookbook.run.publish.export_folder import RECORD

    out = rehearsal.folder / "out"
    record = json.loads((out / RUN).read_text(encoding="utf-8"))
    small = read_recipe(out / "recipe.yaml").values
    lines = read_lines(out / METRICS)
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    steps = [line for line in lines if "loss" in line]
    before, after = evaluations[0], evaluations[-1]
    count = record["strategy"]["processes"]
    rehearsal.notes.covered.append(
        f"{several(count, 'process')} under {rehearsal.strategy.path}, {len(steps)} steps of"
        f" {small['batch']['global_batch_size']}, {len(evaluations)} evaluations"
    )
    if rehearsal.place == "simulated GPUs":
        report = json.loads((rehearsal.folder / "rank_0.json").read_text(encoding="utf-8"))
        calls = sum(entry["calls"] for entry in report["collectives"].values())
        kernels = {name.rpartition(" ")[0] for name in report["attention"]} or {"attention by plain products"}
        rehearsal.notes.covered.append(
            f"the GPU's own paths in {small['mixed_precision']}: {', '.join(sorted(kernels))}, and {calls} exchanges"
            " between the processes, done on the CPU where NCCL does them on GPUs"
        )
    adapter = rehearsal.recipe.adapter
    if adapter is not None:
        rehearsal.notes.covered.append(f"adapter {adapter.name} of rank {adapter.rank} on {', '.join(adapter.targets)}")
    opener, objective = "peft" if adapter else "transformers", rehearsal.recipe.objective
    if not isinstance(objective, LabelLoss):
        # The run has compared the export with the checkpoint; tests compare these losses with TRL's.
        checked = read_document(out / "export" / RECORD).values["reopened"]
        rehearsal.notes.covered.append(
            f"export reopened by {opener} alone: {checked['tensors']}; {checked['logits']}; evaluation loss {after:.4f}"
            f" ({before:.4f} untrained)"
        )
        return None
    loss = recompute(out / "export", small, objective, rehearsal.folder / "eval.jsonl")
    distance, moved = abs(loss - after), abs(before - after)
    # A tolerance above a third of what training moved would accept an export of untrained weights.
    if not distance <= min(LOSS_TOLERANCE[small["mixed_precision"]] * max(1.0, abs(after)), moved / 3):
        return (
            f"the export, opened by {opener}, has an evaluation loss of {loss:.4f}; the run had {before:.4f} before its"
            f" first step and {after:.4f} at the end"
        )
    rehearsal.notes.covered.append(
        f"export reopened by {opener} alone: evaluation loss {loss:.4f}, the run's {after:.4f} ({before:.4f} untrained)"
        f"{_rounding(out / 'export') if adapter is None else ''}"
    )
    return None


def _rounding(export: Path) -> str:
    """Why the two losses may differ in their fourth digit, whatever the model: the run evaluates float32 weights."""
    dtype = read_document(export / "config.json").values["dtype"]
    return "" if dtype == "float32" else f"; trained in float32, stored in {dtype} as the base model is"
