"""A forecast for people, with a row and a bar for each strategy, and for programs as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cookbook.config.recipe import Recipe
from cookbook.forecast.changes import NOTHING_HELPS
from cookbook.forecast.costs.inputs import micro_batch_of
from cookbook.forecast.costs.traffic import by_link, links_in_words
from cookbook.forecast.fitting import ByAuto
from cookbook.forecast.memory import GIB, Memory
from cookbook.forecast.mesh_sizes import Sizes
from cookbook.forecast.mesh_sizes import in_words as sizes_in_words
from cookbook.forecast.ranking import PlanReport
from cookbook.forecast.sampler import SamplerForecast
from cookbook.forecast.sampling_time import SamplingTime
from cookbook.forecast.scaling import Reference
from cookbook.forecast.step_time import IF_FUSED, link_names, tokens_if_fused
from cookbook.forecast.verdict import UNKNOWN, Forecast, tokens_of_step
from cookbook.start.run_plan import CHECKPOINTING, MICRO_BATCH, autos, describe_batch
from cookbook.system.console import Row, colour, page, width
from cookbook.system.hardware import enough_gib, in_gib

if TYPE_CHECKING:
    from rich.text import Text

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
OF_MEMORY = ("strategy", "GPUs", "verdict", "GiB a GPU", "micro batch", "length")
HEADER = (*OF_MEMORY, "step", "scaling", "limit", "host GiB", "disk GiB")
LEFT_OUT = ("disk GiB", "host GiB", "limit", "length", "scaling", "GPUs", "micro batch")
OF_KERNELS = "by transformers' own code of layers with a state; with flash-linear-attention, mamba-ssm or causal-conv1d"
"""Before the second rate of models that have such layers."""
COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def in_words(
    report: PlanReport,
    recipe_name: str,
    *,
    num_samples: int | None,
    price: float | None,
    sizes: Sequence[Sizes] = (),
    settings: Sequence[ByAuto] = (),
    reference: Reference | None = None,
) -> str:
    """The whole answer.

    Args:
        reference: of the scaling efficiency of strategies.
        settings: strategies as a run has them with `auto`.
        sizes: of meshes, where others than those of the files were tried.
        num_samples: rows of the training data, for the length of the run.
        price: of a GPU for an hour.
    """
    machines, recipe, best = report.machines, report.recipe, report.forecasts[0]
    room = "" if machines.usable_gib is None else f", of which a run can have {machines.usable_gib:.0f} GiB each"
    counts = [count_in_words(count) for count in (report.num_parameters, report.num_trained)]
    step = describe_batch(recipe, best.plan) if best.plan else f"{recipe.batch.global_batch_size} sequences"
    kept = {True: "recomputed", "selective": "recomputed but for products", False: "kept"}
    kept["offload"] = "recomputed from inputs in host memory"
    model = f"{report.model}, {counts[0]} parameters ({counts[1]} trained); structure from {report.origin}"
    most = f"at most {tokens_of_step(recipe):,} tokens; activations {kept[recipe.model.gradient_checkpointing]}"
    notes = (("note", note) for note in (*machines.notes, *report.notes, *sampling_notes(report.sampler)))
    keys = autos(recipe)
    least = [f"{' and '.join(keys)} by auto: here the least, at the end what a run takes"] if settings and keys else []
    parts = [
        page(
            (f"PLAN of {recipe_name} on {'the CPU' if machines.usable_gib is None else machines.text}{room}",), indent=0
        ),
        page(*notes, ("model", model), ("a step", step), ("", most), *((words,) for words in least)),
    ]
    if best.memory is not None:
        parts += ["", _table(report, reference), "", _bars(report)]
    reasons: dict[tuple[str, str], list[str]] = {}
    for forecast in report.forecasts:
        if forecast.memory is None and not _is_for_more_gpus(report, forecast):
            why = forecast.why[0].split(": ", 1)[-1] if forecast.verdict == "cannot run" else forecast.why[0]
            reasons.setdefault((forecast.verdict, why), []).append(forecast.strategy.name)
    parts += [""] if reasons else []
    for (verdict, why), names in reasons.items():
        said = "no forecast of {}:" if verdict == "no forecast" else "{} cannot run:"
        parts += [page((said.format(", ".join(names)),)), page((why,), indent=4)]
    if sizes:
        parts += ["", _sizes(sizes)]
    if best.memory is not None:
        parts += ["", _best(report, best, num_samples=num_samples, price=price)]
    if settings:
        parts += ["", _by_auto(report, settings)]
    return "\n".join(parts)


def _forecasts_with_row(report: PlanReport) -> list[Forecast]:
    """Forecasts that have a row: those that may run, or where nothing fits the nearest."""
    known = [forecast for forecast in report.forecasts if forecast.memory is not None]
    return [forecast for forecast in known if forecast.verdict != "does not fit"] or known[:1]


def _is_for_more_gpus(report: PlanReport, forecast: Forecast) -> bool:
    """Return whether a strategy is a mesh that one GPU can never run, where that is all there is."""
    is_mesh = forecast.strategy.written_mesh.num_processes > 1
    return report.machines.num_gpus == 1 and is_mesh and report.forecasts[0].memory is not None


def _without_room(report: PlanReport) -> list[str]:
    """A line of the strategies that do not fit and have no row, with the nearest."""
    shown = _forecasts_with_row(report)
    rest = [forecast for forecast in report.forecasts if forecast.verdict == "does not fit" and forecast not in shown]
    if not rest:
        return []
    memory, names = rest[0].memory, ", ".join(forecast.strategy.name for forecast in rest)
    assert memory is not None and report.machines.usable_gib is not None
    nearest = f"{in_gib(*memory.needed)} of {in_gib(report.machines.usable_gib * GIB)} GiB"
    which = f"; nearest {rest[0].strategy.name}" if len(rest) > 1 else ""
    return [f"does not fit: {names}{which}, {nearest}"]


def _table(report: PlanReport, reference: Reference | None) -> str:
    rows: list[tuple[str | Text, ...]] = [HEADER]
    notes = []
    for forecast in _forecasts_with_row(report):
        assert forecast.memory is not None
        low, high = forecast.memory.needed if report.machines.gpus_each else (forecast.memory.allocated,) * 2
        name, time = forecast.strategy.name, "-"
        if _is_own(report, forecast):
            name, notes = f"{name} {OWN}", [f"{OWN} as in the recipe"]
        if forecast.time is not None:
            time = range_in_words(forecast.time.low, forecast.time.high, f" s{' !' if report.time_caveat else ''}")
        rows.append(
            (
                name,
                str(forecast.num_processes),
                _verdict(forecast),
                in_gib(low, high),
                "<1" if forecast.largest_micro_batch == 0 else _count(forecast.largest_micro_batch),
                _count(forecast.longest),
                time,
                _efficiency(forecast, reference),
                forecast.time.bottleneck if forecast.time else "-",
                enough_gib(forecast.host) if forecast.host else "-",
                enough_gib(forecast.disk) if forecast.disk else "-",
            )
        )
    if report.time_caveat and any(forecast.time for forecast in report.forecasts):
        notes.append(f"! {report.time_caveat}")
    kept = _columns_kept(rows)
    if reference is not None:
        notes.append(f"scaling: tokens/s a GPU beside those of {reference.words}")
    if left := [HEADER[i] for i in range(len(HEADER)) if i not in kept]:
        notes.append(f"a wider terminal also has: {', '.join(left)}")
    notes += _without_room(report)
    return page(*([row[i] for i in kept] for row in rows), *((note,) for note in notes))


def _efficiency(forecast: Forecast, reference: Reference | None) -> str:
    efficiency = reference and reference.efficiency(forecast)
    if not efficiency:
        return "-"
    low, high = (f"{100 * share:.0f}" for share in efficiency)
    return f"{low} %" if low == high else f"{low} to {high} %"


def _columns_kept(rows: Sequence[Sequence["str | Text"]]) -> list[int]:
    """Columns of `HEADER` that the terminal has room for; the least important are left out first."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    kept = [*range(len(HEADER))]
    for name in LEFT_OUT:
        if sum(widths[i] + 1 for i in kept) + 1 > width():
            kept.remove(HEADER.index(name))
    return kept


