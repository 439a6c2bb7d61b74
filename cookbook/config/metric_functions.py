"""Metrics of the held-out rows: what `run.metrics` names. The files in a recipe's `plugins` register them. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cookbook.config.plugins import place_of
from cookbook.system import registry
from cookbook.system.files import RecipeError

RESERVED = ("loss", "num_tokens", "set")
"""Names that an evaluation's line has, behind `eval_`."""


@dataclass(frozen=True)
class Metric:
    family: ClassVar[str] = "metric"
    name: str
    function: Callable[..., Any]
    greater_is_better: bool
    num_answers: int = 0
    """Held-out samples of which it is given a sampled answer; 0: it is given logits."""
    num_tokens: int = 0
    """The most of such an answer."""

    def call(self, *arguments: Any) -> Any:
        """The function's result.

        Raises:
            RecipeError: it fails; with its line.
        """
        try:
            return self.function(*arguments)
        except RecipeError:
            raise
        except Exception as error:  # any of a user's function
            place = place_of(error, self.function.__code__.co_filename)
            what = f"{type(error).__name__}: {error}"
            raise RecipeError(f"run.metrics: {self.name} failed at {place}: {what}") from error


def metric(
    function: Callable[..., Any] | None = None, *, greater_is_better: bool = True, answers: int = 0, tokens: int = 64
) -> Any:
    """Registers a metric under its own name; a decorator, with or without arguments.

    It is called with the `Logits` (`cookbook.config.objectives.forward`) at some labels of the held-out rows, and with
    these labels, token ids (L,). It returns a tensor of a number for each label, (L,), whose mean over all labels of a
    set is the metric; or two such tensors, and then the metric is the sum of the first over that of the second.

    With `answers` it is called with the prompt, an answer of the model and the held-out answer, as texts, once for each
    sample, and returns a number or two. An answer has the most probable token each time.

    Args:
        greater_is_better: which of two values `run.metric_for_best_model` takes for the better one.
        answers: the first samples of each held-out set of which it sees an answer; 0: it is of logits.
        tokens: at most in an answer.

    Raises:
        ValueError: the name is taken, or a number cannot be.
    """
    if function is None:
        return lambda decorated: metric(decorated, greater_is_better=greater_is_better, answers=answers, tokens=tokens)
    if answers < 0 or tokens < 1:
        raise ValueError(f"metric {function.__name__!r} has {answers=} and {tokens=}; write at least 0 and 1")
    if function.__name__ in RESERVED:
        raise ValueError(f"metric {function.__name__!r} is taken; give it another name")
    registry.register(Metric(function.__name__, function, greater_is_better, answers, tokens))
    return function


def metrics() -> Mapping[str, Metric]:
    """The metrics of the plugins in use, by name."""
    return registry.members("metric")
