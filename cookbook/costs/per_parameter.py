"""The ledger in bytes of one parameter, as `explain`, the tables of docs/strategies.md and the labels show it.

Nothing is known here: `memory` and `traffic` are asked for a model of nothing but large, equal matrices, and what comes
on top for each further one is the cost of its parameters. What does not grow with the model (buckets, buffers of a
swapper) is not in it, nor is padding.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from cookbook.costs.flops import Sizes, Step
from cookbook.costs.inputs import CostInputs, Skeleton, Weight
from cookbook.costs.memory import ResidentBytes, States, gradient_bytes, states
from cookbook.costs.traffic import Transfer, transfers

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
NO_TRAFFIC = "none: one process"

Where = Literal["GPU", "host", "disk"]
PLACES: tuple[Where, ...] = ("GPU", "host", "disk")


def precision(inputs: CostInputs) -> dict[str, str]:
    """The dtype of each thing; the engine asserts those of weights and ZeRO's configuration at the start of a run."""
    strategy, low = inputs.strategy, DTYPES[inputs.mixed_precision]
    found: dict[str, str]
    if strategy.kind == "zero":
        config = strategy.deepspeed or {}
        found = {
            "weights": low,
            "compute": low,
            "gradients": "float32" if gradient_bytes(inputs) == 4 else low,
            # deepspeed 0.19.8, runtime/engine.py, communication_data_type: that of the model unless the JSON says.
            "reductions": "float32" if config.get("communication_data_type") == "fp32" else low,
            "master copy": "float32, beside the weights",
        }
    else:
        how = {"fsdp1": "weights are gathered in it", "fsdp2": "weights are gathered in it"}
        autocast = "matrix products, by autocast; the rest float32"
        detail = "" if low == "float32" else f" ({how.get(strategy.kind, autocast)})"
        reductions = f"{low}, of activations" if strategy.kind == "tp" else "float32"
        found = {
            "weights": "float32",
            "compute": low + detail,
            "gradients": "float32",
            "reductions": reductions,
            "master copy": "none: the weights are float32",
        }
    if inputs.num_processes == 1:
        found["reductions"] = NO_TRAFFIC
    if inputs.adapter is not None:
        rest = "float32" if strategy.kind == "fsdp1" else low
        found["frozen weights"] = (
            f"4 bits (NF4) in linear layers, {rest} elsewhere" if inputs.adapter.is_quantized else rest
        )
    return found


@dataclass(frozen=True, kw_only=True)
class StateShare:
    """What one process holds of something."""

    where: Where
    what: str
    num_bytes: float
    """A parameter, before it is sharded."""
    num_shards: int


def shares(inputs: CostInputs) -> list[StateShare]:
    """The states of a trained parameter on one process, between micro-batches."""
    return _shares(inputs, is_trained=True)


def frozen_shares(inputs: CostInputs) -> list[StateShare]:
    """What one process holds of a parameter that is not trained; empty where all are."""
    return [] if inputs.adapter is None else _shares(inputs, is_trained=False)


def _shares(inputs: CostInputs, *, is_trained: bool) -> list[StateShare]:
    """What halves when the processes double is sharded, and what stays is whole; 4-bit weights are both."""
    strategy = inputs.strategy
    twice = replace(
        inputs,
        num_processes=2 * inputs.num_processes,
        strategy=replace(
            strategy,
            tp_size=2 * strategy.tp_size if strategy.tp_size > 1 else 1,
            dp_shard_size=2 * strategy.dp_shard_size,
        ),
    )
    found = []
    few, many = (_bytes_of_one(each, is_trained=is_trained) for each in (inputs, twice))
    for (where, what), here in few.items():
        sharded = 2 * (here - many[where, what]) * inputs.num_shards
        whole = here - sharded / inputs.num_shards
        for num_bytes, num_shards in ((whole, 1), (sharded, inputs.num_shards)):
            if num_bytes > 1e-6:
                found.append(StateShare(where=where, what=what, num_bytes=round(num_bytes, 6), num_shards=num_shards))
    return found


def _bytes_of_one(inputs: CostInputs, *, is_trained: bool) -> dict[tuple[Where, str], float]:
    """Bytes of a process for one more parameter, by place and name."""
    count = inputs.num_processes
    few, many = (_held(states(_matrices(inputs, number, is_trained), inputs), inputs) for number in (count, 2 * count))
    return {key: (many[key] - few[key]) / (count * _numel(inputs)) for key in few}


def _numel(inputs: CostInputs) -> int:
    """Elements of a matrix: a share of it is larger than what is never sharded, swapped or grouped with others."""
    return inputs.num_processes * 2**50


