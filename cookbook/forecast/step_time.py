"""The time of a step: its FLOPs, messages and offload traffic over the rates of GPUs and links.

A time is a range: the fast end overlaps everything possible at the best published rates, the slow end overlaps nothing
at the worst.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from cookbook.config.strategy import Strategy
from cookbook.facts.pipeline_stages import num_turns, slowest_share
from cookbook.forecast.activations import CACHE_BYTES, ActivationTrace
from cookbook.forecast.costs.flops import ModelSizes, Precision, Step, work
from cookbook.forecast.costs.traffic import (
    ADAMW_BYTES,
    HostTraffic,
    Transfer,
    checkpoint_traffic,
    host_traffic,
    transfers,
)
from cookbook.system.hardware import DISK_READ, DISK_WRITE, Gpu, Machines

EFFICIENCY = {
    "volta": (0.25, 0.50),
    "turing": (0.25, 0.50),
    "ampere": (0.40, 0.70),
    "ada": (0.35, 0.65),
    "hopper": (0.34, 0.56),
    "blackwell": (0.25, 0.50),
    "blackwell card": (0.35, 0.80),
    "cdna3": (0.20, 0.40),
    "cdna4": (0.20, 0.40),
}
"""Share of the dense peak that matrix products reach in training, with recomputation and half of causal attention.

The ends come from published records. Hopper: torchtitan, Llama-3.1-8B in eager mode (2024-12: 5,762 tokens/s a GPU,
30 %, with messages and pointwise kernels, which count apart below), and llm-foundry, MPT-70B with checkpointing on 64
H100 (1,039 tokens/s, 56 %). Ampere: torchtitan, Llama-3-8B before its fused optimizer (2,627 tokens/s, 43 %), and
fms-fsdp, Llama-2-70B with checkpointing under FSDP1 on 128 A100 (380 tokens/s, 69.5 %). Volta: Megatron-LM (Shoeybi et
al. 2019: 39 TFLOP/s a V100, with room below) and DeepSpeed's BERT (64); Turing is taken like it. Ada: torchtune,
Llama-3.1-8B on an RTX 4090 (1,650 tokens/s, 62 %), with room below. Blackwell: torchtitan on GB200 (21,919 tokens/s,
41 %), with room: of B200 the only record is of limited power. Its cards, GeForce and RTX PRO: the slow end is Ada's;
the fast one was fitted to three runs of Unsloth on an RTX 5090, and a fourth lies inside (docs/plan_accuracy.md, with
what became of fits of the other ends). CDNA 3: torchao's float8 README, Llama-3-8B on 8 MI300X
(5,377 tokens/s, 21 %), with room above; CDNA 4 is taken like it."""

NVLINK_SHARE, PCIE_PEER_SHARE, FABRIC_SHARE = (0.50, 0.82), (0.30, 0.80), (0.50, 0.90)
"""Share of a link's rate that a ring of large messages reaches; assumptions. Without peer access, as on GeForce cards,
messages between GPUs go through host memory."""
BASE_LATENCY = (6.6e-6, 8.4e-6)
"""Seconds of a collective around a ring before its first step, with NCCL's protocols for small and for large messages
(LL, Simple). This and HOP_LATENCY are the numbers by which NCCL itself chooses between algorithms (NVIDIA/nccl,
src/graph/tuning.cc, ncclTunerConstantsDefaults, Ring); for AMD's RCCL the same is assumed, and messages from rank to
rank, which the table does not have, are taken as one step of a ring. Its constants for trees are close to these."""
HOP_LATENCY = {"NVLink": (0.6e-6, 3.4e-6), "PCIe": (1.0e-6, 5.7e-6), "network": (2.7e-6, 14e-6)}
"""Seconds of each step of that ring, or up and down a tree."""
HOST_SHARE = (0.50, 0.85)
"""Share of PCIe's rate that copies from and to pinned host memory reach; an assumption."""
MEMORY_SHARE = (0.60, 0.90)
"""Share of a GPU's memory bandwidth that pointwise kernels reach; an assumption, with which the steps measured on an
H100 lie in their ranges (docs/on_gpu.md)."""

