"""Configuration of a model: from the recipe, a folder, the Hub or its cache, or `recipes/offline_facts.json`."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cookbook.config.recipe import Recipe
from cookbook.config.sections import AdapterSection, ModelSection, ScratchModel
from cookbook.config.strategy_keys import Claim
from cookbook.facts.adapted_widths import rank_above_width
from cookbook.facts.language_part import changes_of_logits, has_tower, language_config, why_whole
from cookbook.facts.meshes import EXPERTS_OF_A_TOKEN, num_experts, size_of_experts
from cookbook.facts.model_files import read_config, read_tokenizer
from cookbook.facts.model_types import how_to_measure, look_up
from cookbook.facts.offline import hub_answers, known_model, nearest_models
from cookbook.facts.score_head import head_wanted, why_no_score, with_head
from cookbook.system.files import RecipeError, first_line
from cookbook.system.kept_results import find_or_make
from cookbook.training.models.new_tokens import grown_rows, pad_rows

FROM_MODEL = "its own configuration"
OFFLINE_FACTS = "recipes/offline_facts.json"
NOT_QUANTIZED = "name the model in 16 or 32 bits from which they were made (adapter.name: qlora quantizes it by itself)"


SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
"""Sizes that every configuration has, by what transformers writes about its PreTrainedConfig."""
COUNTED: dict[tuple[str, str], str] = {}
"""Words about the trained part of a model with a tower, whose parameters take seconds to count, by configuration."""


@dataclass(frozen=True)
class LogitTransform:
    """Function of a model's head's outputs x: cap * tanh(scale * x / cap), or without a cap scale * x."""

    scale: float = 1.0
    cap: float | None = None


def find_config(model: ModelSection) -> tuple[PreTrainedConfig, str]:
    """The configuration of a recipe's model, or its language part, with its new tokens, and its origin, `FROM_MODEL` or
    (without the Hub) `OFFLINE_FACTS`.

    Raises:
        RecipeError: there is no model of that name.
    """
    config, origin = _find_config(model)
    if model.new_tokens:
        config.get_text_config().vocab_size = _rows_with(model, config.get_text_config().vocab_size)
    return config, origin


def config_of(recipe: Recipe) -> tuple[PreTrainedConfig, str]:
    """`find_config` of a recipe's model, with the head that its objective trains.

    Raises:
        RecipeError: as `find_config`; a model that cannot have that head.
    """
    config, origin = find_config(recipe.model)
    if (head := head_wanted(recipe.objective, config, getattr(config, "pad_token_id", None))) is None:
        return config, origin
    if problem := why_no_score(config):
        raise RecipeError(f"objective.name is {recipe.objective.name}: {problem}")
    return with_head(config, head), origin


def _rows_with(model: ModelSection, rows: int) -> int:
    """Rows of an embedding for the new tokens too; at most, if the tokenizer is not here."""
    assert model.new_tokens is not None
    try:
        tokenizer = read_tokenizer(model.name_or_path or "", **hub_options(model))
    except (OSError, ValueError):  # a new one too, whose size is the largest that it may have
        return pad_rows(rows + len(model.new_tokens))
    tokenizer.add_tokens(model.new_tokens, special_tokens=True)
    return grown_rows(rows, tokenizer)


def _find_config(model: ModelSection) -> tuple[PreTrainedConfig, str]:
    if model.from_scratch is not None:
        return scratch_config(model.from_scratch), FROM_MODEL
    name = model.name_or_path
    assert name is not None
    try:
        config, origin = read_config(name, **hub_options(model)), FROM_MODEL
    except RecipeError as error:
        raise RecipeError(f"model.name_or_path is {name!r}: {error}") from None
    except (OSError, ValueError) as error:
        facts = known_model(name)
        if facts is None:
            near = nearest_models(name)
            mistake = (
                f"model.name_or_path is {name!r}: neither a folder, nor on the Hub or in its cache"
                f" ({first_line(error)}), nor in {OFFLINE_FACTS}{f', which has {near}' * bool(near)}. Connect, or add"
                " its structure there"
            )
            raise RecipeError(mistake) from None
        config, origin = AutoConfig.for_model(**facts["config"]), OFFLINE_FACTS
    return language_config(config), f"{origin}; {part_in_words(config)}" if has_tower(config) else origin


def known_config_of(facts: dict[str, Any]) -> PreTrainedConfig:
    """The configuration that is trained of a model that is only in `OFFLINE_FACTS`.

    Args:
        facts: its entry there.
    """
    return language_config(AutoConfig.for_model(**facts["config"]))


def part_in_words(config: PreTrainedConfig) -> str:
    """Describe the trained part of a model with a tower to the user."""
    key = "part in words", config.to_json_string()
    if key not in COUNTED:
        COUNTED[key] = find_or_make(key, lambda: _count_part(config), str)
    return COUNTED[key]


def _count_part(config: PreTrainedConfig) -> str:
    part = language_config(config)
    part_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(part)]
    with torch.device("meta"):
        # Of copies: a model changes the configuration that it is made from.
        num_all = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](copy.deepcopy(config)).num_parameters()
        num_trained = part_class(copy.deepcopy(part)).num_parameters()
    return (
        f"of {config.model_type} the language part is trained ({part_class.__name__}, {num_trained:,} parameters); the"
        f" rest, for images or sound ({num_all - num_trained:,}), is not loaded, and an export has it as it was"
    )


def hub_options(model: ModelSection) -> dict[str, Any]:
    """Arguments of `from_pretrained` that use the Hub only if it answers."""
    is_online = not Path(str(model.name_or_path)).is_dir() and hub_answers()
    return {"revision": model.revision, "local_files_only": not is_online}


def scratch_config(sizes: ScratchModel, **tokens: int | None) -> PreTrainedConfig:
    """The configuration of a new model.

    Args:
        tokens: special tokens of the tokenizer, such as `pad_token_id`.
    """
    return AutoConfig.for_model(
        **sizes.model_dump(), head_dim=sizes.hidden_size // sizes.num_attention_heads, bos_token_id=None, **tokens
    )


def comparison_notes(config: PreTrainedConfig) -> list[str]:
    """A note for the user if no strategy was seen to train this model type as transformers computes it."""
    if look_up(config.model_type).transformers is not None:
        return []
    return [
        f"{config.model_type} is not among the model types of docs/architectures.md, whose curves were compared with"
        " transformers' under every kind of strategy: compare its first steps with those of single"
        + how_to_measure(config.model_type)
    ]


def quantized_weights(config: PreTrainedConfig) -> str | None:
    """The reason why weights that a configuration calls quantized cannot be trained; None of others."""
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        how = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        return f"its weights are quantized ({how or 'quantization_config'}), which cannot be trained; {NOT_QUANTIZED}"
    for key, value in vars(config).items():  # `quantization` of MLX, and others that transformers keeps unread
        if isinstance(value, dict) and ("quant" in key or "quant_method" in value):
            return f"its weights are quantized ({key} of config.json), which cannot be trained; {NOT_QUANTIZED}"
    return None


def doubts_about(
    config: PreTrainedConfig, model: ModelSection, adapter: AdapterSection | None = None
) -> tuple[str, ...]:
    """Reasons why a forecast may be of another run than the one that is meant.

    Args:
        model: whose configuration it is.
    """
    doubts = [quantized_weights(config), _sizes_left_out(config, model)]
    return (*filter(None, doubts), *rank_above_width(adapter, config))


def _sizes_left_out(config: PreTrainedConfig, model: ModelSection) -> str | None:
    """A note on the sizes that transformers would write into a `config.json` and the model's has nowhere."""
    if model.name_or_path is None:
        return None
    try:
        values, _ = PreTrainedConfig.get_config_dict(model.name_or_path, **hub_options(model))
    except OSError:  # it is known from `OFFLINE_FACTS`, which are whole
        return None
    written, inner = set[str](), [values]
    for section in inner:  # which grows meanwhile
        written |= section.keys()
        inner += [value for value in section.values() if isinstance(value, dict)]
    names = {size: {size, config.attribute_map.get(size)} for size in SIZES}
    whole = config.to_diff_dict().keys()
    left_out = [size for size, known in names.items() if known & whole and not known & written]
    if not left_out:
        return None
    own = ", ".join(f"{size} ({getattr(config, size):,})" for size in left_out)
    return f"config.json lacks {own}: the forecast is of transformers' own; write them there"


