"""Abilities of transformers' code of a model, as its class says. No torch, but where it looks at the class."""

import sys
from dataclasses import dataclass
from typing import Any

from cookbook.config.sections import ModelSection
from cookbook.system.files import refuse


@dataclass(frozen=True)
class ServedCode:
    """Abilities of a model's code; the defaults hold for one that transformers does not list as causal."""

    recomputes: bool = True
    """True if its layers can be recomputed in the backward."""
    marks_layers: bool = True
    """It has layers of the kind that `efficiency.compile_layers` finds in a model."""
    holds_scores: bool = False
    """The memory of its attention grows with the square of a sample: transformers lets no kernel compute it."""


def served_code(config: Any) -> ServedCode:
    """The abilities of the code that is loaded for a configuration of transformers."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    served = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if served is None:
        return ServedCode()
    from transformers.modeling_layers import GradientCheckpointingLayer

    values = vars(sys.modules[served.__module__]).values()
    return ServedCode(
        recomputes=getattr(served, "supports_gradient_checkpointing", True),
        marks_layers=any(isinstance(value, type) and issubclass(value, GradientCheckpointingLayer) for value in values),
        holds_scores=not getattr(served, "_supports_sdpa", True),
    )


def check_layers(settings: ModelSection, config: Any, code: ServedCode) -> None:
    """Raise RecipeError where layers are to be recomputed or compiled, and transformers' code of this model cannot."""
    mistakes = []
    if settings.recompute and not code.recomputes:
        value = str(settings.gradient_checkpointing).lower()
        why = f"transformers' code of {config.model_type} cannot recompute its layers"
        mistakes.append(f"model.gradient_checkpointing is {value}: {why}; write false")
    if settings.compile and not code.marks_layers:
        why = f"transformers' code of {config.model_type} marks no layers, which are what is compiled"
        mistakes.append(f"model.compile is true: {why}; write false")
    if settings.compile and settings.recompute and getattr(config, "altup_coef_clip", None) is not None:
        # modeling_gemma3n.py, Gemma3nTextAltUp.predict. In the backward torch 2.13 finds the weight changed that its
        # forward had kept.
        why = f"transformers' code of {config.model_type} clips a weight in each layer, which torch refuses in compiled"
        mistakes.append(f"model.compile is true: {why} layers that are recomputed; write gradient_checkpointing: false")
    refuse(mistakes)
