"""The stages of a run before its first step, in the order in which `train.py` calls them; `services` has the last.

Imports torch, which takes seconds, so `train.py` checks files and rows before it imports this.
"""

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate.utils import set_seed
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from cookbook.config import plugins
from cookbook.config.metric_functions import Metric, metrics
from cookbook.config.objectives import Objective
from cookbook.config.objectives.forward import Batch, sequence_logps, target_logps
from cookbook.config.optim.groups import build_optimizer
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.facts.meshes import mesh_problem, num_experts
from cookbook.facts.packing import Packing, decide
from cookbook.facts.score_head import ScoreHead, head_note, head_wanted
from cookbook.facts.served_code import check_layers, served_code
from cookbook.run.publish import model_folder
from cookbook.start.launchers import World
from cookbook.start.run_plan import CHECKPOINTING, MICRO_BATCH, Plan
from cookbook.system import lock, optional
from cookbook.system.files import RecipeError, refuse
from cookbook.training.adapters import adapter_files, base_model, insertion
from cookbook.training.checkpoint import resume
from cookbook.training.checkpoint.folder import Checkpoint
from cookbook.training.checkpoint.write_model import saved_buffers
from cookbook.training.data import batches
from cookbook.training.data.ahead import Prefetcher
from cookbook.training.data.reference import with_reference
from cookbook.training.data.sets import RowSets, TokenSets, tokenize_data
from cookbook.training.data.tokens import TokenSet
from cookbook.training.engine import Engine, engine_class, make_deterministic
from cookbook.training.engine.as_read import each_weight
from cookbook.training.models import language_model, model_source, sample_draws, tokenizer_files
from cookbook.training.models.efficiency import kernel_notes, slow_kernel_notes
from cookbook.training.models.folder_facts import check_folder
from cookbook.training.models.stateful_layers import check_padded, row_notes, stateful_layers
from cookbook.training.models.structure import comparison_notes, layer_mistakes

if TYPE_CHECKING:
    from cookbook.run.teacher import Teacher

SIGHT_SECONDS = 10.0
"""For a new file to be seen on all machines, whose network file systems may cache."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Model folder, tokenizer and data, before anything is on a device."""

    base: str
    """The model's folder."""
    folder: str
    """The folder that it is loaded from: `base`, or its copy with `new_tokens` or `head`."""
    new_tokens: dict[str, int]
    """`model.new_tokens` with their ids, which are consecutive."""
    head: ScoreHead | None
    """The head for sequences, if the objective has one."""
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    data: TokenSets
    steps_per_epoch: int | None
    """None for a stream."""
    max_steps: int
    teacher: "Teacher | None" = None

    @property
    def new_rows(self) -> range:
        """The rows of the new tokens."""
        ids = [*self.new_tokens.values()]
        return range(ids[0], ids[-1] + 1) if ids else range(0)


