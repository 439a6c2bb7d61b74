"""The gradient norm of a step that leaves what was usual, and which layers hold it."""

import math
import re
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from cookbook.training.engine.findings import MOST_NAMED, in_words

TIMES = 10.0
"""A norm of more than so many times the running median is unusual; so is one that is not finite."""
LEAST, MOST = 10, 100
"""Norms of this start before which there is no median, and the last ones, of which it is."""
MOST_LAYERS = 5
WORTH = 0.01
"""A share of the squared norm below which a layer is not named."""
_LAYER = re.compile(r"(.*?\b(?:layers|h|blocks)\.\d+)\.")


@dataclass(frozen=True, kw_only=True)
class UnusualGradient:
    """An unusual gradient, the same on every rank."""

    norm: float
    usual: float
    """The median before it; nan if there were too few norms."""
    squares: dict[str, float]
    """Squared norms by trained parameter, times a factor that is the same for all."""

    @property
    def not_finite(self) -> list[str]:
        """Parameters whose gradient is not finite."""
        return [name for name, square in self.squares.items() if not math.isfinite(square)]

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the squared norm, by layer, largest first; of a finite one."""
        sums: dict[str, float] = {}
        for name, square in self.squares.items():
            sums[layer_of(name)] = sums.get(layer_of(name), 0.0) + square
        total = sum(sums.values()) or 1.0
        return {layer: sums[layer] / total for layer in sorted(sums, key=lambda layer: -sums[layer])}

    def details(self) -> dict[str, Any]:
        """The record for events.jsonl, in which a norm that is not finite is None."""
        if not math.isfinite(self.norm):
            bad = self.not_finite
            return {"norm": None, "not_finite": bad[:MOST_NAMED], "parameters": f"{len(bad)} of {len(self.squares)}"}
        largest = {layer: round(share, 4) for layer, share in self._large_shares()}
        return {"norm": self.norm, "usual": self.usual, "layers": largest, "most_in": self._largest()}

    def in_words(self) -> str:
        bad, all_of = self.not_finite, len(self.squares)
        if not math.isfinite(self.norm):
            names = f": {in_words(bad)}" if len(bad) < all_of else ""
            return f"the gradient is not finite in {len(bad)} of {all_of} trained parameters{names}"
        where = ", ".join(f"{share:.0%} in {layer}" for layer, share in self._large_shares())
        times = f"{self.norm / self.usual:.0f} times the usual {self.usual:.3g}"
        return f"gradient norm {self.norm:.3g}, {times}; of its square {where}; most in {self._largest()}"

    def _large_shares(self) -> list[tuple[str, float]]:
        return [(layer, share) for layer, share in self.shares.items() if share >= WORTH][:MOST_LAYERS]

    def _largest(self) -> str:
        return max(self.squares, key=lambda name: self.squares[name])


class UsualNorms:
    """The norms of the steps so far. Only what is the same on every rank decides, so that all decide alike."""

    def __init__(self, *, overflows: bool) -> None:
        """
        Args:
            overflows: whether steps that are not finite are usual, as under fp16, whose loss scale looks for them.
        """
        self._overflows = overflows
        self._norms: deque[float] = deque(maxlen=MOST)
        self._state = ""

    @property
    def median(self) -> float:
        """The usual norm; nan before there are enough."""
        return median(self._norms) if len(self._norms) >= LEAST else math.nan

    def begins(self, norm: float) -> bool:
        """Count a step's norm. True at the first of several unusual ones, and where they turn from large to not finite
        or back.
        """
        before, usual = self._state, self.median
        if math.isfinite(norm):
            self._state = "large" if usual > 0 and norm > TIMES * usual else ""  # False where there is no median
            self._norms.append(norm)
        elif not self._overflows:
            self._state = "not finite"
        return self._state not in ("", before)


def layer_of(name: str) -> str:
    """The layer of a parameter, or its module outside of layers."""
    match = _LAYER.match(name)
    return match[1] if match else name.rpartition(".")[0] or name
