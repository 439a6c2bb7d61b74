"""Ends a run that ran out of memory: with one sentence, and the first change that makes it fit."""

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.run.next_start import Start, next_start, suggestion
from cookbook.start.launchers import NOTE_FILE
from cookbook.start.run_plan import Plan, show_command
from cookbook.system import signals, status
from cookbook.system.console import say
from cookbook.system.machine import EXPANDABLE, allocator_settings

HISTORY = "COOKBOOK_SHORTAGES"
"""Environment variable with the shortages that it has answered, see `history`."""
STAGGER_SECONDS = 0.5
"""Delay between the processes of a machine: mostly all run out at once, and the first reports for all."""
REPORT_SECONDS = 300.0
"""Limit of the other ranks' wait for its end: torchrun kills all at the first exit, and its advice takes time."""
FRAGMENTS = 0.1
"""Share of torch's reserved memory from which fragmentation is reported."""

SIZE = r"([\d.]+) ([KMG])iB"
GIB_OF = {"K": 2**-20, "M": 2**-10, "G": 1.0}


def is_shortage(error: BaseException) -> bool:
    """Return whether a GPU or the host ran out of memory. Without torch, which may not be imported yet."""
    texts = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")  # allocators, drivers, cuBLAS
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def end_run(
    error: BaseException, recipe: Recipe, strategy: Strategy, plan: Plan, recipe_name: str, assignments: list[str]
) -> int:
    """Report the shortage in status.json, from any process, and once on stderr. Returns the exit code: 1, since the
    files are correct, and would run on a larger GPU.
    """
    folder, local_rank = Path(recipe.run.output_dir), int(os.environ.get("LOCAL_RANK", "0"))
    signals.stop_deferring(is_main=False)  # a launcher that ends this process need not wait
    time.sleep(STAGGER_SECONDS * local_rank)
    before = status.read(folder)
    status.fail(folder, error, is_of_all=True)
    is_of_this_run = before is not None and status.is_of_this_launch(before)
    if before is not None and is_of_this_run and before["state"] == "failed":
        time.sleep(REPORT_SECONDS)  # another process is reporting
        return 1
    if not is_of_this_run and local_rank:
        time.sleep(REPORT_SECONDS)  # without a status yet, the first process reports, if it ran out too
    lines = [f"rank {os.environ.get('RANK', '0')}: {first_sentence(str(error))}"]
    if fragments := fragments_gib(str(error)):
        lines.append(f"{fragments:.1f} GiB lie in fragments{remedy(allocator_settings())}.")
    say("\n" + "\n  ".join(lines), file=sys.stderr, flush=True)
    on_gpu = "CUDA" in str(error) or "CUBLAS" in str(error)
    is_answered = recipe.run.on_out_of_memory != "stop" and (on_gpu or not plan.num_gpus)
    # Answered by `launch`: a strategy is chosen before processes start, and this one cannot save alone.
    if is_answered and _note(lines[0]):
        return 1
    if is_answered and (line := _by_hand(recipe, strategy, plan, recipe_name, assignments)):
        advice = f"To continue: {line}"
    elif on_gpu:
        advice = f"Next: {suggestion(recipe, strategy, plan, recipe_name)}."
    else:
        advice = f"cookbook plan {recipe_name} shows how much host memory each strategy takes."
    say(f"  {advice}\n", file=sys.stderr, flush=True)
    return 1


def history() -> list[dict[str, Any]]:
    """The shortages that this launch has answered, the oldest first: `from`, `to` and `reason` of each."""
    return json.loads(os.environ.get(HISTORY, "[]"))


def _note(reason: str) -> bool:
    """Leave the answer to `cookbook launch`. Returns whether it started this run."""
    path = os.environ.get(NOTE_FILE)
    if path:
        with contextlib.suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
            json.dump({"reason": reason}, file)
    return bool(path)


def _by_hand(recipe: Recipe, strategy: Strategy, plan: Plan, recipe_name: str, assignments: list[str]) -> str | None:
    """The command with which a run that `cookbook launch` did not start resumes; None if there is none."""
    if plan.num_gpus and plan.num_processes > plan.num_gpus:
        return None  # of several machines
    try:
        start = Start(recipe_name=recipe_name, assignments=assignments, recipe=recipe, strategy=strategy, plan=plan)
        folder = Path(recipe.run.output_dir)
        following = next_start(start, start, {strategy.path}, resumes=any(folder.glob("checkpoints/step-*")))
    except Exception:  # the line is optional, the report is not
        return None
    return show_command(following.command) if following is not None else None


def first_sentence(text: str) -> str:
    """The request that failed, from an allocator's message of ten sentences."""
    asked = re.match(rf"(.*?Tried to allocate {SIZE})", text, re.DOTALL)
    return (asked.group(1) if asked else text.strip().partition("\n")[0] or "out of memory").rstrip(".") + "."


def fragments_gib(text: str) -> float:
    """GiB reserved by torch but unallocated, according to its message; 0 if that is a small share."""
    match = re.search(rf"{SIZE} is allocated by PyTorch.*?{SIZE} is reserved by PyTorch but unallocated", text)
    if match is None:
        return 0.0
    allocated, unallocated = (float(match[i]) * GIB_OF[match[i + 1]] for i in (1, 3))
    return unallocated if unallocated > FRAGMENTS * (allocated + unallocated) else 0.0


def remedy(settings: str | None) -> str:
    """The remedy for fragments under this configuration of the allocator, as the end of a sentence."""
    if settings is not None and EXPANDABLE in settings:
        return ""
    return f": PYTORCH_ALLOC_CONF={EXPANDABLE}, which a run sets unless you do, may be enough"
