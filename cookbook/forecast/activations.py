"""Activations that a forward and a backward hold, phase by phase."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

CACHE_BYTES = 64 * 2**20
"""More than an H100's cache holds (50 MiB); an RTX 4090 has 72."""


class Untraceable(Exception):
    """The model's code needs values that a fake tensor does not have, or has more operations than are traced."""


class TooLong(Exception):
    """More operations than are traced."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of one forward and backward. Sizes are in bytes, without weights."""

    name: str
    """embed, forward, head, head backward, backward, end. Under expert parallel a layer has more: experts forward and
    rest forward after its forward, experts backward and rest backward after its backward; where checkpointing computes
    the experts again, experts again and a second backward are between."""
    layer: int | None
    """The decoder layer of a forward or backward."""
    held: int
    """Activations at its beginning."""
    peak: int
    """Peak if each gradient of a weight is freed as soon as it is computed."""
    making: int = 0
    """Bytes by which the peak is higher if these gradients live to its end."""
    kernels: int = 0
    """Kernels that the operations start."""
    looped: int = 0
    """More of them where a product with all experts is a loop; see `Gpu.has_grouped_products`."""
    moved: int = 0
    """Read and written by the kernels that memory bounds: all but products and attention."""
    streamed: int = 0
    """Part of `moved`, by kernels that move more than a GPU's cache holds."""


COUNTED = ("kernels", "looped", "moved", "streamed")
"""The fields of a phase that count its operations."""
SIZES = ("held", "peak", "making", *COUNTED)
_sizes = attrgetter(*SIZES)


@dataclass(frozen=True, kw_only=True)
class ActivationTrace:
    """The phases of one micro-batch, in order."""

    phases: tuple[Phase, ...]
    keeps_inputs: bool = False
    """True if a layer keeps the hidden states that it gets until its backward, and not only what it makes of them."""

    def towards(self, other: "ActivationTrace", times: float) -> "ActivationTrace":
        """Linear extrapolation from this trace (0 times) to another (1 times)."""

        def between(first: Phase, second: Phase) -> Phase:
            pairs = zip(SIZES, _sizes(first), _sizes(second), strict=True)
            sizes = {name: max(0, round(a + times * (b - a))) for name, a, b in pairs}
            return Phase(name=first.name, layer=first.layer, **sizes)

        return replace(self, phases=tuple(between(*pair) for pair in zip(self.phases, other.phases, strict=True)))

    def without_bytes(self, *names: str) -> "ActivationTrace":
        """The same, with nothing held in the phases of these names, or if none is named in any."""
        nothing: dict[str, Any] = dict.fromkeys(SIZES, 0)
        phases = (phase if names and phase.name not in names else replace(phase, **nothing) for phase in self.phases)
        return replace(self, phases=tuple(phases))

    def of_loops(self, longer: "ActivationTrace") -> "ActivationTrace":
        """Return the same bytes, with the kernels of longer rows that have as many tokens."""
        own = ({name: getattr(phase, name) for name in ("held", "peak", "making")} for phase in self.phases)
        phases = (replace(phase, **sizes) for phase, sizes in zip(longer.phases, own, strict=True))
        return replace(longer, phases=tuple(phases))

    def total(self, name: Literal["kernels", "looped", "moved", "streamed"]) -> int:
        """Sum over all phases."""
        return sum(getattr(phase, name) for phase in self.phases)

    def of_stage(
        self, chunks: Sequence[range], num_layers: int, *, waiting: Sequence[int], message: int, tied: int = 0
    ) -> "ActivationTrace":
        """The phases of a pipeline's stage, its layers counted from 0: of one micro-batch in all chunks, as if nothing
        were computed between them.

        Args:
            chunks: the stage's ranges of layers.
            waiting: for each, the micro-batches whose backward is still to come while another one is computed.
            message: bytes of the hidden states of a micro-batch.
            tied: bytes of the gradient of a head that is tied to the embedding, which in the trace waits for that of
                the embedding. No stage has both: it is counted as a gradient when the head has made it.
        """
        parts = [self._of_chunk(layers, num_layers, message, tied) for layers in chunks]
        kept = sum(number * each for number, (each, _) in zip(waiting, parts, strict=True))
        own = [layer for layers in chunks for layer in layers]
        here = {(phase.name, phase.layer): phase for _, phases in parts for phase in phases}
        phases = (here[phase.name, phase.layer] for phase in self.phases if (phase.name, phase.layer) in here)
        return ActivationTrace(
            phases=tuple(
                replace(
                    phase,
                    layer=None if phase.layer is None else own.index(phase.layer),
                    held=phase.held + kept,
                    peak=phase.peak + kept,
                )
                for phase in phases
            )
        )

    def kept_by(self, layers: range, num_layers: int, *, message: int, tied: int = 0) -> int:
        """Bytes of a micro-batch between its forward and its backward in a range of layers; see `of_stage`."""
        return self._of_chunk(layers, num_layers, message, tied)[0]

    def _of_chunk(self, layers: range, num_layers: int, message: int, tied: int) -> tuple[int, list[Phase]]:
        """`kept_by`, and the phases without what waits."""
        is_first, is_last = layers.start == 0, layers.stop == num_layers
        held = {(phase.name, phase.layer): phase.held for phase in self.phases}
        # What every stage makes before its layers, such as rotary embeddings.
        shared = max(0, held["forward", 0] - message)
        # What the stages before hold; in the forward also autocast's copies of their weights. What was received is no
        # activation, whether the first layer keeps it or not: it lies in the buffers of messages.
        before, kept = {"forward": 0, "head backward": 0, "backward": tied}, 0
        received = 0 if is_first else message * self.keeps_inputs
        if not is_first:
            kept = held["backward", layers.start - 1] - message - tied - shared + received
            forward = held["forward", layers.start] - shared - message + received
            before = {"forward": forward, "head backward": kept, "backward": kept + tied}

        def is_here(phase: Phase) -> bool:
            if phase.layer is not None:
                return phase.layer in layers
            return is_first if phase.name in ("embed", "end") else is_last

        def here(phase: Phase) -> Phase:
            kind = {"embed": "forward", "head": "forward", "end": "backward"}.get(phase.name, phase.name)
            elsewhere = before[kind]
            if phase.name == "forward" and phase.layer == layers.start and not is_first:
                elsewhere += message - received
            return replace(phase, held=max(0, phase.held - elsewhere), peak=max(0, phase.peak - elsewhere))

        phases = [here(phase) for phase in self.phases if is_here(phase)]
        return held["backward", layers.stop - 1] - message - tied - kept, phases
