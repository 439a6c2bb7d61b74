"""Trains a recipe under a strategy.

    accelerate launch --config_file accelerate_configs/zero3.yaml \\
        train.py [RECIPE] [--set section.key=value ...] [--dry-run]

A recipe says what to train, a strategy how to spread the work; this file knows neither a model nor a strategy by name.
"""

import argparse
import math
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cookbook import faults, launch, lock, machine, schedule, signals, status, watch
from cookbook.data.sets import read_data
from cookbook.files import RecipeError
from cookbook.plan import Plan, begun_elsewhere, describe_batch, load_pair, make_plan
from cookbook.recipe import Recipe
from cookbook.shortage import end as end_of_shortage
from cookbook.shortage import is_shortage
from cookbook.strategy import Strategy

if TYPE_CHECKING:
    from cookbook.data.batches import StepBatch
    from cookbook.engine import Engine
    from cookbook.stages import Books, Run

CACHE = Path(".cache")


def main() -> int:
    signals.install()  # before torch and its seconds
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
        watching = start_watch(recipe, world)
        try:
            return train(recipe, strategy, plan, world, notes, watching)
        except Exception as error:
            if is_shortage(error):
                return end_of_shortage(error, recipe, strategy, plan, arguments.recipe)
            status.fail(Path(recipe.run.output_dir), error)
            raise
        finally:
            watching.close()
    except RecipeError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(60)  # torchrun ends all at the first that exits: let the first process of a machine tell it
        print(f"\n{error}\n", file=sys.stderr)
        return 2


def check(recipe_name: str, assignments: list[str]) -> tuple[Recipe, Strategy, Plan, launch.World, list[str]]:
    """Everything that can be known before torch is imported: files, launcher, environment, batch, GPUs."""
    launcher, world = launch.find_launcher(), launch.read_world()
    given = Path(launcher.config_file) if launcher.config_file else None
    recipe, _ = load_pair(Path(recipe_name), assignments, given)
    path, note = launch.strategy_in_force(launcher, world, recipe.strategy)
    recipe, strategy = load_pair(Path(recipe_name), assignments, path)
    mistakes = launch.check_environment(strategy, launcher, recipe.mixed_precision)
    launch.clear_environment()
    num_gpus = machine.num_gpus()
    world = launch.trim_world(world, strategy, launcher, num_gpus)
    mistakes += launch.check_count(world, launcher)
    mistakes += launch.check_machine(strategy, num_gpus, deterministic=recipe.run.deterministic)
    try:
        plan = make_plan(
            recipe, strategy, num_processes=world.num_processes, num_gpus=num_gpus, recipe_name=recipe_name
        )
    except RecipeError as error:
        mistakes += error.mistakes
    if mistakes:
        raise RecipeError(mistakes)
    notes = [note] if note else []
    return recipe, strategy, plan, world, notes + begun_elsewhere(Path(recipe_name), recipe, strategy)


def start_watch(recipe: Recipe, world: launch.World) -> watch.Watch:
    """Who ends this process if it hangs."""
    output_dir, goes_on = Path(recipe.run.output_dir), recipe.run.resume == "auto"
    return watch.Watch(
        output_dir,
        world.rank,
        world.num_processes,
        recipe.run.hang_timeout_minutes * 60,
        attempt=status.attempt_id(),
        claim=partial(status.hang, output_dir, goes_on=goes_on),
    )


def train(
    recipe: Recipe, strategy: Strategy, plan: Plan, world: launch.World, notes: list[str], watching: watch.Watch
) -> int:
    """The run, from its rows to its export. Returns the exit code.

    Args:
        notes: what a user should know of; told when there is a log.
        watching: over this process; is told each phase.
    """
    # Rows come first: a broken file is told before seconds go into imports, and no process group waits for it.
    watching.enter("reading the rows", is_alone=True)
    rows = read_data(recipe.data, recipe.objective)
    is_restarted, failed_after = take_folder(recipe, world)

    watching.enter("importing the libraries", is_alone=True)
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns from every process

    from cookbook import stages
    from cookbook.engine import build_ops

    # Compiled operations, model folder, tokenizer and tokens: once per machine, under file locks.
    watching.enter("preparing model folder and tokens", is_alone=True)
    build_ops(strategy, CACHE)
    material = stages.load_material(recipe, rows, cache=CACHE, notes=notes)
    del rows
    if misfits := recipe.schedule.misfits(material.max_steps):
        raise RecipeError([f"schedule.{mistake}" for mistake in misfits])

    # From here on the processes go together, and each call is one of all of them.
    watching.enter("joining the process group")
    engine = stages.start_engine(recipe, strategy, plan, world, beat=watching.beat)
    watching.enter("taking digests", is_alone=engine.is_main)  # of large files, which it reads for all
    made_from = stages.take_digests(recipe, material, engine, cache=CACHE)
    watching.enter("choosing the checkpoint")
    checkpoint = stages.choose_checkpoint(recipe, made_from, engine, is_restarted=is_restarted, notes=notes)
    watching.enter("loading the model")
    stages.prepare_model(recipe, material, engine)
    watching.enter("restoring")
    run = stages.make_run(recipe, material, made_from, engine, checkpoint, cache=CACHE)

    signals.hold()  # from here on there is something to save
    watching.enter("opening the logs")
    books = stages.open_books(run, failed_after, notes, watching)
    watching.enter("training")
    with run.steps:
        reason = loop(run, books)
    return finish(run, books) if reason is None else stop(run, books, reason)


