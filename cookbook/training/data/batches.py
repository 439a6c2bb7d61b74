"""The micro-batches of each optimizer step, for one rank.

Which samples make up a step depends on the seed and the position in the data alone. How they are spread over ranks and
micro-batches changes only the time that ranks wait: the loss is a sum over the global token count.

A sample is what the recipe counts: a sequence of tokens, or a pair of them (chosen, rejected), never split.
B rows, T tokens, S sequences, L targets in a micro-batch, W samples in a step, N samples in all, R ranks.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cookbook.config import draws
from cookbook.config.objectives.forward import BY_TARGET
from cookbook.system.files import RecipeError
from cookbook.training.data.stream import Stream, Window
from cookbook.training.data.tokens import TokenSet

IGNORE_INDEX = -100
MAX_STEPS_MEASURED = 100
"""Limit of the steps that `measure` looks at."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Spread of samples over ranks and micro-batches; exactly one of the two limits is set."""

    num_ranks: int
    rank: int
    pad_id: int
    micro_batch_size: int | None = None
    """Samples in a micro-batch."""
    micro_batch_tokens: int | None = None
    """Tokens in a micro-batch, padding included."""
    packing: bool = False
    """One row without padding, instead of a row for each sequence."""
    length_multiple: int = 1
    """Rows, packed ones too, are padded to a multiple of this many tokens."""
    sequence_size: int = 1
    """Ranks that share the tokens of each row."""
    sequence_rank: int = 0
    shares_samples: bool = False
    """True if these ranks share the samples of a micro-batch too, as the objective allows."""
    draw_seed: int | None = None
    """Seed of what is drawn for each token in training; None if nothing is."""


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One rank's share of an optimizer step, and totals over all ranks, known without communication."""

    micro_batches: list[dict[str, Any]]
    """See `collate`; the same number on every rank."""
    sample_numbers: list[list[int]]
    """Indices of each micro-batch's samples in the set (in a stream: in the step)."""
    num_targets: int
    """Positions that carry loss, on all ranks."""
    num_tokens: int
    """Tokens without padding, on all ranks."""
    num_samples: int
    """Samples on all ranks; fewer than global_batch_size at the end of an epoch."""
    num_sequences: int
    """Sequences on all ranks: one for each sample, or two for each pair."""
    num_masked: int
    """Sequences without a position that carries loss."""
    epoch: float
    """Epochs completed after this step; a whole number for a stream, whose length is unknown."""
    stream_digest: str | None = None
    """See `Window.digest`."""


def epoch_order(tokens: TokenSet, seed: int, epoch: int) -> np.ndarray:
    """The samples of an epoch in order, int64 [sum of epoch_sizes].

    A source with a weight other than 1 cycles through a fixed permutation of its samples; each epoch continues where
    the last one ended.
    """
    # The legacy generator: numpy guarantees its numbers, so a run can resume after an upgrade.
    order = np.random.RandomState([seed, epoch]).permutation(sum(tokens.epoch_sizes)).astype(np.int64)
    if not tokens.weights:
        return order
    shown, start = [], 0
    for part, (size, count) in enumerate(zip(tokens.part_sizes, tokens.epoch_sizes, strict=True)):
        picked = np.arange(count)
        if count != size:
            # A fixed permutation, so that four epochs of weight 0.25 show each row once; draws by probability would
            # repeat some and leave out others.
            permutation = np.random.RandomState([seed, part, 1]).permutation(size)
            picked = permutation[(epoch * count + picked) % size]
        shown.append(start + picked)
        start += size
    return np.concatenate(shown)[order]


