"""What costs depend on, as plain values: the weights of a model, and a recipe under a strategy."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from cookbook.optim.adamw import AdamW
from cookbook.optim.base import Optimizer
from cookbook.recipe import AdapterSection, Recipe
from cookbook.strategy import Strategy

Part = Literal["embedding", "layer", "norm", "head", "rest"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of the model or of its adapter."""

    name: str
    """In the transformers model; an adapter's as peft names them."""
    shape: tuple[int, ...]
    """Of the whole."""
    layer: int | None
    """Index of the decoder layer it lies in, the unit that FSDP wraps; None outside of them."""
    part: Part
    """Where it lies; `norm` is the last one, before the head. An embedding that is also the head counts as one."""
    is_trained: bool
    is_quantized: bool
    """Held in 4 bits (QLoRA)."""
    cut: int | None
    """The dimension along which transformers' tensor parallel cuts it; None: each process holds the whole."""
    is_orthogonal: bool
    """A matrix inside the layers: what Muon orthogonalises (see `optim.orthogonal.split_for_muon`)."""

    @property
    def num_elements(self) -> int:
        """Of the whole."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A model with the recipe's adapter."""

    weights: tuple[Weight, ...]
    """Tied ones once, in the model's order."""
    num_layers: int
    is_tied: bool
    """Embedding and head are one matrix."""
    buffers: tuple[int, ...]
    """Numbers of elements of what is float32 and no weight, such as the frequencies of rotary embeddings."""


def sketch(config: dict[str, Any], num_parameters: int) -> Skeleton:
    """A dense decoder by its configuration alone, all trained: its matrices, and what is left as a vector a layer.

    Args:
        config: the words of transformers' `config.json`.
    """
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
            cut=0 if len(shape) > 1 else None,
            is_orthogonal=layer is not None and len(shape) > 1,
        )

    layers = [weight(f"layers.{i}.{j}", shape, i, "layer") for i in range(num_layers) for j, shape in enumerate(shapes)]
    head = [] if is_tied else [weight("head", ends, None, "head")]
    weights = (weight("embedding", ends, None, "embedding"), *layers, *head)
    return Skeleton(weights=weights, num_layers=num_layers, is_tied=is_tied, buffers=())


@dataclass(frozen=True, kw_only=True)
class CostInputs:
    """What of a recipe, under a strategy and a number of processes, decides on bytes and messages."""

    strategy: Strategy
    num_processes: int
    accumulation: int = 1
    """Micro-batches of a step, of each process. Under a token budget, where it varies, more than 1."""
    mixed_precision: Literal["bf16", "fp16", "no"] = "bf16"
    optim: Optimizer = field(default_factory=lambda: AdamW(learning_rate=1.0))
    adapter: AdapterSection | None = None
    """None: all weights are trained."""

    @property
    def low_bytes(self) -> int:
        """Bytes of a number that forwards compute in."""
        return 4 if self.mixed_precision == "no" else 2

    @property
    def num_shards(self) -> int:
        """Processes over which the strategy cuts what it cuts."""
        if self.strategy.kind == "tp":
            return self.strategy.tp_size
        return self.num_processes // self.strategy.dp_replicate_size


def cost_inputs(recipe: Recipe, strategy: Strategy, num_processes: int) -> CostInputs:
    """The inputs of a run."""
    batch = recipe.batch
    accumulation = math.ceil(
        batch.global_batch_size / ((batch.micro_batch_size or 1) * strategy.data_parallel_size(num_processes))
    )
    return CostInputs(
        strategy=strategy,
        num_processes=num_processes,
        accumulation=accumulation if batch.micro_batch_size is not None else max(2, accumulation),
        mixed_precision=recipe.mixed_precision,
        optim=recipe.optim,
        adapter=recipe.adapter,
    )