CPU_ADAM = (25e9, 100e9)
"""Bytes/s of an AdamW update on the CPUs of a machine. DeepSpeed's, published: Llama-2-7B in more than 4 s beside 4
A100 (47 GB/s; ZenFlow blog); whole steps of Qwen2.5-3B beside 2 A100 in 2.4 to 3.1 s (at least 28 GB/s; pull request
7474). Widened to half and twice these; the update here is PyTorch's fused one."""
ACTIVATION_BYTES = 4 * 34
"""Per token, layer and hidden unit: a layer saves 34 bytes (Korthikanti et al. 2022, equation 2), written and read in
the forward, as are their gradients in the backward. For layers that were not traced or are compiled; for the slow end
only, as compiled layers move less."""
LOGIT_BYTES = 24
"""Per labelled position and word: written and read in bf16, in float32, and as a gradient."""
LAUNCH = (5e-6, 60e-6)
"""Host seconds per operation in eager mode, from the bare launch to the overhead of modules and autograd in Python.
With enough tokens the host runs ahead of the GPU; with few it limits the step. The slow end is above that of a virtual
machine with an H100, where 30 to 53 microseconds were measured (docs/on_gpu.md). This and ZERO3_HOOK enclose Qwen's
table (its README, "Profiling of Memory and Speed"; one A100, micro-batches of a sample, recomputed): 256 and 512 tokens
take the same time, 5.2 ms per layer and micro-batch with LoRA, 10.9 when all weights are trained under DeepSpeed (stage
not given, assumed to be 3)."""
LAUNCHES = 40
"""Operations in the forward of a layer that was not traced: 34 of Llama, 46 of Qwen3, counted in transformers 5.23;
twice as many in the backward. Adapters on all matrices multiply the forward by 2.4 and the backward by 1.6."""
LAUNCHES_COMPILED = 12
"""Operations in the forward of a compiled layer: products and attention, with a fused kernel between any two; an
assumption."""
ZERO3_HOOK = (1e-4, 5e-4)
"""Host seconds of DeepSpeed's ZeRO-3 hooks, which gather and release the weights of a module, per module and pass."""
ZERO_HOOK = (2e-5, 2e-4)
"""Host seconds of stages 1 and 2 to copy a gradient to its bucket; an assumption."""
ZERO_MODULES = 9
"""Modules with weights in a layer: seven products and two norms."""
ADD_BYTES, NORM_BYTES, CLIP_BYTES = 12, 4, 8
"""A float32 gradient's: added to that of the micro-batches before; read for its norm (training/engine/norm.py); scaled.
"""


