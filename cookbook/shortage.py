"""The end of a run whose memory ran out: one sentence, and the first change with which it fits."""

import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

from cookbook import signals, status
from cookbook.hardware import this_machine
from cookbook.plan import Plan
from cookbook.recipe import Recipe
from cookbook.strategy import Strategy, load_strategy

STAGGER_SECONDS = 0.5
"""Between the processes of a machine: mostly all run out at once, and the first tells for all."""
TELLING_SECONDS = 60.0
FRAGMENTS = 0.1
"""Of the memory that torch has taken from the GPU, the share from which on fragments are worth a word."""

SIZE = r"([\d.]+) ([KMG])iB"
GIB_OF = {"K": 2**-20, "M": 2**-10, "G": 1.0}


def is_shortage(error: BaseException) -> bool:
    """Whether memory ran out, of a GPU or of the host. Without torch, which may not be there yet."""
    texts = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")  # allocators, drivers, cuBLAS
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def end(error: BaseException, recipe: Recipe, strategy: Strategy, plan: Plan, recipe_name: str) -> int:
    """Notes it in status.json, from whatever process, and says it once. Returns the exit code: 1, since the files are
    right as they are, and a larger GPU would have taken them.
    """
    folder, local_rank = Path(recipe.run.output_dir), int(os.environ.get("LOCAL_RANK", "0"))
    signals.let_go(is_main=False)  # a launcher that ends this process need not wait
    time.sleep(STAGGER_SECONDS * local_rank)
    before = status.read(folder)
    status.fail(folder, error, is_of_all=True)
    is_of_this_run = before is not None and status.is_of_this_launch(before)
    if before is not None and is_of_this_run and before["state"] == "failed":
        time.sleep(TELLING_SECONDS)  # torchrun ends all at the first that exits, and another one is telling
        return 1
    if not is_of_this_run and local_rank:
        time.sleep(TELLING_SECONDS)  # before there is a status the first process tells, if it ran out too
    lines = [f"rank {os.environ.get('RANK', '0')}: {first_sentence(str(error))}"]
    if fragments := fragments_gib(str(error)):
        lines.append(
            f"{fragments:.1f} GiB lie in fragments: PYTORCH_ALLOC_CONF=expandable_segments:True may be enough."
        )
    if is_of_gpu(error):
        lines.append(f"Next: {next_rung(recipe, strategy, plan, recipe_name)}.")
    else:
        lines.append(f"python -m cookbook plan {recipe_name} shows what each strategy takes of the host's memory.")
    print("\n" + "\n  ".join(lines) + "\n", file=sys.stderr, flush=True)
    return 1


def is_of_gpu(error: BaseException) -> bool:
    return "CUDA" in str(error) or "CUBLAS" in str(error)


def first_sentence(text: str) -> str:
    """What was short, of an allocator's message of ten sentences."""
    asked = re.match(rf"(.*?Tried to allocate {SIZE})", text, re.DOTALL)
    return (asked.group(1) if asked else text.strip().partition("\n")[0] or "out of memory").rstrip(".") + "."


def fragments_gib(text: str) -> float:
    """GiB that torch held without having given them out, by its own message; 0 if that is no large share."""
    found = re.search(rf"{SIZE} is allocated by PyTorch.*?{SIZE} is reserved by PyTorch but unallocated", text)
    if found is None:
        return 0.0
    allocated, unallocated = (float(found[i]) * GIB_OF[found[i + 1]] for i in (1, 3))
    return unallocated if unallocated > FRAGMENTS * (allocated + unallocated) else 0.0


def next_rung(recipe: Recipe, strategy: Strategy, plan: Plan, recipe_name: str) -> str:
    """As `plan` names it where nothing fits."""
    try:
        from cookbook.forecast import rung_below

        here = this_machine()
        machines = replace(here, num_machines=max(1, -(-plan.num_processes // max(1, here.gpus_each))))
        others = [load_strategy(path) for path in sorted(Path("accelerate_configs").glob("*.yaml"))]
        found = rung_below(recipe, strategy, machines, recipe_name, others)
    except Exception as trouble:  # of an advice; what ended the run is told in any case
        return f"python -m cookbook plan {recipe_name} (no advice from here: {trouble})"
    return found or "no other strategy, smaller micro-batch, checkpointing or adapter helps: take more"
