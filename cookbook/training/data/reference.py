"""Reference of preference training: log-probabilities under the untrained model, computed once and cached on disk."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cookbook.config.objectives import Objective
from cookbook.system.console import say
from cookbook.training.data.sets import TokenSets
from cookbook.training.data.stream import Stream
from cookbook.training.data.tokens import TokenSet, digest_of


def with_reference(
    sets: TokenSets,
    made_from: list[str],
    objective: Objective,
    *,
    cache: Path,
    all_true: Callable[[bool], bool],
    compute: Callable[[TokenSet], np.ndarray],
) -> TokenSets:
    """Token sets with `reference_logps`, or `token_reference_logps` where the objective compares tokens, cached or
    computed, so that no second model is held in memory. Where rows have the reference, what is computed is `old_logps`.

    Every rank must call. Each machine keeps a file of its own.

    Args:
        made_from: what the values depend on besides the tokens: weights, precision, strategy.
        all_true: whether a value is true on every rank.
        compute: log-probability of the labelled tokens of each sequence, float64 [S], or of each target, the same on
            every rank.
    """
    of_tokens = objective.reference_of == "tokens"

    def reference(tokens: TokenSet | Stream) -> TokenSet:
        assert isinstance(tokens, TokenSet), "an objective with a reference cannot stream"
        given = tokens.given_logps
        if not objective.compares(given):
            return tokens
        text = json.dumps([tokens.fingerprint, *made_from])
        path = cache / f"reference-{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"
        values = _load_logps(path, int(tokens.num_targets.sum()) if of_tokens else len(tokens.lengths))
        if not all_true(values is not None) or values is None:
            values = compute(tokens).astype(np.float64)
            _save_logps(path, values)
        if not of_tokens:
            return replace(tokens, reference_logps=values)
        if "token_reference_logps" in given:
            return replace(tokens, old_logps=values)
        return replace(tokens, token_reference_logps=values)

    evals = {name: reference(tokens) for name, tokens in sets.eval.items()}
    return replace(sets, train=reference(sets.train), eval=evals)


def _save_logps(path: Path, values: np.ndarray) -> None:
    """Write atomically. On a full disk, the next start computes them again."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        save_file({"logps": values}, unfinished, metadata={"digest": digest_of(values)})
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        say(f"{path} could not be written: {error}", file=sys.stderr)


def _load_logps(path: Path, size: int) -> np.ndarray | None:
    """None if the file is missing or damaged."""
    try:
        with safe_open(path, "numpy") as file:
            values, digest = file.get_tensor("logps"), (file.metadata() or {}).get("digest")
    except (OSError, SafetensorError):
        return None
    is_good = values.shape == (size,) and values.dtype == np.float64 and digest == digest_of(values)
    return values if is_good and np.isfinite(values).all() else None
