"""How long a step takes: its FLOPs, messages and offload traffic against what GPUs and links can do.

Pure arithmetic on plain values. B tokens, L layers, H hidden size, V vocabulary, N processes. A time is a range: the
fast end overlaps all that can be overlapped at the best rates that were published, the slow end overlaps nothing at
the worst.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cookbook.costs.flops import Precision, Sizes, Step, work
from cookbook.costs.traffic import ADAMW_BYTES, HostTraffic, Transfer, host_traffic, transfers
from cookbook.hardware import DISK_READ, DISK_WRITE, Gpu, Machines
from cookbook.strategy import Strategy

EFFICIENCY = {
    "volta": (0.25, 0.50),
    "turing": (0.25, 0.50),
    "ampere": (0.40, 0.68),
    "ada": (0.35, 0.65),
    "hopper": (0.34, 0.56),
    "blackwell": (0.25, 0.50),
    "cdna3": (0.20, 0.40),
}
"""Share of the dense peak that matrix products reach in training, recomputed ones counted, causal attention halved.

The ends come from records, counted so. Hopper: torchtitan, Llama-3.1-8B in eager mode (2024-12: 5,762 tokens/s a GPU,
30 %, of which messages and pointwise kernels are told apart below), and llm-foundry, MPT-70B with checkpointing on 64
H100 (1,039 tokens/s, 56 %). Ampere: torchtitan, Llama-3-8B before its fused optimizer (2,627 tokens/s, 43 %), and
llm-foundry, MPT-7B with checkpointing at 4,096 tokens (3,684 tokens/s, 68 %). Volta: Megatron-LM (Shoeybi et al. 2019:
39 TFLOP/s a V100, with room below) and DeepSpeed's BERT (64); Turing is taken like it. Ada: torchtune, Llama-3.1-8B on
an RTX 4090 (1,650 tokens/s, 62 %), with room below. Blackwell: torchtitan on GB200 (21,919 tokens/s, 41 %), with room:
of B200 the only record says that its power was limited. CDNA 3: torchao's float8 README, Llama-3-8B on 8 MI300X (5,377
tokens/s, 21 %), with room above."""

NVLINK_SHARE, PCIE_PEER_SHARE, FABRIC_SHARE = (0.50, 0.82), (0.30, 0.80), (0.50, 0.90)
"""Of a link's rate, what a ring of large messages reaches; assumptions, none measured here. Without peer access, as on
GeForce cards, a message between GPUs passes through host memory."""
HOST_SHARE = (0.50, 0.85)
"""Of PCIe, what copies from and to pinned host memory reach; an assumption."""
MEMORY_SHARE = (0.60, 0.90)
"""Of a GPU's memory bandwidth, what pointwise kernels reach; an assumption."""

CPU_ADAM = (25e9, 100e9)
"""Bytes/s of an AdamW update on the CPUs of a machine. DeepSpeed's, published: Llama-2-7B in more than 4 s beside 4
A100 (47 GB/s; ZenFlow blog); whole steps of Qwen2.5-3B beside 2 A100 in 2.4 to 3.1 s (at least 28 GB/s; pull request
7474). Half of it below and twice above; ours is PyTorch's fused update."""
ACTIVATION_BYTES = 4 * 34
"""Per token, layer and hidden unit: 34 bytes of a layer are saved (Korthikanti et al. 2022, equation 2), each written
and read forward, and its gradient written and read backward. Compiled layers move less: the slow end alone."""
LOGIT_BYTES = 24
"""Per labelled position and word: written and read in bf16, in float32, and as a gradient."""
LAUNCH = (5e-6, 20e-6)
"""Host seconds of an operation in eager mode, from the launch alone to what modules and autograd add in Python. With
enough tokens all of it runs ahead of the GPU; with few it is the time of the step. The ends of this and of ZERO3_HOOK
enclose Qwen's table (its README, "Profiling of Memory and Speed"; one A100, micro-batches of a sample, recomputed): 256
and 512 tokens take as long, 5.2 ms a layer and micro-batch with LoRA, 10.9 where all is trained under DeepSpeed, whose
stage it does not tell and we take for 3."""
LAUNCHES = 40
"""Operations in a layer's forward: 34 of Llama, 46 of Qwen3, counted in transformers 5.23; the backward has twice as
many. With adapters on all matrices there are 2.4 times as many forward and 1.6 times backward."""
LAUNCHES_COMPILED = 12
"""The same where layers are compiled: products and attention, and a fused kernel between any two; an assumption."""
ZERO3_HOOK = (1e-4, 5e-4)
"""Of DeepSpeed's ZeRO-3 in Python, to fetch the weights of a module and to let go of them again: before and after each
module that has weights, in every pass."""
ZERO_HOOK = (2e-5, 2e-4)
"""Of stages 1 and 2, to copy a gradient into its bucket; an assumption."""
ZERO_MODULES = 9
"""Of a layer, with weights: seven products and two norms."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a step spends time on, in seconds, if nothing else ran."""

    name: str
    low: float
    high: float
    overlaps: bool = True
    """With the matrix products; the update of the weights waits for all of them."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Seconds of a step."""

    low: float
    high: float
    bottleneck: str
    """The largest part."""
    parts: tuple[Part, ...]

    def tokens_per_second(self, num_tokens: float, num_gpus: int) -> tuple[float, float]:
        """Of each GPU, least and most."""
        return num_tokens / num_gpus / self.high, num_tokens / num_gpus / self.low

    def hours(self, num_steps: float) -> tuple[float, float]:
        """Of a run, without its start, evaluations and checkpoints."""
        return self.low * num_steps / 3600, self.high * num_steps / 3600

    def price(self, num_steps: float, *, per_gpu_hour: float, num_gpus: int) -> tuple[float, float]:
        """Of a run, in the currency of `per_gpu_hour`."""
        low, high = self.hours(num_steps)
        return low * per_gpu_hour * num_gpus, high * per_gpu_hour * num_gpus


