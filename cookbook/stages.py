"""The stages of a run before its first step, in the order in which `train.py` goes through them.

Imports torch and what is built on it, which takes seconds: files and rows are looked at before.
"""

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
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from cookbook import adapters, metrics, models, plugins, publish, signals
from cookbook.checkpoint import resume
from cookbook.checkpoint.folder import Checkpoint
from cookbook.checkpoint.saver import Saver
from cookbook.costs.flops import sizes_of
from cookbook.data import batches
from cookbook.data.ahead import Ahead
from cookbook.data.reference import with_reference
from cookbook.data.sets import RowSets, TokenSets, tokenize_data
from cookbook.ds_config import run_name
from cookbook.engine import Batch, Engine, engine_class, make_deterministic
from cookbook.files import RecipeError
from cookbook.launch import World
from cookbook.objectives.forward import sequence_logps
from cookbook.optim.groups import build_optimizer
from cookbook.plan import Plan, describe_batch
from cookbook.recipe import Recipe, dump_recipe
from cookbook.status import Status
from cookbook.strategy import Strategy
from cookbook.watch import Watch, put_away_report

if TYPE_CHECKING:
    from cookbook.forecast.memory import Memory


@dataclass(frozen=True, kw_only=True)
class Material:
    """What is trained, and on what; nothing of it is on a device yet."""

    folder: str
    """Of the model."""
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    data: TokenSets
    steps_per_epoch: int | None
    """None for a stream."""
    max_steps: int


@dataclass(kw_only=True)
class Progress:
    """How far a run is. All that changes in the loop, and `state.json` of a checkpoint begins with it."""

    step: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    """Steps left out because loss or gradient was not finite."""
    is_evaluated: bool = False
    """After this step."""
    eval_loss: float | None = None
    """Of the first evaluation set, after this step."""
    stream_digest: str | None = None
    """Of what a stream gave up to this step."""

    def advance(self, batch: batches.StepBatch, *, is_skipped: bool) -> None:
        """One step on."""
        self.step += 1
        self.num_samples += batch.num_samples
        self.stream_digest = batch.stream_digest
        self.num_skipped += is_skipped
        self.is_evaluated, self.eval_loss = False, None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the loop trains with."""

    recipe: Recipe
    material: Material
    """Its data with the reference, if the objective needs one."""
    made_from: dict[str, str]
    """Digests of "data", "model" and "plugins", see `take_digests`."""
    engine: Engine
    """Holds model and optimizer."""
    checkpoint: Checkpoint | None
    """That it goes on from."""
    progress: Progress
    steps: Ahead[batches.StepBatch]
    """From there on, to the last."""
    eval_sets: dict[str, Callable[[], Iterable[Batch]]]
    """By name; each call goes through a set once."""

    @property
    def output_dir(self) -> Path:
        return Path(self.recipe.run.output_dir)


@dataclass(frozen=True, kw_only=True)
class Books:
    """Who writes down what the run does, and who watches over it."""

    log: metrics.RunLog
    record: dict[str, Any]
    """run.json."""
    expected: "Memory | None"
    """Forecast of a GPU's memory; None on a CPU, and on other processes than the main one."""
    flops: metrics.FlopCounter
    status: Status
    watch: Watch
    saver: Saver


def load_material(recipe: Recipe, rows: RowSets, *, cache: Path, notes: list[str]) -> Material:
    """Model folder, configuration, tokenizer and tokens: made or fetched once per machine, under file locks.

    Args:
        notes: gets what a user should know of.

    Raises:
        RecipeError: a model that cannot be had or trained, or data that has nothing to train on.
    """
    transformers_logging.disable_progress_bar()
    folder = models.resolve_model(
        recipe.model, seed=recipe.seed, texts=rows.texts(), fingerprint=rows.fingerprint, cache=cache
    )
    config = models.load_config(folder, recipe.data.max_length, recipe.data.packing)
    notes += models.kernel_notes(recipe.model, config)
    if recipe.run.deterministic and torch.cuda.is_available():
        _check_deterministic(config)
    if recipe.adapter is not None:
        adapters.check_names(config, recipe.adapter)
    tokenizer = models.load_tokenizer(folder, recipe.data.chat_template)
    data = tokenize_data(rows, tokenizer, recipe.data, recipe.objective, cache=cache)
    notes += data.notes
    steps_per_epoch = batches.steps_per_epoch(data.train, recipe.batch.global_batch_size)
    return Material(
        folder=folder,
        config=config,
        tokenizer=tokenizer,
        data=data,
        steps_per_epoch=steps_per_epoch,
        max_steps=recipe.run.total_steps(steps_per_epoch),
    )


def _check_deterministic(config: PreTrainedConfig) -> None:
    text = config.get_text_config()
    if getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None):
        why = "torch counts the tokens of experts with torch.histc, which has no deterministic kernel on a GPU"
        raise RecipeError([f"run.deterministic is true, and {config.model_type} has experts: {why}; set it to false"])


