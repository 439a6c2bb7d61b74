"""Loss and perplexity of a trained model on any rows, by the code that evaluates during training."""

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from cookbook.commands.shared.answer_forms import EvaluateAnswer
from cookbook.commands.shared.arguments import MODEL, AsJson, Assignments, run_folder
from cookbook.commands.shared.find_model import CACHE, find_model, find_run, is_adapter, recipe_of_run
from cookbook.commands.shared.for_programs import answer
from cookbook.config.objectives.token_loss import TokenLoss
from cookbook.config.recipe import Draft, Recipe, parse_recipe
from cookbook.config.strategy import find_strategy, load_strategy
from cookbook.facts.packing import decide
from cookbook.start import launchers
from cookbook.start.run_plan import make_plan
from cookbook.system.console import page, say
from cookbook.system.files import RecipeError, refuse
from cookbook.system.imports import quiet_deepspeed
from cookbook.system.machine import num_gpus

if TYPE_CHECKING:
    from cookbook.training.engine import Engine


def evaluate(
    folder: Annotated[Path, run_folder(MODEL)],
    data: Annotated[str | None, Argument(metavar="DATA", help="as data.eval; default: the run's own sets")] = None,
    *,
    as_json: AsJson = False,
    assignments: Assignments,
) -> int:
    """Compute a model's loss on any rows.

    Runs in one process, with the settings of the run's recipe; a model of no run is evaluated in float32.
    """
    model = find_model(folder)
    recipe = _recipe_for(folder, model, data, assignments)
    lines = evaluate_model(model, recipe)
    if as_json:
        answer(EvaluateAnswer(model=str(model), sets=lines))
    names = list(dict.fromkeys(name for line in lines for name in line))
    rows = [
        [f"{value:.4f}" if isinstance(value, float) else str(value) for value in map(line.get, names)] for line in lines
    ]
    say(page(f"EVALUATION of {model}", names, *rows))
    return 0


def _recipe_for(folder: Path, model: Path, data: str | None, assignments: list[str]) -> Recipe:
    """The run's recipe, or for a model of no run one of defaults; with `data` as its only held-out rows.

    Raises:
        RecipeError: no held-out rows, or an objective whose loss needs more than this model.
    """
    if data is not None:
        assignment = f"data.eval={json.dumps({'path': data})}"
        # data.train is not read then, and its files may be gone.
        assignments = [assignment, f"data.train={json.dumps(data)}", "data.holdout=0", *assignments]
    run = find_run(folder)
    if run is not None:
        recipe = recipe_of_run(run, assignments)
    else:
        values = {
            "strategy": "single",
            "mixed_precision": "no",
            "model": {"name_or_path": str(model)},
            "data": {},
            "batch": {"global_batch_size": 8, "micro_batch_size": 8},
            "optim": {"learning_rate": 1e-5},
            "run": {"max_steps": 1},
        }
        if data is None:
            raise RecipeError(f"{folder} is no run's, so there are no held-out rows; name DATA as well")
        recipe = parse_recipe(Draft(str(model), values, assignments=assignments))
    if not recipe.data.eval and not recipe.data.holdout:
        raise RecipeError(f"{run}: its recipe has no held-out rows; name DATA as well")
    if recipe.objective.asks is not None:
        raise RecipeError(
            f"objective.name is {recipe.objective.name}, whose loss compares with a teacher, which is not asked here;"
            " for the likelihood of the labels add --set objective='{name: sft}'"
        )
    if recipe.objective.needs_reference:
        name = recipe.objective.name
        raise RecipeError(
            f"objective.name is {name}, whose loss compares with the model before training, which is not there; for"
            " the loss of its answers name DATA with chats or completions, and add --set objective='{name: sft}'"
        )
    return recipe


def evaluate_model(folder: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """Means over each held-out set of `recipe`, as the lines of metrics.jsonl have them, and `perplexity`.

    Args:
        folder: a Hugging Face folder, or that of an adapter.

    Raises:
        RecipeError: a mistake in rows or recipe, or a model that cannot be evaluated.
    """
    from cookbook.training.data.sets import read_eval

    rows = read_eval(recipe.data, recipe.objective)  # before the imports, which take seconds
    if not num_gpus():
        quiet_deepspeed()
    launchers.clear_environment()
    strategy = load_strategy(find_strategy("single"))
    plan = make_plan(recipe, strategy, num_processes=1, num_gpus=num_gpus(), recipe_name=str(folder))
    precision = recipe.mixed_precision
    refuse(launchers.check_machine(strategy, num_gpus(), deterministic=False, mixed_precision=precision))

    from transformers.utils import logging

    from cookbook.commands.shared.generation import check_folder, record_of
    from cookbook.run import stages
    from cookbook.run.publish.merged import rebuild_base
    from cookbook.training.data import batches
    from cookbook.training.data.sets import tokenize_eval
    from cookbook.training.models import tokenizer_files

    logging.disable_progress_bar()
    tokenizer = tokenizer_files.load_tokenizer(str(folder), recipe.data.chat_template)
    base, facts = check_folder(folder, tokenizer)
    if (record := record_of(folder)) is not None:
        base = rebuild_base(base, folder, record)
    sets, notes = tokenize_eval(
        rows, tokenizer, recipe.data, recipe.objective, cache=CACHE, num_embeddings=facts.num_embeddings
    )
    for note in [*facts.notes, *notes]:
        say(note, file=sys.stderr)
    world = launchers.World(rank=0, local_rank=0, num_processes=1, num_local=1, is_launched=False)
    engine = stages.start_engine(recipe, strategy, plan, world, beat=lambda doing, step: None)
    recipe = _prepare_model(folder, base, recipe, engine)
    limits = recipe.batch.model_dump(include={"micro_batch_size", "micro_batch_tokens"})
    pad_id, packing = tokenizer.pad_token_id, recipe.data.is_packed
    layout = batches.Layout(num_ranks=1, rank=0, pad_id=pad_id, packing=packing, **limits)
    lines = []
    for name, tokens in sets.items():
        means = engine.evaluate(recipe.objective.compute, batches.eval_batches(tokens, layout))
        assert isinstance(means, dict), "nothing asks it to stop"
        line: dict[str, Any] = {"eval_set": name} if name else {}
        line |= {f"eval_{key}": value for key, value in means.items()}
        if isinstance(recipe.objective, TokenLoss):
            line["perplexity"] = math.exp(means.get("nll", means["loss"]))  # that of the labels is not smoothed
        lines.append(line)
    engine.close()
    return lines


def _prepare_model(folder: Path, base: str, recipe: Recipe, engine: "Engine") -> Recipe:
    """Load model and adapter in the dtypes of training. An engine needs an optimizer, which is never used.

    Args:
        base: the folder of the model, where `folder` is an adapter's.

    Returns:
        The recipe, with `data.packing` decided.
    """
    import torch

    from cookbook.run import stages
    from cookbook.training.adapters import insertion
    from cookbook.training.models import language_model

    has_adapter = is_adapter(folder)
    config = language_model.load_config(base, recipe.data.max_length)
    recipe = decide(recipe, config).settle(recipe)
    model = stages.load_model(base, recipe, engine, has_adapter=has_adapter)
    if has_adapter:
        insertion.open_adapter(model, folder)
    language_model.check_finite(model, folder)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine.prepare(model, torch.optim.SGD(trained, lr=0.0))
    return recipe
