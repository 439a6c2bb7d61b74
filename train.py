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
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

from cookbook import faults, launch, lock, machine, signals, status
from cookbook.data.sets import read_data, tokenize_data
from cookbook.ds_config import run_name
from cookbook.files import RecipeError
from cookbook.plan import Plan, describe_batch, load_pair, make_plan
from cookbook.recipe import Recipe, dump_recipe
from cookbook.strategy import Strategy, load_strategy

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
        try:
            return train(recipe, strategy, plan, world, notes)
        except Exception as error:
            status.fail(Path(recipe.run.output_dir), error)
            raise
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


def train(recipe: Recipe, strategy: Strategy, plan: Plan, world: launch.World, notes: list[str]) -> int:
    output_dir = Path(recipe.run.output_dir)
    # Rows come first: a broken file is told before seconds go into imports, and no process group waits for it.
    rows = read_data(recipe.data, recipe.objective)

    is_restarted = False
    failed_after: list[int] = []
    if world.rank == 0:
        lock.hold(output_dir)
        is_restarted = status.is_restart(output_dir)
        if is_restarted or recipe.run.resume == "auto":
            failed_after = status.past_failures(output_dir)

    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns from every process

    from accelerate.utils import set_seed
    from transformers.utils import logging as transformers_logging

    from cookbook import adapters, metrics, models, publish
    from cookbook.checkpoint import resume
    from cookbook.checkpoint.saver import Saver
    from cookbook.data import batches
    from cookbook.data.reference import with_reference
    from cookbook.engine import Engine, build_ops
    from cookbook.objectives import build_objective, sequence_logps
    from cookbook.optim import build_optimizer, set_learning_rate
    from cookbook.schedule import learning_rate, peak_learning_rate
    from cookbook.watch import Watch

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
    set_seed(recipe.seed)
    engine = Engine(
        strategy,
        plan,
        world,
        mixed_precision=recipe.mixed_precision,
        micro_batch_size=recipe.batch.micro_batch_size or 1,
        max_grad_norm=recipe.optim.max_grad_norm,
        run_name=run_name(output_dir),
        # Data and downloads are done; under ZeRO-3 the first process may still read weights for minutes.
        timeout=timedelta(minutes=max(30.0, recipe.run.hang_timeout_minutes) + 10),
    )
    made_from = {
        "data": data.fingerprint,
        "model": engine.tell_all(models.weights_digest(Path(name)) if engine.is_main else ""),
    }
    checkpoint = resume.choose(
        recipe,
        output_dir / "checkpoints",
        made_from,
        is_restarted=engine.tell_all(str(is_restarted)) == "True",
        rank=world.rank,
        num_ranks=world.num_processes,
        agree=engine.agree,
        tell_all=engine.tell_all,
        say=notes.append,
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
        data = with_reference(
            data,
            [made_from["model"], recipe.mixed_precision, strategy.name, str(recipe.adapter)],
            cache=CACHE,
            agree=engine.agree,
            compute=lambda tokens: engine.collect(
                sequence_logps, batches.indexed_batches(tokens, layout), len(tokens.lengths)
            ),
        )
    # After the reference, which is of the model before training.
    state: dict[str, Any] = {"step": 0, "num_samples": 0, "num_skipped": 0, "is_evaluated": False}
    if checkpoint is not None:
        state = resume.load(checkpoint, engine.parameter_shapes(), engine.restore)
    steps = batches.train_steps(
        data.train,
        layout,
        seed=recipe.seed,
        global_batch_size=recipe.batch.global_batch_size,
        num_samples_consumed=state["num_samples"],
    )

    signals.hold()  # from here on there is something to save
    goes_on = checkpoint is not None and checkpoint.path.resolve().parent == (output_dir / "checkpoints").resolve()
    log = metrics.RunLog(
        output_dir, is_main=engine.is_main, max_steps=max_steps, resumed_step=state["step"] if goes_on else None
    )
    log.write_text("recipe.yaml", dump_recipe(recipe))
    if engine.is_main:
        publish.write_frame(
            output_dir, name, recipe.model, config=config, tokenizer=tokenizer, digest=made_from["model"]
        )
    resumed_from = None if checkpoint is None else str(checkpoint.path)
    record = metrics.environment_record(engine.device)
    record |= {"strategy": engine.describe(), "resumed_from": resumed_from}
    expected = None
    if engine.device.type == "cuda" and engine.is_main:  # the memory of a CPU process is more than its tensors
        from cookbook import forecast

        try:
            expected = forecast.of_run(config, recipe, strategy, plan)
            record["forecast"] = {
                "allocated": expected.allocated,
                "reserved": expected.reserved,
                "moment": expected.moment,
            }
        except Exception as error:  # whatever it is, the run can do without
            notes.append(f"no forecast of memory: {error}")
    log.write_record("run.json", record)
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

    attempt = engine.tell_all(uuid.uuid4().hex[:8])
    run_status = status.Status(output_dir, is_main=engine.is_main, step=state["step"], failed_after=failed_after)
    watch = Watch(output_dir, world.rank, plan.num_processes, recipe.run.hang_timeout_minutes * 60, attempt=attempt)
    engine.beat = watch.beat
    saver = Saver(
        output_dir / "checkpoints",
        rank=world.rank,
        num_ranks=plan.num_processes,
        attempt=attempt,
        keep_last=recipe.run.keep_last,
        keep_best=recipe.run.keep_best,
        in_background=recipe.run.save_in_background,
        say=log.say,
        beat=lambda: watch.beat("save", engine.current_step),
        is_hurried=lambda: signals.requested() is not None,
    )
    if checkpoint is not None:
        saver.start_from(checkpoint)
        log.say(f"goes on from {checkpoint.path}")

    def stop_vote() -> int:
        return signals.REASONS.index(signals.requested())

    def stop_reason() -> str | None:
        return signals.REASONS[int(engine.maxima(stop_vote())[0])]

    def evaluate() -> str | None:
        """Returns why it broke off."""
        if state["is_evaluated"]:
            return None
        lines = []  # written together: an evaluation that breaks off is made again from its beginning
        for set_name, tokens in data.eval.items():
            found = engine.evaluate(objective.run, batches.eval_batches(tokens, layout), stop_reason)
            if isinstance(found, str):
                return found
            label = {"eval_set": set_name} if set_name else {}
            lines.append({"step": state["step"], **label, **{f"eval_{key}": value for key, value in found.items()}})
        for line in lines:
            log.write(line)
            state.setdefault("eval_loss", line["eval_loss"])
        state["is_evaluated"] = True
        return None

    def save() -> None:
        if state["step"] in (0, saver.last_step):
            return
        words = {"recipe": recipe.model_dump(mode="json", exclude_none=True), "made_from": made_from, "run": record}
        tensors = {"parameters": engine.parameter_shapes(), "counts": engine.counts()}
        saver.save(state["step"], engine.pieces(), {**state, **tensors, **words}, best_by=state.get("eval_loss"))
        run_status.running(state["step"], checkpoint=saver.newest_path)

    def stop(reason: str) -> int:
        save()
        saver.wait()
        is_saved = engine.agree(saver.failed is None)
        code = signals.EXIT_CODE if is_saved else 1
        log.say(f"stopped after step {state['step']} ({reason}); {'saved' if is_saved else 'NOT saved'}")
        state_word = "stopped" if is_saved else "failed"
        run_status.end(state_word, exit_code=code, reason=reason, checkpoint=saver.newest_path)
        log.close()
        watch.close()
        engine.close()
        return code

    run, first_step = recipe.run, state["step"]
    reason, is_time_to_save = stop_reason(), 0.0
    while True:
        step = state["step"]
        is_last = step == max_steps
        if step == 0 or is_last or is_due(step, run.eval_every_steps):
            reason = reason or evaluate()
        if is_last or is_time_to_save or is_due(step, run.save_every_steps) or (step == 1 and run.save_first_step):
            save()
        if run.stop_after_steps and step - first_step >= run.stop_after_steps and not is_last:
            reason = reason or "run.stop_after_steps"
        if reason is not None:
            return stop(reason)
        if is_last:
            break
        faults.at("data.next", step + 1)
        batch = next(steps)
        started = time.perf_counter()
        lr = learning_rate(step, max_steps, peak, recipe.schedule)
        set_learning_rate(engine.optimizer, lr)
        engine.begin_step(step + 1, recipe.seed)
        means = engine.gradients(objective.run, batch.micro_batches, getattr(batch, objective.unit))
        grad_norm = engine.step()
        seconds = time.perf_counter() - started
        memory, vote, is_time_to_save = engine.maxima(
            metrics.peak_memory_gib(engine.device), stop_vote(), saver.is_time(run.save_every_minutes)
        )
        reason = signals.REASONS[int(vote)]
        # Under fp16 that is how the loss scale finds its place.
        is_skipped = not math.isfinite(grad_norm) and recipe.mixed_precision != "fp16"
        state = {
            "step": step + 1,
            "num_samples": state["num_samples"] + batch.num_samples,
            "num_skipped": state["num_skipped"] + is_skipped,
            "is_evaluated": False,
        }
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
                "peak_memory_gib": memory,
                **flops.mfu(batch.num_tokens, batch.num_sequences, seconds, plan.num_processes),
            }
        )
        if is_skipped:
            log.say(f"step {step + 1} was left out, the weights are as before: its loss or gradient is not finite")
            bad = engine.nonfinite_micro_batches()
            metrics.record_nonfinite(output_dir, step + 1, world.rank, batch, bad, tokenizer.decode)
            if state["num_skipped"] > run.skip_nonfinite_steps:
                raise FloatingPointError(f"step {step + 1}: run.skip_nonfinite_steps is {run.skip_nonfinite_steps}")
    saver.wait()
    for note in data.closing_notes():
        log.say(note)
    allocated, reserved = engine.maxima(
        metrics.peak_memory_gib(engine.device), metrics.peak_reserved_gib(engine.device)
    )
    if expected is not None:
        log.say(expected.compared(allocated, reserved))
        log.write_record("run.json", record | {"peak_memory_gib": {"allocated": allocated, "reserved": reserved}})

    watch.close()
    signals.let_go(engine.is_main)
    if engine.is_main:
        if saver.newest is None or saver.newest.step != max_steps:
            raise OSError(f"the last step could not be saved, so there is nothing to export: {saver.failed}")
        # Everything is saved: whatever ends it from here on, another start exports.
        run_status.end("stopped", exit_code=signals.EXIT_CODE, reason="export", checkpoint=saver.newest_path)
        publish.export(output_dir, saver.newest, reopened=False, say=log.say)
    run_status.end("finished", exit_code=0)
    log.close()
    engine.close()
    return 0


def is_due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step > 0 and step % every == 0


if __name__ == "__main__":
    sys.exit(status.note_exit(main()))