def why_not_trained(config: PreTrainedConfig, max_length: int, place: str) -> list[str]:
    """The reasons for which a model of this configuration cannot be trained on samples of that length.

    Args:
        place: where the model is named, for messages.
    """
    if (problem := not_served(config)) is not None:
        return [f"{place}: {problem}"]
    return [*_check_positions(config, max_length), *_check_router(config, place), *_check_heads(config, place)]


def _check_positions(config: PreTrainedConfig, max_length: int) -> list[str]:
    positions = getattr(config, "max_position_embeddings", None) or max_length
    if max_length > positions:
        return [f"data.max_length is {max_length}, but the model has {positions} positions; use at most those"]
    rope = getattr(config, "rope_parameters", None) or {}
    # Of a model with several kinds of layers, such as Gemma 3, each kind has its own.
    for layers, own in {None: rope, **{key: own for key, own in rope.items() if isinstance(own, dict)}}.items():
        kind, original = own.get("rope_type"), own.get("original_max_position_embeddings") or positions
        if max_length > original and (kind in ("dynamic", "longrope") or _has_longer(config, kind, layers, original)):
            return [
                f"data.max_length is {max_length}, but above {original} tokens this model's rotary embedding ({kind})"
                f" depends on the longest sample of a micro-batch; use at most {original}"
            ]
    return []