def start_engine(
    recipe: Recipe, strategy: Strategy, plan: Plan, world: World, *, beat: Callable[[str, int], None]
) -> Engine:
    """The strategy, with its process group; what follows is collective.

    Args:
        beat: see `Engine`.
    """
    if recipe.run.deterministic:
        make_deterministic()
    # One seed on all processes until the weights stand, since sharding takes a piece from each.
    set_seed(recipe.seed)
    beat("meeting the others", 0)
    engine = engine_class(strategy)(
        strategy,
        plan,
        world,
        mixed_precision=recipe.mixed_precision,
        micro_batch_size=recipe.batch.micro_batch_size or 1,
        max_grad_norm=recipe.optim.max_grad_norm,
        run_name=run_name(Path(recipe.run.output_dir)),
        # Data and downloads are done; under ZeRO-3 the first process may still read weights for minutes.
        timeout=timedelta(minutes=max(30.0, recipe.run.hang_timeout_minutes) + 10),
    )
    engine.beat = beat
    return engine


def take_digests(recipe: Recipe, material: Material, engine: Engine, *, cache: Path) -> dict[str, str]:
    """What the run is made from: "data", "model", and "plugins" if it has some."""
    data = weights = ""
    if engine.is_main:  # large files may have to be read
        data, weights = material.data.fingerprint(cache), models.weights_digest(Path(material.folder), cache=cache)
    found = {"data": engine.collectives.broadcast_text(data), "model": engine.collectives.broadcast_text(weights)}
    if recipe.plugins:
        found["plugins"] = engine.collectives.broadcast_text(plugins.digest(recipe.plugins))
    return found


def choose_checkpoint(
    recipe: Recipe, made_from: dict[str, str], engine: Engine, *, is_restarted: bool, notes: list[str]
) -> Checkpoint | None:
    """What the run goes on from, see `resume.choose`.

    Args:
        is_restarted: by the launcher, as the main process knows.
    """
    return resume.choose(
        recipe,
        Path(recipe.run.output_dir) / "checkpoints",
        made_from,
        is_restarted=engine.collectives.broadcast_text(str(is_restarted)) == "True",
        rank=engine.world.rank,
        num_ranks=engine.world.num_processes,
        agree=engine.collectives.all_true,
        tell_all=engine.collectives.broadcast_text,
        say=notes.append,
    )


def prepare_model(recipe: Recipe, material: Material, engine: Engine) -> None:
    """Model, adapter and optimizer, in the engine's hands from now on."""
    quantization = adapters.quantization_options(recipe.adapter, recipe.mixed_precision)
    model = models.load_model(
        material.folder,
        recipe.model,
        packing=recipe.data.packing,
        dtype=engine.frozen_dtype if recipe.adapter else torch.float32,
        **engine.load_options(is_quantized=bool(quantization)),
        **quantization,
    )
    if recipe.adapter is not None:
        adapters.add_adapter(model, recipe.adapter, seed=recipe.seed)
    optimizer = build_optimizer(model, recipe.optim, recipe.mixed_precision)
    engine.prepare(model, optimizer, counts_beside=recipe.optim.counts_beside)


def make_run(
    recipe: Recipe,
    material: Material,
    made_from: dict[str, str],
    engine: Engine,
    checkpoint: Checkpoint | None,
    *,
    cache: Path,
) -> Run:
    """Batches and the checkpoint's state. From here on everything counts optimizer steps over a fixed global
    batch.
    """
    layout = batches.Layout(
        num_ranks=engine.mesh.data_parallel_size,
        rank=engine.data_parallel_rank,
        pad_id=material.tokenizer.pad_token_id,
        micro_batch_size=recipe.batch.micro_batch_size,
        micro_batch_tokens=recipe.batch.micro_batch_tokens,
        packing=recipe.data.packing,
    )
    data = material.data
    if recipe.objective.needs_reference:
        data = with_reference(
            data,
            [made_from["model"], recipe.mixed_precision, engine.strategy.name, str(recipe.adapter)],
            cache=cache,
            agree=engine.collectives.all_true,
            compute=lambda tokens: engine.collect(
                sequence_logps, batches.indexed_batches(tokens, layout), len(tokens.lengths)
            ),
        )
    # After the reference, which is of the model before training.
    progress = Progress()
    if checkpoint is not None:
        state = resume.load(checkpoint, engine.parameter_shapes(), engine.restore)
        progress = Progress(**{field.name: state[field.name] for field in fields(Progress) if field.name in state})
    if progress.step > material.max_steps:
        raise RecipeError([f"the run has {material.max_steps} steps, and its checkpoint is of step {progress.step}"])
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
        material=replace(material, data=data),
        made_from=made_from,
        engine=engine,
        checkpoint=checkpoint,
        progress=progress,
        steps=Ahead(islice(steps, material.max_steps - progress.step)),
        eval_sets={name: partial(batches.eval_batches, tokens, layout) for name, tokens in data.eval.items()},
    )


