"""Ends a run that ran out of memory: with one sentence, and the first change that makes it fit."""

import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy, load_known
from cookbook.planning.plan import Plan
from cookbook.system import signals, status
from cookbook.system.hardware import this_machine

STAGGER_SECONDS = 0.5
"""Delay between the processes of a machine: mostly all run out at once, and the first reports for all."""
REPORT_SECONDS = 300.0
"""How long the others wait at most for it to end: torchrun kills all at the first exit, and its advice takes time."""
FRAGMENTS = 0.1
"""Share of torch's reserved memory from which fragmentation is reported."""

SIZE = r"([\d.]+) ([KMG])iB"
GIB_OF = {"K": 2**-20, "M": 2**-10, "G": 1.0}


def is_shortage(error: BaseException) -> bool:
    """Whether a GPU or the host ran out of memory. Without torch, which may not be imported yet."""
    texts = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")  # allocators, drivers, cuBLAS
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def end_run(error: BaseException, recipe: Recipe, strategy: Strategy, plan: Plan, recipe_name: str) -> int:
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
        lines.append(
            f"{fragments:.1f} GiB lie in fragments: PYTORCH_ALLOC_CONF=expandable_segments:True may be enough."
        )
    print("\n" + "\n  ".join(lines), file=sys.stderr, flush=True)
    if "CUDA" in str(error) or "CUBLAS" in str(error):
        advice = f"Next: {suggestion(recipe, strategy, plan, recipe_name)}."
    else:
        advice = f"python -m cookbook plan {recipe_name} shows how much host memory each strategy takes."
    print(f"  {advice}\n", file=sys.stderr, flush=True)
    return 1


def first_sentence(text: str) -> str:
    """The request that failed, from an allocator's message of ten sentences."""
    asked = re.match(rf"(.*?Tried to allocate {SIZE})", text, re.DOTALL)
    return (asked.group(1) if asked else text.strip().partition("\n")[0] or "out of memory").rstrip(".") + "."


def fragments_gib(text: str) -> float:
    """GiB reserved by torch but unallocated, according to its message; 0 if that is a small share."""
    found = re.search(rf"{SIZE} is allocated by PyTorch.*?{SIZE} is reserved by PyTorch but unallocated", text)
    if found is None:
        return 0.0
    allocated, unallocated = (float(found[i]) * GIB_OF[found[i + 1]] for i in (1, 3))
    return unallocated if unallocated > FRAGMENTS * (allocated + unallocated) else 0.0


def suggestion(recipe: Recipe, strategy: Strategy, plan: Plan, recipe_name: str) -> str:
    """The first change that makes the run fit, as `plan` names it."""
    try:
        from cookbook.commands.forecast import rung_below

        here = this_machine()
        machines = replace(here, num_machines=max(1, -(-plan.num_processes // max(1, here.gpus_each))))
        others = load_known()
        found = rung_below(recipe, strategy, machines, recipe_name, others)
    except Exception as trouble:  # the advice is optional, the report is not
        return f"python -m cookbook plan {recipe_name} (no advice from here: {trouble})"
    return found or "no other strategy, smaller micro-batch, checkpointing or adapter helps: take more"
