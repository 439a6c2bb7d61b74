"""Trains a recipe under a strategy.

    accelerate launch --config_file accelerate_configs/zero3.yaml \\
        train.py [RECIPE] [--set section.key=value ...] [--dry-run]

A recipe says what to train, a strategy how to spread the work; this file knows neither a model nor a strategy by name.
"""

import argparse
import os
import sys
import time
from itertools import islice
from pathlib import Path

from cookbook import launch, machine
from cookbook.data.sets import read_data, tokenize_data
from cookbook.files import RecipeError
from cookbook.plan import Plan, describe_batch, load_pair, make_plan
from cookbook.recipe import Recipe, dump_recipe
from cookbook.strategy import Strategy, load_strategy

CACHE = Path(".cache")


def main() -> int:
    parser = argparse.ArgumentParser(prog="train.py", description="Train a recipe under a strategy.")
    parser.add_argument("recipe", nargs="?", default="recipes/quickstart.yaml")
    parser.add_argument("--set", dest="assignments", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--dry-run", action="store_true", help="check files and machine, read no data, train nothing")
    arguments = parser.parse_args()
    try:
        recipe, strategy, plan, world, notes = check(arguments.recipe, arguments.assignments)
        if arguments.dry_run:
            if world.rank == 0:
                print(f"{arguments.recipe}: fine under {strategy.path}; {describe_batch(recipe, plan)}")
            return 0
        train(recipe, strategy, plan, world, notes)
    except RecipeError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(60)  # torchrun ends all at the first that exits: let the first process of a machine tell it
        print(f"\n{error}\n", file=sys.stderr)
        return 2
    return 0


def check(recipe_name: str, assignments: list[str]) -> tuple[Recipe, Strategy, Plan, launch.World, list[str]]:
    """Everything that can be known before torch is imported: files, launcher, environment, batch, GPUs."""
    launcher, world = launch.find_launcher(), launch.read_world()
    given = Path(launcher.config_file) if launcher.config_file else None
    recipe, strategy = load_pair(Path(recipe_name), assignments, given)
    path, note = launch.strategy_in_force(launcher, world, recipe.strategy)
    strategy = load_strategy(path)
    mistakes = launch.check_environment(strategy, launcher, recipe.mixed_precision)
    launch.clear_environment()
    num_gpus = machine.num_gpus()
    world = launch.trim_world(world, strategy, launcher, num_gpus)
    mistakes += launch.check_count(world, launcher)
    try:
        plan = make_plan(
            recipe, strategy, num_processes=world.num_processes, num_gpus=num_gpus, recipe_name=recipe_name
        )
    except RecipeError as error:
        mistakes += error.mistakes
    if mistakes:
        raise RecipeError(mistakes)
    return recipe, strategy, plan, world, [note] if note else []


def train(recipe: Recipe, strategy: Strategy, plan: Plan, world: launch.World, notes: list[str]) -> None:
    # Rows come first: a broken file is told before seconds go into imports, and no process group waits for it.
    rows = read_data(recipe.data, recipe.objective)

    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns from every process

    from accelerate.utils import set_seed
    from transformers.utils import logging as transformers_logging

    from cookbook import adapters, checkpoint, metrics, models
    from cookbook.data import batches
    from cookbook.data.reference import with_reference
    from cookbook.engine import Engine, build_ops
    from cookbook.objectives import build_objective, sequence_logps
    from cookbook.optim import build_optimizer, learning_rate, peak_learning_rate, set_learning_rate

    transformers_logging.disable_progress_bar()

    # Model folder, tokenizer, tokens and compiled operations: once per machine, under file locks.
    name = models.resolve_model(
        recipe.model, seed=recipe.seed, texts=rows.texts(), fingerprint=rows.fingerprint, cache=CACHE
    )
    config = models.load_config(name, recipe.data.max_length, recipe.data.packing)
    notes += models.kernel_notes(recipe.model, config)
    if recipe.adapter is not None:
        adapters.check_names(config, recipe.adapter)
    tokenizer = models.load_tokenizer(name, recipe.data.chat_template)
    data = tokenize_data(rows, tokenizer, recipe.data, recipe.objective, cache=CACHE)
    notes += data.notes
    del rows
    build_ops(strategy, CACHE)
    steps_per_epoch = batches.steps_per_epoch(data.train, recipe.batch.global_batch_size)
    max_steps = recipe.run.total_steps(steps_per_epoch)
    if misfits := recipe.schedule.misfits(max_steps):
        raise RecipeError([f"schedule.{mistake}" for mistake in misfits])

    # Start the strategy. One seed on all processes until the weights stand, since sharding takes a piece from each.
    output_dir = Path(recipe.run.output_dir)
    set_seed(recipe.seed)
    engine = Engine(
        strategy,
        plan,
        world,
        mixed_precision=recipe.mixed_precision,
        micro_batch_size=recipe.batch.micro_batch_size or 1,
        max_grad_norm=recipe.optim.max_grad_norm,
        run_name=metrics.run_name(output_dir),
    )
    model = models.load_model(
        name,
        recipe.model,
        packing=recipe.data.packing,
        dtype=engine.frozen_dtype if recipe.adapter else torch.float32,
        **engine.load_options(),
        **adapters.quantization_options(recipe.adapter, recipe.mixed_precision),
    )
    if recipe.adapter is not None:
        adapters.add_adapter(model, recipe.adapter, seed=recipe.seed)
    engine.prepare(model, build_optimizer(model, recipe.optim, recipe.mixed_precision))
    set_seed(recipe.seed + engine.data_parallel.rank)

    # From here on everything counts optimizer steps over a fixed global batch.
    objective = build_objective(recipe.objective)
    layout = batches.Layout(
        num_ranks=engine.data_parallel.size,
        rank=engine.data_parallel.rank,
        pad_id=tokenizer.pad_token_id,
        micro_batch_size=recipe.batch.micro_batch_size,
        micro_batch_tokens=recipe.batch.micro_batch_tokens,
        packing=recipe.data.packing,
    )
    if objective.needs_reference:
        made_from = [models.weights_digest(Path(name)), recipe.mixed_precision, strategy.name, str(recipe.adapter)]
        data = with_reference(
            data,
            made_from,
            cache=CACHE,
            agree=engine.agree,
            compute=lambda tokens: engine.collect(
                sequence_logps, batches.indexed_batches(tokens, layout), len(tokens.lengths)
            ),
        )
    steps = batches.train_steps(data.train, layout, seed=recipe.seed, global_batch_size=recipe.batch.global_batch_size)

    log = metrics.RunLog(output_dir, is_main=engine.is_main, max_steps=max_steps)
    log.write_text("recipe.yaml", dump_recipe(recipe))
    log.write_record("run.json", metrics.environment_record(engine.device) | {"strategy": engine.describe()})
    for note in notes:
        log.say(note)
    log.say(
        f"{strategy.name}: {plan.num_processes} processes on {engine.device.type}, precision {recipe.mixed_precision};"
        f" {describe_batch(recipe, plan)}; {max_steps} steps, {steps_per_epoch or 'an unknown number'} an epoch"
    )
    if recipe.adapter is not None:
        share = f"{engine.num_trained:,} of {engine.num_parameters:,} parameters are trained"
        log.say(f"adapter {recipe.adapter.name} of rank {recipe.adapter.rank}: {share}")
    flops = metrics.FlopCounter(
        config, num_parameters=engine.num_parameters, num_trained=engine.num_trained, device=engine.device
    )
    peak = peak_learning_rate(recipe.optim, recipe.schedule, recipe.batch.global_batch_size)

    def evaluate(step: int) -> None:
        for set_name, tokens in data.eval.items():
            found = engine.evaluate(objective.run, batches.eval_batches(tokens, layout))
            label = {"eval_set": set_name} if set_name else {}
            log.write({"step": step, **label, **{f"eval_{key}": value for key, value in found.items()}})

    evaluate(0)
    for step, batch in enumerate(islice(steps, max_steps)):
        started = time.perf_counter()
        lr = learning_rate(step, max_steps, peak, recipe.schedule)
        set_learning_rate(engine.optimizer, lr)
        means = engine.gradients(objective.run, batch.micro_batches, getattr(batch, objective.unit))
        grad_norm = engine.step()
        seconds = time.perf_counter() - started
        log.write(
            {
                "step": step + 1,
                "epoch": batch.epoch,
                **means,
                "grad_norm": grad_norm,
                "learning_rate": lr,
                "num_tokens": batch.num_tokens,
                "step_seconds": seconds,
                "tokens_per_second": batch.num_tokens / seconds,
                "peak_memory_gib": engine.max_over_processes(metrics.peak_memory_gib(engine.device)),
                **flops.mfu(batch.num_tokens, batch.num_sequences, seconds, plan.num_processes),
            }
        )
        every = recipe.run.eval_every_steps
        if step + 1 == max_steps or (every and (step + 1) % every == 0):
            evaluate(step + 1)

    for note in data.closing_notes():
        log.say(note)

    def write(weights: dict[str, torch.Tensor], folder: Path) -> None:
        if recipe.adapter is None:
            checkpoint.write_model(weights, folder, config=config)
        else:
            revision = recipe.model.revision or models.revision_of(name)
            base = adapters.Base(recipe.model.name_or_path or name, revision, models.weights_digest(Path(name)))
            adapters.write_adapter(weights, folder, config=config, settings=recipe.adapter, base=base)
        checkpoint.write_generation_config(folder, like=Path(name), end_of_turn=models.end_of_turn(tokenizer))

    dtype = torch.float32 if recipe.adapter else config.dtype or torch.float32
    export = output_dir / "export"
    checkpoint.export(engine.full_parameters(), write, tokenizer, export, dtype=dtype, is_main=engine.is_main)
    log.close()
    engine.close()


if __name__ == "__main__":
    sys.exit(main())
