"""FLOPs of training: the one ruler of `mfu` and of `plan`. docs/flops.md has it in words.

B tokens, L layers, H hidden size, V vocabulary. Matrix products only, and of attention the half that a causal mask
leaves, or the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cookbook.costs.inputs import Skeleton, Weight

Recompute = Literal[False, True, "selective"]
Precision = Literal["bf16", "fp16", "no"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a model, whole and not a process's share."""

    num_parameters: int
    """All of them, tied ones once."""
    num_trained: int
    num_matrix: int
    """Weights that each token is multiplied by, without embedding and head; of experts, the active ones."""
    num_matrix_trained: int
    head_trained: bool = True
    num_layers: int = 0
    hidden: int = 0
    num_heads: int = 0
    head_dim: float = 0.0
    """Of queries, keys and values; the mean of two sizes where values have another."""
    vocab: int = 0
    num_experts: int = 1
    windows: Sequence[int | None] = ()
    """Of each layer with attention, the positions that a token sees at most; None: all before it. Empty: so is each."""

    @property
    def width(self) -> float:
        """Of attention's queries: heads x size of a head, which need not be the hidden size."""
        return self.num_heads * self.head_dim

    @property
    def head(self) -> int:
        """Weights of the output head. accelerate 1.15 keeps them gathered from forward to backward under FSDP2
        (utils/fsdp_utils.py, fsdp2_prepare_model)."""
        return self.vocab * self.hidden


def sizes_of(config: Any, skeleton: Skeleton) -> Sizes:
    """Sizes of a model, from its transformers configuration and its weights."""
    text = config.get_text_config()
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts") or 1
    share = (_first(text, "num_experts_per_tok") or experts) / experts

    def active(weight: Weight) -> float:
        """Elements that a token is multiplied by."""
        if len(weight.shape) < 2 or weight.layer is None or weight.name.endswith("bias"):
            return 0.0
        return weight.num_elements * (share if ".experts." in weight.name else 1.0)

    heads = text.num_attention_heads
    plain = _first(text, "head_dim") or text.hidden_size // heads
    queries, values = _first(text, "qk_head_dim") or plain, _first(text, "v_head_dim") or plain
    head = [w for w in skeleton.weights if w.part == ("embedding" if skeleton.is_tied else "head")]
    return Sizes(
        num_parameters=sum(weight.num_elements for weight in skeleton.weights),
        num_trained=sum(weight.num_elements for weight in skeleton.weights if weight.is_trained),
        num_matrix=round(sum(map(active, skeleton.weights))),
        num_matrix_trained=round(sum(active(weight) for weight in skeleton.weights if weight.is_trained)),
        head_trained=any(weight.is_trained for weight in head),
        num_layers=skeleton.num_layers,
        hidden=text.hidden_size,
        num_heads=heads,
        head_dim=(queries + values) / 2,
        vocab=text.vocab_size,
        num_experts=experts,
        windows=_windows(text, skeleton.num_layers),
    )


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _windows(text: Any, num_layers: int) -> tuple[int | None, ...]:
    """Layers of other kinds (linear attention, state spaces, convolutions) have none of the two products."""
    window = _first(text, "sliding_window")
    kinds = _first(text, "layer_types") or num_layers * ["sliding_attention"]  # Mistral's, all alike
    known = {"attention": None, "full_attention": None, "sliding_attention": window}
    known["chunked_attention"] = _first(text, "attention_chunk_size")
    return tuple(known[kind] for kind in kinds if kind in known)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, over all processes unless it says otherwise. A pair of DPO is two sequences."""

    num_tokens: float
    """That pass through the layers, with padding."""
    num_labelled: float
    """That meet the head."""
    length: float
    """Of the sample around a token, on average: sum of squared lengths / sum of lengths; padding counts."""
    micro_batches: int = 1
    """Of each process."""
    recompute: Recompute = False
    precision: Precision = "bf16"
    is_compiled: bool = False
    """Decoder layers run as torch.compile makes them."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs in matrix products."""

    forward: float
    backward: float
    recomputed: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recomputed


def work(sizes: Sizes, step: Step) -> Work:
    """FLOPs of a step over all processes.

    A product costs 2 FLOPs a weight and token forward, 2 for the gradient of its input, and 2 for that of a trained
    weight: 6 N where all is trained, 4 N of frozen weights (Kaplan et al. 2020; Chowdhery et al. 2022, PaLM, appendix
    B). `forward` of the whole data set is what the reference pass of DPO costs, once before training. Selective
    recomputation keeps matrix products and attention, and computes nothing of either again.
    """
    head = sizes.head
    attention = attention_flops(sizes, step.length)
    layers_forward = 2 * sizes.num_matrix + attention
    layers_backward = 2 * (sizes.num_matrix + sizes.num_matrix_trained) + 2 * attention
    return Work(
        forward=step.num_tokens * layers_forward + step.num_labelled * 2 * head,
        backward=step.num_tokens * layers_backward + step.num_labelled * 2 * (head + head * sizes.head_trained),
        recomputed=step.num_tokens * layers_forward if step.recompute is True else 0.0,
    )


def attention_flops(sizes: Sizes, length: float) -> float:
    """FLOPs forward of a token in the two attention products: 2 x 2 x width for each position that it sees, on average
    half of the sample's, or of a window W in a sample of T: W - W^2 / 2T. A backward is two forwards.

    Args:
        length: of a sample, as a token sees it on average.
    """
    windows = sizes.windows or sizes.num_layers * [None]
    seen = (
        length / 2 if window is None or window >= length else window - window**2 / (2 * length) for window in windows
    )
    return 4 * sizes.width * sum(seen)
