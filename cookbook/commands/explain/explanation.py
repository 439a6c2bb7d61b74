"""Explanation of a run before it begins: each quantity with its value and the place that it comes from. No torch."""

import math
import re
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from cookbook.commands.explain.chart import draw
from cookbook.commands.shared.labels import read_label, read_needs
from cookbook.config.base_recipe import KEY
from cookbook.config.optim import number
from cookbook.config.recipe import Recipe, read_recipe
from cookbook.config.schedule import learning_rate, peak_learning_rate
from cookbook.config.sections import BUILTIN_SOURCE, Auto, RoundsSection, Source, data_format
from cookbook.config.strategy import Strategy
from cookbook.facts.packing import decide, known_config
from cookbook.facts.pipeline_stages import in_flight
from cookbook.forecast.costs import per_parameter as costs
from cookbook.forecast.costs.inputs import CostInputs, cost_inputs
from cookbook.forecast.costs.traffic import links_in_words
from cookbook.start.ds_config import deepspeed_config, separate_swap
from cookbook.start.run_plan import Plan, default_num_processes, launch_command, load_pair, make_plan, show_command
from cookbook.system.console import Row, page, several
from cookbook.system.files import Document, RecipeError, flatten, read_document
from cookbook.system.machine import num_gpus
from cookbook.system.shipped import short

COSTS = "BYTES OF A TRAINED PARAMETER, on each process; activations and buffers come on top"
DEFAULT, COMMAND_LINE = "default", "command line"
MAX_COUNTED_BYTES = 100_000_000
"""Data files up to this size have their rows counted here, in a tenth of a second."""
POINTS = 480
"""Points of the drawn learning-rate curve."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One thing that will be so."""

    value: Any
    """For programs."""
    text: str
    sources: tuple[str, ...] = ()
    """`file:line`, "default", "command line", or what it follows from."""


Section = dict[str, Quantity]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A run, before it begins."""

    recipe_name: str
    recipe: Recipe
    strategy: Strategy
    plan: Plan
    setting: CostInputs
    files: Section
    sections: dict[str, Section]
    rates: list[float]
    """The learning rate, evenly over the run."""
    num_steps: int | None
    """None: known once the data is tokenised."""
    command: list[str]
    deepspeed: dict[str, Any] | None
    """The JSON as DeepSpeed will see it."""
    deepspeed_changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Values by key: as in the file (None: not there), and as DeepSpeed will see them."""


def explain(
    recipe_path: Path,
    *,
    strategy_path: Path | None = None,
    assignments: list[str] | None = None,
    processes: int | None = None,
) -> Explanation:
    """Explain what a recipe and a strategy will run.

    Args:
        strategy_path: instead of the one that the recipe names.
        processes: instead of what the strategy, the machine or the recipe's label say.

    Raises:
        RecipeError: all mistakes of the files and of the pair.
    """
    assignments = assignments or []
    recipe, strategy = load_pair(recipe_path, assignments, strategy_path)
    document = read_recipe(recipe_path, assignments)
    yaml_file = read_document(Path(strategy.path))
    count, count_text, count_sources = _count(recipe_path, strategy, yaml_file, processes)
    local = read_needs(read_label(recipe_path)).num_local(count)
    plan = make_plan(
        recipe, strategy, num_processes=count, num_local=local, num_gpus=count, recipe_name=str(recipe_path)
    )
    setting = cost_inputs(recipe, strategy, count, num_local=plan.num_local)
    peak = peak_learning_rate(recipe.optim, recipe.schedule, recipe.batch.global_batch_size)
    num_steps, length = _length(recipe, document)
    rates, drawn_steps = _rates(recipe, peak, num_steps)
    config, changes = _deepspeed(recipe, strategy, plan)
    processes_quantity = Quantity(value=count, text=count_text, sources=count_sources)
    return Explanation(
        recipe_name=str(recipe_path),
        recipe=recipe,
        strategy=strategy,
        plan=plan,
        setting=setting,
        files=_files(recipe_path, strategy, document, yaml_file, strategy_path),
        sections={
            "WHAT": _what(recipe, document),
            "BATCH": _batch(recipe, plan, document, processes_quantity, yaml_file),
            "LENGTH": {**length, **_saving(recipe, document)},
            "OPTIMIZER": _optimizer(recipe, peak, drawn_steps, num_steps, document),
            "PRECISION": {
                name: Quantity(value=text, text=text, sources=_precision_sources(name, recipe, strategy, document))
                for name, text in costs.precision(setting).items()
            },
            COSTS: _costs(setting),
        },
        rates=rates,
        num_steps=num_steps,
        command=launch_command(str(recipe_path), strategy, num_processes=count, assignments=assignments),
        deepspeed=config,
        deepspeed_changes=changes,
    )


