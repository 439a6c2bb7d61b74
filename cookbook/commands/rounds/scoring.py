"""Rewards of sampled answers, by the functions of a recipe's plugins. No torch."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cookbook.commands.rounds.prompt_rows import Prompt
from cookbook.config.reward_functions import Reward, is_model, reward_functions
from cookbook.config.sections import RoundsSection
from cookbook.system.files import RecipeError
from cookbook.system.signals import no_exit

SHOWN = 200
"""Characters of a prompt and of an answer in a message."""


class Scorer(Protocol):
    """A model that scores answers."""

    def score(self, prompt: Prompt, answers: Sequence[str]) -> list[float]: ...


def score(
    rounds: RoundsSection,
    prompt: Prompt,
    answers: Sequence[str],
    ids: Sequence[list[int]],
    models: Mapping[str, Scorer],
) -> dict[str, list[float]]:
    """The numbers of each reward function or model for the answers to one prompt, by its name.

    Raises:
        RecipeError: a function fails, or returns something else.
    """

    def numbers(name: str) -> list[float]:
        if name in models:
            return models[name].score(prompt, answers)
        return _call(reward_functions()[name], prompt, list(answers), list(ids))

    return {name: numbers(name) for name in rounds.reward_funcs}


def total(rounds: RoundsSection, scores: dict[str, list[float]]) -> list[float]:
    """The reward of each answer."""
    by_answer = zip(*(scores[name] for name in rounds.reward_funcs), strict=True)
    return [sum(weight * score for weight, score in zip(rounds.weights, of, strict=True)) for of in by_answer]


def try_functions(rounds: RoundsSection, prompt: Prompt) -> None:
    """Call each function before anything is sampled, with empty answers to a prompt.

    Raises:
        RecipeError: as `score`.
    """
    answers, ids = [""] * rounds.num_generations, [[]] * rounds.num_generations  # type: ignore[var-annotated]
    for name in rounds.reward_funcs:
        if not is_model(name):
            _call(reward_functions()[name], prompt, answers, ids)


def _call(reward: Reward, prompt: Prompt, answers: list[str], ids: list[list[int]]) -> list[float]:
    count = len(answers)
    columns = {key: [value] * count for key, value in prompt.columns.items()}
    completions = as_asked(prompt, answers)
    try:
        with no_exit():
            rewards = reward.function(
                prompts=[prompt.asked] * count, completions=completions, completion_ids=ids, **columns
            )
        numbers = [float(value) for value in rewards]
    except Exception as error:  # any of a user's function
        raise _mistake(reward, prompt, answers, f"{type(error).__name__}: {error}") from error
    if len(numbers) != count:
        raise _mistake(reward, prompt, answers, f"returned {len(numbers)} numbers for {count} answers")
    if (wrong := next((number for number in numbers if not math.isfinite(number)), None)) is not None:
        raise _mistake(reward, prompt, answers, f"returned {wrong}, which is not finite")
    return numbers


def as_asked(prompt: Prompt, answers: list[str]) -> list[Any]:
    """Texts, or messages where the prompt is one of messages."""
    if isinstance(prompt.asked, str):
        return answers
    return [[{"role": "assistant", "content": answer}] for answer in answers]


def _mistake(reward: Reward, prompt: Prompt, answers: list[str], what: str) -> RecipeError:
    file = reward.function.__code__.co_filename if hasattr(reward.function, "__code__") else ""
    return RecipeError(
        [
            f"{file + ': ' if file else ''}reward function {reward.name}: {what}",
            f"  prompt ({prompt.place}): {_short(prompt.asked)}",
            *(f"  answer: {_short(answer)}" for answer in dict.fromkeys(answers)),
        ]
    )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
