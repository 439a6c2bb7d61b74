"""Memory of what samples the answers of rounds: weights, keys and values, and what a forward makes beside them."""

import gc
import logging
import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel

from cookbook.config.outside_words import TRANSFORMERS, addresses, is_address
from cookbook.config.recipe import Recipe
from cookbook.config.sections import RoundsSection
from cookbook.facts.score_head import empty_model
from cookbook.forecast.ledger import Ledger
from cookbook.forecast.skeleton import new_rows
from cookbook.forecast.trace import fake_in_place, with_attention
from cookbook.system.hardware import GIB, Machines, in_gib
from cookbook.training.adapters.insertion import inject

TOKENS_OF_PROOF = 8192
"""Tokens of a forward that proves what was sampled: TOKENS_AT_A_TIME of cookbook/commands/rounds/sampling.py."""
COPIES_OF_SCORES = 4
"""Float32 numbers of a next token's distribution that live at a time: transformers' copy of the logits, the recipe's
distribution, its softmax, and a step to one of these."""
SHARE_OF_VLLM = 0.92
"""vLLM's default of --gpu-memory-utilization (0.32.0, config/cache.py)."""


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
    sampling: int
    """The most that a forward of all answers holds beside the weights, their cache included."""
    proof: int
    """The same of the forward that proves what was sampled, of a few answers at a time."""

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


@dataclass(frozen=True, kw_only=True)
class SamplerForecast:
    """The sampler of a recipe with rounds, beside its trainer."""

    words: str
    fits: bool
    """False if it surely has too little memory."""
    memory: SamplerMemory | None
    """None: it cannot be forecast, and `words` says why."""