def caveat(sizes: Sizes) -> str | None:
    """What a forecast of time leaves out, where that is more than its range.

    Published of Qwen3-30B-A3B on 16 GPUs: 91.2 s a step under ZeRO-3, 9.6 in Megatron (ms-swift, Megatron-SWIFT's Quick
    Start), before transformers had products for groups of experts.
    """
    if sizes.num_experts == 1:
        return None
    return (
        f"{sizes.num_experts} experts: counted are the weights that a token meets; not routing, uneven loads and small"
        " products, with which a step took 10 times as long"
    )


def no_forecast(machines: Machines, precision: Precision) -> str | None:
    """Why the time of a step can't be told; None where it can."""
    if machines.gpu is None:
        return machines.no_speed
    if precision == "no":
        return "mixed_precision 'no' multiplies in float32: no forecast of time for it"
    if precision == "bf16" and not machines.gpu.has_bf16:
        return f"a {machines.gpu.name} has no bf16: no forecast of time for it; write mixed_precision: fp16"
    return None


def step_seconds(
    strategy: Strategy,
    sizes: Sizes,
    step: Step,
    machines: Machines,
    *,
    num_processes: int | None = None,
    adam_bytes: float = ADAMW_BYTES,
) -> Range:
    """The time of an optimizer step. Ask `no_forecast` first.

    Args:
        num_processes: as the strategy writes if not given, else one per GPU.
    """
    gpu = machines.gpu
    assert gpu is not None and no_forecast(machines, step.precision) is None
    count = num_processes or strategy.num_processes or machines.num_gpus
    gpus_each = min(count, machines.gpus_each)
    messages = transfers(strategy, sizes, step, count)
    host = host_traffic(strategy, sizes, step, num_processes=count, gpus_each=gpus_each, adam_bytes=adam_bytes)
    parts = [
        _products(work(sizes, step).total / count, gpu),
        _pointwise(sizes, step, count, gpu),
        _launches(strategy, sizes, step),
        *_links(messages, machines, gpu, gpus_each),
        _update(strategy, sizes, count, host, gpu, adam_bytes),
        *_offload(host, gpu),
    ]
    return total(parts)


def forward_seconds(sizes: Sizes, step: Step, machines: Machines, *, num_processes: int | None = None) -> Range:
    """The time of forwards alone, without messages: DPO's reference pass over the data before training, or evaluation.

    Args:
        step: all the tokens of the pass, and all micro-batches of a process.
    """
    gpu = machines.gpu
    assert gpu is not None and no_forecast(machines, step.precision) is None
    launches = LAUNCHES * sizes.num_layers * step.micro_batches
    flops = work(sizes, step).forward / (num_processes or machines.num_gpus)
    of_host = Part(name=OF_HOST, low=launches * LAUNCH[0], high=launches * LAUNCH[1])
    return total([_products(flops, gpu), of_host])


OF_HOST = "kernel launches"


