"""What one process needs on its GPU: the states of its strategy, and what a micro-batch holds beside them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from cookbook.forecast.skeleton import Skeleton
from cookbook.forecast.states import States, Unit
from cookbook.forecast.trace import Pass, Stretch

GIB = 2**30

CONTEXT = round(0.9 * GIB)
"""CUDA's own memory in a process, outside torch's allocator: 0.47 to 0.92 GiB by GPU and driver (ml-engineering,
debug/pytorch.md, read 2026-08)."""

RESERVED_WHOLE = (1.01, 1.09)
"""Reserved over allocated memory where every process has whole weights: nanotron's published runs, 60,780 to 60,096 MiB
and 14,332 to 13,153."""
RESERVED_SHARDED = (1.07, 1.24)
"""The same where weights are gathered and freed: nanotron 9,170 to 8,570 MiB, answer.ai's FSDP with LoRA 10.24 to 8.28
GiB and 10.22 to 9.16."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the GPU of the process that needs most, at the moment when it needs most."""

    moment: str
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Weights of other processes that visit, gradient buckets, buffers of the engine."""
    activations: int
    """What the backward needs of the forward, copies of weights in low precision, and temporaries."""
    logits: int
    """Of head and loss alone: logits, their softmax and gradient, and that of the head's weight."""
    is_sharded: bool
    outside: tuple[int, int] = (CONTEXT, CONTEXT)
    """Beside torch's allocator, least and most; of a run with several processes see outside.py."""

    @property
    def allocated(self) -> int:
        """As torch.cuda.max_memory_allocated counts."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations + self.logits

    @property
    def reserved(self) -> tuple[int, int]:
        """As torch.cuda.max_memory_reserved counts, from the least to the most that was published for such runs."""
        low, high = RESERVED_SHARDED if self.is_sharded else RESERVED_WHOLE
        return round(self.allocated * low), round(self.allocated * high)

    @property
    def needed(self) -> tuple[int, int]:
        """Of the GPU: reserved, and what is outside."""
        low, high = self.reserved
        return low + self.outside[0], high + self.outside[1]

    def compared(self, allocated_gib: float, reserved_gib: float) -> str:
        """A run's peaks beside these; 0 reserved is not known."""
        low, high = (size / GIB for size in self.reserved)
        difference = allocated_gib * GIB / self.allocated - 1
        reserved = f"; {reserved_gib:.2f} GiB reserved, forecast {low:.1f} to {high:.1f}" if reserved_gib else ""
        return (
            f"peak GPU memory: {allocated_gib:.2f} GiB allocated, {difference:+.1%} against the forecast of"
            f" {self.allocated / GIB:.2f}{reserved}"
        )


def peak(
    skeleton: Skeleton, states: States, work: Pass, *, accumulates: bool, is_sharded: bool, loading: int = 0
) -> Memory:
    """The largest moment of a step, once the optimizer has its states, or of the start.

    Args:
        work: one micro-batch.
        accumulates: whether a step has several, so that gradients of earlier ones lie there during a forward.
        loading: bytes that the start takes, before weights are cut.
    """
    gpu = states.gpu
    done = _done_fractions(skeleton)

    def gradients(stretch: Stretch) -> int:
        if accumulates:
            return states.gradients_between
        return max(states.gradients_at_first, round(gpu.gradients * done(stretch)))

    moments = [_at(states, stretch, gradients(stretch), is_sharded) for stretch in work.stretches]
    if states.units:
        moments += [
            _reducing(states, stretch, following, gradients(stretch), is_sharded)
            for stretch, following in pairwise(work.stretches)
            if stretch.name == "backward"
        ]
    update = Memory(
        moment="the update",
        parameters=gpu.weights,
        gradients=gpu.gradients + states.update,
        optimizer=gpu.masters + gpu.moments,
        gathered=gpu.buffers,
        activations=0,
        logits=0,
        is_sharded=is_sharded,
    )
    start = Memory(
        moment="the start",
        parameters=loading,
        gradients=0,
        optimizer=0,
        gathered=0,
        activations=0,
        logits=0,
        is_sharded=is_sharded,
    )
    return max([*moments, update, start], key=lambda one: one.allocated)


