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
    steps = [str(checkpoint.step) for checkpoint in folder.whole_checkpoints(root) if checkpoint.path != but]
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
    folders = folder.list_folders(root)
    if not folders:
        raise RecipeError(
            [f"{root}: no checkpoint in it"]
            if is_run(path) or (path / folder.LATEST).is_file()
            else [f"{path}: neither a run, nor its checkpoints/, nor one checkpoint"]
        )
    return folders


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
    description: dict[str, Any] = {
        "path": str(path),
        "step": int(number) if number.isdecimal() else None,
        "broken": None,
    }
    try:
        checkpoint = folder.open_checkpoint(path)
        folder.verify(checkpoint)
        state, kinds = read_content(checkpoint)
        recipe, strategy = state["recipe"], state["run"]["strategy"]
        adapter = recipe.get("adapter")
        return description | {
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
        return description | {"broken": str(reason)}
    except Exception as reason:  # whatever a content that no save wrote leads to
        return description | {
            "broken": f"{folder.STATE} lacks what a checkpoint needs ({type(reason).__name__}: {reason})"
        }


def _keys(recipe: dict[str, Any]) -> dict[str, list[str]]:
    """The recipe's keys by `resume.rule_of`."""
    keys: dict[str, list[str]] = {"fixed": [], "with_consent": [], "by_content": [], "free": []}
    for key in sorted(resume.flatten(recipe)):
        keys[resume.rule_of(key)].append(key)
    return keys


def _strategies(recipe: dict[str, Any]) -> list[str]:
    """Names of strategy files under which the recipe may run on this machine."""
    values = recipe_of(recipe)
    names = []
    for name in known_strategies():
        with contextlib.suppress(RecipeError):  # `check` reports a broken file
            if not refusals(values, load_strategy(strategy_path(name)), num_gpus()):
                names.append(name)
    return names


def list_checkpoints(path: Path) -> list[dict[str, Any]]:
    """`describe` for each checkpoint, with `marks`: newest, best, resumed from; the newest first.

    Raises:
        RecipeError: there is none.
    """
    descriptions = []
    for place in find_folders(path):
        with folder.hold_checkpoint(place):
            descriptions.append(describe(place))
    root = Path(descriptions[0]["path"]).parent
    complete = folder.whole_checkpoints(root)
    best = next(iter(folder.best_first(complete)), None)
    sources = {Path(name).name for name in _resume_sources(root, descriptions)}
    for description in descriptions:
        name = Path(description["path"]).name
        marks = {
            "newest": bool(complete) and complete[0].path.name == name,
            "best": best is not None and best.path.name == name,
            "resumed from": name in sources,
        }
        description["marks"] = [mark for mark, holds in marks.items() if holds]
    return descriptions


def _resume_sources(root: Path, descriptions: list[dict[str, Any]]) -> list[str]:
    """Checkpoints of this run that it was resumed from, according to later ones and run.json."""
    names = [description["resumed_from"] for description in descriptions if description.get("resumed_from")]
    names.append(read_json(root.parent / RUN).get("resumed_from") or "")
    return [name for name in names if name and Path(name).parent.resolve() == root.resolve()]


def in_words(descriptions: list[dict[str, Any]]) -> str:
    """Describe checkpoints to users: a line for each, and how to resume from the newest complete one."""
    rows: list[Row] = [str(Path(descriptions[0]["path"]).parent)]
    for description in descriptions:
        name = Path(description["path"]).name
        if description["broken"]:
            rows.append((name, f"BROKEN: {description['broken']}"))
            continue
        loss = [] if description["eval_loss"] is None else [f"evaluation loss {description['eval_loss']:.4f}"]
        rows.append(
            (
                name,
                "whole",
                description["saved_at"],
                in_bytes(description["bytes"]),
                f"{description['strategy']}, {several(description['processes'], 'process')}",
                "  ".join([*loss, *([f"[{', '.join(description['marks'])}]"] if description["marks"] else [])]),
            )
        )
    newest = next((description for description in descriptions if not description["broken"]), None)
    return page(*rows) if newest is None else f"{page(*rows)}\n\n{_how_to_resume(newest)}"


def _how_to_resume(description: dict[str, Any]) -> str:
    keys = description["keys"]
    what = f"the adapter {description['adapter']}" if description["adapter"] else "all weights"
    strategies = f"{', '.join(description['strategies'])}; any number of processes"
    return page(
        Path(description["path"]).name,
        (
            "holds",
            f"{what}; optimizer {description['optimizer']} ({', '.join(description['optimizer_state']) or 'no state'})",
        ),
        ("resume", "run.resume: auto in the same run.output_dir, or the checkpoint's path"),
        ("under", strategies if description["strategies"] else "no strategy here"),
        ("free", ", ".join(keys["free"])),
        ("same content", ", ".join(keys["by_content"])),
        ("with consent", f"{', '.join(keys['with_consent'])} (run.allow_changes)"),
        ("fixed", ", ".join(keys["fixed"])),
    )