def source(document: Document, key: str) -> str:
    """Name the place that the value of `section.key` comes from."""
    path, value = tuple(key.split(".")), document.values
    for word in path:
        if not isinstance(value, dict) or word not in value:
            return DEFAULT
        value = value[word]
    if any(path[: len(override)] == override for override in document.overrides):
        return COMMAND_LINE
    return document.at(*path) or COMMAND_LINE  # a section that only the command line has is in no line


def _count(
    recipe_path: Path, strategy: Strategy, yaml_file: Document, processes: int | None
) -> tuple[int, str, tuple[str, ...]]:
    """Processes, in words, and where that comes from."""
    place = source(yaml_file, "num_processes")
    if processes is not None:
        if processes < 1:
            raise RecipeError(f"--processes is {processes}; it must be at least 1")
        return processes, str(processes), (COMMAND_LINE,)
    if strategy.num_processes is not None:
        return strategy.num_processes, str(strategy.num_processes), (place,)
    here, needed = num_gpus(), read_needs(read_label(recipe_path)).num_gpus or 0
    count = default_num_processes(strategy, here if here >= needed else needed)
    if here and here >= needed:
        return count, f"{count}, one for each GPU of this machine", (place, "this machine")
    if needed:
        lines = recipe_path.read_text(encoding="utf-8").splitlines()
        line = next(i for i, text in enumerate(lines, start=1) if re.match(r"#\s*Needs:", text))
        return count, f"{count}, one for each GPU that the recipe needs", (place, f"{recipe_path}:{line}")
    return count, f"{count}, on a machine without GPUs; with them, one for each", (place, "this machine")


def _files(
    recipe_path: Path, strategy: Strategy, document: Document, yaml_file: Document, override: Path | None
) -> Section:
    named = COMMAND_LINE if override else source(document, "strategy")
    files = {"recipe": Quantity(value=str(recipe_path), text=short(str(recipe_path)))}
    for base in document.digests.keys() - {document.name}:
        files["base"] = Quantity(value=base, text=short(base), sources=(f"{document.at(KEY)}",))
    files["yaml"] = Quantity(value=strategy.path, text=short(strategy.path), sources=(named,))
    if strategy.deepspeed_file is not None:
        place = source(yaml_file, "deepspeed_config.deepspeed_config_file")
        files["json"] = Quantity(value=strategy.deepspeed_file, text=short(strategy.deepspeed_file), sources=(place,))
    return files


