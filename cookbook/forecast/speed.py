"""How long a step takes: its FLOPs, messages and offload traffic against what GPUs and links can do.

Pure arithmetic on plain values. B tokens, L layers, H hidden size, V vocabulary, N processes. A time is a range: the
fast end overlaps all that can be overlapped at the best rates that were published, the slow end overlaps nothing at
the worst.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from cookbook.hardware import DISK_READ, DISK_WRITE, Gpu, Machines, attention_flops, matrix_flops
from cookbook.strategy import Strategy

Recompute = Literal[False, True, "selective"]
Precision = Literal["bf16", "fp16", "no"]

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

ADAMW_BYTES = 28
"""AdamW in float32 reads weight, gradient and two moments and writes back all but the gradient."""
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
class Sizes:
    """Of a model, whole and not a process's share."""

    num_parameters: int
    """All of them, tied ones once."""
    num_trained: int
    num_matrix: int
    """Weights that each token is multiplied by, without embedding and head; of experts, the active ones."""
    num_matrix_trained: int
    head_trained: bool = True
    num_layers: int
    hidden: int
    num_heads: int
    head_dim: int
    vocab: int
    num_experts: int = 1

    @property
    def width(self) -> int:
        """Of attention's queries."""
        return self.num_heads * self.head_dim

    @property
    def head(self) -> int:
        """Weights of the output head. accelerate 1.15 keeps them gathered from forward to backward under FSDP2
        (utils/fsdp_utils.py, fsdp2_prepare_model)."""
        return self.vocab * self.hidden


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, over all processes unless it says otherwise. A pair of DPO is two sequences."""

    num_tokens: float
    """That pass through the layers, with padding."""
    num_labelled: float
    """That meet the head."""
    length: float
    """Of the sample around a token, on average: sum of squared lengths / sum of lengths; padding counts."""
    micro_batches: int = 1
    """Of each process."""
    recompute: Recompute = False
    precision: Precision = "bf16"
    is_compiled: bool = False
    """Decoder layers run as torch.compile makes them."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs in matrix products."""

    forward: float
    backward: float
    recomputed: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recomputed


