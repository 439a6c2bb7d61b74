"""Lists checkpoints, complete or broken, and how each can be resumed. No torch."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cookbook.config.recipe import Recipe
from cookbook.config.strategy import known_strategies, load_strategy, strategy_path
from cookbook.start.refusals import refusals
from cookbook.system.console import Row, in_bytes, page, several
from cookbook.system.files import RecipeError
from cookbook.system.machine import num_gpus
from cookbook.system.record_files import RUN, read_json
from cookbook.system.registry import RECORDED
from cookbook.training.checkpoint import folder, resume
from cookbook.training.checkpoint.content import read_content
from cookbook.training.checkpoint.folder import BrokenCheckpoint


def is_run(path: Path) -> bool:
    return (path / RUN).is_file() or (path / "checkpoints").is_dir()


def steps_there(root: Path, *, but: Path | None = None) -> str:
    """End of an error message: the steps whose checkpoints could be used instead."""
    steps = [str(found.step) for found in folder.whole_checkpoints(root) if found.path != but]
    return f"there are those of step {', '.join(sorted(steps, key=int))}" if steps else "there is no other"


def find_folders(path: Path) -> list[Path]:
    """Checkpoint folders in a run or its `checkpoints/`, or `path` itself if it is one; the newest first.

    Raises:
        RecipeError: `path` is none of these.
    """
    if not path.exists():
        raise RecipeError(f"{path}: no such folder")
    if (path / folder.MANIFEST).is_file() or path.name.startswith("step-"):
        if not path.is_dir():
            raise RecipeError(f"{path}: not a folder")
        version = read_json(path / folder.MANIFEST).get("format")
        if version not in (None, folder.FORMAT):
            raise RecipeError(f"{path}: its format is {version!r}, and this program reads {folder.FORMAT}")
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


def recipe_of(values: Mapping[str, Any]) -> Recipe:
    """The recipe in a checkpoint's state, without its plugins' code."""
    data = dict(values["data"])
    if not data["streaming"]:
        del data["shuffle_rows"]  # it has every key, and a recipe refuses one that means nothing
    return Recipe.model_validate({**values, "data": data}, context=RECORDED)


def describe(path: Path) -> dict[str, Any]:
    """Verify and describe a checkpoint: `step`, `path`, `broken` (the reason, or None), and if it is complete
    `saved_at`, `bytes`, `strategy`, `processes`, `eval_loss`, `best_by`, `adapter`, `optimizer`, `optimizer_state`,
    `strategies` (names of files that do not refuse the recipe), `keys`, `resumed_from`.
    """
    number = path.name.removeprefix("step-")
    found: dict[str, Any] = {"path": str(path), "step": int(number) if number.isdecimal() else None, "broken": None}
    try:
        checkpoint = folder.open_checkpoint(path)
        folder.verify(checkpoint)
        state, kinds = read_content(checkpoint)
        recipe, strategy = state["recipe"], state["run"]["strategy"]
        adapter = recipe.get("adapter")
        return found | {
            "step": checkpoint.step,
            "saved_at": str(checkpoint.manifest["saved_at"]),
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
    except Exception as reason:  # whatever a content that no save wrote leads to
        return found | {"broken": f"{folder.STATE} lacks what a checkpoint needs ({type(reason).__name__}: {reason})"}


def _keys(recipe: dict[str, Any]) -> dict[str, list[str]]:
    """The recipe's keys by `resume.rule_of`."""
    found: dict[str, list[str]] = {"fixed": [], "with_consent": [], "by_content": [], "free": []}
    for key in sorted(resume.flatten(recipe)):
        found[resume.rule_of(key)].append(key)
    return found


def _strategies(recipe: dict[str, Any]) -> list[str]:
    """Names of strategy files under which the recipe may run on this machine."""
    values = recipe_of(recipe)
    names = []
    for name in known_strategies():
        with contextlib.suppress(RecipeError):  # `check` reports a broken file
            if not refusals(values, load_strategy(strategy_path(name)), num_gpus(), ""):
                names.append(name)
    return names


def list_checkpoints(path: Path) -> list[dict[str, Any]]:
    """`describe` for each checkpoint, with `marks`: newest, best, resumed from; the newest first.

    Raises:
        RecipeError: there is none.
    """
    found = []
    for place in find_folders(path):
        with folder.held(place):
            found.append(describe(place))
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
    """Checkpoints of this run that it was resumed from, according to later ones and run.json."""
    names = [one["resumed_from"] for one in found if one.get("resumed_from")]
    names.append(read_json(root.parent / RUN).get("resumed_from") or "")
    return [name for name in names if name and Path(name).parent.resolve() == root.resolve()]


def in_words(found: list[dict[str, Any]]) -> str:
    """For users: a line for each checkpoint, and how to resume from the newest complete one."""
    rows: list[Row] = [str(Path(found[0]["path"]).parent)]
    for one in found:
        name = Path(one["path"]).name
        if one["broken"]:
            rows.append((name, f"BROKEN: {one['broken']}"))
            continue
        loss = [] if one["eval_loss"] is None else [f"evaluation loss {one['eval_loss']:.4f}"]
        rows.append(
            (
                name,
                "whole",
                one["saved_at"],
                in_bytes(one["bytes"]),
                f"{one['strategy']}, {several(one['processes'], 'process')}",
                "  ".join([*loss, *([f"[{', '.join(one['marks'])}]"] if one["marks"] else [])]),
            )
        )
    whole = next((one for one in found if not one["broken"]), None)
    return page(*rows) if whole is None else f"{page(*rows)}\n\n{_how_to_resume(whole)}"


def _how_to_resume(one: dict[str, Any]) -> str:
    keys = one["keys"]
    what = f"the adapter {one['adapter']}" if one["adapter"] else "all weights"
    strategies = f"{', '.join(one['strategies'])}; any number of processes"
    return page(
        Path(one["path"]).name,
        ("holds", f"{what}; optimizer {one['optimizer']} ({', '.join(one['optimizer_state']) or 'no state'})"),
        ("resume", "run.resume: auto in the same run.output_dir, or the checkpoint's path"),
        ("under", strategies if one["strategies"] else "no strategy here"),
        ("free", ", ".join(keys["free"])),
        ("same content", ", ".join(keys["by_content"])),
        ("with consent", f"{', '.join(keys['with_consent'])} (run.allow_changes)"),
        ("fixed", ", ".join(keys["fixed"])),
    )
