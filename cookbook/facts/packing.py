"""Decision to pack the samples of a micro-batch into one row: from the recipe and the model's architecture, never from
the strategy or the machine. No torch."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cookbook.config.recipe import Recipe
from cookbook.config.sections import ModelSection
from cookbook.facts.language_part import language_values
from cookbook.facts.model_files import CONFIG, values_of
from cookbook.facts.model_types import look_up, why_not
from cookbook.facts.offline import known_model
from cookbook.system.files import RecipeError
from cookbook.system.versions import installed_version

LAYERS = frozenset(
    (
        "attention",
        "conv",
        "full_attention",
        "hybrid",
        "hybrid_sliding",
        "linear_attention",
        "mamba",
        "mlp",
        "moe",
        "sliding_attention",
    )
)
"""Kinds of layers that keep samples apart, in a model type that can be packed. Of the others most choose keys or blocks
of them by what they find in the whole row."""


@dataclass(frozen=True)
class Packing:
    """Decision of a run between packed and padded rows."""

    is_on: bool
    why: str
    """Why rows are padded; empty if they are packed."""
    can_pack: bool = False
    """True if `data.packing: true` would pack the padded rows."""

    @property
    def words(self) -> str:
        """Description of the rows, for the user."""
        return "packed" if self.is_on else f"padded: {self.why}"

    def settle(self, recipe: Recipe) -> Recipe:
        """The recipe with true or false in `data.packing`, which does not count as written there."""
        data = recipe.data.model_copy(update={"packing": self.is_on})
        if "packing" not in recipe.data.model_fields_set:
            data.model_fields_set.discard("packing")
        return recipe.model_copy(update={"data": data})


def decide(recipe: Recipe, config: Any, *, before: bool | None = None) -> Packing:
    """Decide `data.packing` for a model.

    Args:
        config: as for `packing_problem`.
        before: the decision of the run to resume, which `auto` keeps.

    Raises:
        RecipeError: `data.packing` is true, and the model would mix samples.
    """
    setting, problem = recipe.data.packing, packing_problem(config)
    if setting is False:
        return Packing(False, "data.packing is false", can_pack=problem is None and not stops_compiling(recipe, config))
    if problem is not None:
        if setting is True:
            name = recipe.model.name_or_path or config.model_type
            refused = f"data.packing is true, but {name!r} cannot be packed: {problem}; write data.packing: false"
            raise RecipeError(refused)
        return Packing(False, problem)
    if setting == "auto" and before is False:
        why = "the run was started with padded rows; data.packing: true packs from here on"
        return Packing(False, why, can_pack=not stops_compiling(recipe, config))
    if setting == "auto" and stops_compiling(recipe, config):
        otherwise = (
            "it has layers that carry a state" if look_up(config.model_type).has_state else "mixed_precision is no"
        )
        return Packing(False, f"packed, checkpointed layers would run uncompiled: {why_split(config) or otherwise}")
    return Packing(True, "")


def stops_compiling(recipe: Recipe, config: Any) -> bool:
    """Return whether packed rows undo `model.compile`: where samples are computed one by one they break a layer's
    graph, which checkpointing does not support (cookbook/training/models/efficiency.py)."""
    is_split = recipe.mixed_precision == "no" or look_up(config.model_type).has_state or why_split(config) is not None
    return recipe.model.compile and bool(recipe.model.gradient_checkpointing) and is_split


def why_split(config: Any) -> str | None:
    """Why torch's kernel for ragged samples, FlashAttention, does not compute this model's attention on any GPU, or
    None (cookbook/training/models/attention.py, `_has_kernel`).

    Args:
        config: as for `packing_problem`.
    """
    if look_up(config.model_type).has_sinks:
        return "its attention has sinks"
    # Unlike transformers' object, its values answer where layers differ.
    values = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    if values.get("attn_logit_softcapping") is not None:
        return "its attention caps its scores"
    size = max(values.get(name) or 0 for name in ("head_dim", "global_head_dim", "qk_head_dim"))
    return f"the kernel takes heads of at most 256, and these have {size}" if size > 256 else None


def packing_problem(config: Any) -> str | None:
    """Why this model would mix the samples of a packed row, or None.

    Args:
        config: the model's configuration, with at least `model_type`.
    """
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - LAYERS)
    if foreign:
        return f"it has layers of {', '.join(foreign)}"
    facts, here = look_up(config.model_type), installed_version("transformers")
    unknown = f"{config.model_type} is not among the architectures that were shown to keep samples apart"
    problem = why_not(config.model_type, facts.packed, unknown)
    if problem is None or facts.transformers in (None, here):
        return problem
    return f"{problem}; that is so in transformers {facts.transformers}, and here is {here}"


def short_window(config: Any, max_length: int | None = None) -> int | None:
    """Tokens of the model's attention window, if a sample may have more; default: the model's positions."""
    max_length = max_length or getattr(config, "max_position_embeddings", None)
    # Qwen's configurations have the key, by default false in transformers; other types use a window that they have.
    slides = getattr(config, "use_sliding_window", not config.model_type.startswith("qwen"))
    window = getattr(config, "sliding_window", None) if slides else None
    return window if window is not None and window < (max_length or 2**62) else None


def known_config(model: ModelSection) -> SimpleNamespace | None:
    """The configuration of a model as far as files here have it: the recipe, its folder, or offline_facts.json."""
    if model.from_scratch is not None:
        return SimpleNamespace(**model.from_scratch.model_dump())
    assert model.name_or_path is not None
    try:
        config = SimpleNamespace(**language_values(values_of(Path(model.name_or_path, CONFIG))))
        return config if hasattr(config, "model_type") else None
    except (OSError, ValueError, TypeError, AttributeError):
        facts = known_model(model.name_or_path)
        return None if facts is None else SimpleNamespace(**language_values(facts["config"]))
