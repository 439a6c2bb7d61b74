"""What a recipe would train on: a few samples with their trained tokens marked, and figures of each set.

`python -m cookbook preview RECIPE`; needs the tokenizer, not the weights.
"""

import os
import sys
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cookbook.data.sets import RowSets, read_data, tokenize_data
from cookbook.data.stream import Stream
from cookbook.data.tokens import TokenSet
from cookbook.machine import num_gpus
from cookbook.objectives import Objective
from cookbook.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
MAX_STEPS_MEASURED = 100
COLOUR, PLAIN = ("\033[1;32m", "\033[0m"), ("⟦", "⟧")


def preview(recipe_path: Path, assignments: list[str], num_samples: int = 3, *, cache: Path = Path(".cache")) -> int:
    """Prints the first samples of the first epoch and the figures of all sets. Returns the exit code, 0.

    Trained stretches are green on a terminal (unless NO_COLOR is set), else they stand in ⟦ ⟧.

    Raises:
        RecipeError: what a run of this recipe would say of its data.
    """
    recipe = load_recipe(recipe_path, assignments)
    rows = read_data(recipe.data, recipe.objective)
    if not num_gpus():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else deepspeed, which transformers may import, warns on stdout
    tokenizer = _tokenizer(recipe, rows, cache)
    sets = tokenize_data(rows, tokenizer, recipe.data, recipe.objective, cache=cache)

    from cookbook.data.batches import epoch_order, steps_per_epoch

    if isinstance(sets.train, Stream):
        train, order = sets.train.first_block(recipe.seed)
        name = f"data.train (the first {len(train):,} samples of the stream)"
    else:
        train, order, name = sets.train, epoch_order(sets.train, recipe.seed, 0), "data.train"
    marks = COLOUR if sys.stdout.isatty() and "NO_COLOR" not in os.environ else PLAIN
    for i in order[:num_samples].tolist():
        for sequence in range(i * train.group_size, (i + 1) * train.group_size):
            print(_headline(train, sequence, recipe.objective))
            print(marked(train, sequence, tokenizer, marks), end="\n\n")
    print(f"FIGURES of {recipe_path}")
    for line in [
        figures(name, train, recipe.objective),
        *sets.notes,
        *sets.closing_notes(),
        padding(train, order, recipe),
    ]:
        print(f"  {line}")
    for set_name, tokens in sets.eval.items():
        print(f"  {figures(f'evaluation {set_name}'.strip(), tokens, recipe.objective)}")
    num_steps = steps_per_epoch(sets.train, recipe.batch.global_batch_size)
    epoch = "not known of a stream" if num_steps is None else f"{num_steps:,}"
    print(f"  steps per epoch: {epoch}")
    return 0


def _tokenizer(recipe: Recipe, rows: RowSets, cache: Path) -> "PreTrainedTokenizerBase":
    from cookbook import models

    model = recipe.model
    if model.from_scratch is not None:
        name = models.resolve_model(
            model, seed=recipe.seed, texts=rows.texts(), fingerprint=rows.fingerprint, cache=cache
        )
    else:
        assert model.name_or_path is not None
        name = models.fetch_model(model.name_or_path, model.revision, TOKENIZER_FILES)
    return models.load_tokenizer(name, recipe.data.chat_template)


def marked(tokens: TokenSet, sequence: int, tokenizer: "PreTrainedTokenizerBase", marks: tuple[str, str]) -> str:
    """The sequence as text, each trained stretch between the two marks."""
    start, end = tokens.offsets[sequence], tokens.offsets[sequence + 1]
    is_trained = tokens.is_label[start:end].copy()
    is_trained[0] = False  # nothing predicts a first token
    text = ""
    for trained, run in groupby(range(end - start), key=lambda i: bool(is_trained[i])):
        piece = tokenizer.decode(tokens.ids[start:end][list(run)].tolist())
        text += f"{marks[0]}{piece}{marks[1]}" if trained else piece
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


def padding(tokens: TokenSet, order: np.ndarray, recipe: Recipe) -> str:
    """Forwards per step and the padding in them, padded and packed, over the first steps on one process."""
    from cookbook.data.batches import Layout, cut, deal

    batch, found = recipe.batch, {}
    lengths = tokens.lengths.reshape(-1, tokens.group_size)
    windows = range(0, len(order), batch.global_batch_size)
    for packing in (False, True):
        layout = Layout(
            num_ranks=1,
            rank=0,
            pad_id=0,
            micro_batch_size=batch.micro_batch_size,
            micro_batch_tokens=batch.micro_batch_tokens,
            packing=packing,
        )
        num_tokens = num_cells = num_forwards = num_steps = 0
        for begin in islice(windows, MAX_STEPS_MEASURED):
            window = lengths[order[begin : begin + batch.global_batch_size]]
            cuts = cut(window, deal(window.sum(1).tolist(), 1)[0], layout)
            num_steps, num_forwards = num_steps + 1, num_forwards + len(cuts)
            num_tokens += int(window.sum())
            num_cells += (
                int(window.sum()) if packing else sum(window[one].size * int(window[one].max()) for one in cuts)
            )
        found[packing] = f"{num_forwards / num_steps:.1f} forwards a step, {num_tokens / num_cells:.1%} of them tokens"
    limit = f"micro_batch_size {batch.micro_batch_size}"
    if batch.micro_batch_tokens is not None:
        limit = f"micro_batch_tokens {batch.micro_batch_tokens}"
    chosen = "packing: true" if recipe.data.packing else "packing: false"
    return f"{limit}, one process: padded {found[False]}; packed {found[True]} (the recipe has {chosen})"
