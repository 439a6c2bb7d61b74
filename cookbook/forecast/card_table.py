"""The table of how many GPUs of each kind a recipe needs, for people and as JSON."""

from typing import Any

from cookbook.forecast.any_gpus import Card, CardReport
from cookbook.forecast.headline import command
from cookbook.forecast.show import (
    count_in_words,
    num_steps,
    overridden,
    range_in_words,
    sampler_record,
    sampling_notes,
)
from cookbook.forecast.verdict import PRICED_TOKENS
from cookbook.system.console import Row, page
from cookbook.system.hardware import GIB, in_gib
from cookbook.system.prices import SOURCE

NOTHING = "-"
"""Stands in a cell that has no value."""


def in_words(
    report: CardReport, recipe_name: str, next_step: list[str], *, num_samples: int | None, is_all: bool
) -> str:
    """A row for each kind of GPU, the cheapest first.

    Args:
        next_step: a command in words, without its last one, the GPUs.
        num_samples: rows of the training data, for the length of the run.
        is_all: every GPU of the table was asked.
    """
    lines = [page((f"GPUs for {recipe_name}: {_run_in_words(report)}",), indent=0)]
    if not report.cards:
        lines.append(page(("NO: it fits on no number of these GPUs that was tried",)))
    else:
        least = min(report.cards, key=lambda card: (card.machines.num_gpus, card.gpu.memory_mib))
        order = "by price:" if report.cards[0].price(None) else "the least first:"
        lines.append(page((f"YES: the least is {least.machines.text}, {least.gpu.sold_gb} GB each; {order}",)))
        header = ("GPUs", "strategy", "GiB a GPU", "step", f"price of {amount_of(report, num_samples)}")
        lines.append(page(*_drop_empty_columns([header, *(_row(card, num_samples) for card in report.cards)])))
    notes = [*filter(None, [report.why_any])]
    notes += [f"not {', '.join(names)}: {reason}" for reason, names in report.refused.items()]
    notes += [*overridden(report.recipe, num_samples), *_larger_steps(report)]
    if any(card.price(None) for card in report.cards):
        notes.append("micro-batch and checkpointing by auto; samples of full length")
        notes.append(SOURCE if _is_listed(report) else "price: as --price")
    has_time = any(card.time for card in report.cards)
    notes += [*filter(None, [*report.doubts, report.scores, report.time_caveat if has_time else None])]
    notes += report.no_time
    if report.cards and (sampler := report.cards[0].sampler) is not None:
        notes.append(f"sampler on {report.cards[0].machines.text}: {sampler.words}")
        notes += sampling_notes(sampler)
    if not is_all:
        notes.append("GPUs without bf16, or not on the list of prices: --all")
    if report.cards:
        notes.append(f"next: {command([*next_step, report.cards[0].machines.text])}")
    return "\n".join([*lines, *(page((note,)) for note in notes)])


def _is_listed(report: CardReport) -> bool:
    """Return whether prices are those of the list."""
    return len({card.per_hour for card in report.cards}) > 1 or not report.cards


def _run_in_words(report: CardReport) -> str:
    recipe = report.recipe
    method = "all weights" if recipe.adapter is None else recipe.adapter.name
    size = f"{recipe.batch.global_batch_size:,} x {recipe.data.max_length:,} tokens a step"
    return f"{count_in_words(report.num_parameters)}, {method}, {size}"


def amount_of(report: CardReport, num_samples: int | None) -> str:
    """The steps or tokens that times and prices are of, in words."""
    counts = {num_steps(card.recipe, num_samples) for card in report.cards}
    if None in counts or not counts:
        return f"{PRICED_TOKENS // 10**6} M tokens"
    return "the run" if len(counts) > 1 else f"{counts.pop():,} steps"


def _larger_steps(report: CardReport) -> list[str]:
    """A note on the GPUs that are more than the samples of a step, whose steps are larger."""
    usual = report.recipe.batch.global_batch_size
    sizes: dict[int, list[str]] = {}
    for card in report.cards:
        sizes.setdefault(card.recipe.batch.global_batch_size, []).append(card.machines.text)
    return [f"a step on {', '.join(names)} has {size:,} samples" for size, names in sizes.items() if size != usual]


def _drop_empty_columns(rows: list[tuple[str, ...]]) -> list[Row]:
    """The rows, of which the first is the header, without columns in which all others have nothing."""
    kept = [i for i in range(len(rows[0])) if any(row[i] != NOTHING for row in rows[1:])]
    return [[row[i] for i in kept] for row in rows]


def _row(card: Card, num_samples: int | None) -> tuple[str, ...]:
    memory = card.forecast.memory
    assert memory is not None and card.machines.usable_gib is not None
    price = card.price(num_steps(card.recipe, num_samples))
    return (
        card.machines.text,
        card.forecast.strategy.name,
        f"{in_gib(*memory.needed)} of {in_gib(card.machines.usable_gib * GIB)}",
        range_in_words(card.time.low, card.time.high, " s") if card.time else NOTHING,
        range_in_words(*price, "") if price else NOTHING,
    )


def as_record(report: CardReport, recipe_name: str, *, num_samples: int | None) -> dict[str, Any]:
    """The table in bytes and seconds, for JSON."""
    steps, recipe = num_steps(report.recipe, num_samples), report.recipe
    return {
        "recipe": recipe_name,
        "model": {"type": report.model, "parameters": report.num_parameters, "trained": report.num_trained}
        | {"structure_from": report.origin},
        "notes": [*filter(None, [report.why_any]), *report.notes, *report.no_time],
        "time_caveat": report.time_caveat,
        "steps": steps,
        "tokens": PRICED_TOKENS if steps is None else None,
        "a_sample": {"tokens_at_most": recipe.data.max_length},
        "prices_from": SOURCE if _is_listed(report) else "--price",
        "cards": [_card_record(card, num_steps(card.recipe, num_samples)) for card in report.cards],
        "refused": report.refused,
    }


def _card_record(card: Card, steps: int | None) -> dict[str, Any]:
    memory, time = card.forecast.memory, card.time
    rate = time and time.tokens_per_second(card.tokens_of_step, card.forecast.num_processes)
    return {
        "gpu": card.gpu.name,
        "gpus": card.machines.num_gpus,
        "machines": card.machines.text,
        "usable_gib": card.machines.usable_gib,
        "strategy": card.forecast.strategy.path,
        "verdict": card.forecast.verdict,
        "why": card.forecast.why,
        "mixed_precision": card.recipe.mixed_precision,
        "global_batch_size": card.recipe.batch.global_batch_size,
        "micro_batch_size": card.best.batch.micro_batch_size,
        "gradient_checkpointing": card.best.checkpointing,
        "needed": memory and memory.needed,
        "steps": steps,
        "step_seconds": [time.low, time.high] if time else None,
        "tokens_per_second_a_gpu": rate,
        "hours": card.hours(steps),
        "price_per_hour": card.per_hour,
        "price": card.price(steps),
        "sampler": None if card.sampler is None else sampler_record(card.sampler),
    }
