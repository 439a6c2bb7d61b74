"""The inputs of the ledger, as plain values: the weights of a model, and a recipe under a strategy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, count
from typing import Any, Literal

from cookbook.config.mesh import Mesh
from cookbook.config.optim.adamw import AdamW
from cookbook.config.optim.base import Optimizer
from cookbook.config.recipe import Recipe
from cookbook.config.sections import AdapterSection
from cookbook.config.strategy import Strategy

Part = Literal["embedding", "layer", "norm", "head", "rest"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of the model or of its adapter."""

    name: str
    """Its name in the transformers model, or in peft for an adapter's."""
    shape: tuple[int, ...]
    """Before sharding."""
    layer: int | None
    """Index of its decoder layer, the unit that FSDP wraps; None outside the layers."""
    part: Part
    """`norm` is the final norm; an embedding tied to the head is `embedding`."""
    is_trained: bool
    is_quantized: bool
    """Stored in 4 bits (QLoRA)."""
    shard_dim: int | None
    """The dimension that transformers' tensor parallel shards; None: replicated."""
    is_orthogonal: bool
    """A matrix inside the layers, which Muon orthogonalizes (see `optim.orthogonal.split_for_muon`)."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """Whether it holds a layer's experts, stacked along dimension 0."""
        return ".experts." in self.name


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """The weights of a model with the recipe's adapter."""

    weights: tuple[Weight, ...]
    """In the model's order, tied ones once."""
    num_layers: int
    is_tied: bool
    """Whether embedding and head are one matrix."""
    buffers: tuple[int, ...]
    """Elements of each float32 buffer, such as the frequencies of rotary embeddings."""
    head_layers: int = 0
    """See `head_layers`."""


def head_layers(head: int, layer: int) -> int:
    """The layers whose products of a token take as long as those of the head, from the elements of their weights."""
    return round(head / layer)


def head_in_layers(model: Any) -> int:
    """`head_layers` of a transformers model; 0 if its layers or head are not found."""
    layers, head = getattr(model.base_model, "layers", None), model.get_output_embeddings()
    if not layers or head is None:
        return 0
    return head_layers(head.weight.numel(), sum(parameter.numel() for parameter in layers[0].parameters()))