def work(sizes: Sizes, step: Step) -> Work:
    """FLOPs of a step over all processes.

    `forward` of the whole data set is what the reference pass of DPO costs, once before training. Selective
    recomputation keeps matrix products and attention, and computes nothing of either again.
    """
    head = sizes.head
    attention = attention_flops(sizes.num_layers, sizes.width, step.length)
    layers_forward = 2 * sizes.num_matrix + attention / 3
    training = step.num_tokens * (matrix_flops(sizes.num_matrix, sizes.num_matrix_trained) + attention)
    training += step.num_labelled * matrix_flops(head, head if sizes.head_trained else 0)
    forward = step.num_tokens * layers_forward + step.num_labelled * 2 * head
    return Work(
        forward=forward,
        backward=training - forward,
        recomputed=step.num_tokens * layers_forward if step.recompute is True else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Messages of one kind in a step, among groups of processes that each do the same at the same time."""

    what: str
    kind: Literal["all-gather", "reduce-scatter", "all-reduce"]
    num_bytes: float
    """Of the whole that is gathered or reduced, all calls of a step together."""
    ranks: int
    """Of a group."""
    stride: int = 1
    """Between neighbours of a group: 1 for consecutive ranks."""

    @property
    def sent(self) -> float:
        """Bytes that each process sends: (N-1)/N of the whole around a ring, twice for an all-reduce."""
        return (2 if self.kind == "all-reduce" else 1) * (self.ranks - 1) / self.ranks * self.num_bytes

    def over_links(self, gpus_each: int) -> tuple[float, float]:
        """Bytes that a GPU sends inside its machine, and that a machine sends to another, ranks lying in order.

        A ring over several machines leaves each once. NCCL lays one ring on each network card, and the cards of a
        machine share what the ring sends.
        """
        if self.ranks * self.stride <= gpus_each:
            return self.sent, 0.0
        members_here = max(1, gpus_each // self.stride)
        inside = self.sent if members_here > 1 else 0.0
        return inside, self.sent * gpus_each / members_here


def transfers(strategy: Strategy, sizes: Sizes, step: Step, num_processes: int) -> list[Transfer]:
    """Messages of a step as `cookbook.engine` runs it; loss sums and norms are too small to count.

    Frozen weights are gathered like any others, and have no gradients. Recomputation gathers nothing: it comes after
    the gather for backward. Counted in real runs of FSDP2 and ZeRO-1 to -3 by tests/test_forecast_speed.py.
    """
    half = 4 if step.precision == "no" else 2
    weights, trained = half * sizes.num_parameters, sizes.num_trained
    micro = step.micro_batches
    if num_processes == 1:
        return []
    if strategy.kind == "tp":
        return _tensor_parallel(strategy, sizes, step, half)
    if (
        strategy.kind == "ddp"
    ):  # its gradients have the dtype of the weights, float32, and wait for the last micro-batch
        return [Transfer(what="gradients", kind="all-reduce", num_bytes=4 * trained, ranks=num_processes)]
    if strategy.fsdp is not None:
        return _fsdp(strategy, sizes, step, num_processes, half)
    block = (strategy.deepspeed or {}).get("zero_optimization", {})
    reduced = 4 if (strategy.deepspeed or {}).get("communication_data_type") == "fp32" else half
    if strategy.zero_stage == 3:
        group = block.get("zero_hpz_partition_size") or num_processes
        return [
            Transfer(what="weights, forward", kind="all-gather", num_bytes=weights * micro, ranks=num_processes),
            Transfer(what="weights, backward", kind="all-gather", num_bytes=weights * micro, ranks=group),
            Transfer(what="gradients", kind="reduce-scatter", num_bytes=reduced * trained * micro, ranks=num_processes),
        ]
    # The paper scatters the gradients of stages 1 and 2. DeepSpeed 0.19.8 reduces them to all processes, and each keeps
    # its part (runtime/zero/stage_1_and_2.py, allreduce_and_scatter; use_multi_rank_bucket_allreduce is true).
    times = micro if strategy.zero_stage == 2 else 1
    return [
        Transfer(what="gradients", kind="all-reduce", num_bytes=reduced * trained * times, ranks=num_processes),
        Transfer(what="weights", kind="all-gather", num_bytes=half * trained, ranks=num_processes),
    ]


def _fsdp(strategy: Strategy, sizes: Sizes, step: Step, num_processes: int, half: int) -> list[Transfer]:
    assert strategy.fsdp is not None
    replicas = strategy.dp_replicate_size
    group = num_processes // replicas
    keeps = strategy.fsdp.fsdp_reshard_after_forward is False
    keeps = keeps or strategy.fsdp.fsdp_sharding_strategy == "SHARD_GRAD_OP"
    weights = half * sizes.num_parameters * step.micro_batches
    gradients = 4 * sizes.num_trained  # reduced in float32
    found = [Transfer(what="weights, forward", kind="all-gather", num_bytes=weights, ranks=group)]
    if not keeps:
        head = sizes.head if strategy.kind == "fsdp2" else 0
        again = half * (sizes.num_parameters - head) * step.micro_batches
        found.append(Transfer(what="weights, backward", kind="all-gather", num_bytes=again, ranks=group))
    found.append(
        Transfer(what="gradients", kind="reduce-scatter", num_bytes=gradients * step.micro_batches, ranks=group)
    )
    if replicas > 1:
        found.append(
            Transfer(
                what="gradients of the shard",
                kind="all-reduce",
                num_bytes=gradients / group,
                ranks=replicas,
                stride=group,
            )
        )
    return [transfer for transfer in found if transfer.ranks > 1]


def _tensor_parallel(strategy: Strategy, sizes: Sizes, step: Step, half: int) -> list[Transfer]:
    """After attention and after the MLP forward, before each of them backward (Shoeybi et al. 2019, section 3)."""
    reductions = 6 if step.recompute is True else 4
    activations = half * step.num_tokens * sizes.hidden
    return [
        Transfer(
            what="activations",
            kind="all-reduce",
            num_bytes=reductions * sizes.num_layers * activations,
            ranks=strategy.tp_size,
        ),
        # transformers cuts the head by words and gathers its output (colwise_gather_output).
        Transfer(
            what="logits",
            kind="all-gather",
            num_bytes=half * step.num_labelled * sizes.vocab,
            ranks=strategy.tp_size,
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class HostTraffic:
    """Bytes of offloading in a step: over the link of each GPU, and for the CPUs and the disk of each machine."""

    down: float = 0.0
    """From a GPU to its host."""
    up: float = 0.0
    update: float = 0.0
    """In host memory, by the optimizer."""
    disk_read: float = 0.0
    disk_write: float = 0.0


def host_traffic(
    strategy: Strategy, sizes: Sizes, step: Step, *, num_processes: int, gpus_each: int, adam_bytes: float = ADAMW_BYTES
) -> HostTraffic:
    """What offloading moves in a step.

    Args:
        gpus_each: processes of a machine, which share its CPUs and disk.
        adam_bytes: that the update of a parameter moves.
    """
    half = 4 if step.precision == "no" else 2
    share = sizes.num_parameters / num_processes
    trained = sizes.num_trained / num_processes
    micro = step.micro_batches
    if strategy.fsdp is not None and strategy.fsdp.fsdp_offload_params:
        keeps = strategy.fsdp.fsdp_reshard_after_forward is False
        gathered = share if keeps else 2 * share - sizes.head / num_processes
        # The shard is copied in float32 and cast on the GPU (torch 2.13, _fsdp_param.py, all_gather_inputs).
        return HostTraffic(down=4 * trained * micro, up=4 * gathered * micro, update=adam_bytes * trained * gpus_each)
    if strategy.offload_optimizer is None and strategy.offload_param is None:
        return HostTraffic()
    down = up = update = disk_read = disk_write = 0.0
    if strategy.offload_optimizer is not None:
        if strategy.zero_stage == 3:
            # Sums of micro-batches lie on the host, and come up again to be added to (stage3.py, partition_grads).
            down += half * trained * micro
            up += half * trained * (micro - 1)
        down += 4 * trained  # the whole window's, in float32
        if strategy.offload_param is None:
            up += half * trained
        update = adam_bytes * trained * gpus_each
    if strategy.offload_param is not None:
        up += half * share * 2 * micro
    if strategy.offload_optimizer == "nvme":  # weight, two moments and gradient in float32
        disk_read += 16 * trained * gpus_each
        disk_write += 16 * trained * gpus_each
    if strategy.offload_param == "nvme":
        disk_read += half * share * 2 * micro * gpus_each
        disk_write += half * trained * gpus_each
    return HostTraffic(down=down, up=up, update=update, disk_read=disk_read, disk_write=disk_write)


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
