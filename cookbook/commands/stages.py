"""The stages of a run before its first step, in the order in which `train.py` calls them.

Imports torch, which takes seconds, so `train.py` checks files and rows before it imports this.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from cookbook.commands import publish, shortage
from cookbook.config import plugins
from cookbook.config.objectives.forward import Batch, sequence_logps
from cookbook.config.optim.groups import build_optimizer
from cookbook.config.recipe import Recipe, dump_recipe
from cookbook.config.strategy import Strategy
from cookbook.planning.costs.flops import num_experts, sizes_of
from cookbook.planning.launch import World
from cookbook.planning.meshes import mesh_problem
from cookbook.planning.packing import Packing, decide
from cookbook.planning.plan import Plan, describe_batch
from cookbook.system import lock, signals
from cookbook.system.files import RecipeError, flatten
from cookbook.system.hardware import GIB, find_gpu
from cookbook.system.machine import num_cores
from cookbook.system.monitor import Monitor
from cookbook.system.status import Status
from cookbook.system.watch import Watch, put_away_report
from cookbook.training import adapters, memory_history, metrics, models, trackers
from cookbook.training.checkpoint import resume
from cookbook.training.checkpoint.export import saved_buffers
from cookbook.training.checkpoint.folder import Checkpoint
from cookbook.training.checkpoint.saver import Saver
from cookbook.training.data import batches
from cookbook.training.data.ahead import Ahead
from cookbook.training.data.reference import with_reference
from cookbook.training.data.sets import RowSets, TokenSets, tokenize_data
from cookbook.training.data.tokens import TokenSet
from cookbook.training.engine import Engine, engine_class, make_deterministic
from cookbook.training.memory_history import MemoryHistory
from cookbook.training.profiling import Profile

if TYPE_CHECKING:
    from cookbook.commands.forecast.memory import Memory

SIGHT_SECONDS = 10.0
"""For a new file to be seen on all machines, whose network file systems may cache."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Model folder, tokenizer and data, before anything is on a device."""

    folder: str
    """Where the model is loaded from."""
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    data: TokenSets
    steps_per_epoch: int | None
    """None for a stream."""
    max_steps: int


@dataclass(kw_only=True)
class Progress:
    """Everything besides the engine that changes during training; part of a checkpoint's `state.json`."""

    step: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    """Steps skipped because loss or gradient was not finite."""
    is_evaluated: bool = False
    """Whether the evaluation after this step is done."""
    is_sampled: bool = False
    """Whether the continuations after this step are written."""
    eval_loss: float | None = None
    """Loss on the first evaluation set after this step."""
    stream_digest: str | None = None
    """See `StepBatch.stream_digest`."""

    def advance(self, batch: batches.StepBatch, *, is_skipped: bool) -> None:
        """Count a step."""
        self.step += 1
        self.num_samples += batch.num_samples
        self.stream_digest = batch.stream_digest
        self.num_skipped += is_skipped
        self.is_evaluated, self.is_sampled, self.eval_loss = False, False, None


@dataclass(frozen=True, kw_only=True)
class Run:
    """The state of the training loop."""

    recipe: Recipe
    inputs: Inputs
    """With the reference log-probabilities, if the objective needs them."""
    packing: Packing
    made_from: dict[str, str]
    """Fingerprints of "data", "model" and "plugins", see `take_fingerprints`."""
    engine: Engine
    """Owns model and optimizer."""
    checkpoint: Checkpoint | None
    """The one that the run resumes from."""
    progress: Progress
    steps: Ahead[batches.StepBatch]
    """The remaining steps."""
    layout: batches.Layout
    eval_sets: dict[str, Callable[[], Iterable[Batch]]]
    """By name; each call iterates over a set once."""

    @property
    def output_dir(self) -> Path:
        return Path(self.recipe.run.output_dir)

    def write_model_files(self) -> None:
        """Write what an export needs besides a checkpoint, see `publish.write_model_files`. Rank 0 calls."""
        publish.write_model_files(
            self.output_dir,
            self.inputs.folder,
            self.recipe.model,
            config=self.inputs.config,
            tokenizer=self.inputs.tokenizer,
            digest=self.made_from["model"],
            buffers=saved_buffers(self.engine.transformer()) if self.recipe.adapter is None else None,
        )


