"""Memory of weights, gradients and optimizer state on each process, by the rules of each engine.

Every rule cites the code that it follows; `tests/test_forecast_states.py` compares it with the engines, to the byte.

`TABLE` has what a process holds between steps; docs/strategies.md derives from it the bytes of a parameter under each
strategy.

What a GPU holds during a step of two micro-batches (# allocated, . not):

                       forward  backward  forward  backward  update   where
    weights, moments   #######  ########  #######  ########  ######   gpu
    gradients          .......  ..######  #######  ########  ######   gradients_at_first, gradients_between, gpu
    gathered weights   .#.#.#.  #.#.#.#.  .#.#.#.  #.#.#.#.  ......   units; of ZeRO-3 gathered_weights and sent
      where they stay  .######  ########  .######  ########  ......   units that stay (fsdp2_grad_op)
    buckets            .......  ########  .......  ########  ......   gradient_buckets, reduction
    float32 gradients  .......  ........  .......  ........  ..##..   update
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from cookbook.config.optim import Optimizer
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.facts.meshes import in_buckets, swap_limit
from cookbook.forecast.costs.inputs import CostInputs, Skeleton, Weight, WeightsKey, stage_of
from cookbook.forecast.costs.table import add_up, read_table

FLOAT32 = 4
SWAP_ALIGNMENT = 1024
"""DeepSpeed pads files and buffers to multiples of this many bytes per thread (AIO_ALIGNED_BYTES)."""
ALIGNMENT_FSDP1 = 16
"""Bytes to which FSDP1 aligns a parameter in the flat one (torch/distributed/fsdp/_flat_param.py,
_get_aligned_numel)."""
TABLE = """
engine                    place  weights               masters    gradients                moments    buffers
whole                     gpu    shards + constants    -          4*trained                state      model
fsdp1                     gpu    4*shares              -          4*trained                state      model
fsdp2                     gpu    constants             -          -                        -          model
fsdp2, weights on gpu     gpu    shards                -          4*trained                state      -
fsdp2, weights on cpu     host   shards                -          4*trained                state      -
zero12                    gpu    low*flats + frozen    -          -                        -          model
zero12, optimizer on gpu  gpu    -                     4*parts    sum*accumulated          state      -
zero12, optimizer on cpu  gpu    -                     -          -                        -          low*largest
zero12, optimizer on cpu  host   -                     4*parts    4*parts + waiting        state      low*returned
zero3                     gpu    gathered + constants  -          -                        -          bucket + model
zero3, weights on gpu     gpu    shards                -          -                        -          second
zero3, weights on cpu     host   shards                -          -                        -          second
zero3, weights on nvme    host   small                 -          -                        -          weight_swapper
zero3, weights on nvme    disk   low*swapped           -          -                        -          -
zero3, optimizer on gpu   gpu    -                     4*trained  sum*trained              state      -
zero3, optimizer on cpu   host   -                     4*trained  sum*trained + 4*trained  state      -
zero3, optimizer on nvme  host   -                     4*kept     sum*trained + 4*held     in_memory  4*swapper
zero3, optimizer on nvme  disk   -                     4*files    4*blocks                 4*moments  -
"""
"""Memory of a process between the last backward of a step and its update: the sum of all rows whose engine and options
hold. `zero2_offload` has the rows of zero12, and of zero12 with the optimizer on the CPU.

A cell adds up bytes, or numbers of elements times the bytes of each: 4 of float32, `low` of the compute dtype, `sum` of
an accumulated gradient. Amounts are those of this process:

- `shards`, `shares`: all weights, as far as it has them; `trained`, `parts`: its trained elements.
- `frozen`, `constants`, `model`: frozen weights, constants of 4-bit weights, buffers of the model. All are whole.
- `state`: optimizer state of its elements; `in_memory`: the part of it that is not swapped.
- zero12: `flats` are the flat tensors, `accumulated` its gradients. `waiting` are those of earlier micro-batches,
  `largest` is the largest weight, and `returned` the new weights on their way back.
- zero3: `gathered` are small weights that stay gathered, `bucket` is one of gradients, `second` the second copy of hpZ.
- nvme: `small` and `kept` are not swapped; `swapped`, `files` and `blocks` are on the disk, with their padding. `held`
  are gradients that stay in memory beside those; `weight_swapper` and `swapper` are the buffers."""
COLUMNS, ROWS = read_table(TABLE)


@dataclass(frozen=True, kw_only=True)
class ResidentBytes:
    """Memory of one process in one place, between the last backward of a step and its update."""

    weights: int = 0
    """Weights that the forward reads, frozen ones included: whole or sharded, plus permanently gathered ones."""
    masters: int = 0
    """Separate float32 copies that the optimizer updates."""
    gradients: int = 0
    moments: int = 0
    """Optimizer state."""
    buffers: int = 0
    """Permanent buffers of the engine, and buffers of the model."""

    @property
    def total(self) -> int:
        return self.weights + self.masters + self.gradients + self.moments + self.buffers


@dataclass(frozen=True, kw_only=True)
class Unit:
    """An FSDP unit: weights that are gathered, and whose gradients are reduced, together. Sizes are in bytes."""

    layer: int | None
    """Decoder layer; None outside the layers."""
    parts: tuple[str, ...]
    """Parts of the model, as in `Weight.part`."""
    weights: int
    """The gathered weights."""
    gradients: int
    """The whole gradients in the buffer to reduce."""
    gradients_made: int
    """The gradients as produced by the backward, before they are copied to that buffer."""
    gradients_left: int
    """This process's shard of the reduced gradients."""
    sent: int
    """This process's shard of the weights that a gather casts, or fetches from the host, before it sends them."""
    stays: bool
    """True: stays gathered until its gradients are reduced; False: freed after the forward."""
    is_experts: bool = False
    """True: experts of a layer, inside the unit of the rest of the layer (expert parallel)."""
    gradients_kept: int = 0
    """Part of `gradients_made` that lives until the reduced shard is there too."""


