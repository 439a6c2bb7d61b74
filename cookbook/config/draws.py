"""Random numbers that belong to a token of a sample: dropout and NEFTune's noise are the same under every strategy.

A draw is a function of the recipe's seed, the sample's place in the order of the data, which counts the samples of all
steps before, the sequence of the sample, the position in it, the layer's name and the feature. All up to the position
is mixed on the host into one word for each token, which takes the way of `input_ids`: packed, padded, cut by sequence
parallel, through a pipeline. A layer mixes its name and the number of a pair of features into one word. The sum of the
two words is mixed again, and each half of it is the draw of one of the two features.

The mixer is the finalizer of MurmurHash3 (Appleby 2011, MurmurHash3.cpp, fmix32), on which all bits of a word depend.
Nothing is saved for a resume, and what is drawn for a token does not depend on which process draws it, beside what.
"""

import zlib
from collections.abc import Callable

import numpy as np
import torch

ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
"""Shifts and factors of fmix32; its last round has no factor."""
GOLDEN = 0x9E3779B9
"""2^32 / the golden ratio, an odd number, whose multiples lie far from one another (Knuth 1973, The Art of Computer
Programming 3, section 6.4)."""
DRAWS = 2**16
"""Values of a draw."""
WORDS_AT_A_TIME = {"cpu": 2**18, "cuda": 2**24}
"""Words that are mixed at a time: 1 MiB, which a core's cache holds, and on a GPU 64 MiB."""


def mix_words(words: np.ndarray) -> np.ndarray:
    """fmix32 of unsigned words of 32 bits, of any shape."""
    words = words.astype(np.uint32)
    for shift, factor in ROUNDS:
        words = (words ^ (words >> np.uint32(shift))) * np.uint32(factor)
    return words


def token_words(seed: int, place: int, sequence: int, length: int) -> np.ndarray:
    """The words of the tokens of a sequence, int32 [length].

    Args:
        place: of its sample in the order of the data.
        sequence: its index in the sample.
    """
    word = np.zeros(1, dtype=np.uint32)
    for value in (seed & 0xFFFFFFFF, seed >> 32, place & 0xFFFFFFFF, place >> 32, sequence):
        word = mix_words((word ^ np.uint32(value)) + np.uint32(GOLDEN))
    return mix_words(word + np.arange(length, dtype=np.uint32) * np.uint32(GOLDEN)).view(np.int32)


def name_word(name: str) -> int:
    """The word of a layer, a signed number."""
    return int(mix_words(np.array([zlib.crc32(name.encode())])).view(np.int32)[0])


def _to_signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _mix_(words: torch.Tensor) -> torch.Tensor:
    """`mix_words` of signed words, int32, in place; products of integers wrap around."""
    for shift, factor in ROUNDS:
        # torch fills with the sign.
        words.bitwise_xor_((words >> shift).bitwise_and_(2 ** (32 - shift) - 1))
        if factor != 1:
            words.mul_(_to_signed(factor))
    return words


def feature_words(name: torch.Tensor, start: int, width: int, device: torch.device) -> torch.Tensor:
    """The words of the pairs of features `start` to `start + width - 1` of a layer, int32.

    Args:
        name: its word, int32, a scalar, which may lie on the CPU.
    """
    pairs = torch.arange(start // 2, (start + width + 1) // 2, dtype=torch.int32, device=device)
    return _mix_((pairs + 1).mul_(_to_signed(GOLDEN)).add_(name))


def _draws(tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """(N,) and (J,) words -> (N, 2 J) draws, integers from -32768 to 32767."""
    words = _mix_(tokens[:, None] + features)
    if torch.compiler.is_compiling():  # inductor leaves a view of another size to eager code
        return torch.stack([(words << 16) >> 16, words >> 16], -1).flatten(1)
    return words.view(torch.int16)  # the low half first, as on every machine that torch has kernels for


def _for_rows(
    tokens: torch.Tensor, features: torch.Tensor, dtype: torch.dtype, of_draws: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """(N, 2 J): a function of the draws, of so many rows at a time that the words stay small."""
    if torch.compiler.is_compiling():
        return of_draws(_draws(tokens, features)).to(dtype)
    rows = max(1, WORDS_AT_A_TIME.get(tokens.device.type, 2**24) // len(features))
    results = torch.empty(len(tokens), 2 * len(features), dtype=dtype, device=tokens.device)
    for start in range(0, len(tokens), rows):
        some = slice(start, start + rows)
        results[some] = of_draws(_draws(tokens[some], features))
    return results


def threshold(p: float) -> int:
    """The number of draws, of 65,536, for which dropout drops a value: 0 for 0 alone."""
    return min(max(round(p * DRAWS), 1), DRAWS - 1) if p else 0


@torch.no_grad()
def dropout_mask(tokens: torch.Tensor, features: torch.Tensor, limit: int) -> torch.Tensor:
    """(N, 2 J) bool: where dropout with a `threshold` drops a value."""
    return _for_rows(tokens, features, torch.bool, lambda draws: draws < limit - DRAWS // 2)


@torch.no_grad()
def noise(tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """(N, 2 J) float32, uniform in (-1, 1)."""
    return _for_rows(tokens, features, torch.float32, lambda draws: (draws.float() + 0.5) / (DRAWS // 2))
