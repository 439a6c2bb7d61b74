"""Options of `vllm serve` in rounds.sampler that decide its GPUs and its memory."""

import shlex
from dataclasses import dataclass
from itertools import pairwise

SHARE_OF_VLLM = 0.92
"""vLLM's default of --gpu-memory-utilization (0.32.0, config/cache.py)."""
COUNTED = {
    "--data-parallel-size",
    "--enable-lora",
    "--gpu-memory-utilization",
    "--kv-cache-memory-bytes",
    "--max-num-seqs",
    "--pipeline-parallel-size",
    "--tensor-parallel-size",
}
"""Options that the forecast reads, by `read_options` or as whether an adapter is apart from the weights."""
SAME_BYTES = {
    "--async-scheduling",
    "--attention-backend",
    "--block-size",
    "--disable-custom-all-reduce",
    "--disable-log-stats",
    "--enable-chunked-prefill",
    "--enable-expert-parallel",
    "--enable-prefix-caching",
    "--enforce-eager",
    "--max-num-batched-tokens",
    "--swap-space",
}
"""Options that leave weights and keys and values as they are. With any other they may be other than those of the
model's own code, and with these too the time may be another than the published ones."""


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """Values of the options, by vLLM's defaults where they are not written."""

    share: float = SHARE_OF_VLLM
    """Share of each GPU's memory."""
    copies: int = 1
    """Copies of the model, by data parallel."""
    copies_over: int = 1
    """GPUs that share a copy, by tensor and pipeline parallel."""
    stages: int = 1
    """Stages of those."""
    most_answers: int | None = None
    """The most that a copy takes at a time."""
    cache_bytes: float | None = None
    """Bytes of keys and values on a GPU."""
    uncounted: tuple[str, ...] = ()
    """Options with which the memory is not known."""
    untimed: tuple[str, ...] = ()
    """Options with which the time is not known, those among them."""

    @property
    def num_gpus(self) -> int:
        return self.copies * self.copies_over


def read_options(sampler: str) -> VllmOptions:
    """The options of a `rounds.sampler` that starts vLLM; of one that is written twice the last counts, as for vLLM."""
    words = shlex.split(sampler.replace("=", " "))
    given = {word.replace("_", "-"): following for word, following in pairwise([*words, ""]) if word.startswith("--")}

    def number(name: str) -> float | None:
        """None if it is not written, or in a way that vLLM alone reads, as 25G."""
        try:
            return float(given[name])
        except (KeyError, ValueError):
            return None

    stages = int(number("--pipeline-parallel-size") or 1)
    most, bytes_of_cache = number("--max-num-seqs"), "--kv-cache-memory-bytes"
    cache = number(bytes_of_cache)
    untimed = sorted(name for name in given if name not in COUNTED or (name == bytes_of_cache and cache is None))
    return VllmOptions(
        share=number("--gpu-memory-utilization") or SHARE_OF_VLLM,
        copies=int(number("--data-parallel-size") or 1),
        copies_over=int(number("--tensor-parallel-size") or 1) * stages,
        stages=stages,
        most_answers=None if most is None else int(most),
        cache_bytes=cache,
        uncounted=tuple(name for name in untimed if name not in SAME_BYTES),
        untimed=tuple(untimed),
    )
