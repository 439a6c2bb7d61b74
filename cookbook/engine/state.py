"""Where each strategy keeps weights and optimizer state, told in one language: runs of the elements of a parameter.

Whatever shards a parameter, a process holds `count` runs of `length` consecutive elements of the flattened whole, each
`stride` after the one before: one run under data parallelism, one for each row under tensor parallelism by columns. So
state can be written where it lies, without communication, and read by any other strategy. Weights are the float32
masters that the optimizer updates.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Shard

if TYPE_CHECKING:
    from cookbook.engine import Engine

WEIGHT = "weight"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What this process holds of one tensor of the state: `data` is the memory itself, and writing changes the run."""

    name: str
    """Of the parameter, as the transformers model names it."""
    kind: str
    """`weight`, or the optimizer's name for it: exp_avg, exp_avg_sq, momentum_buffer."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """Where the first run begins in the flattened whole."""
    stride: int
    """From the beginning of one run to that of the next."""
    data: torch.Tensor
    """(count, length) float32."""
    copies: int = 1
    """How many processes hold these very elements."""
    copy: int = 0
    """Which of them this process is."""

    def share(self) -> "Piece":
        """The part that this process writes, where several hold the same; it can be empty."""
        count, length = self.data.shape
        if self.copies == 1:
            return self
        if count == 1:
            low, high = (length * i // self.copies for i in (self.copy, self.copy + 1))
            return replace(self, start=self.start + low, data=self.data[:, low:high], copies=1, copy=0)
        low, high = (count * i // self.copies for i in (self.copy, self.copy + 1))
        return replace(self, start=self.start + low * self.stride, data=self.data[low:high], copies=1, copy=0)


KindsOf = Callable[[str], Collection[str]]
"""From a parameter's name to the kinds of its optimizer state."""


def pieces(engine: "Engine", create: KindsOf | None = None) -> Iterator[Piece]:
    """What this process holds of every trained parameter, tied ones once, in the model's order.

    A piece must be read or written before the next is asked for: what lies on NVMe is there only so long.

    Args:
        create: which optimizer state to make, in zeros, where there is none yet; what is written into pieces then
            lasts. Without it, pieces are only read.
    """
    if engine.strategy.kind == "zero":
        stage3 = engine.strategy.zero_stage == 3
        yield from (_zero3_pieces if stage3 else _zero12_pieces)(engine, create)
    elif engine.strategy.kind == "fsdp1":
        yield from _fsdp1_pieces(engine, create)
    else:
        yield from _tensor_pieces(engine, create)


def trained_parameters(engine: "Engine") -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Names without what wrappers add; tied parameters come once."""
    for name, parameter in engine.model.named_parameters():
        if parameter.requires_grad:
            yield name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""), parameter


def updates_made(engine: "Engine") -> int | None:
    """How many updates the optimizer counts, which Adam's bias correction needs; None if it does not count."""
    counts = {int(state["step"]) for state in _base_optimizer(engine).state.values() if "step" in state}
    assert len(counts) <= 1, f"the optimizer counts different updates: {sorted(counts)}"
    return counts.pop() if counts else None


def finish_restore(engine: "Engine", num_updates: int | None) -> None:
    """After all pieces were written: the optimizer's count, and the copies that forwards read. Collective.

    The count stands beside one kind of state, `Optimizer.counts_beside`; what lacks that, as Muon's matrices do, counts
    nothing.
    """
    if num_updates is not None:
        for parameter, state in _base_optimizer(engine).state.items():
            if engine.counts_beside in state:
                # Where the fused AdamW makes it. DeepSpeed's own and bitsandbytes' count in an int.
                fresh = torch.zeros((), device=parameter.device)
                old = state.get("step", fresh)
                state["step"] = torch.full_like(old, num_updates) if isinstance(old, torch.Tensor) else num_updates
    if engine.strategy.kind != "zero":
        return
    zero = engine.model.optimizer
    if engine.strategy.zero_stage == 3:
        for i in range(len(zero.fp16_groups)):
            swapped = zero._swappable_optimizer_subgroup(i)
            if swapped:
                zero._optimizer_states_and_gradient_swap_in(i)
            zero._reassign_or_swap_out_partitioned_parameters(i)
            if swapped:
                zero._optimizer_states_and_gradient_swap_out(i)
        for parameter in zero.persistent_parameters:
            parameter.partition()
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        zero.invalidate_secondary_tensor()
        return
    from deepspeed.runtime.utils import all_gather_dp_groups

    # As at the end of its step (stage_1_and_2.py): each process fills in its part, and all gather the others'.
    for i, master in enumerate(zero.single_partition_of_fp32_groups):
        rank = torch.distributed.get_rank(zero.real_dp_process_group[i])
        zero.parallel_partitioned_bit16_groups[i][rank].data.copy_(master.data)
    all_gather_dp_groups(
        groups_flat=zero.bit16_groups_flat,
        partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
        dp_process_group=zero.real_dp_process_group,
        start_alignment_factor=zero.nccl_start_alignment_factor,
        allgather_bucket_size=zero.allgather_bucket_size,
    )


