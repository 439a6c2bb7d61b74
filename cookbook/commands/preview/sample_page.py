"""Preview of what a recipe would train on: a few samples with their trained tokens marked, and figures of each set.

`cookbook preview RECIPE`; needs the tokenizer, not the weights.
"""

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cookbook.commands.shared.answer_forms import Forwards, LengthRange, Piece, PreviewAnswer, SeenSample, TokenFigures
from cookbook.config.objectives import Objective
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.facts.language_part import open_config
from cookbook.facts.packing import Packing, decide
from cookbook.start.run_plan import refuse_rounds
from cookbook.system.console import Row, can_show, colour, console, page, printable, say
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


def preview(
    recipe_path: Path, assignments: list[str], num_samples: int = 3, *, cache: Path = Path(".cache")
) -> PreviewAnswer:
    """Prints the first samples of the first epoch and the figures of all sets, and returns them.

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

    from cookbook.training.models.tokenizer_files import load_tokenizer

    tokenizer = load_tokenizer(folder, recipe.data.chat_template, recipe.model.new_tokens)
    num_embeddings, packing = _of_model(recipe, folder, tokenizer)
    sets = tokenize_data(rows, tokenizer, recipe.data, recipe.objective, cache=cache, num_embeddings=num_embeddings)

    from cookbook.training.data.batches import epoch_order, steps_per_epoch

    if isinstance(sets.train, Stream):
        train, order = sets.train.first_block(recipe.seed)
        name = f"data.train (the first {len(train):,} samples of the stream)"
    else:
        train, order, name = sets.train, epoch_order(sets.train, recipe.seed, 0), "data.train"
    mark = _marks()
    samples = []
    for i in order[:num_samples].tolist():
        for sequence in range(i * train.group_size, (i + 1) * train.group_size):
            sample = _describe_sample(train, sequence, tokenizer, recipe.objective)
            samples.append(sample)
            say(_headline(sample, train, recipe.objective))
            say(in_marks(sample.pieces, mark), end="\n\n", is_coloured=True)
    say(short(f"FIGURES of {recipe_path}"))
    notes = [*sets.notes, *sets.closing_notes()]
    padded, packed = (forwards(train, order, recipe, packing=is_packed) for is_packed in (False, True))
    figures = {name: figures_of("data.train", train)}
    figures |= {
        f"evaluation {set_name}".strip(): figures_of(f"data.eval.{set_name}".rstrip("."), tokens)
        for set_name, tokens in sets.eval.items()
    }
    of_train, *of_eval = (in_words(name, of_set, train, recipe.objective) for name, of_set in figures.items())
    for line in [of_train, *notes, padding(recipe, padded, packed, packing)]:
        say(f"  {line}")
    lengths = length_ranges(train, recipe.data.max_length)
    say("\n".join(histogram(lengths)), is_coloured=True)
    for line in of_eval:
        say(f"  {line}")
    num_steps = steps_per_epoch(sets.train, recipe.batch.global_batch_size)
    epoch = "not known of a stream" if num_steps is None else f"{num_steps:,}"
    say(f"  steps per epoch: {epoch}")
    return PreviewAnswer(
        recipe=str(recipe_path),
        samples=samples,
        sets=list(figures.values()),
        padded=padded,
        packed=packed,
        rows_are=packing.words,
        lengths=lengths,
        steps_per_epoch=num_steps,
        notes=notes,
    )


def _of_model(recipe: Recipe, folder: str, tokenizer: "PreTrainedTokenizerBase") -> tuple[int | None, Packing]:
    """The rows of the embedding and whether samples are packed, by the configuration in a folder that may have none."""
    from cookbook.training.models.new_tokens import grown_rows

    num_embeddings = None
    try:
        config = open_config(folder)
        num_embeddings = getattr(config, "vocab_size", None)
        if num_embeddings is not None and recipe.model.new_tokens:
            num_embeddings = grown_rows(num_embeddings, tokenizer)
        return num_embeddings, decide(recipe, config)
    except (OSError, ValueError):
        return num_embeddings, Packing(False, f"{folder} has no configuration that is understood")


def _marks() -> Callable[[str], str]:
    """Marker of trained tokens on this terminal."""
    from rich.style import Style

    to = console()
    if to.color_system is not None and not to.no_color:
        return Style.parse("bold green").render
    return MARK.format if can_show(MARK, sys.stdout.encoding) else "[[{}]]".format


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


def pieces(tokens: TokenSet, sequence: int, tokenizer: "PreTrainedTokenizerBase") -> list[Piece]:
    """The sequence as text, cut where training begins or ends."""
    start, end = tokens.offsets[sequence], tokens.offsets[sequence + 1]
    is_trained = tokens.is_label[start:end].copy()
    is_trained[0] = False  # nothing predicts a first token
    ids, cut, before = tokens.ids[start:end].tolist(), [], ""
    for trained, run in groupby(range(end - start), key=lambda i: bool(is_trained[i])):
        # Decoded from the start, as a stretch by itself would lose the space before it.
        so_far = tokenizer.decode(ids[: max(run) + 1])
        cut.append(Piece(text=so_far[len(before) :], is_trained=trained))
        before = so_far
    return cut


def in_marks(cut: list[Piece], mark: Callable[[str], str]) -> str:
    """The text, each trained piece marked."""
    return "".join(mark(printable(piece.text)) if piece.is_trained else printable(piece.text) for piece in cut)


def mark_text(tokens: TokenSet, sequence: int, tokenizer: "PreTrainedTokenizerBase", mark: Callable[[str], str]) -> str:
    """The sequence as text, each trained stretch marked."""
    return in_marks(pieces(tokens, sequence, tokenizer), mark)


def _describe_sample(
    tokens: TokenSet, sequence: int, tokenizer: "PreTrainedTokenizerBase", objective: Objective
) -> SeenSample:
    sample, place = divmod(sequence, tokens.group_size)
    return SeenSample(
        sample=sample,
        sequence=objective.sequences[place] if tokens.group_size > 1 else None,
        num_tokens=int(tokens.lengths[sequence]),
        num_trained=int(tokens.num_targets[sequence]),
        pieces=pieces(tokens, sequence, tokenizer),
    )


def _headline(seen: SeenSample, tokens: TokenSet, objective: Objective) -> str:
    which = f", {seen.sequence}" if seen.sequence is not None else ""
    what = f"{'sample' if tokens.group_size == 1 else objective.sample} {seen.sample}{which}"
    return f"--- {what}: {seen.num_tokens:,} tokens, {seen.num_trained:,} trained"


def figures_of(key: str, tokens: TokenSet) -> TokenFigures:
    """Counts, lengths and trained share of a set."""
    lengths = tokens.lengths
    return TokenFigures(
        set=key,
        num_samples=len(tokens),
        num_tokens=int(lengths.sum()),
        mean_tokens=float(lengths.mean()),
        median_tokens=float(np.median(lengths)),
        max_tokens=int(lengths.max()),
        trained_ratio=float(tokens.num_targets.sum() / lengths.sum()),
    )


def in_words(name: str, of_set: TokenFigures, tokens: TokenSet, objective: Objective) -> str:
    """Figures of a set, in a line."""
    what = "samples" if tokens.group_size == 1 else f"{objective.sample}s"
    return (
        f"{name}: {of_set.num_samples:,} {what}, {of_set.num_tokens:,} tokens (mean {of_set.mean_tokens:.0f}, median"
        f" {of_set.median_tokens:.0f}, max {of_set.max_tokens:,} a sequence), {of_set.trained_ratio:.1%} trained"
    )


def length_ranges(tokens: TokenSet, max_length: int) -> list[LengthRange]:
    """Numbers of whole rows by ranges of length, for each that has some."""
    lengths = tokens.row_lengths
    if lengths is None:
        return []
    width = -(-(int(lengths.max()) + 1) // NUM_RANGES)
    counts = np.bincount(lengths // width, minlength=NUM_RANGES)
    return [
        LengthRange(least=i * width, most=(i + 1) * width - 1, rows=int(counts[i]), is_over=i * width > max_length)
        for i in np.flatnonzero(counts).tolist()
    ]


def histogram(ranges: list[LengthRange]) -> list[str]:
    """A line for each range of lengths; those over data.max_length in red."""
    if not ranges:
        return []
    block = BLOCK if can_show(BLOCK, sys.stdout.encoding) else "#"
    largest = max(part.rows for part in ranges)
    lines: list[Row] = ["  tokens of a row as it is in the data:"]
    for part in ranges:
        bar = block * -(-part.rows * BAR_WIDTH // largest)
        note = "over data.max_length" if part.is_over else ""
        cells = (
            f"{part.least:,} to {part.most:,}",
            f"{part.rows:,}",
            colour(bar, "red" if part.is_over else "green"),
        )
        lines.append((*cells, note))
    return page(*lines, indent=4).split("\n")


def _limits(recipe: Recipe) -> dict[str, Any]:
    return recipe.batch.model_dump(include={"micro_batch_size", "micro_batch_tokens"})


def forwards(tokens: TokenSet, order: np.ndarray, recipe: Recipe, *, packing: bool) -> Forwards:
    """Forwards per step and the padding in them, over the first steps on one process."""
    from cookbook.training.data.batches import Layout, measure

    layout = Layout(num_ranks=1, rank=0, pad_id=0, packing=packing, **_limits(recipe))
    fill = measure(tokens, order, layout, global_batch_size=recipe.batch.global_batch_size)
    return Forwards(forwards_a_step=fill.forwards, padding_ratio=fill.padding)


def padding(recipe: Recipe, padded: Forwards, packed: Forwards, chosen: Packing) -> str:
    """Forwards of a step, padded and packed, in a line."""
    limit = ", ".join(f"{key} {value}" for key, value in _limits(recipe).items() if value is not None)
    fills = [
        f"{way.forwards_a_step:.1f} forwards a step with {way.padding_ratio:.1%} padding" for way in (padded, packed)
    ]
    return f"{limit}, one process: {fills[0]} if padded, {fills[1]} if packed (a run's rows are {chosen.words})"
