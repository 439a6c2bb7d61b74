"""Trains a recipe under a strategy.

    accelerate launch --config_file accelerate_configs/zero3.yaml \\
        train.py [RECIPE] [--set section.key=value ...] [--dry-run]

A recipe is what to train, a strategy how to distribute it; this file knows neither a model nor a strategy by name.
"""

import argparse
import math
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cookbook.config import schedule
from cookbook.config.foreign import as_assignment
from cookbook.config.recipe import Recipe
from cookbook.config.sections import is_due
from cookbook.config.strategy import Strategy
from cookbook.run import auto_settings, shortage
from cookbook.start.launchers import World
from cookbook.start.run_plan import Plan, check, describe_batch
from cookbook.system import faults, lock, optional, signals, status, versions, watchdog
from cookbook.system.console import printable, say
from cookbook.system.files import RecipeError, refuse
from cookbook.system.imports import imports, quiet_libraries
from cookbook.system.shipped import path_from_here
from cookbook.training.data.known import known_rows

if TYPE_CHECKING:
    from cookbook.run.services import Services
    from cookbook.run.stages import Run
    from cookbook.training.data.batches import StepBatch
    from cookbook.training.engine import Engine

CACHE = Path(".cache")
LAST_SAVE_TRIES, LAST_SAVE_PAUSE_SECONDS = 3, 60
"""Number of tries to save the last step, and seconds between: room may be made on a full disk."""


