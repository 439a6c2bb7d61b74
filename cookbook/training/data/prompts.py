"""The beginnings of held-out samples, which a run continues to show what it has learnt."""

from collections.abc import Sequence

import numpy as np

from cookbook.training.data.tokens import TokenSet, join

NUM_PROMPTS = 4


def beginnings(tokens: TokenSet) -> list[list[int]]:
    """The tokens of each of the first samples before the first that carries loss; where all carry it, as in a text, the
    first half. Of a pair, that of the chosen sequence.
    """
    prompts = []
    for sample in range(min(NUM_PROMPTS, len(tokens))):
        first = sample * tokens.group_size
        part = slice(*tokens.offsets[first : first + 2])
        ids, end = tokens.ids[part].tolist(), int(np.argmax(tokens.is_label[part]))
        prompts.append(ids[: end if end > 1 else max(1, len(ids) // 2)])
    return prompts


def awaiting(sequences: Sequence[Sequence[int]], lengths: Sequence[int], pad_id: int) -> TokenSet:
    """Sequences, each padded to its length, whose one target is the token that follows them."""
    pieces = []
    for ids, length in zip(sequences, lengths, strict=True):
        row, is_label = np.full(length, pad_id, dtype=np.int32), np.zeros(length, dtype=bool)
        row[: len(ids)] = ids
        is_label[min(len(ids), length - 1)] = True
        pieces.append((row, is_label))
    return join(pieces)
