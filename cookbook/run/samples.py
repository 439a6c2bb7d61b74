"""Continues held-out prompts during training (run.sample_every_steps), under every strategy."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from cookbook.config.objectives.forward import next_tokens
from cookbook.training.data import batches
from cookbook.training.data.prompts import awaiting, beginnings
from cookbook.training.models import tokenizer_files

if TYPE_CHECKING:
    from cookbook.run.stages import Run

DEFAULT_TOKENS = 64


def continuations(run: "Run", stop_reason: Callable[[], str | None]) -> list[dict[str, Any]] | str:
    """The lines of samples.jsonl after this step, or the reason to stop. Every rank must call.

    A continuation ends with the token that ends a text or a turn, with `run.sample_tokens`, or where the sample has
    `data.max_length` tokens. One forward for each token, as in an evaluation, and no cache of keys and values, which no
    strategy shards alike.
    """
    inputs, data = run.inputs, run.recipe.data
    tokenizer = inputs.tokenizer
    ends = {tokenizer.eos_token_id, tokenizer_files.end_of_turn(tokenizer)}
    prompts = beginnings(next(iter(inputs.data.eval.values())))
    most = run.recipe.run.sample_tokens or DEFAULT_TOKENS
    lengths = [min(len(prompt) + most, data.max_length) for prompt in prompts]
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