def answers_at_a_time(rounds: RoundsSection) -> int:
    """Answers that transformers' generate makes together: those to whole prompts."""
    prompts = max(1, rounds.generation_batch_size // rounds.num_generations)
    return min(prompts, rounds.prompts_per_round) * rounds.num_generations


def forecast_sampler(
    config: PreTrainedConfig,
    recipe: Recipe,
    machines: Machines,
    trainer_bytes: int | None,
    measure: Callable[[PreTrainedConfig, Recipe], SamplerMemory] | None = None,
) -> SamplerForecast | None:
    """The memory of what samples; None for a recipe without rounds.

    Args:
        trainer_bytes: what the run needs on the GPU that samples too, where both run at a time.
        measure: in the place of `sampler_memory`, for one that remembers.
    """
    rounds = recipe.rounds
    if rounds is None or rounds.round is not None:
        return None
    try:
        memory = (measure or sampler_memory)(config, recipe)
    except Exception as error:  # a model's code may fail in any way without data
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
        return SamplerForecast(words=f"{rounds.sampler}: what it needs is not known ({why})", fits=True, memory=None)
    if rounds.sampler == TRANSFORMERS:
        words, fits = _of_transformers(memory, rounds, machines, trainer_bytes)
    else:
        words, fits = _of_vllm(memory, rounds, machines)
    return SamplerForecast(words=f"{words}; {_bound(memory, rounds)}", fits=fits, memory=memory)


def _bound(memory: SamplerMemory, rounds: RoundsSection) -> str:
    each = f"{memory.length:,} tokens, data.max_length, counted for each answer with its prompt"
    if rounds.environment is None:
        return each
    return f"{each} and all of its turns, of which there are up to {rounds.max_turns}"


def _of_transformers(
    memory: SamplerMemory, rounds: RoundsSection, machines: Machines, trainer_bytes: int | None
) -> tuple[str, bool]:
    adapter = f" + {in_gib(memory.adapter)} adapter" if memory.adapter else ""
    parts = f"{in_gib(memory.weights)} weights{adapter} + {in_gib(memory.cache)} keys and values of {memory.answers}"
    more = f" answers + {in_gib(memory.sampling - memory.cache)} in a forward"
    proof = f", or {in_gib(memory.proof)} to prove them" if memory.proof > memory.sampling else ""
    words = f"transformers, {in_gib(memory.total)} GiB ({parts}{more}{proof})"
    if machines.usable_gib is None:
        return f"{words}; a CPU's memory is shared, so nothing is judged", True
    room, when = machines.usable_gib * GIB, "before each run begins"
    if rounds.max_staleness and trainer_bytes is not None:
        room, when = room - trainer_bytes, f"beside the run, which leaves {in_gib(max(0, room - trainer_bytes))} of it"
    words += f" of {in_gib(machines.usable_gib * GIB)} GiB of the first GPU, {when}"
    if memory.total <= room:
        return words, True
    most = memory.most_answers(room) // rounds.num_generations * rounds.num_generations
    advice = f"write rounds.generation_batch_size: {most}" if most else "take a larger GPU"
    return f"{words}: does not fit; {advice}", False


def _of_vllm(memory: SamplerMemory, rounds: RoundsSection, machines: Machines) -> tuple[str, bool]:
    weights, each = memory.weights + memory.adapter, memory.cache / memory.answers
    needs = f"{in_gib(weights)} GiB of weights, and {each / 2**20:,.0f} MiB of keys and values for an answer"
    if is_address(rounds.sampler):
        where = "the server" if len(addresses(rounds.sampler)) == 1 else "each server"
        return f"{where} at {rounds.sampler} needs {needs}", True
    words = shlex.split(rounds.sampler.replace("=", " "))
    options = {word.replace("_", "-"): following for word, following in zip(words, [*words[1:], ""], strict=True)}
    gpus = int(options.get("--tensor-parallel-size", 1))
    share = float(options.get("--gpu-memory-utilization", SHARE_OF_VLLM))
    if machines.usable_gib is None:
        return f"vllm: {needs}; a CPU's memory is shared, so nothing is judged", True
    room = share * machines.usable_gib * GIB - weights / gpus
    on = f"{share:g} of a GPU" if gpus == 1 else f"{share:g} of each of {gpus} GPUs"
    if room < each / gpus:
        return f"vllm, on {on}: {needs}: does not fit", False
    count = math.floor(room * gpus / each)
    kept = ", and keeps it all while a run trains" if rounds.starts_one_server else ""
    return f"vllm, on {on}{kept}: {needs}: at most {count:,} answers at a time, less what vLLM itself takes", True


def sampler_memory(config: PreTrainedConfig, recipe: Recipe) -> SamplerMemory:
    """The memory of sampling a recipe's rounds, by the model's own code on fake tensors.

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
        first, kept = _forward(model, known, answers, prompt)
        last, cache = _forward(model, known, answers, length - 1, then_one_more=True)
        proof, _ = _forward(model, known, max(1, TOKENS_OF_PROOF // length), length, is_proof=True)
    return SamplerMemory(
        answers=answers,
        length=length,
        weights=weights - adapter,
        adapter=adapter,
        cache=cache,
        sampling=max(first, kept + scores, last, cache + scores),
        proof=proof,
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
) -> tuple[int, int]:
    """The peak of a forward beside the weights, and what it leaves in its cache.

    Args:
        then_one_more: measure the forward of a further token of each row, after this one.
        is_proof: keep the logits of all tokens, and compute the log-probabilities of one row.
    """
    ledger = Ledger(known.values())
    ids = torch.zeros(rows, length, dtype=torch.long)
    mask = None if is_proof else torch.ones(rows, length, dtype=torch.long)  # of prompts of several lengths
    with ledger:
        out = model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=0 if is_proof else 1)
        if is_proof:
            out.logits[0].float().log_softmax(-1)
        cache = out.past_key_values
        del out, mask
        if then_one_more:
            ledger.peak = ledger.live
            mask = torch.ones(rows, length + 1, dtype=torch.long)
            model(input_ids=ids[:, :1], past_key_values=cache, attention_mask=mask, use_cache=True, logits_to_keep=1)
        peak, before = ledger.peak, ledger.live
        del cache
    return peak, before - ledger.live


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
