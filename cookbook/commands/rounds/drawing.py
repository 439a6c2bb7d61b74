"""The distribution that tokens are drawn from: temperature, min-p, top-k and top-p of a recipe. Imports torch."""

import math

import torch
from transformers import LogitsProcessor

from cookbook.config.sections import RoundsSection


def truncate(logits: torch.Tensor, rounds: RoundsSection, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """Logits (N, V) at the recipe's temperature, those that truncation leaves out at -inf. Their softmax is what tokens
    are drawn from: the probabilities of the tokens that are left, divided by the mass that they had.

    In vLLM's order (0.32, v1/sample): temperature, min_p, top_k, then top_p of the mass that is left.

    Args:
        tokens: (N,) tokens that are left in any case, as they were drawn where logits were rounded otherwise.
    """
    logits = logits.float() / rounds.temperature if rounds.temperature != 1 else logits
    kept = logits
    if rounds.min_p > 0:
        kept = kept.masked_fill(kept < kept.amax(-1, keepdim=True) + math.log(rounds.min_p), -torch.inf)
    if 0 < rounds.top_k < kept.shape[-1]:
        kept = kept.masked_fill(kept < kept.topk(rounds.top_k).values[:, -1:], -torch.inf)
    if rounds.top_p < 1:
        ascending, order = kept.sort(descending=False)
        beyond = ascending.softmax(-1).cumsum(-1) <= 1 - rounds.top_p
        beyond[:, -1] = False
        kept = kept.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    if tokens is not None:
        kept = kept.scatter(-1, tokens[:, None], logits.gather(-1, tokens[:, None]))
    return kept


def logps(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(N,): the log-probabilities of tokens (N,), from logits (N, V)."""
    return logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


class Drawing(LogitsProcessor):
    """Lets `generate` draw from the recipe's distribution, and keeps the log-probabilities of the tokens drawn."""

    def __init__(self, rounds: RoundsSection) -> None:
        self.rounds = rounds
        self._before: tuple[torch.Tensor, torch.Tensor] | None = None
        self._drawn: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._note(input_ids[:, -1])
        drawn_from = truncate(scores, self.rounds) if self.rounds.changes_distribution else scores
        self._before = scores, drawn_from
        return drawn_from  # type: ignore[return-value]

    def _note(self, tokens: torch.Tensor) -> None:
        if self._before is None:
            return
        scores, drawn_from = self._before
        model = logps(scores, tokens)
        self._drawn.append(torch.stack([model, logps(drawn_from, tokens) if drawn_from is not scores else model], -1))

    def of(self, sequences: torch.Tensor) -> list[list[list[float]]]:
        """For each sequence and each token that was drawn for it: its log-probability by the model at temperature 1,
        and in the distribution that it was drawn from.

        Args:
            sequences: what `generate` returned.
        """
        self._note(sequences[:, -1])
        return torch.stack(self._drawn, 1).tolist()
