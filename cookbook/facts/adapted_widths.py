"""Widths of the layers that an adapter changes, by a model's configuration."""

from collections.abc import Iterator
from typing import Any

from cookbook.config.sections import ALL_LINEAR, AdapterSection


def rank_above_width(adapter: AdapterSection | None, config: Any) -> Iterator[str]:
    """Say that a rank is more than the narrowest layer can use, by the names and sizes that most models have.

    Args:
        config: of the model, as far as it is known; None: not at all.
    """
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if adapter is None or not hidden or not heads:
        return
    head = getattr(config, "head_dim", None) or hidden // heads
    keys = head * (getattr(config, "num_key_value_heads", None) or heads)
    inner = getattr(config, "intermediate_size", None) or hidden
    sizes = {"q_proj": head * heads, "k_proj": keys, "v_proj": keys, "o_proj": head * heads}
    sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), inner)
    targets = sizes if ALL_LINEAR in adapter.targets else sizes.keys() & adapter.targets
    widths = {name: min(hidden, sizes[name]) for name in sorted(targets)}
    if narrow := [name for name, width in widths.items() if width < adapter.rank]:
        least = min(widths.values())
        yield (
            f"adapter.rank is {adapter.rank}, and {', '.join(narrow)} have fewer rows or columns: no change to a matrix"
            f" has a rank above its width; write at most {least}"
        )