def _at(states: States, stretch: Stretch, gradients: int, is_sharded: bool) -> Memory:
    gpu = states.gpu
    is_head = stretch.name in ("head", "head backward")
    where = {
        "embed": "the embedding",
        "forward": f"the forward of layer {stretch.layer}",
        "head": "the loss",
        "head backward": "the backward of the loss",
        "backward": f"the backward of layer {stretch.layer}",
        "end": "the embedding's backward",
    }
    return Memory(
        moment=where[stretch.name],
        parameters=gpu.weights,
        gradients=gradients,
        optimizer=gpu.masters + gpu.moments,
        gathered=gpu.buffers + _visiting(states, stretch),
        activations=stretch.held if is_head else stretch.peak,
        logits=stretch.peak - stretch.held if is_head else 0,
        is_sharded=is_sharded,
    )


def _reducing(states: States, stretch: Stretch, following: Stretch, gradients: int, is_sharded: bool) -> Memory:
    """The end of a layer's backward: its activations are gone, and its gradients go into the buffer."""
    layers = [unit for unit in states.units if unit.layer is not None]
    assert stretch.layer is not None
    unit = layers[stretch.layer]
    during = _at(states, stretch, gradients, is_sharded)
    return replace(
        during,
        moment=f"the reduction of layer {stretch.layer}'s gradients",
        gathered=during.gathered - _reduced(states, stretch) + unit.gradients + unit.gradients_made,
        activations=following.held,
    )


def _reduced(states: States, stretch: Stretch) -> int:
    """Bytes of the buffer that is being reduced in a stretch: of the layer whose backward came before."""
    layers = [unit for unit in states.units if unit.layer is not None]
    ends = [unit for unit in states.units if unit.layer is None]
    first = [unit for unit in ends if "embedding" in unit.parts]
    if stretch.name == "end":
        units = [*first, *layers[:1]]
    elif stretch.name == "backward":
        assert stretch.layer is not None
        units = layers[stretch.layer + 1 : stretch.layer + 2] or [unit for unit in ends if unit not in first]
    else:
        units = []
    return max((unit.gradients for unit in units), default=0)


def _visiting(states: States, stretch: Stretch) -> int:
    """Bytes of weights that are gathered, and of the buffer through which gradients pass, in a stretch.

    Each unit is gathered for its own forward and backward, while the next one is on its way. The gradients of a unit
    are reduced during the backward of the unit before it; those of the one with the embedding come last.
    """
    if not states.units:
        return states.gathered
    layers = [unit for unit in states.units if unit.layer is not None]
    ends = [unit for unit in states.units if unit.layer is None]
    first = [unit for unit in ends if "embedding" in unit.parts]
    begun = {"embed": first, "forward": first}.get(stretch.name, ends)
    near: list[Unit] = []
    if stretch.name == "embed":
        near = [*first, *layers[:1]]
    elif stretch.name == "end":
        near = first
    elif stretch.layer is not None:
        i = stretch.layer
        begun = begun + (layers[: i + 1] if stretch.name == "forward" else layers)
        near = layers[i : i + 2] if stretch.name == "forward" else layers[max(0, i - 1) : i + 1]
    else:
        begun = begun + layers
    stay = [unit for unit in begun if unit.stays]
    weights = sum(unit.weights for unit in stay) + sum(unit.weights for unit in near if not unit.stays)
    return weights + _reduced(states, stretch)


def _done_fractions(skeleton: Skeleton) -> Callable[[Stretch], float]:
    """From a stretch to the share of gradients that exist at its end, in a first micro-batch.

    The embedding's comes last, while it is made, and is in the trace.
    """
    trained = [weight for weight in skeleton.weights if weight.is_trained]
    whole = sum(weight.num_elements for weight in trained) or 1
    of_layer = [0] * skeleton.num_layers
    for weight in trained:
        if weight.layer is not None:
            of_layer[weight.layer] += weight.num_elements
    outside = sum(weight.num_elements for weight in trained if weight.part not in ("layer", "embedding"))

    def done(stretch: Stretch) -> float:
        if stretch.name == "end":
            return (outside + sum(of_layer)) / whole
        if stretch.name == "backward":
            assert stretch.layer is not None
            return (outside + sum(of_layer[stretch.layer :])) / whole
        return 0.0

    return done
