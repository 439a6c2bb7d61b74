"""FLOPs of training, for `mfu` and `plan`; see docs/flops.md.

Counts matrix products only; for attention, the positions inside the causal mask and the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cookbook.facts.attention_layers import Attention, attention_layers
from cookbook.facts.meshes import EXPERTS, EXPERTS_OF_A_TOKEN, num_experts, size_of_experts
from cookbook.facts.score_head import is_scored
from cookbook.forecast.costs.inputs import Skeleton, Weight
from cookbook.system.files import RecipeError

Recompute = Literal[False, True, "selective"]
Precision = Literal["bf16", "fp16", "no"]


class TrainedWeight(NamedTuple):
    """A trained weight, whole."""

    numel: int
    is_matrix: bool
    layer: int | None
    is_divided: bool = False
    """True if tensor parallel divides it."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a whole model."""

    num_parameters: int
    """Tied ones count once."""
    num_trained: int
    num_matrix: int
    """Weights that each token is multiplied with, without embedding and head and with the active experts only."""
    num_matrix_trained: int
    head_trained: bool = True
    num_layers: int = 0
    head_layers: int = 0
    """See `inputs.head_layers`."""
    hidden: int = 0
    num_heads: int = 0
    num_key_heads: int = 0
    head_dim: float = 0.0
    """Size of a head; the mean of both if queries and values differ. Of the widest layer, as the numbers of heads; all
    three are 0 without attention."""
    vocab: int = 0
    """Outputs of the head."""
    num_experts: int = 1
    num_of_experts: int = 0
    """Parameters of the experts of all layers."""
    num_routed: int = 0
    """Experts that a token passes through, over all layers."""
    share_routed: float = 1.0
    """Share of a layer's experts that a token passes through."""
    windows: Sequence[int | None] = ()
    """The attention window of each layer with attention; None: no window. Empty: no layer has one."""
    widths: Sequence[float] = ()
    """The `width` of each of these layers, if they differ."""
    column_matrices: int = 0
    """Matrices of all layers that tensor parallel divides by their outputs; each has an input's gradient to sum."""
    first_matrices: int = 0
    """`column_matrices` whose input needs no gradient, as nothing before it is trained; recomputed layers have it."""
    row_matrices: int = 0
    """Matrices that it divides by their inputs; each has an output to sum."""
    column_ranks: Sequence[int] = ()
    """Ranks of an adapter's matrices beside the `column_matrices`; each has as many sums of gradients."""
    row_ranks: Sequence[int] = ()
    """Ranks of those beside the `row_matrices`; each has as many sums of outputs."""
    adapted_ends: int = 0
    """Layers of which the last row matrix has an adapter, which reads the input after that matrix did."""
    num_undivided: int = 0
    """Parameters that tensor parallel leaves whole in each process."""
    num_undivided_trained: int = 0
    is_embedding_divided: bool = False
    """True if tensor parallel divides the embedding by tokens, so that what it looks up is summed."""
    is_tied: bool = False
    """True if embedding and head are one matrix."""
    trained: Sequence[TrainedWeight] = ()
    """In the model's order. Empty: not known."""

    @property
    def is_full(self) -> bool:
        """True if all weights are trained."""
        return self.num_trained == self.num_parameters

    @property
    def width(self) -> float:
        """Width of attention: heads x size of a head, which may differ from the hidden size."""
        return self.num_heads * self.head_dim

    @property
    def head(self) -> int:
        """Weights of the output head, which FSDP2 keeps gathered from forward to backward (accelerate 1.15,
        utils/fsdp_utils.py, fsdp2_prepare_model)."""
        return self.vocab * self.hidden


def sizes_of(config: Any, skeleton: Skeleton) -> ModelSizes:
    """The sizes of a model, from its transformers configuration and its weights.

    Raises:
        RecipeError: a key of the configuration that this needs is not known.
    """
    text = config.get_text_config()
    experts, taken = num_experts(config), size_of_experts(config, EXPERTS_OF_A_TOKEN)
    routed = [weight for weight in skeleton.weights if weight.is_expert]
    if routed and (taken is None or size_of_experts(config, EXPERTS) is None):
        what = "for experts or for those of a token"
        raise RecipeError(f"model {config.model_type}: the forecast knows no key of its configuration {what}")
    share = (taken or experts) / experts

    def active(weight: Weight) -> float:
        """Elements of a weight that a token is multiplied with."""
        if len(weight.shape) < 2 or weight.layer is None or weight.name.endswith("bias"):
            return 0.0
        return weight.num_elements * (share if weight.is_routed else 1.0)

    layers = attention_layers(config)
    widest = max(layers, key=lambda layer: layer.width, default=Attention(0, 0, 0.0, None))
    widths = [layer.width for layer in layers]
    head = [w for w in skeleton.weights if w.part == ("embedding" if skeleton.is_tied else "head")]
    undivided = [weight for weight in skeleton.weights if weight.shard_dim is None]
    columns, rows = _divided_matrices(skeleton, 0), _divided_matrices(skeleton, 1)
    ends = {weight.layer: weight for weight in rows}
    adapted = {weight.name.partition(".lora_")[0] for weight in skeleton.weights if ".lora_" in weight.name}
    return ModelSizes(
        num_parameters=sum(weight.num_elements for weight in skeleton.weights),
        num_trained=sum(weight.num_elements for weight in skeleton.weights if weight.is_trained),
        num_matrix=round(sum(map(active, skeleton.weights))),
        num_matrix_trained=round(sum(active(weight) for weight in skeleton.weights if weight.is_trained)),
        head_trained=any(weight.is_trained for weight in head),
        num_layers=skeleton.num_layers,
        head_layers=skeleton.head_layers,
        hidden=text.hidden_size,
        num_heads=widest.num_heads,
        num_key_heads=widest.num_key_heads,
        head_dim=widest.head_dim,
        vocab=config.num_labels if is_scored(config) else text.vocab_size,
        num_experts=experts,
        num_of_experts=sum(weight.num_elements for weight in routed),
        num_routed=len({weight.layer for weight in routed}) * round(share * experts),
        share_routed=share,
        windows=[layer.window for layer in layers],
        widths=widths if len(set(widths)) > 1 else (),
        column_matrices=len(columns),
        first_matrices=_without_gradient(skeleton),
        row_matrices=len(rows),
        column_ranks=[weight.shape[1] for weight in _divided_matrices(skeleton, 0, of_adapter=True)],
        row_ranks=[weight.shape[0] for weight in _divided_matrices(skeleton, 1, of_adapter=True)],
        adapted_ends=sum(weight.name.partition(".base_layer.")[0] in adapted for weight in ends.values()),
        num_undivided=sum(weight.num_elements for weight in undivided),
        num_undivided_trained=sum(weight.num_elements for weight in undivided if weight.is_trained),
        is_embedding_divided=any(w.part == "embedding" and w.shard_dim == 0 for w in skeleton.weights),
        is_tied=skeleton.is_tied,
        trained=[
            TrainedWeight(weight.num_elements, weight.is_matrix, weight.layer, weight.shard_dim is not None)
            for weight in skeleton.weights
            if weight.is_trained
        ],
    )


