"""The inputs of the ledger, as plain values: the weights of a model, and a recipe under a strategy."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from cookbook.config.mesh import Mesh
from cookbook.config.optim.adamw import AdamW
from cookbook.config.optim.optimizer import Optimizer
from cookbook.config.recipe import Recipe
from cookbook.config.sections import AdapterSection
from cookbook.config.strategy import Strategy, exchange_precision
from cookbook.facts.pipeline_stages import head_layers, layers_of_stage
from cookbook.facts.served_code import ServedCode

Part = Literal["embedding", "layer", "norm", "head", "rest"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of the model or of its adapter."""

    name: str
    """Name in the transformers model, or in peft for an adapter's."""
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
    is_matrix: bool
    """See `Kind` of optim/groups.py."""
    is_orthogonal: bool
    """The same."""

    @cached_property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def is_expert(self) -> bool:
        """True if it holds a layer's experts, stacked along dimension 0; not the matrices of an adapter of theirs."""
        return self.is_routed and ".lora_" not in self.name

    @cached_property
    def is_routed(self) -> bool:
        """True if a token is multiplied with the part of its own experts only."""
        return ".experts." in self.name


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """The weights of a model with the recipe's adapter."""

    weights: tuple[Weight, ...]
    """In the model's order, tied ones once."""
    num_layers: int
    is_tied: bool
    """True if embedding and head are one matrix."""
    buffers: tuple[int, ...]
    """Elements of each float32 buffer, such as the frequencies of rotary embeddings."""
    head_layers: int = 0
    """See `head_layers`."""
    notes: tuple[str, ...] = ()
    """See `adapted_layers.examine`."""
    code: ServedCode = field(default_factory=ServedCode)


def stage_of(skeleton: Skeleton, stage: int, num_stages: int, chunks: int = 1) -> Skeleton:
    """The part of a model that a stage of a pipeline has, its layers counted from 0. The last has a copy of a tied
    embedding as its head.
    """
    if num_stages == 1:
        return skeleton
    layers = layers_of_stage(skeleton.num_layers, stage, num_stages, chunks, head_layers=skeleton.head_layers)
    is_last = stage == num_stages - 1

    def is_here(weight: Weight) -> bool:
        if weight.layer is not None:
            return weight.layer in layers
        if weight.part == "embedding":
            return stage == 0 or (is_last and skeleton.is_tied)
        return is_last

    def of_stage(weight: Weight) -> Weight:
        if weight.part == "embedding" and stage > 0:
            return replace(weight, part="head")
        return weight if weight.layer is None else replace(weight, layer=layers.index(weight.layer))

    weights = tuple(of_stage(weight) for weight in skeleton.weights if is_here(weight))
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
            is_matrix=len(shape) > 1,
            is_orthogonal=layer is not None and len(shape) > 1,
        )

    layers = [weight(f"layers.{i}.{j}", shape, i, "layer") for i in range(num_layers) for j, shape in enumerate(shapes)]
    head = [] if is_tied else [weight("head", ends, None, "head")]
    weights = (weight("embedding", ends, None, "embedding"), *layers, *head)
    whole = Skeleton(weights=weights, num_layers=num_layers, is_tied=is_tied, buffers=())
    return replace(whole, head_layers=head_layers(math.prod(ends), sum(map(math.prod, shapes))))


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
    """True if the matrices of the layers multiply in 8 bits."""
    optim: Optimizer = field(default_factory=lambda: AdamW(learning_rate=1.0))
    adapter: AdapterSection | None = None
    """None: all weights are trained."""
    num_tokens: int = 0
    """Tokens of a micro-batch of full length, on each process."""
    offloads_checkpoints: bool = False
    """True if GPUs keep the inputs of layers in host memory (`model.gradient_checkpointing: offload`)."""

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


class WeightsKey:
    """A model and a run without what no weight depends on, so that what is known of one is found for another."""

    def __init__(self, skeleton: Skeleton, inputs: CostInputs) -> None:
        self.skeleton = skeleton
        several = min(inputs.accumulation, 2)
        self.inputs = replace(inputs, accumulation=several, num_tokens=0, offloads_checkpoints=False)

    def __hash__(self) -> int:
        return hash((id(self.skeleton), self.inputs.strategy.path, self.inputs.num_processes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightsKey) and self.skeleton is other.skeleton and self.inputs == other.inputs


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
    strategy, batch = strategy.for_processes(num_processes, num_local), recipe.batch
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
