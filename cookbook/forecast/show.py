"""A forecast for people: a row and a bar for each strategy; and for programs: JSON."""

from pathlib import Path
from typing import Any

from cookbook.forecast import UNKNOWN, Forecast, PlanReport, tokens_of_step
from cookbook.forecast.memory import GIB
from cookbook.hardware import Machines
from cookbook.plan import describe_batch

PARTS = (
    ("W", "parameters", "weights"),
    ("G", "gradients", "gradients"),
    ("O", "optimizer", "optimizer"),
    ("B", "gathered", "gathered and buffers"),
    ("A", "activations", "activations"),
    ("L", "logits", "head and loss"),
)
BAR = 40
OWN = "*"
"""Marks the strategy that the recipe names."""
HEADER = ("strategy", "GPUs", "verdict", "GiB a GPU", "micro-batch", "length", "step", "limit", "host GiB", "disk GiB")


def in_words(report: PlanReport, recipe_name: str, *, num_samples: int | None, price: float | None) -> str:
    """The whole answer.

    Args:
        num_samples: rows of the training data, for the length of the run.
        price: of a GPU for an hour.
    """
    machines = report.machines
    best = report.forecasts[0]
    lines = [
        f"PLAN of {recipe_name} on {_describe(machines)}",
        *(f"  note       {note}" for note in machines.notes),
        f"  model      {report.model}, {_parameters(report.num_parameters)} parameters"
        f" ({_parameters(report.num_trained)} trained); structure from {report.origin}",
        f"  a step     {_step(report, best)}",
        f"             at most {tokens_of_step(report.recipe):,} tokens; activations {_kept(report)}",
    ]
    if best.memory is not None:
        lines += ["", *_table(report), "", *_bars(report), *_idle(report), *_unknown(report)]
    lines += _cannot_run(report)
    if best.memory is not None:
        lines += ["", *_best(report, best, num_samples=num_samples, price=price)]
    return "\n".join(lines)