def _sizes(meshes: Sequence[Sizes]) -> str:
    """A row for each size of a mesh that was tried, where another than that of the file is best."""
    rows: list[Row] = [("size of the mesh", "verdict", "GiB a GPU", "step", "")]
    for mesh in meshes:
        for tried, forecast in mesh.forecasts:
            notes = ["best"] if forecast is mesh.best else []
            notes += ["in its file"] if tried == mesh.written else []
            notes += [f"with dp_shard_size {forecast.strategy.dp_shard_size}"] if mesh.is_resharded(forecast) else []
            notes += [forecast.why[0].split(": ", 1)[-1]] if forecast.memory is None else []
            rows.append(
                (
                    f"{mesh.name} {sizes_in_words(tried)}",
                    _verdict(forecast),
                    in_gib(*forecast.memory.needed) if forecast.memory else "-",
                    range_in_words(forecast.time.low, forecast.time.high, " s") if forecast.time else "-",
                    ", ".join(notes),
                )
            )
    return page(*rows, ("a size is written in the strategy's file, or in a copy of it",))


def _by_auto(report: PlanReport, settings: Sequence[ByAuto]) -> str:
    """A row for each strategy as a run has it with `auto`."""
    keys = autos(report.recipe) or [MICRO_BATCH, CHECKPOINTING]
    rows: list[Row] = [("strategy", "micro batch", "checkpointing", "GiB a GPU", "step", "compiled")]
    for setting in settings:
        best, memory = setting.best, setting.best.forecast.memory
        assert memory is not None
        rows.append(
            (
                setting.strategy.name,
                _count(best.batch.micro_batch_size),
                str(best.checkpointing).lower(),
                in_gib(*memory.needed),
                range_in_words(best.time.low, best.time.high, " s") if best.time else "-",
                range_in_words(setting.compiled.low, setting.compiled.high, " s") if setting.compiled else "-",
            )
        )
    notes = ["compiled: with model.compile; what memory that takes is forecast with --set model.compile=true"]
    notes *= any(setting.compiled for setting in settings)
    return page((f"With {' and '.join(keys)} by auto:",), *rows, *((note,) for note in notes))