def open_books(run: Run, failed_after: list[int], notes: list[str], watch: Watch) -> Books:
    """Sets an earlier run aside or goes on with its log, and writes what is known before the first step.

    Args:
        failed_after: of `status.past_failures`.
        notes: what people should know of, said now.
        watch: which watches over this process.
    """
    engine, checkpoint = run.engine, run.checkpoint
    log = _open_log(run)
    log.write_text("recipe.yaml", dump_recipe(run.recipe))
    if engine.is_main:
        put_away_report(run.output_dir)
        publish.sweep(run.output_dir)
        try:
            write_frame(run)
        except Exception as error:  # tokenizers raises no OSError for a full disk
            log.say(f"{run.output_dir / publish.FRAME} could not be written: {error}; the run's end tries again")
    record = metrics.environment_record(engine.device)
    if run.recipe.plugins:
        record["plugins"] = plugins.record(run.recipe.plugins)
    record["deterministic"] = torch.are_deterministic_algorithms_enabled()
    record |= {"strategy": engine.describe(), "resumed_from": None if checkpoint is None else str(checkpoint.path)}
    expected, flops = _forecast(run, notes), _flop_counter(run, notes)
    if expected is not None:
        record["forecast"] = {
            "allocated": expected.allocated,
            "reserved": expected.reserved,
            "moment": expected.moment,
        }
    log.write_record("run.json", record)
    for line in (*notes, *_describe(run)):
        log.say(line)
    attempt = engine.collectives.broadcast_text(uuid.uuid4().hex[:8])
    status = Status(run.output_dir, is_main=engine.is_main, step=run.progress.step, failed_after=failed_after)
    saver = _start_saver(run, log, watch, attempt)
    return Books(log=log, record=record, expected=expected, flops=flops, status=status, watch=watch, saver=saver)


def write_frame(run: Run) -> None:
    """What an export needs beside a checkpoint, see `publish.write_frame`. On the main process."""
    publish.write_frame(
        run.output_dir,
        run.material.folder,
        run.recipe.model,
        config=run.material.config,
        tokenizer=run.material.tokenizer,
        digest=run.made_from["model"],
    )


def _open_log(run: Run) -> metrics.RunLog:
    own = (run.output_dir / "checkpoints").resolve()
    goes_on = run.checkpoint is not None and run.checkpoint.path.resolve().parent == own
    return metrics.RunLog(
        run.output_dir,
        is_main=run.engine.is_main,
        max_steps=run.material.max_steps,
        resumed_step=run.progress.step if goes_on else None,
    )


def _forecast(run: Run, notes: list[str]) -> "Memory | None":
    if run.engine.device.type != "cuda" or not run.engine.is_main:
        return None  # the memory of a CPU process is more than its tensors
    from cookbook import forecast

    try:
        return forecast.of_run(run.material.config, run.recipe, run.engine.strategy, run.engine.plan)
    except Exception as error:  # whatever it is, the run can do without
        notes.append(f"no forecast of memory: {error}")
        return None


def _flop_counter(run: Run, notes: list[str]) -> metrics.FlopCounter:
    peak, sizes = metrics.device_peak_flops(run.engine.device), None
    if peak is not None and run.engine.is_main:
        from cookbook.forecast.skeleton import skeleton

        try:
            sizes = sizes_of(run.material.config, skeleton(run.material.config, run.recipe))
        except Exception as error:  # whatever it is, the run can do without
            notes.append(f"mfu is not logged: {error}")
    return metrics.FlopCounter(sizes=sizes, peak=peak)


def _describe(run: Run) -> list[str]:
    recipe, material, engine = run.recipe, run.material, run.engine
    where = f"{engine.plan.num_processes} processes on {engine.device.type}, precision {recipe.mixed_precision}"
    epoch = f"{material.steps_per_epoch or 'an unknown number'} an epoch"
    batch = describe_batch(recipe, engine.plan)
    lines = [f"{engine.strategy.name}: {where}; {batch}; {material.max_steps} steps, {epoch}"]
    if recipe.adapter is not None:
        share = f"{engine.num_trained:,} of {engine.num_parameters:,} parameters are trained"
        lines.append(f"adapter {recipe.adapter.name} of rank {recipe.adapter.rank}: {share}")
    return lines


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
        patience_seconds=watch.timeout_seconds / 2,  # a save that is given up must not pass for a hang
        beat=lambda: watch.beat("save", engine.current_step),
        is_hurried=lambda: signals.requested() is not None,
    )
    if run.checkpoint is not None:
        saver.start_from(run.checkpoint)
        log.say(f"goes on from {run.checkpoint.path}")
    return saver
