"""The memory of sampling, by the model's own code on fake tensors."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel

from cookbook.config.recipe import Recipe
from cookbook.facts.score_head import empty_model
from cookbook.forecast.ledger import Ledger
from cookbook.forecast.sampler_sizes import SamplerMemory, answers_at_a_time
from cookbook.forecast.skeleton import new_rows
from cookbook.forecast.trace import fake_in_place, with_attention
from cookbook.training.adapters.insertion import inject

TOKENS_OF_PROOF = 8192
"""Tokens of a forward that proves what was sampled: TOKENS_AT_A_TIME of cookbook/commands/rounds/sampling.py."""
COPIES_OF_SCORES = 4
"""Float32 numbers of a next token's distribution that live at a time: transformers' copy of the logits, the recipe's
distribution, its softmax, and a step to one of these."""


def trace_sampler(config: PreTrainedConfig, recipe: Recipe) -> SamplerMemory:
    """The memory of sampling a recipe's rounds.

    Raises:
        Exception: whatever a model's code raises without data.
    """
    rounds = recipe.rounds
    assert rounds is not None
    # On a GPU, what is trained in bf16 is sampled in it, and all else in float32.
    dtype = torch.bfloat16 if recipe.compute_precision == "bf16" else torch.float32
    model, adapter = _model(config, recipe, dtype)
    fake = FakeTensorMode()
    fake_in_place(model, fake, is_light=True)
    known = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    weights = sum(tensor.nbytes for tensor in known.values())
    answers, length = answers_at_a_time(rounds), recipe.data.max_length
    prompt = max(1, length - rounds.max_completion_length)
    scores = answers * config.get_text_config().vocab_size * 4 * COPIES_OF_SCORES
    with fake, torch.no_grad(), _quiet():
        first, kept, _ = _forward(model, known, answers, prompt)
        last, cache, launches = _forward(model, known, answers, length - 1, then_one_more=True)
        proof, *_ = _forward(model, known, max(1, TOKENS_OF_PROOF // length), length, is_proof=True)
    return SamplerMemory(
        answers=answers,
        length=length,
        weights=weights - adapter,
        adapter=adapter,
        cache=cache,
        prompt_cache=kept,
        sampling=max(first, kept + scores, last, cache + scores),
        proof=proof,
        launches=launches,
    )


def _model(config: PreTrainedConfig, recipe: Recipe, dtype: torch.dtype) -> tuple[PreTrainedModel, int]:
    """The model that samples, on the meta device, and the bytes of its adapter."""
    config, before = with_attention(config, "sdpa"), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = empty_model(config)
            size = sum(parameter.nbytes for parameter in model.parameters())
            if recipe.adapter is not None:
                inject(model, recipe.adapter, new_rows(config, recipe))
                for parameter in model.parameters():
                    parameter.data = parameter.data.to(dtype)
    finally:
        torch.set_default_dtype(before)
    return model.eval(), sum(parameter.nbytes for parameter in model.parameters()) - size


def _forward(
    model: PreTrainedModel,
    known: dict[int, torch.Tensor],
    rows: int,
    length: int,
    *,
    then_one_more: bool = False,
    is_proof: bool = False,
) -> tuple[int, int, int]:
    """The peak of a forward beside the weights, what it leaves in its cache, and its operations.

    Args:
        then_one_more: measure the forward of a further token of each row, after this one.
        is_proof: keep the logits of all tokens, and compute the log-probabilities of one row.
    """
    ledger, before = Ledger(known.values()), 0
    ids = torch.zeros(rows, length, dtype=torch.long)
    mask = None if is_proof else torch.ones(rows, length, dtype=torch.long)  # of prompts of several lengths
    with ledger:
        out = model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=0 if is_proof else 1)
        if is_proof:
            out.logits[0].float().log_softmax(-1)
        cache = out.past_key_values
        del out, mask
        if then_one_more:
            ledger.peak, before = ledger.live, ledger.kernels
            mask = torch.ones(rows, length + 1, dtype=torch.long)
            model(input_ids=ids[:, :1], past_key_values=cache, attention_mask=mask, use_cache=True, logits_to_keep=1)
        peak, held, launches = ledger.peak, ledger.live, ledger.kernels - before
        del cache
    return peak, held - ledger.live, launches


@contextmanager
def _quiet() -> Iterator[None]:
    """No collection of garbage, a tenth of the time, and no tracebacks of what fake tensors do not support."""
    log, collects = logging.getLogger("torch._subclasses.fake_tensor"), gc.isenabled()
    level = log.level
    gc.disable()
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
        if collects:
            gc.enable()