def stage_layers(num_layers: int, stage: int, num_stages: int, *, head_layers: int) -> range:
    """The layers of a stage: so that the slowest stage, which all others wait for, computes as little as can be, the
    head counted as `head_layers` of the last stage. Where one has a layer more than another, it is the later one, which
    keeps fewer micro-batches.
    """
    before = num_stages - 1
    if num_layers < num_stages or num_stages == 1:  # fewer layers than stages are refused
        return range(num_layers if stage == before else 0)

    def slowest(last: int) -> int:
        return max(math.ceil((num_layers - last) / before), last + head_layers)

    last = min(range(1, num_layers - before + 1), key=lambda last: (slowest(last), -last))
    starts = [(num_layers - last) * i // before for i in range(num_stages)]
    return range(starts[stage], num_layers if stage == before else starts[stage + 1])


def stage_chunks(num_layers: int, stage: int, num_stages: int, chunks: int = 1, *, head_layers: int) -> list[range]:
    """The ranges of layers of a stage, in the order of the layers: those of every `num_stages`-th of so many times as
    many stages.
    """
    own = range(stage, num_stages * chunks, num_stages)
    return [stage_layers(num_layers, one, num_stages * chunks, head_layers=head_layers) for one in own]


def layers_of_stage(num_layers: int, stage: int, num_stages: int, chunks: int = 1, *, head_layers: int) -> list[int]:
    """The layers of all ranges of a stage."""
    return [*chain.from_iterable(stage_chunks(num_layers, stage, num_stages, chunks, head_layers=head_layers))]


def slowest_share(num_layers: int, num_stages: int, chunks: int = 1, *, head_layers: int) -> float:
    """What the slowest stage computes of a token's products, in [1 / stages, 1]."""
    if num_stages == 1:
        return 1.0
    stages = range(num_stages)
    counts = [len(layers_of_stage(num_layers, stage, num_stages, chunks, head_layers=head_layers)) for stage in stages]
    counts[-1] += head_layers
    return max(counts) / sum(counts)


def num_planned(num_micro_batches: int, num_stages: int, chunks: int = 1) -> int:
    """For how many micro-batches the schedule is made, of which those that there are not are left out. With several
    chunks a chunk runs a round of at least as many micro-batches as stages before the next chunk's turn, and torch has
    rounds of one size (2.13, pipelining/schedules.py, ScheduleInterleaved1F1B).
    """
    if chunks == 1:
        return num_micro_batches
    return next(planned for planned in count(num_micro_batches) if planned % max(1, planned // num_stages) == 0)


def num_turns(num_micro_batches: int, num_stages: int, chunks: int = 1) -> int:
    """The length of a step in turns of a stage, each a forward and a backward of a chunk, if all chunks take as long:
    its own, and its waiting at both ends of the step, and in each round that is shorter than the pipeline. An upper
    bound where `num_planned` is for more micro-batches.
    """
    rounds = max(num_planned(num_micro_batches, num_stages, chunks), num_stages)
    return (chunks - 1) * rounds + num_micro_batches + num_stages - 1


@cache
def pipeline_order(
    num_micro_batches: int, stage: int, num_stages: int, chunks: int = 1
) -> Sequence[tuple[bool, int, int]]:
    """What a stage computes, one after the other: whether a backward, the chunk, and the micro-batch. 1F1B, or with
    several chunks torch's interleaved 1F1B (pipelining/schedules.py, _get_1f1b_rank_ops); with one chunk and fewer
    micro-batches than stages GPipe (engine/pipeline.py chooses).
    """
    planned = num_planned(num_micro_batches, num_stages, chunks)
    each = planned if chunks == 1 else planned // max(1, planned // num_stages)  # micro-batches of a round
    passes = [(i // each % chunks, i // (each * chunks) * each + i % each) for i in range(planned * chunks)]
    ahead = (1 if chunks == 1 else 2) * (num_stages - 1 - stage) + (chunks - 1) * each
    if chunks == 1 and planned < num_stages:
        ahead = planned
    forwards = [(False, chunk, i) for chunk, i in passes]
    backwards = [(True, chunks - 1 - chunk, i) for chunk, i in passes]
    in_turn = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    order = [*forwards[:ahead], *in_turn, *backwards[len(forwards[ahead:]) :]]
    return [one for one in order if one[2] < num_micro_batches]


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A forward or backward of a stage, and what it has begun by then."""

    chunk: int
    counts: tuple[int, ...]
    """For each chunk, the micro-batches whose forward has begun and whose backward has not ended."""
    is_first: bool
    """Whether no backward has ended yet."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """The same without the one that is computed."""
        return tuple(number - (chunk == self.chunk) for chunk, number in enumerate(self.counts))


@cache
def begun(num_micro_batches: int, stage: int, num_stages: int, chunks: int = 1) -> frozenset[Begun]:
    """The distinct counts that a stage has at the forwards and backwards of a step, in no order."""
    found, counts, is_first = set(), [0] * chunks, True
    for is_backward, chunk, _ in pipeline_order(num_micro_batches, stage, num_stages, chunks):
        counts[chunk] += not is_backward
        found.add(Begun(chunk=chunk, counts=tuple(counts), is_first=is_first))
        counts[chunk] -= is_backward
        is_first = is_first and not is_backward
    return frozenset(found)


def in_flight(num_micro_batches: int, stage: int, num_stages: int, chunks: int = 1) -> int:
    """The most that a stage has begun at a time; with several chunks a micro-batch counts in each."""
    return max(sum(one.counts) for one in begun(num_micro_batches, stage, num_stages, chunks))


def stage_of(skeleton: Skeleton, stage: int, num_stages: int, chunks: int = 1) -> Skeleton:
    """What a stage of a pipeline has of a model, its layers counted from 0. The last has a copy of a tied embedding
    as its head.
    """
    layers = layers_of_stage(skeleton.num_layers, stage, num_stages, chunks, head_layers=skeleton.head_layers)
    is_last = stage == num_stages - 1

    def is_here(weight: Weight) -> bool:
        if weight.layer is not None:
            return weight.layer in layers
        if weight.part == "embedding":
            return stage == 0 or (is_last and skeleton.is_tied)
        return is_last

    def counted(weight: Weight) -> Weight:
        if weight.part == "embedding" and stage > 0:
            return replace(weight, part="head")
        return weight if weight.layer is None else replace(weight, layer=layers.index(weight.layer))

    weights = tuple(counted(weight) for weight in skeleton.weights if is_here(weight))
    return replace(skeleton, weights=weights, num_layers=len(layers))


def sketch(config: dict[str, Any], num_parameters: int) -> Skeleton:
    """A fully trained dense decoder from its `config.json`: its matrices, and all other parameters as one vector per
    layer."""
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    matrices = [(queries, width), (keys, width), (keys, width), (width, queries), *2 * [(inner, width)], (width, inner)]
    num_layers, is_tied, ends = (
        config["num_hidden_layers"],
        config["tie_word_embeddings"],
        (config["vocab_size"], width),
    )
    left = num_parameters - (1 if is_tied else 2) * math.prod(ends) - num_layers * sum(map(math.prod, matrices))
    shapes: list[tuple[int, ...]] = [*matrices, (max(0, left) // num_layers,)]

    def weight(name: str, shape: tuple[int, ...], layer: int | None, part: Part) -> Weight:
        return Weight(
            name=name,
            shape=shape,
            layer=layer,
            part=part,
            is_trained=True,
            is_quantized=False,
            shard_dim=0 if len(shape) > 1 else None,
            is_orthogonal=layer is not None and len(shape) > 1,
        )

    layers = [weight(f"layers.{i}.{j}", shape, i, "layer") for i in range(num_layers) for j, shape in enumerate(shapes)]
    head = [] if is_tied else [weight("head", ends, None, "head")]
    weights = (weight("embedding", ends, None, "embedding"), *layers, *head)
    whole = Skeleton(weights=weights, num_layers=num_layers, is_tied=is_tied, buffers=())
    return replace(whole, head_layers=head_layers(math.prod(ends), sum(map(math.prod, shapes))))


def exchange_precision(strategy: Strategy, mixed_precision: str, asked: str | None) -> str:
    """The precision in which processes exchange gradients; `no` is float32.

    Args:
        asked: the recipe's `optim.gradient_dtype`.
    """
    if asked is not None:
        return asked
    # deepspeed 0.19.8, runtime/engine.py, communication_data_type: by default the model's dtype.
    is_low = strategy.kind == "zero" and (strategy.deepspeed or {}).get("communication_data_type") != "fp32"
    return mixed_precision if is_low else "no"


def bytes_of(precision: str) -> int:
    """Bytes of a number in a precision, of which `no` is float32."""
    return 4 if precision == "no" else 2


@dataclass(frozen=True, kw_only=True)
class CostInputs:
    """The settings of a run that determine bytes and messages."""

    strategy: Strategy
    num_processes: int
    num_local: int | None = None
    """Processes of a machine; None: all, or an equal share on each machine that the strategy file counts."""
    accumulation: int = 1
    """Micro-batches per step and process; at least 2 under a token budget, where it varies."""
    mixed_precision: Literal["bf16", "fp16", "no"] = "bf16"
    fp8: bool = False
    """Whether the matrices of the layers multiply in 8 bits."""
    optim: Optimizer = field(default_factory=lambda: AdamW(learning_rate=1.0))
    adapter: AdapterSection | None = None
    """None: all weights are trained."""
    num_tokens: int = 0
    """Tokens of a micro-batch of full length, on each process."""
    offloads_checkpoints: bool = False
    """Whether GPUs keep the inputs of layers in host memory (`model.gradient_checkpointing: offload`)."""

    @property
    def low_bytes(self) -> int:
        """Bytes of a number in the precision of the forward."""
        return bytes_of(self.mixed_precision)

    @property
    def exchange(self) -> str:
        """See `exchange_precision`."""
        return exchange_precision(self.strategy, self.mixed_precision, self.optim.gradient_dtype)

    @property
    def exchange_bytes(self) -> int:
        """Bytes of a number of an exchanged gradient."""
        return bytes_of(self.exchange)

    @property
    def secondary_group_size(self) -> int:
        """See `Strategy.secondary_group_size`."""
        return self.strategy.secondary_group_size(self.num_local or self.strategy.num_local(self.num_processes))

    @property
    def mesh(self) -> Mesh:
        return self.strategy.mesh(self.num_processes)

    @property
    def num_shards(self) -> int:
        """Number of shards of each sharded tensor; stages count as such."""
        return self.num_processes // self.mesh.replicate


def hidden_bytes(strategy: Strategy, precision: str, *, is_full: bool) -> int:
    """Bytes of a number of the hidden states between layers: float32 under autocast, which adds up there what float32
    weights return; that of the frozen weights beside an adapter; that of the forward under FSDP and ZeRO.

    Args:
        is_full: whether all weights are trained.
    """
    return 4 if precision == "no" or (strategy.has_autocast and is_full) else 2


def micro_batch_of(recipe: Recipe) -> int:
    """Number of samples of data.max_length in a forward."""
    batch = recipe.batch
    if batch.micro_batch_size is not None:
        return batch.micro_batch_size
    assert batch.micro_batch_tokens is not None
    of_a_sample = recipe.data.max_length * len(recipe.objective.sequences)
    return max(1, batch.micro_batch_tokens // of_a_sample)


def cost_inputs(recipe: Recipe, strategy: Strategy, num_processes: int, *, num_local: int | None = None) -> CostInputs:
    """The cost inputs of a run; `num_local`: see `CostInputs`."""
    strategy, batch = strategy.fitted(num_processes, num_local), recipe.batch
    accumulation = math.ceil(
        batch.global_batch_size / ((batch.micro_batch_size or 1) * strategy.data_parallel_size(num_processes))
    )
    return CostInputs(
        strategy=strategy,
        num_processes=num_processes,
        num_local=num_local,
        accumulation=accumulation if batch.micro_batch_size is not None else max(2, accumulation),
        mixed_precision=recipe.compute_precision,
        fp8=recipe.mixed_precision == "fp8",
        optim=recipe.optim,
        adapter=recipe.adapter,
        num_tokens=micro_batch_of(recipe)
        * len(recipe.objective.sequences)
        * math.ceil(recipe.data.max_length / strategy.sp_size),
        offloads_checkpoints=recipe.model.gradient_checkpointing == "offload",
    )
