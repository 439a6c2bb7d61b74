"""Distance of the log-probabilities of who sampled from those of the weights that a round trains. No torch.

The divergence of a token is exp(d) - d - 1, with d the trainer's log-probability less the sampler's: its mean estimates
KL(sampler, trainer), and no token's is below 0 (k3 of Schulman's note, joschu.net/blog/kl-approx.html).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

KL = "kl_sampler_trainer"
LARGEST = 50.0
"""The most that d counts, so that its exponential is finite."""


def of_tokens(sampler: Sequence[float], trainer: Sequence[float]) -> list[float]:
    """The divergence of each token."""
    apart = (min(other - own, LARGEST) for own, other in zip(sampler, trainer, strict=True))
    return [math.expm1(d) - d for d in apart]


def of_answers(lines: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """The divergences of the tokens of each answer, in order; none if it is not known what who sampled gave them."""
    return [
        of_tokens(sampler, trainer)
        for line in lines
        for sampler, trainer in zip(line.get("logprobs", ()), line.get("trainer_logprobs", ()), strict=False)
    ]


def mean(answers: Sequence[Sequence[float]]) -> float:
    """The mean over all tokens."""
    return fmean(divergence for answer in answers for divergence in answer)


def metrics(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean over all tokens of a round, and over those from a depth of the answer on, up to four times it."""
    answers = of_answers(lines)
    if not answers:
        return {}
    depths = {f"{KL}_from_{depth}": values for depth, values in _by_depth(answers)}
    return {KL: mean(answers), **({name: fmean(values) for name, values in depths.items()} if len(depths) > 1 else {})}


def _by_depth(answers: Sequence[Sequence[float]]) -> Iterator[tuple[int, list[float]]]:
    start, end = 0, 4
    while values := [divergence for answer in answers for divergence in answer[start:end]]:
        yield start, values
        start, end = end, 4 * end