@dataclass(frozen=True, kw_only=True)
class States:
    """The permanent state of one process, and the additional memory of forward and backward."""

    gpu: ResidentBytes
    host: ResidentBytes = field(default_factory=ResidentBytes)
    """Pinned host memory."""
    disk: ResidentBytes = field(default_factory=ResidentBytes)
    """NVMe."""
    gradients_at_first: int
    """Gradients on the GPU during the first micro-batch of a step."""
    gradients_between: int
    """Gradients on the GPU between micro-batches; differs from the end of the step for ZeRO-1 only."""
    units: tuple[Unit, ...] = ()
    """FSDP units, in the order of the forward."""
    is_flat: bool = False
    """True: weights of a unit are views of the gathered tensor (FSDP1); False: copies (FSDP2)."""
    gathered_weights: int = 0
    """Maximum of temporarily gathered weights on the GPU."""
    sent: int = 0
    """The gather's output buffer, which lives until all weights in it have been used (ZeRO-3)."""
    is_sent_again: bool = False
    """True: the backward gathers again, because not all weights can stay until then."""
    buffers_late: int = 0
    """Part of `gpu.buffers` that a step has only from the end of its first micro-batch on."""
    gradient_buckets: int = 0
    """Gradient buckets on the GPU, allocated from the first gradient of a backward to its end."""
    bucket: int = 0
    """Gradients that are reduced at once (ZeRO)."""
    whole_gradients: int = 0
    """Unsharded gradients of the whole model."""
    reduction: int = 0
    """Temporary memory of a reduction, beyond the buckets."""
    gradients_before: int = 0
    """Gradients of earlier micro-batches, at the last reduction of a backward."""
    gradients_added: int = 0
    """Temporary result of that reduction, which is added to them."""
    update: int = 0
    """Temporary memory of the update and of what follows it, beyond `gpu`."""


Amounts = dict[str, int]
"""Bytes or numbers of elements, by their names in `TABLE`."""
Elements = Callable[[Weight], int]
"""Returns the number of elements of a weight, or of a part of it."""
Engine = Callable[[Skeleton, CostInputs, int], tuple[Amounts, dict[str, Any]]]
"""Returns the amounts of the process with a shard's number, and what a step adds to them as fields of `States`."""


def states(skeleton: Skeleton, inputs: CostInputs, rank: int = 0) -> States:
    """The states of one process after the first update, when the optimizer has its moments."""
    return _states(WeightsKey(skeleton, inputs), rank)