@dataclass(frozen=True, kw_only=True)
class Portion:
    """The time of one resource in a step, alone, in seconds."""

    name: str
    low: float
    high: float
    overlaps: bool = True
    """True if it overlaps with the matrix products; the update of the weights does not."""
    is_kernel: bool = False
    """True if it is in the GPU's own queue, one kernel after another."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """The time of a step in seconds."""

    low: float
    high: float
    bottleneck: str
    """Name of the largest part."""
    parts: tuple[Portion, ...]

    def record(self) -> dict[str, Any]:
        """For run.json."""
        parts = [{"name": part.name, "low": part.low, "high": part.high} for part in self.parts]
        return {"low": self.low, "high": self.high, "parts": parts}

    def tokens_per_second(self, num_tokens: float, num_gpus: int) -> tuple[float, float]:
        """Tokens per second and GPU, least and most."""
        return num_tokens / num_gpus / self.high, num_tokens / num_gpus / self.low

    def hours(self, num_steps: float) -> tuple[float, float]:
        """Hours of a run, without start, evaluations and checkpoints."""
        return self.low * num_steps / 3600, self.high * num_steps / 3600

    def price(self, num_steps: float, *, per_gpu_hour: float, num_gpus: int) -> tuple[float, float]:
        """Price of a run, in the currency of `per_gpu_hour`."""
        low, high = self.hours(num_steps)
        return low * per_gpu_hour * num_gpus, high * per_gpu_hour * num_gpus


IF_FUSED = "if fused"
"""Before a speed of programs that fuse kernels, in `plan` and in docs/plan_accuracy.md."""


def tokens_if_fused(time: Range, fused: Range | None, num_tokens: float, num_gpus: int) -> tuple[float, float]:
    """Tokens per second and GPU of a program that fuses kernels, or some of them: from the least with the kernels of
    the model's code to the most with fused ones.

    Args:
        fused: the time with fused kernels; None: not known.
    """
    low, high = time.tokens_per_second(num_tokens, num_gpus)
    return low, high if fused is None else max(high, fused.tokens_per_second(num_tokens, num_gpus)[1])


def kind_of(gpu: Gpu) -> str:
    """Which of `EFFICIENCY` is its: its generation's, but for Blackwell's cards, which have no NVLink."""
    return "blackwell card" if gpu.generation == "blackwell" and gpu.nvlink is None else gpu.generation


def share_of_peak(gpu: Gpu) -> tuple[float, float]:
    """Share of its dense peak that products reach, at worst and at best."""
    return EFFICIENCY[kind_of(gpu)]


def caveat(sizes: ModelSizes) -> str | None:
    """Say what a forecast of time omits of a mixture: of 15 published runs of Qwen3-30B-A3B with grouped products three
    were slower than the range and two faster (docs/plan_accuracy.md).
    """
    if sizes.num_experts == 1:
        return None
    return (
        f"{sizes.num_experts} experts: routing, uneven loads and small products are not in the time; 10 of 15 published"
        " runs lay inside such a range"
    )


def no_forecast(machines: Machines, precision: Precision | Literal["fp8"]) -> str | None:
    """Why there is no forecast of time; None if there is."""
    if machines.gpu is None or machines.no_speed:
        return machines.no_speed
    if precision == "fp8":
        return "mixed_precision fp8: its products were not measured on a GPU: no forecast of time for it"
    if precision == "no":
        return "mixed_precision 'no' multiplies in float32: no forecast of time for it"
    if precision == "bf16" and not machines.gpu.has_bf16:
        return f"a {machines.gpu.name} has no bf16: no forecast of time for it; write mixed_precision: fp16"
    return None


def step_seconds(
    strategy: Strategy,
    sizes: ModelSizes,
    step: Step,
    machines: Machines,
    *,
    num_processes: int | None = None,
    trace: ActivationTrace | None = None,
) -> Range:
    """The time of an optimizer step, if `no_forecast` returns None.

    Args:
        num_processes: default: the strategy's number, else one per GPU.
        trace: a micro-batch of a process in eager mode, with all layers; without it, formulas count its kernels.
    """
    gpu = machines.gpu
    assert gpu is not None and gpu.half_flops is not None and no_forecast(machines, step.precision) is None
    count = num_processes or strategy.num_processes or machines.num_gpus
    gpus_each = min(count, machines.gpus_each)
    messages = transfers(strategy, sizes, step, count, num_local=gpus_each)
    host = host_traffic(strategy, sizes, step, num_processes=count, gpus_each=gpus_each)
    # A process of a pipeline computes its stage of each micro-batch, or waits for the slowest one, and for all at both
    # ends of a step: until the first range of layers of the stages before it has run, and after its last.
    stages, chunks = strategy.pp_size, strategy.pp_chunks
    share = slowest_share(sizes.num_layers, stages, chunks, head_layers=sizes.head_layers)
    waits = num_turns(step.micro_batches, stages, chunks) / (chunks * step.micro_batches) * share * stages
    num_traced = waits / strategy.pp_size * step.micro_batches
    flops = waits * work(sizes, step).total / count
    copied = checkpoint_traffic(strategy, sizes, step, count)
    engine = list(_of_engine(strategy, sizes, step, count, messages))
    moved = _traced_bytes(trace, num_traced) if trace else (0.0, _pointwise_bytes(sizes, step) * waits / count)
    streamed = sum(size for size, kernels, _ in engine if size > CACHE_BYTES * kernels)
    launches = sum(number for *_, number in engine)
    if trace and not (gpu.has_grouped_products and step.precision == "bf16"):
        launches += num_traced * trace.total("looped")
    parts = [
        _over("compute", (flops, flops), gpu.half_flops, share_of_peak(gpu), is_kernel=True),
        # One after another with the products, also those of FSDP2 and DDP.
        _over(
            "GPU memory",
            (moved[0] + streamed, moved[1] + sum(size for size, *_ in engine)),
            gpu.bandwidth,
            MEMORY_SHARE,
            is_kernel=True,
        ),
        _launches(strategy, sizes, step, num_traced, trace, launches),
        *_links(messages, machines, gpu, gpus_each),
        _update(strategy, sizes, count, host, gpu),
        # In both directions at once.
        _over("PCIe to the host", (max(host.down, host.up), host.down + host.up), gpu.host_link, HOST_SHARE),
        # A disk reads and writes in turn.
        Portion(
            name="disk",
            low=host.disk_read / DISK_READ[1] + host.disk_write / DISK_WRITE[1],
            high=host.disk_read / DISK_READ[0] + host.disk_write / DISK_WRITE[0],
            overlaps=False,
        ),
        # One after another with the layers' kernels (transformers 5.23, modeling_utils.py,
        # activation_checkpointing_enable).
        _over("activations to the host", (copied, copied), gpu.host_link, HOST_SHARE, is_kernel=True),
    ]
    return combine(parts)


OF_HOST = "kernel launches"


def combine(parts: Iterable[Portion]) -> Range:
    """The time of all parts. Fast end: the GPU's kernels or the longest part that overlaps with them, then all others.
    Slow end: the sum of all but the launches, or of launches and non-overlapping parts if that is more, as the GPU
    computes while the host launches."""
    kept = tuple(part for part in parts if part.high > 0)
    together = [part.low for part in kept if part.overlaps and not part.is_kernel]
    together.append(sum(part.low for part in kept if part.is_kernel))
    after = [part for part in kept if not part.overlaps]
    on_host = [part.high for part in kept if part.name == OF_HOST]
    return Range(
        low=max(together) + sum(part.low for part in after),
        high=max(
            sum(part.high for part in kept if part.name != OF_HOST),
            sum(on_host) + sum(part.high for part in after),
        ),
        bottleneck=max(kept, key=lambda part: part.low + part.high).name,
        parts=kept,
    )


def _launches(
    strategy: Strategy,
    sizes: ModelSizes,
    step: Step,
    num_micro: float,
    trace: ActivationTrace | None,
    others: float = 0.0,
) -> Portion:
    """The host's work for a step of a process.

    Args:
        num_micro: micro-batches, each with all layers.
        others: kernels of a step that are not in its trace.
    """
    passes = 4 if step.recompute is True else 3  # a backward is two
    adapted = 2 if sizes.num_matrix_trained < sizes.num_matrix else 1
    launches = passes * (LAUNCHES_COMPILED if step.is_compiled else LAUNCHES * adapted) * sizes.num_layers
    hook, times = (0.0, 0.0), 0
    if strategy.zero_stage == 3:
        hook, times = ZERO3_HOOK, (passes - 1) * ZERO_MODULES * adapted
    elif strategy.kind == "zero":
        hook, times = ZERO_HOOK, ZERO_MODULES
    if trace is not None:
        launches = trace.total("kernels")
    # A matrix's norm: rows, a cast, two sums; where it is clipped one more. DeepSpeed's are of flat partitions.
    of_norm = (4, 5) if strategy.kind != "zero" else (0, 0)
    low, high = (
        (num_micro * launches + others + of_norm[end] * len(sizes.trained) / strategy.pp_size) * LAUNCH[end]
        + num_micro * sizes.num_layers * times * hook[end]
        for end in (0, 1)
    )
    return Portion(name=OF_HOST, low=low, high=high)


def _over(name: str, amount: tuple[float, float], rate: float, shares: tuple[float, float], **options: bool) -> Portion:
    """An amount, at least and at most, over a rate of which the worst or the best share is reached."""
    worst, best = shares
    return Portion(name=name, low=amount[0] / (best * rate), high=amount[1] / (worst * rate), **options)


def _traced_bytes(trace: ActivationTrace, num_micro: float) -> tuple[float, float]:
    """All kernels but products and attention: bound by the GPU's memory, or by its cache where they move little."""
    return num_micro * trace.total("streamed"), num_micro * trace.total("moved")


