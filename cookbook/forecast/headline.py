"""The answer in four lines: whether a run fits and what to take, its memory, its time and price, and the next step."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cookbook.config.outside_words import TRANSFORMERS, is_address
from cookbook.config.sections import RoundsSection
from cookbook.config.strategy import Strategy, strategy_path
from cookbook.forecast.changes import batch_for_all, small_batch
from cookbook.forecast.fitting import ByAuto
from cookbook.forecast.memory import GIB, Memory
from cookbook.forecast.order import rank
from cookbook.forecast.ranking import PlanReport
from cookbook.forecast.sampler import SamplerForecast
from cookbook.forecast.show import (
    hours_in_words,
    num_steps,
    overridden,
    range_in_words,
    sampling_in_words,
    seconds_in_words,
)
from cookbook.forecast.step_time import Range
from cookbook.forecast.verdict import MAY_RUN, PRICED_TOKENS, UNKNOWN, Forecast, Verdict, tokens_of_step
from cookbook.start.run_plan import CHECKPOINTING, MICRO_BATCH, autos
from cookbook.system.console import page, width
from cookbook.system.hardware import enough_gib, in_gib


def best_by_auto(report: PlanReport, settings: Sequence[ByAuto]) -> ByAuto | None:
    """The fastest strategy as `launch` runs it with `auto`, compiled where that is served; on one GPU the plain process
    unless another is surely faster. None: nothing is known to fit.
    """
    ranked = sorted(settings, key=lambda setting: setting.rank)
    if not ranked or report.machines.num_gpus != 1:
        return next(iter(ranked), None)
    best, order = ranked[0], rank(ranked[0].best.forecast)[0]
    for setting in ranked:
        is_plain = setting.strategy.kind == "single" and rank(setting.best.forecast)[0] == order
        if is_plain and (setting.time is None or best.time is None or setting.time.low <= best.time.high):
            return setting
    return best


@dataclass(frozen=True)
class _Run:
    """The run that the four lines describe."""

    forecast: Forecast
    memory: Memory
    time: Range | None
    compiled: Range | None
    """The time with `model.compile` as well."""
    settings: str
    """Strategy and settings, in words."""
    options: list[str]
    """Options of a launch, in words of a command line."""


def in_words(
    report: PlanReport,
    settings: Sequence[ByAuto],
    *,
    next_step: list[str],
    is_recipe: bool,
    asked: Sequence[str] = (),
    num_samples: int | None,
    price: float | None,
) -> str:
    """The answer.

    Args:
        settings: strategies as `launch` runs them with `auto`.
        next_step: the command that follows if something fits, without its options.
        is_recipe: a recipe was asked for, and the options make it that run.
        asked: the words of the user that make the run another than recipe or model alone: `--set`, and of a model
            `--method` and `--length`.
        num_samples: rows of the training data, for the length of the run.
        price: of a GPU for an hour.
    """
    run, best, of_batch = _run(report, settings), report.forecasts[0], small_batch(report.recipe, report.machines)
    where = "the CPU" if report.machines.usable_gib is None else report.machines.text
    if run is None or run.forecast.verdict not in MAY_RUN:
        rows = [("next", _first(report.suggestion) or "--all has the reasons")]
        if best.memory is not None and of_batch is None:  # else of a run that nobody asked for
            rows.insert(0, ("memory", f"{_memory(report, best.memory)}, of {best.strategy.name}"))
        rows[-1:-1] = [("note", note) for note in report.machines.notes]
        return "\n".join([page((f"NO, on {where}: {_why_not(report)}",), indent=0), page(*rows)])
    rows = [("memory", _memory(report, run.memory) + _elsewhere(run.forecast))]
    if report.sampler is not None:
        rows.append(("sampler", report.sampler.words))
    rows.append(("time", _time(report, run, num_samples, price)))
    if report.sampler is not None:
        rows.append(("round", _round(report, report.sampler, run, price)))
    rows += [
        ("note", note)
        for note in (
            *report.machines.notes,
            *overridden(report.recipe, num_samples),
            *filter(None, [of_batch or _idle(report, run), *report.doubts, report.scores]),
            *filter(None, [report.time_caveat if run.time else None]),
        )
    ]
    if run.forecast.verdict in UNKNOWN and report.suggestion is not None:
        rows.append(("or", f"{'on the GPUs alone ' * (best.verdict in MAY_RUN)}{_first(report.suggestion)}"))
    is_short = run.forecast.verdict == "tight" and report.suggestion is not None
    options = [*_pairs_left(asked, run.options), *run.options] if is_recipe else []
    rows.append(("next", str(_first(report.suggestion)) if is_short else command([*next_step, *options])))
    if asked and not is_recipe and not is_short:
        keys = ", ".join(_as_keys(asked))
        rows.append(("then", f"init chooses by the rows and the machine: its recipe is to have {keys}"))
    answer = f"{_answer(run.forecast)} on {where}: {run.settings}"
    if report.sampler is not None and not report.sampler.fits:
        answer = f"NO, on {where}: the sampler has no room; a run has: {run.settings}"
    return "\n".join([page((answer,), indent=0), page(*rows)])


ANSWERS: dict[Verdict, str] = {"fits": "YES,", "tight": "MAYBE,", "not judged": "NOT JUDGED"}


def _answer(forecast: Forecast) -> str:
    disk = f" and {enough_gib(forecast.disk)} GiB of NVMe" if forecast.disk else ""
    needed = f"YES, if a machine has {enough_gib(forecast.host)} GiB of memory{disk},"
    return ANSWERS.get(forecast.verdict, needed)


def _run(report: PlanReport, settings: Sequence[ByAuto]) -> _Run | None:
    own = report.recipe.strategy
    if setting := best_by_auto(report, settings):
        fitting, memory = setting.best, setting.best.forecast.memory
        assert memory is not None
        words = f"{setting.strategy.name}, micro-batch {fitting.batch.micro_batch_size}, checkpointing"
        words += f" {str(fitting.checkpointing).lower()}"
        options = [] if setting.strategy.path == own else _option_for(setting.strategy)
        for key in [] if autos(report.recipe) else [MICRO_BATCH, CHECKPOINTING]:
            options += ["--set", f"{key}=auto"]
        return _Run(fitting.forecast, memory, fitting.time, setting.compiled, words, options)
    best = report.forecasts[0]
    if best.memory is None:
        return None
    options = [] if best.strategy.path == own else _option_for(best.strategy)
    return _Run(best, best.memory, best.time, None, f"{best.strategy.name} with the recipe's own settings", options)


def _why_not(report: PlanReport) -> str:
    best = report.forecasts[0]
    if of_batch := small_batch(report.recipe, report.machines):
        return of_batch
    if best.memory is None:
        reasons = dict.fromkeys(forecast.why[0].split(": ", 1)[-1] for forecast in report.forecasts)
        return f"no strategy can run: {next(iter(reasons))}"
    return f"nothing fits; nearest is {best.strategy.name}: {'; '.join(best.why)}"


def _memory(report: PlanReport, memory: Memory) -> str:
    usable = report.machines.usable_gib
    if usable is None:
        return f"{in_gib(memory.allocated)} GiB; a CPU's memory is shared, so nothing is judged"
    return f"{in_gib(*memory.needed)} of {in_gib(usable * GIB)} GiB of each GPU"


def _idle(report: PlanReport, run: _Run) -> str | None:
    """Say that GPUs are paid for and not used, and which batch all of them can share."""
    used, count = run.forecast.num_processes, report.machines.num_gpus
    if used >= count:
        return None
    words = f"{run.forecast.strategy.name} runs on {used:,} of the {count:,} GPUs, and a price is of all"
    size = batch_for_all(report.recipe, report.machines)
    if size == report.recipe.batch.global_batch_size:
        return words
    return f"{words}; with batch.global_batch_size: {size} all can share the samples of a step"


def _elsewhere(forecast: Forecast) -> str:
    disk = f", {enough_gib(forecast.disk)} GiB of NVMe" if forecast.disk else ""
    return f"; {enough_gib(forecast.host)} GiB of each machine's memory{disk}" if forecast.strategy.offloads else ""


def _time(report: PlanReport, run: _Run, num_samples: int | None, price: float | None) -> str:
    if run.time is None:
        return str(report.no_time) + "; no price without a time" * (price is not None)
    steps, tokens = num_steps(report.recipe, num_samples), tokens_of_step(report.recipe)
    words = f"{range_in_words(run.time.low, run.time.high, ' s')} a step of {tokens:,} tokens"
    if run.compiled is not None:
        words += f", compiled {range_in_words(run.compiled.low, run.compiled.high, ' s')}"
    amount = steps if steps is not None else PRICED_TOKENS / tokens
    what = f"{steps:,} steps" if steps is not None else f"{PRICED_TOKENS // 10**6} M tokens"
    words += f"; {what}: {hours_in_words(*run.time.hours(amount))}"
    if price is not None:
        total = run.time.price(amount, per_gpu_hour=price, num_gpus=report.machines.num_gpus)
        words += f", price {range_in_words(*total, '')}"
    return words


def _round(report: PlanReport, sampler: SamplerForecast, run: _Run, price: float | None) -> str:
    """The time of a round: its sampling beside its training, and of all rounds."""
    rounds, steps = report.recipe.rounds, num_steps(report.recipe, None)
    if sampler.time is None or run.time is None:
        return f"no forecast of the time of sampling: {sampler.no_time or report.no_time}"
    assert rounds is not None and steps is not None
    each = steps / rounds.num_rounds
    training = (each * run.time.low, each * run.time.high)
    whole = sampler.time.of_round(training)
    how = "one after the other" if not sampler.time.beside else "while the round before trains"
    hours = (rounds.num_rounds * whole[0] / 3600, rounds.num_rounds * whole[1] / 3600)
    words = f"{seconds_in_words(*whole)} by published rates: sampling {sampling_in_words(sampler.time)}, {how};"
    words += f" training {seconds_in_words(*training)}; {rounds.num_rounds:,} rounds: {hours_in_words(*hours)}"
    if price is not None:
        count = report.machines.num_gpus
        words += f", price {range_in_words(price * count * hours[0], price * count * hours[1], '')}"
        words += " without the servers' GPUs" * sampler.time.has_own_gpus
    return f"{words}; without rewards" + " and vLLM's starts" * _starts_each_round(rounds)


def _starts_each_round(rounds: RoundsSection) -> bool:
    return rounds.sampler != TRANSFORMERS and not is_address(rounds.sampler) and not rounds.starts_one_server


def _first(suggestion: str | None) -> str | None:
    """The first of several ways."""
    return suggestion and suggestion.split("; or ")[0]


def _option_for(strategy: Strategy) -> list[str]:
    """The option for a strategy: a shipped one by its name, another by its path."""
    is_shipped = str(strategy_path(strategy.name)) == strategy.path
    return ["--strategy", strategy.name if is_shipped else strategy.path]


def _as_keys(asked: Sequence[str]) -> Iterator[str]:
    """The words of a user, in pairs, as what a recipe has."""
    for option, value in zip(asked[::2], asked[1::2], strict=True):
        if option == "--method":
            yield "no adapter" if value == "full" else f"adapter.name: {value}"
        else:
            key, _, value = value.partition("=") if option == "--set" else ("data.max_length", "", value)
            yield f"{key}: {value}"


def _pairs_left(asked: Sequence[str], options: Sequence[str]) -> list[str]:
    """Pairs of `--set` and an assignment, without those of keys that the options set, or that exclude one of them."""
    changed = {word.partition("=")[0] for word in options}
    if MICRO_BATCH in changed:
        changed.add("batch.micro_batch_tokens")
    pairs = zip(asked[::2], asked[1::2], strict=True)
    return [word for pair in pairs if pair[1].partition("=")[0] not in changed for word in pair]


def command(words: list[str]) -> str:
    """A command for a shell, in lines that a terminal does not break; an option and its value stay together."""
    lines = [""]
    for i, word in enumerate(words):
        text = shlex.quote(word)
        follows = i > 0 and words[i - 1].startswith("--")
        value = len(shlex.quote(words[i + 1])) + 1 if word.startswith("--") else 0
        if not follows and len(lines[-1]) + len(text) + value > width() - 14:
            lines.append("")
        lines[-1] += " " * bool(lines[-1]) + text
    return " \\\n  ".join(lines)