@dataclass(frozen=True, kw_only=True)
class Services:
    """Logging, status, watchdog and checkpoints of a run."""

    log: metrics.RunLog
    record: dict[str, Any]
    """Content of run.json."""
    expected: "Memory | None"
    """Forecast of a GPU's memory; None on a CPU and on ranks other than 0."""
    flops: metrics.FlopCounter
    status: Status
    watch: Watch
    saver: Saver
    profile: Profile
    memory_history: MemoryHistory


def load_inputs(recipe: Recipe, plan: Plan, rows: RowSets, *, cache: Path, notes: list[str]) -> Inputs:
    """Prepare model folder, configuration, tokenizer and tokens, once per machine, under file locks.

    Args:
        notes: receives notes for the user.

    Raises:
        RecipeError: a model that cannot be loaded, or trained under this plan, or data without a target.
    """
    transformers_logging.disable_progress_bar()
    folder = models.resolve_model(
        recipe.model, seed=recipe.seed, texts=rows.texts(), fingerprint=rows.fingerprint, cache=cache
    )
    config = models.load_config(folder, recipe.data.max_length)
    decide(recipe, config)  # refuses what cannot be packed before any process waits for another
    if problem := mesh_problem(config, plan.mesh):
        raise RecipeError(f"model {folder}: {problem}")
    notes += models.kernel_notes(recipe.model, config)
    if drawn := models.random_parts(config):
        keys = ", ".join(f"{key} {value:g}" for key, value in drawn.items())
        notes.append(f"{config.model_type} has {keys}: what is drawn, and so the curve, depends on processes")
    if recipe.run.deterministic and torch.cuda.is_available() and num_experts(config) > 1:
        why = "torch counts the tokens of experts with torch.histc, which has no deterministic kernel on a GPU"
        raise RecipeError([f"run.deterministic is true, and {config.model_type} has experts: {why}; set it to false"])
    if recipe.adapter is not None:
        adapters.check_names(config, recipe.adapter)
    tokenizer = models.load_tokenizer(folder, recipe.data.chat_template)
    data = tokenize_data(rows, tokenizer, recipe.data, recipe.objective, cache=cache)
    notes += data.notes
    steps_per_epoch = batches.steps_per_epoch(data.train, recipe.batch.global_batch_size)
    return Inputs(
        folder=folder,
        config=config,
        tokenizer=tokenizer,
        data=data,
        steps_per_epoch=steps_per_epoch,
        max_steps=recipe.run.total_steps(steps_per_epoch),
    )


def start_engine(
    recipe: Recipe, strategy: Strategy, plan: Plan, world: World, *, beat: Callable[[str, int], None]
) -> Engine:
    """Start the strategy and its process group. From here on every rank must call each function.

    Args:
        beat: see `Engine`.

    Raises:
        RecipeError: machines that do not share the output folder.
    """
    if recipe.run.deterministic:
        make_deterministic()
    # The same seed on all ranks until the weights exist, since each rank contributes its shard of what it drew.
    set_seed(recipe.seed)
    beat("meeting the others", 0)
    engine = engine_class(strategy)(
        strategy,
        plan,
        world,
        recipe,
        # Data and downloads are done; under ZeRO-3 rank 0 may still read weights for minutes.
        timeout=timedelta(minutes=max(30.0, recipe.run.hang_timeout_minutes) + 10),
    )
    engine.beat = beat
    _check_folder(recipe, engine)
    return engine


def _check_folder(recipe: Recipe, engine: Engine) -> None:
    """Check that every machine sees the output folder of rank 0. Each rank writes its part of a checkpoint there, so
    that without a common folder a run would train to its end and save nothing.

    Raises:
        RecipeError: on every rank, after the process group has ended.
    """
    if engine.world.num_local == engine.world.num_processes:
        return
    folder = Path(recipe.run.output_dir)
    signature = engine.collectives.broadcast_text(lock.signature(folder))
    deadline = time.monotonic() + SIGHT_SECONDS
    while not (sees := lock.signature(folder) == signature) and time.monotonic() < deadline:
        time.sleep(0.5)
    blind = [rank for rank, found in enumerate(engine.collectives.all_gather(sees)[:, 0]) if not found]
    if blind:
        engine.close()
        ranks = f"rank{'s' * (len(blind) > 1)} {', '.join(map(str, blind))}"
        raise RecipeError(
            f"run.output_dir {folder}: {ranks} cannot see what rank 0 wrote there; several machines need one folder"
            " that all see under one path, such as on NFS: --set run.output_dir=/shared/run"
        )


