"""What checkpoints there are, whole or broken, and what each can be resumed as. No torch."""

import contextlib
import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from cookbook.checkpoint import folder
from cookbook.checkpoint.folder import BrokenCheckpoint, Checkpoint
from cookbook.combinations import refusals
from cookbook.files import RecipeError
from cookbook.machine import num_gpus
from cookbook.recipe import Recipe
from cookbook.registry import RECORDED
from cookbook.strategy import load_strategy


def is_run(path: Path) -> bool:
    """Whether it is the output folder of a run."""
    return (path / "run.json").is_file() or (path / "checkpoints").is_dir()


def steps_there(root: Path, *, but: Path | None = None) -> str:
    """Words on the steps whose checkpoints could be taken instead."""
    steps = [str(found.step) for found in folder.whole_checkpoints(root) if found.path != but]
    return f"there are those of step {', '.join(sorted(steps, key=int))}" if steps else "there is no other"


def find_folders(path: Path) -> list[Path]:
    """The folders of checkpoints that `path` names: a run, its checkpoints/, or one; the newest first.

    Raises:
        RecipeError: it is none of these.
    """
    if not path.exists():
        raise RecipeError([f"{path}: no such folder"])
    if (path / folder.MANIFEST).is_file() or path.name.startswith("step-"):
        if not path.is_dir():
            raise RecipeError([f"{path}: not a folder"])
        version = _format_of(path)
        if version not in (None, folder.FORMAT):
            raise RecipeError([f"{path}: its format is {version!r}, and this program reads {folder.FORMAT}"])
        return [path]
    root = path / "checkpoints" if is_run(path) else path
    found = folder.list_folders(root)
    if not found:
        raise RecipeError(
            [f"{root}: no checkpoint in it"]
            if is_run(path) or (path / folder.LATEST).is_file()
            else [f"{path}: neither a run, nor its checkpoints/, nor one checkpoint"]
        )
    return found


