"""Tests of which a part runs by turn."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

LONG = 0.3
"""Where a test takes more seconds by tests/durations.json it is slow, unless it is marked as core or among `ALONE`."""

ALONE = frozenset(json.loads(Path(__file__).with_name("alone.json").read_text(encoding="utf-8")))
"""Long tests of `make test`: without them its other tests would not reach all that it reaches with every long one
(`python tests/drawn_mutants.py alone`).
"""

FAMILIES = (
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "granite",
    "lfm2",
    "llama",
    "mamba2",
    "mistral",
    "mixtral",
)
FAMILIES += ("nemotron_h", "olmo2", "phi3", "qwen3", "qwen3_5_text", "qwen3_moe")
"""Model types that differ most in their layers, where each of some two hundred types has a test."""

ROWS = json.loads(Path("benchmarks/results/architectures.json").read_text(encoding="utf-8"))["rows"]
TRAINED = [name for name, row in ROWS.items() if "plain" in row]
"""All model types that train, by the record of docs/architectures.md."""

TEMPLATES = ("chatml", "gemma3", "gpt_oss", "llama3_1", "qwen2_5", "qwen3_5")
"""Shipped templates of the families that are trained most."""


def others_by_turn(everything: Iterable[str], chosen: Iterable[str]) -> list[Any]:
    """Parameters: all, of which those that are not chosen are thorough.

    Raises:
        ValueError: one that is chosen is not there.
    """
    everything, chosen = list(everything), list(chosen)
    if missing := set(chosen) - set(everything):
        raise ValueError(f"not there: {sorted(missing)}")
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.thorough) for name in everything]
