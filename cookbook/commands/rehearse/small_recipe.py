"""Small recipe of a rehearsal: the user's own with a tiny model, few rows and few steps."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cookbook.commands.rehearse.standins import (
    Notes,
    few_rows,
    with_names,
    write_jsonl,
    write_tiny_model,
    write_tiny_teacher,
)
from cookbook.config.chat_templates import template_path
from cookbook.config.objectives.token_loss import LabelLoss
from cookbook.config.recipe import Recipe, dump_recipe, read_recipe
from cookbook.config.sections import Auto
from cookbook.config.strategy import Strategy
from cookbook.facts.packing import decide
from cookbook.start.run_plan import load_pair, make_plan
from cookbook.system.files import RecipeError, dump_yaml
from cookbook.system.machine import num_gpus
from cookbook.training.data.rows import row_bytes

NUM_STEPS = 3
NUM_EVAL_ROWS = 4
LEARNING_RATE = 1e-2
"""Far above any recipe's, so that three steps change the loss by more than rounding: then equal losses mean that the
trained weights were saved, and not the initial ones."""

Place = Literal["simulated GPUs", "GPUs", "CPU"]


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    recipe: Recipe
    strategy: Strategy
    num_processes: int
    place: Place
    folder: Path
    notes: Notes = field(default_factory=Notes)


def write_small_recipe(rehearsal: Rehearsal, recipe_path: Path) -> Path:
    """Write the user's recipe with a tiny model, few rows and few steps."""
    from cookbook.training.models.structure import config_of

    recipe, strategy = rehearsal.recipe, rehearsal.strategy
    recipe = decide(recipe, config_of(recipe)[0]).settle(recipe)  # by its own max_length
    own = rehearsal.folder / "own.yaml"
    own.write_text(dump_recipe(recipe), encoding="utf-8")
    values = read_recipe(own).values
    ranks = max(1, strategy.data_parallel_size(rehearsal.num_processes))
    size = recipe.batch.micro_batch_size
    micro = 2 if size is None or isinstance(size, Auto) else min(size, 2)
    values["batch"] = {"global_batch_size": ranks * micro * 2, "micro_batch_size": micro}
    length = _put_small_data(rehearsal, recipe, values, NUM_STEPS * ranks * micro * 2)
    if recipe.batch.micro_batch_tokens is not None:
        del values["batch"]["micro_batch_size"]
        values["batch"]["micro_batch_tokens"] = 2 * length
    if recipe.model.from_scratch is None:
        values["model"]["name_or_path"] = str(rehearsal.folder / "model")
        values["model"].pop("revision", None)
    if recipe.adapter is not None and values["adapter"].pop("path", None):
        rehearsal.notes.missing.append("adapter.path, which is of the full model: it begins with a new adapter")
    if (asked := recipe.objective.asks) is not None:
        _put_small_teacher(rehearsal, values, asked.top_k)
    # At a recipe's own rate three steps move the loss by less than rounding: untrained weights would pass.
    values["optim"]["learning_rate"] = LEARNING_RATE
    values["schedule"]["warmup_steps"] = min(values["schedule"]["warmup_steps"], 1)
    values["schedule"] |= dict.fromkeys(recipe.schedule.stretches, 1)
    if rehearsal.place == "CPU":
        _put_precision_of_a_cpu(recipe, values, rehearsal.notes)
    run = values["run"]
    # A rehearsal is no experiment, and ends before most profiled steps.
    saves_by_steps = "save_every_steps" in run or "saves_per_epoch" in run
    early = ("early_stopping_patience", "early_stopping_threshold")
    for key in ("num_epochs", "trackers", "profile", "evals_per_epoch", "saves_per_epoch", *early):
        run.pop(key, None)
    if not run["keep_best"]:
        run.pop("metric_for_best_model", None)  # which compares nothing then
    run |= {"max_steps": NUM_STEPS, "output_dir": str(rehearsal.folder / "out"), "eval_every_steps": 2}
    if saves_by_steps:
        run["save_every_steps"] = 2
    # Of sft and cpt the rehearsal opens the export itself.
    run["check_export"] = not isinstance(recipe.objective, LabelLoss)
    small = rehearsal.folder / "recipe.yaml"
    small.write_text(dump_yaml(values), encoding="utf-8")
    # Plan the small recipe too, to report what its strategy cannot do without starting processes.
    checked, _ = load_pair(small, strategy=Path(strategy.path))
    count = rehearsal.num_processes
    gpus = {"CPU": 0, "GPUs": num_gpus(), "simulated GPUs": count}[rehearsal.place]
    make_plan(checked, strategy, num_processes=count, num_gpus=gpus, recipe_name=str(recipe_path))
    return small


