"""The prompts of a recipe with rounds: its rows, in the order in which rounds take them. No torch."""

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from cookbook.config.environments import environments
from cookbook.config.sections import DataSection, RoundsSection, Source
from cookbook.rows.json_text import BadRow
from cookbook.rows.messages import IN_MESSAGES, Chat, check_text, read_messages, unread_keys
from cookbook.rows.row_checks import CHAT_KEYS, is_empty
from cookbook.rows.row_columns import drop_columns
from cookbook.system.files import RecipeError, in_flow, kind_in_words
from cookbook.system.signals import OutOfTime, no_exit, time_limit
from cookbook.training.data.rows import BadRows
from cookbook.training.data.sources import raw_rows

GIVEN = ("prompts", "completions", "completion_ids")
"""Arguments of a reward function besides the columns of a row."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    place: str
    """File and line."""
    asked: str | Chat
    columns: dict[str, Any]
    """The other columns of its row, for reward functions."""


def environment_seed(seed: int, place: str) -> int:
    """The seed of an environment for a row, in all rounds and for all answers the same."""
    return int(hashlib.sha256(f"environment {seed} {Path(place).name}".encode()).hexdigest()[:12], 16)


def read_prompts(data: DataSection, rounds: RoundsSection, seed: int = 0) -> list[Prompt]:
    """All prompts, in the order of their files.

    Raises:
        RecipeError: rows without a prompt, or none.
    """
    bad_rows, prompts = BadRows(), []
    for source in data.train:
        for place, raw in islice(raw_rows(source), source.max_rows):
            try:
                prompts.append(
                    _read(raw, place, source, rounds.user_message)
                    if rounds.environment is None
                    else _begin(raw, place, source, rounds, seed)
                )
                bad_rows.num_good += 1
            except BadRow as bad:
                bad_rows.add(place, bad)
    if bad_rows.shown:
        raise RecipeError(bad_rows.mistakes()[:-1] if bad_rows.num_good else bad_rows.mistakes())
    if not prompts:
        raise RecipeError("data.train: no prompt in it")
    return prompts


def _begin(raw: Any, place: str, source: Source, rounds: RoundsSection, seed: int) -> Prompt:
    """The messages by which an environment begins with a row."""
    name, seconds = rounds.environment or "", rounds.environment_seconds
    if isinstance(raw, BadRow):
        raise raw
    if not isinstance(raw, dict):
        raise BadRow("not an object", f"{kind_in_words(raw)}; an environment begins with an object")
    columns = drop_columns(raw, source.ignore or ())
    try:
        with time_limit(seconds), no_exit():
            asked = environments()[name].kind(environment_seed(seed, place)).start(copy.deepcopy(columns))
    except OutOfTime:
        why = f"environment {name}: start took longer than rounds.environment_seconds {seconds:g}"
        raise RecipeError(f"{place}: {why}") from None
    except Exception as error:  # any of a user's class
        raise BadRow(f"environment {name}: start fails", f"{type(error).__name__}: {error}") from error
    asked = read_of_environment(asked, "start")
    if asked[-1]["role"] == "assistant":
        raise BadRow(f"environment {name}: start ends with an answer", "its last message must ask for one")
    return Prompt(place=place, asked=asked, columns=columns)


def read_of_environment(messages: Any, name: str) -> Chat:
    """Messages of an environment, as those of rows are read.

    Raises:
        BadRow: they are none, or have a key that nothing reads.
    """
    checked = read_messages(messages, name)
    if unread := next(unread_keys(messages), None):
        raise BadRow("a key that is not read", f"`{unread.removeprefix(IN_MESSAGES)}` of `{name}`; leave it out")
    return checked


def _read(raw: Any, place: str, source: Source, message: str | None) -> Prompt:
    if isinstance(raw, BadRow):
        raise raw
    if not isinstance(raw, dict):
        raise BadRow("not an object", f"{kind_in_words(raw)}; a row is an object with `prompt`")
    columns, name = drop_columns(raw, source.ignore or ()), (source.columns or {}).get("prompt", "prompt")
    if name not in columns:
        names = ", ".join(map(ascii, columns))[:200] or "none"
        raise BadRow(
            "no prompt", f"found {names}; a row has `{name}`, or name its column: data.columns: {{prompt: ...}}"
        )
    asked = columns.pop(name)
    if isinstance(asked, list):
        if unread := sorted(set(unread_keys(asked))):
            why = "no chat template or reward function is given it"
            raise BadRow(f"`{unread[0]}` is not read", f"{why}; to pass it over: data.ignore: {in_flow(unread)}")
        asked = read_messages(asked, "prompt")
        if asked[-1]["role"] == "assistant":
            raise BadRow("prompt ends with an answer", "its last message must be another's than the assistant's")
        if message is not None:
            raise BadRow("a prompt of messages", "rounds.user_message asks texts; take it out, or write texts")
    else:
        asked = check_text(asked, f"`{name}`")
        if message is not None:
            asked = [{"role": "user", "content": message.replace("{prompt}", asked)}]
    for key in (*CHAT_KEYS, *GIVEN):
        if not is_empty(columns.get(key)):
            why = "reward functions are given answers under that name" if key in GIVEN else "write it into the prompt"
            raise BadRow(f"`{key}` is not read", f"{why}; to pass it over: data.ignore: [{key}]")
    return Prompt(place=place, asked=asked, columns=columns)


def digest(prompts: list[Prompt], *written: Any) -> str:
    """SHA-256 of their content.

    Args:
        written: how they are written, as with which chat template.
    """
    text = json.dumps([[[prompt.asked, prompt.columns] for prompt in prompts], *written], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def of_round(number: int, count: int, num_prompts: int, seed: int) -> list[int]:
    """The prompts of a round, from 1, by their index: `count` further ones of the order in which each comes once an
    epoch."""
    return list(islice(_endless(num_prompts, seed), (number - 1) * count, number * count))


def _endless(num_prompts: int, seed: int) -> Iterator[int]:
    epoch = 0
    while True:
        order = list(range(num_prompts))
        # The order depends on the seed and the epoch alone, so that a resumed command finds the same prompts.
        random.Random(f"{seed} {epoch}").shuffle(order)
        yield from order
        epoch += 1
