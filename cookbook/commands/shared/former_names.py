"""Commands that have another name now, or elsewhere: the command to write instead, from the words of the other one."""

import json
import re
from collections.abc import Callable
from pathlib import Path

PROMPT = "Write `def get_name(self)`: Return the name."
"""The prompt of `sample` without one, as cookbook/training/data/stdlib.py words it."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Values of --dtype: of `merge`, and of `export`."""


def _replace_merge(words: list[str]) -> list[str]:
    renamed = []
    for word in words:
        flag, equals, value = word.rpartition("=")  # --dtype=bfloat16, or bfloat16 alone
        renamed.append(flag + equals + DTYPES.get(value, value))
    return ["export", *renamed, "--merged", *_step_of_export(words)]


def _step_of_export(words: list[str]) -> list[str]:
    """`--step N` if `export/` is not of the newest checkpoint, as with run.export: best: `merge` took that model, and
    `export` alone takes the newest.
    """
    for run in map(Path, words):
        try:
            step = json.loads((run / "export" / "export.json").read_text(encoding="utf-8"))["step"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        newest = max(
            (int(path.name[5:]) for path in run.glob("checkpoints/step-*") if path.name[5:].isdecimal()), default=step
        )
        return [] if step == newest else ["--step", str(step)]
    return []


def _replace_sample(words: list[str]) -> list[str]:
    words = [re.sub("^--from-eval(?=$|=)", "--from-run", word) for word in words]
    flags = {word.partition("=")[0] for word in words}
    if not flags & {"--prompt", "--from-run"}:
        words = [*words, "--prompt", PROMPT]
    if "--max-new-tokens" not in flags:
        words = [*words, "--max-new-tokens", "100"]
    return ["chat", *words]


ANSWERS: dict[str, Callable[[list[str]], list[str]]] = {
    **dict.fromkeys(("train", "run"), lambda words: ["launch", *words]),
    "summary": lambda words: ["report", *words],
    "sample": _replace_sample,
    "merge": _replace_merge,
}
"""From the words after an old name to those after `cookbook`."""
