"""`export`: a checkpoint as a Hugging Face folder, or an adapter and its base model as one."""

import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from cookbook.commands.shared.arguments import run_folder
from cookbook.system.console import say
from cookbook.system.files import RecipeError
from cookbook.system.imports import quiet_deepspeed
from cookbook.training.checkpoint.listing import is_run, recipe_of

Dtype = Literal["fp32", "bf16", "fp16", "as-is"]


def export(
    folder: Annotated[Path, run_folder()],
    *,
    step: Annotated[int | None, Option(help="default: the newest checkpoint")] = None,
    dtype: Annotated[Dtype, Option(help="as-is: the base model's")] = "as-is",
    merged: Annotated[bool, Option("--merged", help="adapter and base model as one model")] = False,
    out: Annotated[Path | None, Option(help="default: RUN/export, or RUN/merged")] = None,
    gguf: Annotated[Path | None, Option(metavar="FILE", help="and one file of it, by llama.cpp's converter")] = None,
    push: Annotated[str | None, Option(metavar="OWNER/NAME", help="and upload it to the Hub, with HF_TOKEN")] = None,
    public: Annotated[bool, Option("--public", help="everybody may read a new repository on the Hub")] = False,
) -> int:
    """Write a checkpoint as a Hugging Face folder, reopened.

    The exit code is 1 if what was written is not what the checkpoint holds.
    """
    if public and not push:
        raise RecipeError("--public would be ignored without --push; take it out")
    # A finished run needs its checkpoints no more: its adapter is in export/ too.
    is_adapter_alone = merged and step is None and not any(folder.glob("checkpoints/step-*"))
    if not is_adapter_alone and not is_run(folder):  # before seconds go into imports
        raise RecipeError(f"{folder}: not a run's folder; name its run.output_dir, as outputs/quickstart")
    quiet_deepspeed()
    from transformers.utils import logging

    from cookbook.run.publish import export_folder
    from cookbook.run.publish import gguf as llama_cpp
    from cookbook.run.publish import push as hub

    logging.disable_progress_bar()
    if push:
        hub.check_push(push)
    target = out or folder / (export_folder.MERGED if merged else export_folder.EXPORT)
    converter = None if gguf is None else llama_cpp.find_converter(target, gguf)
    try:
        if is_adapter_alone:
            written = merge_adapter(folder, target, dtype)
        else:
            with export_folder.find_checkpoint(folder, step) as checkpoint:
                if gguf and not merged and recipe_of(checkpoint.state()["recipe"]).adapter is not None:
                    raise RecipeError("--gguf: the run trained an adapter; add --merged, which makes it a whole model")
                written = export_folder.export(folder, checkpoint, target=out, dtype=dtype, merged=merged, say=say)
    except export_folder.BrokenExport as error:
        say(error, file=sys.stderr)
        return 1
    if converter is not None and gguf is not None:
        try:
            llama_cpp.write_gguf(converter, written, gguf, dtype)
        except RuntimeError as error:
            say(error, file=sys.stderr)
            return 1
        say(f"{gguf}: {written} in one file, by {converter}")
    if push:
        say(f"pushed: {hub.push(written, push, public=public)}")
    return 0


def merge_adapter(run: Path, target: Path, dtype: Dtype) -> Path:
    """Write the adapter in the `export/` of a run and its base model into `target` as one model, and reopen it.

    Raises:
        RecipeError: there is no adapter, or its base model is not the one that it was trained on.
        BrokenExport: the model is not what adapter and base are; it was removed.
    """
    from cookbook.run.publish import export_folder
    from cookbook.run.publish.merged import write_merged
    from cookbook.training.adapters.base_model import BASE_RECORD, Base
    from cookbook.training.checkpoint.write_model import building

    folder = run / export_folder.EXPORT
    if not (folder / BASE_RECORD).is_file():
        raise RecipeError(f"{folder}: no adapter there; name the run.output_dir of a finished run with an adapter")
    export_folder.check_target(target)
    with building(target) as build:
        try:
            checked = write_merged(folder, build, export_folder.STORED_DTYPES[dtype])
        except RuntimeError as error:
            raise export_folder.BrokenExport(str(error)) from None
        for name in ("README.md", export_folder.RECORD):  # of an adapter that `cookbook.run.publish` wrote
            if (folder / name).is_file():
                shutil.copyfile(folder / name, build / name)
    say(f"{target}: {Base.read(folder).name_or_path} with the adapter in it, {checked}")
    return target