def take_folder(recipe: Recipe, world: launch.World) -> tuple[bool, list[int]]:
    """Takes the lock of the output folder, on the main process.

    Returns:
        Whether the launcher starts this run again, and what `status.past_failures` found, as far as it matters.
    """
    if world.rank != 0:
        return False, []
    output_dir = Path(recipe.run.output_dir)
    lock.hold(output_dir)
    watch.sweep(output_dir, status.attempt_id())
    is_restarted = status.is_restart(output_dir)
    goes_on = is_restarted or recipe.run.resume == "auto"
    return is_restarted, status.past_failures(output_dir) if goes_on else []


def loop(run: "Run", books: "Books") -> str | None:
    """Evaluates, saves and trains, step by step, up to the last one. Returns why it broke off before."""
    settings, first_step = run.recipe.run, run.progress.step
    reason, is_time_to_save = stop_reason(run.engine), False
    while True:
        step = run.progress.step
        is_last = step == run.material.max_steps
        if step == 0 or is_last or is_due(step, settings.eval_every_steps):
            reason = reason or evaluate(run, books)
        is_first_save = step == 1 and settings.save_first_step
        if is_last or is_time_to_save or is_due(step, settings.save_every_steps) or is_first_save:
            save(run, books)
        if settings.stop_after_steps and step - first_step >= settings.stop_after_steps and not is_last:
            reason = reason or "run.stop_after_steps"
        if reason is not None or is_last:
            return reason
        faults.at("data.next", step + 1)
        reason, is_time_to_save = train_step(run, books, next(run.steps))


def train_step(run: "Run", books: "Books", batch: "StepBatch") -> tuple[str | None, bool]:
    """One optimizer step over the global batch. Returns why to stop, and whether it is time to save: for all processes
    the same.

    Raises:
        FloatingPointError: more steps were left out than run.skip_nonfinite_steps.
    """
    from cookbook import metrics
    from cookbook.optim.groups import set_learning_rate

    recipe, engine, progress = run.recipe, run.engine, run.progress
    started = time.perf_counter()
    peak = schedule.peak_learning_rate(recipe.optim, recipe.schedule, recipe.batch.global_batch_size)
    lr = schedule.learning_rate(progress.step, run.material.max_steps, peak, recipe.schedule)
    set_learning_rate(engine.optimizer, lr)
    engine.begin_step(progress.step + 1, recipe.seed)
    objective = recipe.objective
    count = batch.num_targets if objective.mean_over == "tokens" else batch.num_samples
    shares = engine.gradients(objective.compute, batch.micro_batches, count)
    asked = metrics.peak_memory_gib(engine.device), stop_vote(), books.saver.is_time(recipe.run.save_every_minutes)
    result = engine.step(shares, *asked)
    memory, vote, is_time_to_save = result.maxima
    seconds = time.perf_counter() - started  # a GPU may still be at the update, whose time is then the next step's
    # Under fp16 that is how the loss scale finds its place.
    is_skipped = not math.isfinite(result.grad_norm) and recipe.mixed_precision != "fp16"
    progress.advance(batch, is_skipped=is_skipped)
    books.log.write(
        {
            "step": progress.step,
            "epoch": batch.epoch,
            **result.means,
            "grad_norm": result.grad_norm,
            "learning_rate": lr,
            "num_tokens": batch.num_tokens,
            "step_seconds": seconds,
            "tokens_per_second": batch.num_tokens / seconds,
            "peak_memory_gib": memory,
            **books.flops.mfu(batch, seconds, engine.plan.num_processes),
        }
    )
    if is_skipped:
        step, limit = progress.step, recipe.run.skip_nonfinite_steps
        books.log.say(f"step {step} was left out, the weights are as before: its loss or gradient is not finite")
        bad, what = engine.nonfinite_micro_batches(), "loss"
        if engine.collectives.all_true(not bad):  # no loss on any process: any sample of the step may be the one
            bad, what = list(range(len(batch.micro_batches))), "gradient"
        decode = run.material.tokenizer.decode
        metrics.record_nonfinite(run.output_dir, step, engine.world.rank, batch, bad, decode, what=what)
        if progress.num_skipped > limit:
            raise FloatingPointError(f"step {step}: run.skip_nonfinite_steps is {limit}")
    return signals.REASONS[int(vote)], bool(is_time_to_save)


