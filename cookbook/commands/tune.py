"""`cookbook tune`: tries the best settings of the forecast for some steps each, and writes the fastest down."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from typer import Option

import simulated_gpus
from cookbook.commands.launch import run_command
from cookbook.commands.plan.planning import machines_for
from cookbook.commands.shared.arguments import RECIPE, Assignments, Strategies, positive
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy, find_strategy, known_strategies, load_strategy
from cookbook.start.run_plan import default_num_processes, launch_command, load_pair, load_single
from cookbook.system import signals, status
from cookbook.system.child import was_signalled
from cookbook.system.console import say
from cookbook.system.files import RecipeError
from cookbook.system.hardware import Machines
from cookbook.system.imports import quiet_deepspeed
from cookbook.system.machine import num_cores, num_gpus
from cookbook.system.record_files import read_lines, replace_file

WARM_UP = 2
"""First steps of a trial, which are not counted: kernels are chosen and memory is allocated."""
QUIET = {
    "run.resume": "never",
    "run.check_export": "false",
    "run.eval_every_steps": "null",
    "run.evals_per_epoch": "null",
    "run.sample_every_steps": "null",
    "run.sample_tokens": "null",
    "run.save_every_steps": "null",
    "run.saves_per_epoch": "null",
    "run.save_every_minutes": "null",
    "run.save_first_step": "false",
    "run.keep_best": "0",
    "run.export": "last",
    "run.early_stopping_patience": "null",
    "run.early_stopping_threshold": "null",
    "run.callbacks": "[]",
    "run.metrics": "[]",
    "run.metric_for_best_model": "null",
    "run.trackers": "[]",
    "run.on_out_of_memory": "stop",
    "data.eval": "{}",
    "data.holdout": "0",
}
"""A trial trains; it does not evaluate, and saves at its end only."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that are tuned; none of them changes the curve."""

    strategy: Strategy
    micro_batch: int
    checkpointing: bool | str

    @property
    def keys(self) -> dict[str, str]:
        """The keys of a recipe, with their values in YAML."""
        return {
            "strategy": self.strategy.name if self.strategy.name in known_strategies() else self.strategy.path,
            "batch.micro_batch_size": str(self.micro_batch),
            "model.gradient_checkpointing": str(self.checkpointing).lower(),
        }

    @property
    def words(self) -> str:
        return ", ".join(f"{key.split('.')[-1]} {value}" for key, value in self.keys.items())


@dataclass(frozen=True, kw_only=True)
class Candidate:
    settings: Settings
    why: str
    rank: tuple[Any, ...]


def tune(
    path: Annotated[Path, RECIPE],
    *,
    gpus: Annotated[str | None, Option(metavar="8xH100", help="or cpu; default: here, or the label")] = None,
    strategy: Strategies = None,
    trials: Annotated[int, Option(callback=positive, help="settings to try")] = 4,
    steps: Annotated[int, Option(callback=positive, help="of each, beyond the first two")] = 8,
    assignments: Assignments,
) -> int:
    """Try the best settings of the forecast; keep the fastest."""
    recipe, loaded = load_single(path, assignments, None)
    if recipe.batch.micro_batch_size is None:
        raise RecipeError(f"{path}: batch.micro_batch_tokens is not tuned; write batch.micro_batch_size")
    strategies = [load_strategy(find_strategy(name)) for name in strategy or known_strategies()]
    machines = machines_for(path, gpus, {})
    chosen = candidates(recipe, loaded, strategies, machines, str(path))[:trials]
    if not chosen:
        raise RecipeError(f"{path}: nothing is known to fit on {machines.text}; see cookbook plan {path}")
    say(f"TUNE of {path} on {machines.text}: {steps} steps each, after {WARM_UP} that are not counted")
    for candidate in chosen:
        say(f"  {candidate.settings.words}: {candidate.why}")
    here = num_gpus()
    if simulated_gpus.is_active() or machines.num_gpus != here:
        there = "simulated GPUs" if simulated_gpus.is_active() else f"{here} GPUs"
        say(f"nothing was tried: this machine has {there}, whose speed is no measure for {machines.text}")
        return 0
    speeds = {candidate.settings: measure(path, candidate.settings, recipe, assignments, steps) for candidate in chosen}
    for settings, speed in speeds.items():
        say(f"  {settings.words}: {'failed' if speed is None else f'{speed:,.0f} tokens/s'}")
    best = max(
        (settings for settings in speeds if speeds[settings] is not None),
        key=lambda settings: speeds[settings] or 0.0,
        default=None,
    )
    if best is None:
        return 1
    replace_file(path.resolve(), with_values(path.read_text(encoding="utf-8"), best.keys))
    say(f"{path}: {best.words}")
    return 0


