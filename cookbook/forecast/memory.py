"""What one process needs on its GPU: the states of its strategy, and what a micro-batch holds beside them."""

from collections.abc import Callable
from dataclasses import dataclass

from cookbook.costs.inputs import Skeleton
from cookbook.costs.memory import States
from cookbook.forecast import units
from cookbook.forecast.trace import ActivationTrace, Phase

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
    skeleton: Skeleton, states: States, work: ActivationTrace, *, accumulates: bool, is_sharded: bool, loading: int = 0
) -> Memory:
    """The largest moment of a step, once the optimizer has its states, or of the start.

    Args:
        work: one micro-batch.
        accumulates: whether a step has several, so that gradients of earlier ones lie there during a forward.
        loading: bytes that the start takes, before weights are cut.
    """
    gpu = states.gpu
    if states.units:
        moments = [_of_units(states, one, accumulates, is_sharded) for one in units.moments(states, work.phases)]
    else:
        done = _done_fractions(skeleton)
        moments = [_at(states, phase, *done(phase), accumulates, is_sharded) for phase in work.phases]
        moments.append(_last_reduction(states, accumulates, is_sharded))
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


def _at(states: States, phase: Phase, begun: float, done: float, accumulates: bool, is_sharded: bool) -> Memory:
    """A phase of a strategy that keeps weights as they are, or gathers them in an order of its own.

    Args:
        begun: the share of the gradients that earlier phases made.
        done: with those that this one makes.
    """
    gpu = states.gpu
    there = states.gradients_between if accumulates else states.gradients_at_first
    gathered, making, reduced = gpu.buffers + states.gathered_weights, phase.making, begun
    is_backward = phase.name in ("head backward", "backward", "end")
    if not is_backward or states.is_sent_again:
        gathered += states.sent
    if states.bucket:  # gradients go there as they are made, and become this process's share when it is full
        full = states.bucket / max(1, states.whole_gradients)
        making, reduced = 0, begun // full * full
        gathered += states.gradient_buckets * (is_backward and done > 0)
        gathered += states.reduction * (begun // full < done // full)
    made = max(0, round(gpu.gradients * reduced) - there)
    is_head = phase.name in ("head", "head backward")
    # A gradient that is there already takes what is added to it.
    activations = phase.peak + (0 if there else making)
    return Memory(
        moment=_name(phase),
        parameters=gpu.weights,
        gradients=there + made,
        optimizer=gpu.masters + gpu.moments,
        gathered=gathered,
        activations=phase.held if is_head else activations,
        logits=activations - phase.held if is_head else 0,
        is_sharded=is_sharded,
    )


def _last_reduction(states: States, accumulates: bool, is_sharded: bool) -> Memory:
    """The end of a backward, when what is left in the bucket is reduced (ZeRO)."""
    gpu = states.gpu
    return Memory(
        moment="the last reduction of gradients",
        parameters=gpu.weights,
        gradients=states.gradients_before if accumulates else states.gradients_at_first,
        optimizer=gpu.masters + gpu.moments,
        gathered=gpu.buffers
        + states.gathered_weights
        + states.gradient_buckets
        + max(states.reduction, states.gradients_added),
        activations=0,
        logits=0,
        is_sharded=is_sharded,
    )


def _of_units(states: States, moment: units.Moment, accumulates: bool, is_sharded: bool) -> Memory:
    gpu, phase = states.gpu, moment.phase
    reduced = min(moment.reduced, gpu.gradients)  # on the host where that holds them
    is_head = moment.what is None and phase.name in ("head", "head backward")
    return Memory(
        moment=moment.what or _name(phase),
        parameters=gpu.weights,
        gradients=states.gradients_between if accumulates else reduced,
        optimizer=gpu.masters + gpu.moments,
        gathered=gpu.buffers + moment.gathered,
        activations=phase.held if is_head else moment.activations,
        logits=max(0, moment.activations - phase.held) if is_head else 0,
        is_sharded=is_sharded,
    )


def _name(phase: Phase) -> str:
    return {
        "embed": "the embedding",
        "forward": f"the forward of layer {phase.layer}",
        "head": "the loss",
        "head backward": "the backward of the loss",
        "backward": f"the backward of layer {phase.layer}",
        "end": "the embedding's backward",
    }[phase.name]


def _done_fractions(skeleton: Skeleton) -> Callable[[Phase], tuple[float, float]]:
    """From a phase to the shares of gradients that exist at its beginning and at its end, in a first micro-batch.

    The embedding's comes last, while it is made, and is in the trace.
    """
    trained = [weight for weight in skeleton.weights if weight.is_trained]
    whole = sum(weight.num_elements for weight in trained) or 1
    of_layer = [0] * skeleton.num_layers
    for weight in trained:
        if weight.layer is not None:
            of_layer[weight.layer] += weight.num_elements
    outside = sum(weight.num_elements for weight in trained if weight.part not in ("layer", "embedding"))

    def done(phase: Phase) -> tuple[float, float]:
        match phase.name:
            case "head backward":
                return 0.0, outside / whole
            case "backward":
                assert phase.layer is not None
                after = outside + sum(of_layer[phase.layer + 1 :])
                return after / whole, (after + of_layer[phase.layer]) / whole
            case "end":
                return (outside + sum(of_layer)) / whole, 1.0
        return 0.0, 0.0

    return done
