"""Peak GPU memory of one process: the states of its strategy plus the activations of a micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from cookbook.forecast import units
from cookbook.forecast.activations import ActivationTrace, Phase
from cookbook.forecast.costs.inputs import Skeleton
from cookbook.forecast.costs.states import States
from cookbook.system.hardware import GIB

CONTEXT = round(0.9 * GIB)
"""CUDA's own memory in a process, outside torch's allocator: 0.47 to 0.92 GiB by GPU and driver (ml-engineering,
debug/pytorch.md, read 2026-08)."""

# Measured without expandable segments, which train.py sets by default and which leave less in fragments.
RESERVED_LEAST = {"whole": 1.01, "sharded": 1.07}
"""Reserved over allocated memory at least, by whether weights are gathered and freed: nanotron's published runs, 60,780
to 60,096 MiB and 9,170 to 8,570."""
RESERVED_MOST = 1.09
"""Reserved over allocated memory at most, but for holes: nanotron, 14,332 to 13,153 MiB."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the GPU of the process that needs most, at the moment of its peak."""

    moment: str
    parameters: int
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    """Temporarily gathered weights, gradient buckets, buffers of the engine, cuBLAS's workspaces."""
    activations: int = 0
    """Activations, copies of weights in low precision, and temporaries."""
    logits: int = 0
    """Head and loss: logits, their log-probabilities or gradient, and the gradient of the head's weight."""
    is_sharded: bool
    holes: int = 0
    """Most that large blocks leave unused at the peak: the allocator keeps what is freed and cuts smaller tensors out
    of it, and then needs a new block for the large one. Head and loss, at their most: on an H100 up to that was
    reserved beyond `RESERVED_MOST` (docs/on_gpu.md); and weights that are gathered and freed
    (docs/plan_accuracy.md)."""
    outside: tuple[int, int] = (CONTEXT, CONTEXT)
    """Memory outside torch's allocator, least and most; see outside.py for several processes."""
    stages: tuple["Stage", ...] = ()
    """Stages of a pipeline, if this is the one of them that allocates most."""

    @property
    def allocated(self) -> int:
        """Bytes that torch.cuda.max_memory_allocated reports."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations + self.logits

    @property
    def parts(self) -> dict[str, int]:
        """The parts that add up to `allocated`, by their names for people."""
        return {
            "weights": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "gathered and buffers": self.gathered,
            "activations": self.activations,
            "logits": self.logits,
        }

    @property
    def reserved(self) -> tuple[int, int]:
        """Bytes that torch.cuda.max_memory_reserved reports, least and most by published and own runs."""
        if self.stages:
            of_each = [stage.memory.reserved for stage in self.stages]
            return max(low for low, _ in of_each), max(high for _, high in of_each)
        least = RESERVED_LEAST["sharded" if self.is_sharded else "whole"]
        return round(self.allocated * least), round(self.allocated * RESERVED_MOST) + self.holes

    @property
    def needed(self) -> tuple[int, int]:
        """Memory of the GPU: reserved plus outside, least and most."""
        low, high = self.reserved
        return low + self.outside[0], high + self.outside[1]

    def compare(self, allocated_gib: float, reserved_gib: float) -> str:
        """A line that compares the measured peaks of a run with this forecast; reserved 0 means unknown."""
        low, high = (size / GIB for size in self.reserved)
        difference = allocated_gib * GIB / self.allocated - 1
        reserved = f"; {reserved_gib:.2f} GiB reserved, forecast {low:.1f} to {high:.1f}" if reserved_gib else ""
        return (
            f"peak GPU memory: {allocated_gib:.2f} GiB allocated, {difference:+.1%} against the forecast of"
            f" {self.allocated / GIB:.2f}{reserved}"
        )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a pipeline."""

    holds: list[str]
    """Part of the model, for people."""
    in_flight: int
    """See `costs.inputs.in_flight`."""
    memory: Memory
    """A process's. Layers are counted from the stage's first."""


