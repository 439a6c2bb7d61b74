"""The reward of recipes/qwen25_3b/grpo_lora.yaml."""

import re

from cookbook.config.reward_functions import reward

NUMBER = re.compile(r"#### ?\$?(-?[\d,]*\.?\d+)")


@reward
def is_right(completions, answer, **others):
    """1 if the number after the first #### is that after the #### of the row's answer, else 0; of a text without one 0.

    Commas, a dollar sign before and zeros after the point change nothing.
    """
    return [
        float((found := number_in(one[0]["content"])) is not None and found == number_in(right))
        for one, right in zip(completions, answer, strict=True)
    ]


def number_in(text):
    found = NUMBER.search(text)
    return None if found is None else float(found[1].replace(",", ""))
