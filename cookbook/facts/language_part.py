"""The language model in a model that also has an image or audio tower: its configuration, and its tensors in the files.

Such a model is opened as transformers' class for its language part alone, from the same files under other names: the
tower is never in memory, and every strategy trains what it knows.
"""

import copy
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cookbook.facts.model_files import read_config
from cookbook.facts.model_types import look_up, why_not

CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
SCALES = ("logit_scale", "lm_head_multiplier", "logits_scaling", "logits_mup_width_multiplier")
"""Keys of a configuration for what happens to the logits after the head. A type for which they say too little is
refused: its own forward is asked (`training/models/logits.py`)."""
KEY_MAPPING = {
    r"^(?:model\.)?language_model\.lm_head": "lm_head",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
"""`key_mapping` of `from_pretrained`: from the names in files, as several versions of transformers wrote them, to those
of the class for the language part."""


def has_tower(config: Any) -> bool:
    """Return whether a configuration is of a model with a tower whose language part can be trained alone."""
    is_tower = look_up(config.model_type).language_part is True
    return is_tower and config.get_text_config() is not config and why_whole(config) is None


def language_config(config: Any) -> Any:
    """The configuration of what is trained: of the language part, or `config` itself if it has no tower."""
    if not has_tower(config):
        return config
    text = copy.deepcopy(config.get_text_config())
    if twin := look_up(text.model_type).computes_as:
        from transformers import AutoConfig

        values = {key: value for key, value in text.to_dict().items() if key != "model_type"}
        text = AutoConfig.for_model(twin, **values)
    # The class of the whole model reads its own value, whatever stands in the part.
    text.tie_word_embeddings = config.tie_word_embeddings
    text.dtype = config.dtype or text.dtype
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    return text


def why_whole(config: Any) -> str | None:
    """Why the language part of a model cannot be trained alone; None if it can, or if the model has no other part."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        text = config.get_text_config()
    except ValueError:  # transformers found several text configurations
        return "several language models"
    if text is config:
        return None
    facts = look_up(config.model_type)
    if isinstance(facts.language_part, str):  # before what its part lacks
        return facts.language_part
    if look_up(text.model_type).computes_as is None and type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"transformers has no class for its language part alone ({text.model_type})"
    if problem := why_not(config.model_type, facts.language_part, "its language part alone was not compared with it"):
        return problem
    if (package := facts.needs) and find_spec(package) is None:
        return f"transformers builds its image tower with {package}, which is not installed (`pip install {package}`)"
    left_out = [key for key in changes_of_logits(text) if key not in facts.logits]
    return f"its own class leaves out the {left_out[0]} of its language part" if left_out else None


def changes_of_logits(text: Any) -> dict[str, float]:
    """Keys of a language model's configuration that change its logits after the head, and their values."""
    values = {key: getattr(text, key, None) for key in (*CAPS, *SCALES)}
    return {key: value for key, value in values.items() if value is not None and (value != 1 or key in CAPS)}


def language_values(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a `config.json` for the language part, see `language_config`; `part_of` has the model's type."""
    text = values.get("text_config")
    if look_up(str(values.get("model_type"))).language_part is not True or not isinstance(text, dict):
        return values
    kind = str(text.get("model_type"))
    return text | {"model_type": look_up(kind).computes_as or kind, "part_of": values["model_type"]}


def with_rows(values: dict[str, Any], rows: int) -> dict[str, Any]:
    """The values of the `config.json` of a model with a tower, with so many rows in its embedding."""
    return values | {"text_config": values["text_config"] | {"vocab_size": rows}}


def tower_tokens(config: Any) -> dict[str, int]:
    """The keys of a configuration by which a tower's own places in a text are known, with the ids of their tokens."""
    ends = ("_token_id", "_token_index")
    return {key: number for key, number in config.to_dict().items() if key.endswith(ends) and isinstance(number, int)}


def open_config(name: str | Path, **options: Any) -> Any:
    """`language_config` of a folder, or of a model on the Hub.

    Args:
        options: of `from_pretrained`.

    Raises:
        RecipeError, OSError, ValueError: as `read_config`.
    """
    return language_config(read_config(name, **options))


def whole_config(folder: str | Path) -> Any | None:
    """The configuration of a folder whose model has a tower, or None."""
    config = read_config(folder)
    return config if has_tower(config) else None


def open_options(folder: str | Path) -> dict[str, Any]:
    """Arguments of `AutoModelForCausalLM.from_pretrained` that open what is trained of a folder's model."""
    config = whole_config(folder)
    return {} if config is None else {"config": language_config(config), "key_mapping": KEY_MAPPING}


def language_key(key: str) -> str:
    """The name in the class for the language part of a tensor in the files."""
    for pattern, name in KEY_MAPPING.items():
        key = re.sub(pattern, name, key)
    return key
