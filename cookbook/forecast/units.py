"""Unsharded weights and gradients of FSDP units on a GPU, at each moment of a forward and backward. No torch.

FSDP2 gathers a unit into a buffer and copies its weights out of it (torch 2.13, distributed/fsdp/_fully_shard). In the
forward a buffer lives until the next unit has been copied out (_fsdp_param_group.py, wait_for_unshard, where a variable
holds it); in the backward the next unit is gathered at the same time (_backward_prefetch). Gradients are reduced from a
buffer that lives until the next unit's reduction (post_backward).

FSDP1 gathers into the flat parameter, of which the weights are views (distributed/fsdp/_runtime_utils.py, _unshard),
one unit ahead in the backward; its gradient buffer is freed by the reduction (_reduce_grad).

Under expert parallel a layer's experts are a unit inside the layer's, with their own gather and reduction. As the
unit before the layer's end they are gathered ahead at the beginning of its backward, and the rest of the layer before
at the beginning of theirs. Checkpointing computes them again after that, or before it where what follows the experts in
their layer needs it: then as a forward of its own, at whose end its buffer is freed (_fsdp_state.py, _post_forward).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from cookbook.forecast.activations import Phase
from cookbook.forecast.costs.states import States, Unit
from cookbook.forecast.costs.table import evaluate, read_table

TABLE = """
phase                moment                gathered, and buffers                                          gradients
embed                during                first + first_buffer                                           -
forward              start                 stay + buffer_before + layer + layer_sent                      -
forward              start                 stay + buffer_before + layer + layer_buffer                    -
forward              during                stay + layer + layer_buffer                                    -
experts forward      start                 stay + layer + layer_buffer + experts + experts_sent           -
experts forward      start                 stay + layer + layer_buffer + experts + experts_buffer         -
experts forward      during                stay + layer + experts + experts_buffer                        -
rest forward         during                stay + layer + experts_buffer                                  -
head                 start                 stay + buffer_before + tail + tail_sent                        -
head                 start                 stay + buffer_before + tail + tail_buffer                      -
head                 during                stay + tail + head_buffer                                      -
head backward        start                 stay + tail + ahead + ahead_sent                               -
head backward        during                stay + tail + ahead                                            -
head backward        reduction of tail     stay + ahead                                                   -
backward             start                 stay + layer + reduced_before + layer_copied                   later
backward             start                 stay + layer + reduced_before + ahead + ahead_sent             later
backward             during                stay + layer + reduced_before + ahead                          later
backward             reduction of layer    stay + ahead                                                   later
backward to experts  start                 stay + layer + reduced_before + layer_copied                   later
backward to experts  start                 stay + layer + reduced_before + experts + experts_sent         later
backward to experts  during                stay + layer + reduced_before + experts                        later
experts again        during                stay + layer + reduced_before + experts + experts_buffer       later
backward once more   during                stay + layer + reduced_before + experts                        later
experts backward     start                 stay + layer + reduced_before + experts + experts_copied       later
experts backward     start                 stay + layer + reduced_before + experts + ahead + ahead_sent   later
experts backward     during                stay + layer + reduced_before + experts + ahead                later
experts backward     reduction of experts  stay + layer + ahead                                           later
rest backward        during                stay + layer + experts_reduced + ahead                         later + own
rest backward        reduction of layer    stay + ahead                                                   later + own
end                  during                first + reduced_before                                         later
end                  reduction of first    -                                                              later
"""
"""Bytes of unsharded weights and buffers at each moment of a phase, and of gradients that are sharded by then.

A phase starts with a gather into a buffer, from which the weights are copied; it ends with a reduction, see `_reduced`.

- `first`, `layer`, `experts`, `tail`: gathered weights of what comes before the layers, of the layer but for its
  experts, of these, and of norm and head. `stay`: those before the layer that stay gathered. `ahead`: those that a
  backward gathers for the next one.
- `_sent`, `_buffer`: what a shard is cast into, and what is gathered into. `_copied`: the buffer, if the weights were
  freed after the forward. `_reduced`: whole gradients in the buffer that they are reduced from.