def candidates(
    recipe: Recipe, own: Strategy, strategies: list[Strategy], machines: Machines, name: str
) -> list[Candidate]:
    """The recipe's own settings first, then one micro-batch for each strategy and checkpointing that may run: by the
    forecast of time, or without one by what costs least: no recomputation, no offload, large products.
    """
    quiet_deepspeed()
    from cookbook.forecast.ranking import forecast_all
    from cookbook.forecast.verdict import MAY_RUN

    own_kind = recipe.model.gradient_checkpointing
    kinds = tuple(dict.fromkeys((False, "selective", True, own_kind))) if machines.num_gpus else (own_kind,)
    by_forecast = []
    for kind in kinds:
        model = recipe.model.model_copy(update={"gradient_checkpointing": kind})
        changed = recipe.model_copy(update={"model": model})
        report = forecast_all(changed, strategies, machines, name)
        for place, forecast in enumerate(report.forecasts):
            if forecast.verdict not in MAY_RUN or forecast.plan is None:
                continue
            for size in _sizes(recipe, forecast.plan.data_parallel_size, forecast.largest_micro_batch):
                settings = Settings(strategy=forecast.strategy, micro_batch=size, checkpointing=kind)
                seconds = (forecast.time.low + forecast.time.high) / 2 if forecast.time else 0.0
                is_own = (forecast.strategy.path, size, kind) == (own.path, recipe.batch.micro_batch_size, own_kind)
                why = f"{forecast.verdict}" + (f", {seconds:.2f} s a step by the forecast" if forecast.time else "")
                rank = (not is_own, seconds, kinds.index(kind), place, -size)
                by_forecast.append(Candidate(settings=settings, why="the recipe's own; " * is_own + why, rank=rank))
    return sorted(by_forecast, key=lambda candidate: candidate.rank)


def _sizes(recipe: Recipe, data_parallel_size: int, largest: int | None) -> Iterator[int]:
    """The largest micro-batch that fits and splits the batch, and the recipe's own."""
    most = recipe.batch.global_batch_size // data_parallel_size
    even = [size for size in range(1, most + 1) if most % size == 0 and size <= (largest or most)]
    own = recipe.batch.micro_batch_size
    yield from sorted({*even[-1:], *(size for size in even if size == own)}, reverse=True)


def measure(path: Path, settings: Settings, recipe: Recipe, assignments: list[str], steps: int) -> float | None:
    """Tokens per second of a short run with these settings; None if it failed. Each trains on the same samples."""
    strategy = settings.strategy
    parent = Path(recipe.run.output_dir).resolve().parent  # a disk with room for a checkpoint
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tune-", dir=parent) as folder:
        keys = QUIET | settings.keys | {"run.output_dir": f"{folder}/run", "run.stop_after_steps": str(steps + WARM_UP)}
        words = [*assignments, *(f"{key}={value}" for key, value in keys.items())]
        try:
            load_pair(path, words, Path(strategy.path))
        except RecipeError as error:
            say(error)
            return None
        count = default_num_processes(strategy, num_gpus())
        command = launch_command(str(path), strategy, num_processes=count, assignments=words)
        threads = {"OMP_NUM_THREADS": str(max(1, num_cores() // count))}
        code = run_command(command, threads | dict(os.environ), Path(folder) / "run")
        record = status.read(Path(folder) / "run")
        is_stopped = code == signals.EXIT_CODE and (record is None or record.get("reason") in signals.REASONS)
        if is_stopped or was_signalled():  # and not after its steps
            raise signals.SignalExit(signals.EXIT_CODE)
        if code not in (0, signals.EXIT_CODE):
            return None
        return _speed(Path(folder) / "run/metrics.jsonl")


def _speed(metrics: Path) -> float | None:
    counted = [line for line in read_lines(metrics) if "step_seconds" in line][WARM_UP:]
    seconds = sum(line["step_seconds"] for line in counted)
    return sum(line["num_tokens"] for line in counted) / seconds if seconds else None


def with_values(text: str, values: dict[str, str]) -> str:
    """A recipe's text with other values at some dotted keys of at most two parts; all else stays, comments included."""
    for key, value in values.items():
        text = _with_value(text, key.split("."), value)
    return text


def _with_value(text: str, keys: list[str], value: str) -> str:
    node = yaml.compose(text)
    for i, name in enumerate(keys):
        assert isinstance(node, yaml.MappingNode)
        child = next((child for key, child in node.value if key.value == name), None)
        if child is None:
            *sections, key = keys[i:]  # a section that only the base of the recipe has is new here
            return _insert(text, node, "".join(f"{name}: {{" for name in sections) + key, value + "}" * len(sections))
        node = child
    assert node is not None
    return text[: node.start_mark.index] + value + text[node.end_mark.index :]


def _insert(text: str, mapping: yaml.MappingNode, key: str, value: str) -> str:
    """A new first key of a mapping, in its style."""
    at = mapping.value[0][0].start_mark
    end = ", " if mapping.flow_style else "\n" + " " * at.column
    return f"{text[: at.index]}{key}: {value}{end}{text[at.index :]}"