@dataclass(kw_only=True)
class Progress:
    """Everything besides the engine that changes during training; part of a checkpoint's `state.json`."""

    step: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    """Steps skipped because loss or gradient was not finite."""
    is_evaluated: bool = False
    """True if the evaluation after this step is done."""
    is_sampled: bool = False
    """True if the continuations after this step are written."""
    eval_loss: float | None = None
    """Loss on the first evaluation set after this step."""
    best_by: float | None = None
    """Value of run.metric_for_best_model there, negated if a greater one is better."""
    stream_digest: str | None = None
    """See `StepBatch.stream_digest`."""
    best_rating: float | None = None
    """The lowest `rating` so far, without that before the first step; with early stopping only."""
    best_step: int | None = None
    num_worse: int = 0
    """Evaluations in a row that were no better than the best before."""

    @property
    def rating(self) -> float | None:
        """The number by which evaluations are compared; less is better."""
        return self.eval_loss if self.best_by is None else self.best_by

    def judge(self, threshold: float) -> None:
        """Count the evaluation after this step for early stopping, as transformers does (5.23, trainer_callback.py,
        `EarlyStoppingCallback.check_metric_value`; the best is the lowest of all, by whatever amount)."""
        rating, best = self.rating, self.best_rating
        if self.step == 0 or rating is None:
            return
        is_better = math.isfinite(rating) and (best is None or best - rating > threshold)
        self.num_worse = 0 if is_better else self.num_worse + 1
        if math.isfinite(rating) and (best is None or rating < best):
            self.best_rating, self.best_step = rating, self.step

    def advance(self, batch: batches.StepBatch, *, is_skipped: bool) -> None:
        """Count a step."""
        self.step += 1
        self.num_samples += batch.num_samples
        self.stream_digest = batch.stream_digest
        self.num_skipped += is_skipped
        self.is_evaluated, self.is_sampled, self.eval_loss, self.best_by = False, False, None, None


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
    steps: Prefetcher[batches.StepBatch]
    """The remaining steps."""
    layout: batches.Layout
    eval_sets: dict[str, Callable[[], Iterable[Batch]]]
    """Evaluation sets by name; each call iterates over a set once."""

    @property
    def stops_early(self) -> bool:
        """Return whether the held-out loss has not fallen for too long, alike on all ranks, as each sums the same."""
        patience = self.recipe.run.early_stopping_patience
        return patience is not None and self.progress.num_worse >= patience

    @property
    def metrics(self) -> list[Metric]:
        """The metrics of each evaluation, beside those of the objective."""
        return [metrics()[name] for name in self.recipe.run.metrics]

    @property
    def metric_for_best(self) -> Metric | None:
        """The metric by which evaluations are compared; None: the loss."""
        name = self.recipe.run.metric_for_best_model
        return None if name is None else metrics()[name]

    @property
    def is_over(self) -> bool:
        """Return whether this was the last step."""
        return self.progress.step == self.inputs.max_steps or self.stops_early

    @property
    def early_end(self) -> str | None:
        """Why the run ends before its last step; None if it does not."""
        if not self.stops_early or self.progress.step == self.inputs.max_steps:
            return None
        rating, step = self.progress.best_rating, self.progress.best_step
        metric = self.metric_for_best
        what, side, sign = "held-out loss", "below", 1.0
        if metric is not None:
            what = f"held-out {metric.name}"
            side, sign = ("above", -1.0) if metric.greater_is_better else ("below", 1.0)
        best = f"no finite {what}"
        if rating is not None:
            best = f"no {what} {side} {sign * rating:.4f}, that of step {step}"
        return f"early stopping after step {self.progress.step}: {best}, in {self.progress.num_worse} evaluations"

    @property
    def output_dir(self) -> Path:
        return Path(self.recipe.run.output_dir)

    def write_model_files(self) -> None:
        """Write what an export needs besides a checkpoint, see `model_folder.write_model_files`. Rank 0 calls."""
        model_folder.write_model_files(
            self.output_dir,
            self.inputs.base,
            self.recipe.model,
            new_tokens=self.inputs.new_tokens,
            head=self.inputs.head,
            config=self.inputs.config,
            tokenizer=self.inputs.tokenizer,
            digest=self.made_from["model"],
            buffers=saved_buffers(self.engine.transformer()) if self.recipe.adapter is None else None,
        )