def _base_optimizer(engine: "Engine") -> Any:
    """torch's, inside what wraps it."""
    return engine.model.optimizer.optimizer if engine.strategy.kind == "zero" else engine.optimizer.optimizer


class _Moments:
    """What an optimizer keeps for each parameter, or flat group of them, in float32.

    Of an optimizer that keeps it in 8 bits these are copies, and `keep` gives them back.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._copies: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []

    def of(self, parameter: torch.Tensor, kinds: Collection[str] | None) -> dict[str, torch.Tensor]:
        """By kind.

        Args:
            kinds: to be made in zeros if they are not there.
        """
        if hasattr(self.optimizer, "set_moments"):
            return self._copies_of(parameter, kinds or ())
        if kinds is None and parameter not in self.optimizer.state:
            return {}
        state = self.optimizer.state[parameter]
        for kind in kinds or ():
            if kind not in state:
                state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return {kind: value for kind, value in state.items() if kind != "step" and isinstance(value, torch.Tensor)}

    def _copies_of(self, parameter: torch.Tensor, kinds: Collection[str]) -> dict[str, torch.Tensor]:
        for known, copies in self._copies:
            if known is parameter:
                return copies
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        copies = {kind: torch.zeros_like(local, device="cpu") for kind in kinds} | self.optimizer.moments(parameter)
        self._copies.append((parameter, copies))
        return copies

    def keep(self, create: KindsOf | None) -> None:
        """After the pieces so far were written, if they were."""
        for parameter, copies in self._copies:
            if create is not None and copies:
                self.optimizer.set_moments(parameter, copies)
        self._copies.clear()


def _tensor_pieces(engine: "Engine", create: KindsOf | None) -> Iterator[Piece]:
    """Whole parameters and DTensors."""
    moments = _Moments(_base_optimizer(engine))
    for name, parameter in trained_parameters(engine):
        state = moments.of(parameter, create and create(name))
        start, stride, count, copies, copy = _placement(engine, parameter)
        for kind, tensor in {WEIGHT: parameter.detach(), **state}.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.numel():
                yield Piece(
                    name=name,
                    kind=kind,
                    shape=tuple(parameter.shape),
                    start=start,
                    stride=stride,
                    data=local.view(count, -1),
                    copies=copies,
                    copy=copy,
                )
        moments.keep(create)


def _placement(engine: "Engine", parameter: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Start, stride and number of the runs that this process holds, and its place among those that hold the same."""
    if not isinstance(parameter, DTensor):
        return 0, 0, 1, engine.world.num_processes, engine.world.rank
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, shape = parameter.device_mesh, parameter.shape
    _, offset = compute_local_shape_and_global_offset(shape, mesh, parameter.placements)
    cut = {placement.dim for placement in parameter.placements if isinstance(placement, Shard)}
    assert len(cut) <= 1, f"a parameter cut along several dimensions: {parameter.placements}"
    copies, copy = 1, 0
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for size, place, placement in zip(mesh.shape, coordinate, parameter.placements, strict=True):
        if placement.is_replicate():
            copies, copy = copies * size, copy * size + place
    if not cut:
        return 0, 0, 1, copies, copy
    (dim,) = cut
    inner = math.prod(shape[dim + 1 :])
    count = math.prod(shape[:dim])
    return offset[dim] * inner, shape[dim] * inner, count, copies, copy


