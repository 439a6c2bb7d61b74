"""Services around the loop of a run: its logs and records, forecasts, status, watchdog, monitor and checkpoints."""

import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cookbook.config import plugins
from cookbook.config.callbacks import callbacks
from cookbook.config.recipe import dump_recipe
from cookbook.run import forecasts, shortage
from cookbook.run.observers import Observer
from cookbook.run.publish import export_folder, model_folder
from cookbook.run.spending import Meter, meter
from cookbook.run.stages import Run
from cookbook.start.run_plan import describe_batch
from cookbook.system import optional, signals, versions
from cookbook.system.files import flatten
from cookbook.system.hardware import GIB
from cookbook.system.machine import num_cores
from cookbook.system.monitor import Monitor
from cookbook.system.record_files import METRICS, RUN
from cookbook.system.record_forms import OfMemory
from cookbook.system.status import Status
from cookbook.system.watchdog import Watch, put_away_report
from cookbook.training import metrics, trackers
from cookbook.training.checkpoint.saver import Saver
from cookbook.training.data import batches
from cookbook.training.data.tokens import TokenSet
from cookbook.training.models.efficiency import compile_counts
from cookbook.training.models.fp8 import num_converted
from cookbook.training.profiling import Profile

if TYPE_CHECKING:
    from cookbook.run.forecasts import Memory

STEPS_TO_COMPILE = 4
"""Steps of a start within which batches of other lengths come, for which layers are compiled again."""


@dataclass(frozen=True, kw_only=True)
class Services:
    """Logging, status, watchdog and checkpoints of a run."""

    log: metrics.RunLog
    record: dict[str, Any]
    """Content of run.json."""
    expected: "Memory | None"
    """Forecast of a GPU's memory; None on a CPU and on ranks other than 0."""
    flops: forecasts.FlopCounter
    meter: Meter
    status: Status
    watch: Watch
    saver: Saver
    profile: Profile

    def end_step(self, run: Run, first_step: int) -> None:
        """Ends the profile of a step; after a start's first ones tells what torch's compiler made of the layers."""
        step = run.progress.step
        self.profile.end_step(step)
        if run.recipe.model.compile and step == first_step + STEPS_TO_COMPILE:
            counts = compile_counts()
            self.log.event("compiled", step, **counts)
            if counts["graph_breaks"] or counts["given_up"]:
                what = f"model.compile: {counts['graph_breaks']} graph breaks, {counts['given_up']} calls given up"
                what += f" ({'; '.join(counts['reasons'])})" * bool(counts["reasons"])
                how = "parts of the layers run uncompiled; TORCH_LOGS=graph_breaks,recompiles names them"
                self.log.say(f"{what}: {how}", "bold red")


def start_services(
    run: Run, failed_after: list[int], notes: list[str], watch: Watch, digests: dict[str, str]
) -> Services:
    """Open the log, after setting an earlier run aside if this one does not resume it, and write what is known before
    the first step.

    Args:
        failed_after: result of `status.past_failures`.
        notes: notes for the user, logged here.
        watch: the watchdog of this process.
        digests: SHA-256 of the files that the recipe was read from.
    """
    engine, world = run.engine, run.engine.world
    earlier = run.output_dir if engine.is_main and _is_in_its_folder(run) else None
    of_run = meter(run.recipe.run.price_per_gpu_hour, engine.plan.num_processes, earlier)
    flops = forecasts.flop_counter(run, notes)
    log, record, expected = _open_log(run, notes, digests)
    watch.tell = partial(_tell_of_hang, log)
    attempt = engine.collectives.broadcast_text(uuid.uuid4().hex[:8])
    if run.recipe.run.monitor and world.local_rank == 0:  # an earlier run's folder was set aside before the broadcast
        log.monitor = Monitor(
            run.output_dir, first_rank=world.rank, num_ranks=world.num_local, machine=world.rank // world.num_local
        )
    return Services(
        log=log,
        record=record,
        expected=expected,
        flops=flops,
        meter=of_run,
        status=Status(
            run.output_dir,
            is_main=engine.is_main,
            step=run.progress.step,
            failed_after=failed_after,
            price=of_run.price,
        ),
        watch=watch,
        saver=_start_saver(run, log, watch, attempt),
        profile=Profile(run.recipe.run.profile, run.output_dir, world.rank, engine.transformer(), log.say),
    )


def _is_in_its_folder(run: Run) -> bool:
    """Return whether the checkpoint that a run resumes from is its own, so that its records are continued."""
    return run.checkpoint is not None and run.checkpoint.is_in(run.output_dir / "checkpoints")


