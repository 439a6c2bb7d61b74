"""Messages between processes, and bytes between a GPU, its host and its disk, in a step."""

from dataclasses import dataclass
from typing import Literal

from cookbook.costs.flops import Sizes, Step
from cookbook.strategy import Strategy

ADAMW_BYTES = 28
"""AdamW in float32 reads weight, gradient and two moments and writes back all but the gradient."""


Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Messages of one kind in a step, among groups of processes that each do the same at the same time."""

    what: str
    kind: Kind
    num_bytes: float
    """Of the whole that is gathered or reduced, all times of a step together."""
    times: int = 1
    """How often in a step."""
    ranks: int
    """Of a group."""
    stride: int = 1
    """Between neighbours of a group: 1 for consecutive ranks."""

    @property
    def volume(self) -> float:
        """Bytes of the whole; an all-reduce counts twice, as a reduction and a gather."""
        return (2 if self.kind == "all-reduce" else 1) * self.num_bytes

    @property
    def sent(self) -> float:
        """Bytes that each process sends: (N-1)/N of the whole around a ring."""
        return (self.ranks - 1) / self.ranks * self.volume

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
    weights, trained, micro = half * sizes.num_parameters, sizes.num_trained, step.micro_batches
    if num_processes == 1:
        return []
    if strategy.kind == "tp":
        return _tensor_parallel(strategy, sizes, step, half)
    if strategy.kind == "ddp":  # its gradients are float32, as the weights, and wait for the last micro-batch
        return [_messages("gradients", "all-reduce", 4 * trained, num_processes)]
    if strategy.fsdp is not None:
        return _fsdp(strategy, sizes, micro, num_processes, half)
    reduced = trained * (4 if (strategy.deepspeed or {}).get("communication_data_type") == "fp32" else half)
    if strategy.zero_stage < 3:
        # The paper scatters the gradients of stages 1 and 2. DeepSpeed 0.19.8 reduces them to all processes, and each
        # keeps its part (stage_1_and_2.py, allreduce_and_scatter; use_multi_rank_bucket_allreduce is true).
        return [
            _messages("gradients", "all-reduce", reduced, num_processes, micro if strategy.zero_stage == 2 else 1),
            _messages("weights", "all-gather", half * trained, num_processes),
        ]
    gathers = [_messages(f"weights, {name}", "all-gather", weights, num_processes, micro) for name in PASSES]
    if (group := strategy.secondary_group_size) > 1:
        # A forward leaves a second copy in each group, for all gathers until the update (partition_parameters.py,
        # _partition_param_sec; stage3.py, invalidate_secondary_tensor): of frozen weights for good.
        times = 2 * micro - 1
        others = (2 * micro * weights - half * trained) / times
        gathers = [
            _messages("weights, first forward", "all-gather", half * trained, num_processes),
            _messages("weights, after it", "all-gather", others, group, times),
        ]
    return [*gathers, _messages("gradients", "reduce-scatter", reduced, num_processes, micro)]


PASSES = ("forward", "backward")


def _messages(what: str, kind: Kind, num_bytes: float, ranks: int, times: int = 1, stride: int = 1) -> Transfer:
    """Args: `num_bytes` of the whole, each time."""
    return Transfer(what=what, kind=kind, num_bytes=num_bytes * times, times=times, ranks=ranks, stride=stride)


def _fsdp(strategy: Strategy, sizes: Sizes, micro: int, num_processes: int, half: int) -> list[Transfer]:
    assert strategy.fsdp is not None
    replicas = strategy.dp_replicate_size
    group = num_processes // replicas
    keeps = strategy.fsdp.fsdp_reshard_after_forward is False
    keeps = keeps or strategy.fsdp.fsdp_sharding_strategy == "SHARD_GRAD_OP"
    again = 0 if keeps else sizes.num_parameters - (sizes.head if strategy.kind == "fsdp2" else 0)
    gradients = 4 * sizes.num_trained  # reduced in float32
    found = [
        _messages("weights, forward", "all-gather", half * sizes.num_parameters, group, micro),
        _messages("weights, backward", "all-gather", half * again, group, micro),
        _messages("gradients", "reduce-scatter", gradients, group, micro),
        _messages("gradients of the shard", "all-reduce", gradients / group, replicas, stride=group),
    ]
    return [transfer for transfer in found if transfer.ranks > 1 and transfer.num_bytes]


def _tensor_parallel(strategy: Strategy, sizes: Sizes, step: Step, half: int) -> list[Transfer]:
    """After attention and after the MLP forward, before each of them backward (Shoeybi et al. 2019, section 3)."""
    reductions = 6 if step.recompute is True else 4
    activations = half * step.num_tokens * sizes.hidden
    return [
        _messages("activations", "all-reduce", reductions * sizes.num_layers * activations, strategy.tp_size),
        # transformers cuts the head by words and gathers its output (colwise_gather_output).
        _messages("logits", "all-gather", half * step.num_labelled * sizes.vocab, strategy.tp_size),
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
