"""Conversations of a policy with an environment, kept as the tokens that were sampled. No torch.

What the policy wrote is never tokenized again: its turn is the tokens that were sampled, and what follows is the text
that the chat template writes after it. A template that writes earlier turns otherwise, once others follow, is refused.
"""

import contextlib
import copy
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cookbook.commands.rounds.prompt_rows import Prompt, environment_seed, read_of_environment
from cookbook.config.environments import environments
from cookbook.config.recipe import Recipe
from cookbook.rows.json_text import BadRow
from cookbook.rows.messages import role_of
from cookbook.system.console import say
from cookbook.system.files import RecipeError, first_line
from cookbook.system.signals import OutOfTime, no_exit, time_limit

MARK = "ANSWER"
"""Stands for what the policy wrote where the template is asked for what follows it."""


class Sampler(Protocol):
    tokenizer: Any

    def answers(
        self, prompts: list[list[int]], seed: int, count: int | None = None, places: Sequence[int] | None = None
    ) -> list[list[Any]]: ...


class Conversation:
    """A prompt and all that followed."""

    def __init__(self, prompt: Prompt, ids: list[int], recipe: Recipe, tokenizer: Any) -> None:
        assert recipe.rounds is not None and isinstance(prompt.asked, list)
        self.prompt, self.prompt_ids, self.tokenizer = prompt, ids, tokenizer
        self.rounds, self.max_length = recipe.rounds, recipe.data.max_length
        kind = environments()[self.rounds.environment or ""].kind
        self.messages: list[Any] = []
        self.environment = self._call(lambda: kind(environment_seed(recipe.seed, prompt.place)), "__init__")
        asked = self._call(lambda: self.environment.start(copy.deepcopy(prompt.columns)), "start")
        with contextlib.suppress(BadRow):  # it has been read before
            asked = read_of_environment(asked, "start")
        if asked != prompt.asked:
            raise self._mistake("start returned other messages for the same row and seed")
        self.messages = copy.deepcopy(prompt.asked)  # an environment may write to what it returned
        self._shown = [*prompt.asked]
        self._text = self._render(self._shown)
        self.tokens: list[int] = []
        self.mask: list[int] = []
        """1 for a token that was sampled, 0 for one of the environment's or the template's."""
        self.turns: list[Any] = []
        """The sampled turns, in order."""
        self.reward: float | None = None
        """Once it is over."""

    def take(self, answer: Any) -> None:
        """Add a turn of the policy, and what the environment answers."""
        self.turns.append(answer)
        self.tokens, self.mask = self.tokens + answer.ids, self.mask + [1] * len(answer.ids)
        self.messages.append({"role": "assistant", "content": answer.text})
        reply = self._call(lambda: self.environment.step(copy.deepcopy(self.messages)), "step")
        if isinstance(reply, int | float):
            if not math.isfinite(reply):
                raise self._mistake(f"step returned {reply}, which is not finite")
            self.reward = float(reply)
        elif not answer.has_ended or len(self.turns) == self.rounds.max_turns:
            self.reward = 0.0
        else:
            self._reply(reply)
            if len(self.prompt_ids) + len(self.tokens) + self.rounds.max_completion_length > self.max_length:
                self.reward = 0.0

    def _reply(self, reply: Any) -> None:
        if not isinstance(reply, list) or not reply or not all(map(_is_message, reply)):
            raise self._mistake(
                f"step returned {reply!r:.100}, neither a number nor messages, each with a role that is not assistant"
                " and a text as content"
            )
        try:
            # After an answer, which may have called a tool.
            answer = {"role": "assistant", "content": MARK}
            _, *following = read_of_environment([answer, *copy.deepcopy(reply)], "answer and reply")
        except BadRow as bad:
            raise self._mistake(f"step: {bad}") from None
        special = [token for token in self.tokenizer.all_special_tokens if token in str(following)]
        if special:
            raise self._mistake(f"step returned {special[0]!r}, which the tokenizer reads as a special token")
        self.messages += following
        self._shown += [{"role": "assistant", "content": MARK}, *following]
        text = self._render(self._shown)
        if not text.startswith(self._text + MARK):
            raise RecipeError(
                "data.chat_template: writes earlier turns of a conversation otherwise once another follows, and what"
                " was sampled would not be what is trained; name another, such as recipes/chat_templates/chatml.jinja"
            )
        ids = self.tokenizer(text[len(self._text + MARK) :], add_special_tokens=False)["input_ids"]
        if ids[:1] != self.tokens[-1:]:
            ends = self.tokenizer.convert_ids_to_tokens([*self.tokens[-1:], *ids[:1]])
            raise RecipeError(f"data.chat_template: ends a turn with {ends[-1]!r}, and {ends[0]!r} was sampled there")
        self.tokens, self.mask = self.tokens + ids[1:], self.mask + [0] * (len(ids) - 1)
        self._text = text

    def _render(self, messages: list[Any]) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # of the template, which is a program
            raise self._mistake(f"the chat template refuses the conversation: {first_line(error)}") from None

    def _call(self, function: Callable[[], Any], name: str) -> Any:
        try:
            with time_limit(self.rounds.environment_seconds), no_exit():
                return function()
        except OutOfTime:
            seconds = f"{self.rounds.environment_seconds:g}"
            raise self._mistake(f"{name} took longer than rounds.environment_seconds {seconds}") from None
        except Exception as error:  # any of a user's class
            raise self._mistake(f"{name}: {type(error).__name__}: {error}") from error

    def _mistake(self, what: str) -> RecipeError:
        lines = [f"environment {self.rounds.environment}: {what}", f"  row: {self.prompt.place}"]
        return RecipeError([*lines, *(f"  after: {message}"[:200] for message in self.messages[-1:])])


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or role_of(value) == "assistant":
        return False
    return all(isinstance(value.get(key), str) for key in ("role", "content"))


def converse(
    sampler: Sampler, prompts: Sequence[Prompt], ids: Sequence[list[int]], recipe: Recipe, seed: int
) -> list[list[Conversation]]:
    """`num_generations` conversations for each prompt: all their first turns are sampled, then all second ones."""
    groups = []
    for prompt, of_prompt, answers in zip(prompts, ids, sampler.answers([*ids], seed), strict=True):
        group = [Conversation(prompt, of_prompt, recipe, sampler.tokenizer) for _ in answers]
        for conversation, answer in zip(group, answers, strict=True):
            conversation.take(answer)
        groups.append(group)
    turn = 1
    while going_on := [
        (place, conversation)
        for place, group in enumerate(groups)
        for conversation in group
        if conversation.reward is None
    ]:
        turn += 1
        say(f"  turn {turn} of {len(going_on):,} conversations", flush=True)
        of_turn = int(hashlib.sha256(f"{seed} {turn}".encode()).hexdigest()[:12], 16)
        asked = [conversation.prompt_ids + conversation.tokens for _, conversation in going_on]
        answers = sampler.answers(asked, of_turn, 1, [place for place, _ in going_on])
        for (_, conversation), (answer,) in zip(going_on, answers, strict=True):
            conversation.take(answer)
    return groups
