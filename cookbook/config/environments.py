"""Environments: what `rounds.environment` names. The files in a recipe's `plugins` register them. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from cookbook.rows.messages import Chat
from cookbook.system import registry


class Environment(Protocol):
    """Another side of a conversation: one object for each answer that is sampled."""

    def __init__(self, seed: int) -> None:
        """
        Args:
            seed: the same for all answers to a row, in all rounds.
        """

    def start(self, row: dict[str, Any]) -> Chat:
        """The messages that ask for the first turn; the same each time for a row and a seed."""

    def step(self, messages: Chat) -> Chat | float:
        """The messages that follow, as a tool's results, or the reward of the conversation, which is then over.

        Args:
            messages: all so far, the last of them what the policy wrote.
        """


Kind = TypeVar("Kind", bound=type)


@dataclass(frozen=True)
class Registered:
    family: ClassVar[str] = "environment"
    name: str
    kind: type[Environment]


def environment(kind: Kind) -> Kind:
    """Registers a class as an environment under its own name; a decorator."""
    registry.register(Registered(kind.__name__, kind))  # type: ignore[arg-type]
    return kind


def environments() -> Mapping[str, Registered]:
    """The environments of the plugins in use, by name."""
    return registry.known("environment")