def _what(recipe: Recipe, document: Document) -> Section:
    model, adapter, objective, data = recipe.model, recipe.adapter, recipe.objective, recipe.data
    of = partial(_quantity, document)
    section: Section = {}
    if model.name_or_path is not None:
        revision = f" at {model.revision[:12]}" if model.revision else ""
        whole_model = getattr(known_config(model), "part_of", None)
        part = f": the language part of {whole_model}, the rest stays as it is" if whole_model else ""
        section["model"] = of(model.name_or_path, model.name_or_path + revision + part, "model.name_or_path")
    else:
        sizes = model.from_scratch
        assert sizes is not None
        text = f"new {sizes.model_type}: {sizes.num_hidden_layers} layers of width {sizes.hidden_size}"
        section["model"] = of(sizes.model_dump(), text, "model.from_scratch")
    if model.new_tokens:
        section["new tokens"] = of(model.new_tokens, ", ".join(model.new_tokens), "model.new_tokens")
    if adapter is None:
        section["trained"] = Quantity(value="all", text="all weights", sources=(DEFAULT,))
    else:
        text = f"{adapter.name} of rank {adapter.rank}, alpha {adapter.alpha:g}, on {', '.join(adapter.targets)}"
        text += f", and {', '.join(adapter.modules_to_save)} whole" if adapter.modules_to_save else ""
        text += f", from that in {adapter.path} on" if adapter.path else ""
        shown = ("name", "rank", "alpha", "targets", *(["path"] if adapter.path else []))
        section["trained"] = of(adapter.model_dump(), text, *(f"adapter.{key}" for key in shown))
    section["objective"] = of(
        objective.name, objective.words(), *(f"objective.{key}" for key in type(objective).model_fields)
    )
    if (asked := objective.asks) is not None:
        keys = (f"objective.{key}" for key in ("teacher", "loss_top_k", "temperature"))
        section["teacher"] = of(asked.teacher, f"{asked.teacher}: {asked.words()}", *keys)
    section["data"] = of([s.model_dump() for s in data.train], "; ".join(map(_name, data.train)), "data.train")
    held_out = [f"{name}: {_name(s)}" if name else _name(s) for name, s in data.eval.items()]
    held_out += [f"{data.holdout:.3g} of data.train"] if data.holdout else []
    text = "; ".join(held_out) or "nothing"
    section["evaluated on"] = of(text, text, *(["data.holdout"] if data.holdout else []), "data.eval")
    section["sample"] = of(data.max_length, f"at most {data.max_length:,} tokens", "data.max_length")
    config = known_config(model)
    if config is not None:
        packing = decide(recipe, config)
        section["rows"] = of(packing.is_on, packing.words, "data.packing")
    else:
        text = {True: "packed", False: "padded", "auto": "packed, if its architecture can be"}[data.packing]
        section["rows"] = of(data.packing, text, "data.packing")
    what = "all" if model.recompute is True else "what is cheap"
    where = ", from inputs in host memory" if model.gradient_checkpointing == "offload" else ""
    where = "; a run takes the fastest that fits" if isinstance(model.gradient_checkpointing, Auto) else where
    layers = {
        "gradient_checkpointing": f"{what} computed again in the backward pass{where}",
        "compile": "compiled",
        "liger_kernels": "Liger kernels",
        "kernels": f"with functions of {', '.join(model.kernels or ())}",
    }
    switched_on = {f"model.{key}": words for key, words in layers.items() if getattr(model, key)}
    if switched_on:
        section["layers"] = of([*switched_on.values()], ", ".join(switched_on.values()), *switched_on)
    return section


def _name(data: Source) -> str:
    rows = f", first {data.max_rows:,} rows" if data.max_rows else ""
    weight = f" x {data.weight:g}" if data.weight is not None else ""
    weight += f", {data.rows_per_epoch:,} rows an epoch" if data.rows_per_epoch else ""
    split = "" if data_format(data.path) else f" ({data.split})"
    return f"{data.path}{split}{rows}{weight}"


def _quantity(document: Document, value: Any, text: str, *keys: str) -> Quantity:
    # Written keys come before defaults: the first source is what the reader would edit.
    places = sorted((source(document, key) for key in keys), key=lambda place: place == DEFAULT)
    return Quantity(value=value, text=text, sources=tuple(dict.fromkeys(places)))


SIZE_KEYS = {"sequence": "sp_size", "tensor": "tp_size", "pipeline": "pp_size"}


