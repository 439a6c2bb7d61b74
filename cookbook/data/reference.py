"""The reference of preference training: log-probabilities of the untrained model, computed once and kept on disk."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from cookbook.data.sets import TokenSets
from cookbook.data.stream import Stream
from cookbook.data.tokens import TokenSet


def with_reference(
    sets: TokenSets,
    made_from: list[str],
    *,
    cache: Path,
    agree: Callable[[bool], bool],
    compute: Callable[[TokenSet], np.ndarray],
) -> TokenSets:
    """The token sets with `reference_logps`, from the cache or computed now. So no second model is held in memory.

    Collective: every process must call. Each machine keeps a file of its own.

    Args:
        made_from: what the values depend on besides the tokens: weights, precision, strategy.
        agree: whether something is true on every process.
        compute: the log-probability of the labelled tokens of each sequence, float64 [N], the same on every process.
    """

    def reference(tokens: TokenSet | Stream) -> TokenSet:
        assert isinstance(tokens, TokenSet), "a recipe of preferences does not stream"
        text = json.dumps([tokens.fingerprint, *made_from])
        path = cache / f"reference-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npy"
        values = _load(path, len(tokens.lengths))
        if not agree(values is not None) or values is None:
            values = compute(tokens)
            unfinished = path.with_suffix(f".{os.getpid()}.npy")
            np.save(unfinished, values)
            unfinished.replace(path)
        return replace(tokens, reference_logps=values)

    evals = {name: reference(tokens) for name, tokens in sets.eval.items()}
    return replace(sets, train=reference(sets.train), eval=evals)


def _load(path: Path, size: int) -> np.ndarray | None:
    try:
        values = np.load(path)
    except (OSError, ValueError, EOFError):
        return None
    return values if values.shape == (size,) and np.isfinite(values).all() else None
