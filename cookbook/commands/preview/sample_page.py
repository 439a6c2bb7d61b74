"""Preview of what a recipe would train on: a few samples with their trained tokens marked, and figures of each set.

`cookbook preview RECIPE`; needs the tokenizer, not the weights.
"""

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cookbook.config.objectives import Objective
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.facts.language_part import open_config
from cookbook.facts.packing import Packing, decide
from cookbook.start.run_plan import refuse_rounds
from cookbook.system.console import Row, can_show, coloured, console, page, say, shown
from cookbook.system.files import refuse
from cookbook.system.imports import quiet_deepspeed
from cookbook.system.machine import num_gpus
from cookbook.system.shipped import short
from cookbook.training.data.sets import RowSets, read_data, tokenize_data
from cookbook.training.data.stream import Stream
from cookbook.training.data.tokens import TokenSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
MARK, BLOCK = "⟦{}⟧", "█"
NUM_RANGES, BAR_WIDTH = 10, 40
"""Rows of the histogram of lengths, and characters of its longest bar."""


def preview(recipe_path: Path, assignments: list[str], num_samples: int = 3, *, cache: Path = Path(".cache")) -> int:
    """Prints the first samples of the first epoch and the figures of all sets. Returns the exit code, 0.

    Trained tokens are green on a terminal, and are put in ⟦ ⟧, or [[ ]], where there are no colours.

    Raises:
        RecipeError: the data's mistakes, as a run would raise them.
    """
    recipe = load_recipe(recipe_path, assignments)
    refuse(refuse_rounds(recipe, str(recipe_path)))
    rows = read_data(recipe.data, recipe.objective)
    if not num_gpus():
        quiet_deepspeed()
    folder = _folder(recipe, rows, cache)

    from cookbook.training.models.new_tokens import grown_rows
    from cookbook.training.models.tokenizer_files import load_tokenizer

    tokenizer = load_tokenizer(folder, recipe.data.chat_template, recipe.model.new_tokens)
    num_embeddings = None
    try:
        config = open_config(folder)
        num_embeddings = getattr(config, "vocab_size", None)
        if num_embeddings is not None and recipe.model.new_tokens:
            num_embeddings = grown_rows(num_embeddings, tokenizer)
        packing = decide(recipe, config)
    except (OSError, ValueError):
        packing = Packing(False, f"{folder} has no configuration that is understood")
    sets = tokenize_data(rows, tokenizer, recipe.data, recipe.objective, cache=cache, num_embeddings=num_embeddings)

    from rich.style import Style

    from cookbook.training.data.batches import epoch_order, steps_per_epoch

    if isinstance(sets.train, Stream):
        train, order = sets.train.first_block(recipe.seed)
        name = f"data.train (the first {len(train):,} samples of the stream)"
    else:
        train, order, name = sets.train, epoch_order(sets.train, recipe.seed, 0), "data.train"
    to = console()
    in_colour = to.color_system is not None and not to.no_color
    mark = (
        Style.parse("bold green").render
        if in_colour
        else MARK.format
        if can_show(MARK, sys.stdout.encoding)
        else "[[{}]]".format
    )
    for i in order[:num_samples].tolist():
        for sequence in range(i * train.group_size, (i + 1) * train.group_size):
            say(_headline(train, sequence, recipe.objective))
            say(marked(train, sequence, tokenizer, mark), end="\n\n", is_coloured=True)
    say(short(f"FIGURES of {recipe_path}"))
    for line in [
        figures(name, train, recipe.objective),
        *sets.notes,
        *sets.closing_notes(),
        padding(train, order, recipe, packing),
    ]:
        say(f"  {line}")
    say("\n".join(histogram(train, recipe.data.max_length)), is_coloured=True)
    for set_name, tokens in sets.eval.items():
        say(f"  {figures(f'evaluation {set_name}'.strip(), tokens, recipe.objective)}")
    num_steps = steps_per_epoch(sets.train, recipe.batch.global_batch_size)
    epoch = "not known of a stream" if num_steps is None else f"{num_steps:,}"
    say(f"  steps per epoch: {epoch}")
    return 0


