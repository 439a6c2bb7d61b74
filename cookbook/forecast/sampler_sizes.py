"""The bytes of what samples the answers of rounds."""

import math
from dataclasses import dataclass

from cookbook.config.sections import RoundsSection


@dataclass(frozen=True, kw_only=True)
class SamplerMemory:
    """Bytes of a process that samples by transformers' generate."""

    answers: int
    """Answers at a time."""
    length: int
    """Tokens of an answer with its prompt, at most: a conversation of any number of turns has no more."""
    weights: int
    adapter: int
    cache: int
    """Keys and values, or states, of all answers at that length."""
    prompt_cache: int
    """Keys and values, or states, of all prompts, before the first token of an answer."""
    sampling: int
    """The most that a forward of all answers holds beside the weights, their cache included."""
    proof: int
    """The most that the forward that proves what was sampled holds, of a few answers at a time."""
    launches: int
    """Operations of a forward of one further token of each answer."""

    @property
    def peak(self) -> int:
        return max(self.sampling, self.proof)

    @property
    def total(self) -> int:
        return self.weights + self.adapter + self.peak

    def most_answers(self, room: float) -> int:
        """The answers at a time that have room: what a forward of all of them holds grows with their number."""
        left = room - self.weights - self.adapter
        return math.floor(self.answers * left / self.sampling) if self.proof <= left else 0


def answers_at_a_time(rounds: RoundsSection) -> int:
    """Answers that transformers' generate makes together: those to whole prompts."""
    prompts = max(1, rounds.generation_batch_size // rounds.num_generations)
    return min(prompts, rounds.prompts_per_round) * rounds.num_generations
