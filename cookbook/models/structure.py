"""What a model is like, from wherever that can be had: the recipe itself, a folder, the Hub's cache, our own record."""

from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from cookbook.files import RecipeError
from cookbook.library import hub_answers, known_model
from cookbook.recipe import ModelSection, ScratchModel

OWN = "its own configuration"
RECORD = "recipes/offline_facts.json"

# Configuration keys of models that change the logits after the head: our loss would not see it.
LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "logits_soft_cap",
    "output_logit_soft_cap",
)


def find_config(model: ModelSection) -> tuple[PreTrainedConfig, str]:
    """The configuration of a recipe's model, and where it is from: `OWN`, or `RECORD` if the Hub was not reached.

    Raises:
        RecipeError: there is none of that name anywhere.
    """
    if model.from_scratch is not None:
        return scratch_config(model.from_scratch), OWN
    name = model.name_or_path
    assert name is not None
    is_reachable = not Path(name).is_dir() and hub_answers()
    try:
        config = AutoConfig.from_pretrained(
            name, trust_remote_code=False, revision=model.revision, local_files_only=not is_reachable
        )
        return config, OWN
    except (OSError, ValueError) as error:
        facts = known_model(name)
        if facts is None:
            reason = (str(error).strip().splitlines() or ["unknown"])[0][:200]
            mistake = (
                f"model.name_or_path is {name!r}: neither a folder, nor on the Hub or in its cache ({reason}), nor in"
                f" {RECORD}. Connect, or add its structure there"
            )
            raise RecipeError([mistake]) from None
    return AutoConfig.for_model(**facts["config"]), RECORD


def scratch_config(sizes: ScratchModel, **tokens: int | None) -> PreTrainedConfig:
    """The configuration of a new model.

    Args:
        tokens: `pad_token_id` and its like, of the tokenizer.
    """
    return AutoConfig.for_model(
        **sizes.model_dump(), head_dim=sizes.hidden_size // sizes.num_attention_heads, bos_token_id=None, **tokens
    )


def not_served(config: PreTrainedConfig) -> str | None:
    """Why loss or attention would be wrong for such a model, or None."""
    if config.get_text_config() is not config:
        return f"{config.model_type} holds more than a language model (images, sound); take a text-only model"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        return f"{config.model_type} is not a causal language model"
    # Without a mask, only causal attention does not see the padding.
    is_encoder = getattr(config, "is_decoder", None) is False and config.model_type != "gpt_neox"  # false by oversight
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if is_encoder or both_ways or getattr(config, "is_causal", None) is False:
        return "its attention looks ahead, so it cannot learn to predict the next token"
    for key in LOGIT_TRANSFORMS:
        if getattr(config, key, None) not in (None, 1, 1.0):
            return f"its {key} changes the logits after the head, not served yet"
    return None
