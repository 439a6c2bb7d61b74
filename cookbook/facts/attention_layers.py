"""The attention of each layer of a model, from its configuration. No torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from cookbook.system.files import RecipeError

SEES_ALL = (
    "attention",
    "full_attention",
    "hybrid",
    "indexed_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
)
"""Kinds of layers whose attention computes scores of all earlier positions, as transformers does where an indexer
chooses. The last two, of DeepSeek-V4, compute fewer."""
HAS_WINDOW = {
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Kinds of layers whose attention has a window, and the key of its size."""
HAS_NONE = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "moe", "mlp")
"""Kinds of layers without attention: state spaces, linear attention, convolutions, feed-forward alone."""


class Attention(NamedTuple):
    """The attention of a layer."""

    num_heads: int
    num_key_heads: int
    head_dim: float
    """Size of a head; the mean of both if queries and values differ."""
    window: int | None
    """None: all earlier positions."""

    @property
    def width(self) -> float:
        return self.num_heads * self.head_dim


def first_of(config: Any, *names: str) -> Any:
    """The value of the first of several keys that a configuration has, or None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def layer_configs(text: Any) -> Sequence[Any]:
    """The configuration of each layer of a language model, which all read the same where layers are alike."""
    # transformers 5.23 raises an error if a value that differs between layers is read from the configuration of all
    # (integrations/heterogeneity/configuration_utils.py, HeterogeneousConfigMixin.__getattribute__).
    per_layer = getattr(text, "per_layer_config", None)  # older versions have none
    count = text.num_hidden_layers
    return [text] * count if per_layer is None else [per_layer[i] for i in range(count)]


def attention_layers(config: Any) -> list[Attention]:
    """The attention of each layer that has one.

    Args:
        config: a transformers configuration.

    Raises:
        RecipeError: a kind of layer that is not known, or heads without a number or size.
    """
    text = config.get_text_config()
    kinds = first_of(text, "layer_types", "layers_block_type")
    if kinds is None:  # all alike: with a window if there is one, as Mistral's
        has_heads = first_of(layer_configs(text)[0], "num_attention_heads") is not None
        kinds = text.num_hidden_layers * ["sliding_attention" if has_heads else "linear_attention"]
    if unknown := sorted(set(kinds) - {*SEES_ALL, *HAS_WINDOW, *HAS_NONE}):
        raise RecipeError(f"model {config.model_type}: layers of {', '.join(unknown)} are not known to the forecast")
    layers = zip(kinds, layer_configs(text), strict=True)
    return [_attention(layer, kind) for kind, layer in layers if kind not in HAS_NONE]


def _attention(layer: Any, kind: str) -> Attention:
    heads = first_of(layer, "num_attention_heads")
    plain = first_of(layer, "head_dim", "attention_head_dim") or (heads and layer.hidden_size // heads)
    latent = [first_of(layer, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    queries = first_of(layer, "qk_head_dim") or (sum(latent) if None not in latent else plain)
    if not heads or not queries:
        raise RecipeError(f"model {layer.model_type}: its configuration has no number or size of attention heads")
    values = first_of(layer, "v_head_dim") or plain
    window = HAS_WINDOW.get(kind)
    return Attention(
        num_heads=heads,
        num_key_heads=first_of(layer, "num_key_value_heads") or heads,
        head_dim=(queries + values) / 2,
        window=None if window is None else first_of(layer, window),
    )
