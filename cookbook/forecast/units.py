"""Unsharded weights and gradients of FSDP units on a GPU, at each moment of a forward and backward. No torch.

FSDP2 gathers a unit into a buffer and copies its weights out of it (torch 2.13, distributed/fsdp/_fully_shard). In the
forward a buffer lives until the next unit has been copied out (_fsdp_param_group.py, wait_for_unshard, where a variable
holds it); in the backward the next unit is gathered at the same time (_backward_prefetch). Gradients are reduced from a
buffer that lives until the next unit's reduction (post_backward).

FSDP1 gathers into the flat parameter, of which the weights are views (distributed/fsdp/_runtime_utils.py), one unit
ahead in the backward; its gradient buffer is freed by the reduction (_reduce_grad).

Under expert parallel a layer's experts are a unit inside the layer's, with their own gather and reduction. As the
unit before the layer's end they are gathered ahead at the beginning of its backward, and the rest of the layer before
at the beginning of theirs. Checkpointing computes them again after that, or before it where what follows the experts in
their layer needs it: then as a forward of its own, at whose end its buffer is freed (_fsdp_state.py, _post_forward).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cookbook.forecast.activations import Phase
from cookbook.forecast.costs.states import States, Unit


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Memory at one moment, in bytes, beyond the state that a process holds between steps."""

    what: str | None
    """Name of the moment, if not that of the phase."""
    phase: Phase
    activations: int
    gathered: int
    """Unsharded weights and gradients, and their buffers."""
    reduced: int
    """Sharded gradients that exist by then in the first micro-batch of a step."""


def moments(states: States, phases: Sequence[Phase]) -> Iterator[Moment]:
    """All moments that can be the peak."""
    is_divided = any(phase.name == "experts forward" for phase in phases)
    units = _Units(states if is_divided else replace(states, units=tuple(_joined(states.units))))
    for phase, following in pairwise((*phases, None)):
        assert phase is not None
        yield from units.of_phase(phase, 0 if following is None else following.held)


