"""Warnings of `check`: settings that are allowed but contradict each other. Also the reading of all rows."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cookbook.commands.rounds.prompt_rows import read_prompts
from cookbook.commands.shared.answer_forms import ReadRows
from cookbook.config.optim import number
from cookbook.config.recipe import Recipe
from cookbook.config.schedule import peak_learning_rate, short_run
from cookbook.config.sections import BUILTIN_SOURCE, Source
from cookbook.facts.adapted_widths import rank_above_width
from cookbook.facts.packing import known_config
from cookbook.rows.row_columns import drop_columns, kinds_of, rename
from cookbook.rows.row_kinds import kinds
from cookbook.system.files import RecipeError, gather_mistakes, refuse
from cookbook.training.data.rows import Rows, read_rows
from cookbook.training.data.sources import raw_rows

ROWS_SEEN = 20
"""To find out the kind of a source."""


def doubts(recipe: Recipe) -> Iterator[str]:
    """Warnings, each beginning with its key."""
    most, optim = type(recipe.optim).most_for_all_weights, recipe.optim
    peak = peak_learning_rate(optim, recipe.schedule, recipe.batch.global_batch_size)
    is_existing = recipe.adapter is None and recipe.model.from_scratch is None
    if is_existing and most is not None and peak > most:
        yield (
            f"optim.learning_rate is {number(peak)} for all weights of an existing model, above {number(most)}: it may"
            " forget more than it learns; recipes/README.md has published rates"
        )
    if recipe.run.max_steps is not None:
        yield from short_run(recipe.schedule, recipe.in_schedule(0, recipe.run.max_steps)[1])
    yield from rank_above_width(recipe.adapter, known_config(recipe.model))
    folder = Path(recipe.run.output_dir).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        yield f"run.output_dir is {recipe.run.output_dir!r}, and you cannot write to {nearest} on this machine"
    trains_on_builtin = any(source.path == BUILTIN_SOURCE for source in recipe.data.train)
    trained = set().union(*(_kinds_here(source) for source in recipe.data.train))
    for key, source in recipe.data.sources[len(recipe.data.train) :]:
        if source.path == BUILTIN_SOURCE and not trains_on_builtin:
            yield f"{key} is {BUILTIN_SOURCE}, which data.train is not: name held-out rows of your own, or data.holdout"
        held = _kinds_here(source)
        if trained and held and not trained & held:
            what, other = (" or ".join(kinds()[kind].words for kind in sorted(names)) for names in (held, trained))
            yield f"{key} has rows of {what}, and data.train of {other}: its loss is that of another task"


def _kinds_here(source: Source) -> set[str]:
    """The kinds of a local source's first rows; empty where it takes more to find out."""
    if source.path == BUILTIN_SOURCE or not Path(source.path).exists():
        return set()
    try:
        rows = [raw for _, raw in islice(raw_rows(source), ROWS_SEEN) if isinstance(raw, dict)]
    except RecipeError:  # reported by whoever reads the rows
        return set()
    return set().union(
        *(kinds_of(rename(drop_columns(raw, source.ignore or ()), source.columns or {})) for raw in rows)
    )


@dataclass(frozen=True)
class SetRows:
    """The rows of a set, which have been read."""

    words: str
    form: ReadRows


def read_all(recipe: Recipe) -> Iterator[SetRows]:
    """Every row of every source, read and checked without a model. Yields each source.

    Raises:
        RecipeError: the mistakes in all sources.
    """
    mistakes: list[str] = []
    if recipe.rounds is not None:
        count = len(read_prompts(recipe.data, recipe.rounds))
        form = ReadRows(set="data.train", path=None, rows=count, kind="prompts")
        yield SetRows(f"data.train: {count:,} prompts", form)
        return
    train: list[Rows] = []
    for key, source in recipe.data.sources:
        with gather_mistakes(mistakes):
            rows = read_rows(source, recipe.data.on_bad_row, recipe.objective)
            train += [rows] * (key == "data.train")
            line = f"{key}: {source.path}: {len(rows.rows):,} rows of {kinds()[rows.kind].words}"
            dropped = (f"{count:,} dropped: {reason}" for reason, count in rows.num_dropped.items())
            notes = list(filter(None, [rows.renamed, rows.unread, rows.untold]))
            form = ReadRows(
                set=key,
                path=source.path,
                rows=len(rows.rows),
                kind=rows.kind,
                dropped=dict(rows.num_dropped),
                notes=notes,
            )
            yield SetRows("; ".join([line, *notes, *dropped]), form)
    if recipe.data.holdout and not mistakes:
        from cookbook.training.data.sets import hold_out

        hold_out(train, recipe.data.holdout)
    refuse(mistakes)