def _batch(recipe: Recipe, plan: Plan, document: Document, processes: Quantity, yaml_file: Document) -> Section:
    batch, size, accumulation = recipe.batch, plan.data_parallel_size, plan.gradient_accumulation_steps
    unit = recipe.objective.sample
    of = partial(_quantity, document)
    section = {"processes": processes}
    if size != plan.num_processes:
        mesh = plan.mesh
        numbers = {"sequence": mesh.sequence, "tensor": mesh.tensor, "pipeline": mesh.pipeline}
        sharing = [name for name, number in numbers.items() if number > 1]
        text = f"{size}: the processes of a {'- and '.join(sharing)}-parallel group share their samples"
        keys = [f"parallelism_config.parallelism_config_{SIZE_KEYS[name]}" for name in sharing]
        places = tuple(source(yaml_file, key) for key in keys)
        section["data-parallel"] = Quantity(value=size, text=text, sources=places)
    section["step"] = of(batch.global_batch_size, several(batch.global_batch_size, unit), "batch.global_batch_size")
    if batch.micro_batch_size is not None:
        micro = batch.micro_batch_size
        text = f"{several(int(micro), unit)} on each process"
        text += "; a run takes the most that fits" if isinstance(micro, Auto) else ""
        section["forward"] = of(int(micro), text, "batch.micro_batch_size")
        text = f"{accumulation} = {batch.global_batch_size} / ({int(micro)} x {size})"
        split = of(accumulation, text, "batch.global_batch_size", "batch.micro_batch_size")
        section["accumulation"] = replace(split, sources=split.sources + processes.sources[:1])
    else:
        tokens = batch.micro_batch_tokens
        section["forward"] = of(tokens, f"at most {tokens:,} tokens on each process", "batch.micro_batch_tokens")
        text = f"at most {accumulation} = {batch.global_batch_size} / {size}: it follows the samples' lengths"
        section["accumulation"] = of(accumulation, text, "batch.global_batch_size")
    if (stages := plan.mesh.pipeline) > 1:
        begun = [in_flight(accumulation, stage, stages, plan.mesh.chunks) for stage in range(stages)]
        text = f"at most {', '.join(map(str, begun))} micro-batches, from the first stage to the last"
        place = source(yaml_file, f"parallelism_config.parallelism_config_{SIZE_KEYS['pipeline']}")
        section["in flight"] = Quantity(value=begun, text=text, sources=(place,))
    each = len(recipe.objective.sequences)
    bound = batch.global_batch_size * each * recipe.data.max_length
    twice = f" x {each}" if each > 1 else ""
    text = (
        f"at most {bound:,} = {batch.global_batch_size}{twice} x {recipe.data.max_length:,}; fewer if samples are short"
    )
    section["tokens a step"] = of(bound, text, "batch.global_batch_size", "data.max_length")
    return section


def _length_of_rounds(recipe: Recipe, rounds: RoundsSection, document: Document) -> tuple[int, Section]:
    of, run = partial(_quantity, document), recipe.run
    prompts, answers = rounds.prompts_per_round, rounds.num_generations
    each = run.max_steps or (run.num_epochs or 0) * math.ceil(prompts * answers / recipe.batch.global_batch_size)
    total = rounds.num_rounds * each
    text = f"{rounds.num_rounds:,}, each of {prompts:,} prompts with {answers} answers; sampler: {rounds.sampler}"
    keys = ("rounds.num_rounds", "rounds.prompts_per_round", "rounds.num_generations", "rounds.sampler")
    length = "run.num_epochs" if run.max_steps is None else "run.max_steps"
    steps = of(total, f"{total:,} = {rounds.num_rounds:,} rounds x {each:,}", keys[0], length)
    return total, {"rounds": of(rounds.num_rounds, text, *keys), "steps": steps}


def _length(recipe: Recipe, document: Document) -> tuple[int | None, Section]:
    """Steps, if they are known, and what is known of them."""
    if recipe.rounds is not None:
        return _length_of_rounds(recipe, recipe.rounds, document)
    of = partial(_quantity, document)
    run, size = recipe.run, recipe.batch.global_batch_size
    rows = _count_rows(recipe)
    if run.max_steps is not None:
        section = {"steps": of(run.max_steps, f"{run.max_steps:,}", "run.max_steps")}
        samples = run.max_steps * size
        text = f"{samples:,} samples = {run.max_steps:,} x {size}"
        if rows and not recipe.data.streaming:
            text += f"; {samples / rows:.3g} or more of {rows:,} rows"
        keys = ("run.max_steps", "batch.global_batch_size")
        return run.max_steps, {**section, "epochs": of(None, text, *keys)}
    epochs = of(run.num_epochs, str(run.num_epochs), "run.num_epochs")
    assert run.num_epochs is not None
    if rows is None:
        text = f"samples / {size} an epoch, rounded up; the samples are counted when the data is tokenised"
        steps = of(None, text, "run.num_epochs", "batch.global_batch_size")
        return None, {"epochs": epochs, "steps": steps}
    most = run.num_epochs * math.ceil(rows / size)
    if misfits := recipe.schedule.misfits(most):
        raise RecipeError([f"{document.name}: schedule.{mistake}" for mistake in misfits])
    epoch = f"{rows:,} rows / {size}, rounded up"
    text = f"at most {most:,} = {run.num_epochs} x ({epoch}); a row without a trained token is none"
    steps = of(most, text, "run.num_epochs", "batch.global_batch_size", "data.train")
    return most, {"epochs": epochs, "steps": steps}


