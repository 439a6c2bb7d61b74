"""Protects rewards: a reward function gets copies of what is trained, and what is no list of numbers is refused.

python -m pytest -q tests/test_rounds_scoring.py
"""

from typing import Any

import pytest
import torch

from cookbook.commands.rounds import scoring
from cookbook.commands.rounds.prompt_rows import Prompt
from cookbook.config.reward_functions import Reward
from cookbook.config.sections import RoundsSection
from cookbook.system.files import RecipeError

ROUNDS = RoundsSection(num_rounds=1, prompts_per_round=1, num_generations=2, reward_funcs=["mine"])
IDS = [[5, 6, 2], [7, 2]]
END = 2


def score(function: Any, monkeypatch: pytest.MonkeyPatch, prompt: Prompt, ids: list[list[int]]) -> list[float]:
    monkeypatch.setattr(scoring, "reward_functions", lambda: {"mine": Reward("mine", function)})
    return scoring.score(ROUNDS, prompt, ["a", "b"], ids, {})["mine"]


def asked() -> Prompt:
    return Prompt(place="p:1", asked=[{"role": "user", "content": "?"}], columns={"tests": ["1", "2"], "answer": "a"})


def test_a_function_that_writes_to_its_lists_changes_nothing_but_them(monkeypatch):
    """End tokens taken off, as before counting; a list of the row emptied; the prompt's messages written to."""

    def counts(prompts, completions, completion_ids, tests, **others):
        left = []
        for messages, answer, ids, of_answer in zip(prompts, completions, completion_ids, tests, strict=True):
            while ids[-1] == END:
                ids.pop()
            answer[0]["content"] = messages[0]["content"] = ""
            left.append(len(ids) + 10 * len(of_answer))
            of_answer.clear()
        return left

    prompt, ids = asked(), [[*answer] for answer in IDS]
    for _ in range(2):  # it finds everything as it was, for each answer
        assert score(counts, monkeypatch, prompt, ids) == [22.0, 21.0]
    assert ids == IDS and prompt == asked()


def test_numbers_in_any_sequence_are_rewards(monkeypatch):
    for rewards in ([1, 0.5], (True, 0.5), torch.tensor([1, 0.5]), [torch.tensor(1.0), 0.5], iter([1, 0.5])):
        assert score(lambda rewards=rewards, **others: rewards, monkeypatch, asked(), IDS) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({0: 5.0, 1: 5.0}, "it returned an object with the keys 0, 1; return a list, with a number for each answer"),
        ("10", "it returned a string; return a list"),
        ({0.0, 1.0}, "it returned a set; return a list"),
        (None, "it returned null; return a list"),
        (["0.5", "1"], "it returned '0.5' for an answer; return a number"),
        (torch.ones(2, 1), "it returned [1.0] for an answer; return a number"),
        ([1.0, None], "it returned None for an answer; return a number"),
    ],
)
def test_what_is_no_list_of_numbers_is_refused_with_the_function(monkeypatch, rewards, message):
    with pytest.raises(RecipeError, match=r"reward function mine: TypeError: it returned") as raised:
        score(lambda **others: rewards, monkeypatch, asked(), IDS)
    assert message in str(raised.value)