def _put_small_teacher(rehearsal: Rehearsal, values: dict[str, Any], top_k: int) -> None:
    """
    Raises:
        RecipeError: a new model, whose vocabulary the run makes.
    """
    if rehearsal.recipe.model.from_scratch is not None:
        raise RecipeError("objective.teacher: a new model has a vocabulary of its own; it cannot be rehearsed with one")
    folder = rehearsal.folder / "teacher"
    rows = write_tiny_teacher(rehearsal.folder / "model", folder, rehearsal.notes, seed=rehearsal.recipe.seed + 1)
    values["objective"] |= {"teacher": str(folder), "loss_top_k": min(top_k, rows)}


def _put_small_data(rehearsal: Rehearsal, recipe: Recipe, values: dict[str, Any], num_rows: int) -> int:
    """Write few rows, and the tiny model with its tokenizer; put the rows into the recipe's values. Returns their
    max_length.
    """
    notes, eval_file = rehearsal.notes, rehearsal.folder / "eval.jsonl"
    train, rows, are_own = few_rows(recipe, num_rows, rehearsal.folder, notes)
    mesh = rehearsal.strategy.mesh(rehearsal.num_processes)
    has_own_tokenizer = write_tiny_model(
        recipe, rows, rehearsal.folder / "model", notes, least_layers=mesh.pipeline * mesh.chunks
    )
    around = 0 if are_own else _tokens_around(recipe, rehearsal.folder / "model")
    length = min(recipe.data.max_length, 1024 if are_own else 128 + around)
    if are_own and not has_own_tokenizer:
        length = 2048  # the small stand-in tokenizer makes three times as many tokens of a row
    # The shortest rows are the least likely to lose all their trained tokens to the smaller max_length.
    held_out = sorted(rows.rows, key=lambda row: len(row_bytes(row)))[:NUM_EVAL_ROWS]
    if recipe.objective.splits_rows:  # a text over max_length would become several samples
        held_out = [{"text": row["text"][:100]} for row in held_out]
    write_jsonl(eval_file, with_names(held_out, recipe.objective))
    sources = [source.model_dump(mode="json", exclude_none=True) for source in train]
    values["data"] |= {"train": sources, "eval": {"path": str(eval_file)}, "holdout": 0.0, "max_length": length}
    values["data"].pop("too_long", None)  # at the smaller max_length nearly every row is too long
    values["data"].pop("columns", None)  # each source has its own by now, and the file of eval rows has none
    if length < recipe.data.max_length:
        values["data"]["on_bad_row"] = "drop"  # `few_rows` has reported rows that are bad at full length
    if recipe.data.holdout:
        notes.missing.append("the share of rows that data.holdout takes")
    return length


def _tokens_around(recipe: Recipe, model: Path) -> int:
    """The number of tokens that the chat template writes beside a question, by the tiny model's tokenizer: many, where
    the template has a system message of its own.
    """
    from cookbook.training.models.tokenizer_files import load_tokenizer

    if recipe.data.chat_template is None or recipe.model.from_scratch is not None:
        return 0
    tokenizer = load_tokenizer(str(model), template_path(recipe.data.chat_template))
    question = [{"role": "user", "content": "?"}]
    try:
        return len(tokenizer.apply_chat_template(question, tokenize=True, return_dict=False))
    except Exception:  # a template is a program: it refuses this chat, or the rows will tell
        return 0


def _put_precision_of_a_cpu(recipe: Recipe, values: dict[str, Any], notes: Notes) -> None:
    instead = {"fp16": ("no", "float32"), "fp8": ("bf16", "bf16")}.get(recipe.mixed_precision)
    if instead is None:
        return
    values["mixed_precision"], words = instead
    values.pop("loss_scale", None)
    if recipe.optim.gradient_dtype == "fp16":
        values["optim"]["gradient_dtype"] = "bf16"
    notes.missing.append(f"mixed_precision {recipe.mixed_precision}, which needs a GPU; rehearsed in {words}")
