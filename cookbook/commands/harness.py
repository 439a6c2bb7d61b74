"""Tasks of lm-evaluation-harness, on a trained model; through the interface of its Python package, lm_eval."""

import importlib.util
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from cookbook.commands.shared.find_model import quiet_without_gpus
from cookbook.system.files import RecipeError, closest, first_line

INSTALL = "pip install lm_eval==0.4.13"
RESULTS = "tasks.jsonl"
"""In the folder of a run: a line for each task and evaluation."""

REFUSALS = (AssertionError, ImportError, LookupError, OSError, ValueError)
"""What lm_eval and datasets raise for tasks, rows and packages that are not there, and for lengths that do not fit."""


def parse_tasks(text: str) -> list[str]:
    """The names of `--tasks`, each once. Imports nothing.

    Raises:
        RecipeError: no name, a file that is not there, or lm_eval is not.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise RecipeError(f"--tasks runs lm-evaluation-harness, which is not installed: {INSTALL}")
    names = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if not names:
        raise RecipeError(f"--tasks is {text!r}; write names with commas between them, such as arc_easy,hellaswag")
    if missing := [name for name in filter(_is_file, names) if not Path(name).is_file()]:
        raise RecipeError(f"--tasks: no such file: {', '.join(missing)}")
    return names


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def evaluate_tasks(
    folder: Path, names: list[str], *, few_shot: int | None, limit: int | None, plain: bool, batch_size: int
) -> list[dict[str, Any]]:
    """Results of a model at tasks, one of each and of each group of tasks.

    Args:
        folder: a Hugging Face folder, or that of an adapter.
        names: tasks and groups that lm_eval has, and paths of YAML files of its kind.
        few_shot: solved examples before each question; None leaves each task's own number.
        limit: only the first rows of each task.
        plain: no chat template, although the model has one.

    Raises:
        RecipeError: what lm_eval refuses, with its reason.
    """
    quiet_without_gpus()
    from cookbook.commands.shared import generation

    opened = generation.open_model(folder)
    is_chat = bool(opened.tokenizer.chat_template) and not plain
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        manager, parts = _load_tasks(names)
        fixed = [name for name, task in parts["tasks"].items() if task.get_config("num_fewshot") == 0]
        if few_shot and fixed:  # lm_eval would leave them as they are
            raise RecipeError(f"--few-shot {few_shot}: {', '.join(fixed)} sets num_fewshot to 0, which lm_eval keeps")
        members = {child for children in parts["group_map"].values() for child in children}
        roots = [one for name, one in {**parts["tasks"], **parts["groups"]}.items() if name not in members]
        found = lm_eval.simple_evaluate(
            # Opened here, as lm_eval would read pickled weights too; and with the template, unlike its default.
            HFLM(pretrained=opened.model, tokenizer=opened.tokenizer, batch_size=batch_size),
            tasks=roots,
            task_manager=manager,
            num_fewshot=few_shot,
            limit=limit,
            apply_chat_template=is_chat,
            log_samples=False,
        )
    except RecipeError:
        raise
    except REFUSALS as error:
        raise RecipeError(f"--tasks {','.join(names)}: {first_line(error)}") from None
    shared = {
        "model": str(folder),
        "chat_template": is_chat,
        "limit": limit,
        "lm_eval": metadata.version("lm_eval"),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return [{**line, **shared} for line in _lines(found)]


def _load_tasks(names: list[str]) -> tuple[Any, dict[str, Any]]:
    """lm_eval's manager of tasks, and what its `load` returns."""
    from lm_eval.tasks import TaskManager

    # Reading the names of all tasks of lm_eval takes many seconds.
    manager = TaskManager(include_defaults=not all(map(_is_file, names)))
    if unknown := [name for name in names if not _is_file(name) and name not in manager.all_tasks]:
        guesses = [closest(name, manager.all_tasks) for name in unknown]
        hints = [f"{name} ({guess}?)" if guess else name for name, guess in zip(unknown, guesses, strict=True)]
        raise RecipeError(f"--tasks: not known to lm_eval: {', '.join(hints)}; lm-eval ls tasks lists those it has")
    return manager, manager.load(names)


def _lines(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of lm_eval's results that say how good the model is, and on what."""
    for name, values in found["results"].items():
        metrics: dict[str, dict[str, float]] = {}
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or not isinstance(value, int | float):
                continue  # the task's name and the like; "N/A" for an error that cannot be computed
            is_error = metric.endswith("_stderr")
            line = metrics.setdefault(metric.removesuffix("_stderr") + (f" ({kind})" if kind != "none" else ""), {})
            line["stderr" if is_error else "value"] = float(value)
        samples = found["n-samples"].get(name, {}).get("effective", values.get("sample_len"))
        yield {"task": name, "samples": samples, "few_shot": found["n-shot"].get(name), "metrics": metrics}


def write_results(run: Path, lines: list[dict[str, Any]]) -> Path:
    """Append to the results of a run. Returns the file."""
    path = run / RESULTS
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def table(lines: list[dict[str, Any]]) -> list[list[str]]:
    """Cells, one row for each metric of each task, and a first row with their names."""
    rows = [["task", "rows", "shots", "metric", "value", "stderr"]]
    for line in lines:
        for name, one in line["metrics"].items():
            numbers = [f"{one[key]:.4f}" if key in one else "-" for key in ("value", "stderr")]
            counts = ["-" if line[key] is None else str(line[key]) for key in ("samples", "few_shot")]
            rows.append([line["task"], *counts, name, *numbers])
    return rows