def _divided_matrices(skeleton: Skeleton, dim: int, *, of_adapter: bool = False) -> list[Weight]:
    """Matrices of the layers that tensor parallel divides along a dimension, or an adapter's beside them."""
    matrices = (weight for weight in skeleton.weights if weight.layer is not None and len(weight.shape) > 1)
    return [weight for weight in matrices if weight.shard_dim == dim and (".lora_" in weight.name) == of_adapter]


def _without_gradient(skeleton: Skeleton) -> int:
    """See `ModelSizes.first_matrices`. In the order of a layer's weights those that read the same follow each other."""
    is_needed = any(weight.is_trained for weight in skeleton.weights if weight.part == "embedding")
    is_trained, before, count = False, None, 0
    for weight in skeleton.weights:
        if weight.layer is None or len(weight.shape) < 2:
            continue
        if ".lora_" not in weight.name:
            if weight.shard_dim == 0:
                is_needed |= is_trained and before != 0
                count += not is_needed
            before = weight.shard_dim
        is_trained |= weight.is_trained
    return count


@dataclass(frozen=True, kw_only=True)
class Step:
    """The work of an optimizer step, over all processes. A DPO pair is two sequences."""

    num_tokens: float
    """Tokens through the layers, padding included."""
    num_labelled: float
    """Tokens through the head."""
    length: float
    """Mean length of a token's sample: sum of squared lengths / sum of lengths, padding included."""
    micro_batches: int = 1
    """Per process."""
    recompute: Recompute = False
    offloads_checkpoints: bool = False
    """True if the inputs of layers go to host memory and back."""
    precision: Precision = "bf16"
    gradient_dtype: Literal["bf16", "fp16"] | None = None
    """Type of the gradients that processes exchange, if the recipe writes it."""
    is_compiled: bool = False
    """True if the decoder layers are compiled."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs in matrix products."""

    forward: float
    backward: float
    recomputed: float
    """Work that is done twice: checkpointed layers, and the scores of attention, which its kernels do not keep."""

    @property
    def of_model(self) -> float:
        """Model FLOPs: those that the training needs, however it is run."""
        return self.forward + self.backward

    @property
    def total(self) -> float:
        """FLOPs that GPUs compute."""
        return self.of_model + self.recomputed


def work(sizes: ModelSizes, step: Step) -> Work:
    """FLOPs of a step over all processes.

    Per weight and token: 2 in the forward, 2 for the gradient of the input, and 2 for that of a trained weight, so 6 N
    for trained and 4 N for frozen weights (Kaplan et al. 2020; Chowdhery et al. 2022, PaLM, appendix B). The reference
    pass of DPO costs one `forward` of the data set. Selective recomputation repeats neither products nor attention. But
    any backward of a kernel that keeps no scores makes them again, the fifth product beside the four of attention's
    gradients (Dao-AILab/flash-attention, benchmarks/benchmark_flash_attention.py: 2.5 times the forward).
    """
    head = sizes.head
    attention = attention_flops(sizes, step.length)
    layers_forward = 2 * sizes.num_matrix + attention
    layers_backward = 2 * (sizes.num_matrix + sizes.num_matrix_trained) + 2 * attention
    return Work(
        forward=step.num_tokens * layers_forward + step.num_labelled * 2 * head,
        backward=step.num_tokens * layers_backward + step.num_labelled * 2 * (head + head * sizes.head_trained),
        recomputed=step.num_tokens * (attention / 2 + (layers_forward if step.recompute is True else 0.0)),
    )


def attention_flops(sizes: ModelSizes, length: float) -> float:
    """Forward FLOPs per token of the two attention products, at a mean sample `length`.

    2 x 2 x width for each visible position: T / 2 on average in a sample of T, W - W^2 / 2T with a window W < T. The
    backward costs twice as much.
    """
    windows = sizes.windows or sizes.num_layers * [None]
    seen = (
        length / 2 if window is None or window >= length else window - window**2 / (2 * length) for window in windows
    )
    widths = sizes.widths or len(windows) * [sizes.width]
    return 4 * sum(width * positions for width, positions in zip(widths, seen, strict=True))
