"""Reward functions of tests/test_rounds.py."""

from cookbook.config.reward_functions import reward


def text_of(messages):
    (message,) = messages
    assert message["role"] == "assistant"
    return message["content"]


@reward
def longer(completions, **others):
    return [min(len(text_of(completion)), 40) / 40 for completion in completions]


@reward
def has_the(prompts, completions, wanted, **others):
    assert len(prompts) == len(completions) == len(wanted)
    return [float(word in text_of(completion)) for completion, word in zip(completions, wanted, strict=True)]


@reward
def one_number(completions, **others):
    return [0.0]


@reward
def not_finite(completions, **others):
    return [float("nan")] * len(completions)


@reward
def raises_later(completions, **others):
    if any(map(text_of, completions)):
        raise KeyError("a key that is not there")
    return [0.0] * len(completions)