def load_inputs(
    recipe: Recipe, strategy: Strategy, plan: Plan, rows: RowSets, *, cache: Path, notes: list[str]
) -> Inputs:
    """Prepare model folder, configuration, tokenizer and tokens, once per machine, under file locks.

    Args:
        notes: receives notes for the user.

    Raises:
        RecipeError: a model that cannot be loaded, or trained under this plan, or data without a target.
    """
    transformers_logging.disable_progress_bar()
    base = folder = model_source.resolve_model(
        recipe.model, seed=recipe.seed, texts=rows.texts(), fingerprint=rows.fingerprint, cache=cache
    )
    config = language_model.load_config(base, recipe.data.max_length)
    tokenizer = tokenizer_files.load_tokenizer(base, recipe.data.chat_template, recipe.model.new_tokens)
    new_tokens = {token: tokenizer.convert_tokens_to_ids(token) for token in recipe.model.new_tokens or ()}
    refuse(layer_mistakes(config, strategy.claims))
    facts = check_folder(Path(base), config, tokenizer, new_tokens=new_tokens)
    if new_tokens:
        from cookbook.training.models.grown import grown_folder
        from cookbook.training.models.new_tokens import rows_note

        folder = grown_folder(base, tokenizer, new_tokens, cache=cache)
        before, config = config.vocab_size, language_model.load_config(folder, recipe.data.max_length)
        notes.append(rows_note(new_tokens, before, config.vocab_size))
    if (head := head_wanted(recipe.objective, config, tokenizer.pad_token_id)) is not None:
        from cookbook.training.models.first_head import scored_folder

        notes.append(head_note(config, head))
        folder = scored_folder(folder, head, seed=recipe.seed, cache=cache)
        config = language_model.load_config(folder, recipe.data.max_length)
    check_layers(recipe.model, config, served_code(config))
    packing = decide(recipe, config)  # refuses what cannot be packed before any process waits for another
    if packing.is_on:
        notes += row_notes(stateful_layers(config))
    else:
        check_padded(config)
    if problem := mesh_problem(config, plan.mesh):
        raise RecipeError(f"model {folder}: {problem}")
    notes += comparison_notes(config)
    notes += kernel_notes(recipe.model, config)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    notes += slow_kernel_notes(packing.settle(recipe), config, capability)
    notes += sample_draws.notes(config, is_compiled=recipe.model.compile)
    if recipe.run.deterministic and torch.cuda.is_available() and num_experts(config) > 1:
        why = "torch counts the tokens of experts with torch.histc, which has no deterministic kernel on a GPU"
        raise RecipeError([f"run.deterministic is true, and {config.model_type} has experts: {why}; set it to false"])
    if recipe.adapter is not None:
        notes += adapter_files.check_names(config, recipe.adapter)
        notes += base_model.base_notes(recipe.adapter, recipe.model)
    data = tokenize_data(
        rows, tokenizer, recipe.data, recipe.objective, cache=cache, num_embeddings=facts.num_embeddings
    )
    notes += [*facts.notes, *data.notes]
    teacher = None
    if (asked := recipe.objective.asks) is not None:
        from cookbook.run.teacher import KEY, find_teacher

        teacher_folder = model_source.fetch_model(asked.teacher, None, key=KEY)
        teacher = find_teacher(asked, teacher_folder, tokenizer, facts.num_embeddings, recipe.data.max_length)
    steps_per_epoch = batches.steps_per_epoch(data.train, recipe.batch.global_batch_size)
    return Inputs(
        base=base,
        folder=folder,
        new_tokens=new_tokens,
        head=head,
        config=config,
        tokenizer=tokenizer,
        data=data,
        steps_per_epoch=steps_per_epoch,
        max_steps=recipe.run.total_steps(steps_per_epoch),
        teacher=teacher,
    )