def take_fingerprints(recipe: Recipe, inputs: Inputs, engine: Engine, *, cache: Path) -> dict[str, str]:
    """SHA-256 of "data", "model", and "plugins" if there are any. Computed by rank 0, from large files."""
    found = {}
    if engine.is_main:
        found["data"] = inputs.data.fingerprint(cache)
        found["model"] = models.weights_digest(Path(inputs.folder), cache=cache)
        if recipe.plugins:
            found["plugins"] = plugins.digest(recipe.plugins)
    return json.loads(engine.collectives.broadcast_text(json.dumps(found)))


def choose_packing(recipe: Recipe, inputs: Inputs, checkpoint: Checkpoint | None) -> Packing:
    """Decide `data.packing`, equally on all ranks; `auto` keeps what the run to resume had."""
    before = None if checkpoint is None else bool(checkpoint.state()["recipe"]["data"].get("packing"))
    return decide(recipe, inputs.config, before=before)


def prepare_model(recipe: Recipe, inputs: Inputs, engine: Engine) -> None:
    """Load model and adapter, build the optimizer, and wrap them in the engine."""
    if recipe.run.memory_snapshot:
        memory_history.start()
    model = load_model(inputs.folder, recipe, engine, has_adapter=recipe.adapter is not None)
    if recipe.adapter is not None:
        adapters.add_adapter(model, recipe.adapter, seed=recipe.seed)
    optimizer = build_optimizer(model, recipe.optim, recipe.compute_precision)
    engine.prepare(model, optimizer, counts_beside=recipe.optim.counts_beside)


def load_model(folder: str, recipe: Recipe, engine: Engine, *, has_adapter: bool) -> PreTrainedModel:
    """The model as training has it, before an adapter is on it; where it has one, frozen and as its kind wants."""
    quantization = adapters.quantization_options(recipe.adapter if has_adapter else None, recipe.compute_precision)
    return models.load_model(
        folder,
        recipe.model,
        packing=recipe.data.is_packed,
        dtype=engine.frozen_dtype if has_adapter else torch.float32,
        sequence_mesh=engine.sequence_mesh,
        fp8=recipe.mixed_precision == "fp8",
        **engine.load_options(is_quantized=bool(quantization)),
        **quantization,
    )


def make_run(
    recipe: Recipe,
    inputs: Inputs,
    packing: Packing,
    made_from: dict[str, str],
    engine: Engine,
    checkpoint: Checkpoint | None,
    *,
    cache: Path,
) -> Run:
    """Compute the reference, restore the checkpoint, and iterate from there over optimizer steps of a fixed batch."""
    layout = batches.Layout(
        num_ranks=engine.mesh.data_parallel_size,
        rank=engine.data_parallel_rank,
        pad_id=inputs.tokenizer.pad_token_id,
        micro_batch_size=recipe.batch.micro_batch_size,
        micro_batch_tokens=recipe.batch.micro_batch_tokens,
        packing=recipe.data.is_packed,
        length_multiple=engine.mesh.length_multiple(recipe.data.max_length),
        sequence_size=engine.mesh.sequence,
        sequence_rank=engine.mesh.sequence_rank(engine.world.rank),
        shares_samples=recipe.objective.shares_samples,
    )
    data = inputs.data
    if recipe.objective.needs_reference:
        data = with_reference(
            data,
            [made_from["model"], recipe.mixed_precision, engine.strategy.name, str(recipe.adapter)],
            cache=cache,
            all_true=engine.collectives.all_true,
            compute=lambda tokens: engine.collect(
                sequence_logps, batches.indexed_batches(tokens, layout), len(tokens.lengths), what="reference"
            ),
        )
    # After the reference, which the untrained model computes.
    progress = Progress()
    if checkpoint is not None:
        state = resume.load(checkpoint, engine.parameter_shapes(), engine.restore)
        progress = Progress(**{field.name: state[field.name] for field in fields(Progress) if field.name in state})
    if progress.step > inputs.max_steps:
        raise RecipeError([f"the run has {inputs.max_steps} steps, and its checkpoint is of step {progress.step}"])
    steps = batches.train_steps(
        data.train,
        layout,
        seed=recipe.seed,
        global_batch_size=recipe.batch.global_batch_size,
        num_samples_consumed=progress.num_samples,
        stream_digest=progress.stream_digest,
    )
    return Run(
        recipe=recipe,
        inputs=replace(inputs, data=data),
        packing=packing,
        made_from=made_from,
        engine=engine,
        checkpoint=checkpoint,
        progress=progress,
        steps=Ahead(islice(steps, inputs.max_steps - progress.step)),
        layout=layout,
        eval_sets={name: partial(batches.eval_batches, tokens, layout) for name, tokens in data.eval.items()},
    )


