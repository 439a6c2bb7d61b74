"""The micro-batches of each optimizer step, for one rank.

Which samples make up a step is a function of the seed and of the position in the data. How they are dealt to ranks and
cut into micro-batches changes who waits for whom, and nothing else: the loss is a sum over the global token count.

A sample is what the recipe counts: a sequence of tokens, or a pair of them (chosen, rejected), never split.
B rows, T tokens, S sequences, L targets in a micro-batch, W samples in a step, N samples in all, R ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cookbook.data.stream import Stream, Window
from cookbook.data.tokens import TokenSet
from cookbook.files import RecipeError

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How samples are spread over ranks and cut into micro-batches; of the two limits, one is given."""

    num_ranks: int
    rank: int
    pad_id: int
    micro_batch_size: int | None = None
    """Samples in a micro-batch."""
    micro_batch_tokens: int | None = None
    """Tokens in a micro-batch, padding included."""
    packing: bool = False
    """One row without padding, instead of a row for each sequence."""


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One rank's share of an optimizer step, and what every rank knows of the whole without communication."""

    micro_batches: list[dict[str, Any]]
    """As `collate` makes them; the same number on every rank."""
    sample_numbers: list[list[int]]
    """For each of them, which samples of the set it holds (of a stream: of the step)."""
    num_targets: int
    """Positions that carry loss, all ranks together."""
    num_tokens: int
    """Tokens without padding, all ranks together."""
    num_samples: int
    """Samples, all ranks together; fewer than global_batch_size at the end of an epoch."""
    num_sequences: int
    """Of those samples: as many, or two for each pair."""
    epoch: float
    """Epochs completed after this step; of a stream, whose length is not known, whole ones."""
    stream_digest: str | None = None
    """See `Window.digest`."""


def epoch_order(tokens: TokenSet, seed: int, epoch: int) -> np.ndarray:
    """The samples of an epoch in their order, int64 [sum of epoch_sizes].

    A source whose weight is not 1 goes through a fixed permutation of its samples, round and round: each epoch takes
    up where the one before ended.
    """
    # The legacy generator: numpy promises that its numbers never change, so a run can resume after an upgrade.
    order = np.random.RandomState([seed, epoch]).permutation(sum(tokens.epoch_sizes)).astype(np.int64)
    if not tokens.weights:
        return order
    shown, start = [], 0
    for part, (size, count) in enumerate(zip(tokens.part_sizes, tokens.epoch_sizes, strict=True)):
        picked = np.arange(count)
        if count != size:
            permutation = np.random.RandomState([seed, part, 1]).permutation(size)
            picked = permutation[(epoch * count + picked) % size]
        shown.append(start + picked)
        start += size
    return np.concatenate(shown)[order]


