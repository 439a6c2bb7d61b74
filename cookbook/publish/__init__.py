"""A checkpoint becomes a Hugging Face folder: written, reopened in a fresh process, described, and pushed if asked.

At its start a run writes `model/`: configuration, tokenizer and the name of what it starts from, all of a model but the
weights. With a checkpoint of any strategy that is all an export needs: no Hub, no cache, no process group.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from cookbook import adapters, models
from cookbook.adapters import BASE_RECORD, Base
from cookbook.checkpoint import folder
from cookbook.checkpoint.export import (
    building,
    joined_weights,
    sweep_builds,
    write_generation_config,
    write_model,
)
from cookbook.checkpoint.folder import BrokenCheckpoint, Checkpoint
from cookbook.checkpoint.listing import is_run, recipe_of, steps_there
from cookbook.files import RecipeError
from cookbook.merge import write_merged
from cookbook.publish.card import model_card
from cookbook.recipe import ModelSection, Recipe

EXPORT, MERGED, FRAME = "export", "merged", "model"
RECORD = "export.json"
"""By which a folder is known to be an export, and may be replaced by another."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "as-is": None}


class BrokenExport(Exception):
    """What was written is not what was trained; it was removed."""


def write_frame(
    run: Path,
    name: str,
    model: ModelSection,
    *,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    digest: str,
) -> None:
    """Writes `model/` in a run's folder: all that an export needs but the weights. On the main process.

    Args:
        name: the folder of the model, as `models.resolve_model` found it.
        tokenizer: with the chat template of the run.
        digest: of that folder; see `models.weights_digest`.
    """
    base = Base(model.name_or_path or name, model.revision or models.revision_of(name), digest)
    with building(run / FRAME) as build:
        config.save_pretrained(build)
        tokenizer.save_pretrained(build)
        write_generation_config(build, like=Path(name), end_of_turn=models.end_of_turn(tokenizer))
        record = asdict(base) | {"is_new": model.from_scratch is not None}
        (build / BASE_RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def sweep(run: Path) -> None:
    """Removes what killed exports of a run have left, and brings back what one of them had moved away."""
    for name in (EXPORT, MERGED):
        sweep_builds(run / name)


def has_frame(run: Path) -> bool:
    """Whether `write_frame` came to its end in a run's folder."""
    return (run / FRAME / BASE_RECORD).is_file()


def find_checkpoint(run: Path, step: int | None) -> Checkpoint:
    """The checkpoint after `step`, or the newest, whole.

    Raises:
        RecipeError: there is none; names those that are.
    """
    if not is_run(run):
        raise RecipeError([f"{run}: not the run.output_dir of a run: no run.json and no checkpoints/ in it"])
    root = run / "checkpoints"
    there = folder.list_folders(root)
    if not there:
        raise RecipeError([f"{root}: no checkpoint in it"])
    path = there[0] if step is None else root / folder.folder_name(step)
    if path not in there:
        raise RecipeError([f"{run}: no checkpoint after step {step}; {steps_there(root)}"])
    try:
        checkpoint = folder.open_checkpoint(path)
        folder.verify(checkpoint)
    except (BrokenCheckpoint, OSError) as reason:
        rest = steps_there(root, but=path)
        raise RecipeError([f"{path} cannot be exported: {reason}; {rest}"]) from None
    return checkpoint


def export(
    run: Path,
    checkpoint: Checkpoint,
    *,
    target: Path | None = None,
    dtype: str = "as-is",
    merged: bool = False,
    reopened: bool = True,
    say: Callable[[str], None] = print,
) -> Path:
    """Writes a checkpoint into `target`, whole or not at all. On one process. Returns `target`.

    Args:
        run: the folder with `model/`, and `metrics.jsonl` for the card.
        checkpoint: its digests were compared.
        target: default: `export/` of the run, or `merged/`.
        dtype: of `DTYPES`; as-is is that of the base model, and float32 for an adapter.
        merged: adapter and base model as one.
        reopened: compared with the checkpoint in a fresh process before it takes its place. Costs its start, and
            reading both.

    Raises:
        RecipeError: what the user can mend; nothing was touched.
        BrokenExport: it was written, and is not what the checkpoint holds; it was removed.
    """
    target = target or run / (MERGED if merged else EXPORT)
    state = checkpoint.state()
    recipe = recipe_of(state["recipe"])
    frame = run / FRAME
    base = _check(target, frame, state, recipe, merged)
    config = AutoConfig.from_pretrained(frame, trust_remote_code=False)
    stored = DTYPES[dtype] or (torch.float32 if recipe.adapter else config.dtype or torch.float32)
    _check_room(target, state, stored)
    with building(target) as build:
        part = build / "adapter.tmp" if merged else build
        part.mkdir(exist_ok=True)
        with joined_weights(checkpoint, part, stored) as weights:
            if recipe.adapter is None:
                write_model(weights, part, config=config)
            else:
                adapters.write_adapter(weights, part, config=config, settings=recipe.adapter, base=base)
        ignore = shutil.ignore_patterns("config.json", BASE_RECORD)
        shutil.copytree(frame, part, dirs_exist_ok=True, ignore=ignore)
        found = _reopen(part, frame, checkpoint.path, stored) if reopened else {}
        if merged:
            try:
                said = write_merged(part, build, DTYPES[dtype])
            except RuntimeError as error:
                raise BrokenExport(str(error)) from None
            shutil.rmtree(part)
            found["logits"] = f"reopened as one model, {said}"
        word = str(stored).removeprefix("torch.")
        record = {
            "step": checkpoint.step,
            "saved_at": checkpoint.manifest["saved_at"],
            "seal": checkpoint.manifest.get("seal"),
            "dtype": dtype if merged else word,
            "merged": merged,
            "reopened": found,
        }
        (build / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        card = model_card(run, state, recipe, asdict(base), is_new=_is_new(frame), merged=merged, checked=found)
        (build / "README.md").write_text(card, encoding="utf-8")
        size = sum(path.stat().st_size for path in build.rglob("*"))
        _make_readable(build)
    say(f"{target}: step {checkpoint.step}, {size / 2**30:.2f} GiB")
    if reopened:
        say(f"  reopened in a fresh process: {found['tensors']}; {found['logits']}")
    return target


def _make_readable(folder: Path) -> None:
    """For whom the umask lets read: safetensors writes for the owner alone, and a server may run as somebody else."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def _check(target: Path, frame: Path, state: dict[str, Any], recipe: Recipe, merged: bool) -> Base:
    """Raises what can be known before anything is written; returns what the run started from."""
    is_ours = (target / RECORD).is_file() or (target.is_dir() and not any(target.iterdir()))
    if (target.exists() or target.is_symlink()) and not is_ours:
        raise RecipeError([f"{target}: is there, and is no export of ours (no {RECORD}); name another folder"])
    if merged and recipe.adapter is None:
        raise RecipeError(["--merged: the run trained all weights, so there is no adapter to merge; leave it out"])
    try:
        record = json.loads((frame / BASE_RECORD).read_text(encoding="utf-8"))
        base = Base(record["name_or_path"], record["revision"], record["sha256"])
    except FileNotFoundError:
        raise RecipeError([f"{frame}: not there; a run writes it at its start, and an export needs it"]) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError([f"{frame / BASE_RECORD}: cannot be read ({error})"]) from None
    if base.sha256 != state["made_from"]["model"]:
        raise RecipeError([f"{frame}: is of another model than the checkpoint was made with (another SHA-256)"])
    return base


def _is_new(frame: Path) -> bool:
    return bool(json.loads((frame / BASE_RECORD).read_text(encoding="utf-8")).get("is_new"))


def _check_room(target: Path, state: dict[str, Any], dtype: torch.dtype) -> None:
    """Weights are put together in one file and then written in parts, so for a moment they are there twice."""
    parent = next(path for path in (target.resolve(), *target.resolve().parents) if path.is_dir())
    elements = sum(torch.Size(shape).numel() for shape in state["parameters"].values())
    needed, free = 2 * elements * dtype.itemsize, shutil.disk_usage(parent).free
    if needed > free:
        raise RecipeError([f"{parent}: {free / 2**30:.1f} GiB are free, and the export needs {needed / 2**30:.1f}"])


def _reopen(export: Path, frame: Path, checkpoint: Path, dtype: torch.dtype) -> dict[str, str]:
    """What a fresh process makes of the folder, see `cookbook.publish.reopen`."""
    command = [sys.executable, "-m", "cookbook.publish.reopen"]
    command += [str(path.resolve()) for path in (export, frame, checkpoint)] + [str(dtype).removeprefix("torch.")]
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in launcher and not name.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "COOKBOOK_FAULTS"))
    }
    root = str(Path(__file__).parents[2])
    # On the CPU, beside a run that may fill the GPUs; nothing is fetched.
    kept |= {"PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=kept, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
        raise BrokenExport(f"the export of {checkpoint} was removed: reopened, {said[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