def _count_rows(recipe: Recipe) -> int | None:
    """Samples in an epoch at most; None where a row is not a sample, or is not in a file small enough to look."""
    data = recipe.data
    if recipe.objective.long_rows(data.too_long) == "split" or data.holdout:
        return None
    rows = 0
    for source_of_rows in data.train:
        path = Path(source_of_rows.path)
        if source_of_rows.path == BUILTIN_SOURCE or path.suffix != ".jsonl" or path.stat().st_size > MAX_COUNTED_BYTES:
            return None
        with path.open("rb") as file:
            count = sum(1 for line in file if line.strip())
        count = min(count, source_of_rows.max_rows or count)
        # As cookbook.training.data.tokens rounds it.
        rows += max(1, int(count * source_of_rows.weight + 0.5)) if source_of_rows.weight is not None else count
    return rows


def _times(per_epoch: Fraction) -> str:
    if per_epoch < 1:
        return f"at the end of every {per_epoch.denominator} epochs"
    return "once an epoch" if per_epoch == 1 else f"{per_epoch} times an epoch"


def _saving(recipe: Recipe, document: Document) -> Section:
    of = partial(_quantity, document)
    run, written = recipe.run, recipe.run.model_dump(mode="json")
    has_eval = bool(recipe.data.eval or recipe.data.holdout)
    every = f", every {run.eval_every_steps} steps" if run.eval_every_steps else ""
    every = f", {_times(run.evals_per_epoch)}" if run.evals_per_epoch else every
    eval_key = "evals_per_epoch" if run.evals_per_epoch else "eval_every_steps"
    text = f"before the first step{every} and at the end" if has_eval else "none: no data.eval"
    names = ("save_every_steps", "saves_per_epoch", "save_every_minutes", "save_first_step")
    keys = [name for name in names if getattr(run, name)]
    when = [
        *(["after step 1"] if run.save_first_step else []),
        *([f"every {run.save_every_steps} steps"] if run.save_every_steps else []),
        *([_times(run.saves_per_epoch)] if run.saves_per_epoch else []),
        *([f"every {run.save_every_minutes:g} minutes"] if run.save_every_minutes else []),
        "at the end",
    ]
    kept = f"; the last {run.keep_last} stay" + (f", and the best {run.keep_best}" if run.keep_best else "")
    saved = ", ".join(when) + (kept if len(when) > 1 else "")
    saved += ", in the background" if run.save_in_background else ""
    section = {
        "evaluation": of(written[eval_key], text, f"run.{eval_key}"),
        "checkpoints": of(
            run.save_every_steps or written["saves_per_epoch"],
            saved,
            *(f"run.{name}" for name in keys or ["save_every_steps"]),
        ),
        "written to": of(run.output_dir, run.output_dir, "run.output_dir"),
    }
    if run.resume != "never":
        begins = "the newest whole checkpoint, if there is one" if run.resume == "auto" else run.resume
        section["resumes from"] = of(run.resume, begins, "run.resume")
    if run.stop_after_steps is not None:
        text = f"{run.stop_after_steps:,} steps of each start, with a checkpoint"
        section["stops after"] = of(run.stop_after_steps, text, "run.stop_after_steps")
    if run.early_stopping_patience is not None:
        least = f" by more than {run.early_stopping_threshold:g}" if run.early_stopping_threshold else ""
        text = f"after {several(run.early_stopping_patience, 'evaluation')} without a lower held-out loss{least}"
        section["ends early"] = of(run.early_stopping_patience, text, "run.early_stopping_patience")
    if run.export == "best":
        section["exports"] = of(run.export, "the step with the lowest held-out loss of those kept", "run.export")
    if run.on_out_of_memory != "stop":
        next_one = " or strategy" * (run.on_out_of_memory == "next_strategy")
        text = f"starts again with a smaller micro-batch{next_one}"
        section["out of memory"] = of(run.on_out_of_memory, text, "run.on_out_of_memory")
    return section


