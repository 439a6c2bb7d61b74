"""The environment of recipes/calculator/grpo.yaml: a sum is asked, and a calculator may be used before the answer."""

import re

from cookbook.config.environments import environment

CALL = re.compile(r"calc (\d{1,9}) \+ (\d{1,9})")


@environment
class Calculator:
    """A turn `calc 3 + 4` is answered by the tool with 7; any other is the answer: 1 if it is the sum, else 0."""

    def __init__(self, seed):
        self.answer = None  # nothing is drawn here, so the seed is not used

    def start(self, row):
        self.answer = str(row["answer"])
        return [{"role": "user", "content": row["question"]}]

    def step(self, messages):
        said = messages[-1]["content"].strip()
        if call := CALL.fullmatch(said):
            return [{"role": "tool", "content": str(int(call[1]) + int(call[2]))}]
        return float(said == self.answer)