def _pointwise_bytes(sizes: ModelSizes, step: Step) -> float:
    """Norms, rotary embedding, activation functions and the softmax of the loss."""
    moved = step.num_tokens * sizes.num_layers * sizes.hidden * ACTIVATION_BYTES
    return moved + step.num_labelled * sizes.vocab * LOGIT_BYTES


def _of_engine(
    strategy: Strategy, sizes: ModelSizes, step: Step, count: int, messages: list[Transfer]
) -> Iterator[tuple[float, float, float]]:
    """Bytes that an engine moves beside the model, in how many large kernels, and how many it starts for them in all:
    copies around messages; sums of the gradients of several micro-batches, of a flat one few. DDP adds those of the
    first one too, to zeros in its buckets, which it also divides and clears.
    """
    for message in messages:
        calls = message.calls or 1
        yield message.copied, calls, message.copies * calls
    if strategy.kind == "zero" or strategy.offloads:
        return
    mesh, is_ddp = strategy.mesh(count), strategy.kind == "ddp"
    share = mesh.tensor * mesh.pipeline * (mesh.num_shards if strategy.sends_each_micro_batch else 1)
    times = step.micro_batches + (1 if is_ddp else -1)
    for numel in [numel for numel, *_ in sizes.trained] or [sizes.num_trained]:
        yield times * ADD_BYTES * numel / share, times, times / mesh.pipeline


