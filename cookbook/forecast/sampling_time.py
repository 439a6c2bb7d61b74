"""Seconds of sampling a round's answers: bytes and FLOPs of each token's step over the rates of published runs.

A step adds a token to each answer in flight. It reads the weights once, of a mixture the experts that any of the
answers passes through, and the keys and values of all answers; it multiplies each answer with the weights. As in
`step_time`, a range is from the best published rates to the worst.
"""

import math
from dataclasses import dataclass

from cookbook.config.outside_words import TRANSFORMERS, addresses, is_address
from cookbook.config.recipe import Recipe
from cookbook.forecast.costs.flops import ModelSizes, attention_flops
from cookbook.forecast.sampler_sizes import SamplerMemory
from cookbook.forecast.step_time import (
    BASE_LATENCY,
    HOP_LATENCY,
    MEMORY_SHARE,
    NVLINK_SHARE,
    PCIE_PEER_SHARE,
    no_forecast,
    share_of_peak,
)
from cookbook.forecast.vllm_options import read_options
from cookbook.system.hardware import Gpu, Machines

Ends = tuple[float, float]
"""Seconds, at least and at most."""


@dataclass(frozen=True, kw_only=True)
class EngineRates:
    """Rates of a program that samples, the best and the worst."""

    memory: Ends
    """Share of a GPU's memory bandwidth at which a step reads."""
    step: Ends
    """Seconds of a step beside kernels: scheduling and launches."""
    answer: Ends
    """Seconds of a step for each answer in flight beside them: sampling, and what a program keeps of each."""


# Fitted to 191 published rows, docs/plan_accuracy.md, Seconds of sampling; so is the fast end of the launches below.
VLLM_RATES = EngineRates(memory=(0.95, 0.80), step=(1e-3, 4e-3), answer=(10e-6, 100e-6))
LAUNCH_OF_GENERATE = (9e-6, 53e-6)
"""Host seconds for each operation of transformers' generate, which launches one after another."""
PASSES_OF_CACHE = 3
"""Times that a step of generate moves all keys and values: it copies them behind a new one (transformers 5.23,
cache_utils.py, DynamicLayer.update), and attention reads them."""


@dataclass(frozen=True, kw_only=True)
class RoundWork:
    """The answers of a round, and what a step of them reads and computes."""

    answers: int
    prompts: int
    """Different ones."""
    completion: int
    """Tokens of an answer, at most."""
    weights: float
    """Bytes that each step reads, without experts."""
    experts: float
    """Bytes of the experts of all layers."""
    chosen: float
    """Share of the experts that a token passes through."""
    cache: float
    """Bytes of an answer's keys and values, or states, on average over its tokens."""
    token_flops: float
    prompt_flops: float
    length_flops: float
    """FLOPs of a whole answer with its prompt, in one forward."""
    layers: int
    hidden: int
    launches: int
    """Operations that a step of the model's own code launches."""

    def read(self, at_once: float) -> float:
        """Bytes of weights that a step of so many answers reads, if tokens choose their experts independently."""
        return self.weights + self.experts * (1 - (1 - self.chosen) ** at_once)


@dataclass(frozen=True, kw_only=True)
class SamplingTime:
    """Seconds of a round without its training, at least and at most, if all answers are as long as they may be."""

    sampling: Ends
    proof: Ends
    """The forward that proves what was sampled, on the trainer's first GPU."""
    answers: int
    completion: int
    """Tokens of an answer."""
    at_once: int
    """Answers in flight at a time."""
    by: str
    """The GPUs that sample, in words."""
    has_own_gpus: bool
    """The GPUs that sample are not those that train."""
    beside: bool
    """A later round is sampled while one trains."""

    def of_round(self, training: Ends) -> Ends:
        """Seconds of a round whose run trains for so long. Where both share a GPU, the least is that of the longer."""
        if not self.beside:
            low, high = (sum(parts) for parts in zip(self.sampling, self.proof, training, strict=True))
            return low, high
        low = max(self.sampling[0] + self.proof[0], training[0])
        if not self.has_own_gpus:
            return low, self.sampling[1] + self.proof[1] + training[1]
        return low, max(self.sampling[1], training[1]) + self.proof[1]


def sampling_time(
    recipe: Recipe, memory: SamplerMemory, sizes: ModelSizes, machines: Machines, room: int | None
) -> tuple[SamplingTime | None, str | None]:
    """The time of a round's sampling, or the reason why it is not known.

    Args:
        room: answers at a time that a copy of the model has room for; None: not known.
    """
    rounds, gpu = recipe.rounds, machines.gpu
    assert rounds is not None
    is_vllm = rounds.sampler != TRANSFORMERS
    options = read_options("" if is_address(rounds.sampler) else rounds.sampler)
    if (why := no_forecast(machines, recipe.mixed_precision)) is not None:
        return None, why
    assert gpu is not None
    if recipe.compute_precision != "bf16":
        return None, "it samples in float32, whose products have no forecast of time"
    if rounds.environment is not None:
        return None, "how long an environment takes is not known"
    if is_vllm and gpu.is_amd:
        return None, f"no published time of vLLM on a {gpu.name} was fitted"
    if options.untimed:
        return None, f"no published time was fitted with {' and '.join(options.untimed)}"
    if options.stages > 1:
        return None, "no published time was fitted with --pipeline-parallel-size"
    work = round_work(
        memory,
        sizes,
        prompts=rounds.prompts_per_round,
        generations=rounds.num_generations,
        completion=rounds.max_completion_length,
    )
    servers = len(addresses(rounds.sampler)) or options.copies
    limits = [math.ceil(rounds.generation_batch_size / servers), room, options.most_answers]
    at_once = min(limit for limit in limits if limit is not None)
    by = f"the first {gpu.name}"
    if is_address(rounds.sampler):
        by = f"a server with one {gpu.name}" if servers == 1 else f"{servers} servers with one {gpu.name} each"
    elif options.num_gpus > 1:
        by = f"{options.num_gpus} {gpu.name}"
    if is_vllm:
        sampling = seconds_of_vllm(work, gpu, at_once, gpus=options.copies_over, servers=servers)
    else:
        sampling = seconds_of_generate(work, gpu, at_once)
    return (
        SamplingTime(
            sampling=sampling,
            proof=seconds_of_proof(work, gpu),
            answers=work.answers,
            completion=work.completion,
            at_once=at_once * servers,
            by=by,
            has_own_gpus=is_address(rounds.sampler),
            beside=rounds.max_staleness > 0,
        ),
        None,
    )


