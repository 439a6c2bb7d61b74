"""Memory of what samples the answers of rounds: weights, keys and values, and what a forward makes beside them."""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedConfig

from cookbook.config.outside_words import TRANSFORMERS, addresses, is_address
from cookbook.config.recipe import Recipe
from cookbook.config.sections import RoundsSection
from cookbook.forecast.sampler_sizes import SamplerMemory
from cookbook.system.hardware import GIB, Machines, in_gib

SHARE_OF_VLLM = 0.92
"""vLLM's default of --gpu-memory-utilization (0.32.0, config/cache.py)."""


@dataclass(frozen=True, kw_only=True)
class SamplerForecast:
    """The sampler of a recipe with rounds, beside its trainer."""

    words: str
    fits: bool
    """False if it surely has too little memory."""
    memory: SamplerMemory | None
    """None: it cannot be forecast, and `words` says why."""


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
    """The memory that the model's own code takes, see `cookbook.forecast.sampler_trace`."""
    from cookbook.forecast.sampler_trace import trace_sampler

    return trace_sampler(config, recipe)
