"""Whether the samples of a micro-batch form one row: decided from the recipe and the model's architecture, never from
the strategy or the machine. No torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cookbook.config.recipe import Recipe
from cookbook.config.sections import ModelSection
from cookbook.planning.offline import known_model
from cookbook.system.files import RecipeError

# A list, since no attribute reveals it: stablelm, nemotron and nanochat silently use attention code of their own.
PACKABLE = (
    "apertus",
    "arcee",
    "dots1",
    "ernie4_5",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "gemma",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_neox",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "llama",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
)
"""Architectures for which tests/test_packed_attention.py shows that samples stay apart."""


@dataclass(frozen=True)
class Packing:
    """What `data.packing` comes to in a run."""

    is_on: bool
    why: str
    """Why rows are padded; empty if they are packed."""
    can_pack: bool = False
    """Whether `data.packing: true` would pack the padded rows."""

    @property
    def words(self) -> str:
        """What rows are."""
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
        before: what the run to resume had, which `auto` keeps.

    Raises:
        RecipeError: `data.packing` is true, and the model would mix samples.
    """
    asked, problem = recipe.data.packing, packing_problem(config, recipe.data.max_length)
    if asked is False:
        return Packing(False, "data.packing is false", can_pack=problem is None and not stops_compiling(recipe))
    if problem is not None:
        if asked is True:
            name = recipe.model.name_or_path or config.model_type
            refused = f"data.packing is true, but {name!r} cannot be packed: {problem}; write data.packing: false"
            raise RecipeError(refused)
        return Packing(False, problem)
    if asked == "auto" and before is False:
        why = "the run was started with padded rows; data.packing: true packs from here on"
        return Packing(False, why, can_pack=not stops_compiling(recipe))
    if asked == "auto" and stops_compiling(recipe):
        return Packing(False, "packed in float32, checkpointed layers would run uncompiled")
    return Packing(True, "")


def stops_compiling(recipe: Recipe) -> bool:
    """Whether packed rows undo `model.compile`: their float32 attention breaks a layer's graph, which checkpointing
    does not support (cookbook/training/models/efficiency.py)."""
    return recipe.model.compile and bool(recipe.model.gradient_checkpointing) and recipe.mixed_precision == "no"


def packing_problem(config: Any, max_length: int | None = None) -> str | None:
    """Why this model would mix the samples of a packed row, or None.

    Args:
        config: the model's configuration, with at least `model_type`.
        max_length: longest sample in tokens; default: the model's positions.
    """
    max_length = max_length or getattr(config, "max_position_embeddings", None)
    limit = f"data.max_length {max_length}" if max_length else "a sample may have"
    slides = getattr(config, "use_sliding_window", not config.model_type.startswith("qwen"))  # transformers' default
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if slides else None
    if window is not None and window < (max_length or 2**62):
        return f"its attention window is {window} tokens, less than {limit}"
    foreign = sorted(kinds - {"full_attention", "sliding_attention"})
    if foreign:
        return f"it has layers of {', '.join(foreign)}"
    if getattr(config, "attention_dropout", 0.0):
        return f"its attention_dropout {config.attention_dropout} is not in the packed attention"
    if config.model_type not in PACKABLE:
        return f"{config.model_type} is not among the architectures that were shown to keep samples apart"
    return None


def known_config(model: ModelSection) -> SimpleNamespace | None:
    """The configuration of a model as far as files here have it: the recipe, its folder, or offline_facts.json."""
    if model.from_scratch is not None:
        return SimpleNamespace(**model.from_scratch.model_dump())
    assert model.name_or_path is not None
    try:
        found = SimpleNamespace(**json.loads((Path(model.name_or_path) / "config.json").read_text(encoding="utf-8")))
        return found if hasattr(found, "model_type") else None
    except (OSError, ValueError, TypeError):
        facts = known_model(model.name_or_path)
        return None if facts is None else SimpleNamespace(**facts["config"])
