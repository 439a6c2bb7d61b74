"""fp16's dynamic loss scale (Micikevicius et al. 2018, arXiv 1710.03740), one rule under every engine.

torch's GradScaler has neither a hysteresis nor a minimum, and DeepSpeed 0.19.8's DynamicLossScaler raises the scale one
step later than its window (runtime/fp16/loss_scaler.py, update_scale); so both get the scale from here.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from cookbook.config.sections import LossScaleSection


@dataclass(kw_only=True)
class LossScale:
    """Halves at an overflow, doubles after `window` steps without one. On the host, the same on every rank."""

    settings: LossScaleSection
    scale: float = field(init=False)
    good_steps: int = field(default=0, init=False)
    """Since the last overflow or doubling."""
    tolerated: int = field(default=0, init=False)
    """Overflows since the last doubling that left the scale as it was, below the hysteresis."""

    def __post_init__(self) -> None:
        self.scale = self.settings.initial

    def update(self, *, overflowed: bool) -> None:
        """Count a step.

        Raises:
            FloatingPointError: an overflow at the minimum; the weights are unchanged.
        """
        if not overflowed:
            self.good_steps += 1
            if self.good_steps == self.settings.window:
                self.scale, self.good_steps, self.tolerated = self.scale * 2, 0, 0
            return
        self.good_steps = 0
        if self.tolerated < self.settings.hysteresis - 1:
            self.tolerated += 1
            return
        if self.scale <= self.settings.minimum:
            raise FloatingPointError(
                f"fp16: loss or gradient is not finite at the smallest loss scale, {self.scale:g} (loss_scale.minimum);"
                " lower optim.learning_rate, or write mixed_precision: bf16"
            )
        self.scale = max(self.scale / 2, self.settings.minimum)

    def state(self) -> dict[str, Any]:
        """The scale's state for a checkpoint, which any engine resumes."""
        return {name: value for name, value in asdict(self).items() if name != "settings"}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` gave."""
        for name in self.state():
            setattr(self, name, state[name])


def grad_scaler(kind: type, rule: LossScale, device: torch.device | None = None) -> Any:
    """A `torch.amp.GradScaler` of this class whose scale is that of `rule`, which has counted the step before its
    `update`.

    Args:
        device: of the gradients, where it is not that of the loss. From there torch 2.13 would copy the scale and what
            it finds without waiting, and read both at once (amp/grad_scaler.py, _MultiDeviceReplicator; optim/adam.py,
            _fused_adam).
    """

    class RuledScaler(kind):  # type: ignore[misc]
        def scale(self, outputs: Any) -> Any:
            if device is not None and self._scale is None:
                self._lazy_init_scale_growth_tracker(device)
            return super().scale(outputs)

        def update(self, new_scale: Any = None) -> None:
            super().update(rule.scale)

    return RuledScaler(init_scale=rule.scale)