def _joined(units: Sequence[Unit]) -> Iterator[Unit]:
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
    def __init__(self, states: States) -> None:
        self.is_flat = states.is_flat
        self.layers = [unit for unit in states.units if unit.layer is not None and not unit.is_experts]
        self.experts = {unit.layer: unit for unit in states.units if unit.is_experts}
        self.is_recomputed = False
        """True: the experts whose backward comes next were computed again."""
        ends = [unit for unit in states.units if unit.layer is None]
        # A unit of norm and head comes after the layers in the forward, and before them in the backward.
        self.tail = [unit for unit in ends if not {"embedding", "rest"} & set(unit.parts)]
        self.first = [unit for unit in ends if unit not in self.tail]

    def of_phase(self, phase: Phase, held_after: int) -> Iterator[Moment]:
        moments = {
            "embed": self._embed,
            "forward": self._forward,
            "experts forward": self._experts_forward,
            "rest forward": self._rest_forward,
            "head": self._head,
            "head backward": self._head_backward,
            "backward": self._backward_to_experts if phase.layer in self.experts else self._backward,
            "experts again": self._experts_again,
            "experts backward": self._experts_backward,
            "rest backward": self._rest_backward,
            "end": self._end,
        }[phase.name]
        yield from moments(phase, held_after)

    def _embed(self, phase: Phase, _: int) -> Iterator[Moment]:
        yield self._during(phase, _weights_of(self.first) + self._buffer(self.first))

    def _forward(self, phase: Phase, _: int) -> Iterator[Moment]:
        i = _layer_index(phase)
        stay, unit = _weights_of(_staying([*self.first, *self.layers[:i]])), self.layers[i]
        before = self._buffer([*self.first, *self._of_layers(self.layers[:i])])
        yield self._entry(phase, stay + before + self._gathering(unit))
        yield self._during(phase, stay + unit.weights + self._buffer([unit]))

    def _experts_forward(self, phase: Phase, _: int) -> Iterator[Moment]:
        _, unit, rest, stay = self._parts(phase)
        yield self._entry(phase, stay + rest.weights + self._buffer([rest]) + self._gathering(unit))
        yield self._during(phase, stay + rest.weights + unit.weights + self._buffer([unit]))

    def _rest_forward(self, phase: Phase, _: int) -> Iterator[Moment]:
        _, unit, rest, stay = self._parts(phase)
        yield self._during(phase, stay + rest.weights + self._buffer([unit]))

    def _parts(self, phase: Phase) -> tuple[int, Unit, Unit, int]:
        """A layer's number, its experts, the rest of it, and the bytes of the units before it that stay gathered."""
        i = _layer_index(phase)
        return i, self.experts[i], self.layers[i], _weights_of(_staying([*self.first, *self.layers[:i]]))

    def _of_layers(self, layers: Sequence[Unit]) -> list[Unit]:
        """Layers with their experts, in the order in which they are gathered."""
        pairs = ((layer, self.experts.get(layer.layer)) for layer in layers)
        return [unit for pair in pairs for unit in pair if unit is not None]

    def _head(self, phase: Phase, _: int) -> Iterator[Moment]:
        stay, before = _weights_of(_staying([*self.first, *self.layers])), self._buffer(self._of_layers(self.layers))
        for unit in self.tail:
            yield self._entry(phase, stay + before + self._gathering(unit))
        yield self._during(phase, stay + _weights_of(self.tail) + (self._buffer(self.tail) or before))

    def _head_backward(self, phase: Phase, held_after: int) -> Iterator[Moment]:
        stay = _weights_of(_staying([*self.first, *self.layers]))
        coming, sent = self._coming(len(self.layers))
        yield self._entry(phase, stay + _weights_of(self.tail) + coming + sent)
        yield self._during(phase, stay + _weights_of(self.tail) + coming)
        if self.tail:
            yield self._reduction("norm and head", phase, held_after, stay + coming, self.tail)

    def _backward(self, phase: Phase, held_after: int) -> Iterator[Moment]:
        i = _layer_index(phase)
        unit, done = self.layers[i], self._done(i)
        stay = _weights_of(_staying([*self.first, *self.layers[:i]]))
        coming, sent = self._coming(i)
        buffer = self._reduced_before(i)
        copied = 0 if unit.stays else self._buffer([unit])
        own = stay + unit.weights + buffer
        yield self._entry(phase, own + max(copied, coming + sent), done)
        yield self._during(phase, own + coming, done)
        yield self._reduction(f"layer {i}", phase, held_after, stay + coming, [unit], done)

    def _reduced_before(self, i: int) -> int:
        """The buffer of the reduction before the backward of layer i."""
        return self._reduced(self.layers[i + 1 : i + 2] or self.tail)

    def _done(self, i: int) -> list[Unit]:
        """Units whose gradients are reduced before the backward of layer i."""
        return [*self.tail, *self._of_layers(self.layers[i + 1 :])]

    def _backward_to_experts(self, phase: Phase, _: int) -> Iterator[Moment]:
        """From the end of a layer to its experts; where these are computed again, once before that and once after."""
        i, unit, rest, stay = self._parts(phase)
        done, own = self._done(i), stay + rest.weights + self._reduced_before(i)
        if self.is_recomputed:
            yield self._during(phase, own + unit.weights, done)
            return
        copied = 0 if rest.stays else self._buffer([rest])
        yield self._entry(phase, own + max(copied, unit.weights + unit.sent), done)
        yield self._during(phase, own + unit.weights, done)

    def _experts_again(self, phase: Phase, _: int) -> Iterator[Moment]:
        i, unit, rest, stay = self._parts(phase)
        self.is_recomputed = True
        own = stay + rest.weights + unit.weights + self._reduced_before(i)
        yield self._during(phase, own + self._buffer([unit]), self._done(i))

    def _experts_backward(self, phase: Phase, held_after: int) -> Iterator[Moment]:
        i, unit, rest, stay = self._parts(phase)
        coming, sent = self._coming(i)
        buffer, done = self._reduced_before(i), self._done(i)
        copied = 0 if self.is_recomputed else self._buffer([unit])
        self.is_recomputed = False
        own = stay + rest.weights + unit.weights + buffer
        yield self._entry(phase, own + max(copied, coming + sent), done)
        yield self._during(phase, own + coming, done)
        gathered = stay + rest.weights + coming
        yield self._reduction(f"the experts of layer {i}", phase, held_after, gathered, [unit], done)

    def _rest_backward(self, phase: Phase, held_after: int) -> Iterator[Moment]:
        i, unit, rest, stay = self._parts(phase)
        coming, _ = self._coming(i)
        done = [*self._done(i), unit]
        yield self._during(phase, stay + rest.weights + self._reduced([unit]) + coming, done)
        yield self._reduction(f"layer {i}", phase, held_after, stay + coming, [rest], done)

    def _end(self, phase: Phase, held_after: int) -> Iterator[Moment]:
        done = self._done(-1)
        yield self._during(phase, _weights_of(self.first) + self._reduced(self.layers[:1]), done)
        yield self._reduction("the embedding", phase, held_after, 0, self.first, done)

    def _coming(self, i: int) -> tuple[int, int]:
        """Bytes of the unit that is prefetched during the backward of layer i, and of its send buffer."""
        # FSDP1's first unit is the root, which stays gathered.
        units = [unit for unit in (self.layers[i - 1 : i] if i else self.first[:1]) if not unit.stays]
        return _weights_of(units), sum(unit.sent for unit in units)

    def _gathering(self, unit: Unit) -> int:
        """Peak while a unit is gathered for its forward: send and gather buffers, then gather buffer and weights."""
        return unit.weights + max(unit.sent, self._buffer([unit]))

    def _buffer(self, units: Sequence[Unit]) -> int:
        """The gather buffer of the last unit, after its weights have been copied out."""
        return 0 if self.is_flat or not units else units[-1].weights

    def _reduced(self, units: Sequence[Unit]) -> int:
        """The buffer of the last reduction of gradients."""
        return 0 if self.is_flat else max((unit.gradients for unit in units), default=0)

    def _entry(self, phase: Phase, gathered: int, done: Sequence[Unit] = ()) -> Moment:
        """The beginning of a phase, while its weights are gathered."""
        return Moment(what=None, phase=phase, activations=phase.held, gathered=gathered, reduced=_shard_grads(done))

    def _during(self, phase: Phase, gathered: int, done: Sequence[Unit] = ()) -> Moment:
        """The peak of a phase, with the gradients of its weights, which are reduced at its end."""
        activations = phase.peak + phase.making
        return Moment(what=None, phase=phase, activations=activations, gathered=gathered, reduced=_shard_grads(done))

    def _reduction(
        self,
        of: str,
        phase: Phase,
        held_after: int,
        gathered: int,
        units: Sequence[Unit],
        done: Sequence[Unit] = (),
    ) -> Moment:
        """The end of a phase: the unit's weights and activations are freed, and its gradients copied to a new buffer.

        The previous buffer is freed first. FSDP1 keeps the low-precision gradients until the reduction is done, FSDP2
        the last of them.
        """
        made = sum(unit.gradients_made for unit in units)
        if self.is_flat:
            gathered += made + max(unit.gradients for unit in units) + _shard_grads(units)
        else:
            left = max(unit.gradients_kept + unit.gradients_left + unit.gradients for unit in units)
            gathered += max(made + max(unit.gradients for unit in units), left)
        return Moment(
            what=f"the reduction of {of}'s gradients",
            phase=phase,
            activations=held_after,
            gathered=gathered,
            reduced=_shard_grads(done),
        )


def _layer_index(phase: Phase) -> int:
    assert phase.layer is not None
    return phase.layer


def _weights_of(units: Sequence[Unit]) -> int:
    return sum(unit.weights for unit in units)


def _staying(units: Sequence[Unit]) -> list[Unit]:
    return [unit for unit in units if unit.stays]


def _shard_grads(units: Sequence[Unit]) -> int:
    return sum(unit.gradients_left for unit in units)
