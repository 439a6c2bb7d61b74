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

TOWERS = (
    "aria",
    "exaone4_5",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "hyperclovax_vision_v2",
    "idefics2",
    "idefics3",
    "internvl",
    "lfm2_vl",
    "llama4",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "ovis2",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "smolvlm",
)
"""Model types whose logits of text, by their own class, are those of the language part alone: tests/test_towers.py."""
TWINS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Language parts without a class of their own for text, and the type that computes the same: the three positions of a
text's token are one."""
WHOLE_ONLY = {
    "aya_vision": "its own class leaves out the logit_scale of its language part",
    "cohere2_vision": "its own class leaves out the logit_scale of its language part",
    "mllama": "its language part attends to images in layers of its own",
    "paligemma": "its attention looks ahead in the prompt",
}
"""Why the language part of these computes something else alone."""
TOWER_PACKAGES = {"gemma3n": "timm"}
"""Packages with which transformers builds the towers of these, and which we do not install."""
AFTER_THE_HEAD = ("final_logit_softcapping", "lm_head_multiplier", "logit_scale", "logits_scaling")
WITH_THESE = ("gemma3n", "gemma4", "gemma4_unified", "hyperclovax_vision_v2")
"""Model types whose own class does to its logits what these keys of the language part say; others leave it out."""
KEY_MAPPING = {
    r"^(?:model\.)?language_model\.lm_head": "lm_head",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
"""`key_mapping` of `from_pretrained`: from the names in files, as several versions of transformers wrote them, to those
of the class for the language part."""


def has_tower(config: Any) -> bool:
    """Whether a model's configuration is one whose language part is trained."""
    return config.model_type in TOWERS and config.get_text_config() is not config and why_whole(config) is None


def language_config(config: Any) -> Any:
    """The configuration of what is trained: of the language part, or `config` itself if it has no tower."""
    if not has_tower(config):
        return config
    text = copy.deepcopy(config.get_text_config())
    if (twin := TWINS.get(text.model_type)) is not None:
        from transformers import AutoConfig

        text = AutoConfig.for_model(twin, **{key: of for key, of in text.to_dict().items() if key != "model_type"})
    # The class of the whole goes by its own, whatever stands in the part.
    text.tie_word_embeddings = config.tie_word_embeddings
    text.dtype = config.dtype or text.dtype
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    return text


def why_whole(config: Any) -> str | None:
    """Why the language part of a model cannot be trained alone, or None if it can, or if the model is nothing else."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        text = config.get_text_config()
    except ValueError:  # there are several
        return "several language models"
    if text is config:
        return None
    if config.model_type in WHOLE_ONLY:
        return WHOLE_ONLY[config.model_type]
    if text.model_type not in TWINS and type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"transformers has no class for its language part alone ({text.model_type})"
    if config.model_type not in TOWERS:
        return "its language part alone was not compared with it"
    package = TOWER_PACKAGES.get(config.model_type)
    if package and find_spec(package) is None:
        return f"transformers builds its image tower with {package}, which is not installed (`pip install {package}`)"
    left_out = [key for key in AFTER_THE_HEAD if getattr(text, key, None) not in (None, 1)]
    if left_out and config.model_type not in WITH_THESE:
        return f"its own class leaves out the {left_out[0]} of its language part"
    return None


def language_values(values: dict[str, Any]) -> dict[str, Any]:
    """As `language_config`, from the values of a `config.json`; `part_of` is then the type of the whole."""
    text = values.get("text_config")
    if values.get("model_type") not in TOWERS or not isinstance(text, dict):
        return values
    kind = str(text.get("model_type"))
    return text | {"model_type": TWINS.get(kind, kind), "part_of": values["model_type"]}


def with_rows(values: dict[str, Any], rows: int) -> dict[str, Any]:
    """The values of the `config.json` of a model with a tower, with so many rows in its embedding."""
    return values | {"text_config": values["text_config"] | {"vocab_size": rows}}


def tower_tokens(whole: Any) -> dict[str, int]:
    """The keys of a configuration by which a tower's own places in a text are known, with the ids of their tokens."""
    ends = ("_token_id", "_token_index")
    return {key: of for key, of in whole.to_dict().items() if key.endswith(ends) and isinstance(of, int)}


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
    whole = whole_config(folder)
    return {} if whole is None else {"config": language_config(whole), "key_mapping": KEY_MAPPING}


def language_key(key: str) -> str:
    """The name in the class for the language part of a tensor in the files."""
    for pattern, name in KEY_MAPPING.items():
        key = re.sub(pattern, name, key)
    return key
