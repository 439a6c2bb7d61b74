"""The beginnings of held-out samples, which a run continues to show what it has learnt, and what followed them."""

from collections.abc import Iterator, Sequence

import numpy as np

from cookbook.training.data.tokens import TokenSet, join

NUM_PROMPTS = 4


def beginnings(tokens: TokenSet, most: int = NUM_PROMPTS) -> list[list[int]]:
    """The tokens of each of the first samples before the first that carries loss; where all carry it, as in a text, the
    first half. Of a pair, that of the chosen sequence.
    """
    return [prompt for prompt, _ in _divide_samples(tokens, most)]


def endings(tokens: TokenSet, most: int) -> list[list[int]]:
    """The tokens with loss that follow each of these beginnings, up to the next without."""
    return [ending for _, ending in _divide_samples(tokens, most)]


def _divide_samples(tokens: TokenSet, most: int) -> Iterator[tuple[list[int], list[int]]]:
    for sample in range(min(most, len(tokens))):
        first = sample * tokens.group_size
        part = slice(*tokens.offsets[first : first + 2])
        ids, is_label = tokens.ids[part].tolist(), tokens.is_label[part]
        end = int(np.argmax(is_label))
        end = end if end > 1 else max(1, len(ids) // 2)
        yield ids[:end], ids[end : end + int(np.argmin([*is_label[end:], False]))]


def awaiting(sequences: Sequence[Sequence[int]], lengths: Sequence[int], pad_id: int) -> TokenSet:
    """Sequences, each padded to its length, whose one target is the token that follows them."""
    pieces = []
    for ids, length in zip(sequences, lengths, strict=True):
        row, is_label = np.full(length, pad_id, dtype=np.int32), np.zeros(length, dtype=bool)
        row[: len(ids)] = ids
        is_label[min(len(ids), length - 1)] = True
        pieces.append((row, is_label))
    return join(pieces)