def start_engine(
    recipe: Recipe, strategy: Strategy, plan: Plan, world: World, *, beat: Callable[[str, int], None]
) -> Engine:
    """Start the strategy and its process group. From here on every rank must call each function.

    Args:
        beat: see `Engine`.

    Raises:
        RecipeError: machines that do not share the output folder, or whose launchers found other values for `auto`.
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
        timeout=timedelta(minutes=math.ceil(max(30.0, recipe.run.hang_timeout_minutes)) + 10),
    )
    engine.beat = beat
    _check_folder(recipe, engine)
    _check_auto(recipe, engine)
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
    blind = [rank for rank, has_it in enumerate(engine.collectives.all_gather(sees)[:, 0]) if not has_it]
    if blind:
        engine.close()
        ranks = f"rank{'s' * (len(blind) > 1)} {', '.join(map(str, blind))}"
        raise RecipeError(
            f"run.output_dir {folder}: {ranks} cannot see what rank 0 wrote there; several machines need one folder"
            " that all see under one path, such as on NFS: --set run.output_dir=/shared/run"
        )


def _check_auto(recipe: Recipe, engine: Engine) -> None:
    """Check that all machines have one micro-batch and one kind of checkpointing: each finds those that are `auto`
    for itself, and where GPUs differ it may find others. The processes would then ask for other collectives.

    Raises:
        RecipeError: on every rank, after the process group has ended.
    """
    if engine.world.num_local == engine.world.num_processes:
        return
    values = {MICRO_BATCH: recipe.batch.micro_batch_size, CHECKPOINTING: recipe.model.gradient_checkpointing}
    own = ", ".join(f"{key}={str(value).lower()}" for key, value in values.items())
    texts = engine.collectives.gather_texts(own)
    if len(set(texts)) > 1:
        engine.close()
        of_each = "; ".join(f"rank {texts.index(text)} has {text}" for text in sorted({*texts}, key=texts.index))
        raise RecipeError(f"machines differ: {of_each}; write these keys with --set, the same on each machine")
    if len(set(engine.collectives.gather_texts(optional.digest()))) > 1:
        engine.close()
        raise RecipeError(f"machines differ: the packages of {optional.KEY} have other versions or contents on some")


def take_fingerprints(recipe: Recipe, inputs: Inputs, engine: Engine, *, cache: Path) -> dict[str, str]:
    """SHA-256 of "data", "model", and what there is of "eval", "teacher", "adapter", "plugins" and "kernels". Rank 0
    reads the files, which may be large.

    Raises:
        RecipeError: on every rank: an adapter to begin with that was trained on another model.
    """
    digests = {}
    if engine.is_main:
        digests["data"] = inputs.data.fingerprint(cache)
        digests["model"] = model_source.weights_digest(Path(inputs.base), cache=cache)
        if inputs.data.eval:
            held_out = [[name, tokens.fingerprint] for name, tokens in inputs.data.eval.items()]
            digests["eval"] = hashlib.sha256(json.dumps(held_out).encode()).hexdigest()
        if inputs.teacher is not None:
            digests["teacher"] = model_source.weights_digest(Path(inputs.teacher.folder), cache=cache)
        if recipe.adapter is not None and recipe.adapter.path is not None:
            digests["adapter"] = adapter_files.weights_digest(recipe.adapter, cache=cache)
        if recipe.plugins:
            digests["plugins"] = plugins.digest(recipe.plugins)
        if recipe.model.kernels:
            digests["kernels"] = optional.digest()
    digests = json.loads(engine.collectives.broadcast_text(json.dumps(digests)))
    if recipe.adapter is not None:
        base_model.check_base(recipe.adapter, digests["model"])
    return digests


def choose_packing(recipe: Recipe, inputs: Inputs, checkpoint: Checkpoint | None) -> Packing:
    """Decide `data.packing`, equally on all ranks; `auto` keeps what the run to resume had."""
    before = None if checkpoint is None else checkpoint.state()["recipe"]["data"]["packing"]
    return decide(recipe, inputs.config, before=before)


def ask_teacher(
    recipe: Recipe, inputs: Inputs, made_from: dict[str, str], engine: Engine, *, cache: Path, notes: list[str]
) -> Inputs:
    """With what the teacher answers for each target of the data; see `with_answers`."""
    from cookbook.run.teacher import with_answers

    assert inputs.teacher is not None
    pad_id, digest = inputs.tokenizer.pad_token_id, made_from["teacher"]
    data = with_answers(inputs.data, inputs.teacher, digest, recipe, pad_id, engine, cache=cache, notes=notes)
    return replace(inputs, data=data)


def prepare_model(recipe: Recipe, inputs: Inputs, engine: Engine) -> None:
    """Load model and adapter, build the optimizer, and wrap them in the engine."""
    is_drawn = has_draws(recipe, inputs.config)
    model = load_model(inputs.folder, recipe, engine, has_adapter=recipe.adapter is not None, has_draws=is_drawn)
    if problem := optional.problem():
        raise RecipeError(problem)
    if recipe.adapter is not None:
        rows, first = inputs.new_rows, None
        if rows:
            from cookbook.training.models.grown import first_rows

            first = first_rows(inputs.folder, inputs.config, rows[0])
        insertion.add_adapter(model, recipe.adapter, seed=recipe.seed, new_rows=rows, first=first)
    if is_drawn:
        mesh = engine.mesh
        sample_draws.draw_for_tokens(
            model, recipe.model.neftune_alpha, mesh.tensor_rank(engine.world.rank), mesh.tensor
        )
    optimizer = build_optimizer(model, recipe.optim, recipe.compute_precision)
    engine.prepare(model, optimizer, counts_beside=recipe.optim.counts_beside)


def has_draws(recipe: Recipe, config: PreTrainedConfig) -> bool:
    """Return whether something is drawn in training: by an adapter, for embeddings, or by the model's own code."""
    is_asked = recipe.model.neftune_alpha > 0 or (recipe.adapter is not None and recipe.adapter.dropout > 0)
    return is_asked or bool(sample_draws.keys_drawn_by_model(config))


