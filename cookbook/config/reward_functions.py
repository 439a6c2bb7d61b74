"""Reward functions: what `rounds.reward_funcs` names. The files in a recipe's `plugins` register them. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from cookbook.system import registry

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Reward:
    family: ClassVar[str] = "reward"
    name: str
    function: Callable[..., Any]


def reward(function: Function) -> Function:
    """Registers a reward function under its own name; a decorator.

    It is called as TRL calls one, with lists that have an item for each answer: `prompts` and `completions` (texts, or
    messages where the prompts are messages), `completion_ids`, and each further column of the rows by its name. It
    returns a finite number for each answer.
    """
    registry.register(Reward(function.__name__, function))
    return function


def is_model(name: str) -> bool:
    """Return whether a name of `rounds.reward_funcs` is that of a reward model, and not a function's: a folder with a
    slash in it, or one of the Hub."""
    return "/" in name


def reward_functions() -> Mapping[str, Reward]:
    """The reward functions of the plugins in use, by name."""
    return registry.members("reward")
