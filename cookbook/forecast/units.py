"""Which weights and gradients of FSDP's units lie whole on a GPU at which moment of a forward and backward. No torch.

FSDP2 gathers a unit into a buffer and copies its weights out of it (torch 2.13, distributed/fsdp/_fully_shard). In a
forward the buffer stays until the next unit has been copied out of its own (_fsdp_param_group.py, wait_for_unshard,
whose variable holds it for so long); in a backward the buffer of the unit that comes next is filled meanwhile
(_backward_prefetch). A unit's gradients are reduced out of a buffer that stays until the next unit's are reduced
(post_backward).

FSDP1 gathers into the flat parameter whose parts are the weights (distributed/fsdp/_runtime_utils.py), in a backward
one unit ahead, and its buffer of gradients is gone with the reduction (_reduce_grad).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cookbook.costs.memory import States, Unit
from cookbook.forecast.trace import Phase


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is there beside what the process holds between steps, in bytes."""

    what: str | None
    """None: the phase says it."""
    phase: Phase
    activations: int
    gathered: int
    """Whole weights and gradients, and buffers of either."""
    reduced: int
    """Gradients of this process's share that exist in a first micro-batch."""


def moments(states: States, phases: Sequence[Phase]) -> Iterator[Moment]:
    """Every moment that can be the largest."""
    units = _Units(states)
    for phase, following in pairwise((*phases, None)):
        assert phase is not None
        yield from units.of_phase(phase, 0 if following is None else following.held)


class _Units:
    def __init__(self, states: States) -> None:
        self.is_flat = states.is_flat
        self.layers = [unit for unit in states.units if unit.layer is not None]
        ends = [unit for unit in states.units if unit.layer is None]
        # Norm and head, where they are a unit, come after the layers, and their gradients first.
        self.tail = [unit for unit in ends if not {"embedding", "rest"} & set(unit.parts)]
        self.first = [unit for unit in ends if unit not in self.tail]

    def of_phase(self, phase: Phase, held_after: int) -> Iterator[Moment]:
        match phase.name:
            case "embed":
                yield self._during(phase, _whole(self.first) + self._buffer(self.first))
            case "forward":
                yield from self._forward(phase)
            case "head":
                yield from self._head(phase)
            case "head backward":
                yield from self._head_backward(phase, held_after)
            case "backward":
                yield from self._backward(phase, held_after)
            case "end":
                yield from self._end(phase, held_after)

    def _forward(self, phase: Phase) -> Iterator[Moment]:
        i = _number(phase)
        stay, unit = _whole(_staying([*self.first, *self.layers[:i]])), self.layers[i]
        before = self._buffer(self.layers[i - 1 : i] or self.first)
        yield self._entry(phase, stay + before + self._gathering(unit))
        yield self._during(phase, stay + unit.weights + self._buffer([unit]))

    def _head(self, phase: Phase) -> Iterator[Moment]:
        stay, before = _whole(_staying([*self.first, *self.layers])), self._buffer(self.layers)
        for unit in self.tail:
            yield self._entry(phase, stay + before + self._gathering(unit))
        yield self._during(phase, stay + _whole(self.tail) + (self._buffer(self.tail) or before))

    def _head_backward(self, phase: Phase, held_after: int) -> Iterator[Moment]:
        stay = _whole(_staying([*self.first, *self.layers]))
        coming, sent = self._coming(len(self.layers))
        yield self._entry(phase, stay + _whole(self.tail) + coming + sent)
        yield self._during(phase, stay + _whole(self.tail) + coming)
        if self.tail:
            yield self._reduction("norm and head", phase, held_after, stay + coming, self.tail)

    def _backward(self, phase: Phase, held_after: int) -> Iterator[Moment]:
        i = _number(phase)
        unit, done = self.layers[i], [*self.tail, *self.layers[i + 1 :]]
        stay = _whole(_staying([*self.first, *self.layers[:i]]))
        coming, sent = self._coming(i)
        buffer = self._reduced(self.layers[i + 1 : i + 2] or self.tail)
        copied = 0 if unit.stays else self._buffer([unit])
        own = stay + unit.weights + buffer
        yield self._entry(phase, own + max(copied, coming + sent), done)
        yield self._during(phase, own + coming, done)
        yield self._reduction(f"layer {i}", phase, held_after, stay + coming, [unit], done)

    def _end(self, phase: Phase, held_after: int) -> Iterator[Moment]:
        done = [*self.tail, *self.layers]
        yield self._during(phase, _whole(self.first) + self._reduced(self.layers[:1]), done)
        yield self._reduction("the embedding", phase, held_after, 0, self.first, done)

    def _coming(self, i: int) -> tuple[int, int]:
        """What is gathered ahead in the backward that follows layer i's, and what is sent for it."""
        # FSDP1's first unit is the root, which stays.
        units = [unit for unit in (self.layers[i - 1 : i] if i else self.first[:1]) if not unit.stays]
        return _whole(units), sum(unit.sent for unit in units)

    def _gathering(self, unit: Unit) -> int:
        """The most while a unit is gathered for its forward: what is sent and the buffer, then this and its weights."""
        return unit.weights + max(unit.sent, self._buffer([unit]))

    def _buffer(self, units: Sequence[Unit]) -> int:
        """Of the last one, while its weights lie there already."""
        return 0 if self.is_flat or not units else units[-1].weights

    def _reduced(self, units: Sequence[Unit]) -> int:
        """The buffer out of which gradients were reduced."""
        return 0 if self.is_flat else max((unit.gradients for unit in units), default=0)

    def _entry(self, phase: Phase, gathered: int, done: Sequence[Unit] = ()) -> Moment:
        """The beginning of a phase, when its weights are gathered."""
        return Moment(what=None, phase=phase, activations=phase.held, gathered=gathered, reduced=_shares(done))

    def _during(self, phase: Phase, gathered: int, done: Sequence[Unit] = ()) -> Moment:
        """Gradients of its weights add up, until they are reduced at its end."""
        activations = phase.peak + phase.making
        return Moment(what=None, phase=phase, activations=activations, gathered=gathered, reduced=_shares(done))

    def _reduction(
        self,
        of: str,
        phase: Phase,
        held_after: int,
        gathered: int,
        units: Sequence[Unit],
        done: Sequence[Unit] = (),
    ) -> Moment:
        """The end of a phase: weights and activations of the unit are gone, and its gradients go into the buffer.

        Before that the last buffer is let go. FSDP1 keeps the gradients of low precision until the share is there.
        """
        gathered += sum(unit.gradients_made for unit in units) + max(unit.gradients for unit in units)
        if self.is_flat:
            gathered += _shares(units)
        return Moment(
            what=f"the reduction of {of}'s gradients",
            phase=phase,
            activations=held_after,
            gathered=gathered,
            reduced=_shares(done),
        )


def _number(phase: Phase) -> int:
    assert phase.layer is not None
    return phase.layer


def _whole(units: Sequence[Unit]) -> int:
    return sum(unit.weights for unit in units)


def _staying(units: Sequence[Unit]) -> list[Unit]:
    return [unit for unit in units if unit.stays]


def _shares(units: Sequence[Unit]) -> int:
    return sum(unit.gradients_left for unit in units)