def start_services(run: Run, failed_after: list[int], notes: list[str], watch: Watch) -> Services:
    """Open the log, after setting an earlier run aside if this one does not resume it, and write what is known before
    the first step.

    Args:
        failed_after: result of `status.past_failures`.
        notes: notes for the user, logged here.
        watch: the watchdog of this process.
    """
    engine, checkpoint = run.engine, run.checkpoint
    is_own = checkpoint is not None and checkpoint.path.resolve().parent == (run.output_dir / "checkpoints").resolve()
    repeated = trackers.logged_after(run.output_dir / "metrics.jsonl", run.progress.step) if is_own else {}
    log = metrics.RunLog(
        run.output_dir,
        is_main=engine.is_main,
        max_steps=run.inputs.max_steps,
        resumed_step=run.progress.step if is_own else None,
        is_evaluated=run.progress.is_evaluated,
        is_sampled=run.progress.is_sampled,
        log_every_steps=run.recipe.run.log_every_steps,
    )
    log.write_text("recipe.yaml", dump_recipe(run.recipe))
    if engine.is_main:
        put_away_report(run.output_dir)
        publish.sweep_exports(run.output_dir)
        try:
            run.write_model_files()
        except Exception as error:  # for a full disk, tokenizers raises something other than OSError
            log.say(f"{run.output_dir / publish.MODEL_FILES} could not be written: {error}; retried at the end")
    expected, flops = _forecast(run, notes), _flop_counter(run, notes)
    shortages = shortage.history()
    record = _record(run, expected, shortages)
    if engine.is_main:
        record["step_forecast"] = _step_forecast(run)
        record["machines"] = engine.plan.num_processes // engine.world.num_local
    log.write_record("run.json", record)
    for answered in shortages[-1:] if is_own else shortages:
        log.event("out_of_memory", run.progress.step, **answered)
    started = {"strategy": engine.strategy.name, "processes": engine.plan.num_processes}
    log.event("start", run.progress.step, **started, resumed_from=record["resumed_from"])
    for line in notes:
        log.say(line)
    if engine.is_main:
        log.screen.header(f"RUN {run.output_dir}", record["header"].items())
        settings = flatten(run.recipe.model_dump(mode="json", exclude_none=True))
        settings |= {"strategy": engine.strategy.path, "processes": engine.plan.num_processes}
        log.followers += [
            trackers.Tracker(name, run.output_dir, settings, step=run.progress.step, repeated=repeated, say=log.say)
            for name in run.recipe.run.trackers
        ]
    attempt = engine.collectives.broadcast_text(uuid.uuid4().hex[:8])
    world = engine.world
    if run.recipe.run.monitor and world.local_rank == 0:  # an earlier run's folder was set aside before the broadcast
        log.monitor = Monitor(
            run.output_dir, first_rank=world.rank, num_ranks=world.num_local, machine=world.rank // world.num_local
        )
    return Services(
        log=log,
        record=record,
        expected=expected,
        flops=flops,
        status=Status(run.output_dir, is_main=engine.is_main, step=run.progress.step, failed_after=failed_after),
        watch=watch,
        saver=_start_saver(run, log, watch, attempt),
        profile=Profile(run.recipe.run.profile, run.output_dir, world.rank, engine.transformer(), log.say),
        memory_history=MemoryHistory(
            run.recipe.run.memory_snapshot, run.output_dir, world.rank, engine.device, log.say
        ),
    )