def _has_longer(config: PreTrainedConfig, kind: str | None, layers: str | None, original: int) -> bool:
    """Return whether transformers makes other frequencies of a rotary embedding for a longer row."""
    if (make := ROPE_INIT_FUNCTIONS.get(str(kind))) is None:
        return False
    try:
        short, long = (make(config, "cpu", seq_len=length, layer_type=layers) for length in (original, 4 * original))
    except Exception:  # over a value of config.json, which the model's own code will say
        return False
    return short[1] != long[1] or not torch.equal(short[0], long[0])


def _check_router(config: PreTrainedConfig, place: str) -> list[str]:
    count, taken = num_experts(config), size_of_experts(config, EXPERTS_OF_A_TOKEN) or 0
    if count > 1 and taken > count:
        return [f"{place}: config.json has {taken} experts for each token, of {count} in a layer; correct it"]
    return []


def _check_heads(config: PreTrainedConfig, place: str) -> list[str]:
    heads, keys = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if isinstance(heads, int) and isinstance(keys, int) and (keys < 1 or heads % keys):  # lists differ by the layer
        return [f"{place}: config.json has {heads} query heads, and {keys} key heads do not divide them; correct it"]
    return []


def not_served(config: PreTrainedConfig) -> str | None:
    """Why loss or attention would be wrong for this model, or None."""
    if config.is_encoder_decoder:
        return f"{config.model_type} is not a causal language model"
    if why := why_whole(config):
        return (
            f"{config.model_type} holds more than a language model (images, sound), and {why}; take a text-only model"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"{config.model_type} is not a causal language model"
    if refused := look_up(config.model_type).refused:
        return refused
    # Without a mask, only causal attention does not see the padding.
    is_encoder = getattr(config, "is_decoder", None) is False and config.model_type != "gpt_neox"  # false by oversight
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if is_encoder or both_ways or getattr(config, "is_causal", None) is False:
        return "its attention looks ahead, so it cannot learn to predict the next token"
    if getattr(config, "output_router_logits", False):
        return (
            "its output_router_logits asks for the router's auxiliary loss: of products of means over a micro-batch,"
            " so that the curve would depend on how a batch is split; set it to false in its config.json"
        )
    try:
        logit_transform(config)
    except RecipeError as error:
        return str(error)
    return None


def logit_transform(config: PreTrainedConfig) -> LogitTransform | None:
    """The function that follows the head of a model; None if nothing does.

    Raises:
        RecipeError: it is no scale or cap, or a key that was not compared for this model type.
    """
    text = config.get_text_config()
    unpadded = getattr(text, "unpadded_vocab_size", None)
    if unpadded is not None and unpadded < text.vocab_size:
        raise RecipeError(f"its unpadded_vocab_size {unpadded} leaves logits of the head out, which is not served")
    values: dict[str, float] = {}
    for key, value in changes_of_logits(text).items():
        how = look_up(config.model_type).logits.get(key)
        if how is None:
            what = f"its {key} changes the logits after the head"
            raise RecipeError(f"{what}, which was not compared for {config.model_type}")
        values |= {"cap": value} if how == "cap" else {"scale": value if how == "times" else 1 / value}
    return LogitTransform(**values) if values else None


def layer_mistakes(config: PreTrainedConfig, claims: Iterable[Claim]) -> list[str]:
    """One mistake for each class of layers that a strategy file names and this model has not."""
    own = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._no_split_modules or ()
    return [
        f"{claim.place} is {claim.written!r}, but the layers of {config.model_type} are {', '.join(own)}; take it out"
        for claim in claims
        if claim.key == "~layer" and not {*str(claim.value).split(",")} <= {*own}
    ]