def _fsdp1_pieces(engine: "Engine", create: KindsOf | None) -> Iterator[Piece]:
    """Each unit's parameters lie one after the other in a flat one, of which each process has a part."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    infos: dict[int, tuple[Any, torch.Size]] = {}
    for unit in FullyShardedDataParallel.fsdp_modules(engine.model):
        handle: Any = unit._handle
        if handle is not None:
            flat = handle.flat_param
            for parameter, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
                infos[id(parameter)] = info, shape
    moments = _Moments(_base_optimizer(engine))
    for name, parameter in trained_parameters(engine):
        info, shape = infos[id(parameter)]
        if not info.in_shard:
            continue
        state = moments.of(parameter, create and create(name))
        for kind, tensor in {WEIGHT: parameter.detach(), **state}.items():
            yield Piece(
                name=name,
                kind=kind,
                shape=tuple(shape),
                start=info.intra_param_start_idx,
                stride=0,
                data=tensor.view(1, -1),
            )
        moments.keep(create)


def _zero12_pieces(engine: "Engine", create: KindsOf | None) -> Iterator[Piece]:
    """Parameters of a group lie one after the other in a flat one, of which each process has a part."""
    zero = engine.model.optimizer
    moments = _Moments(_base_optimizer(engine))
    for name, parameter in trained_parameters(engine):
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:  # other processes have all of it
            continue
        flat = zero.single_partition_of_fp32_groups[mapping.param_group_index]
        state = moments.of(flat, create and create(name))
        place = mapping.hp_fragment_address
        for kind, tensor in {WEIGHT: flat.detach(), **state}.items():
            yield Piece(
                name=name,
                kind=kind,
                shape=tuple(parameter.shape),
                start=mapping.lp_fragment_address.start,
                stride=0,
                data=tensor.narrow(0, place.start, place.numel).view(1, -1),
            )
    moments.keep(create)


def _zero3_pieces(engine: "Engine", create: KindsOf | None) -> Iterator[Piece]:
    """Each process has an equal part of each parameter, the last one padded; sub-groups may lie on NVMe."""
    zero = engine.model.optimizer
    moments = _Moments(_base_optimizer(engine))
    names = {id(parameter): name for name, parameter in trained_parameters(engine)}
    zero._set_fp32_optimizer_param_groups()  # else an optimizer that looks for its parameters finds none
    try:
        for i, group in enumerate(zero.fp16_groups):
            with _swapped_in(zero, i, changed=create is not None):
                yield from _zero3_group(
                    engine, i, [(names[id(parameter)], parameter) for parameter in group], moments, create
                )
                moments.keep(create)
    finally:  # a save that breaks off is no end of the run
        zero._clear_fp32_optimizer_param_groups()


@contextlib.contextmanager
def _swapped_in(zero: Any, i: int, *, changed: bool) -> Iterator[None]:
    """A sub-group's states in memory, if they lie on NVMe, whose few buffers are given back in any case."""
    if not zero._swappable_optimizer_subgroup(i):
        yield
        return
    zero._optimizer_states_and_gradient_swap_in(i)
    try:
        yield
    finally:
        if changed:
            zero._optimizer_states_and_gradient_swap_out(i)
        else:
            zero._release_swap_buffers(i)


def _zero3_group(
    engine: "Engine", i: int, group: list[tuple[str, torch.nn.Parameter]], moments: "_Moments", create: KindsOf | None
) -> Iterator[Piece]:
    zero = engine.model.optimizer
    flat = zero.fp32_partitioned_groups_flat[i]
    for name, parameter in group:
        state = moments.of(flat, create and create(name))
        index, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
        assert index == i
        part = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        start = engine.world.rank * part
        length = min(part, parameter.ds_numel - start)  # type: ignore[attr-defined]
        if length <= 0:
            continue
        for kind, tensor in {WEIGHT: flat.detach(), **state}.items():
            yield Piece(
                name=name,
                kind=kind,
                shape=tuple(parameter.ds_shape),  # type: ignore[attr-defined]
                start=start,
                stride=0,
                data=tensor.narrow(0, offset, length).view(1, -1),
            )
