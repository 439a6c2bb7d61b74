"""Continues held-out prompts during training, under every strategy: for run.sample_every_steps, and for metrics."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from cookbook.config.metric_functions import Metric
from cookbook.config.objectives.forward import next_tokens
from cookbook.system.files import RecipeError
from cookbook.training.data import batches
from cookbook.training.data.prompts import awaiting, beginnings, endings
from cookbook.training.data.tokens import TokenSet
from cookbook.training.models import tokenizer_files

if TYPE_CHECKING:
    from cookbook.run.stages import Run

DEFAULT_TOKENS = 64


def continuations(run: "Run", stop_reason: Callable[[], str | None]) -> list[dict[str, Any]] | str:
    """The lines of samples.jsonl after this step, or the reason to stop. Every rank must call."""
    tokenizer = run.inputs.tokenizer
    prompts = beginnings(next(iter(run.inputs.data.eval.values())))
    rows = _continue_prompts(run, prompts, run.recipe.run.sample_tokens or DEFAULT_TOKENS, stop_reason)
    if isinstance(rows, str):
        return rows
    return [
        {
            "step": run.progress.step,
            "sample": i,
            "prompt": tokenizer.decode(prompt),
            "completion": tokenizer.decode(row[len(prompt) :], skip_special_tokens=True),
            "num_tokens": len(row) - len(prompt),
        }
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]


def values_of_answers(
    run: "Run", metrics: Sequence[Metric], tokens: TokenSet, stop_reason: Callable[[], str | None]
) -> dict[str, float] | str:
    """The metrics of sampled answers on a set, or the reason to stop. Every rank must call.

    Raises:
        RecipeError: a metric returns something else than numbers.
    """
    if not metrics:
        return {}
    tokenizer, most = run.inputs.tokenizer, max(metric.num_answers for metric in metrics)
    prompts, references = beginnings(tokens, most), endings(tokens, most)
    rows = _continue_prompts(run, prompts, max(metric.num_tokens for metric in metrics), stop_reason)
    if isinstance(rows, str):
        return rows
    values = {}
    for metric in metrics:
        sums = [0.0, 0.0]
        for prompt, row, reference in list(zip(prompts, rows, references, strict=True))[: metric.num_answers]:
            # Of the most probable tokens fewer are a beginning of more.
            answer = row[len(prompt) :][: metric.num_tokens]
            texts = (tokenizer.decode(part, skip_special_tokens=True) for part in (answer, reference))
            returned = metric.call(tokenizer.decode(prompt), *texts)
            pair = returned if isinstance(returned, tuple) else (returned, 1)
            if len(pair) != 2 or not all(isinstance(number, int | float) for number in pair):
                what = f"run.metrics: {metric.name} returned {returned!r} for an answer"
                raise RecipeError(f"{what}; return a number, or two, of whose sums it is the quotient")
            sums = [total + number for total, number in zip(sums, pair, strict=True)]
        values[metric.name] = sums[0] / sums[1] if sums[1] else float("nan")
    # All ranks have the same answers, but a plugin may still count them otherwise in each, and a rank that then stopped
    # early would leave the others waiting.
    return json.loads(run.engine.collectives.broadcast_text(json.dumps(values)))


def _continue_prompts(
    run: "Run", prompts: Sequence[Sequence[int]], most: int, stop_reason: Callable[[], str | None]
) -> list[list[int]] | str:
    """Prompts with what the model adds to them, or the reason to stop. Every rank must call.

    A continuation ends with the token that ends a text or a turn, after `most` tokens, or where the sample has
    `data.max_length` of them. One forward for each token, as in an evaluation, and no cache of keys and values, which
    no strategy shards alike.
    """
    tokenizer, max_length = run.inputs.tokenizer, run.recipe.data.max_length
    ends = {tokenizer.eos_token_id, tokenizer_files.end_of_turn(tokenizer)}
    lengths = [min(len(prompt) + most, max_length) for prompt in prompts]
    rows = [list(prompt) for prompt in prompts]

    def is_open(i: int) -> bool:
        return len(rows[i]) < lengths[i] and (len(rows[i]) == len(prompts[i]) or rows[i][-1] not in ends)

    # Compiled layers would be compiled again for these shapes, which changes the last bits of the steps that follow.
    eager = torch.compiler.set_stance("force_eager") if run.recipe.model.compile else nullcontext()
    with eager:
        while any(map(is_open, range(len(rows)))):
            if reason := stop_reason():
                return reason
            tokens = awaiting(rows, lengths, tokenizer.pad_token_id)
            next_ids = run.engine.collect(
                next_tokens, batches.indexed_batches(tokens, run.layout), len(rows), what="sampling"
            )
            for i, token in enumerate(next_ids.astype(int).tolist()):
                if is_open(i):
                    rows[i].append(token)
    return rows