def _optimizer(
    recipe: Recipe, peak: float, drawn_steps: int | None, num_steps: int | None, document: Document
) -> Section:
    of = partial(_quantity, document)
    optim, schedule = recipe.optim, recipe.schedule
    clip = f"to norm {optim.max_grad_norm:g}" if optim.max_grad_norm else "off"
    rate, keys = number(peak), ["optim.learning_rate"]
    if schedule.base_batch_size is not None:
        ratio = f"{recipe.batch.global_batch_size} / {schedule.base_batch_size}"
        how = ratio if schedule.scale_lr == "linear" else f"sqrt({ratio})"
        rate += f" = {number(optim.learning_rate)} x {how}"
        keys += ["schedule.scale_lr", "batch.global_batch_size", "schedule.base_batch_size"]
    steps = (schedule.for_length(num_steps) if num_steps else schedule).warmup_steps
    warmup = (
        "none" if not steps else f"{steps} step{'s' * (steps > 1)}" if steps >= 1 else f"{100 * steps:.3g} % of the run"
    )
    if num_steps and steps:
        warmup += f", {100 * steps / num_steps:.3g} % of the run"
    warmup += ", logarithmic" * (schedule.warmup == "log")
    shape = schedule.ends()
    if drawn_steps is not None and num_steps is None:
        shape += f"; drawn for {drawn_steps:,} steps, the length being unknown"
    section = {
        "optimizer": of(
            optim.name, f"{optim.name}: {'; '.join(optim.words())}", "optim.name", *_given(recipe, document)
        ),
        "clipping": of(optim.max_grad_norm, clip, "optim.max_grad_norm"),
        "peak rate": of(peak, rate, *keys),
        "warm-up": of(schedule.warmup_steps, warmup, "schedule.warmup_steps", "schedule.warmup"),
        "schedule": of(schedule.name, f"{schedule.name}, {shape}", "schedule.name"),
    }
    if (scale := recipe.loss_scaling) is not None:
        text = f"{scale.initial:g}, doubles after {scale.window:,} steps, halves at each overflow"
        text += f" from number {scale.hysteresis} on" * (scale.hysteresis > 1)
        section["loss scale"] = of(scale.initial, text, *(f"loss_scale.{name}" for name in type(scale).model_fields))
    return section


def _given(recipe: Recipe, document: Document) -> list[str]:
    """The keys of `optim` that the recipe writes, of those that shape the update."""
    shown_apart = {"name", "learning_rate", "max_grad_norm", "gradient_dtype"}
    keys = (f"optim.{key}" for key in type(recipe.optim).model_fields if key not in shown_apart)
    return [key for key in keys if source(document, key) != DEFAULT]