def _links(messages: list[Transfer], machines: Machines, gpu: Gpu, gpus_each: int) -> list[Portion]:
    """Latency of each message and bytes over the rate of its links (the alpha-beta model)."""
    over = [message.over_links(gpus_each) for message in messages]
    inside, between = sum(pair[0] for pair in over), sum(pair[1] for pair in over)
    names, rate, shares = link_names(machines), gpu.nvlink, NVLINK_SHARE
    link: Literal["NVLink", "PCIe"] = "NVLink"
    if rate is None:
        link, rate, shares = "PCIe", gpu.host_link, PCIE_PEER_SHARE
    slow, fast = (gbits * 1e9 / 8 * gpus_each for gbits in machines.fabric_gbits)
    here, away = latencies(messages, link, gpus_each)
    return [
        Portion(name=names[0], low=inside / (shares[1] * rate) + here[0], high=inside / (shares[0] * rate) + here[1]),
        Portion(
            name=names[1],
            low=between / (FABRIC_SHARE[1] * fast) + away[0],
            high=between / (FABRIC_SHARE[0] * slow) + away[1],
        ),
    ]


def link_names(machines: Machines) -> tuple[str, str]:
    """Name what connects the processes of a machine, and the machines."""
    if (gpu := machines.gpu) is None:
        return "NVLink or PCIe" if machines.gpus_each else "inside the machine", "network"
    if gpu.nvlink is None:
        return "PCIe between GPUs", "network"
    return "Infinity Fabric" if gpu.is_amd else "NVLink", "network"


def latencies(
    messages: list[Transfer], link: Literal["NVLink", "PCIe"], gpus_each: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds that the messages of a step take beside their bytes, at least and at most: of groups inside a machine,
    and of those over several. Without those whose number is not known.
    """
    here, away = [0.0, 0.0], [0.0, 0.0]
    for message in messages:
        inside, between = message.hops(gpus_each)
        for end in (0, 1):
            each = BASE_LATENCY[end] + inside * HOP_LATENCY[link][end] + between * HOP_LATENCY["network"][end]
            (away if between else here)[end] += each * (message.calls or 0)
    return (here[0], here[1]), (away[0], away[1])


def _update(strategy: Strategy, sizes: ModelSizes, count: int, host: HostTraffic, gpu: Gpu) -> Portion:
    if host.update:
        return _over("CPU update", (host.update, host.update), 1.0, CPU_ADAM, overlaps=False)
    whole = strategy.kind in ("single", "ddp")
    own = sizes.num_trained / (1 if whole else count // strategy.mesh(count).replicate)
    each = ADAMW_BYTES + NORM_BYTES
    return _over("update", (each * own, (each + CLIP_BYTES) * own), gpu.bandwidth, MEMORY_SHARE, overlaps=False)
