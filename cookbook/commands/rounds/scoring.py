"""Rewards of sampled answers, by the functions of a recipe's plugins. No torch."""

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from cookbook.commands.rounds.prompt_rows import Prompt
from cookbook.config.reward_functions import Reward, is_model, reward_functions
from cookbook.config.sections import RoundsSection
from cookbook.system.files import RecipeError, kind_in_words
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
        return _call(reward_functions()[name], prompt, answers, ids)

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


def _call(reward: Reward, prompt: Prompt, answers: Sequence[str], ids: Sequence[list[int]]) -> list[float]:
    count = len(answers)
    of_answers = {"prompts": prompt.asked, **prompt.columns}
    try:
        with no_exit():
            # Copies, each its own: a function that takes the end tokens off its lists would change what is trained.
            rewards = reward.function(
                completions=as_asked(prompt, answers),
                completion_ids=[[*answer] for answer in ids],
                **{key: [copy.deepcopy(value) for _ in answers] for key, value in of_answers.items()},
            )
        numbers = _as_numbers(rewards)
    except Exception as error:  # any of a user's function
        raise _mistake(reward, prompt, answers, f"{type(error).__name__}: {error}") from error
    if len(numbers) != count:
        raise _mistake(reward, prompt, answers, f"returned {len(numbers)} numbers for {count} answers")
    if (wrong := next((number for number in numbers if not math.isfinite(number)), None)) is not None:
        raise _mistake(reward, prompt, answers, f"returned {wrong}, which is not finite")
    return numbers


def _as_numbers(rewards: Any) -> list[float]:
    """The numbers of what a function has returned: a list, a tensor, an array, or what is made while it is read.

    Raises:
        TypeError: something else, as a dictionary, whose keys would be read, or a text, whose digits would.
    """
    values = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | Iterator):
        raise TypeError(f"it returned {kind_in_words(values)}; return a list, with a number for each answer")
    values = [*values]
    for value in values:
        if not hasattr(value, "__float__"):  # as a text has none, which float() would read
            raise TypeError(f"it returned {value!r:.60} for an answer; return a number")
    return [float(value) for value in values]


def as_asked(prompt: Prompt, answers: Sequence[str]) -> list[Any]:
    """Texts, or messages where the prompt is one of messages."""
    if isinstance(prompt.asked, str):
        return [*answers]
    return [[{"role": "assistant", "content": answer}] for answer in answers]


def _mistake(reward: Reward, prompt: Prompt, answers: Sequence[str], what: str) -> RecipeError:
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
