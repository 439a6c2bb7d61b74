"""Environments: what `rounds.environment` names. The files in a recipe's `plugins` register others. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from cookbook.rows.messages import Chat
from cookbook.system import registry, sandbox


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
class RegisteredEnvironment:
    family: ClassVar[str] = "environment"
    name: str
    kind: type[Environment]


def environment(kind: Kind) -> Kind:
    """Registers a class as an environment under its own name; a decorator."""
    registry.register(RegisteredEnvironment(kind.__name__, kind))  # type: ignore[arg-type]
    return kind


def environments() -> Mapping[str, RegisteredEnvironment]:
    """The environments by name, those of the plugins in use with them."""
    return registry.members("environment")


FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


@environment
class Program:
    """A row's `prompt` asks for a Python program, and its `test_list` are lines that raise an exception if it is wrong.

    These are the columns of MBPP, and the words of its question (Austin et al. 2021, arXiv 2108.07732). The program is
    the last block of code in what the policy wrote, or all of it. Passed tests give 1; what failed is told, and the
    next turn may be better.
    """

    def __init__(self, seed: int) -> None:
        self.tests = ""  # nothing is drawn, so the seed is not used

    def start(self, row: dict[str, Any]) -> Chat:
        tests = row["test_list"]
        self.tests = tests if isinstance(tests, str) else "\n".join(tests)
        asked = f"{row['prompt']} Your code should pass these tests:\n\n{self.tests}"
        return [{"role": "user", "content": asked}]

    def step(self, messages: Chat) -> Chat | float:
        said = messages[-1]["content"]
        outcome = sandbox.passes((FENCED.findall(said) or [said])[-1], self.tests)
        if outcome.passed:
            return 1.0
        return [{"role": "user", "content": f"The tests failed: {outcome.words}. Write the whole program again."}]