def peak(
    skeleton: Skeleton, states: States, work: ActivationTrace, *, accumulates: bool, is_sharded: bool, loading: int = 0
) -> Memory:
    """The memory at the largest moment of a step, once the optimizer has its states, or of the start.

    Args:
        work: one micro-batch.
        accumulates: whether a step has several, so that gradients of earlier ones exist during a forward.
        loading: bytes that the start takes, before weights are sharded.
    """
    gpu = states.gpu
    if states.units:
        moments = [_of_units(states, moment, accumulates) for moment in units.moments(states, work.phases)]
    else:
        done = _done_fractions(skeleton)
        moments = [_at_phase(states, phase, *done(phase), accumulates) for phase in work.phases]
        gathered = states.gathered_weights + states.gradient_buckets + max(states.reduction, states.gradients_added)
        moments.append(
            _Moment(
                "the last reduction of gradients",
                gradients=states.gradients_before if accumulates else states.gradients_at_first,
                gathered=gpu.buffers + gathered,
            )
        )
    update = _Moment("the update", gradients=gpu.gradients + states.update, gathered=gpu.buffers)
    most = max([*moments, update], key=lambda moment: sum(moment[1:]))
    largest = Memory(
        moment=most.what if isinstance(most.what, str) else _moment_name(most.what),
        parameters=gpu.weights,
        gradients=most.gradients,
        optimizer=gpu.masters + gpu.moments,
        gathered=most.gathered,
        activations=most.activations,
        logits=most.logits,
        is_sharded=is_sharded,
    )
    if loading > largest.allocated:
        largest = Memory(moment="the start", parameters=loading, is_sharded=is_sharded)
    return replace(largest, holes=max(moment.logits for moment in moments) + (_passing(states) if is_sharded else 0))


class _Moment(NamedTuple):
    """Memory at one moment, in bytes, beside the weights and the optimizer's state; fields as of `Memory`."""

    what: Phase | str
    """The phase, or a name for people."""
    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    logits: int = 0


def _passing(states: States) -> int:
    """Weights that are gathered at a time and freed in the same pass: of units one, and the next one ahead of it; of
    ZeRO-3 what a gather fetches. Those that stay gathered leave nothing unused.
    """
    of_units = sorted(unit.weights for unit in states.units if not unit.stays)
    return sum(of_units[-2:]) if states.units else states.sent or states.gathered_weights


def _at_phase(states: States, phase: Phase, begun: float, done: float, accumulates: bool) -> _Moment:
    """A phase of a strategy without FSDP units.

    Args:
        begun: the share of the gradients that earlier phases produced.
        done: the share after this phase.
    """
    gpu = states.gpu
    there = states.gradients_between if accumulates else states.gradients_at_first
    buffers = gpu.buffers - (0 if accumulates else states.buffers_late)
    gathered, making, reduced = buffers + states.gathered_weights, phase.making, begun
    is_backward = phase.name in ("head backward", "backward", "end")
    if not is_backward or states.is_sent_again:
        gathered += states.sent
    if states.bucket:  # gradients are copied to the bucket, and become this process's shard when it is full
        full = states.bucket / max(1, states.whole_gradients)
        making, reduced = 0, begun // full * full
        gathered += states.gradient_buckets * (is_backward and done > 0)
        gathered += states.reduction * (begun // full < done // full)
    made = max(0, round(gpu.gradients * reduced) - there)
    is_head = phase.name in ("head", "head backward")
    # An existing gradient is accumulated in place.
    activations = phase.peak + (0 if there else making)
    return _Moment(
        phase,
        gradients=there + made,
        gathered=gathered,
        activations=phase.held if is_head else activations,
        logits=activations - phase.held if is_head else 0,
    )


def _of_units(states: States, moment: units.Moment, accumulates: bool) -> _Moment:
    gpu, phase = states.gpu, moment.phase
    reduced = min(moment.reduced, gpu.gradients)  # 0 if gradients are offloaded
    is_head = moment.what is None and phase.name in ("head", "head backward")
    return _Moment(
        moment.what or phase,
        gradients=states.gradients_between if accumulates else reduced,
        gathered=gpu.buffers + moment.gathered,
        activations=phase.held if is_head else moment.activations,
        logits=max(0, moment.activations - phase.held) if is_head else 0,
    )


def _moment_name(phase: Phase) -> str:
    return {
        "embed": "the embedding",
        "forward": f"the forward of layer {phase.layer}",
        "experts forward": f"the forward of the experts of layer {phase.layer}",
        "rest forward": f"the forward of layer {phase.layer} after its experts",
        "head": "the loss",
        "head backward": "the backward of the loss",
        "backward": f"the backward of layer {phase.layer}",
        "experts again": f"the second forward of the experts of layer {phase.layer}",
        "experts backward": f"the backward of the experts of layer {phase.layer}",
        "rest backward": f"the backward of layer {phase.layer} before its experts",
        "end": "the embedding's backward",
    }[phase.name]


def _done_fractions(skeleton: Skeleton) -> Callable[[Phase], tuple[float, float]]:
    """Maps a phase of the first micro-batch to the shares of gradients that exist at its beginning and end.

    The embedding's gradient comes last and is part of the trace.
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