def _record(run: Run, expected: "Memory | None", shortages: list[dict[str, Any]]) -> dict[str, Any]:
    """What run.json has before the first step."""
    engine, checkpoint = run.engine, run.checkpoint
    record = metrics.environment_record(engine.device)
    if run.recipe.plugins:
        record["plugins"] = plugins.record(run.recipe.plugins)
    record["deterministic"] = torch.are_deterministic_algorithms_enabled()
    record |= {"strategy": engine.describe(), "resumed_from": None if checkpoint is None else str(checkpoint.path)}
    if expected is not None:
        names = "allocated", "reserved", "needed", "moment", "parts"
        record["forecast"] = {name: getattr(expected, name) for name in names}
    written = run.recipe.model_dump(mode="json", exclude_unset=True)
    record |= {"max_steps": run.inputs.max_steps, "written_settings": list(flatten(written))}
    record["packing"] = _padding(run)
    record["header"] = _header(run, record, expected)
    if shortages:
        record["out_of_memory"] = shortages
    return record


def _padding(run: Run) -> dict[str, Any]:
    """Whether rows are packed; else why not, and what share of the positions of the first steps is padding."""
    found: dict[str, Any] = {"is_on": run.packing.is_on}
    if run.packing.is_on:
        return found
    train, size = run.inputs.data.train, run.recipe.batch.global_batch_size
    share = None  # not known of a stream
    if isinstance(train, TokenSet) and run.engine.is_main:
        order = batches.epoch_order(train, run.recipe.seed, 0)
        share = batches.measure(train, order, run.layout, global_batch_size=size).padding
    return found | {"why": run.packing.why, "can_pack": run.packing.can_pack, "padding": share}


def _forecast(run: Run, notes: list[str]) -> "Memory | None":
    if run.engine.device.type != "cuda" or not run.engine.is_main:
        return None  # a CPU process has more memory than its tensors
    from cookbook.commands import forecast

    try:
        gpu = find_gpu(torch.cuda.get_device_name(run.engine.device))
        return forecast.of_run(run.inputs.config, run.recipe, run.engine.strategy, run.engine.plan, gpu)
    except Exception as error:  # the run does not depend on it
        notes.append(f"no forecast of memory: {error}")
        return None


def _step_forecast(run: Run) -> dict[str, Any]:
    """The time of a step by its parts, or `none` with why there is no forecast of it."""
    if run.engine.device.type != "cuda":
        return {"none": "there is none for a CPU"}
    from cookbook.commands import forecast

    train, recipe = run.inputs.data.train, run.recipe
    num_tokens = None
    if isinstance(train, TokenSet):
        num_tokens = len(train.ids) / len(train) * recipe.batch.global_batch_size
    try:
        gpu = find_gpu(torch.cuda.get_device_name(run.engine.device))
        found = forecast.time_of_run(run.inputs.config, recipe, run.engine.strategy, run.engine.plan, gpu, num_tokens)
    except Exception as error:  # the run does not depend on it
        return {"none": str(error)}
    return {"none": found} if isinstance(found, str) else found.record()


def _flop_counter(run: Run, notes: list[str]) -> metrics.FlopCounter:
    peak, sizes = metrics.device_peak_flops(run.engine.device), None
    if peak is not None and run.engine.is_main:
        from cookbook.commands.forecast.skeleton import skeleton

        try:
            sizes = sizes_of(run.inputs.config, skeleton(run.inputs.config, run.recipe))
        except Exception as error:  # the run does not depend on it
            notes.append(f"mfu is not logged: {error}")
    return metrics.FlopCounter(sizes=sizes, peak=peak)


def _header(run: Run, record: dict[str, Any], expected: "Memory | None") -> dict[str, str]:
    """What the run is, for people."""
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
        eight_bits = f" in {models.num_converted(engine.model)} matrices{of}"
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
        is_done = run.progress.step == inputs.max_steps
        rows["steps"] += "; all were done before" if is_done else f"; goes on after step {run.progress.step:,}"
    if expected is not None:
        low, high = (size / GIB for size in expected.reserved)
        rows["memory"] = f"forecast {expected.allocated / GIB:.2f} GiB a GPU at {expected.moment}"
        rows["memory"] += f", {low:.2f} to {high:.2f} reserved"
    return rows


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
        stop_requested=lambda: signals.requested() is not None,
    )
    if run.checkpoint is not None:
        saver.start_from(run.checkpoint)
        log.say(f"resuming from {run.checkpoint.path}")
    return saver