def total(parts: Iterable[Part]) -> Range:
    """Fast end: the longest of the parts that overlap, and all that do not after it. Slow end: the sum of all, or of
    the launches and what does not overlap, if that is more: the GPU works while the host launches."""
    kept = tuple(part for part in parts if part.high > 0)
    together = [part.low for part in kept if part.overlaps]
    after = [part for part in kept if not part.overlaps]
    on_host = [part.high for part in kept if part.name == OF_HOST]
    return Range(
        low=max(together, default=0.0) + sum(part.low for part in after),
        high=max(
            sum(part.high for part in kept if part.name != OF_HOST),
            sum(on_host) + sum(part.high for part in after),
        ),
        bottleneck=max(kept, key=lambda part: part.low + part.high).name,
        parts=kept,
    )


def _launches(strategy: Strategy, sizes: Sizes, step: Step) -> Part:
    """What the host does for the micro-batches of a process."""
    passes = 4 if step.recompute is True else 3  # a backward is two
    adapted = 2 if sizes.num_matrix_trained < sizes.num_matrix else 1
    launches = passes * (LAUNCHES_COMPILED if step.is_compiled else LAUNCHES * adapted)
    hook, times = (0.0, 0.0), 0
    if strategy.zero_stage == 3:
        hook, times = ZERO3_HOOK, (passes - 1) * ZERO_MODULES * adapted
    elif strategy.kind == "zero":
        hook, times = ZERO_HOOK, ZERO_MODULES
    layers = sizes.num_layers * step.micro_batches
    low, high = (layers * (launches * LAUNCH[end] + times * hook[end]) for end in (0, 1))
    return Part(name=OF_HOST, low=low, high=high)


def _products(flops: float, gpu: Gpu) -> Part:
    worst, best = EFFICIENCY[gpu.generation]
    return Part(name="compute", low=flops / (best * gpu.half_flops), high=flops / (worst * gpu.half_flops))


def _pointwise(sizes: Sizes, step: Step, count: int, gpu: Gpu) -> Part:
    """Norms, rotary embedding, activation functions and the softmax of the loss: bound by the GPU's memory."""
    moved = step.num_tokens * sizes.num_layers * sizes.hidden * ACTIVATION_BYTES
    moved += step.num_labelled * sizes.vocab * LOGIT_BYTES
    return Part(name="GPU memory", low=0.0, high=moved / count / (MEMORY_SHARE[0] * gpu.bandwidth))


def _links(messages: list[Transfer], machines: Machines, gpu: Gpu, gpus_each: int) -> list[Part]:
    over = [message.over_links(gpus_each) for message in messages]
    inside, between = sum(pair[0] for pair in over), sum(pair[1] for pair in over)
    name, rate, shares = ("Infinity Fabric" if gpu.is_amd else "NVLink", gpu.nvlink, NVLINK_SHARE)
    if rate is None:
        name, rate, shares = "PCIe between GPUs", gpu.host_link, PCIE_PEER_SHARE
    slow, fast = (gbits * 1e9 / 8 * gpus_each for gbits in machines.fabric_gbits)
    return [
        Part(name=name, low=inside / (shares[1] * rate), high=inside / (shares[0] * rate)),
        Part(name="network", low=between / (FABRIC_SHARE[1] * fast), high=between / (FABRIC_SHARE[0] * slow)),
    ]


def _update(strategy: Strategy, sizes: Sizes, count: int, host: HostTraffic, gpu: Gpu, adam_bytes: float) -> Part:
    if host.update:
        return Part(name="CPU update", low=host.update / CPU_ADAM[1], high=host.update / CPU_ADAM[0], overlaps=False)
    whole = strategy.kind in ("single", "ddp")
    moved = adam_bytes * sizes.num_trained / (1 if whole else count // strategy.dp_replicate_size)
    worst, best = MEMORY_SHARE
    return Part(name="update", low=moved / (best * gpu.bandwidth), high=moved / (worst * gpu.bandwidth), overlaps=False)


def _offload(host: HostTraffic, gpu: Gpu) -> list[Part]:
    """PCIe carries both ways at once; a disk does one thing at a time."""
    worst, best = HOST_SHARE
    return [
        Part(
            name="PCIe to the host",
            low=max(host.down, host.up) / (best * gpu.host_link),
            high=(host.down + host.up) / (worst * gpu.host_link),
        ),
        Part(
            name="disk",
            low=host.disk_read / DISK_READ[1] + host.disk_write / DISK_WRITE[1],
            high=host.disk_read / DISK_READ[0] + host.disk_write / DISK_WRITE[0],
            overlaps=False,
        ),
    ]