def steps_per_epoch(train: TokenSet | Stream, global_batch_size: int) -> int | None:
    """Optimizer steps of an epoch, the last of which may be partial; None for a stream, whose end is not known."""
    if isinstance(train, Stream):
        return None
    return -(-sum(train.epoch_sizes) // global_batch_size)


def deal(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Positions in `lengths` for each rank, longest first, so that neighbours are of similar length.

    Greedy: the longest sample left goes to the rank with the fewest tokens that still has room. Counts differ by at
    most one.
    """
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    num_tokens = [0] * num_ranks
    quota, num_extra = divmod(len(lengths), num_ranks)
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = [rank for rank in range(num_ranks) if len(dealt[rank]) < quota + (num_extra > 0)]
        rank = min(room, key=lambda rank: (num_tokens[rank], rank))
        num_extra -= len(dealt[rank]) == quota
        dealt[rank].append(position)
        num_tokens[rank] += int(lengths[position])
    return dealt


def cut(lengths: np.ndarray, samples: Sequence[int], layout: Layout) -> list[list[int]]:
    """The samples of one rank, in their order, by micro-batches; each is as full as its limit allows.

    Args:
        lengths: tokens of each sequence of each sample, int64 [W, group_size].
        samples: rows of `lengths`.
    """
    if layout.micro_batch_size is not None:
        size = layout.micro_batch_size
        return [list(samples[i : i + size]) for i in range(0, len(samples), size)]
    assert layout.micro_batch_tokens is not None
    cuts: list[list[int]] = []
    num_tokens = longest = 0
    totals, maxima = (found.tolist() for found in (lengths[samples].sum(1), lengths[samples].max(1)))
    for sample, total, maximum in zip(samples, totals, maxima, strict=True):
        num_tokens, longest = num_tokens + total, max(longest, maximum)
        num_rows = (len(cuts[-1]) + 1) * lengths.shape[1] if cuts else 0
        if not cuts or (num_tokens if layout.packing else num_rows * longest) > layout.micro_batch_tokens:
            cuts.append([])
            num_tokens, longest = total, maximum
        cuts[-1].append(sample)
    return cuts


def _cuts_of_rank(lengths: np.ndarray, dealt: Sequence[Sequence[int]], layout: Layout) -> list[list[int]]:
    """Every rank works out the cuts of all, and so knows without communication how many forwards they all run."""
    cuts = [cut(lengths, share, layout) for share in dealt]
    num_forwards = max(map(len, cuts))
    return cuts[layout.rank] + [[]] * (num_forwards - len(cuts[layout.rank]))


def collate(
    tokens: TokenSet, samples: Sequence[int] | np.ndarray, pad_id: int, *, packing: bool = False
) -> dict[str, Any]:
    """The samples as a micro-batch, without a mask: a padded row ends with its padding, which causal attention never
    sees from before, and in a packed row `lengths` tell which tokens belong together.

    Whatever the host must know of it is a shape or an integer here, so that nobody asks a device for it. With no
    samples, a row of two pad tokens without targets: every rank must run the forward that others run.

    Returns:
        `input_ids` (B, T) int64, a row for each sequence, padded on the right; packed (1, T), one after the other.
        `targets` (L,) int64, row by row: the next tokens of the same sequence that are labels.
        `target_positions` (L,) int64: where in the flattened rows each is predicted.
        `position_ids` (1, T) int64, packed only: counting from 0 in each sequence.
        `lengths` S integers, packed only: tokens of each sequence, or of the two pad tokens.
        `offsets` (S + 1,) int32, packed only: where each begins, and the end of the last.
        `target_sequences` (L,) int64: the sequence within the micro-batch that each target belongs to; of pairs 2i is
        chosen, 2i + 1 rejected.
        `num_sequences` S, 0 with no samples.
        `values` (W,) float64, if the token set has them: a number of each sample; (0,) with no samples.
        `reference_logps` (S,) float64, if the token set has them; (0,) with no samples.
    """
    sequences = _sequences(tokens, samples)
    inputs, targets = [np.full(2, pad_id)], [np.full(2, IGNORE_INDEX)]
    if len(sequences):
        inputs, targets = [], []
        for start, end in zip(tokens.offsets[sequences], tokens.offsets[sequences + 1], strict=True):
            ids = tokens.ids[start:end]
            inputs.append(ids)
            shifted = np.where(tokens.is_label[start + 1 : end], ids[1:], IGNORE_INDEX)
            targets.append(np.append(shifted, IGNORE_INDEX))
    input_ids, next_ids = _rows(inputs, pad_id, packing), _rows(targets, IGNORE_INDEX, packing).ravel()
    positions = np.flatnonzero(next_ids != IGNORE_INDEX)
    arrays = {"input_ids": input_ids, "targets": next_ids[positions], "target_positions": positions}
    owners = positions // input_ids.shape[1]
    if packing:
        arrays["position_ids"] = np.concatenate([np.arange(len(ids)) for ids in inputs])[None]
        arrays["offsets"] = np.cumsum([0, *map(len, inputs)], dtype=np.int32)
        owners = np.searchsorted(arrays["offsets"][1:], positions, side="right")
    arrays["target_sequences"] = owners
    if tokens.values is not None:
        arrays["values"] = tokens.values[np.asarray(samples, dtype=np.int64)]
    if tokens.reference_logps is not None:
        arrays["reference_logps"] = tokens.reference_logps[sequences]
    batch: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    # Integers: what wraps a model moves every tensor among its arguments to the device.
    batch["num_sequences"] = len(sequences)
    return batch | ({"lengths": tuple(map(len, inputs))} if packing else {})


def _sequences(tokens: TokenSet, samples: Sequence[int] | np.ndarray) -> np.ndarray:
    first = np.asarray(samples, dtype=np.int64)[:, None] * tokens.group_size
    return (first + np.arange(tokens.group_size)).ravel()


def _rows(parts: list[np.ndarray], filler: int, packing: bool) -> np.ndarray:
    if packing:
        return np.concatenate(parts).astype(np.int64)[None]
    rows = np.full((len(parts), max(map(len, parts))), filler, dtype=np.int64)
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

    A step of a token set ends with its epoch at the latest; the steps of a stream are all full.

    Args:
        num_samples_consumed: where to go on: samples of all steps so far, all ranks and epochs together.
        stream_digest: of the last of those steps.

    Raises:
        RecipeError: a position that no step of this global_batch_size ends at, by the first `next`; and what
            `Stream.windows` raises.
    """
    position = dict(seed=seed, global_batch_size=global_batch_size, num_samples_consumed=num_samples_consumed)
    if isinstance(train, Stream):
        windows = train.windows(**position, digest=stream_digest)
    else:
        windows = _windows(train, **position)
    for tokens, window, epoch, digest in windows:
        lengths = tokens.lengths.reshape(-1, tokens.group_size)[window]
        dealt = deal(lengths.sum(1).tolist(), layout.num_ranks)
        cuts = _cuts_of_rank(lengths, dealt, layout)
        yield StepBatch(
            micro_batches=[collate(tokens, window[mine], layout.pad_id, packing=layout.packing) for mine in cuts],
            sample_numbers=[window[mine].tolist() for mine in cuts],
            num_targets=int(tokens.num_targets[_sequences(tokens, window)].sum()),
            num_tokens=int(lengths.sum()),
            num_samples=len(window),
            num_sequences=lengths.size,
            epoch=epoch,
            stream_digest=digest,
        )


def _windows(tokens: TokenSet, *, seed: int, global_batch_size: int, num_samples_consumed: int) -> Iterator[Window]:
    num_samples = sum(tokens.epoch_sizes)
    epoch, start = divmod(num_samples_consumed, num_samples)
    if start % global_batch_size:
        mistake = (
            f"batch.global_batch_size is {global_batch_size}, but the run to resume stands at sample {start} of an"
            " epoch, where no step of that size ends. Use the size that it was started with"
        )
        raise RecipeError([mistake])
    while True:
        order = epoch_order(tokens, seed, epoch)
        for begin in range(start, num_samples, global_batch_size):
            window = order[begin : begin + global_batch_size]
            yield Window(tokens, window, epoch + (begin + len(window)) / num_samples)
        epoch, start = epoch + 1, 0


def eval_batches(tokens: TokenSet, layout: Layout) -> Iterator[dict[str, Any]]:
    """Every sample once over all ranks, with the same number of batches on each.

    The longest come first: what does not fit in memory shows at once.
    """
    return (batch for batch, _ in indexed_batches(tokens, layout))


def indexed_batches(tokens: TokenSet, layout: Layout) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """As `eval_batches`, each with the numbers of its sequences in the token set, (S,) int64 (none: no samples).

    A sequence is on one rank only: results that each rank writes into zeros at these places add up to the whole.
    """
    lengths = tokens.lengths.reshape(-1, tokens.group_size)
    order = np.argsort(-lengths.sum(1), kind="stable")
    shares = [order[rank :: layout.num_ranks].tolist() for rank in range(layout.num_ranks)]
    for mine in _cuts_of_rank(lengths, shares, layout):
        batch = collate(tokens, mine, layout.pad_id, packing=layout.packing)
        yield batch, torch.from_numpy(_sequences(tokens, mine))
