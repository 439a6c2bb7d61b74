"""Whether the samples of a micro-batch form one row: decided from the recipe and the model's architecture, never from
the strategy or the machine. No torch."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cookbook.config.recipe import Recipe
from cookbook.config.sections import ModelSection
from cookbook.facts.language_part import language_values
from cookbook.facts.model_files import CONFIG, values_of
from cookbook.facts.offline import known_model
from cookbook.system.files import RecipeError

STATEFUL = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "rwkv",
    "zamba",
    "zamba2",
    "zaya",
)
"""Architectures with layers that carry a state along a row: linear attention, state space, convolutions. In a packed
row such a layer runs on each sample by itself (cookbook/training/models/mixers.py)."""
TOKEN_BY_TOKEN = ("falcon_mamba", "jamba", "mamba", "recurrent_gemma", "rwkv", "zamba")
"""Those whose code without kernels (transformers 5.23) has a loop over the tokens of a row."""

SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash")
"""Those of `PACKABLE` whose attention has sinks, by transformers' code and not by a key of their configuration."""

# A list, since no attribute reveals where samples would mix, which nothing else would notice.
PACKABLE = (
    *STATEFUL,
    "apertus",
    "arcee",
    "aria_text",
    "axk1",
    "beam",
    "biogpt",
    "bitnet",
    "cohere",
    "cohere_compass_text",
    "cohere2",
    "cohere2_moe",
    "ctrl",
    "cwm",
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "diffllama",
    "dots1",
    "ernie4_5",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_unified_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "jetmoe",
    "kolibri1",
    "llama",
    "longcat_flash",
    "mellum",
    "mimo_v2_flash",
    "minicpm3",
    "minimax_m2",
    "minimax_m3_vl_text",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "moshi",
    "nanochat",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "starcoder2",
    "vaultgemma",
    "youtu",
)
"""Architectures for which tests/test_packed_attention.py shows that samples stay apart."""

OWN_ATTENTION = "its attention is code of its own in transformers, which cannot be told where a sample begins"
NOT_TOLD = "its layers do not hand on to attention where a sample begins"

MIXES = {
    "bloom": OWN_ATTENTION,
    "codegen": OWN_ATTENTION,
    "doge": "its attention needs a mask, which it computes for the whole row",
    "falcon": OWN_ATTENTION,
    "git": OWN_ATTENTION,
    "gpt_neo": OWN_ATTENTION,
    "gptj": OWN_ATTENTION,
    "inkling2_text": "its attention has a bias by position, which the packed attention has not",
    "inkling_text": "its attention has a bias by position, which the packed attention has not",
    "mpt": OWN_ATTENTION,
    "nemotron": NOT_TOLD,
    "openai-gpt": OWN_ATTENTION,
    "recurrent_gemma": OWN_ATTENTION,
    "stablelm": NOT_TOLD,
    "xglm": OWN_ATTENTION,
    "xlm": OWN_ATTENTION,
}
"""Architectures that were tried, and why a packed row is not served."""

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
"""Kinds of layers that keep samples apart, in a `PACKABLE` architecture. Of the others that transformers 5.23 has, most
choose keys or blocks of them by what they find in the whole row."""

ATTENTION_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
"""Keys of a configuration."""


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
    asked, problem = recipe.data.packing, packing_problem(config)
    if asked is False:
        return Packing(False, "data.packing is false", can_pack=problem is None and not stops_compiling(recipe, config))
    if problem is not None:
        if asked is True:
            name = recipe.model.name_or_path or config.model_type
            refused = f"data.packing is true, but {name!r} cannot be packed: {problem}; write data.packing: false"
            raise RecipeError(refused)
        return Packing(False, problem)
    if asked == "auto" and before is False:
        why = "the run was started with padded rows; data.packing: true packs from here on"
        return Packing(False, why, can_pack=not stops_compiling(recipe, config))
    if asked == "auto" and stops_compiling(recipe, config):
        otherwise = "it has layers that carry a state" if config.model_type in STATEFUL else "mixed_precision is no"
        return Packing(False, f"packed, checkpointed layers would run uncompiled: {why_split(config) or otherwise}")
    return Packing(True, "")


def stops_compiling(recipe: Recipe, config: Any) -> bool:
    """Whether packed rows undo `model.compile`: where samples are computed one by one they break a layer's graph, which
    checkpointing does not support (cookbook/training/models/efficiency.py)."""
    is_split = recipe.mixed_precision == "no" or config.model_type in STATEFUL or why_split(config) is not None
    return recipe.model.compile and bool(recipe.model.gradient_checkpointing) and is_split


def why_split(config: Any) -> str | None:
    """Why torch's kernel for ragged samples, FlashAttention, does not compute this model's attention on any GPU, or
    None (cookbook/training/models/attention.py, `_has_kernel`).

    Args:
        config: as for `packing_problem`.
    """
    if config.model_type in SINKS:
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
    for key in ATTENTION_DROPOUT:
        if getattr(config, key, 0.0):
            return f"its {key} {getattr(config, key)} is not in the packed attention"
    if config.model_type in PACKABLE:
        return None
    unknown = f"{config.model_type} is not among the architectures that were shown to keep samples apart"
    return MIXES.get(config.model_type, unknown)


def short_window(config: Any, max_length: int | None = None) -> int | None:
    """Tokens of the model's attention window, if a sample may have more; default: the model's positions."""
    max_length = max_length or getattr(config, "max_position_embeddings", None)
    slides = getattr(config, "use_sliding_window", not config.model_type.startswith("qwen"))  # transformers' default
    window = getattr(config, "sliding_window", None) if slides else None
    return window if window is not None and window < (max_length or 2**62) else None


def known_config(model: ModelSection) -> SimpleNamespace | None:
    """The configuration of a model as far as files here have it: the recipe, its folder, or offline_facts.json."""
    if model.from_scratch is not None:
        return SimpleNamespace(**model.from_scratch.model_dump())
    assert model.name_or_path is not None
    try:
        found = SimpleNamespace(**language_values(values_of(Path(model.name_or_path, CONFIG))))
        return found if hasattr(found, "model_type") else None
    except (OSError, ValueError, TypeError, AttributeError):
        facts = known_model(model.name_or_path)
        return None if facts is None else SimpleNamespace(**language_values(facts["config"]))