def _verdict(forecast: Forecast) -> "Text":
    # `why` says it in full.
    return colour(forecast.verdict.replace("host memory", "host"), COLOURS.get(forecast.verdict, ""))


def _is_own(report: PlanReport, forecast: Forecast) -> bool:
    """True: the recipe names this strategy."""
    return Path(forecast.strategy.path) == Path(report.recipe.strategy)


def _bars(report: PlanReport) -> str:
    """A bar for each strategy, their legend, and what the table leaves open."""
    usable, num_gpus = report.machines.usable_gib, report.machines.num_gpus
    shown = [(forecast, forecast.memory) for forecast in _forecasts_with_row(report) if forecast.memory is not None]
    bar_bytes = usable * GIB if usable is not None else max(memory.needed[1] for _, memory in shown)
    legend = [f"{letter} {words}" for letter, _, words in PARTS]
    notes = ["  ".join(legend[:4]), "  ".join([*legend[4:], "- CUDA, NCCL and fragments, at most"])]
    for forecast, _ in shown:
        if 1 < forecast.num_processes < num_gpus:
            notes.append(
                f"{forecast.strategy.name} has {forecast.num_processes} processes, as its file writes:"
                f" {num_gpus - forecast.num_processes} of {num_gpus} GPUs would have nothing to do"
            )
    unknown = [
        f"{forecast.strategy.name}: {'; '.join(forecast.why)}" for forecast, _ in shown if forecast.verdict in UNKNOWN
    ]
    if unknown:
        notes += [*unknown, "what a machine has: --host-gib, --nvme-gib"]
    return page(
        ("", f"0{f'{in_gib(round(bar_bytes))} GiB':>{BAR}}", ""),
        *(
            (
                forecast.strategy.name,
                _bar(forecast, bar_bytes),
                "" if forecast.verdict == "fits" else _verdict(forecast),
            )
            for forecast, _ in shown
        ),
        *((note,) for note in notes),
    )