def main() -> int:
    signals.install()  # before torch, which takes seconds to import
    quiet_libraries()
    parser = argparse.ArgumentParser(prog="train.py", description="Train a recipe under a strategy.")
    parser.add_argument("recipe", nargs="?", default="recipes/quickstart.yaml")
    parser.add_argument("--set", dest="assignments", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--dry-run", action="store_true", help="check files and machine, read no data, train nothing")
    arguments, others = parser.parse_known_args()
    try:
        refuse_words([arguments.recipe, *others])
        arguments.recipe = path_from_here(arguments.recipe)
        recipe, strategy, plan, world, notes, digests = check(arguments.recipe, arguments.assignments)
        optional.use(recipe.model.kernels or ())
        if arguments.dry_run:
            if world.rank == 0:
                say(f"{arguments.recipe}: fine under {strategy.path}; {describe_batch(recipe, plan)}")
                for note in versions.notes():
                    say(note)
            return 0
        watching = start_watch(recipe, world)
        try:
            with signals.no_exit():
                recipe, plan, chosen = auto_settings.settle(arguments.recipe, recipe, strategy, plan, cache=CACHE)
                return train(recipe, strategy, plan, world, [*chosen, *notes], watching, digests)
        except Exception as error:
            if shortage.is_shortage(error):
                return shortage.end_run(error, recipe, strategy, plan, arguments.recipe, arguments.assignments)
            status.fail(Path(recipe.run.output_dir), error)
            raise
        finally:
            watching.close()
    except RecipeError as error:
        if os.environ.get("LOCAL_RANK", "0").strip("0").isdecimal():
            time.sleep(60)  # torchrun kills all at the first exit: let the first process of a machine report it
        say(f"\n{printable(str(error))}\n", file=sys.stderr)
        return 2


def refuse_words(words: list[str]) -> None:
    """Refuse what is neither a recipe nor a flag, with what to write in its place."""
    recipe, *others = words
    misplaced = [recipe] if "=" in recipe and not Path(recipe).is_file() else []
    values = {word: following for word, following in pairwise(others) if word[:1] == "-" != following[:1]}
    unknown = "not known; keys of the recipe are given as --set section.key=value"
    refuse(
        [
            (as_assignment(word) or f"{word}: {unknown}").replace("VALUE", values.get(word, "VALUE"))
            for word in [*misplaced, *others]
            if word.startswith("-") or word not in values.values()
        ]
    )


def start_watch(recipe: Recipe, world: World) -> watchdog.Watch:
    """Start the watchdog that ends this process if it hangs."""
    output_dir, goes_on = Path(recipe.run.output_dir), recipe.run.resume == "auto"
    return watchdog.Watch(
        output_dir,
        world.rank,
        world.num_processes,
        recipe.run.hang_timeout_minutes * 60,
        attempt=status.attempt_id(),
        claim=partial(status.hang, output_dir, goes_on=goes_on),
    )


def train(
    recipe: Recipe,
    strategy: Strategy,
    plan: Plan,
    world: World,
    notes: list[str],
    watching: watchdog.Watch,
    digests: dict[str, str],
) -> int:
    """Run from the rows to the export. Returns the exit code.

    Args:
        notes: notes for the user, logged as soon as there is a log.
        watching: the watchdog of this process.
        digests: SHA-256 of the files that the recipe was read from.
    """
    # Rows come first: a broken file is reported before the imports, which take seconds, and before a process group.
    watching.enter("reading the rows", is_alone=True)
    rows = known_rows(recipe.data, recipe.objective, cache=CACHE)
    is_restarted, failed_after = take_folder(recipe, world)

    watching.enter("importing the libraries", is_alone=True)
    with imports():
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns from every process

        from cookbook.run import stages
        from cookbook.run.services import start_services
        from cookbook.training.checkpoint import resume
        from cookbook.training.engine import build_ops

    # Compiled operations, model folder, tokenizer and tokens: once per machine, under file locks.
    watching.enter("preparing model folder and tokens", is_alone=True)
    build_ops(strategy, CACHE)
    inputs = stages.load_inputs(recipe, strategy, plan, rows, cache=CACHE, notes=notes)
    del rows
    refuse(recipe.run.misfits(inputs.steps_per_epoch))
    _, length = recipe.in_schedule(0, inputs.max_steps)
    if recipe.run.max_steps is None and (misfits := recipe.schedule.misfits(length)):
        raise RecipeError([f"schedule.{mistake}" for mistake in misfits])

    # From here on every rank must make each call.
    watching.enter("joining the process group")
    engine = stages.start_engine(recipe, strategy, plan, world, beat=watching.beat)
    watching.enter("taking digests", is_alone=engine.is_main)  # of large files, which it reads for all
    made_from = stages.take_fingerprints(recipe, inputs, engine, cache=CACHE)
    watching.enter("choosing the checkpoint")
    checkpoint = resume.choose(recipe, made_from, engine.collectives, is_restarted=is_restarted, say=notes.append)
    packing = stages.choose_packing(recipe, inputs, checkpoint)
    recipe = packing.settle(recipe)
    watching.enter("loading the model")
    if inputs.teacher is not None:
        inputs = stages.ask_teacher(recipe, inputs, made_from, engine, cache=CACHE, notes=notes)
    stages.prepare_model(recipe, inputs, engine)
    watching.enter("restoring")
    run = stages.make_run(recipe, inputs, packing, made_from, engine, checkpoint, cache=CACHE)

    signals.defer()  # from here on there is something to save
    watching.enter("opening the logs")
    services = start_services(run, failed_after, notes, watching, digests)
    watching.enter("training")
    with run.steps:
        reason = loop(run, services)
    return finish(run, services) if reason is None else stop(run, services, reason)


def take_folder(recipe: Recipe, world: World) -> tuple[bool, list[int]]:
    """Lock the output folder, on rank 0.

    Returns:
        Whether the launcher restarted this run, and `status.past_failures` if the run resumes.
    """
    if world.rank != 0:
        return False, []
    output_dir = Path(recipe.run.output_dir)
    lock.hold(output_dir)
    watchdog.remove_other_starts(output_dir, status.attempt_id())
    is_restarted = status.is_restart(output_dir)
    goes_on = is_restarted or recipe.run.resume == "auto"
    return is_restarted, status.past_failures(output_dir) if goes_on else []


def loop(run: "Run", services: "Services") -> str | None:
    """Evaluate, save and train, step by step, up to the last one. Returns the reason for an earlier stop."""
    from cookbook.training.profiling import phase

    settings, first_step = run.recipe.run, run.progress.step
    reason, is_time_to_save = stop_reason(run.engine), False
    since = time.perf_counter()
    while True:
        began, step = time.perf_counter(), run.progress.step
        if step == 0 or run.is_over or settings.evaluates_after(step, run.inputs.steps_per_epoch):
            with phase("evaluation"):
                reason = reason or evaluate(run, services)
        is_last = run.is_over  # by the evaluation, too
        if settings.sample_every_steps and (step == 0 or is_last or is_due(step, settings.sample_every_steps)):
            with phase("evaluation"):
                reason = reason or sample(run, services)
        evaluated = time.perf_counter()
        is_first_save = step == 1 and settings.save_first_step
        is_due_by_steps = settings.saves_after(step, run.inputs.steps_per_epoch)
        if is_last or is_time_to_save or is_due_by_steps or is_first_save:
            with phase("save"):
                save(run, services)
        saved = time.perf_counter()
        services.end_step(run, first_step)
        if settings.stop_after_steps and step - first_step >= settings.stop_after_steps and not is_last:
            reason = reason or "run.stop_after_steps"
        if reason is not None or is_last:
            return reason
        services.profile.begin_step(step + 1)
        waited = time.perf_counter()
        with phase("data"):
            faults.at("data.next", step + 1)
            batch = next(run.steps)
        waits = {"eval_seconds": evaluated - began, "save_seconds": saved - evaluated}
        waits["data_seconds"] = time.perf_counter() - waited
        since += saved - began  # evaluations and saves are no part of a step
        reason, is_time_to_save, since = train_step(run, services, batch, since, waits)


def train_step(
    run: "Run", services: "Services", batch: "StepBatch", since: float, waits: dict[str, float]
) -> tuple[str | None, bool, float]:
    """Perform one optimizer step over the global batch.

    Args:
        since: time at which the last step ended: what lies between two steps, such as waiting for rows, counts.
        waits: seconds of it and of the evaluation and the save before it, by their names in metrics.jsonl.

    Returns:
        A reason to stop, and whether it is time to save, the same on all ranks; and the time at which this step ended.

    Raises:
        FloatingPointError: see `report_skip`.
    """
    from cookbook.config.optim.groups import set_learning_rate
    from cookbook.training import metrics
    from cookbook.training.engine import in_words

    recipe, engine, progress = run.recipe, run.engine, run.progress
    peak = schedule.peak_learning_rate(recipe.optim, recipe.schedule, recipe.batch.global_batch_size)
    lr = schedule.learning_rate(*recipe.in_schedule(progress.step, run.inputs.max_steps), peak, recipe.schedule)
    # No scheduler object: one that accelerate prepares advances once per process, and is state to save.
    set_learning_rate(engine.optimizer, lr)
    engine.begin_step(progress.step + 1)
    objective = recipe.objective
    count = max(batch.num_targets, 1) if objective.mean_over == "tokens" else batch.num_samples
    shares = engine.gradients(objective.compute, batch.micro_batches, count)
    if unreached := engine.unreached_parameters():
        what = f"{len(unreached)} trained parameters got no gradient in the first step"
        services.log.say(f"{what}: {in_words(unreached)}", "bold red")
    scale = None if engine.loss_scale is None else engine.loss_scale.scale
    is_due_by_time = services.saver.is_time(recipe.run.save_every_minutes)
    result = engine.step(shares, metrics.peak_memory_gib(engine.device), stop_vote(), is_due_by_time)
    memory, vote, is_time_to_save = result.maxima
    ended = time.perf_counter()  # a GPU may still run the update, whose time then counts for the next step
    seconds = ended - since
    # Under fp16 such steps are normal: the loss scaler lowers its scale.
    is_skipped = not math.isfinite(result.grad_norm) and recipe.mixed_precision != "fp16"
    progress.advance(batch, is_skipped=is_skipped)
    if is_due(progress.step, recipe.run.check_ranks_every_steps):
        engine.check_ranks({"samples trained on": progress.num_samples, "stream": progress.stream_digest})
    services.log.write(
        {
            "step": progress.step,
            "epoch": batch.epoch,
            **result.means,
            **({"masked": batch.num_masked / batch.num_sequences} if objective.masks_truncated else {}),
            "grad_norm": result.grad_norm,
            "learning_rate": lr,
            **({} if scale is None else {"loss_scale": scale}),
            "num_tokens": batch.num_tokens,
            "step_seconds": seconds,
            **waits,
            "tokens_per_second": batch.num_tokens / seconds,
            "peak_memory_gib": memory,
            **services.flops.mfu(batch, seconds, engine.plan.num_processes),
            **services.meter.price(),
        }
    )
    if not batch.num_targets:
        services.log.say(f"step {progress.step}: all its answers were cut off, and none carries loss", "bold red")
    if result.unusual is not None:
        services.log.event("gradient", progress.step, **result.unusual.details())
        services.log.say(f"step {progress.step}: {result.unusual.in_words()}", "bold red")
    if is_skipped:
        report_skip(run, services, batch)
    return signals.REASONS[int(vote)], bool(is_time_to_save), ended


def report_skip(run: "Run", services: "Services", batch: "StepBatch") -> None:
    """Log that a step was skipped, and write down the samples that may be the cause.

    Raises:
        FloatingPointError: more steps were skipped than run.skip_nonfinite_steps allows.
    """
    from cookbook.training import metrics

    engine, step, limit = run.engine, run.progress.step, run.recipe.run.skip_nonfinite_steps
    services.log.event("skip", step)
    services.log.say(f"step {step} skipped: loss or gradient is not finite; weights unchanged", "bold red")
    bad, what = engine.nonfinite_micro_batches(), "loss"
    if engine.collectives.all_true(not bad):  # every loss is finite on all ranks: any sample may be the cause
        bad, what = list(range(len(batch.micro_batches))), "gradient"
    decode = run.inputs.tokenizer.decode
    metrics.record_nonfinite(run.output_dir, step, engine.world.rank, batch, bad, decode, what=what)
    if run.progress.num_skipped > limit:
        name = run.recipe.model.name_or_path
        is_first = run.progress.num_skipped == step and name is not None
        doubt = f"; no step was finite: cookbook evaluate {name} ROWS says whether its weights are" if is_first else ""
        raise FloatingPointError(f"step {step}: run.skip_nonfinite_steps is {limit}{doubt}")


def evaluate(run: "Run", services: "Services") -> str | None:
    """Evaluate all sets, unless that was done after this step. Returns a reason to stop."""
    from cookbook.run.measures import values_of_set

    progress, best = run.progress, run.metric_for_best
    if progress.is_evaluated:
        return None
    lines: list[dict[str, Any]] = []  # written together: an interrupted evaluation is repeated from its beginning
    for set_name in run.eval_sets:
        values = values_of_set(run, set_name, lambda: stop_reason(run.engine))
        if isinstance(values, str):
            return values
        label = {"eval_set": set_name} if set_name else {}
        lines.append({"step": progress.step, **label, **{f"eval_{key}": value for key, value in values.items()}})
    for line in lines:
        services.log.write(line)
    progress.is_evaluated, progress.eval_loss = True, lines[0]["eval_loss"] if lines else None
    if lines and best is not None:
        progress.best_by = lines[0][f"eval_{best.name}"] * (-1 if best.greater_is_better else 1)
    if run.recipe.run.early_stopping_patience is not None:
        progress.judge(run.recipe.run.early_stopping_threshold or 0.0)
    return None


def sample(run: "Run", services: "Services") -> str | None:
    """Continue held-out prompts, unless that was done after this step. Returns a reason to stop."""
    from cookbook.run import samples

    if run.progress.is_sampled:
        return None
    texts = samples.continuations(run, lambda: stop_reason(run.engine))
    if isinstance(texts, str):
        return texts
    services.log.samples(texts)
    run.progress.is_sampled = True
    return None


def save(run: "Run", services: "Services", *, again: bool = False) -> None:
    """Save the state after this step. Does nothing before the first step nor, unless `again`, after a save of this step
    was tried.
    """
    engine, saver, step = run.engine, services.saver, run.progress.step
    if step == 0 or (step == saver.last_step and not again):
        return
    progress = {key: value for key, value in asdict(run.progress).items() if value is not None}
    tensors = {"parameters": engine.parameter_shapes(), "counts": engine.counts()}
    recipe = run.recipe.model_dump(mode="json", exclude_none=True)
    words = {"recipe": recipe, "made_from": run.made_from, "run": services.record}
    saver.save(step, engine.pieces(), {**progress, **tensors, **words}, best_by=run.progress.rating)
    services.status.running(step, checkpoint=saver.newest_path)


def save_last(run: "Run", services: "Services") -> bool:
    """Wait for the save of the last step, and try again if it failed. Returns whether it is saved, alike on all ranks.

    Every rank must call. After a signal it is tried once more, at once.
    """
    saver, number, is_stopped = services.saver, 1, False
    saver.wait()
    while not (is_saved := run.engine.collectives.all_true(saver.failed is None)):
        if number == LAST_SAVE_TRIES or is_stopped:
            break
        number += 1
        services.log.say(
            f"saving it again in {LAST_SAVE_PAUSE_SECONDS} s (try {number} of {LAST_SAVE_TRIES}); make room"
        )
        for _ in range(LAST_SAVE_PAUSE_SECONDS):
            if is_stopped := stop_reason(run.engine) is not None:
                break
            time.sleep(1)
            saver.beat()
        save(run, services, again=True)
        saver.wait()
    return is_saved


def stop(run: "Run", services: "Services", reason: str) -> int:
    """End a run that is to be resumed. Returns the exit code."""
    save(run, services)
    services.profile.close()
    services.saver.wait()
    is_saved = run.engine.collectives.all_true(services.saver.failed is None)
    code = signals.EXIT_CODE if is_saved else 1
    step = run.progress.step
    outcome = "saved" if step else "nothing to save yet"
    if is_saved and step and run.recipe.run.resume == "auto":
        outcome += "; run the same command to resume"
        # The default folder has the strategy's name: another strategy would begin in a folder of its own.
        is_default = run.output_dir.name.endswith(f"-{run.engine.strategy.name}")
        where = f"; under another strategy with run.output_dir={run.output_dir}"
        outcome += where if is_default else ", also under another strategy"
    if not is_saved:
        outcome = f"NOT saved in {services.saver.root}: {services.saver.failed}; {services.saver.way_on}"
    services.log.say(f"stopped after step {step} ({reason}); {outcome}")
    services.log.event("stop", step, reason=reason)
    state = "stopped" if is_saved else "failed"
    reason = reason if is_saved else f"{reason}; {outcome}"
    services.status.end(state, exit_code=code, reason=reason, checkpoint=services.saver.newest_path)
    services.log.close()
    services.watch.enter("leaving")
    run.engine.close()
    return code


def finish(run: "Run", services: "Services") -> int:
    """End a run after its last step: export that, or the best checkpoint. Returns the exit code."""
    from cookbook.run.publish import export_folder, model_folder
    from cookbook.training import metrics

    engine, log, saver = run.engine, services.log, services.saver
    if not save_last(run, services):
        return stop(run, services, f"{stop_reason(engine) or 'the last'}; there is nothing to export")
    services.profile.close()
    if run.early_end is not None:
        log.say(run.early_end)
    for note in run.inputs.data.closing_notes():
        log.say(note)
    allocated, reserved = engine.collectives.all_reduce_max(
        metrics.peak_memory_gib(engine.device), metrics.peak_reserved_gib(engine.device)
    )
    if services.expected is not None:
        log.say(services.expected.compare(allocated, reserved))
        peaks = {"allocated": allocated, "reserved": reserved or None}
        log.write_record("run.json", services.record | {"peak_memory_gib": peaks})

    log.end_monitor()
    signals.stop_deferring(engine.is_main)
    if engine.is_main:
        services.watch.enter("exporting", is_alone=True)
        assert saver.newest is not None and saver.newest.step == run.progress.step
        # Everything is saved: if the process is killed from here on, the next start exports.
        services.status.end(
            "stopped", exit_code=signals.EXIT_CODE, reason=status.EXPORTING, checkpoint=saver.newest_path
        )
        if not model_folder.has_model_files(run.output_dir):
            run.write_model_files()
        # From the checkpoint, by this process: no rank must hold a whole model, and any step is exported alike.
        best = run.recipe.run.export == "best"
        with export_folder.choose_checkpoint(run.output_dir, saver.newest, is_best=best) as checkpoint:
            export_folder.export(run.output_dir, checkpoint, reopened=run.recipe.run.check_export, say=log.say)
    log.event("finish", run.progress.step, **({} if run.early_end is None else {"reason": run.early_end}))
    services.status.end("finished", exit_code=0, reason=run.early_end)
    log.close()
    services.watch.enter("leaving")
    engine.close()
    return 0


def stop_vote() -> int:
    """This process's reason to stop, as a number that can be reduced over the ranks."""
    return signals.REASONS.index(signals.requested_stop())


def stop_reason(engine: "Engine") -> str | None:
    """The reason of any rank to stop. Every rank must call."""
    return signals.REASONS[int(engine.collectives.all_reduce_max(stop_vote())[0])]


if __name__ == "__main__":
    watchdog.guard()
    try:
        exit_code = main()
    finally:
        watchdog.guard()
    sys.exit(status.note_exit(exit_code))