def _format_of(path: Path) -> Any:
    try:
        return json.loads((path / folder.MANIFEST).read_text(encoding="utf-8"))["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def recipe_of(values: Mapping[str, Any]) -> Recipe:
    """The recipe in a checkpoint's state. It holds every key, and a recipe refuses those that mean nothing
    beside others (betas of sgd); they have their default values.
    """
    return Recipe.model_validate(_without_defaults(Recipe, values), context=RECORDED)


def _without_defaults(section: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in values.items():
        field = section.model_fields.get(key)
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if inner is not None and isinstance(value, Mapping):
            kept[key] = _without_defaults(inner, value)
        elif field is None or value != (list(field.default) if isinstance(field.default, tuple) else field.default):
            kept[key] = value
    return kept


def describe(path: Path) -> dict[str, Any]:
    """One checkpoint, every digest compared: `step`, `path`, `broken` (why, or None), and if it is whole `saved_at`,
    `bytes`, `strategy`, `processes`, `eval_loss`, `best_by`, `adapter`, `optimizer`, `optimizer_state`,
    `strategies` (names of files that do not refuse the recipe), `keys`, `resumed_from`.
    """
    number = path.name.removeprefix("step-")
    found: dict[str, Any] = {"path": str(path), "step": int(number) if number.isdecimal() else None, "broken": None}
    try:
        checkpoint = folder.open_checkpoint(path)
        folder.verify(checkpoint)
        state = checkpoint.state()
        kinds = _complete_kinds(checkpoint, state["parameters"])
        recipe, strategy = state["recipe"], state["run"]["strategy"]
        adapter = recipe.get("adapter")
        return found | {
            "step": checkpoint.step,
            "saved_at": checkpoint.manifest["saved_at"],
            "bytes": sum(file.stat().st_size for file in path.iterdir()),
            "strategy": Path(strategy["file"]).stem,
            "processes": strategy["processes"],
            "eval_loss": state.get("eval_loss"),
            "best_by": checkpoint.manifest.get("best_by"),
            "adapter": f"{adapter['name']} of rank {adapter['rank']}" if adapter else None,
            "optimizer": recipe["optim"]["name"],
            "optimizer_state": sorted(kinds - {"weight"}),
            "strategies": _strategies(recipe),
            "keys": _keys(recipe),
            "resumed_from": state["run"].get("resumed_from"),
        }
    except (BrokenCheckpoint, OSError) as reason:
        return found | {"broken": str(reason)}
    except (KeyError, TypeError, ValueError) as reason:
        return found | {"broken": f"{folder.STATE} lacks what a checkpoint needs ({type(reason).__name__}: {reason})"}


def _complete_kinds(checkpoint: Checkpoint, shapes: dict[str, list[int]]) -> set[str]:
    """Weights and optimizer states that are there.

    Raises:
        BrokenCheckpoint: a parameter lacks elements of one.
    """
    counts: dict[tuple[str, str], int] = {}
    for path in checkpoint.pieces:
        for key, shape in _header(path):
            name, kind, _ = key.rsplit("|", 2)
            counts[name, kind] = counts.get((name, kind), 0) + math.prod(shape)
    wanted = {(name, "weight") for name in shapes} | counts.keys()
    for name, kind in sorted(wanted):
        size = math.prod(shapes[name])
        if counts.get((name, kind), 0) != size:
            raise BrokenCheckpoint(f"{name}: {counts.get((name, kind), 0)} of {size} elements of {kind} are there")
    return {kind for _, kind in counts}


def _header(path: Path) -> Iterator[tuple[str, list[int]]]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    for key, record in header.items():
        if key != "__metadata__":
            yield key, record["shape"]


def _keys(recipe: dict[str, Any]) -> dict[str, list[str]]:
    """The recipe's keys by what a change of them means for a run that goes on: see `cookbook.checkpoint.resume`."""
    from cookbook.checkpoint import resume

    found: dict[str, list[str]] = {"fixed": [], "with_consent": [], "by_content": [], "free": []}
    for key in sorted(resume.flatten(recipe)):
        if resume._is_any(key, resume.NEVER):
            found["fixed"].append(key)
        elif resume._is_any(key, resume.WITH_CONSENT):
            found["with_consent"].append(key)
        elif resume._is_any(key, resume.FREE):
            found["free"].append(key)
        else:
            found["by_content" if any(key.startswith(prefix) for prefix in resume.BY_CONTENT) else "fixed"].append(key)
    return found


def _strategies(recipe: dict[str, Any]) -> list[str]:
    """Strategy files of this folder under which the recipe may run on this machine."""
    values = recipe_of(recipe)
    names = []
    for path in sorted(Path("accelerate_configs").glob("*.yaml")):
        with contextlib.suppress(RecipeError):  # a file that is broken is `check`'s to tell
            if not refusals(values, load_strategy(path), num_gpus(), ""):
                names.append(path.stem)
    return names


def list_checkpoints(path: Path) -> list[dict[str, Any]]:
    """Each as `describe` has it, with `marks`: newest, best, resumed from; the newest first.

    Raises:
        RecipeError: there is none.
    """
    found = [describe(one) for one in find_folders(path)]
    root = Path(found[0]["path"]).parent
    whole = folder.whole_checkpoints(root)
    best = next(iter(folder.best_first(whole)), None)
    sources = {Path(name).name for name in _resumed_from(root, found)}
    for one in found:
        name = Path(one["path"]).name
        marks = {
            "newest": bool(whole) and whole[0].path.name == name,
            "best": best is not None and best.path.name == name,
            "resumed from": name in sources,
        }
        one["marks"] = [mark for mark, holds in marks.items() if holds]
    return found


def _resumed_from(root: Path, found: list[dict[str, Any]]) -> list[str]:
    """Checkpoints of this run that it went on from, as later ones and run.json tell."""
    names = [one["resumed_from"] for one in found if one.get("resumed_from")]
    with contextlib.suppress(OSError, ValueError):
        record = json.loads((root.parent / "run.json").read_text(encoding="utf-8"))
        names.append(record.get("resumed_from") or "")
    return [name for name in names if name and Path(name).resolve().parent == root.resolve()]


def in_words(found: list[dict[str, Any]]) -> str:
    """For people: a line for each checkpoint, and how a run goes on from the newest whole one."""
    lines = [str(Path(found[0]["path"]).parent)]
    for one in found:
        name = Path(one["path"]).name
        if one["broken"]:
            lines.append(f"  {name}  BROKEN: {one['broken']}")
            continue
        processes = one["processes"]
        words = [
            one["saved_at"],
            f"{one['bytes'] / 2**30:.2f} GiB",
            f"{one['strategy']}, {processes} process{'es' if processes > 1 else ''}",
            *([f"evaluation loss {one['eval_loss']:.4f}"] if one["eval_loss"] is not None else []),
            *([f"[{', '.join(one['marks'])}]"] if one["marks"] else []),
        ]
        lines.append(f"  {name}  whole  {'  '.join(words)}")
    whole = next((one for one in found if not one["broken"]), None)
    if whole is not None:
        lines += ["", *_how_to_go_on(whole)]
    return "\n".join(lines)


def _how_to_go_on(one: dict[str, Any]) -> list[str]:
    keys = one["keys"]
    what = f"the adapter {one['adapter']}" if one["adapter"] else "all weights"
    state = ", ".join(one["optimizer_state"]) or "no state"
    rows = {
        "holds": f"{what}; optimizer {one['optimizer']} ({state})",
        "resume": "run.resume: auto in the same run.output_dir, or the checkpoint's path",
        "under": f"{', '.join(one['strategies'])}; any number of processes"
        if one["strategies"]
        else "no strategy here",
        "free": ", ".join(keys["free"]),
        "same content": ", ".join(keys["by_content"]),
        "with consent": f"{', '.join(keys['with_consent'])} (run.allow_changes)",
        "fixed": ", ".join(keys["fixed"]),
    }
    lines = [f"{Path(one['path']).name}"]
    for name, text in rows.items():
        wrapped = textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
        lines += [f"  {name if i == 0 else '':<14}{line}" for i, line in enumerate(wrapped)]
    return lines
