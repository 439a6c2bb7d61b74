"""Traffic of a step: messages between processes, and bytes between GPU, host and disk."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Literal

from cookbook.config.mesh import Mesh
from cookbook.config.strategy import Strategy, exchange_precision
from cookbook.facts.meshes import in_buckets
from cookbook.facts.pipeline_stages import layers_of_stage
from cookbook.forecast.costs.flops import ModelSizes, Step
from cookbook.forecast.costs.inputs import bytes_of, hidden_bytes
from cookbook.forecast.costs.table import add_up, read_table

ADAMW_BYTES = 28
"""AdamW in float32 reads weight, gradient and two moments, and writes all but the gradient."""


TransferKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The collectives of one kind in a step, which run in all groups of `ranks` processes at the same time; or messages
    from each process of a group to the next.
    """

    what: str
    kind: TransferKind
    num_bytes: float
    """Bytes of the whole tensors that are gathered, reduced or sent in a step; of an all-to-all, the part of a
    process."""
    times: int = 1
    """Number of times that goes over the links a step: a gather of all layers' weights once, however it is divided."""
    calls: int | None = None
    """Collectives, or messages sent, of a process in a step; of a pipeline its last stage. None: not known."""
    is_least: bool = False
    """True: there are as many `calls` or more."""
    copied: float = 0.0
    """Bytes that a GPU reads and writes in a step to copy the tensors into the buffer that is sent, or out of it."""
    copies: int = 0
    """Kernels that it starts for that with each call, in the host's time; DeepSpeed's are in that of its hooks."""
    ranks: int
    """Size of a group."""
    stride: int = 1
    """Distance between neighbouring ranks of a group."""
    groups: int | None = None
    """Number of groups from one rank to the next of a group, if fewer than `stride`."""

    @property
    def _span(self) -> int:
        """Ranks from the first of a group to the last of the groups beside it."""
        return (self.ranks - 1) * self.stride + (self.groups or self.stride)

    @property
    def volume(self) -> float:
        """`num_bytes`, twice for an all-reduce: a reduction and a gather."""
        return (2 if self.kind == "all-reduce" else 1) * self.num_bytes

    @property
    def sent(self) -> float:
        """Bytes that each process sends: (N-1)/N of the volume around a ring; along a line this is the mean."""
        return (self.ranks - 1) / self.ranks * self.volume

    def hops(self, gpus_each: int) -> tuple[int, int]:
        """Steps of one call inside a machine and between machines, one after another, as NCCL counts them
        (src/graph/tuning.cc, ncclTopoTuneModel): those of a ring, of an all-reduce over machines those of a tree; of
        messages from rank to rank, which go at once, one.
        """
        num_machines = min(self.ranks, max(1, math.ceil(self._span / gpus_each)))
        if self.kind in ("send", "all-to-all"):
            return (0, 1) if num_machines > 1 else (1, 0)
        if self.kind == "all-reduce" and num_machines > 1:
            return 2 * (self.ranks // num_machines - 1), 2 * math.ceil(math.log2(num_machines))
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * (self.ranks - num_machines), rounds * (num_machines - 1)

    def carriers(self, gpus_each: int) -> tuple[bool, bool]:
        """A pair: links inside a machine carry it, and links between machines do. The ranks of a machine are
        consecutive.
        """
        is_alone = self._span <= gpus_each
        return is_alone or gpus_each // self.stride > 1, not is_alone

    def links(self, gpus_each: int, names: tuple[str, str]) -> list[str]:
        """Names of the links that carry it, given the names of both kinds."""
        return [name for name, carries in zip(names, self.carriers(gpus_each), strict=True) if carries]

    def over_links(self, gpus_each: int) -> tuple[float, float]:
        """Bytes that a GPU sends inside its machine, and that a machine sends to others.

        A ring over several machines leaves each machine once. NCCL builds one ring per network card, and the cards of a
        machine share the traffic.
        """
        inside, between = self.carriers(gpus_each)
        rings = min(gpus_each, self.groups) if self.groups else gpus_each / max(1, gpus_each // self.stride)
        return self.sent * inside, self.sent * between * rings


def by_link(messages: Iterable[Transfer], gpus_each: int, names: tuple[str, str]) -> dict[str, list[str]]:
    """Names of messages by the links they cross: `{"NVLink": ["activations"], "NVLink and network": ["gradients"]}`."""
    by_name: dict[str, list[str]] = {}
    for message in messages:
        what, _, when = message.what.partition(", ")
        by_name.setdefault(" and ".join(message.links(gpus_each, names)), []).append(
            f"{what} ({when})" if when else what
        )
    return by_name


def links_in_words(links: dict[str, list[str]]) -> str:
    """`by_link` for people."""
    return "; ".join(f"{link}: {', '.join(what)}" for link, what in links.items())


def transfers(
    strategy: Strategy, sizes: ModelSizes, step: Step, num_processes: int, *, num_local: int | None = None
) -> list[Transfer]:
    """The collectives of a step, except small ones (loss sums, norms). `num_local`: see `CostInputs`.

    Frozen weights are gathered and have no gradients. Recomputation uses the weights gathered for the backward.
    tests/test_forecast_speed.py counts the collectives of real runs of FSDP2 and ZeRO-1 to -3.
    """
    messages = _state_transfers(strategy, sizes, step, num_processes, num_local or strategy.num_local(num_processes))
    if strategy.sp_size > 1:
        messages.append(_exchanges(strategy, sizes, step, num_processes))
    if strategy.ep_size > 1:
        messages.append(_to_experts(strategy, sizes, step, num_processes))
    return messages


def _to_experts(strategy: Strategy, sizes: ModelSizes, step: Step, num_processes: int) -> Transfer:
    """Expert parallel: all-to-alls of hidden states to the experts that a token chose, and back, in each pass; as if
    tokens chose all equally often.
    """
    passes = 3 if step.recompute is True else 2
    each = bytes_of(step.precision) * sizes.hidden
    sent = 2 * passes * each * sizes.num_routed * step.num_tokens / num_processes
    layers = sizes.num_layers * step.micro_batches
    return Transfer(
        what="tokens to experts",
        kind="all-to-all",
        num_bytes=sent,
        times=2 * passes * layers,
        calls=(2 * passes + passes - 1) * layers,  # in each pass but the backward the numbers of tokens go first
        ranks=strategy.ep_size,
    )


def _exchanges(strategy: Strategy, sizes: ModelSizes, step: Step, num_processes: int) -> Transfer:
    """Sequence parallel: all-to-alls of queries, keys, values and outputs in each layer and pass."""
    passes = 3 if step.recompute is True else 2
    heads = 2 * sizes.num_heads + 2 * max(sizes.num_key_heads, strategy.sp_size)
    of_a_token = bytes_of(step.precision) * heads * sizes.head_dim
    times = 4 * sizes.num_layers * passes * step.micro_batches
    sent = of_a_token * sizes.num_layers * passes * step.num_tokens / num_processes
    return Transfer(
        what="heads and tokens", kind="all-to-all", num_bytes=sent, times=times, calls=times, ranks=strategy.sp_size
    )


def _state_transfers(
    strategy: Strategy, sizes: ModelSizes, step: Step, num_processes: int, num_local: int
) -> list[Transfer]:
    half = bytes_of(step.precision)
    weights, trained, micro = half * sizes.num_parameters, sizes.num_trained, step.micro_batches
    reduced = _exchanged_bytes(strategy, step) * trained
    if num_processes == 1:
        return []
    if strategy.kind != "zero":
        mesh = strategy.mesh(num_processes)
        activations = [*_hidden_states(strategy, mesh, sizes, step), *_activations(strategy, mesh, sizes, step, half)]
        activations += _of_tied(strategy, mesh, sizes, step)
        if strategy.fsdp is not None:
            return [*activations, *_fsdp_transfers(strategy, sizes, step, num_processes, half)]
        # At the last micro-batch. Each process has the gradients of its part of the model.
        twice = _exchanged_bytes(strategy, step) * _held_twice(strategy, sizes) * sizes.head_trained
        undivided = _exchanged_bytes(strategy, step) * sizes.num_undivided_trained
        own, copies = _of_each(mesh, reduced + twice, undivided), mesh.token_parallel_size
        calls = _ddp_buckets(strategy, sizes) if strategy.kind == "ddp" else _copy_buckets(strategy, mesh, sizes, step)
        gradients = _repeat("gradients", "all-reduce", own, copies, stride=mesh.tensor, calls=calls)
        return [*activations, *([gradients] if copies > 1 else [])]
    if strategy.zero_stage < 3:
        # The paper reduce-scatters gradients of stages 1 and 2. DeepSpeed 0.19.8 all-reduces them, and each process
        # keeps its shard (stage_1_and_2.py, allreduce_and_scatter; use_multi_rank_bucket_allreduce is true).
        times = micro if strategy.zero_stage == 2 else 1
        buckets, pieces = _zero_buckets(strategy, sizes), _zero_gathers(strategy, sizes)
        gradients = _repeat("gradients", "all-reduce", reduced, num_processes, times, calls=buckets)
        return [
            replace(gradients, copied=2 * half * trained * times),  # into buckets, in the dtype of the weights
            _repeat("weights", "all-gather", half * trained, num_processes, calls=pieces),
        ]
    # How many weights a gather has depends on what DeepSpeed's prefetching finds: of more than a layer none was seen.
    units = sizes.num_layers + 1
    gathers = [_repeat(f"weights, {name}", "all-gather", weights, num_processes, micro, calls=units) for name in PASSES]
    if (group := strategy.secondary_group_size(num_local)) > 1:
        # A forward leaves a second copy in each group, for all gathers until the update (partition_parameters.py,
        # _partition_param_sec; stage3.py, invalidate_secondary_tensor): of frozen weights for good.
        times = 2 * micro - 1
        others = (2 * micro * weights - half * trained) / times
        gathers = [
            _repeat("weights, first forward", "all-gather", half * trained, num_processes, calls=units),
            _repeat("weights, after it", "all-gather", others, group, times, calls=units),
        ]
    # partition_parameters.py, AllGatherCoalescedHandle, joins the parts of each weight.
    gathers = [replace(gather, is_least=True, copied=2 * gather.num_bytes) for gather in gathers]
    buckets = _zero_buckets(strategy, sizes)
    gradients = _repeat("gradients", "reduce-scatter", reduced, num_processes, micro, calls=buckets)
    return [*gathers, replace(gradients, copied=2 * half * trained * micro)]


PASSES = ("forward", "backward")


def _held_twice(strategy: Strategy, sizes: ModelSizes) -> int:
    """Weights of an embedding that is also the head: the first stage of a pipeline has it, and the last one."""
    return sizes.head if sizes.is_tied and strategy.pp_size > 1 else 0


def _of_each(mesh: Mesh, number: float, undivided: float) -> float:
    """Mean over all stages of what a process has of a number, of which tensor parallel leaves a part whole."""
    return ((number - undivided) / mesh.tensor + undivided) / mesh.pipeline


def _exchanged_bytes(strategy: Strategy, step: Step) -> int:
    return bytes_of(exchange_precision(strategy, step.precision, step.gradient_dtype))


def _repeat(
    what: str,
    kind: TransferKind,
    num_bytes: float,
    ranks: int,
    times: int = 1,
    stride: int = 1,
    *,
    calls: int | None = None,
) -> Transfer:
    """`num_bytes` over the links `times`, each time in so many calls."""
    return Transfer(
        what=what,
        kind=kind,
        num_bytes=num_bytes * times,
        times=times,
        calls=None if calls is None else calls * times,
        ranks=ranks,
        stride=stride,
    )


def _full(numels: Iterable[int], limits: Iterator[int], *, overshoots: bool) -> int:
    """The number of buckets that tensors fill.

    Args:
        limits: of one bucket after the other.
        overshoots: whether the tensor that reaches the limit is still in the bucket, or the first of the next one.
    """
    count, held, limit = 0, 0, next(limits)
    for numel in numels:
        if not overshoots and held and held + numel > limit:
            count, held, limit = count + 1, 0, next(limits)
        held += numel
        if overshoots and held >= limit:
            count, held, limit = count + 1, 0, next(limits)
    return count + bool(held)


def _ddp_buckets(strategy: Strategy, sizes: ModelSizes) -> int | None:
    """DDP's buckets (torch 2.13, csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size): float32
    gradients in the order in which they come.
    """
    if not sizes.trained:
        return None
    limits = [2**20, 25 * 2**20] if strategy.bucket_cap_mb is None else [strategy.bucket_cap_mb * 2**20]
    numels = (4 * numel for numel, *_ in reversed(sizes.trained))
    return _full(numels, chain(limits[:1], repeat(limits[-1])), overshoots=True)


def _copy_buckets(strategy: Strategy, mesh: Mesh, sizes: ModelSizes, step: Step) -> int | None:
    """Without DDP the last stage's gradients, or shards of them, fill flat buckets (engine/collectives.py, add_up)."""
    item = _exchanged_bytes(strategy, step)
    shards = [(weight.numel // (mesh.tensor if weight.is_divided else 1), weight.layer) for weight in sizes.trained]
    if mesh.pipeline > 1:
        own = _layers_of_last_stage(sizes, mesh.pipeline, mesh.chunks)
        first = next((i for i, (_, layer) in enumerate(shards) if layer is not None), 0)
        has_embedding = first > 0 and sizes.is_tied  # the last stage has it too, as the head
        shards = [
            (numel, layer)
            for i, (numel, layer) in enumerate(shards)
            if layer in own or (layer is None and (i > first or (has_embedding and i == 0)))
        ]
    return len(in_buckets(item * numel for numel, _ in shards)) or None


def _zero_buckets(strategy: Strategy, sizes: ModelSizes) -> int | None:
    """DeepSpeed's buckets of gradients (stage_1_and_2.py, reduce_bucket_size; stage3.py, reduce_bucket_size)."""
    limit = strategy.zero.get("reduce_bucket_size", 5 * 10**8)
    numels = (numel for numel, *_ in reversed(sizes.trained))
    return _full(numels, repeat(limit), overshoots=False) if sizes.trained else None


def _zero_gathers(strategy: Strategy, sizes: ModelSizes) -> int | None:
    """Gathers of updated weights: of matrices and of the rest, each in pieces of `allgather_bucket_size` (deepspeed
    0.19.8, runtime/utils.py, all_gather_dp_groups).
    """
    limit = strategy.zero.get("allgather_bucket_size", 5 * 10**8)
    groups = [sum(weight.numel for weight in sizes.trained if weight.is_matrix == kind) for kind in (True, False)]
    return sum(max(1, group // limit) if limit else 1 for group in groups if group) if sizes.trained else None


def _fsdp_transfers(strategy: Strategy, sizes: ModelSizes, step: Step, num_processes: int, half: int) -> list[Transfer]:
    assert strategy.fsdp is not None
    micro = step.micro_batches
    tensor, replicas = strategy.tp_size, strategy.dp_replicate_size
    divided = tensor * strategy.pp_size
    group = num_processes // replicas // divided
    # Of an expert-parallel group each process has its own experts, which it shares with those of other groups.
    experts, expert = sizes.num_of_experts if strategy.ep_size > 1 else 0, strategy.ep_size
    again = 0
    if strategy.gathers_weights:
        # FSDP1 keeps what its root holds, embedding and head (torch 2.13, fsdp/_runtime_utils.py,
        # _post_forward_reshard).
        kept = 2 if strategy.kind == "fsdp1" and not sizes.is_tied else 1
        again = sizes.num_parameters - experts - kept * sizes.head
    twice = _held_twice(strategy, sizes)
    mesh, undivided = strategy.mesh(num_processes), sizes.num_undivided
    weights = half * _of_each(mesh, sizes.num_parameters + twice - experts, undivided)
    regathered = half * _of_each(mesh, again, undivided) if again else 0.0
    trained = sizes.num_trained + twice * sizes.head_trained
    if strategy.kind == "fsdp1" and not sizes.is_full:
        # A layer is one flat parameter, reduced whole with zeros for what is frozen in it; so is the root's, if any of
        # it is trained (torch 2.13, distributed/fsdp/_runtime_utils.py, _post_backward_hook).
        in_root = 0 if sizes.head_trained else (1 if sizes.is_tied else 2) * sizes.head
        trained = sizes.num_parameters - in_root
    gradients = _exchanged_bytes(strategy, step) * _of_each(mesh, trained - experts, sizes.num_undivided_trained)
    own, owners = half * experts / expert, group // expert
    of_own = _exchanged_bytes(strategy, step) * experts / expert
    gathered, reduced = _fsdp_units(strategy, sizes)
    once = gathered - 1 if strategy.gathers_weights else 0  # what the head is in stays gathered
    layers = len(_layers_of_last_stage(sizes, strategy.pp_size, strategy.pp_chunks))
    messages = [
        _repeat("weights, forward", "all-gather", weights, group, micro, stride=tensor, calls=gathered),
        _repeat("weights, backward", "all-gather", regathered, group, micro, stride=tensor, calls=once),
        _repeat("gradients", "reduce-scatter", gradients, group, micro, stride=tensor, calls=reduced),
        _repeat("gradients of the shard", "all-reduce", gradients / group, replicas, 1, group * tensor, calls=reduced),
        *(_repeat(f"experts, {name}", "all-gather", own, owners, micro, expert, calls=layers) for name in PASSES),
        _repeat("gradients of experts", "reduce-scatter", of_own, owners, micro, expert, calls=layers),
    ]
    if strategy.kind != "fsdp1":  # whose weights are views of what it gathers
        messages = [_with_copies(message, half / _exchanged_bytes(strategy, step)) for message in messages]
    if strategy.pp_chunks > 1:  # the first backward of a step gathers a layer of the chunk before ahead, in vain
        messages[1] = replace(messages[1], calls=(messages[1].calls or 0) + 1)
    return [message for message in messages if message.ranks > 1 and message.num_bytes]


def _with_copies(message: Transfer, of_gradient: float) -> Transfer:
    """With FSDP2's copies (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_all_gather): of
    weights out of what was gathered, before which a shard is cast and put into a buffer; of gradients into what is
    sent.

    Args:
        of_gradient: its bytes over those that are sent of it.
    """
    if message.kind == "all-gather":
        return replace(message, copied=2 * message.num_bytes, copies=3)
    if message.kind == "reduce-scatter":
        return replace(message, copied=(1 + of_gradient) * message.num_bytes, copies=1)
    return message


def _fsdp_units(strategy: Strategy, sizes: ModelSizes) -> tuple[int, int]:
    """Number of units that FSDP gathers, and of those with trained weights: each layer, the embedding, and the rest
    with the head (`_units_fsdp2` in states.py); with FSDP1 embedding and head are in the rest, as is a tied one.
    """
    layers = len(_layers_of_last_stage(sizes, strategy.pp_size, strategy.pp_chunks))
    ends = 1 if sizes.is_tied or strategy.kind == "fsdp1" or strategy.pp_size > 1 else 2
    return layers + ends, layers + (ends if sizes.is_full else int(sizes.head_trained))


def _layers_of_last_stage(sizes: ModelSizes, num_stages: int, chunks: int) -> list[int]:
    return layers_of_stage(sizes.num_layers, num_stages - 1, num_stages, chunks, head_layers=sizes.head_layers)


def _activations(strategy: Strategy, mesh: Mesh, sizes: ModelSizes, step: Step, half: int) -> list[Transfer]:
    """Tensor parallel: all-reduces of what attention and MLP return in the forward, and of the gradient of what each of
    their matrices divided by columns reads, one by one (transformers 5.23, distributed/tensor_parallel.py,
    ColwiseParallel), with as many of an adapter beside each, of the size of its rank; of the embedding and of the
    head's input; and what the head's loss needs. Shoeybi et al. 2019 (3) have one in the backward for all matrices that
    read the same. Gradients have the dtype of the residual stream, which the matrices round. A process of a pipeline
    has its share of the layers; of both ends this is the mean over its stages.
    """
    if mesh.tensor == 1:
        return []
    groups, stages = mesh.token_parallel_size, mesh.pipeline
    full = hidden_bytes(strategy, step.precision, is_full=sizes.is_full)
    tokens, labelled = step.num_tokens / groups, step.num_labelled / groups
    rows, columns = sizes.row_matrices, sizes.column_matrices - sizes.first_matrices
    row_ranks, column_ranks = [*sizes.row_ranks], sizes.column_ranks
    if step.recompute:  # selective keeps products, and not what is summed of them
        # It stops before the sum that ends a layer, unless something in it reads what comes after.
        rows += max(0, sizes.row_matrices - sizes.num_layers + sizes.adapted_ends)
        row_ranks, columns = 2 * row_ranks, sizes.column_matrices
    of_layers = sizes.hidden * (half * rows + full * columns) + half * sum([*row_ranks, *column_ranks])
    of_ends = sizes.hidden * (full * tokens * sizes.is_embedding_divided + half * labelled)
    terms = 2 * 4 * mesh.tensor * step.num_labelled / groups  # training/models/logits.py, losses_of
    last = len(_layers_of_last_stage(sizes, stages, mesh.chunks))
    share = last / sizes.num_layers if sizes.num_layers else 0.0
    columns = columns if stages == 1 else sizes.column_matrices
    calls = round(share * (rows + columns + len(row_ranks) + len(column_ranks))) + 1
    calls += sizes.is_embedding_divided and stages == 1
    micro = step.micro_batches
    reduced = _repeat("activations", "all-reduce", (of_layers * tokens + of_ends) / stages, mesh.tensor, calls=calls)
    loss = _repeat("loss", "all-gather", terms / stages, mesh.tensor, calls=1)
    return [replace(message, times=micro, calls=(message.calls or 0) * micro) for message in (reduced, loss)]


def _hidden_states(strategy: Strategy, mesh: Mesh, sizes: ModelSizes, step: Step) -> list[Transfer]:
    """Pipeline parallel: hidden states forward and their gradients back, in the dtype of the residual stream: float32
    under autocast, that of the frozen weights beside an adapter, that of the forward under FSDP2. Each process of a
    tensor-parallel group sends all of them. With several chunks they pass all stages as often, and between that go from
    the last to the first.
    """
    if mesh.pipeline == 1:
        return []
    each = hidden_bytes(strategy, step.precision, is_full=sizes.is_full) * sizes.hidden
    borders = (mesh.pipeline * mesh.chunks - 1) / (mesh.pipeline - 1)
    sent = 2 * each * step.num_tokens / mesh.token_parallel_size * borders
    message = _repeat("hidden states", "send", sent, mesh.pipeline, stride=mesh.stage_size)
    # The last stage sends its last chunk's only back.
    calls = (2 * mesh.chunks - 1) * step.micro_batches
    return [replace(message, times=2 * mesh.chunks * step.micro_batches, calls=calls)]


def _of_tied(strategy: Strategy, mesh: Mesh, sizes: ModelSizes, step: Step) -> list[Transfer]:
    """Pipeline parallel: the first and the last stage add up the gradients of an embedding that is also the head."""
    if mesh.pipeline == 1 or not (sizes.is_tied and sizes.head_trained):
        return []
    parts = mesh.tensor if sizes.is_embedding_divided else 1
    parts *= mesh.stage_size // mesh.tensor if strategy.fsdp is not None else 1
    size, apart = _exchanged_bytes(strategy, step) * sizes.head / parts, (mesh.pipeline - 1) * mesh.stage_size
    message = _repeat("gradients of the tied embedding", "all-reduce", size, 2, stride=apart, calls=1)
    return [replace(message, groups=mesh.stage_size)]


def checkpoint_traffic(strategy: Strategy, sizes: ModelSizes, step: Step, num_processes: int) -> float:
    """Bytes of the inputs of layers that each process sends to its host in a step, and reads back."""
    if not step.offloads_checkpoints:
        return 0.0
    each = hidden_bytes(strategy, step.precision, is_full=sizes.is_full) * sizes.hidden
    tokens = step.num_tokens * strategy.tp_size * strategy.pp_size / num_processes
    return 2 * each * tokens * sizes.num_layers / strategy.pp_size


@dataclass(frozen=True, kw_only=True)
class HostTraffic:
    """Bytes that offloading moves in a step: per GPU over its link, per machine in host memory and on disk."""

    down: float = 0.0
    """From a GPU to its host."""
    up: float = 0.0
    update: float = 0.0
    """Host memory traffic of the optimizer."""
    disk_read: float = 0.0
    disk_write: float = 0.0


OFFLOADED = """
offloaded            down               up                 update               disk_read              disk_write
weights of FSDP      4*trained*micro    4*gathered*micro   adamw*trained*local  -                      -
gradients of ZeRO-3  low*trained*micro  low*trained*added  -                    -                      -
optimizer            4*trained          -                  adamw*trained*local  -                      -
optimizer alone      -                  low*trained        -                    -                      -
weights              -                  low*share*twice    -                    -                      -
optimizer on a disk  -                  -                  -                    16*trained*local       16*trained*local
weights on a disk    -                  -                  -                    low*share*twice*local  low*trained*local
"""
"""`HostTraffic` of what is offloaded. FSDP2 copies its shard in float32 and casts it on the GPU (torch 2.13,
_fsdp_param.py, all_gather_inputs). Gradients of ZeRO-3 accumulate on the host and are copied back to the GPU for each
addition (stage3.py, partition_grads). On a disk are weight, two moments and gradient in float32."""


def host_traffic(
    strategy: Strategy, sizes: ModelSizes, step: Step, *, num_processes: int, gpus_each: int
) -> HostTraffic:
    """The offload traffic of a step. `gpus_each`: processes of a machine, which share its CPUs and disk."""
    optimizer, weights = strategy.offload_optimizer, strategy.offload_param
    is_offloaded = {
        "weights of FSDP": strategy.fsdp is not None and strategy.fsdp.fsdp_offload_params,
        "gradients of ZeRO-3": optimizer is not None and strategy.zero_stage == 3,
        "optimizer": optimizer is not None,
        "optimizer alone": optimizer is not None and weights is None,
        "weights": weights is not None,
        "optimizer on a disk": optimizer == "nvme",
        "weights on a disk": weights == "nvme",
    }
    share, micro = sizes.num_parameters / num_processes, step.micro_batches
    amounts = {"low": bytes_of(step.precision), "adamw": ADAMW_BYTES, "local": gpus_each, "share": share}
    amounts |= {"micro": micro, "added": micro - 1, "twice": 2 * micro, "trained": sizes.num_trained / num_processes}
    amounts["gathered"] = 2 * share - sizes.head / num_processes if strategy.gathers_weights else share
    (_, *names), rows = read_table(OFFLOADED)
    moved = add_up(names, [cells for name, *cells in rows if is_offloaded[name]], amounts)
    return HostTraffic(**{name: float(size) for name, size in moved.items()})
