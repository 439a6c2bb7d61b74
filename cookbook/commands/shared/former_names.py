"""Commands that have another name now: the command to write instead, from the words of the old one."""

import re
from collections.abc import Callable

PROMPT = "Write `def get_name(self)`: Return the name."
"""The prompt of `sample` without one, as cookbook/training/data/stdlib.py words it."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Values of --dtype: of `merge`, and of `export`."""


def _replace_merge(words: list[str]) -> list[str]:
    renamed = []
    for word in words:
        flag, equals, value = word.rpartition("=")  # --dtype=bfloat16, or bfloat16 alone
        renamed.append(flag + equals + DTYPES.get(value, value))
    return ["export", *renamed, "--merged"]


def _replace_sample(words: list[str]) -> list[str]:
    words = [re.sub("^--from-eval(?=$|=)", "--from-run", word) for word in words]
    flags = {word.partition("=")[0] for word in words}
    if not flags & {"--prompt", "--from-run"}:
        words = [*words, "--prompt", PROMPT]
    if "--max-new-tokens" not in flags:
        words = [*words, "--max-new-tokens", "100"]
    return ["chat", *words]


ANSWERS: dict[str, Callable[[list[str]], list[str]]] = {
    "train": lambda words: ["launch", *words],
    "summary": lambda words: ["report", *words],
    "sample": _replace_sample,
    "merge": _replace_merge,
}
"""From the words after an old name to those after `cookbook`."""