def _open_log(
    run: Run, notes: list[str], digests: dict[str, str]
) -> tuple[metrics.RunLog, dict[str, Any], "Memory | None"]:
    """The log with what is known of the run in it, the content of run.json, and the forecast of a GPU's memory."""
    engine, step, is_own = run.engine, run.progress.step, _is_in_its_folder(run)
    repeated = trackers.steps_logged_after(run.output_dir / METRICS, step) if is_own else {}
    log = metrics.RunLog(
        run.output_dir,
        is_main=engine.is_main,
        max_steps=run.inputs.max_steps,
        resumed_step=step if is_own else None,
        is_evaluated=run.progress.is_evaluated,
        is_sampled=run.progress.is_sampled,
        log_every_steps=run.recipe.run.log_every_steps,
        counted="tokens" if run.recipe.objective.num_scores is None else "scores",
    )
    log.write_text("recipe.yaml", dump_recipe(run.recipe))
    if engine.is_main:
        _prepare_folder(run, log)
    expected = forecasts.memory(run, notes)
    shortages = shortage.history()
    record = _record(run, expected, shortages)
    record["recipe_files"] = [{"file": file, "sha256": sha256} for file, sha256 in digests.items()]
    log.write_record(RUN, record)
    if engine.is_main:  # before the first event
        settings = flatten(run.recipe.model_dump(mode="json", exclude_none=True))
        settings |= {"strategy": engine.strategy.path, "processes": engine.plan.num_processes}
        log.followers += _observers(run, log)
        log.followers += [
            trackers.Tracker(name, run.output_dir, settings, options, step=step, repeated=repeated, say=log.say)
            for name, options in run.recipe.run.trackers.items()
        ]
    for answered in shortages[-1:] if is_own else shortages:
        log.event("out_of_memory", step, **answered)
    started = {"strategy": engine.strategy.name, "processes": engine.plan.num_processes}
    log.event("start", step, **started, resumed_from=record["resumed_from"])
    if unused := optional.unused_packages():
        why = f"since {optional.KEY} does not name them"
        notes.append(f"installed, and not used, {why}: {', '.join(unused)}; the curve is that without them")
    for line in notes:
        log.say(line)
    if engine.is_main:
        log.screen.header(f"RUN {run.output_dir}", record["header"].items())
    return log, record, expected


def _observers(run: Run, log: metrics.RunLog) -> list[Observer]:
    """The callbacks of the recipe."""
    known, is_alone = callbacks(), not run.recipe.run.trackers
    folders = {name: run.output_dir / "callbacks" / name for name in run.recipe.run.callbacks}
    return [
        Observer(known[name], folder, run.engine, say=log.say, is_alone=is_alone) for name, folder in folders.items()
    ]


def _prepare_folder(run: Run, log: metrics.RunLog) -> None:
    """Remove what earlier starts have left, and write what an export will need."""
    put_away_report(run.output_dir)
    export_folder.sweep_exports(run.output_dir)
    try:
        run.write_model_files()
    except Exception as error:  # for a full disk, tokenizers raises something other than OSError
        log.say(f"{run.output_dir / model_folder.MODEL_FILES} could not be written: {error}; retried at the end")


