"""The micro-batches of each optimizer step, for one rank.

Which samples make up a step is a function of the seed and of the position in the data. How they are dealt to ranks and
cut into micro-batches changes who waits for whom, and nothing else: the loss is a sum over the global token count.

B samples, T tokens of the longest of them, N samples in all, R ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cookbook.data.tokens import TokenSet
from cookbook.files import RecipeError

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One rank's share of an optimizer step, and what every rank knows of the whole without communication."""

    micro_batches: list[dict[str, Tensor]]
    """As `collate` makes them; the same number on every rank."""
    num_targets: int
    """Positions that carry loss, all ranks together."""
    num_tokens: int
    """Tokens without padding, all ranks together."""
    num_samples: int
    """Samples, all ranks together; fewer than global_batch_size at the end of an epoch."""
    epoch: float
    """Epochs completed after this step."""


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of an epoch, int64 [N]."""
    # The legacy generator: numpy promises that its numbers never change, so a run can resume after an upgrade.
    return np.random.RandomState([seed, epoch]).permutation(num_samples).astype(np.int64)


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Optimizer steps that show every sample once; the last may be partial."""
    return -(-num_samples // global_batch_size)


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


def collate(tokens: TokenSet, samples: Sequence[int] | np.ndarray, pad_id: int) -> dict[str, Tensor]:
    """The samples in rows, padded on the right; causal attention never sees what comes after, so there is no mask.

    With no samples, a row of two pad tokens without targets: every rank must run the forward that others run.

    Returns:
        `input_ids` (B, T) int64; `position_ids` (B, T) int64, counting from 0 in each row; `targets` (B, T) int64,
        already shifted: the next token where that is a label, else -100.
    """
    num_rows, length = (len(samples), int(tokens.lengths[samples].max())) if len(samples) else (1, 2)
    input_ids = np.full((num_rows, length), pad_id, dtype=np.int64)
    targets = np.full((num_rows, length), IGNORE_INDEX, dtype=np.int64)
    for row, sample in enumerate(samples):
        start, end = tokens.offsets[sample], tokens.offsets[sample + 1]
        ids = tokens.ids[start:end]
        input_ids[row, : len(ids)] = ids
        targets[row, : len(ids) - 1] = np.where(tokens.is_label[start + 1 : end], ids[1:], IGNORE_INDEX)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.arange(length).repeat(num_rows, 1),
        "targets": torch.from_numpy(targets),
    }


def train_steps(
    tokens: TokenSet,
    *,
    seed: int,
    global_batch_size: int,
    micro_batch_size: int,
    num_ranks: int,
    rank: int,
    pad_id: int,
    num_samples_consumed: int = 0,
) -> Iterator[StepBatch]:
    """The steps of rank `rank`, epoch after epoch without end; each epoch shows every sample once.

    Args:
        num_samples_consumed: where to go on: samples of all steps so far, all ranks and epochs together.

    Raises:
        RecipeError: a position that no step of this global_batch_size ends at. Raised by the first `next`.
    """
    num_samples = len(tokens)
    epoch, start = divmod(num_samples_consumed, num_samples)
    if start % global_batch_size:
        mistake = (
            f"batch.global_batch_size is {global_batch_size}, but the run to resume stands at sample {start} of an"
            " epoch, where no step of that size ends. Use the size that it was started with"
        )
        raise RecipeError([mistake])
    while True:
        order = epoch_order(num_samples, seed, epoch)
        for begin in range(start, num_samples, global_batch_size):
            window = order[begin : begin + global_batch_size]
            dealt = deal(tokens.lengths[window].tolist(), num_ranks)
            mine = window[np.array(dealt[rank], dtype=np.int64)]
            num_forwards = -(-len(window) // (micro_batch_size * num_ranks))
            cuts = (mine[i * micro_batch_size : (i + 1) * micro_batch_size] for i in range(num_forwards))
            yield StepBatch(
                micro_batches=[collate(tokens, cut, pad_id) for cut in cuts],
                num_targets=int(tokens.num_targets[window].sum()),
                num_tokens=int(tokens.lengths[window].sum()),
                num_samples=len(window),
                epoch=epoch + (begin + len(window)) / num_samples,
            )
        epoch, start = epoch + 1, 0


def eval_batches(
    tokens: TokenSet, *, micro_batch_size: int, num_ranks: int, rank: int, pad_id: int
) -> Iterator[dict[str, Tensor]]:
    """Every sample once over all ranks, with the same number of batches on each.

    The longest come first: what does not fit in memory shows at once.
    """
    order = np.argsort(-tokens.lengths, kind="stable")
    for begin in range(0, len(order), micro_batch_size * num_ranks):
        yield collate(tokens, order[begin : begin + micro_batch_size * num_ranks][rank::num_ranks], pad_id)
