"""The reference of preference training: log-probabilities of the untrained model, computed once and kept on disk."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

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
        assert isinstance(tokens, TokenSet), "what needs a reference does not stream"
        text = json.dumps([tokens.fingerprint, *made_from])
        path = cache / f"reference-{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"
        values = _load(path, len(tokens.lengths))
        if not agree(values is not None) or values is None:
            values = compute(tokens).astype(np.float64)
            _save(path, values)
        return replace(tokens, reference_logps=values)

    evals = {name: reference(tokens) for name, tokens in sets.eval.items()}
    return replace(sets, train=reference(sets.train), eval=evals)


def _save(path: Path, values: np.ndarray) -> None:
    """Whole or not at all; a disk without room costs the next start its time."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        save_file({"logps": values}, unfinished, metadata={"digest": _digest(values)})
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        print(f"{path} could not be written: {error}", file=sys.stderr)


def _load(path: Path, size: int) -> np.ndarray | None:
    """None if it is absent, or not what was written."""
    try:
        with safe_open(path, "numpy") as file:
            values, digest = file.get_tensor("logps"), (file.metadata() or {}).get("digest")
    except (OSError, SafetensorError):
        return None
    is_good = values.shape == (size,) and values.dtype == np.float64 and digest == _digest(values)
    return values if is_good and np.isfinite(values).all() else None


def _digest(values: np.ndarray) -> str:
    return xxhash.xxh3_128(np.ascontiguousarray(values).tobytes()).hexdigest()
