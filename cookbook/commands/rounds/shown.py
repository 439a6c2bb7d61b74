"""Answers of rounds in words: who said what, and which of it is trained. No torch."""

from collections.abc import Sequence
from typing import Any

POLICY = "assistant"


def prompt_words(line: dict[str, Any]) -> str:
    """The prompt of a line of samples.jsonl."""
    prompt = line["prompt"]
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def answer_words(line: dict[str, Any], place: int) -> str:
    """An answer of a line of samples.jsonl: of several messages each with its role, and whether it is trained."""
    completion = line["completions"][place]
    if isinstance(completion, str):
        return completion
    if len(completion) == 1:
        return str(completion[0]["content"])
    return "\n".join(f"{_speaker(message['role'])}: {message['content']}" for message in completion)


def _speaker(role: str) -> str:
    return role if role == POLICY else f"{role} (not trained)"


def three_answers(lines: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """The lines and places of three answers: of the highest, the median and the lowest reward; without rewards, the
    first ones to three prompts."""
    places = [(line, place) for line in lines for place in range(len(line["completions"]))]
    if not all("rewards" in line for line in lines):
        return [(line, 0) for line in lines[:3]]
    ranked = sorted(places, key=lambda of_line: -of_line[0]["rewards"][of_line[1]])
    return [ranked[i] for i in dict.fromkeys((0, (len(ranked) - 1) // 2, len(ranked) - 1))]