def _rates(recipe: Recipe, peak: float, num_steps: int | None) -> tuple[list[float], int | None]:
    """The learning rate over the run, and for how many steps: if they are unknown, such that warm-up and decay are
    seen. None: the shape is the same for every length.
    """
    schedule = recipe.schedule
    marked = schedule.fixed_steps
    steps = num_steps or (10 * marked if marked else POINTS)
    places = (i * steps // POINTS for i in range(POINTS)) if steps > POINTS else range(steps)
    return [learning_rate(step, steps, peak, schedule) for step in places], steps if num_steps or marked else None


def _precision_sources(name: str, recipe: Recipe, strategy: Strategy, document: Document) -> tuple[str, ...]:
    if name == "reductions" and recipe.optim.gradient_dtype is not None:
        return (source(document, "optim.gradient_dtype"),)
    key = {"gradients": "data_types", "reductions": "communication_data_type"}.get(name)
    if strategy.deepspeed is not None and key in strategy.deepspeed:
        return (f"{strategy.deepspeed_file}: {key}",)
    if strategy.kind != "zero" and name not in ("compute", "frozen weights"):
        return ("the engine",)
    return (source(document, "mixed_precision"),)


def _costs(setting: CostInputs) -> Section:
    section: Section = {}
    for where in costs.PLACES:
        if words := costs.states_in_words(setting, where):
            section[where] = Quantity(value=costs.total(costs.shares(setting), where), text=words)
    traffic = costs.total_traffic(setting)
    section["traffic"] = Quantity(value=traffic, text=costs.traffic_in_words(setting))
    if links := costs.links(setting):
        section["links"] = Quantity(value=links, text=links_in_words(links))
    return section


def _deepspeed(
    recipe: Recipe, strategy: Strategy, plan: Plan
) -> tuple[dict[str, Any] | None, dict[str, tuple[Any, Any]]]:
    """The configuration, and in what it is not the file."""
    config = deepspeed_config(strategy, plan, recipe)
    if config is None or strategy.deepspeed is None:
        return None, {}
    separate_swap(config, recipe.run.output_dir)
    written = (
        strategy.deepspeed if strategy.deepspeed_file is None else read_document(Path(strategy.deepspeed_file)).values
    )
    before, after = flatten(written), flatten(config)
    return config, {key: (before.get(key), value) for key, value in after.items() if before.get(key) != value}


def in_words(run: Explanation, *, plain: bool = False) -> str:
    """The page for a terminal; `plain` in ASCII."""
    short = {quantity.value: name for name, quantity in run.files.items()}
    rows = _rows(run.files, short)
    for title, section in run.sections.items():
        rows += ["", title, *_rows(section, short)]
        if title == "OPTIMIZER":
            rows += [f"  {line}" for line in _chart(run, plain)]
    if changes := run.deepspeed_changes:
        shown = [(key, f"{_describe(before)} -> {_describe(after)}") for key, (before, after) in changes.items()]
        left = [key for key, value in flatten(run.deepspeed or {}).items() if value == "auto"]
        shown += [(key, '"auto" -> what a run finds in the model') for key in left]
        rows += ["", "DEEPSPEED reads the json with", page(*shown)]
    return page(*rows, "", "LAUNCH", f"  {show_command(run.command)}")


def _rows(section: Section, short: dict[str, str]) -> list[Row]:
    return [
        (name, quantity.text, *filter(None, [", ".join(shorten(place, short) for place in quantity.sources)]))
        for name, quantity in section.items()
    ]


def shorten(place: str, short: dict[str, str]) -> str:
    """`recipes/quickstart.yaml:31` -> `recipe:31`."""
    name, colon, line = place.partition(":")
    return short.get(name, name) + colon + line


def _chart(run: Explanation, plain: bool) -> list[str]:
    peak = max(run.rates)
    if run.num_steps is None:
        ticks = ["0 %", "of the run", "100 %"]
    else:
        ticks = ["step 1", f"{run.num_steps // 2:,}", f"{run.num_steps:,}"]
    return draw(run.rates, bottom="0", top=number(peak), ticks=ticks, plain=plain)


def _describe(value: Any) -> str:
    if value is None:
        return "absent"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else f"{value!r}".replace("'", '"')


def as_dict(run: Explanation) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "files": {name: quantity.value for name, quantity in run.files.items()},
        "quantities": {
            title.lower(): {
                name: {"value": quantity.value, "text": quantity.text, "from": list(quantity.sources)}
                for name, quantity in section.items()
                if title != COSTS
            }
            for title, section in run.sections.items()
            if title != COSTS
        },
        "bytes_a_parameter": costs.as_dict(run.setting),
        "learning_rate": {"num_steps": run.num_steps, "values": run.rates},
        "deepspeed": run.deepspeed,
        "command": run.command,
    }
