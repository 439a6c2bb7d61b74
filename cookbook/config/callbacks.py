"""Callbacks: what `run.callbacks` names. The files in a recipe's `plugins` register them. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from cookbook.system import registry

METHODS = ("on_event", "on_metrics")
Kind = TypeVar("Kind", bound=type)


@dataclass(frozen=True)
class Callback:
    family: ClassVar[str] = "callback"
    name: str
    kind: type


def callback(kind: Kind) -> Kind:
    """Registers a class as a callback under its own name; a decorator.

    Each start of a run makes an object on its main process, with a folder for files of its own. `on_event` gets each
    line of events.jsonl, and `on_metrics` each of metrics.jsonl, as a dict; one of the two is enough. A callback looks
    on: it may not change weights, nor draw random numbers from the global generators.

    Raises:
        ValueError: the class has no such method, or its name is taken.
    """
    if not any(callable(getattr(kind, method, None)) for method in METHODS):
        raise ValueError(f"callback {kind.__name__!r} has neither {' nor '.join(METHODS)}; write one of them")
    registry.register(Callback(kind.__name__, kind))
    return kind


def callbacks() -> Mapping[str, Callback]:
    """The callbacks of the plugins in use, by name."""
    return registry.members("callback")
