"""Export of a checkpoint as a folder: what is checked before, its weights and files, and the comparison after."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from cookbook.config.recipe import Recipe
from cookbook.facts.language_part import open_config, whole_config
from cookbook.facts.model_files import GENERATION, read_generation_config, read_tokenizer
from cookbook.run.publish.card import model_card
from cookbook.run.publish.merged import write_merged
from cookbook.run.publish.model_folder import MODEL_FILES
from cookbook.start.hosts import TORCHRUN
from cookbook.system.console import in_bytes
from cookbook.system.files import RecipeError, first_line, refuse
from cookbook.training.adapters import adapter_files
from cookbook.training.adapters.base_model import BASE_RECORD, Base
from cookbook.training.checkpoint import folder
from cookbook.training.checkpoint.content import read_content
from cookbook.training.checkpoint.folder import BrokenCheckpoint, Checkpoint
from cookbook.training.checkpoint.listing import recipe_of, steps_there
from cookbook.training.checkpoint.tensors import as_weight
from cookbook.training.checkpoint.tower import TOWER, Tower
from cookbook.training.checkpoint.write_model import (
    BUFFERS,
    building,
    sweep_builds,
    weights_of,
    write_model,
)

EXPORT, MERGED = "export", "merged"
RECORD = "export.json"
"""Marks a folder as an export, which another export may replace."""
STORED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "as-is": None}


class BrokenExport(Exception):
    """The export differs from what was trained; it was removed."""


def sweep_exports(run: Path) -> None:
    """Clean up after killed exports of a run, see `sweep_builds`."""
    for name in (EXPORT, MERGED):
        sweep_builds(run / name)


@contextlib.contextmanager
def find_checkpoint(run: Path, step: int | None) -> Iterator[Checkpoint]:
    """The verified checkpoint after `step`, or the newest, which a run that trains does not remove meanwhile.

    Raises:
        RecipeError: there is none, or it is broken; names the others.
    """
    root = run / "checkpoints"
    there = folder.list_folders(root)
    if not there:
        raise RecipeError(f"{root}: no checkpoint in it")
    path = there[0] if step is None else root / folder.folder_name(step)
    if path not in there:
        raise RecipeError(f"{run}: no checkpoint after step {step}; {steps_there(root)}")
    with folder.hold_checkpoint(path):
        try:
            checkpoint = folder.open_checkpoint(path)
            folder.verify(checkpoint)
            read_content(checkpoint)
        except (BrokenCheckpoint, OSError) as reason:
            rest = steps_there(root, but=path)
            raise RecipeError(f"{path} cannot be exported: {reason}; {rest}") from None
        yield checkpoint


@contextlib.contextmanager
def choose_checkpoint(run: Path, last: Checkpoint, *, is_best: bool) -> Iterator[Checkpoint]:
    """The checkpoint that a run exports at its end: the last, which was just written, or the best of those kept.

    Raises:
        RecipeError: as `find_checkpoint`.
    """
    root = run / "checkpoints"
    best = next(iter(folder.best_first(folder.whole_checkpoints(root))), last) if is_best else last
    if best.step == last.step:
        yield last
        return
    with find_checkpoint(run, best.step) as checkpoint:
        yield checkpoint


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
    """Write a checkpoint into `target`, atomically, from one process. Returns `target`.

    Args:
        run: the folder with `model/`, and `metrics.jsonl` for the card.
        checkpoint: must be verified.
        target: default: `export/` of the run, or `merged/`.
        dtype: a key of `STORED_DTYPES`; as-is is the base model's dtype, and float32 for an adapter.
        merged: merge adapter and base model.
        reopened: compare with the checkpoint in a fresh process before replacing `target`, which reads both.

    Raises:
        RecipeError: a mistake of the user; nothing was changed.
        BrokenExport: the export differs from the checkpoint; it was removed.
    """
    target = target or run / (MERGED if merged else EXPORT)
    state = checkpoint.state()
    recipe = recipe_of(state["recipe"])
    model_files = run / MODEL_FILES
    base = _check_export(target, model_files, state, recipe, merged)
    config = open_config(model_files)
    stored = STORED_DTYPES[dtype] or (torch.float32 if recipe.adapter else config.dtype or torch.float32)
    _check_room(target, state, stored)
    with building(target) as build:
        part = build / "adapter.tmp" if merged else build
        part.mkdir(exist_ok=True)
        weights = weights_of(checkpoint)
        if recipe.adapter is None:
            buffers = load_file(model_files / BUFFERS) if (model_files / BUFFERS).is_file() else {}
            weights |= {name: as_weight(buffer) for name, buffer in buffers.items()}
            write_model(weights, part, config=config, dtype=stored, tower=Tower.read_kept(model_files))
        else:
            trained = {name: weight.read(stored) for name, weight in weights.items()}
            adapter_files.write_adapter(
                trained, part, config=config, settings=recipe.adapter, base=base, whole=whole_config(model_files)
            )
        ignore = shutil.ignore_patterns("config.json", BASE_RECORD, BUFFERS, TOWER)
        shutil.copytree(model_files, part, dirs_exist_ok=True, ignore=ignore)
        checked = _reopen(part, model_files, checkpoint.path, stored) if reopened else {}
        if merged:
            try:
                checked["logits"] = f"reopened as one model, {write_merged(part, build, STORED_DTYPES[dtype])}"
            except RuntimeError as error:
                raise BrokenExport(str(error)) from None
            shutil.rmtree(part)
        record = {
            "step": checkpoint.step,
            "saved_at": checkpoint.manifest["saved_at"],
            "seal": checkpoint.manifest.get("seal"),
            "dtype": dtype if merged else str(stored).removeprefix("torch."),
            "merged": merged,
            "reopened": checked,
        }
        (build / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        card = model_card(run, state, recipe, base, merged=merged, checked=checked)
        (build / "README.md").write_text(card, encoding="utf-8")
        size = sum(path.stat().st_size for path in build.rglob("*"))
        _make_readable(build)
    say(f"{target}: step {checkpoint.step}, {in_bytes(size)}")
    if reopened:
        say(f"  reopened in a fresh process: {checked['tensors']}; {checked['logits']}")
    return target


def _make_readable(folder: Path) -> None:
    """Apply the umask: safetensors writes for the owner alone, and a server may run as another user."""
    mask = os.umask(0)  # the only way to read it
    os.umask(mask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def check_target(target: Path) -> None:
    """Raises a RecipeError if an export would replace a folder that is not one."""
    is_ours = (target / RECORD).is_file() or (target.is_dir() and not any(target.iterdir()))
    if (target.exists() or target.is_symlink()) and not is_ours:
        raise RecipeError(f"{target}: exists, and is no export of ours (no {RECORD}); name another folder")


def _check_export(target: Path, model_files: Path, state: dict[str, Any], recipe: Recipe, merged: bool) -> Base:
    """Raise every mistake that is known before anything is written; returns the base model."""
    check_target(target)
    if merged and recipe.adapter is None:
        raise RecipeError("--merged: the run trained all weights, so there is no adapter to merge; remove it")
    try:
        base = Base.read(model_files)
    except FileNotFoundError:
        raise RecipeError(f"{model_files}: missing; a run writes it at its start, and an export needs it") from None
    if base.sha256 != state["made_from"]["model"]:
        raise RecipeError(f"{model_files}: is of another model than the checkpoint was made with (another SHA-256)")
    known = _read_small_files(model_files)
    odd = [f"{token} the id {number}" for token, number in base.new_tokens.items() if known.get(token) != number]
    refuse([f"{model_files / BASE_RECORD}: new_tokens gives {text}, and its tokenizer another" for text in odd])
    return base


def _read_small_files(model_files: Path) -> dict[str, int]:
    """Open what an export copies; returns the tokenizer's tokens and their ids.

    Raises:
        RecipeError: a file is damaged or gone.
    """
    try:
        open_config(model_files)
        if os.path.lexists(model_files / GENERATION):
            read_generation_config(model_files)
        tokens: dict[str, int] = read_tokenizer(model_files).get_vocab()
    except RecipeError:
        raise
    except (OSError, ValueError) as error:
        raise RecipeError(f"{model_files}: {first_line(error)}; put back what the run wrote there") from None
    return tokens


def _check_room(target: Path, state: dict[str, Any], dtype: torch.dtype) -> None:
    parent = next(path for path in (target.resolve(), *target.resolve().parents) if path.is_dir())
    elements = sum(torch.Size(shape).numel() for shape in state["parameters"].values())
    needed, free = elements * dtype.itemsize, shutil.disk_usage(parent).free
    if needed > free:
        lacking = in_bytes(needed - free)
        raise RecipeError(
            f"{parent}: {in_bytes(free)} are free, and the export needs {in_bytes(needed)}, {lacking} more"
        )


def _reopen(export: Path, model_files: Path, checkpoint: Path, dtype: torch.dtype) -> dict[str, str]:
    """Compare the folder with the checkpoint in a fresh process, see `cookbook.run.publish.reopen`."""
    command = [sys.executable, "-m", "cookbook.run.publish.reopen"]
    command += [str(path.resolve()) for path in (export, model_files, checkpoint)] + [str(dtype).removeprefix("torch.")]
    others = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "COOKBOOK_FAULTS")
    kept = {name: of for name, of in os.environ.items() if name not in TORCHRUN and not name.startswith(others)}
    root = str(Path(__file__).parents[3])
    # On the CPU, since the run may fill the GPUs, and without downloads.
    kept |= {"PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    # In another working folder, as whoever uses the export.
    done = subprocess.run(command, env=kept, cwd="/", capture_output=True, text=True, errors="replace")
    if done.returncode:
        if not checkpoint.is_dir():  # a file system without locks; see `folder.hold_checkpoint`
            raise RecipeError(f"{checkpoint}: was removed while it was exported, by its run; export a copy of it")
        lines = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
        raise BrokenExport(f"the export of {checkpoint} was removed: reopened, {lines[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