def _matrices(inputs: CostInputs, number: int, is_trained: bool) -> Skeleton:
    """A layer of equal matrices. As many as there are processes, so that parts of flat tensors are whole ones."""
    numel, count = _numel(inputs), inputs.num_processes
    trained = [is_trained] * number + ([] if is_trained else [True] * count)
    weights = tuple(
        Weight(
            name=f"{i}.weight",
            shape=(count * 2**25, numel // (count * 2**25)),
            layer=0,
            part="layer",
            is_trained=each,
            is_quantized=inputs.adapter is not None and inputs.adapter.is_quantized and not each,
            cut=0,
            is_orthogonal=True,
        )
        for i, each in enumerate(trained)
    )
    return Skeleton(weights=weights, num_layers=1, is_tied=False, buffers=())


def _held(found: States, inputs: CostInputs) -> dict[tuple[Where, str], float]:
    optimizer = inputs.optim.state_words

    def named(where: Where, held: ResidentBytes, gradients: int, buffers: str) -> dict[tuple[Where, str], float]:
        return {
            (where, "weights"): held.weights,
            (where, "gradients"): gradients,
            (where, optimizer): held.masters + held.moments,
            (where, buffers): held.buffers,
        }

    second = "second copy of the weights"
    on_host = second if inputs.strategy.zero_stage == 3 else "updated weights on their way back"
    on_gpu = max(found.gpu.gradients, found.gradients_between if inputs.accumulation > 1 else 0)
    kept = sum(unit.weights for unit in found.units if unit.stays)
    return {
        **named("GPU", found.gpu, on_gpu, second),
        **named("host", found.host, found.host.gradients, on_host),
        **named("disk", found.disk, found.disk.gradients, second),
        ("GPU", "gathered weights"): kept,
    }


def total(found: list[StateShare], where: Where) -> float:
    """Bytes a parameter on one process, in one place."""
    return math.fsum(share.num_bytes / share.num_shards for share in found if share.where == where)


def states_in_words(inputs: CostInputs, where: Where) -> str:
    """`weights 2 + gradients 2/4 + optimizer 12/4 = 5.5; of a frozen one weights 2`; empty if nothing lies there."""
    found, frozen = shares(inputs), frozen_shares(inputs)
    terms, others = ([_term(one) for one in some if one.where == where] for some in (found, frozen))
    words = [f"{' + '.join(terms)} = {total(found, where):.4g}"] if terms else []
    return "; ".join([*words, *([f"of a frozen one {' + '.join(others)}"] if others else [])])


def _term(share: StateShare) -> str:
    return f"{share.what} {share.num_bytes:g}" + (f"/{share.num_shards}" if share.num_shards > 1 else "")


def messages(inputs: CostInputs) -> list[Transfer]:
    """What a process exchanges with others in a step, of a model of one trained parameter without a head; under tensor
    parallel that are activations alone, and nothing here.
    """
    sizes = Sizes(num_parameters=1, num_trained=1, num_matrix=1, num_matrix_trained=1)
    micro, precision = inputs.accumulation, inputs.mixed_precision
    step = Step(num_tokens=0, num_labelled=0, length=1, micro_batches=micro, precision=precision)
    found = transfers(inputs.strategy, sizes, step, inputs.num_processes)
    return [one for one in found if one.num_bytes]


def traffic_in_words(inputs: CostInputs) -> str:
    """What moves in a step, with its sum in bytes a parameter: an all-reduce counts twice, for it is a reduction and a
    gather (Rajbhandari et al. 2020, arXiv 1910.02054, section 7); a ring of D processes sends (D - 1) / D of it.
    """
    if inputs.num_processes == 1:
        return "; ".join([NO_TRAFFIC, *_over_pcie(inputs)])
    if inputs.strategy.kind == "tp":
        return "for each micro-batch and layer two all-reduces of activations in each direction"
    terms = [_message(one, inputs.num_processes) for one in messages(inputs)]
    sentences = [f"{' + '.join(terms)} = {total_traffic(inputs):.4g} a step"]
    if inputs.adapter is not None:
        gathers = inputs.strategy.zero_stage == 3 or inputs.strategy.fsdp is not None
        sentences.append("of a frozen one the gathers" if gathers else "of a frozen one nothing")
    return "; ".join([*sentences, *_over_pcie(inputs)])


def _message(one: Transfer, num_processes: int) -> str:
    name, _, when = one.what.partition(", ")
    kind = {"all-gather": "gathers", "reduce-scatter": "reductions", "all-reduce": "all-reduces"}[one.kind]
    details = ", ".join(filter(None, (when, f"groups of {one.ranks}" if one.ranks != num_processes else "")))
    words = f"{kind} of the {name}" + (f" ({details})" if details else "")
    return f"{words} {one.times:g} x {one.volume / one.times:g}"


def total_traffic(inputs: CostInputs) -> float:
    """Bytes of a trained parameter that a process sends in a step."""
    return math.fsum(one.volume for one in messages(inputs))


def _over_pcie(inputs: CostInputs) -> list[str]:
    strategy = inputs.strategy
    if strategy.offload_param is not None or (strategy.fsdp is not None and strategy.fsdp.fsdp_offload_params):
        place = "the disk" if strategy.offload_param == "nvme" else "host memory"
        return [f"between {place} and GPU its share of the weights for each gather, and of the gradients"]
    if strategy.offload_optimizer is not None:
        return ["between host memory and GPU its share of the gradients, and of the updated weights"]
    return []


def as_dict(inputs: CostInputs) -> dict[str, Any]:
    """States and traffic in bytes of a parameter, for programs."""
    frozen = frozen_shares(inputs)
    return {
        "states": [vars(share) for share in shares(inputs)],
        "frozen": [vars(share) for share in frozen] or None,
        "traffic": [vars(one) for one in messages(inputs)],
    }
