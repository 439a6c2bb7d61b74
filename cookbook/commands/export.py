"""`export`: a checkpoint as a Hugging Face folder."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from cookbook.commands.shared.arguments import run_folder
from cookbook.system.console import say
from cookbook.system.files import RecipeError
from cookbook.system.imports import quiet_deepspeed
from cookbook.training.checkpoint.listing import is_run


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

    from cookbook.run.publish import export_folder
    from cookbook.run.publish import push as hub

    logging.disable_progress_bar()
    if push:
        hub.check_push(push)
    try:
        with export_folder.find_checkpoint(folder, step) as checkpoint:
            written = export_folder.export(folder, checkpoint, target=out, dtype=dtype, merged=merged, say=say)
    except export_folder.BrokenExport as error:
        say(error, file=sys.stderr)
        return 1
    if push:
        say(f"pushed: {hub.push(written, push, public=public)}")
    return 0