def _bar(forecast: Forecast, bar_bytes: float) -> str:
    """Cells of 1/BAR of a GPU."""
    assert forecast.memory is not None
    text, filled = "|", 0.0
    for letter, name, _ in PARTS:
        filled += getattr(forecast.memory, name)
        text += letter * (1 + round(filled / bar_bytes * BAR) - len(text))
    if forecast.verdict == "not judged":
        return text[: 1 + BAR]
    text += "-" * (1 + round(forecast.memory.needed[1] / bar_bytes * BAR) - len(text))
    return f"{text[: 1 + BAR]:{1 + BAR}}|"


def _best(report: PlanReport, best: Forecast, *, num_samples: int | None, price: float | None) -> str:
    memory, recipe, machines, time = best.memory, report.recipe, report.machines, best.time
    assert memory is not None
    if best.verdict == "does not fit":
        said = report.suggestion or NOTHING_HELPS
        why = (f"Nothing fits. Nearest is {best.strategy.name}: {'; '.join(best.why)}.",)
        return page(why, *_stages(memory), (f"Next: {said}.",))
    sizes = [(words, getattr(memory, name)) for _, name, words in PARTS]
    parts = [f"{words} {in_gib(size)}" for words, size in sizes if size >= GIB // 10]
    low, high = memory.reserved
    reserved = f", {in_gib(low, high)} reserved" if machines.gpus_each else ""
    rows: list[Row] = [
        ("peak", f"{in_gib(memory.allocated)} GiB allocated{reserved}, at {memory.moment}"),
        ("", ", ".join(parts) or "nothing of 0.1 GiB or more"),
        *_stages(memory),
        ("disk", f"{in_gib(best.checkpoint)} GiB a checkpoint"),
    ]
    steps = num_steps(report.recipe, num_samples)
    length = f"{steps:,} steps" if steps else "not known: run.num_epochs of unread data; give --samples"
    length = "; ".join([length, *overridden(recipe, num_samples)])
    if time is None:
        rows.append(("time", str(report.no_time)))
    else:
        per_gpu = time.tokens_per_second(tokens_of_step(recipe), best.num_processes)
        rows.append(("speed", f"{range_in_words(*per_gpu, ' tokens/s a GPU')}, limited by {time.bottleneck}"))
        if best.time_of_kernels is not None:
            fused = best.time_of_kernels.tokens_per_second(tokens_of_step(recipe), best.num_processes)
            rows.append(("", f"{OF_KERNELS} {range_in_words(*fused, ' tokens/s a GPU')}"))
        if best.time_if_fused is not None:
            fused = tokens_if_fused(time, best.time_if_fused, tokens_of_step(recipe), best.num_processes)
            if fused != per_gpu:
                words = f"{IF_FUSED} {range_in_words(*fused, ' tokens/s a GPU')}"
                rows.append(("", f"{words}, as programs with kernels of their own (docs/plan_accuracy.md)"))
        if steps is not None:
            length += f", {range_in_words(*time.hours(steps), ' hours')} at full length; shorter samples take less"
    if best.messages:
        least = "at least " * any(message.is_least for message in best.messages)
        counted = sum(message.calls or 0 for message in best.messages)
        where = " of the last stage" if best.strategy.pp_size > 1 else ""
        rows.append(("sends", f"{least}{counted:,} messages a step from each GPU{where}"))
        rows.append(("", links_in_words(by_link(best.messages, *_links(report, best)))))
    rows.append(("length", length))
    if price is not None:
        cost = f"not known without a {'length' if time else 'time'}"
        if time is not None and steps is not None:
            total = time.price(steps, per_gpu_hour=price, num_gpus=machines.num_gpus)
            cost = f"{range_in_words(*total, '')} at {price:g} a GPU and hour"
        rows.append(("price", cost))
    sure = [page((f"Or, on the GPUs alone and without a doubt: {report.suggestion}.",))] * bool(report.suggestion)
    return "\n".join([page((f"{best.strategy.name}: {_reason(report, best)}",)), page(*rows, indent=4), *sure])


def _stages(memory: Memory) -> list[Row]:
    """A row for each stage of a pipeline."""
    rows: list[Row] = [("stage", "GiB", "micro-batches in flight", "holds", "")] if memory.stages else []
    for i, stage in enumerate(memory.stages):
        size, most = stage.memory.allocated, "the most" * (stage.memory.allocated == memory.allocated)
        rows.append((str(i), in_gib(size), str(stage.in_flight), ", ".join(stage.holds), most))
    return rows


def _links(report: PlanReport, forecast: Forecast) -> tuple[int, tuple[str, str]]:
    """Processes of a machine, and what connects them and the machines."""
    return min(forecast.num_processes, report.machines.gpus_each or forecast.num_processes), link_names(report.machines)


def _reason(report: PlanReport, best: Forecast) -> str:
    num_fitting = sum(forecast.verdict == "fits" for forecast in report.forecasts)
    if best.verdict == "not judged":
        return "what it allocates; a CPU's memory is shared, so nothing is judged"
    if best.verdict != "fits":
        return "may fit: " + "; ".join(best.why)
    if len(report.forecasts) == 1:
        return "fits"
    if num_fitting == 1:
        return "the one that fits"
    return f"the {'fastest' if best.time else 'simplest'} of {num_fitting} that fit, with the recipe's settings"


def num_steps(recipe: Recipe, num_samples: int | None) -> int | None:
    """Steps of a run, or of all rounds; None if they depend on data that nobody counted."""
    if (rounds := recipe.rounds) is not None and rounds.round is None:
        answers = rounds.prompts_per_round * rounds.num_generations
        return rounds.num_rounds * recipe.run.total_steps(-(-answers // recipe.batch.global_batch_size))
    if recipe.run.max_steps is not None:
        return recipe.run.max_steps
    if num_samples is None:
        return None
    return recipe.run.total_steps(-(-num_samples // recipe.batch.global_batch_size))


def overridden(recipe: Recipe, num_samples: int | None) -> list[str]:
    """A note on `--samples`, if a key of the recipe decides the length of the run instead."""
    if num_samples is None:
        return []
    if (rounds := recipe.rounds) is not None and rounds.round is None:
        prompts = rounds.num_rounds * rounds.prompts_per_round
        return [f"rounds.num_rounds: {rounds.num_rounds} decides, and not --samples: {prompts:,} prompts"]
    if recipe.run.max_steps is None:
        return []
    size, decides = recipe.batch.global_batch_size, f"run.max_steps: {recipe.run.max_steps} decides, and not --samples"
    seen, epoch = recipe.run.max_steps * size, -(-num_samples // size)
    return [f"{decides}: {seen:,} samples; for one epoch of {num_samples:,} --set run.max_steps={epoch}"]


def range_in_words(low: float, high: float, unit: str) -> str:
    """`4.1 to 6.9 s`, each to two digits."""

    def two_digits(value: float) -> str:
        return f"{float(f'{value:.2g}'):,.10g}"

    return f"{two_digits(low)} to {two_digits(high)}{unit}"


def count_in_words(count: int) -> str:
    """`7.62 B`, or below a tenth of that `1.18 M`."""
    return f"{count / 1e9:.3g} B" if count >= 1e8 else f"{count / 1e6:.3g} M"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def as_record(
    report: PlanReport,
    recipe_name: str,
    *,
    num_samples: int | None,
    price: float | None,
    sizes: Sequence[Sizes] = (),
    settings: Sequence[ByAuto] = (),
    reference: Reference | None = None,
) -> dict[str, Any]:
    """The report in bytes and seconds, for JSON; arguments as for `in_words`."""
    steps, recipe = num_steps(report.recipe, num_samples), report.recipe
    tokens, kind = tokens_of_step(recipe), recipe.model.gradient_checkpointing
    records = []
    for forecast in report.forecasts:
        memory, time = forecast.memory, forecast.time
        record: dict[str, Any] = {"strategy": forecast.strategy.path, "is_own": _is_own(report, forecast)}
        record |= {name: getattr(forecast, name) for name in ("verdict", "why", "num_processes")}
        if forecast.plan is not None:
            record["data_parallel_size"] = forecast.plan.data_parallel_size
            record["gradient_accumulation_steps"] = forecast.plan.gradient_accumulation_steps
        if memory is not None:
            names = (*(name for _, name, _ in PARTS), "moment", "allocated", "reserved", "needed")
            record["memory"] = {name: getattr(memory, name) for name in names}
            record["memory"]["stages"] = [
                {"holds": stage.holds, "in_flight": stage.in_flight}
                | {name: getattr(stage.memory, name) for name in names if name != "needed"}
                for stage in memory.stages
            ]
            others = ("host", "disk", "checkpoint", "largest_micro_batch", "longest")
            record |= {name: getattr(forecast, name) for name in others}
        if forecast.plan is not None:
            keys = ("what", "kind", "num_bytes", "calls", "is_least", "ranks")
            links = _links(report, forecast)
            record["messages"] = [
                {key: getattr(message, key) for key in keys} | {"links": message.links(*links)}
                for message in forecast.messages
            ]
        if time is not None:
            for end, each in (("", time), ("_of_kernels", forecast.time_of_kernels)):
                if each is not None:
                    record[f"step_seconds{end}"] = [each.low, each.high]
                    record[f"tokens_per_second_a_gpu{end}"] = each.tokens_per_second(tokens, forecast.num_processes)
            if forecast.time_if_fused is not None:
                record["tokens_per_second_a_gpu_if_fused"] = tokens_if_fused(
                    time, forecast.time_if_fused, tokens, forecast.num_processes
                )
            if reference is not None:
                record["scaling_efficiency"] = reference.efficiency(forecast)
            record["bottleneck"] = time.bottleneck
            record["parts"] = {part.name: [part.low, part.high] for part in time.parts}
            if steps is not None:
                record["hours"] = time.hours(steps)
                if price is not None:
                    record["price"] = time.price(steps, per_gpu_hour=price, num_gpus=report.machines.num_gpus)
        records.append(record)
    machines = report.machines
    return {
        "recipe": recipe_name,
        "machines": {"text": machines.text, "gpus": machines.num_gpus, "usable_gib": machines.usable_gib}
        | {"notes": [*machines.notes, *report.notes]},
        "model": {"type": report.model, "parameters": report.num_parameters, "trained": report.num_trained}
        | {"structure_from": report.origin},
        "a_step": {"sequences": recipe.batch.global_batch_size, "micro_batch_size": micro_batch_of(recipe)}
        | {"tokens_at_most": tokens, "gradient_checkpointing": kind if isinstance(kind, str) else bool(kind)}
        | {"by_auto": autos(recipe)},
        "steps": steps,
        "forecasts": records,
        "scaling_reference": None if reference is None else _reference_record(reference, tokens),
        "sizes": [_sizes_record(mesh) for mesh in sizes],
        "by_auto": [_auto_record(setting) for setting in settings],
        "next_rung": report.suggestion,
        "sampler": None if report.sampler is None else sampler_record(report.sampler),
        "no_time": report.no_time,
        "time_caveat": report.time_caveat,
    }


def _reference_record(reference: Reference, tokens: int) -> dict[str, Any]:
    forecast, time = reference.forecast, reference.forecast.time
    return {
        "machines": reference.machines.text,
        "gpus": reference.machines.num_gpus,
        "strategy": forecast.strategy.path,
        "step_seconds": time and [time.low, time.high],
        "tokens_per_second_a_gpu": time and time.tokens_per_second(tokens, forecast.num_processes),
    }


def sampler_record(sampler: SamplerForecast) -> dict[str, Any]:
    """Bytes and seconds for JSON."""
    memory = {} if sampler.memory is None else asdict(sampler.memory) | {"total": sampler.memory.total}
    time: dict[str, Any] = {"no_time": sampler.no_time}
    if sampler.time is not None:
        time |= {"seconds": [*sampler.time.sampling], "proof_seconds": [*sampler.time.proof]}
        time |= {"answers_of_round": sampler.time.answers, "in_flight": sampler.time.at_once}
    return {"words": sampler.words, "fits": sampler.fits, **memory, **time}


def sampling_notes(sampler: SamplerForecast | None) -> list[str]:
    """The time of a round's sampling, in words."""
    if sampler is None:
        return []
    if sampler.time is None:
        return [f"no forecast of the time of sampling: {sampler.no_time}"]
    return [f"a round's sampling, by the rates of published runs: {sampling_in_words(sampler.time)}"]


def sampling_in_words(time: SamplingTime) -> str:
    """The seconds of sampling and proof, and the assumption that makes them an upper bound."""
    answers = (
        f"{time.answers:,} answers of {time.completion:,} tokens, the most that they may have, {time.at_once:,} at a"
    )
    sampling, proof = seconds_in_words(*time.sampling), seconds_in_words(*time.proof)
    return f"{sampling} for {answers} time on {time.by}, and {proof} to prove them"


def seconds_in_words(low: float, high: float) -> str:
    """Seconds, or from two minutes on minutes, or hours."""
    return hours_in_words(low / 3600, high / 3600)


def hours_in_words(low: float, high: float) -> str:
    """Hours, or below one minutes, or below two minutes seconds."""
    if 3600 * high < 120:
        return range_in_words(3600 * low, 3600 * high, " s")
    return range_in_words(low, high, " hours") if high >= 1 else range_in_words(60 * low, 60 * high, " minutes")


def _auto_record(setting: ByAuto) -> dict[str, Any]:
    best, memory, compiled = setting.best, setting.best.forecast.memory, setting.compiled
    return {
        "strategy": setting.strategy.path,
        "micro_batch_size": best.batch.micro_batch_size,
        "gradient_checkpointing": best.checkpointing,
        "needed": memory and memory.needed,
        "step_seconds": [best.time.low, best.time.high] if best.time else None,
        "step_seconds_compiled": [compiled.low, compiled.high] if compiled else None,
    }


def _sizes_record(sizes: Sizes) -> dict[str, Any]:
    return {
        "strategy": sizes.name,
        "written": sizes.written,
        "forecasts": [
            {
                "sizes": tried,
                "dp_shard_size": forecast.strategy.dp_shard_size,
                "is_best": forecast is sizes.best,
                "verdict": forecast.verdict,
                "why": forecast.why,
                "needed": forecast.memory.needed if forecast.memory else None,
                "step_seconds": [forecast.time.low, forecast.time.high] if forecast.time else None,
            }
            for tried, forecast in sizes.forecasts
        ],
    }
