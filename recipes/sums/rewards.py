"""The reward of recipes/sums/grpo.yaml: whether an answer is the sum."""

from cookbook.config.reward_functions import reward


@reward
def is_sum(completions, answer, **others):
    """1 for the sum's digits and nothing else, else 0."""
    return [float(text.strip() == str(right)) for text, right in zip(completions, answer, strict=True)]
