"""A head that scores whole sequences, in the place of the one that predicts tokens.

Which of the two a model has is written in the `architectures` of its configuration, as in any folder of transformers'
ForSequenceClassification.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.config.objectives.scored import HEAD
from cookbook.system.files import RecipeError

SUFFIX = "ForSequenceClassification"


@dataclass(frozen=True)
class ScoreHead:
    """Settings of a head for sequences, as a configuration has them."""

    num_labels: int
    """Numbers for each sequence."""
    pad_token_id: int | None
    """A sequence is scored at its last other token (transformers 5.23, modeling_layers.py,
    GenericForSequenceClassification)."""
    problem_type: str | None = None
    classes: Sequence[str] = ()
    """Names of the `num_labels` numbers, if they have names."""


def is_scored(config: Any) -> bool:
    """Return whether the model of a configuration scores sequences."""
    return any(name.endswith(SUFFIX) for name in getattr(config, "architectures", None) or ())


def class_of(config: Any) -> Any:
    """transformers' class for the model of a configuration.

    Raises:
        KeyError: there is none.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    return (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if is_scored(config) else MODEL_FOR_CAUSAL_LM_MAPPING)[
        type(config)
    ]


def empty_model(config: Any) -> Any:
    """The model of a configuration, where torch creates tensors now, by this process alone.

    Raises:
        KeyError: as `class_of`; else whatever its code raises.
    """
    from transformers.integrations import deepspeed

    # A class for sequences makes its backbone by `from_config`, which under ZeRO-3 waits for the other processes.
    held, deepspeed._hf_deepspeed_config_weak_ref = deepspeed._hf_deepspeed_config_weak_ref, None
    try:
        return class_of(config)(config)
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = held


def auto_class(config: Any) -> Any:
    """transformers' auto class that opens the model of a configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if is_scored(config) else AutoModelForCausalLM


def head_of(model: Any) -> Any:
    """The module of a model after its backbone; on a pipeline's other stages what stands in its place."""
    return getattr(model, HEAD) if is_scored(model.config) else model.get_output_embeddings()


def backbone_of(model: Any) -> Any:
    """The module of a model before its head; the model itself if that is all in one."""
    # Llama 4's class for text names another prefix than that of its backbone.
    return getattr(model, "model", model) if model.base_model is model else model.base_model


def backbone_name(model: Any) -> str:
    """The name of `backbone_of` in the model."""
    backbone = backbone_of(model)
    return next((name for name, module in model.named_children() if module is backbone), model.base_model_prefix)


def why_no_score(config: Any) -> str | None:
    """Why a model cannot be given a head for sequences, or None."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    from transformers.modeling_layers import GenericForSequenceClassification

    if config.get_text_config() is not config:
        return "it has an image or audio tower; name a text-only model"
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None or not issubclass(kind, GenericForSequenceClassification):
        return f"{config.model_type} has no {SUFFIX} of the common form in the installed transformers"
    return None


def head_wanted(objective: Any, config: Any, pad_token_id: int | None) -> ScoreHead | None:
    """The head for sequences that an objective trains; None for the head of a language model.

    Raises:
        RecipeError: an objective of a language model, and a model that has none any more.
    """
    if objective.num_scores is not None:
        return ScoreHead(objective.num_scores, pad_token_id, objective.problem_type, objective.class_names)
    if is_scored(config):
        what = f"objective.name is {objective.name}, which predicts tokens, and the model is {config.architectures[0]}"
        raise RecipeError(f"{what}, whose head scores sequences; name the language model from which it was made")
    return None


def head_note(config: Any, head: ScoreHead) -> str:
    """Tell the user where the head for sequences comes from."""
    count = f"{head.num_labels} number{'s' * (head.num_labels > 1)} for each sequence"
    if is_scored(config):
        return f"the head, of {count}, is that of the model's files"
    return f"the head, of {count}, is drawn from the seed; the model's own, which predicts tokens, is left out"


def with_head(config: Any, head: ScoreHead) -> Any:
    """A copy of a configuration whose model has a head for sequences."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    own = copy.deepcopy(config)
    own.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].__name__]
    if own.num_labels != head.num_labels:
        own.num_labels = head.num_labels
    if head.classes:
        own.id2label, own.label2id = dict(enumerate(head.classes)), {name: i for i, name in enumerate(head.classes)}
    own.problem_type = head.problem_type
    own.tie_word_embeddings = False  # there is no second matrix by the vocabulary
    own.pad_token_id = head.pad_token_id
    return own