def round_work(
    memory: SamplerMemory, sizes: ModelSizes, *, prompts: int, generations: int, completion: int
) -> RoundWork:
    """The work of a round in bf16 whose answers all have the most tokens that they may have."""
    experts = 2 * sizes.num_of_experts
    looked_up = 0 if sizes.is_tied else 2 * sizes.head  # the embedding, of which a step reads a row each
    prompt = max(1, memory.length - completion)
    return RoundWork(
        answers=prompts * generations,
        prompts=prompts,
        completion=completion,
        weights=memory.weights + memory.adapter - experts - looked_up,
        experts=experts,
        chosen=sizes.share_routed,
        cache=(memory.prompt_cache + memory.cache) / 2 / memory.answers,
        token_flops=2 * (sizes.num_matrix + sizes.head),
        prompt_flops=prompt * (2 * sizes.num_matrix + attention_flops(sizes, prompt)),
        length_flops=memory.length * (2 * (sizes.num_matrix + sizes.head) + attention_flops(sizes, memory.length)),
        layers=sizes.num_layers,
        hidden=sizes.hidden,
        launches=memory.launches,
    )


def seconds_of_vllm(
    work: RoundWork, gpu: Gpu, at_once: int, *, gpus: int = 1, servers: int = 1, rates: EngineRates | None = None
) -> Ends:
    """The time of a round by vLLM.

    Args:
        at_once: answers in flight in one server.
        gpus: of each server, which share its weights by tensor parallel.
        servers: how many share the prompts.
    """
    mine, rates = math.ceil(work.answers / servers), rates or VLLM_RATES
    flights, rest = divmod(mine, at_once)
    low, high = (
        flights * work.completion * _step_of_vllm(work, gpu, at_once, gpus, end, rates)
        + (work.completion * _step_of_vllm(work, gpu, rest, gpus, end, rates) if rest else 0.0)
        for end in (0, 1)
    )
    # vLLM keeps the keys and values of a prompt that several answers begin with; at the slow end none was kept.
    worst, best = share_of_peak(gpu)
    peak = (gpu.half_flops or math.inf) * gpus
    prompts = math.ceil(work.prompts / servers)
    return low + prompts * work.prompt_flops / (best * peak), high + mine * work.prompt_flops / (worst * peak)


def _step_of_vllm(work: RoundWork, gpu: Gpu, at_once: int, gpus: int, end: int, rates: EngineRates) -> float:
    share = share_of_peak(gpu)[1 - end]
    memory = (work.read(at_once) + at_once * work.cache) / gpus / (gpu.bandwidth * rates.memory[end])
    products = at_once * work.token_flops / gpus / ((gpu.half_flops or math.inf) * share)
    beside = rates.step[end] + at_once * rates.answer[end]
    return max(memory, products) + beside + _messages(work, gpu, at_once, gpus, end)


def _messages(work: RoundWork, gpu: Gpu, at_once: int, gpus: int, end: int) -> float:
    """Two sums of each layer's outputs, around a ring."""
    if gpus == 1:
        return 0.0
    link, rate, shares = "NVLink", gpu.nvlink, NVLINK_SHARE
    if rate is None:
        link, rate, shares = "PCIe", gpu.host_link, PCIE_PEER_SHARE
    size = 2 * (gpus - 1) / gpus * 2 * work.hidden * at_once
    return (
        2
        * work.layers
        * (BASE_LATENCY[end] + 2 * (gpus - 1) * HOP_LATENCY[link][end] + size / (rate * shares[1 - end]))
    )


def seconds_of_generate(work: RoundWork, gpu: Gpu, at_once: int) -> Ends:
    """The time of a round by transformers' generate, which samples batches of whole prompts, one after another."""
    batches, rest = divmod(work.answers, at_once)
    low, high = (
        batches * _batch_of_generate(work, gpu, at_once, end)
        + (_batch_of_generate(work, gpu, rest, end) if rest else 0.0)
        for end in (0, 1)
    )
    return low, high


def _batch_of_generate(work: RoundWork, gpu: Gpu, at_once: int, end: int) -> float:
    """The host launches a step's operations while the GPU works on them; the longer of both is the step."""
    peak = (gpu.half_flops or math.inf) * share_of_peak(gpu)[1 - end]
    moved = work.read(at_once) + PASSES_OF_CACHE * at_once * work.cache
    memory = moved / (gpu.bandwidth * MEMORY_SHARE[1 - end])
    step = max(memory, at_once * work.token_flops / peak, work.launches * LAUNCH_OF_GENERATE[end])
    return work.completion * step + at_once * work.prompt_flops / peak


def seconds_of_proof(work: RoundWork, gpu: Gpu) -> Ends:
    """The time of the forward that proves what was sampled."""
    worst, best = share_of_peak(gpu)
    flops = work.answers * work.length_flops / (gpu.half_flops or math.inf)
    return flops / best, flops / worst