def load_model(
    folder: str, recipe: Recipe, engine: Engine, *, has_adapter: bool, has_draws: bool = False
) -> PreTrainedModel:
    """The model as training has it, before an adapter is on it; where it has one, frozen and as its kind wants."""
    quantization = insertion.quantization_options(recipe.adapter if has_adapter else None, recipe.compute_precision)
    packed = each_weight(insertion.packing(quantization)) if quantization else contextlib.nullcontext()
    engine.fit_to(language_model.config_in(folder))
    with packed, engine.reading(is_quantized=bool(quantization)):
        return language_model.load_model(
            folder,
            recipe.model,
            packing=recipe.data.is_packed,
            dtype=engine.frozen_dtype if has_adapter else torch.float32,
            sequence_mesh=engine.sequence_mesh,
            fp8=recipe.mixed_precision == "fp8",
            has_draws=has_draws,
            **engine.load_options(is_quantized=bool(quantization)),
            **quantization,
        )


def _reference_of(engine: Engine, objective: Objective, tokens: TokenSet, layout: batches.Layout) -> np.ndarray:
    """See `with_reference`. Collective."""
    if objective.reference_of == "tokens":
        indexed, size = batches.batches_of_targets(tokens, layout), int(tokens.num_targets.sum())
        return engine.collect(target_logps, indexed, size, what="reference")
    indexed = batches.indexed_batches(tokens, layout)
    return engine.collect(sequence_logps, indexed, len(tokens.lengths), what="reference")


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
        draw_seed=recipe.seed if has_draws(recipe, inputs.config) else None,
    )
    data = inputs.data
    if recipe.objective.needs_reference:
        # By the model that will be trained, which before its first step is the reference, with an adapter too: no
        # second one to spread, and one way under every strategy.
        weights = [made_from[key] for key in ("model", "adapter") if key in made_from]
        data = with_reference(
            data,
            [*weights, recipe.mixed_precision, engine.strategy.name, str(recipe.adapter), *inputs.new_tokens],
            recipe.objective,
            cache=cache,
            all_true=engine.collectives.all_true,
            compute=lambda tokens: _reference_of(engine, recipe.objective, tokens, layout),
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
        steps=Prefetcher(islice(steps, inputs.max_steps - progress.step)),
        layout=layout,
        eval_sets={name: partial(batches.eval_batches, tokens, layout) for name, tokens in data.eval.items()},
    )
