"""Costs per parameter, as in `explain`, the tables of docs/strategies.md and the labels.

Derived, not stated: `memory` and `traffic` are evaluated for models of large equal matrices, and the increase per
additional matrix is the cost of its parameters. Constant costs (buckets, swap buffers) and padding are excluded.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from cookbook.forecast.costs.flops import ModelSizes, Step
from cookbook.forecast.costs.inputs import CostInputs, Skeleton, Weight
from cookbook.forecast.costs.states import ResidentBytes, States, gradient_bytes, states
from cookbook.forecast.costs.traffic import Transfer, by_link, transfers

DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
NO_TRAFFIC = "none: one process"

Where = Literal["GPU", "host", "disk"]
PLACES: tuple[Where, ...] = ("GPU", "host", "disk")


def precision(inputs: CostInputs) -> dict[str, str]:
    """The dtype of weights, gradients, reductions and so on; the engine verifies them at the start of a run."""
    strategy, low = inputs.strategy, DTYPE_NAMES[inputs.mixed_precision]
    dtypes: dict[str, str]
    if strategy.kind == "zero":
        dtypes = {
            "weights": low,
            "compute": low,
            "gradients": "float32" if gradient_bytes(inputs) == 4 else low,
            "reductions": DTYPE_NAMES[inputs.exchange],
            "master copy": "float32, beside the weights",
        }
    else:
        autocast = "matrix products, by autocast; the rest float32"
        how = autocast if strategy.fsdp is None else "weights are gathered in it"
        detail = "" if low == "float32" else f" ({how})"
        reductions = exchanged = DTYPE_NAMES[inputs.exchange]
        is_alone = inputs.mesh.token_parallel_size == 1
        if strategy.pp_size > 1 and is_alone:
            reductions = "none: each parameter is on one process"
        if strategy.tp_size > 1:
            reductions = f"{low}, of activations" if is_alone else f"{low} of activations, {exchanged} of gradients"
        dtypes = {
            "weights": "float32",
            "compute": low + detail,
            "gradients": "float32",
            "reductions": reductions,
            "master copy": "none: the weights are float32",
        }
    if inputs.fp8:
        dtypes["compute"] += "; 8 bits in the layers' matrices"
    if inputs.num_processes == 1:
        dtypes["reductions"] = NO_TRAFFIC
    if inputs.adapter is not None:
        rest = "float32" if strategy.kind == "fsdp1" else low
        dtypes["frozen weights"] = (
            f"4 bits (NF4) in linear layers and experts, {rest} elsewhere" if inputs.adapter.is_quantized else rest
        )
    return dtypes


@dataclass(frozen=True, kw_only=True)
class StateShare:
    """The memory of one kind of state on one process."""

    where: Where
    what: str
    num_bytes: float
    """Bytes per parameter before sharding."""
    num_shards: int


def frozen_shares(inputs: CostInputs) -> list[StateShare]:
    """`shares` of a frozen parameter; empty without an adapter."""
    return [] if inputs.adapter is None else shares(inputs, is_trained=False)


def shares(inputs: CostInputs, *, is_trained: bool = True) -> list[StateShare]:
    """The state of a trained parameter on one process, between micro-batches, sharded and replicated: doubling the
    processes halves the former only.
    """
    strategy = inputs.strategy
    size = {"tp": "tp_size", "pp": "pp_size"}.get(strategy.kind, "dp_shard_size")
    doubled = replace(strategy, **{size: 2 * getattr(strategy, size)})
    twice = replace(inputs, num_processes=2 * inputs.num_processes, strategy=doubled)
    state_shares = []
    few, many = (_bytes_of_one(each, is_trained=is_trained) for each in (inputs, twice))
    for (where, what), here in few.items():
        sharded = 2 * (here - many[where, what]) * inputs.num_shards
        replicated = here - sharded / inputs.num_shards
        for num_bytes, num_shards in ((replicated, 1), (sharded, inputs.num_shards)):
            if num_bytes > 1e-6:
                state_shares.append(
                    StateShare(where=where, what=what, num_bytes=round(num_bytes, 6), num_shards=num_shards)
                )
    return state_shares


def _bytes_of_one(inputs: CostInputs, *, is_trained: bool) -> dict[tuple[Where, str], float]:
    """Bytes of one additional parameter on one process, by place and kind of state."""
    count = inputs.num_processes
    few, many = (
        _by_place(states(_matrices(inputs, number, is_trained), inputs), inputs) for number in (count, 2 * count)
    )
    return {key: (many[key] - few[key]) / (count * _numel(inputs)) for key in few}


def _numel(inputs: CostInputs) -> int:
    """Elements of a matrix, so that even its shards exceed the thresholds for sharding, swapping and grouping."""
    return inputs.num_processes * 2**50


def _matrices(inputs: CostInputs, number: int, is_trained: bool) -> Skeleton:
    """Equal matrices, in multiples of the processes, so that shards of flat tensors are whole matrices: in one layer,
    for a pipeline each in a layer of its own.
    """
    numel, count, is_piped = _numel(inputs), inputs.num_processes, inputs.strategy.kind == "pp"
    trained = [is_trained] * number + ([] if is_trained else [True] * count)
    weights = tuple(
        Weight(
            name=f"{i}.weight",
            shape=(count * 2**25, numel // (count * 2**25)),
            layer=i if is_piped else 0,
            part="layer",
            is_trained=each,
            is_quantized=inputs.adapter is not None and inputs.adapter.is_quantized and not each,
            shard_dim=0,
            is_matrix=True,
            is_orthogonal=True,
        )
        for i, each in enumerate(trained)
    )
    return Skeleton(weights=weights, num_layers=len(weights) if is_piped else 1, is_tied=False, buffers=())


def _by_place(held: States, inputs: CostInputs) -> dict[tuple[Where, str], float]:
    optimizer = inputs.optim.state_words

    def name_parts(where: Where, held: ResidentBytes, gradients: int, buffers: str) -> dict[tuple[Where, str], float]:
        return {
            (where, "weights"): held.weights,
            (where, "gradients"): gradients,
            (where, optimizer): held.masters + held.moments,
            (where, buffers): held.buffers,
        }

    second = "second copy of the weights"
    on_host = second if inputs.strategy.zero_stage == 3 else "updated weights on their way back"
    on_gpu = max(held.gpu.gradients, held.gradients_between if inputs.accumulation > 1 else 0)
    kept = sum(unit.weights for unit in held.units if unit.stays)
    return {
        **name_parts("GPU", held.gpu, on_gpu, second),
        **name_parts("host", held.host, held.host.gradients, on_host),
        **name_parts("disk", held.disk, held.disk.gradients, second),
        ("GPU", "gathered weights"): kept,
    }


def total(state_shares: list[StateShare], where: Where) -> float:
    """Bytes per parameter on one process, in one place."""
    return math.fsum(share.num_bytes / share.num_shards for share in state_shares if share.where == where)


def states_in_words(inputs: CostInputs, where: Where) -> str:
    """`weights 2 + gradients 2/4 + optimizer 12/4 = 5.5; of a frozen one weights 2`; empty if there is no state."""
    trained, frozen = shares(inputs), frozen_shares(inputs)
    terms, others = (
        [_term(share) for share in state_shares if share.where == where] for state_shares in (trained, frozen)
    )
    words = [f"{' + '.join(terms)} = {total(trained, where):.4g}"] if terms else []
    return "; ".join([*words, *([f"of a frozen one {' + '.join(others)}"] if others else [])])


def _term(share: StateShare) -> str:
    return f"{share.what} {share.num_bytes:g}" + (f"/{share.num_shards}" if share.num_shards > 1 else "")


def links(inputs: CostInputs) -> dict[str, list[str]]:
    """Names of the messages of a step by the links that they cross, activations too; empty if nothing is sent."""
    local = inputs.num_local or inputs.strategy.num_local(inputs.num_processes)
    return by_link(_messages(inputs, num_of_experts=1), local, ("inside a machine", "between machines"))


def messages(inputs: CostInputs) -> list[Transfer]:
    """Messages of a step per trained parameter, without a head; none under tensor parallel, which sends activations."""
    return [message for message in _messages(inputs) if message.num_bytes]


def _messages(inputs: CostInputs, num_of_experts: int = 0) -> list[Transfer]:
    """`messages` beside so many parameters of experts, and those of activations without their bytes."""
    count, experts = 1 + num_of_experts, num_of_experts
    sizes = ModelSizes(
        num_parameters=count, num_trained=count, num_matrix=1, num_matrix_trained=1, num_of_experts=experts
    )
    micro, precision = inputs.accumulation, inputs.mixed_precision
    asked = inputs.optim.gradient_dtype
    step = Step(num_tokens=0, num_labelled=0, length=1, micro_batches=micro, precision=precision, gradient_dtype=asked)
    return transfers(inputs.strategy, sizes, step, inputs.num_processes, num_local=inputs.num_local)


def traffic_in_words(inputs: CostInputs) -> str:
    """The messages of a step with their sum in bytes per parameter. An all-reduce counts twice, as a reduction and a
    gather (Rajbhandari et al. 2020, arXiv 1910.02054, section 7); a ring of D processes sends (D - 1) / D of it.
    """
    if inputs.num_processes == 1:
        return "; ".join([NO_TRAFFIC, *_over_pcie(inputs)])
    terms = [_message(message, inputs.num_processes) for message in messages(inputs)]
    sentences = [f"{' + '.join(terms)} = {total_traffic(inputs):.4g} a step"] if terms else []
    if inputs.strategy.tp_size > 1:
        words = "for each micro-batch and layer all-reduces of activations, two forward and"
        sentences.insert(0, f"{words} backward one for each matrix that reads them")
    if inputs.strategy.ep_size > 1:
        sharers = inputs.mesh.shard
        words = "for each micro-batch and layer two exchanges of tokens with experts in each direction"
        sentences.insert(0, words)
        sentences.append(f"of an expert a part of 1/{inputs.mesh.expert}, in groups of {sharers}")
    if inputs.strategy.pp_size > 1:
        each = f" and each of {inputs.strategy.pp_chunks} ranges of layers" if inputs.strategy.pp_chunks > 1 else ""
        words = f"for each micro-batch{each} hidden states to the next stage and their gradients back"
        sentences.insert(0, words)
    if inputs.adapter is not None:
        gathers = inputs.strategy.zero_stage == 3 or inputs.strategy.fsdp is not None
        sentences.append("of a frozen one the gathers" if gathers else "of a frozen one nothing")
    return "; ".join([*sentences, *_over_pcie(inputs)])


def _message(message: Transfer, num_processes: int) -> str:
    name, _, when = message.what.partition(", ")
    kind = {"all-gather": "gathers", "reduce-scatter": "reductions", "all-reduce": "all-reduces"}[message.kind]
    details = ", ".join(filter(None, (when, f"groups of {message.ranks}" if message.ranks != num_processes else "")))
    words = f"{kind} of the {name}" + (f" ({details})" if details else "")
    return f"{words} {message.times:g} x {message.volume / message.times:g}"


def total_traffic(inputs: CostInputs) -> float:
    """Bytes per trained parameter that a process sends in a step."""
    return math.fsum(message.volume for message in messages(inputs))


def _over_pcie(inputs: CostInputs) -> list[str]:
    strategy = inputs.strategy
    if strategy.offload_param is not None or (strategy.fsdp is not None and strategy.fsdp.fsdp_offload_params):
        place = "the disk" if strategy.offload_param == "nvme" else "host memory"
        return [f"between {place} and GPU its share of the weights for each gather, and of the gradients"]
    if strategy.offload_optimizer is not None:
        return ["between host memory and GPU its share of the gradients, and of the updated weights"]
    return []


def as_dict(inputs: CostInputs) -> dict[str, Any]:
    """States and traffic in bytes per parameter, for JSON."""
    frozen = frozen_shares(inputs)
    return {
        "states": [vars(share) for share in shares(inputs)],
        "frozen": [vars(share) for share in frozen] or None,
        "traffic": [
            {
                key: value
                for key, value in vars(message).items()
                if key not in ("calls", "is_least", "copied", "copies", "groups")
            }
            for message in messages(inputs)
        ],
        "links": links(inputs),
    }