def _folder(recipe: Recipe, rows: RowSets, cache: Path) -> str:
    """Fetch the folder of the tokenizer, and of the configuration if the model has one."""
    from cookbook.training.models import model_source

    model = recipe.model
    if model.from_scratch is not None:
        from transformers.utils import logging

        logging.disable_progress_bar()
        return model_source.resolve_model(
            model, seed=recipe.seed, texts=rows.texts(), fingerprint=rows.fingerprint, cache=cache
        )
    assert model.name_or_path is not None
    return model_source.fetch_model(model.name_or_path, model.revision, TOKENIZER_FILES)


def marked(tokens: TokenSet, sequence: int, tokenizer: "PreTrainedTokenizerBase", mark: Callable[[str], str]) -> str:
    """The sequence as text, each trained stretch marked."""
    start, end = tokens.offsets[sequence], tokens.offsets[sequence + 1]
    is_trained = tokens.is_label[start:end].copy()
    is_trained[0] = False  # nothing predicts a first token
    ids, text, before = tokens.ids[start:end].tolist(), "", ""
    for trained, run in groupby(range(end - start), key=lambda i: bool(is_trained[i])):
        # Decoded from the start, as a stretch by itself would lose the space before it.
        so_far = tokenizer.decode(ids[: max(run) + 1])
        piece = so_far[len(before) :]
        text += mark(shown(piece)) if trained else shown(piece)
        before = so_far
    return text


def _headline(tokens: TokenSet, sequence: int, objective: Objective) -> str:
    sample, place = divmod(sequence, tokens.group_size)
    which = f", {objective.sequences[place]}" if tokens.group_size > 1 else ""
    what = f"{'sample' if tokens.group_size == 1 else objective.sample} {sample}{which}"
    return f"--- {what}: {tokens.lengths[sequence]:,} tokens, {tokens.num_targets[sequence]:,} trained"


def figures(name: str, tokens: TokenSet, objective: Objective) -> str:
    """Counts, lengths and trained share of a set, in a line."""
    lengths = tokens.lengths
    what = "samples" if tokens.group_size == 1 else f"{objective.sample}s"
    return (
        f"{name}: {len(tokens):,} {what}, {lengths.sum():,} tokens (mean {lengths.mean():.0f}, median"
        f" {np.median(lengths):.0f}, max {lengths.max():,} a sequence), {tokens.num_targets.sum() / lengths.sum():.1%}"
        " trained"
    )


def histogram(tokens: TokenSet, max_length: int) -> list[str]:
    """Lengths of whole rows, a line for each range that has some; those over `max_length` in red."""
    lengths = tokens.row_lengths
    if lengths is None:
        return []
    width = -(-(int(lengths.max()) + 1) // NUM_RANGES)
    counts = np.bincount(lengths // width, minlength=NUM_RANGES)
    block = BLOCK if can_show(BLOCK, sys.stdout.encoding) else "#"
    lines: list[Row] = ["  tokens of a row as it is in the data:"]
    for i in np.flatnonzero(counts).tolist():
        count = int(counts[i])
        bar = block * -(-count * BAR_WIDTH // int(counts.max()))
        is_over = i * width > max_length
        note = "over data.max_length" if is_over else ""
        cells = (
            f"{i * width:,} to {(i + 1) * width - 1:,}",
            f"{count:,}",
            coloured(bar, "red" if is_over else "green"),
        )
        lines.append((*cells, note))
    return page(*lines, indent=4).split("\n")


def padding(tokens: TokenSet, order: np.ndarray, recipe: Recipe, chosen: Packing) -> str:
    """Forwards per step and the padding in them, padded and packed, over the first steps on one process."""
    from cookbook.training.data.batches import Layout, measure

    batch, fills = recipe.batch, {}
    limits = batch.model_dump(include={"micro_batch_size", "micro_batch_tokens"})
    for packing in (False, True):
        layout = Layout(num_ranks=1, rank=0, pad_id=0, packing=packing, **limits)
        fill = measure(tokens, order, layout, global_batch_size=batch.global_batch_size)
        fills[packing] = f"{fill.forwards:.1f} forwards a step with {fill.padding:.1%} padding"
    limit = ", ".join(f"{key} {value}" for key, value in limits.items() if value is not None)
    return f"{limit}, one process: {fills[False]} if padded, {fills[True]} if packed (a run's rows are {chosen.words})"