- `later`, `own`: shards of the gradients of later layers, and of the layer's own experts.
"""
ROWS = {phase: [*rows] for phase, rows in groupby(read_table(TABLE)[1], key=itemgetter(0))}
UNITS = {"first": "the embedding", "layer": "layer {}", "experts": "the experts of layer {}", "tail": "norm and head"}
"""Units in the table, by their names for people."""


class Moment(NamedTuple):
    """Memory at one moment, in bytes, beyond the state that a process holds between steps."""

    what: str | None
    """Name of the moment, if not that of the phase."""
    phase: Phase
    activations: int
    gathered: int
    """Unsharded weights and gradients, and their buffers."""
    reduced: int
    """Sharded gradients that exist by then in the first micro-batch of a step."""


class _TableMoment(NamedTuple):
    """A moment as far as no trace changes it."""

    what: str | None
    when: str
    """`start` or `during` the phase; another word: at its end."""
    gathered: int
    reduced: int


def moments(states: States, phases: Sequence[Phase]) -> Iterator[Moment]:
    """All moments that can be the peak."""
    order = tuple((phase.name, phase.layer) for phase in phases)
    of_phases = _of_phases(states.units, states.is_flat, order)
    for (phase, following), of_table in zip(pairwise((*phases, None)), of_phases, strict=True):
        assert phase is not None
        ends = {"start": phase.held, "during": phase.peak + phase.making}
        after = 0 if following is None else following.held
        for what, when, gathered, reduced in of_table:
            yield Moment(what, phase, ends.get(when, after), gathered, reduced)


@lru_cache(maxsize=256)
def _of_phases(
    units: tuple[Unit, ...], is_flat: bool, order: tuple[tuple[str, int | None], ...]
) -> list[list[_TableMoment]]:
    """The moments of each phase, which are the same for each size of a micro-batch.

    Args:
        order: name and layer of the phases.
    """
    is_divided = any(name == "experts forward" for name, _ in order)
    divided = _Units(units if is_divided else tuple(_join(units)), is_flat=is_flat)
    return [list(divided.of_phase(name, layer)) for name, layer in order]


def _join(units: Sequence[Unit]) -> Iterator[Unit]:
    """Experts counted with the rest of their layer: an upper bound, for phases of whole layers."""
    experts = {unit.layer: unit for unit in units if unit.is_experts}
    for unit in units:
        if unit.is_experts:
            continue
        own = experts.get(unit.layer)
        if own is not None:
            sizes = ("weights", "gradients", "gradients_made", "gradients_left", "sent")
            unit = replace(unit, **{name: getattr(unit, name) + getattr(own, name) for name in sizes})
        yield unit


class _Units:
    def __init__(self, units: Sequence[Unit], *, is_flat: bool) -> None:
        self.is_flat = is_flat
        self.layers = [unit for unit in units if unit.layer is not None and not unit.is_experts]
        self.experts = {unit.layer: unit for unit in units if unit.is_experts}
        self.computed_again: set[int | None] = set()
        """Layers whose experts were computed again for their backward."""
        ends = [unit for unit in units if unit.layer is None]
        # A unit of norm and head comes after the layers in the forward, and before them in the backward.
        self.tail = [unit for unit in ends if not {"embedding", "rest"} & set(unit.parts)]
        self.first = [unit for unit in ends if unit not in self.tail]

    def of_phase(self, phase: str, layer: int | None) -> Iterator[_TableMoment]:
        name = phase
        if name == "experts again":
            self.computed_again.add(layer)
        if name == "backward" and layer in self.experts:
            name = "backward once more" if layer in self.computed_again else "backward to experts"
        units, amounts = self._around(phase, layer)
        for _, when, gathered, gradients in ROWS[name]:
            what: str | None = None
            made = 0
            if unit := when.partition("reduction of ")[2]:
                if not units[unit]:
                    continue
                what = f"the reduction of {UNITS[unit].format(layer)}'s gradients"
                made = self._made_by_reduction(units[unit])
            yield _TableMoment(what, when, evaluate(gathered, amounts) + made, evaluate(gradients, amounts))

    def _around(self, phase: str, layer: int | None) -> tuple[dict[str, list[Unit]], dict[str, int]]:
        """Units that `TABLE` names and its amounts, at a phase."""
        count = len(self.layers)
        i = {"embed": 0, "head": count, "head backward": count, "end": -1}.get(phase, layer or 0)
        before, after = self.layers[: max(i, 0)], self.layers[i + 1 :]
        units = {
            "first": self.first,
            "layer": self.layers[i : i + 1],
            "experts": [self.experts[i]] if i in self.experts else [],
            "tail": self.tail,
            # FSDP1's first unit is the root, which stays gathered.
            "ahead": [unit for unit in before[-1:] or self.first[:1] if not unit.stays],
        }
        amounts = {}
        for name, group in units.items():
            amounts[name] = _total(group, "weights")
            amounts[f"{name}_sent"] = _total(group, "sent")
            amounts[f"{name}_buffer"] = self._buffer(group)
        amounts |= {
            "stay": _total([unit for unit in [*self.first, *before] if unit.stays], "weights"),
            "buffer_before": self._buffer([*self.first, *self._with_experts(before[-1:])]),
            "layer_copied": self._buffer([unit for unit in units["layer"] if not unit.stays]),
            "experts_copied": 0 if layer in self.computed_again else amounts["experts_buffer"],
            "experts_reduced": self._reduction_buffer(units["experts"]),
            "reduced_before": self._reduction_buffer(after[:1] or self.tail),
            "later": _total([*self.tail, *self._with_experts(after)], "gradients_left"),
            "own": _total(units["experts"], "gradients_left"),
        }
        amounts["head_buffer"] = amounts["tail_buffer"] or amounts["buffer_before"]
        return units, amounts

    def _with_experts(self, layers: Sequence[Unit]) -> list[Unit]:
        """Layers with their experts, in the order in which they are gathered."""
        pairs = ((layer, self.experts.get(layer.layer)) for layer in layers)
        return [unit for pair in pairs for unit in pair if unit is not None]

    def _buffer(self, units: Sequence[Unit]) -> int:
        """The gather buffer of the last unit, after its weights have been copied out."""
        return 0 if self.is_flat or not units else units[-1].weights

    def _reduction_buffer(self, units: Sequence[Unit]) -> int:
        """The buffer of the last reduction of gradients."""
        return 0 if self.is_flat else max((unit.gradients for unit in units), default=0)

    def _made_by_reduction(self, units: Sequence[Unit]) -> int:
        """Peak while a unit's gradients are copied to a new buffer and reduced; the previous buffer was freed. FSDP1
        keeps the low-precision gradients until the reduction is done, FSDP2 the last of them.
        """
        made, buffer = _total(units, "gradients_made"), max(unit.gradients for unit in units)
        if self.is_flat:
            return made + buffer + _total(units, "gradients_left")
        return max(made + buffer, *(unit.gradients_kept + unit.gradients_left + unit.gradients for unit in units))


def _total(units: Sequence[Unit], size: str) -> int:
    return sum(getattr(unit, size) for unit in units)