def evaluate(run: "Run", books: "Books") -> str | None:
    """Evaluates all sets, unless that was done after this step. Returns why it broke off."""
    progress = run.progress
    if progress.is_evaluated:
        return None
    lines: list[dict[str, Any]] = []  # written together: an evaluation that breaks off is made again from its beginning
    for set_name, batches in run.eval_sets.items():
        found = run.engine.evaluate(run.recipe.objective.compute, batches(), lambda: stop_reason(run.engine))
        if isinstance(found, str):
            return found
        label = {"eval_set": set_name} if set_name else {}
        lines.append({"step": progress.step, **label, **{f"eval_{key}": value for key, value in found.items()}})
    for line in lines:
        books.log.write(line)
    progress.is_evaluated, progress.eval_loss = True, lines[0]["eval_loss"] if lines else None
    return None


def save(run: "Run", books: "Books") -> None:
    """Saves the state after this step, unless that was done, or it is as it began."""
    engine, saver, step = run.engine, books.saver, run.progress.step
    if step in (0, saver.last_step):
        return
    progress = {key: value for key, value in asdict(run.progress).items() if value is not None}
    tensors = {"parameters": engine.parameter_shapes(), "counts": engine.counts()}
    recipe = run.recipe.model_dump(mode="json", exclude_none=True)
    words = {"recipe": recipe, "made_from": run.made_from, "run": books.record}
    saver.save(step, engine.pieces(), {**progress, **tensors, **words}, best_by=run.progress.eval_loss)
    books.status.running(step, checkpoint=saver.newest_path)


def stop(run: "Run", books: "Books", reason: str) -> int:
    """Ends a run that is to be started again. Returns the exit code."""
    save(run, books)
    books.saver.wait()
    is_saved = run.engine.collectives.all_true(books.saver.failed is None)
    code = signals.EXIT_CODE if is_saved else 1
    step = run.progress.step
    told = "NOT saved" if not is_saved else "saved" if step else "nothing to save yet"
    books.log.say(f"stopped after step {step} ({reason}); {told}")
    state = "stopped" if is_saved else "failed"
    books.status.end(state, exit_code=code, reason=reason, checkpoint=books.saver.newest_path)
    books.log.close()
    books.watch.enter("leaving")
    run.engine.close()
    return code


def finish(run: "Run", books: "Books") -> int:
    """Ends a run after its last step: exports what was saved. Returns the exit code."""
    from cookbook import metrics, publish, stages

    engine, log, saver = run.engine, books.log, books.saver
    saver.wait()
    for note in run.material.data.closing_notes():
        log.say(note)
    allocated, reserved = engine.collectives.all_reduce_max(
        metrics.peak_memory_gib(engine.device), metrics.peak_reserved_gib(engine.device)
    )
    if books.expected is not None:
        log.say(books.expected.compared(allocated, reserved))
        peaks = {"allocated": allocated, "reserved": reserved or None}
        log.write_record("run.json", books.record | {"peak_memory_gib": peaks})

    signals.let_go(engine.is_main)
    if engine.is_main:
        books.watch.enter("exporting", is_alone=True)
        if saver.newest is None or saver.newest.step != run.material.max_steps:
            raise OSError(f"the last step could not be saved, so there is nothing to export: {saver.failed}")
        # Everything is saved: whatever ends it from here on, another start exports.
        books.status.end("stopped", exit_code=signals.EXIT_CODE, reason=status.EXPORTING, checkpoint=saver.newest_path)
        if not publish.has_frame(run.output_dir):
            stages.write_frame(run)
        publish.export(run.output_dir, saver.newest, reopened=run.recipe.run.check_export, say=log.say)
    books.status.end("finished", exit_code=0)
    log.close()
    books.watch.enter("leaving")
    engine.close()
    return 0


def stop_vote() -> int:
    """Why this process should stop, as a number that can be agreed on."""
    return signals.REASONS.index(signals.requested())


def stop_reason(engine: "Engine") -> str | None:
    """Why any process should stop. Collective."""
    return signals.REASONS[int(engine.collectives.all_reduce_max(stop_vote())[0])]


def is_due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step > 0 and step % every == 0


if __name__ == "__main__":
    watch.guard()
    try:
        exit_code = main()
    finally:
        watch.guard()
    sys.exit(status.note_exit(exit_code))
