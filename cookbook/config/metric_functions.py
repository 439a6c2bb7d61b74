"""Metrics of the held-out rows: what `run.metrics` names. The files in a recipe's `plugins` register them. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cookbook.system import registry

RESERVED = ("loss", "num_tokens", "set")
"""Names that an evaluation's line has, behind `eval_`."""


@dataclass(frozen=True)
class Metric:
    family: ClassVar[str] = "metric"
    name: str
    function: Callable[..., Any]
    greater_is_better: bool


def metric(function: Callable[..., Any] | None = None, *, greater_is_better: bool = True) -> Any:
    """Registers a metric under its own name; a decorator, with or without arguments.

    It is called with the `Logits` (`cookbook.config.objectives.forward`) at some labels of the held-out rows, and with
    these labels, token ids (L,). It returns a tensor of a number for each label, (L,), whose mean over all labels of a
    set is the metric; or two such tensors, and then the metric is the sum of the first over that of the second.

    Args:
        greater_is_better: which of two values `run.metric_for_best_model` takes for the better one.

    Raises:
        ValueError: the name is taken.
    """
    if function is None:
        return lambda decorated: metric(decorated, greater_is_better=greater_is_better)
    if function.__name__ in RESERVED:
        raise ValueError(f"metric {function.__name__!r} is taken; give it another name")
    registry.register(Metric(function.__name__, function, greater_is_better))
    return function


def metrics() -> Mapping[str, Metric]:
    """The metrics of the plugins in use, by name."""
    return registry.known("metric")