def steps_per_epoch(train: TokenSet | Stream, global_batch_size: int) -> int | None:
    """Optimizer steps of an epoch, the last of which may be partial; None for a stream, whose length is unknown."""
    if isinstance(train, Stream):
        return None
    return -(-sum(train.epoch_sizes) // global_batch_size)


def balance_over_ranks(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices into `lengths` for each rank, longest first, so that neighbours are of similar length.

    Greedy: the longest remaining sample goes to the rank with the fewest tokens that still has room. Counts differ by
    at most one.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    quota, num_extra = divmod(len(lengths), num_ranks)
    open_ranks = [(0, rank) for rank in range(num_ranks)]  # a heap of tokens and ranks
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        num_tokens, rank = heapq.heappop(open_ranks)
        while len(shares[rank]) == quota and not num_extra:  # full since the last extra sample was dealt
            num_tokens, rank = heapq.heappop(open_ranks)
        num_extra -= len(shares[rank]) == quota
        shares[rank].append(position)
        if len(shares[rank]) <= quota:
            heapq.heappush(open_ranks, (num_tokens + int(lengths[position]), rank))
    return shares


def split_micro_batches(lengths: np.ndarray, samples: Sequence[int], layout: Layout) -> list[list[int]]:
    """Split the samples of one rank, in order, into micro-batches as full as the limit allows.

    Args:
        lengths: tokens of each sequence of each sample, int64 [W, group_size].
        samples: rows of `lengths`.
    """
    if layout.micro_batch_size is not None:
        size = layout.micro_batch_size
        return [list(samples[i : i + size]) for i in range(0, len(samples), size)]
    assert layout.micro_batch_tokens is not None
    micro_batches: list[list[int]] = []
    num_tokens = longest = 0
    totals, maxima = lengths[samples].sum(1).tolist(), lengths[samples].max(1).tolist()
    for sample, total, maximum in zip(samples, totals, maxima, strict=True):
        num_tokens, longest = num_tokens + total, max(longest, maximum)
        num_rows = (len(micro_batches[-1]) + 1) * lengths.shape[1] if micro_batches else 0
        row = num_tokens if layout.packing else longest
        padded = row + -row % layout.length_multiple
        if not micro_batches or (padded if layout.packing else num_rows * padded) > layout.micro_batch_tokens:
            micro_batches.append([])
            num_tokens, longest = total, maximum
        micro_batches[-1].append(sample)
    return micro_batches


class Fill(NamedTuple):
    """Number of forwards and padding of micro-batches."""

    forwards: float
    """A step, on one rank."""
    padding: float
    """Share of the computed positions that is padding."""


def measure(tokens: TokenSet, order: np.ndarray, layout: Layout, *, global_batch_size: int) -> Fill:
    """Measure the first steps, over all ranks.

    Args:
        order: samples, int64 [N], as `epoch_order` has them.
    """
    lengths = tokens.lengths.reshape(-1, tokens.group_size)
    num_tokens = num_positions = num_forwards = num_steps = 0
    for begin in islice(range(0, len(order), global_batch_size), MAX_STEPS_MEASURED):
        window = lengths[order[begin : begin + global_batch_size]]
        cuts = [
            window[indices]
            for share in balance_over_ranks(window.sum(1).tolist(), layout.num_ranks)
            for indices in split_micro_batches(window, share, layout)
        ]
        num_steps, num_forwards, num_tokens = num_steps + 1, num_forwards + len(cuts), num_tokens + int(window.sum())
        num_positions += sum(_num_positions(cut, layout) for cut in cuts)
    return Fill(num_forwards / num_steps / layout.num_ranks, 1 - num_tokens / num_positions)


def _num_positions(lengths: np.ndarray, layout: Layout) -> int:
    """Positions of a micro-batch with samples of these lengths, int64 [samples, group_size]."""
    row = int(lengths.sum() if layout.packing else lengths.max())
    return (row + -row % layout.length_multiple) * (1 if layout.packing else lengths.size)


def _micro_batches_of_rank(lengths: np.ndarray, shares: Sequence[Sequence[int]], layout: Layout) -> list[list[int]]:
    """Split a rank's samples into as many micro-batches as the rank that needs the most has.

    Each rank computes that number without communication."""
    mine = split_micro_batches(lengths, shares[layout.rank], layout)
    if layout.micro_batch_size is not None:
        most = -(-max(map(len, shares)) // layout.micro_batch_size)
    else:
        most = max(len(split_micro_batches(lengths, share, layout)) for share in shares)
    return mine + [[]] * (most - len(mine))


def collate(
    tokens: TokenSet,
    samples: Sequence[int] | np.ndarray,
    pad_id: int,
    *,
    packing: bool = False,
    multiple: int = 1,
    drawn: tuple[int, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Collate samples into a micro-batch. It needs no attention mask: rows are padded on the right, where causal
    attention does not look, and in a packed row `lengths` separates the sequences.

    Everything that the host must know is a shape or an integer, so that it never waits for a device. Without samples,
    the row is two pad tokens without targets, since every rank must run the forward that others run.

    Args:
        multiple: T is padded to a multiple of it; in a packed row the padding is a sequence of its own.
        drawn: the seed of what is drawn, and the place of each sample in the order of the data.

    Returns:
        `input_ids` (B, T) int64, a row for each sequence, padded on the right; packed (1, T), one after the other.
        `targets` (L,) int64, row by row: the next tokens of the same sequence that are labels; of sequences that are
            scored the labels themselves.
        `target_positions` (L,) int64: index in the flattened rows at which each target is predicted.
        `position_ids` (1, T) int64, packed only: counting from 0 in each sequence.
        `lengths` S integers, packed only: tokens of each sequence, or of the two pad tokens; then of the padding.
        `offsets` (S + 1,) int32, packed only: begin of each sequence, and the end of the last.
        `target_sequences` (L,) int64: index of each target's sequence in the micro-batch; of pairs 2i is chosen, 2i + 1
        rejected.
        `num_sequences` S, 0 without samples.
        `values` (W,) float64, if the token set has them: a number for each sample; (0,) without samples.
        `reference_logps` (S,) float64, if the token set has them; (0,) without samples.
        `old_logps`, `sampled_logps` and `token_reference_logps` (L,) float64, `teacher_tokens` (L, k) int32 and
        `teacher_logps` (L, 1 + k) float32, if the token set has them.
        `draw_words` and `token_lengths` (B, T) int32, if something is drawn: `draws.token_words`, and the tokens of the
            sequence of each.
    """
    sequences = _sequences(tokens, samples)
    inputs, targets = _inputs_and_targets(tokens, sequences, pad_id)
    if packing and (missing := -sum(map(len, inputs)) % multiple):
        inputs.append(np.full(missing, pad_id))
        targets.append(np.full(missing, IGNORE_INDEX))
    input_ids = _stack(inputs, pad_id, packing, multiple)
    next_ids = _stack(targets, IGNORE_INDEX, packing, multiple).ravel()
    positions = np.flatnonzero(next_ids != IGNORE_INDEX)
    arrays = {"input_ids": input_ids, "targets": next_ids[positions], "target_positions": positions}
    owners = positions // input_ids.shape[1]
    if packing:
        arrays["position_ids"] = np.concatenate([np.arange(len(ids)) for ids in inputs])[None]
        arrays["offsets"] = np.cumsum([0, *map(len, inputs)], dtype=np.int32)
        owners = np.searchsorted(arrays["offsets"][1:], positions, side="right")
    arrays["target_sequences"] = owners
    if drawn is not None:
        words, lengths = _words_and_lengths(inputs, drawn, tokens.group_size)
        arrays["draw_words"] = _stack(words, 0, packing, multiple).astype(np.int32)
        arrays["token_lengths"] = _stack(lengths, 1, packing, multiple).astype(np.int32)
    if tokens.values is not None:
        arrays["values"] = tokens.values[np.asarray(samples, dtype=np.int64)]
    if tokens.reference_logps is not None:
        arrays["reference_logps"] = tokens.reference_logps[sequences]
    for name in BY_TARGET:
        if (values := getattr(tokens, name)) is not None:
            arrays[name] = values[_targets(tokens, sequences)]
    batch: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    # Integers, since wrappers of the model move every tensor among its arguments to the device.
    batch["num_sequences"] = len(sequences)
    return batch | ({"lengths": tuple(map(len, inputs))} if packing else {})


def _inputs_and_targets(
    tokens: TokenSet, sequences: np.ndarray, pad_id: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The ids of each sequence, and the label at each of its positions; of none, two pad tokens without a label."""
    if not len(sequences):
        return [np.full(2, pad_id)], [np.full(2, IGNORE_INDEX)]
    inputs, targets = [], []
    for start, end in zip(tokens.offsets[sequences], tokens.offsets[sequences + 1], strict=True):
        ids = tokens.ids[start:end]
        inputs.append(ids)
        if tokens.are_scored:
            targets.append(np.where(tokens.is_label[start:end], ids, IGNORE_INDEX))
            continue
        shifted = np.where(tokens.is_label[start + 1 : end], ids[1:], IGNORE_INDEX)
        targets.append(np.append(shifted, IGNORE_INDEX))
    return inputs, targets


def _words_and_lengths(
    inputs: list[np.ndarray], drawn: tuple[int, Sequence[int]], group_size: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The words of what is drawn for each token, and the length of its sequence."""
    seed, places = drawn
    of_sequences = [(place, i) for place in places for i in range(group_size)]
    fill = [np.zeros(len(ids), np.int32) for ids in inputs[len(of_sequences) :]]  # rows of padding draw anything
    words = [draws.token_words(seed, place, i, len(ids)) for (place, i), ids in zip(of_sequences, inputs, strict=False)]
    return [*words, *fill], [np.full(len(ids), len(ids)) for ids in inputs]


def _collate(
    tokens: TokenSet, samples: Sequence[int] | np.ndarray, layout: Layout, places: Sequence[int] | None = None
) -> dict[str, Any]:
    """See `collate` and `sequence_part`.

    Args:
        places: of the samples in the order of the data, in training.
    """
    drawn = None if layout.draw_seed is None or places is None else (layout.draw_seed, places)
    batch = collate(
        tokens, samples, layout.pad_id, packing=layout.packing, multiple=layout.length_multiple, drawn=drawn
    )
    if layout.sequence_size == 1:
        return batch
    group_size = tokens.group_size if layout.shares_samples else None
    return sequence_part(batch, layout.sequence_size, layout.sequence_rank, group_size=group_size)


def sequence_part(batch: dict[str, Any], size: int, rank: int, *, group_size: int | None) -> dict[str, Any]:
    """The part of a micro-batch that one of `size` ranks sees: T / size consecutive columns of its rows.

    `targets` and what stands beside them are those of the part. `lengths` and `offsets` stay whole. `position_ids`,
    (1, T / size), are there for padded rows too.

    Args:
        group_size: sequences of a sample, where each sample's loss is computed by one of the ranks. That has its
            `values` and `reference_logps`, those of the sequences `own_sequences`, int64, of S.
    """
    length = batch["input_ids"].shape[1]
    width = length // size
    begin = rank * width
    row, column = batch["target_positions"] // length, batch["target_positions"] % length - begin
    mine = (column >= 0) & (column < width)
    positions = batch.get("position_ids", torch.arange(length)[None])
    by_token = [name for name in ("input_ids", "draw_words", "token_lengths") if name in batch]
    part: dict[str, Any] = {name: batch[name][:, begin : begin + width].contiguous() for name in by_token}
    part["position_ids"] = positions[:, begin : begin + width].contiguous()
    part["target_positions"] = (row * width + column)[mine]
    part |= {name: batch[name][mine] for name in ("targets", "target_sequences", *BY_TARGET) if name in batch}
    if group_size is None:
        return batch | part
    own = torch.arange(batch["num_sequences"]).view(-1, group_size)[rank::size].flatten()
    part["own_sequences"] = own
    part |= {"values": batch["values"][rank::size]} if "values" in batch else {}
    part |= {"reference_logps": batch["reference_logps"][own]} if "reference_logps" in batch else {}
    return batch | part


def _sequences(tokens: TokenSet, samples: Sequence[int] | np.ndarray) -> np.ndarray:
    first = np.asarray(samples, dtype=np.int64)[:, None] * tokens.group_size
    return (first + np.arange(tokens.group_size)).ravel()


def _targets(tokens: TokenSet, sequences: np.ndarray) -> np.ndarray:
    """Indices of the targets of these sequences among all, in order, int64 (L,)."""
    ends = tokens.target_ends[sequences]
    ranges = map(np.arange, ends - tokens.num_targets[sequences], ends)
    return np.concatenate([np.empty(0, np.int64), *ranges])


def _stack(parts: list[np.ndarray], filler: int, packing: bool, multiple: int) -> np.ndarray:
    if packing:
        return np.concatenate(parts).astype(np.int64)[None]
    longest = max(map(len, parts))
    rows = np.full((len(parts), longest + -longest % multiple), filler, dtype=np.int64)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return rows


def train_steps(
    train: TokenSet | Stream,
    layout: Layout,
    *,
    seed: int,
    global_batch_size: int,
    num_samples_consumed: int = 0,
    stream_digest: str | None = None,
) -> Iterator[StepBatch]:
    """The steps of `layout.rank`, epoch after epoch without end.

    No step of a token set spans two epochs; the steps of a stream are all full.

    Args:
        num_samples_consumed: position to resume from: samples of all steps so far, over all ranks and epochs.
        stream_digest: of the last of those steps.

    Raises:
        RecipeError: by the first `next`, if no step of this global_batch_size ends at that position; else see
            `Stream.windows`.
    """
    position = dict(seed=seed, global_batch_size=global_batch_size, num_samples_consumed=num_samples_consumed)
    if isinstance(train, Stream):
        windows = train.windows(**position, digest=stream_digest)
    else:
        windows = _epoch_windows(train, **position)
    place = num_samples_consumed
    for tokens, window, epoch, digest in windows:
        lengths = tokens.lengths.reshape(-1, tokens.group_size)[window]
        shares = balance_over_ranks(lengths.sum(1).tolist(), layout.num_ranks)
        micro_batches = _micro_batches_of_rank(lengths, shares, layout)
        num_targets = tokens.num_targets[_sequences(tokens, window)]
        yield StepBatch(
            micro_batches=[
                _collate(tokens, window[mine], layout, places=[place + position for position in mine])
                for mine in micro_batches
            ],
            sample_numbers=[window[mine].tolist() for mine in micro_batches],
            num_targets=int(num_targets.sum()),
            num_tokens=int(lengths.sum()),
            num_samples=len(window),
            num_sequences=lengths.size,
            num_masked=int((num_targets == 0).sum()),
            epoch=epoch,
            stream_digest=digest,
        )
        place += len(window)


def _epoch_windows(
    tokens: TokenSet, *, seed: int, global_batch_size: int, num_samples_consumed: int
) -> Iterator[Window]:
    num_samples = sum(tokens.epoch_sizes)
    epoch, start = divmod(num_samples_consumed, num_samples)
    if start % global_batch_size:
        raise RecipeError(
            f"batch.global_batch_size is {global_batch_size}, but the run to resume has consumed {start} samples of an"
            " epoch, where no step of that size ends. Use the size that it was started with"
        )
    while True:
        order = epoch_order(tokens, seed, epoch)
        for begin in range(start, num_samples, global_batch_size):
            window = order[begin : begin + global_batch_size]
            yield Window(tokens, window, epoch + (begin + len(window)) / num_samples)
        epoch, start = epoch + 1, 0


def eval_batches(tokens: TokenSet, layout: Layout) -> Iterator[dict[str, Any]]:
    """Every sample once over all ranks, with the same number of batches on each; the longest first, so that an
    out-of-memory error shows at once.
    """
    return (batch for batch, _ in indexed_batches(tokens, layout))


def indexed_batches(tokens: TokenSet, layout: Layout) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """`eval_batches` with the indices of their sequences in the token set, (S,) int64.

    Each sequence is on one rank only, so results that ranks write into zeros at these indices add up to the whole.
    """
    lengths = tokens.lengths.reshape(-1, tokens.group_size)
    order = np.argsort(-lengths.sum(1), kind="stable")
    shares = [order[rank :: layout.num_ranks].tolist() for rank in range(layout.num_ranks)]
    for mine in _micro_batches_of_rank(lengths, shares, layout):
        batch = _collate(tokens, mine, layout)
        yield batch, torch.from_numpy(_sequences(tokens, mine))


def batches_of_targets(tokens: TokenSet, layout: Layout) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """`eval_batches` with the indices of the targets that this rank sees among all of the set, (L,) int64."""
    # Numbers take the way of what a set has for each target, which packing and sequence parallel arrange.
    numbered = replace(tokens, old_logps=np.arange(tokens.num_targets.sum(), dtype=np.float64))
    for batch, _ in indexed_batches(numbered, layout):
        yield batch, batch["old_logps"].long()