def _record(run: Run, expected: "Memory | None", shortages: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of run.json before the first step."""
    engine, checkpoint = run.engine, run.checkpoint
    record = metrics.environment_record(engine.device)
    if run.recipe.plugins:
        record["plugins"] = plugins.record(run.recipe.plugins)
    if untested := versions.untested_libraries():
        record["untested"] = untested
    if kernels := optional.record():
        record["kernels"] = kernels
    if (best := run.metric_for_best) is not None:
        record["best_by"] = {"metric": best.name, "greater_is_better": best.greater_is_better}
    held_out = {name: tokens.fingerprint for name, tokens in run.inputs.data.eval.items()} if engine.is_main else {}
    record["rows"] = {"train": run.made_from["data"], "held_out": held_out}
    record["deterministic"] = torch.are_deterministic_algorithms_enabled()
    record |= {"strategy": engine.describe(), "resumed_from": None if checkpoint is None else str(checkpoint.path)}
    if expected is not None:
        record["forecast"] = {name: getattr(expected, name) for name in OfMemory.model_fields}
    written = run.recipe.model_dump(mode="json", exclude_unset=True)
    record |= {"max_steps": run.inputs.max_steps, "written_settings": list(flatten(written))}
    record["packing"] = _padding(run)
    record["header"] = _header(run, record, expected)
    if shortages:
        record["out_of_memory"] = shortages
    if engine.is_main:
        record["step_forecast"] = forecasts.step_time(run, _tokens_of_step(run))
        record["machines"] = engine.plan.num_processes // engine.world.num_local
    return record


def _padding(run: Run) -> dict[str, Any]:
    """Record whether rows are packed; else why not, and what share of the positions of the first steps is padding."""
    record: dict[str, Any] = {"is_on": run.packing.is_on}
    if run.packing.is_on:
        return record
    train, size = run.inputs.data.train, run.recipe.batch.global_batch_size
    share = None  # not known of a stream
    if isinstance(train, TokenSet) and run.engine.is_main:
        order = batches.epoch_order(train, run.recipe.seed, 0)
        share = batches.measure(train, order, run.layout, global_batch_size=size).padding
    return record | {"why": run.packing.why, "can_pack": run.packing.can_pack, "padding": share}


def _tokens_of_step(run: Run) -> float | None:
    """The mean tokens of a step; None for a stream, of which it is not known."""
    train = run.inputs.data.train
    return len(train.ids) / len(train) * run.recipe.batch.global_batch_size if isinstance(train, TokenSet) else None


def _header(run: Run, record: dict[str, Any], expected: "Memory | None") -> dict[str, str]:
    """Describe the run to people, as names and values."""
    recipe, inputs, engine, plan = run.recipe, run.inputs, run.engine, run.engine.plan
    trained = "all trained"
    if engine.num_trained != engine.num_parameters:
        trained = f"{engine.num_trained:,} trained ({engine.num_trained / engine.num_parameters:.2%})"
    if recipe.adapter is not None:
        trained += f", {recipe.adapter.name} of rank {recipe.adapter.rank}"
    train, hardware = inputs.data.train, record["hardware"]
    size = "stream"
    if isinstance(train, TokenSet):
        size = f"{len(train):,} {recipe.objective.sample}s, {len(train.ids):,} tokens"
    simulated = " (simulated: no speeds)" if hardware.get("simulated") else ""
    many = "s" if plan.num_processes > 1 else ""
    device = f"process{many and 'es'} on {num_cores()} CPU cores"
    if "gpu" in hardware:
        device = f"GPU{many}, {hardware['gpu']}{simulated}"
    machines = plan.num_processes // engine.world.num_local
    eight_bits = ""
    if recipe.mixed_precision == "fp8":
        of = " of the first stage" if engine.mesh.pipeline > 1 else ""
        eight_bits = f" in {num_converted(engine.model)} matrices{of}"
    padding = "none, samples are packed"
    if not (packing := record["packing"])["is_on"]:
        share = "an unknown share" if packing["padding"] is None else f"{packing['padding']:.0%}"
        padding = f"{share} of all positions: {packing['why']}"
    rows = {
        "model": f"{inputs.config.model_type}, {engine.num_parameters:,} parameters, {trained}",
        "data": f"{size}; at most {recipe.data.max_length:,} tokens each",
        "machine": f"{plan.num_processes} {device}" + (f" on {machines} machines" if machines > 1 else ""),
        "strategy": f"{engine.strategy.name}, precision {recipe.mixed_precision}{eight_bits}",
        "batch": describe_batch(recipe, plan),
        "padding": padding,
        "steps": f"{inputs.max_steps:,}, {inputs.steps_per_epoch or 'an unknown number'} an epoch",
    }
    if run.progress.step:
        rows["steps"] += "; all were done before" if run.is_over else f"; resumes after step {run.progress.step:,}"
    if expected is not None:
        low, high = (size / GIB for size in expected.reserved)
        rows["memory"] = f"forecast {expected.allocated / GIB:.2f} GiB a GPU at {expected.moment}"
        rows["memory"] += f", {low:.2f} to {high:.2f} reserved"
    return rows


def _tell_of_hang(log: metrics.RunLog, what: str, step: int) -> None:
    """Write the event of a hang, and wait a moment for the trackers: the process ends at once. From another thread."""
    log.event("hang", step, reason=what)
    for follower in log.followers:
        if isinstance(follower, trackers.Tracker):  # a callback is the main thread's, which hangs
            follower.close(trackers.HANG_SECONDS)


def _start_saver(run: Run, log: metrics.RunLog, watch: Watch, attempt: str) -> Saver:
    settings, engine = run.recipe.run, run.engine
    saver = Saver(
        run.output_dir / "checkpoints",
        rank=engine.world.rank,
        num_ranks=engine.plan.num_processes,
        attempt=attempt,
        keep_last=settings.keep_last,
        keep_best=settings.keep_best,
        in_background=settings.save_in_background,
        say=log.say,
        on_save=partial(log.event, "save"),
        timeout_seconds=watch.timeout_seconds / 2,  # a save must be given up before it passes for a hang
        beat=lambda: watch.beat("save", engine.current_step),
        stop_requested=lambda: signals.requested_stop() is not None,
    )
    if run.checkpoint is not None:
        saver.start_from(run.checkpoint)
        log.say(f"resuming from {run.checkpoint.path}")
    return saver
