"""Shares of the peak fitted on one half of the frameworks' rows, and reported on the other.

The half is that of the row's name: the last bit of its SHA-256. A range is judged by its interval score (Gneiting and
Raftery 2007, section 6.2) of the logarithm of tokens per second, for 80 %: its width, and ten times what a row lies
outside. Lower is better.
"""

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from cookbook.forecast.step_time import OF_HOST, Range

OUTSIDE = 2 / 0.2
Shares = tuple[float, float]
BEFORE: dict[str, Shares] = {"hopper": (0.34, 0.56), "blackwell": (0.25, 0.50), "blackwell card": (0.25, 0.50)}
"""Shares of the peak, at worst and at best, that stood before the fit."""
WORST = [share / 100 for share in range(10, 52, 2)]
BEST = [share / 100 for share in range(40, 92, 2)]
CARDS = "blackwell card"
"""Too few rows are of these for both ends: the slow one is Ada's."""
OF_ADA = 0.35


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step's seconds, with products at the whole peak: what another share of it would make of a forecast."""

    products: float
    kernels: float
    """Other kernels at the fast end."""
    beside: float
    """The longest part that overlaps with kernels, at the fast end."""
    after: float
    """The part that overlaps with nothing, at the fast end."""
    others: float
    """All but products and launches at the slow end."""
    host: float
    """Launches and what overlaps with nothing, at the slow end."""

    def seconds(self, shares: Shares) -> tuple[float, float]:
        """As `step_time.combine`."""
        worst, best = shares
        low = max(self.products / best + self.kernels, self.beside) + self.after
        return low, max(self.products / worst + self.others, self.host)


def work_of(time: Range, shares: Shares) -> Work:
    """The work of a forecast that was made with these shares."""
    (products,) = (part for part in time.parts if part.name == "compute")
    others = [part for part in time.parts if part.name != "compute"]
    after = [part for part in others if not part.overlaps]
    return Work(
        products=products.low * shares[1],
        kernels=sum(part.low for part in others if part.is_kernel),
        beside=max((part.low for part in others if part.overlaps and not part.is_kernel), default=0.0),
        after=sum(part.low for part in after),
        others=sum(part.high for part in others if part.name != OF_HOST),
        host=sum(part.high for part in others if part.name == OF_HOST or not part.overlaps),
    )


def is_held_out(name: str) -> bool:
    """True if a row is in the half on which nothing is fitted."""
    return hashlib.sha256(name.encode()).digest()[-1] % 2 == 1


def range_of(row: Mapping[str, Any], shares: Shares) -> tuple[float, float]:
    """Tokens per second of a GPU, from the slow end of the recipe to the fast one of compiled layers if they can be."""
    ends = [Work(**work).seconds(shares) for work in row["works"]]
    return row["tokens"] / max(high for _, high in ends), row["tokens"] / min(low for low, _ in ends)


def score(rows: Iterable[Mapping[str, Any]], shares: Shares) -> float:
    """Mean interval score."""
    widths = []
    for row in rows:
        low, high = map(math.log, range_of(row, shares))
        speed = math.log(row["published"])
        widths.append(high - low + OUTSIDE * (max(0.0, low - speed) + max(0.0, speed - high)))
    return statistics.mean(widths)


def fitted(rows: list[dict[str, Any]], kind: str) -> Shares:
    """The shares of the best score on these rows."""
    worst = [OF_ADA] if kind == CARDS else WORST
    return min((pair for pair in product(worst, BEST) if pair[0] < pair[1]), key=lambda pair: score(rows, pair))


def _judged(rows: list[dict[str, Any]], shares: Shares) -> dict[str, Any]:
    errors, inside = [], 0
    for row in rows:
        low, high = range_of(row, shares)
        errors.append(abs(math.sqrt(low * high) / row["published"] - 1))
        inside += low <= row["published"] <= high
    return {
        "inside": inside,
        "median": round(statistics.median(errors), 2),
        "worst": round(max(errors), 2),
        "score": round(score(rows, shares), 2),
    }


def report(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Result of a fit on one half for the other, of each kind of GPU."""
    kinds = []
    for kind, before in BEFORE.items():
        of_kind = [row for row in rows if row["kind"] == kind]
        own, other = ([row for row in of_kind if is_held_out(row["id"]) == held] for held in (False, True))
        shares = fitted(own, kind)
        now, then = _judged(other, before), _judged(other, shares)
        is_better = then["score"] < now["score"] and then["median"] <= now["median"] and then["inside"] >= now["inside"]
        kinds.append(
            {"kind": kind, "fitted": len(own), "held_out": len(other), "before": before, "shares": shares}
            | {"now": now, "then": then, "is_taken": is_better}
        )
    return kinds


def record(work: Work) -> dict[str, float]:
    """For the results."""
    return {name: float(f"{value:.5g}") for name, value in asdict(work).items()}
