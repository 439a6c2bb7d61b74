"""Layers of each stage of a pipeline, and the order in which a stage computes micro-batches. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, count
from typing import Any

from cookbook.facts.score_head import backbone_of, head_of


def head_layers(head: int, layer: int) -> int:
    """The layers whose products of a token take as long as those of the head, from the elements of their weights."""
    # In full, although only labelled positions reach the head: their share is not known before the data.
    return round(head / layer)


def head_in_layers(model: Any) -> int:
    """`head_layers` of a transformers model; 0 if its layers or head are not found."""
    layers, head = getattr(backbone_of(model), "layers", None), head_of(model)
    if not layers or head is None:
        return 0
    return head_layers(head.weight.numel(), sum(parameter.numel() for parameter in layers[0].parameters()))


def stage_layers(num_layers: int, stage: int, num_stages: int, *, head_layers: int) -> range:
    """The layers of a stage: so that the slowest stage, which all others wait for, computes as little as can be, the
    head counted as `head_layers` of the last stage. Where one has a layer more than another, it is the later one, which
    keeps fewer micro-batches.
    """
    before = num_stages - 1
    if num_layers < num_stages or num_stages == 1:  # fewer layers than stages are refused
        return range(num_layers if stage == before else 0)

    # By computation alone. Memory would set an untied embedding against the head, and the micro-batches that wait in
    # the first stage against logits; `plan` shows the fullest stage, and more stages or sharding are the way out.
    def slowest(last: int) -> int:
        return max(math.ceil((num_layers - last) / before), last + head_layers)

    last = min(range(1, num_layers - before + 1), key=lambda last: (slowest(last), -last))
    starts = [(num_layers - last) * i // before for i in range(num_stages)]
    return range(starts[stage], num_layers if stage == before else starts[stage + 1])


def stage_chunks(num_layers: int, stage: int, num_stages: int, chunks: int = 1, *, head_layers: int) -> list[range]:
    """The ranges of layers of a stage, in the order of the layers: the layers are divided into `chunks` times as many
    ranges as stages, and a stage has every `num_stages`-th of them.
    """
    numbers = range(stage, num_stages * chunks, num_stages)
    return [stage_layers(num_layers, number, num_stages * chunks, head_layers=head_layers) for number in numbers]


def layers_of_stage(num_layers: int, stage: int, num_stages: int, chunks: int = 1, *, head_layers: int) -> list[int]:
    """The layers of all ranges of a stage."""
    return [*chain.from_iterable(stage_chunks(num_layers, stage, num_stages, chunks, head_layers=head_layers))]


def slowest_share(num_layers: int, num_stages: int, chunks: int = 1, *, head_layers: int) -> float:
    """The share of a token's products that the slowest stage computes, in [1 / stages, 1]."""
    if num_stages == 1:
        return 1.0
    stages = range(num_stages)
    counts = [len(layers_of_stage(num_layers, stage, num_stages, chunks, head_layers=head_layers)) for stage in stages]
    counts[-1] += head_layers
    return max(counts) / sum(counts)


def num_planned(num_micro_batches: int, num_stages: int, chunks: int = 1) -> int:
    """The number of micro-batches that the schedule is made for: at least `num_micro_batches`. A step leaves the turns
    of the others out. With several chunks a chunk runs a round of at least as many micro-batches as stages before the
    next chunk's turn, and torch has rounds of one size (2.13, pipelining/schedules.py, ScheduleInterleaved1F1B).
    """
    if chunks == 1:
        return num_micro_batches
    return next(planned for planned in count(num_micro_batches) if planned % max(1, planned // num_stages) == 0)


def num_turns(num_micro_batches: int, num_stages: int, chunks: int = 1) -> int:
    """The length of a step in turns of a stage, each a forward and a backward of a chunk, if all chunks take as long:
    its own, and its waiting at both ends of the step, and in each round that is shorter than the pipeline. An upper
    bound where `num_planned` is for more micro-batches.
    """
    rounds = max(num_planned(num_micro_batches, num_stages, chunks), num_stages)
    return (chunks - 1) * rounds + num_micro_batches + num_stages - 1


@cache
def pipeline_order(
    num_micro_batches: int, stage: int, num_stages: int, chunks: int = 1
) -> Sequence[tuple[bool, int, int]]:
    """The forwards and backwards of a stage in their order: true for a backward, the chunk, and the micro-batch. 1F1B,
    or with several chunks torch's interleaved 1F1B (pipelining/schedules.py, _get_1f1b_rank_ops); with one chunk and
    fewer micro-batches than stages GPipe (engine/pipeline.py chooses).
    """
    planned = num_planned(num_micro_batches, num_stages, chunks)
    per_round = planned if chunks == 1 else planned // max(1, planned // num_stages)
    passes = [
        (i // per_round % chunks, i // (per_round * chunks) * per_round + i % per_round)
        for i in range(planned * chunks)
    ]
    # Forwards before they alternate with backwards: one for each later stage; where chunks take turns two, and those
    # of a round for each chunk but the last.
    ahead = (1 if chunks == 1 else 2) * (num_stages - 1 - stage) + (chunks - 1) * per_round
    if chunks == 1 and planned < num_stages:
        ahead = planned
    forwards = [(False, chunk, i) for chunk, i in passes]
    backwards = [(True, chunks - 1 - chunk, i) for chunk, i in passes]
    in_turn = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    order = [*forwards[:ahead], *in_turn, *backwards[len(forwards[ahead:]) :]]
    return [(is_backward, chunk, i) for is_backward, chunk, i in order if i < num_micro_batches]


@dataclass(frozen=True, kw_only=True)
class StagePass:
    """A forward or backward of a stage, and what it has begun by then."""

    chunk: int
    counts: tuple[int, ...]
    """For each chunk, the micro-batches whose forward has begun and whose backward has not ended."""
    is_first: bool
    """True if no backward has ended yet."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """`counts` without the micro-batch that is computed now."""
        return tuple(number - (chunk == self.chunk) for chunk, number in enumerate(self.counts))


@cache
def stage_passes(num_micro_batches: int, stage: int, num_stages: int, chunks: int = 1) -> frozenset[StagePass]:
    """The distinct counts that a stage has at the forwards and backwards of a step, in no order. In the middle of a
    long step they repeat with each round, of which some are left out.
    """
    most = num_stages * (num_stages + 4 * chunks + 4)  # rounds of as many micro-batches as stages, from there on
    num_micro_batches -= max(0, num_micro_batches - most) // num_stages * num_stages
    moments, counts, is_first = set(), [0] * chunks, True
    for is_backward, chunk, _ in pipeline_order(num_micro_batches, stage, num_stages, chunks):
        counts[chunk] += not is_backward
        moments.add(StagePass(chunk=chunk, counts=tuple(counts), is_first=is_first))
        counts[chunk] -= is_backward
        is_first = is_first and not is_backward
    return frozenset(moments)


def in_flight(num_micro_batches: int, stage: int, num_stages: int, chunks: int = 1) -> int:
    """The most micro-batches that a stage has begun at a time; with several chunks a micro-batch counts in each."""
    return max(sum(moment.counts) for moment in stage_passes(num_micro_batches, stage, num_stages, chunks))
