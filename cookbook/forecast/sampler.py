"""The sampler of rounds: the GPUs that have room for it, and the seconds that a round takes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedConfig

from cookbook.config.outside_words import TRANSFORMERS, addresses, has_adapters, is_address
from cookbook.config.recipe import Recipe
from cookbook.config.sections import RoundsSection
from cookbook.forecast.costs.flops import ModelSizes
from cookbook.forecast.sampler_sizes import SamplerMemory
from cookbook.forecast.sampling_time import SamplingTime, sampling_time
from cookbook.forecast.vllm_options import VllmOptions, read_options
from cookbook.system.hardware import GIB, GPUS, Machines, in_gib


@dataclass(frozen=True, kw_only=True)
class SamplerForecast:
    """The sampler of a recipe with rounds, beside its trainer."""

    words: str
    fits: bool
    """False if it surely has too little memory."""
    memory: SamplerMemory | None
    """None: it cannot be forecast, and `words` says why."""
    time: SamplingTime | None = None
    """Seconds of a round's sampling."""
    no_time: str | None = None
    """The reason why these are not known."""


def forecast_sampler(
    config: PreTrainedConfig,
    recipe: Recipe,
    sizes: ModelSizes,
    machines: Machines,
    trainer_bytes: int | None,
    measure: Callable[[PreTrainedConfig, Recipe], SamplerMemory] | None = None,
) -> SamplerForecast | None:
    """The memory and the time of what samples; None for a recipe without rounds.

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
        words = f"{rounds.sampler}: what it needs is not known ({why})"
        return SamplerForecast(words=words, fits=True, memory=None, no_time="what a step reads is not known")
    at_once: int | None
    if rounds.sampler == TRANSFORMERS:
        words, fits = _of_transformers(memory, rounds, machines, trainer_bytes)
        at_once = memory.answers
    elif is_address(rounds.sampler):
        words, fits, at_once = _of_servers(memory, rounds), True, None
    else:
        words, fits, at_once = _of_vllm(memory, rounds, machines, trainer_bytes)
    time, no_time = (
        sampling_time(recipe, memory, sizes, machines, at_once) if fits else (None, "the sampler has no room")
    )
    words = f"{words}; {_bound(memory, rounds)}"
    return SamplerForecast(words=words, fits=fits, memory=memory, time=time, no_time=no_time)


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


def _needs(memory: SamplerMemory, rounds: RoundsSection) -> tuple[int, float, str]:
    """Bytes of weights and of an answer, and both in words. An adapter is apart where vLLM loads one, else part of the
    weights."""
    is_apart = is_address(rounds.sampler) or has_adapters(rounds.sampler)
    weights, each = memory.weights + memory.adapter * is_apart, memory.cache / memory.answers
    words = f"{in_gib(weights)} GiB of weights, and {each / 2**20:,.0f} MiB of keys and values for an answer"
    return weights, each, words


def _of_servers(memory: SamplerMemory, rounds: RoundsSection) -> str:
    """Servers, whose GPUs nobody named: what they need, and the smallest GPUs that have it."""
    weights, each, needs = _needs(memory, rounds)
    servers = len(addresses(rounds.sampler))
    where = "the server" if servers == 1 else "each server"
    together = math.ceil(rounds.generation_batch_size / servers)
    least, for_all = _least_gpus(weights + each), _least_gpus(weights + together * each)
    cards = (
        f"at least {least}" if least == for_all else f"at least {least}, and {for_all} to sample {together:,} at a time"
    )
    return f"{where} at {rounds.sampler} needs {needs}: {cards}, less what vLLM itself takes"


def _least_gpus(needed: float) -> str:
    """The fewest and smallest GPUs, a power of two, whose share of vLLM has so many bytes."""
    options, count = VllmOptions(), 1
    sizes = sorted({(gpu.sold_gb, min(g.usable_gib for g in GPUS if g.sold_gb == gpu.sold_gb)) for gpu in GPUS})
    while True:
        for sold_gb, usable in sizes:
            if options.share * usable * GIB * count >= needed:
                return f"{count}x{sold_gb}GB"
        count *= 2


def _of_vllm(
    memory: SamplerMemory, rounds: RoundsSection, machines: Machines, trainer_bytes: int | None
) -> tuple[str, bool, int | None]:
    """A vLLM that is started on the first GPUs of the trainer's machine; also the answers that a copy of the model has
    room for."""
    weights, each, needs = _needs(memory, rounds)
    options = read_options(rounds.sampler)
    if machines.usable_gib is None:
        return f"vllm: {needs}; a CPU's memory is shared, so nothing is judged", True, None
    on = (
        f"{options.share:g} of a GPU"
        if options.num_gpus == 1
        else f"{options.share:g} of each of {options.num_gpus} GPUs"
    )
    stays = rounds.starts_one_server or bool(rounds.max_staleness)
    kept = ", and keeps it all while a run trains" if stays else ""
    words = f"vllm, on {on}{kept}: {needs}"
    if options.uncounted:
        words += f", without counting {' and '.join(options.uncounted)}"
    if options.num_gpus > machines.gpus_each:
        return f"{words}: does not fit, a machine of these has {machines.gpus_each}", False, None
    usable = machines.usable_gib * GIB
    if stays and trainer_bytes is not None and options.share * usable > usable - trainer_bytes:
        left = max(0.0, usable - trainer_bytes)
        words += f": does not fit beside the run, which leaves {in_gib(left)} of {in_gib(usable)} GiB"
        if left * options.copies_over >= weights + each:
            return f"{words}; write --gpu-memory-utilization {math.floor(100 * left / usable) / 100:g}", False, None
        return f"{words}; take a larger GPU, or a server with GPUs of its own", False, None
    room = options.share * usable * options.copies_over - weights
    if options.cache_bytes is not None:
        room = min(room, options.cache_bytes * options.copies_over)
    if room < each and not options.uncounted:
        return f"{words}: does not fit", False, None
    at_once = max(1, math.floor(room / each))
    count = at_once * options.copies
    return f"{words}: at most {count:,} answers at a time, less what vLLM itself takes", True, at_once


def sampler_memory(config: PreTrainedConfig, recipe: Recipe) -> SamplerMemory:
    """The memory that the model's own code takes, see `cookbook.forecast.sampler_trace`."""
    from cookbook.forecast.sampler_trace import trace_sampler

    return trace_sampler(config, recipe)