def _parameters(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e8 else f"{count / 1e6:.3g} M"


def _idle(report: PlanReport) -> list[str]:
    """A mesh has the size that its file writes."""
    whole = report.machines.num_gpus
    few = [one for one in report.forecasts if one.memory is not None and 1 < one.num_processes < whole]
    return [
        f"  {one.strategy.name} has {one.num_processes} processes, as its file writes: {whole - one.num_processes} of"
        f" {whole} GPUs would have nothing to do"
        for one in few
    ]


def _unknown(report: PlanReport) -> list[str]:
    lines = [f"  {one.strategy.name}: {'; '.join(one.why)}" for one in report.forecasts if one.verdict in UNKNOWN]
    return [*lines, "  what a machine has: HOST_GIB=, NVME_GIB= (--host-gib, --nvme-gib)"] if lines else []


def _cannot_run(report: PlanReport) -> list[str]:
    names: dict[str, list[str]] = {}
    for one in report.forecasts:
        if one.verdict == "cannot run":
            names.setdefault(_short(one.why[0]), []).append(one.strategy.name)
    lines = [line for why, of in names.items() for line in (f"  {', '.join(of)} cannot run:", f"    {why}")]
    return ["", *lines] if lines else []


def _describe(machines: Machines) -> str:
    if machines.usable_gib is None:
        return "the CPU"
    return f"{machines.text}, of which a run can have {machines.usable_gib:.0f} GiB each"


def _step(report: PlanReport, best: Forecast) -> str:
    if best.plan is None:
        return f"{report.recipe.batch.global_batch_size} sequences"
    return describe_batch(report.recipe, best.plan)


def _kept(report: PlanReport) -> str:
    saved = {True: "recomputed", "selective": "recomputed but for products", False: "kept"}
    return saved[report.recipe.model.gradient_checkpointing]


def _table(report: PlanReport) -> list[str]:
    rows = [HEADER]
    for one in report.forecasts:
        if one.memory is None:
            continue
        low, high = one.memory.needed if report.machines.gpus_each else (one.memory.allocated,) * 2
        rows.append(
            (
                _name(report, one),
                str(one.num_processes),
                one.verdict.replace("host memory", "host"),  # as wide as a terminal; it is told in full below
                f"{_gib(low)} to {_gib(high)}" if high > low else _gib(low),
                "<1" if one.largest_micro_batch == 0 else _count(one.largest_micro_batch),
                _count(one.longest),
                _range(one.time.low, one.time.high, f" s{' !' if report.time_caveat else ''}") if one.time else "-",
                one.time.bottleneck if one.time else "-",
                _gib(one.host) if one.host else "-",
                _gib(one.disk) if one.disk else "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    own = any(_is_own(report, one) for one in report.forecasts if one.memory is not None)
    notes = [f"  {OWN} as the recipe says"] if own else []
    if report.time_caveat and any(one.time for one in report.forecasts):
        notes.append(f"  ! {report.time_caveat}")
    return [*(line.rstrip() for line in lines), *notes]


def _is_own(report: PlanReport, one: Forecast) -> bool:
    """Whether the recipe names this strategy."""
    return Path(one.strategy.path) == Path(report.recipe.strategy)


def _name(report: PlanReport, one: Forecast) -> str:
    return f"{one.strategy.name} {OWN}" if _is_own(report, one) else one.strategy.name


def _bars(report: PlanReport) -> list[str]:
    shown = [one for one in report.forecasts if one.memory is not None]
    usable = report.machines.usable_gib
    whole = usable * GIB if usable is not None else max(one.memory.needed[1] for one in shown if one.memory)
    width = max(len(one.strategy.name) for one in shown)
    end = f"{_gib(round(whole))} GiB"
    lines = [f"  {'':{width}}  0{end:>{BAR}}"]
    for one in shown:
        assert one.memory is not None
        lines.append(f"  {one.strategy.name:{width}} |{_bar(one, whole)}")
    legend = [f"{letter} {words}" for letter, _, words in PARTS]
    return [*lines, f"  {'  '.join(legend[:4])}", f"  {'  '.join(legend[4:])}  - CUDA, NCCL and fragments, at most"]


def _bar(one: Forecast, whole: float) -> str:
    """Cells of 1/BAR of a GPU."""
    assert one.memory is not None
    text, filled = "", 0.0
    for letter, name, _ in PARTS:
        filled += getattr(one.memory, name)
        text += letter * (round(filled / whole * BAR) - len(text))
    if one.verdict == "not judged":
        return text[:BAR]
    text += "-" * (round(one.memory.needed[1] / whole * BAR) - len(text))
    return f"{text[:BAR]:{BAR}}|{'' if one.verdict == 'fits' else f' {one.verdict}'}"


def _best(report: PlanReport, best: Forecast, *, num_samples: int | None, price: float | None) -> list[str]:
    memory, recipe, machines = best.memory, report.recipe, report.machines
    assert memory is not None
    if best.verdict == "does not fit":
        said = report.suggestion or "no other strategy, smaller micro-batch, checkpointing or adapter helps: take more"
        return [f"  Nothing fits. Nearest is {best.strategy.name}: {'; '.join(best.why)}.", f"  Next: {said}."]
    parts = [f"{words} {_gib(getattr(memory, name))}" for _, name, words in PARTS if getattr(memory, name) >= GIB // 10]
    low, high = memory.reserved
    reserved = f", {_gib(low)} to {_gib(high)} reserved" if machines.gpus_each else ""
    lines = [
        f"  {best.strategy.name}: {_reason(report, best)}",
        f"    peak       {_gib(memory.allocated)} GiB allocated{reserved}, at {memory.moment}",
        f"               {', '.join(parts) or 'nothing of 0.1 GiB or more'}",
        f"    disk       {_gib(best.checkpoint)} GiB a checkpoint",
    ]
    if best.is_bound:
        lines.append("    activations are a bound by formula: this model's code could not be traced")
    steps = _num_steps(report, num_samples)
    length = f"{steps:,} steps" if steps else "not known: run.num_epochs of data that was not read; give SAMPLES="
    if best.time is None:
        lines += [f"    time       {report.no_time}", f"    length     {length}"]
        return lines + (["    price      not known without a time"] if price is not None else [])
    per_gpu = best.time.tokens_per_second(tokens_of_step(recipe), best.num_processes)
    lines.append(f"    speed      {_range(*per_gpu, ' tokens/s a GPU')}, limited by {best.time.bottleneck}")
    if steps is None:
        lines.append(f"    length     {length}")
        return lines + (["    price      not known without a length"] if price is not None else [])
    hours = best.time.hours(steps)
    lines.append(f"    length     {length}, {_range(*hours, ' hours')} at full length; shorter samples take less")
    if price is not None:
        cost = best.time.price(steps, per_gpu_hour=price, num_gpus=machines.num_gpus)
        lines.append(f"    price      {_range(*cost, '')} at {price:g} a GPU and hour")
    return lines


def _reason(report: PlanReport, best: Forecast) -> str:
    fitting = [one for one in report.forecasts if one.verdict == "fits"]
    if best.verdict == "not judged":
        return "what it allocates; a CPU's memory is shared, so nothing is judged"
    if len(report.forecasts) == 1 and best.verdict == "fits":
        return "fits"
    if best.verdict == "tight" or best.verdict in UNKNOWN:
        return "may fit: " + "; ".join(best.why)
    if len(fitting) == 1:
        return "the one that fits"
    if best.time is not None:
        return f"the fastest of {len(fitting)} that fit"
    return f"the simplest of {len(fitting)} that fit"


def _num_steps(report: PlanReport, num_samples: int | None) -> int | None:
    recipe = report.recipe
    if recipe.run.max_steps is not None:
        return recipe.run.max_steps
    if num_samples is None:
        return None
    return recipe.run.total_steps(-(-num_samples // recipe.batch.global_batch_size))


def _short(mistake: str) -> str:
    return mistake.split(": ", 1)[-1] if ": " in mistake else mistake


def _gib(num_bytes: float) -> str:
    """Two digits: more a forecast can't back."""
    value = num_bytes / GIB
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.1 else "<0.1"


def _range(low: float, high: float, unit: str) -> str:
    def two_digits(value: float) -> str:
        return f"{float(f'{value:.2g}'):,.10g}"

    return f"{two_digits(low)} to {two_digits(high)}{unit}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def as_record(report: PlanReport, recipe_name: str, *, num_samples: int | None, price: float | None) -> dict[str, Any]:
    """Everything, in bytes and seconds."""
    steps = _num_steps(report, num_samples)
    found = []
    for one in report.forecasts:
        memory, time = one.memory, one.time
        record: dict[str, Any] = {
            "strategy": one.strategy.path,
            "is_own": _is_own(report, one),
            "verdict": one.verdict,
            "why": one.why,
            "num_processes": one.num_processes,
        }
        if one.plan is not None:
            record["gradient_accumulation_steps"] = one.plan.gradient_accumulation_steps
        if memory is not None:
            record |= {
                "memory": {name: getattr(memory, name) for _, name, _ in PARTS}
                | {"moment": memory.moment, "allocated": memory.allocated, "reserved": memory.reserved}
                | {"needed": memory.needed, "is_bound": one.is_bound},
                "host": one.host,
                "disk": one.disk,
                "checkpoint": one.checkpoint,
                "largest_micro_batch": one.largest_micro_batch,
                "longest": one.longest,
            }
        if time is not None:
            record["step_seconds"] = [time.low, time.high]
            record["bottleneck"] = time.bottleneck
            record["parts"] = {part.name: [part.low, part.high] for part in time.parts}
            if steps is not None:
                record["hours"] = time.hours(steps)
                if price is not None:
                    record["price"] = time.price(steps, per_gpu_hour=price, num_gpus=report.machines.num_gpus)
        found.append(record)
    machines = report.machines
    return {
        "recipe": recipe_name,
        "machines": {"text": machines.text, "gpus": machines.num_gpus, "usable_gib": machines.usable_gib}
        | {"notes": machines.notes},
        "model": {"type": report.model, "parameters": report.num_parameters, "trained": report.num_trained}
        | {"structure_from": report.origin},
        "steps": steps,
        "forecasts": found,
        "next_rung": report.suggestion,
        "no_time": report.no_time,
        "time_caveat": report.time_caveat,
    }