@lru_cache(maxsize=1024)
def _states(key: WeightsKey, rank: int) -> States:
    """A process has a stage of layers, of that a shard of each matrix or some of each layer's experts, and of that the
    engine's shard, each as far as the mesh goes.
    """
    skeleton, inputs = key.skeleton, key.inputs
    mesh, strategy = inputs.mesh, inputs.strategy
    stage, within = divmod(rank, mesh.stage_size)
    layers = stage_of(skeleton, stage, mesh.pipeline, mesh.chunks)
    own = _own_experts(_tensor_shards(layers, mesh.tensor, within % mesh.tensor), mesh.expert)
    name, engine = _engine(strategy)
    amounts, step = engine(own, inputs, within // mesh.tensor)
    amounts |= {"low": inputs.low_bytes, "sum": gradient_bytes(inputs)}
    amounts |= {"constants": constants(own.weights), "model": FLOAT32 * sum(own.buffers)}
    weights = "cpu" if strategy.fsdp is not None and strategy.fsdp.fsdp_offload_params else strategy.offload_param
    options = {f"weights on {weights or 'gpu'}", f"optimizer on {strategy.offload_optimizer or 'gpu'}"}
    keys = {name, *(f"{name}, {option}" for option in options)}
    gpu, host, disk = (_resident(keys, place, amounts) for place in ("gpu", "host", "disk"))
    # DDP and ZeRO-3 have buffers for gradients, which outlive zero_grad.
    has_buffers = name == "zero3" or strategy.kind == "ddp"
    return States(
        gpu=gpu,
        host=host,
        disk=disk,
        gradients_at_first=gpu.gradients if has_buffers else 0,
        gradients_between=step.pop("gradients_between", gpu.gradients),
        **step,
    )


def heaviest(skeleton: Skeleton, inputs: CostInputs) -> States:
    """The states of the rank that holds most, the first of several."""
    return _heaviest(WeightsKey(skeleton, inputs))


@lru_cache(maxsize=1024)
def _heaviest(key: WeightsKey) -> States:
    ranks = _ranks_that_differ(key.skeleton, key.inputs)
    return max((_states(key, rank) for rank in ranks), key=lambda held: held.gpu.total)


def _ranks_that_differ(skeleton: Skeleton, inputs: CostInputs) -> list[int]:
    """A rank of each amount of GPU memory that may be the largest. Shards of stages are padded to equal size, or the
    first has most; equal shards of flat tensors differ in which weights they touch.
    """
    strategy, count = inputs.strategy, inputs.num_processes
    if strategy.kind == "pp":
        return [*range(0, count, inputs.mesh.stage_size)]
    if strategy.kind == "fsdp1":
        return _ranks_fsdp1(skeleton, inputs)
    are_whole = strategy.offload_optimizer is None and gradient_bytes(inputs) <= inputs.low_bytes
    if strategy.zero_stage in (1, 2) and are_whole:
        return [_fullest_zero12(skeleton, inputs)]
    return [0]


def _ranks_fsdp1(skeleton: Skeleton, inputs: CostInputs) -> list[int]:
    """The ranks in whose shards a weight begins or ends, and for all between two such ranks the first."""
    ranks = {0, inputs.num_processes - 1}
    for group in _by_layer(skeleton).values():
        starts, length = _flat(group, inputs.num_processes, alignment=ALIGNMENT_FSDP1 // inputs.low_bytes)
        share = length // inputs.num_processes
        ends = [start + weight.num_elements for start, weight in zip(starts, group, strict=True)]
        for place in (*starts, *ends) if share else ():
            ranks |= {place // share - 1, place // share, place // share + 1}
    return sorted(rank for rank in ranks if 0 <= rank < inputs.num_processes)


def _fullest_zero12(skeleton: Skeleton, inputs: CostInputs) -> int:
    """The rank whose shards touch the weights with most elements, which keeps their gradients whole (`_zero12`)."""
    count = inputs.num_processes
    kept = [0] * count
    for group in _param_groups(skeleton, inputs.optim):
        starts, length = _flat(group, 2 * count)
        part, filled = length // count, starts[-1] + group[-1].num_elements
        changes = [0] * (count + 1)
        for start, weight in zip(starts, group, strict=True):
            changes[start // part] += weight.num_elements
            changes[(start + weight.num_elements - 1) // part + 1] -= weight.num_elements
        for rank, touched in enumerate(accumulate(changes[:count])):
            kept[rank] += touched + part - _overlap(0, filled, rank * part, part)
    return max(range(count), key=kept.__getitem__)


def _engine(strategy: Strategy) -> tuple[str, Engine]:
    """An engine's name in `TABLE`, and its function."""
    match strategy.kind:
        case "fsdp1":
            return "fsdp1", _fsdp1
        case "zero":
            return ("zero3", _zero3) if strategy.zero_stage == 3 else ("zero12", _zero12)
    return ("whole", _whole) if strategy.fsdp is None else ("fsdp2", _fsdp2)


def _resident(keys: Collection[str], place: str, amounts: Amounts) -> ResidentBytes:
    """The sum of the rows of `keys` in a place."""
    rows = [cells for key, where, *cells in ROWS if key in keys and where == place]
    return ResidentBytes(**add_up(COLUMNS[2:], rows, amounts))


def _whole(skeleton: Skeleton, inputs: CostInputs, _: int) -> tuple[Amounts, dict[str, Any]]:
    """Trained weights are float32 under autocast; frozen ones have the compute dtype."""
    trained = [weight.num_elements for weight in skeleton.weights if weight.is_trained]
    # After the first step DDP rebuilds its buckets while the gradients are still views of the old ones
    # (gradient_as_bucket_view); of one process too.
    is_wrapped = inputs.strategy.kind == "ddp"

    def whole(weight: Weight) -> int:
        return math.prod(_stored_shape(weight, inputs))

    amounts = _of_each_weight(skeleton, inputs, whole, whole)
    return amounts, {"update": FLOAT32 * sum(trained) if is_wrapped else _largest_bucket(trained, inputs)}


def _of_each_weight(skeleton: Skeleton, inputs: CostInputs, padded: Elements, filled: Elements) -> Amounts:
    """Amounts of an engine that keeps weights apart, by what a process has of each with and without padding."""
    trained = [weight for weight in skeleton.weights if weight.is_trained]
    return {
        "shards": sum(_bytes_per_number(weight, inputs) * padded(weight) for weight in skeleton.weights),
        "trained": sum(map(padded, trained)),
        "state": inputs.optim.state_bytes((filled(weight), weight.is_orthogonal) for weight in trained),
    }


def _largest_bucket(trained: list[int], inputs: CostInputs) -> int:
    """Bytes of the flat bucket of gradients that copies of the model exchange (engine/collectives.py, add_up)."""
    if inputs.strategy.mesh(inputs.num_processes).replicate == 1:
        return 0
    sizes = [inputs.exchange_bytes * numel for numel in trained]
    are_sent = inputs.optim.gradient_dtype is not None  # else a tensor that is alone is sent as it is
    buckets = [numbers for numbers in in_buckets(sizes) if are_sent or len(numbers) > 1]
    return max((sum(sizes[i] for i in numbers) for numbers in buckets), default=0)


def _tensor_shards(skeleton: Skeleton, size: int, rank: int) -> Skeleton:
    """The weights with the shapes that they have on a rank of a tensor-parallel group."""

    def shard(weight: Weight) -> Weight:
        if size == 1 or weight.shard_dim is None:
            return weight
        shape = list(weight.shape)
        shape[weight.shard_dim] = _chunk(shape[weight.shard_dim], size, rank)
        return replace(weight, shape=tuple(shape))

    return replace(skeleton, weights=tuple(map(shard, skeleton.weights)))


def _own_experts(skeleton: Skeleton, size: int) -> Skeleton:
    """The weights with the shapes that they have on a rank of an expert-parallel group: equal numbers of experts."""

    def own(weight: Weight) -> Weight:
        rows, *others = weight.shape
        return replace(weight, shape=(rows // size, *others)) if weight.is_expert and size > 1 else weight

    return replace(skeleton, weights=tuple(map(own, skeleton.weights)))


def _fsdp2(skeleton: Skeleton, inputs: CostInputs, rank: int) -> tuple[Amounts, dict[str, Any]]:
    """Parameters and gradients are sharded along dimension 0, and shards padded to equal size
    (fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param); copies on the host may lack the padding.

    Under expert parallel a layer's experts are a unit inside that of the layer.
    """
    mesh, fsdp = inputs.mesh, inputs.strategy.fsdp
    assert fsdp is not None

    def shards(weight: Weight) -> int:
        return mesh.num_shards // mesh.expert if weight.is_expert else mesh.num_shards

    def padded_size(weight: Weight) -> int:
        rows, *others = _stored_shape(weight, inputs)
        return math.prod(others) * math.ceil(rows / shards(weight))

    def gathered_size(weight: Weight) -> int:
        return shards(weight) * padded_size(weight)

    def local(weight: Weight) -> int:
        index = rank // mesh.expert if weight.is_expert else rank
        rows = _chunk(weight.shape[0], shards(weight), index % shards(weight))
        return weight.num_elements // weight.shape[0] * rows

    def is_copied(weight: Weight) -> bool:
        # A shard that needs no cast is gathered as it lies (_fsdp_collectives.py, _get_param_all_gather_inputs).
        return fsdp.fsdp_offload_params or _bytes_per_number(weight, inputs) != low

    def last_gradient(weights: list[Weight]) -> int:
        """Numbers of a unit's last gradient: a loop's variable holds it through the reduction (torch 2.13,
        _fsdp_collectives.py, foreach_reduce). The last of several ends is the embedding or the head.
        """
        trained = [weight for weight in weights if weight.is_trained and shards(weight) > 1]
        ends = [weight for weight in trained if weight.layer is None and weight.part != "rest"]
        return max((weight.num_elements for weight in ends or trained[-1:]), default=0)

    low = inputs.low_bytes
    units = tuple(
        Unit(
            layer=layer,
            parts=parts,
            weights=low * sum(map(gathered_size, group)),
            gradients=inputs.exchange_bytes * sum(gathered_size(weight) for weight in group if weight.is_trained),
            gradients_made=low * sum(weight.num_elements for weight in group if weight.is_trained),
            gradients_left=FLOAT32 * sum(padded_size(weight) for weight in group if weight.is_trained),
            sent=low * sum(padded_size(weight) for weight in group if is_copied(weight)),
            stays=stays or (not is_experts and not fsdp.fsdp_reshard_after_forward),
            is_experts=is_experts,
            gradients_kept=low * last_gradient(group),
        )
        for layer, parts, stays, is_experts, group in _units_fsdp2(skeleton, has_experts=mesh.expert > 1)
    )
    return _of_each_weight(skeleton, inputs, padded_size, local), {"units": units}


def _units_fsdp2(
    skeleton: Skeleton, *, has_experts: bool
) -> Iterator[tuple[int | None, tuple[str, ...], bool, bool, list[Weight]]]:
    """Layer, parts, `Unit.stays`, `Unit.is_experts` and weights of each unit (accelerate 1.15, fsdp2_prepare_model;
    transformers 5.23, distributed/fsdp.py, apply_fully_sharded_data_parallelism).

    Args:
        has_experts: whether experts are units of their own, which are always freed after the forward.
    """
    of_part = {part: [w for w in skeleton.weights if w.part == part] for part in ("embedding", "norm", "head", "rest")}
    # Of a pipeline's stages the last has a tied embedding as its head, and the others have no tail.
    is_one = skeleton.is_tied and bool(of_part["embedding"])
    tail = ("embedding", "norm", "head") if is_one else ("norm", "head")
    if not is_one:
        yield None, ("embedding",), False, False, of_part["embedding"]
    if of_part["rest"]:
        yield None, ("rest",), True, False, of_part["rest"]
    layers = _by_layer(skeleton)
    for layer in range(skeleton.num_layers):
        experts = [weight for weight in layers[layer] if has_experts and weight.is_expert]
        rest = [weight for weight in layers[layer] if not (has_experts and weight.is_expert)]
        yield layer, ("layer",), False, False, rest
        if experts:
            yield layer, ("layer",), False, True, experts
    yield None, tail, True, False, [weight for part in tail for weight in of_part[part]]


def _by_layer(skeleton: Skeleton) -> dict[int | None, list[Weight]]:
    by_layer: dict[int | None, list[Weight]] = defaultdict(list)
    for weight in skeleton.weights:
        by_layer[weight.layer].append(weight)
    return by_layer


def _fsdp1(skeleton: Skeleton, inputs: CostInputs, rank: int) -> tuple[Amounts, dict[str, Any]]:
    """Each layer is one flat float32 parameter, the rest another; each process has an equal shard.

    Weights are aligned to 16 bytes of the compute dtype, and the length is a multiple of the processes
    (_flat_param.py, _init_flat_param_and_metadata). If any weight of a unit is trained, the whole flat parameter has a
    gradient.
    """
    strategy, num_processes = inputs.strategy, inputs.num_processes
    assert strategy.fsdp is not None
    low = inputs.low_bytes
    shares, trained, local, units = 0, 0, [], []
    by_layer = _by_layer(skeleton)
    for layer in (None, *range(skeleton.num_layers)):
        group = by_layer[layer]
        starts, length = _flat(group, num_processes, alignment=ALIGNMENT_FSDP1 // low)
        share = length // num_processes
        is_trained = any(weight.is_trained for weight in group)
        shares += share
        trained += share * is_trained
        local += [
            (_overlap(start, weight.num_elements, rank * share, share), weight)
            for start, weight in zip(starts, group, strict=True)
        ]
        stays = layer is None or strategy.fsdp.fsdp_sharding_strategy != "FULL_SHARD"
        parts = tuple(dict.fromkeys(weight.part for weight in group))
        units.append(
            Unit(
                layer=layer,
                parts=parts,
                weights=low * length,
                gradients=inputs.exchange_bytes * length * is_trained,
                gradients_made=low * length * is_trained,
                gradients_left=FLOAT32 * share * is_trained,
                sent=low * share * (low != FLOAT32),
                stays=stays,
            )
        )
    tensors = [(numel, weight.is_orthogonal) for numel, weight in local if weight.is_trained and numel]
    # One process shards nothing, and copies weights only to cast them.
    is_copied = num_processes > 1 or low != FLOAT32
    amounts = {"shares": shares, "trained": trained, "state": inputs.optim.state_bytes(tensors)}
    return amounts, {"units": tuple(units) if is_copied else (), "is_flat": True}


def _flat(weights: list[Weight], multiple: int, *, alignment: int = 1) -> tuple[list[int], int]:
    """The offset of each weight in a flat tensor, and the tensor's length with its padding, in elements."""
    starts, length = [], 0
    for weight in weights:
        length = _round_up(length, alignment)
        starts.append(length)
        length += weight.num_elements
    return starts, _round_up(length, multiple)


def _param_groups(skeleton: Skeleton, optim: Optimizer) -> list[list[Weight]]:
    """Trained weights by optimizer group: matrices, then the rest (see `groups.parameter_groups`); matrices with a
    state of their own before others (`orthogonal.split_for_muon`).
    """
    is_apart = optim.state(is_matrix=True) != optim.state(is_matrix=False)
    groups: dict[tuple[bool, bool], list[Weight]] = {}
    for weight in skeleton.weights:
        if weight.is_trained:
            groups.setdefault((weight.is_matrix, is_apart and weight.is_orthogonal), []).append(weight)
    return [group for _, group in sorted(groups.items(), key=lambda item: item[0], reverse=True)]


def _zero12(skeleton: Skeleton, inputs: CostInputs, rank: int) -> tuple[Amounts, dict[str, Any]]:
    """The trained weights of a group are one flat tensor, replicated and padded to a multiple of twice the processes;
    masters and moments are sharded equally (stage_1_and_2.py, __init__).

    A process keeps the whole gradient of each weight that its shard touches (get_flat_partition), in the weights'
    dtype.
    """
    strategy, zero, num_processes, low = inputs.strategy, inputs.strategy.zero, inputs.num_processes, inputs.low_bytes
    groups = _param_groups(skeleton, inputs.optim)
    flats = [_flat(group, 2 * num_processes) for group in groups]
    parts = [length // num_processes for _, length in flats]
    touched, padding = 0, 0
    for group, (starts, _), part in zip(groups, flats, parts, strict=True):
        ranges = [(start, weight.num_elements) for start, weight in zip(starts, group, strict=True)]
        touched += sum(numel for start, numel in ranges if _overlap(start, numel, rank * part, part))
        padding += part - _overlap(0, sum(ranges[-1]), rank * part, part)
    sizes = [weight.num_elements for group in groups for weight in group]
    frozen = [weight for weight in skeleton.weights if not weight.is_trained]
    # Float32 gradients accumulate in this process's shard only (stage_1_and_2.py, get_gradient_for_reduction).
    sums_are_sharded = gradient_bytes(inputs) > low
    amounts = {
        "flats": sum(length for _, length in flats),
        "frozen": resident(frozen, inputs) + constants(skeleton.weights),
        "parts": sum(parts),
        "accumulated": sum(parts) if sums_are_sharded else touched + padding,
        "state": inputs.optim.state_bytes(
            (part, group[0].is_orthogonal) for part, group in zip(parts, groups, strict=True)
        ),
        # Between micro-batches each gradient that the shard touches is kept whole, and added in float32 at the end.
        "waiting": low * touched if inputs.accumulation > 1 else 0,
        "largest": max(sizes),
        # The new weights on their way back after the update.
        "returned": sum(parts) + max(sizes),
    }
    num_buckets = 2 if zero.get("overlap_comm") else 1
    bucket = low * zero.get("reduce_bucket_size", 5 * 10**8)
    # A full bucket, or the rest at the end, is concatenated before it is sent, and then cast (allreduce_bucket).
    is_cast = inputs.exchange != inputs.mixed_precision
    step = {
        "gradient_buckets": num_buckets * bucket,
        "bucket": bucket,
        "whole_gradients": low * sum(sizes),
        "reduction": (low + inputs.exchange_bytes * is_cast) * min(bucket // low, sum(sizes)),
    }
    if strategy.offload_optimizer is None:
        # ZeRO-1's gradients move into the bucket, including those of earlier micro-batches.
        is_kept = strategy.zero_stage == 2
        added = FLOAT32 * sum(parts) if sums_are_sharded else low * touched
        step |= {
            "gradients_between": added if is_kept or sums_are_sharded else low * sum(sizes),
            "gradients_before": added if is_kept else 0,
            "gradients_added": added,
            "update": _flat_gradients(max(parts), gradient_bytes(inputs)),
        }
    return amounts, step


def _flat_gradients(numel: int, num_bytes: int) -> int:
    """Bytes while DeepSpeed concatenates the gradients of a group and then casts them to float32 (stage_1_and_2.py,
    `step`; stage3.py, _prepare_fp32_grad_for_sub_group)."""
    return numel * (num_bytes if num_bytes == FLOAT32 else num_bytes + FLOAT32)


def _zero3(skeleton: Skeleton, inputs: CostInputs, rank: int) -> tuple[Amounts, dict[str, Any]]:
    """Each process has an equal, padded shard of every parameter (partition_parameters.py, _padding_size). Masters are
    always separate (stage3.py, _create_fp32_partitions, compares a device with its name). Small parameters stay
    gathered in addition to their shards.
    """
    strategy, num_processes = inputs.strategy, inputs.num_processes
    zero = strategy.zero
    low = inputs.low_bytes

    def numel(weight: Weight) -> int:
        return math.prod(_stored_shape(weight, inputs))

    def part(weight: Weight) -> int:
        return math.ceil(numel(weight) / num_processes)

    def size(weight: Weight) -> int:
        # An adapter's weights are created in float32, and stay so since the model was sharded while it was loaded.
        return FLOAT32 if weight.is_trained and inputs.adapter is not None else low

    threshold = zero.get("stage3_param_persistence_threshold", 10**5)
    persistent = [weight for weight in skeleton.weights if numel(weight) <= threshold]
    others = [weight for weight in skeleton.weights if numel(weight) > threshold]
    # One process uses its shards in place, unless they are on the host.
    is_gathered = num_processes > 1 or strategy.offload_param is not None
    gathered = sum(size(weight) * part(weight) * num_processes for weight in persistent) * is_gathered
    # hpZ: a forward keeps a second copy of the gathered weights, sharded over a smaller group, for all gathers until
    # the update. Frozen weights have it from the start; small trained parameters have none.
    group = inputs.secondary_group_size
    left = [weight for weight in skeleton.weights if not weight.is_trained or numel(weight) > threshold]
    copies = [(weight, size(weight) * (part(weight) * num_processes // group)) for weight in left if group > 1]
    subgroups = list(_subgroups(skeleton, inputs.optim, part, zero.get("sub_group_size", 10**9)))
    subgroup_parts = [[part(weight) for weight in subgroup] for subgroup in subgroups]
    are_matrices = [subgroup[0].is_orthogonal for subgroup in subgroups]
    trained = sum(map(sum, subgroup_parts))
    gradients = gradient_bytes(inputs) * trained
    bucket = low * zero.get("reduce_bucket_size", 5 * 10**8)
    released = [numel(weight) for weight in others] if is_gathered else []
    late = sum(num_bytes for weight, num_bytes in copies if weight.is_trained)
    step = _zero3_step(skeleton, inputs, released, late=late, gradients=gradients, bucket=bucket)
    amounts = {
        "gathered": gathered,
        "shards": sum(size(weight) * part(weight) for weight in skeleton.weights),
        "bucket": bucket,
        "second": sum(num_bytes for _, num_bytes in copies),
        "trained": trained,
        "state": inputs.optim.state_bytes(zip(map(sum, subgroup_parts), are_matrices, strict=True)),
    }
    if strategy.offload_optimizer is None:
        step["update"] = _flat_gradients(max(map(sum, subgroup_parts)), gradient_bytes(inputs))
    if strategy.offload_optimizer == "nvme":
        filled = [[min(part(w), max(0, numel(w) - rank * part(w))) for w in subgroup] for subgroup in subgroups]
        amounts |= _optimizer_on_disk(inputs, subgroup_parts, filled, are_matrices)
    if strategy.offload_param == "nvme":
        amounts |= _weights_on_disk(skeleton, inputs, subgroups, part, size)
    return amounts, step


def _zero3_step(
    skeleton: Skeleton, inputs: CostInputs, released: list[int], *, late: int, gradients: int, bucket: int
) -> dict[str, Any]:
    """Fields of `States` that are of a step only.

    Args:
        released: elements of each weight that is gathered for its use.
        late: bytes of second copies that are made as trained weights are released.
        gradients: bytes of this process's shards.
        bucket: bytes of gradients that are sent at once.
    """
    strategy, zero, low = inputs.strategy, inputs.strategy.zero, inputs.low_bytes
    live = max(zero.get("stage3_max_live_parameters", 10**9), zero.get("stage3_max_reuse_distance", 10**9))
    ahead = zero.get("stage3_prefetch_bucket_size", 5 * 10**7)
    total, largest = sum(released), max(released, default=0)
    whole_gradients = low * sum(weight.num_elements for weight in skeleton.weights if weight.is_trained)
    is_cast = inputs.exchange != inputs.mixed_precision
    return {
        "gathered_weights": low * min(total, live + largest),
        # A prefetch gathers into one buffer. The first use copies the weights out of it; the others keep it alive
        # (partition_parameters.py, AllGatherCoalescedHandle.wait). Nothing is prefetched from NVMe
        # (partitioned_param_coordinator.py, _fetch_sub_module_impl).
        "sent": 0 if strategy.offload_param == "nvme" else low * min(total, ahead + largest),
        "is_sent_again": total > live,
        # In the backward, if all can stay until then.
        "buffers_late": late * (total <= live and strategy.offload_param is None),
        "bucket": bucket,
        "gradients_before": 0 if strategy.offload_optimizer else gradients,
        "whole_gradients": whole_gradients,
        # The gradients in the bucket are cast, and concatenated (coalesced_collectives.py, reduce_scatter_coalesced).
        "reduction": min(bucket, whole_gradients) // low * inputs.exchange_bytes * (1 + is_cast),
    }


def _weights_on_disk(
    skeleton: Skeleton, inputs: CostInputs, subgroups: list[list[Weight]], part: Elements, size: Elements
) -> Amounts:
    """Weights too small to be swapped, buffers on the host, and elements on the disk.

    The buffers are the swapper's; one for the new weights of a sub-group, sized as if unsharded; and placeholders: one
    element per group, and one of 2 bytes (partitioned_param_swapper.py, reserve_partitioned_swap_space).

    Args:
        part: elements of a process's shard.
        size: bytes of an element.
    """
    low, block = inputs.low_bytes, inputs.strategy.zero["offload_param"]
    alignment, limit = _thread_alignment(inputs.strategy) // low, swap_limit(inputs.strategy)
    buffer_size = block.get("buffer_size", 10**8)
    if buffer_size == "auto":  # as the engine fills it in
        buffer_size = max(map(part, skeleton.weights))
    buffer = block.get("buffer_count", 5) * _round_up(buffer_size, alignment)
    largest = max(subgroups, key=lambda subgroup: sum(map(part, subgroup)))
    reserved = sum(_round_up(math.prod(_stored_shape(weight, inputs)), alignment) for weight in largest)
    placeholders = sum(size(group[0]) for group in _param_groups(skeleton, inputs.optim)) + 2
    swapped = [part(weight) for weight in skeleton.weights if low * part(weight) >= limit]
    return {
        "small": sum(size(weight) * part(weight) for weight in skeleton.weights if low * part(weight) < limit),
        "weight_swapper": low * (buffer + reserved) + placeholders,
        "swapped": sum(_round_up(numel, alignment) for numel in swapped),
    }


def _optimizer_on_disk(
    inputs: CostInputs, subgroups: list[list[int]], filled: list[list[int]], are_matrices: list[bool]
) -> Amounts:
    """Elements of swapped optimizer state, on the host and on the disk.

    A sub-group is swapped as a whole; of each of its gradients, the part that fills whole blocks. The remainder is a
    view that keeps the whole gradient in memory, or the float32 accumulation buffer (runtime/swap_tensor/
    optimizer_utils.py, _adjust_for_misaligned_lengths).

    Args:
        subgroups: elements of the shards of each sub-group's weights.
        filled: the same without padding, which gradients do not have.
        are_matrices: of each sub-group, see `Optimizer.state`.
    """
    strategy = inputs.strategy
    optim, is_copied = inputs.optim, inputs.low_bytes < FLOAT32
    per_block, limit = _thread_alignment(strategy) // FLOAT32, swap_limit(strategy)
    amounts = dict.fromkeys(("kept", "held", "in_memory", "files", "blocks", "moments"), 0)
    for subgroup, gradients, is_matrix in zip(subgroups, filled, are_matrices, strict=True):
        numel = sum(subgroup)
        if FLOAT32 * numel < limit:
            amounts["kept"] += numel
            amounts["held"] += numel
            amounts["in_memory"] += optim.state_bytes([(numel, is_matrix)])
            continue
        file = _round_up(numel, per_block)
        amounts["held"] += is_copied * sum(part for part in gradients if FLOAT32 * part < limit or part % per_block)
        amounts["in_memory"] += optim.state_bytes([(0, is_matrix)])  # the count of updates
        amounts["files"] += file
        amounts["blocks"] += sum(part // per_block * per_block for part in gradients if FLOAT32 * part >= limit)
        amounts["moments"] += len(optim.state(is_matrix=is_matrix)) * file
    largest = _round_up(max(sum(subgroup) for subgroup in subgroups), per_block)
    return amounts | {"swapper": strategy.zero["offload_optimizer"].get("buffer_count", 4) * largest}


def _subgroups(skeleton: Skeleton, optim: Optimizer, part: Elements, limit: int) -> Iterator[list[Weight]]:
    """Trained weights in groups that are updated together, each until its shards reach `limit` elements (stage3.py,
    _create_fp16_sub_groups).
    """
    for group in _param_groups(skeleton, optim):
        subgroup: list[Weight] = []
        numel = 0
        for weight in group:
            subgroup.append(weight)
            numel += part(weight)
            if numel >= limit:
                yield subgroup
                subgroup, numel = [], 0
        if subgroup:
            yield subgroup


def _thread_alignment(strategy: Strategy) -> int:
    """Bytes to which swapped tensors are padded."""
    return SWAP_ALIGNMENT * strategy.aio.get("intra_op_parallelism", 1)


def checkpoint_bytes(skeleton: Skeleton, recipe: Recipe) -> int:
    """Bytes of trained weights and their moments, both saved in float32."""
    total = 0
    for weight in skeleton.weights:
        if weight.is_trained:
            total += weight.num_elements * 4 * (1 + len(recipe.optim.state(is_matrix=weight.is_orthogonal)))
    return total


def gradient_bytes(inputs: CostInputs) -> int:
    """Bytes of an accumulated gradient element: float32, or under ZeRO as set in the JSON."""
    if inputs.strategy.kind != "zero":
        return FLOAT32
    asked = (inputs.strategy.deepspeed or {}).get("data_types") or {}
    return FLOAT32 if asked.get("grad_accum_dtype") == "fp32" else inputs.low_bytes


def resident(weights: Iterable[Weight], inputs: CostInputs) -> int:
    """Bytes of unsharded weights."""
    return sum(_bytes_per_number(weight, inputs) * math.prod(_stored_shape(weight, inputs)) for weight in weights)


def _bytes_per_number(weight: Weight, inputs: CostInputs) -> int:
    """Bytes of a stored element of a weight, except under ZeRO."""
    return FLOAT32 if weight.is_trained else inputs.low_bytes


def _stored_shape(weight: Weight, inputs: CostInputs) -> tuple[int, ...]:
    """The shape of a weight in memory: 4-bit weights are packed two per byte, and the bytes stored as one column of the
    compute dtype (see `adapters.quantization_options`).
    """
    if not weight.is_quantized:
        return weight.shape
    return (weight.num_elements // (2 * inputs.low_bytes), 1)


def constants(weights: Iterable[Weight]) -> int:
    """Bytes of replicated quantization constants: an 8-bit scale per block of 64 weights, a float32 scale per 256 of
    those, a float32 offset, and two tables of values (bitsandbytes 0.50, functional.py, quantize_4bit).
    """
    total = 0
    for weight in weights:
        if weight.is_quantized:
            blocks = math.ceil(weight.num_elements / 64)
            total += blocks + FLOAT32 * (math.ceil(blocks / 256) + 1 + 16 + 256)
    return total


def _chunk(length: int, num_chunks: int, index: int) -> int:
    """The size of a chunk of `torch.chunk`; the last ones may be shorter or empty."""
    size = math.ceil(length / num_chunks)
    return max(0, min(size, length - index * size))


def _overlap(start: int, length: int, other: int, other_length: int) -> int:
    return max(0, min(start + length, other + other_length) - max(start, other))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
