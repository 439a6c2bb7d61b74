"""Layers that an adapter changes: from a recipe's targets to the names that peft takes, and what cannot be adapted."""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch
from torch.nn import Embedding
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from cookbook.config.sections import ALL_LINEAR, AdapterSection
from cookbook.facts.model_types import look_up
from cookbook.facts.score_head import HEAD, head_of, is_scored
from cookbook.system.files import RecipeError
from cookbook.training.adapters.base_model import NO_ROWS, Base
from cookbook.training.adapters.four_bit_experts import is_in_4_bits

if TYPE_CHECKING:
    from peft import LoraConfig

LINEAR = (torch.nn.Linear, Conv1D)
"""Classes that peft takes for linear layers: GPT-2's have their weight the other way round."""


def lora_config(
    settings: AdapterSection,
    model: PreTrainedModel,
    base: Base | None = None,
    *,
    new_rows: range = NO_ROWS,
    for_file: bool = False,
) -> "LoraConfig":
    """peft's configuration of a recipe's adapter.

    Args:
        model: without an adapter.
        new_rows: rows of embedding and head that are trained too.
        for_file: as peft itself must read it; see `_renamed_layers`.
    """
    from peft import LoraConfig

    modules, parameters = _modules_and_parameters(model, settings.targets)
    if for_file and (renamed := _renamed_layers(model, modules)):
        modules = [name for name in modules if name not in renamed]
        parameters = [*parameters, *(f"{name}.weight" for name in renamed)]
    rows = None
    if new_rows:
        from cookbook.training.adapters.token_rows import trained_rows

        rows = trained_rows(model, settings, new_rows) or None
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a float works too
        lora_dropout=settings.dropout,
        target_modules=modules,
        target_parameters=parameters or None,
        modules_to_save=whole_modules(settings, model.config) or None,
        trainable_token_indices=rows,
        use_dora=settings.name == "dora",
        use_rslora=settings.rslora,
        task_type="SEQ_CLS" if is_scored(model.config) else "CAUSAL_LM",
        base_model_name_or_path=base.name_or_path if base else None,
        revision=base.revision if base else None,
    )


def whole_modules(settings: AdapterSection, config: PreTrainedConfig) -> list[str]:
    """Modules that are trained whole, with a head for sequences, which is new (as peft 0.21.2 has it, peft_model.py,
    PeftModelForSequenceClassification)."""
    return list(dict.fromkeys([*settings.modules_to_save, *([HEAD] if is_scored(config) else [])]))


def _modules_and_parameters(model: PreTrainedModel, targets: list[str]) -> tuple[str | list[str], list[str]]:
    """Values of peft's `target_modules` and `target_parameters`."""
    stacked = stacked_experts(model)
    outside = look_up(model.config.model_type).reads_weights
    if targets == [ALL_LINEAR] and not stacked and not outside and not _other_products(model):
        return ALL_LINEAR, []
    linear = _linear_names(model)
    last = [name for name in last_parts(linear) if name not in outside]
    modules = [
        name
        for target in targets
        for name in (last if target == ALL_LINEAR else [target] if _matching(linear, target) else [])
    ]
    parameters = [name for target in targets for name in _matching(stacked, target)]
    # With the name of the module: a linear layer of a shared expert may have the parameter's.
    return list(dict.fromkeys(modules)), last_parts(parameters, 2)


def _matching(names: Iterable[str], target: str) -> list[str]:
    """The names that a target means, as peft matches them: all of a name, or its last parts."""
    return [name for name in names if f".{name}".endswith(f".{target}")]


def last_parts(names: Iterable[str], count: int = 1) -> list[str]:
    return list(dict.fromkeys(".".join(name.split(".")[-count:]) for name in names))


def _of_experts(stacked: Iterable[str]) -> str:
    names = ", ".join(last_parts(stacked, 2))
    return f", and the experts' {names}" if names else ""


def _linear_names(model: PreTrainedModel) -> list[str]:
    """Names of linear layers, without the head, and without layers whose last part another kind of module has too: peft
    would adapt that module as well."""
    head = head_of(model)
    named = [(name, module) for name, module in model.named_modules() if module is not head]
    others = {name.rpartition(".")[2] for name, module in named if not _is_linear(module)}
    return [name for name, module in named if _is_linear(module) and name.rpartition(".")[2] not in others]


def _is_linear(module: torch.nn.Module) -> bool:
    """True if a module multiplies by its weight and does no more. Routers and layers in groups of transformers' models
    may be linear layers by their class alone.
    """
    kind = type(module)
    is_own = kind.__module__.startswith("transformers.models.") and kind.forward is not torch.nn.Linear.forward
    return isinstance(module, LINEAR) and (not is_own or kind.__name__ == "FalconLinear")


def _other_products(model: PreTrainedModel) -> list[str]:
    """Names of subclasses of linear layers that compute more than a product."""
    others = (module for module in model.modules() if isinstance(module, LINEAR) and not _is_linear(module))
    return sorted({type(module).__name__ for module in others})


def stacked_experts(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Parameters that stack a layer's experts along dimension 0, by name."""
    return {
        f"{name}.{key}": parameter
        for name, module in model.named_modules()
        if "expert" in type(module).__name__.lower()
        for key, parameter in module.named_parameters(recurse=False)
        if len(whole_shape(parameter)) == 3
    }


def whole_shape(parameter: torch.nn.Parameter) -> torch.Size:
    """The shape of a parameter, also where it is a placeholder (ZeRO-3) or in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape) if state is None else state.shape
    return shape


def experts_in_4_bits(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The parameters of stacked experts that `qlora` stores in 4 bits, of a model as transformers creates it."""
    return [
        parameter
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if is_in_4_bits(module, parameter)
    ]


def _renamed_layers(model: PreTrainedModel, names: str | Collection[str] | None) -> list[str]:
    """Linear layers whose names peft 0.21.2 takes for those of experts in transformers 4, where the model has such
    experts, and adapts these instead (utils/transformers_weight_conversion.py, _convert_peft_config_moe): as
    parameters it leaves their names as they are.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_renamed(name: str) -> bool:
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # it wants all layers that were joined in one tensor
            return True
        return name not in (config.target_modules or ())

    return [] if isinstance(names, str) else sorted(filter(is_renamed, names or ()))


def examine(model: PreTrainedModel, settings: AdapterSection) -> list[str]:
    """Check the adapter's names against a model that has no adapter yet.

    Returns:
        notes for the user: what stays frozen although a reader of the recipe may not expect it.

    Raises:
        RecipeError: every name that matches nothing, or what cannot be adapted.
    """
    leaves: dict[str, list[torch.nn.Module]] = {}
    for name, module in model.named_modules():
        leaves.setdefault(name.rpartition(".")[2], []).append(module)
    head = head_of(model)
    linear, stacked = _linear_names(model), stacked_experts(model)
    # peft takes every module whose name ends so; a name that several layers share would train all of them.
    trainable = [
        leaf for leaf, (first, *more) in leaves.items() if not more and (first is head or type(first) is Embedding)
    ]
    mistakes = []
    if settings.is_quantized and (why := _no_4_bits(model)):
        mistakes.append(
            f"adapter.name: {settings.name} stores linear layers in 4 bits, but {why}; write adapter.name: lora"
        )
    # peft is content when one of several targets matches: a misspelt one would be left out in silence.
    for target in settings.targets:
        if leaves.get(target) == [head]:
            mistakes.append(
                f"adapter.targets has {target!r}, the output head, which computes the loss as a whole; to train it,"
                f" write adapter.modules_to_save: [{target}]"
            )
        elif target != ALL_LINEAR and (passed := _skipped_layers(model, target)):
            mistakes.append(
                f"adapter.targets has {target!r}, but the code of {model.config.model_type} reads"
                f" {', '.join(passed)} by itself, past an adapter; leave it out"
            )
        elif target != ALL_LINEAR and not _matching([*linear, *stacked], target):
            mistakes.append(
                f"adapter.targets has {target!r}, which is no linear layer of {type(model).__name__}; it has"
                f" {', '.join(last_parts(linear))}{_of_experts(stacked)}"
            )
    for name in settings.modules_to_save:
        if name not in trainable:
            mistakes.append(
                f"adapter.modules_to_save has {name!r}; of {type(model).__name__} these can be trained whole:"
                f" {', '.join(trainable)}"
            )
        elif getattr(model.config, "tie_word_embeddings", False):
            mistakes.append(
                f"adapter.modules_to_save has {name!r}, but embedding and head of this model are one matrix: trained"
                " apart they would no longer be. Remove it, or train all weights without an adapter"
            )
    if mistakes:
        raise RecipeError(mistakes)
    return _note_on_experts(model, settings, stacked)


def _skipped_layers(model: PreTrainedModel, target: str) -> list[str]:
    outside = look_up(model.config.model_type).reads_weights
    return [name for name in last_parts(_matching(_linear_names(model), target)) if name in outside]


def _no_4_bits(model: PreTrainedModel) -> str | None:
    facts = look_up(model.config.model_type)
    if facts.reads_weights and not facts.calls_in_4_bits:
        return f"the code of {model.config.model_type} reads {', '.join(facts.reads_weights)} by itself, as 16 bits"
    others = ", ".join(_other_products(model))
    return f"{others} of this model would no longer compute its own product" if others else None


def _note_on_experts(
    model: PreTrainedModel, settings: AdapterSection, stacked: dict[str, torch.nn.Parameter]
) -> list[str]:
    in_4_bits = {id(parameter) for parameter in experts_in_4_bits(model)} if settings.is_quantized else set()
    left = {name: parameter for name, parameter in stacked.items() if id(parameter) not in in_4_bits}
    notes = [_note_on_4_bits(left)] if settings.is_quantized and left else []
    if ALL_LINEAR in settings.targets and (others := _other_products(model)):
        notes.append(f"adapter.targets: {ALL_LINEAR} leaves out {', '.join(others)}, which compute more than a product")
    if ALL_LINEAR in settings.targets and (outside := look_up(model.config.model_type).reads_weights):
        what = f"{', '.join(outside)}, whose weights the model's code reads by itself"
        notes.append(f"adapter.targets: {ALL_LINEAR} leaves out {what}")
    frozen = {
        name: parameter
        for name, parameter in stacked.items()
        if not any(_matching([name], target) for target in settings.targets)
    }
    if not frozen:
        return notes
    num_frozen = sum(parameter.numel() for parameter in frozen.values())
    share = num_frozen / sum(parameter.numel() for parameter in model.parameters())
    what = f"the experts' {', '.join(last_parts(frozen, 2))}, {share:.0%} of the weights, stay frozen"
    served = last_parts((name for name in frozen if _is_multiplied(model, name)), 2)
    if not served:
        return [*notes, f"adapter.targets: {what}: no implementation of experts that is served multiplies them"]
    some = "them" if len(served) == len(last_parts(frozen, 2)) else ", ".join(served)
    way = f"to adapt {some} write adapter.targets: [{', '.join([*settings.targets, *served])}]"
    return [*notes, f"adapter.targets: {what}; {way}"]


def _is_multiplied(model: torch.nn.Module, name: str) -> bool:
    """True if transformers' own implementations of experts multiply a parameter of stacked experts."""
    return hasattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed")


def _note_on_4_bits(stacked: dict[str, torch.nn.Parameter]) -> str:
    size = 2 * sum(parameter.numel() for parameter in stacked.values()) / 2**30
    names = ", ".join(last_parts(stacked, 2))
    return (
        f"adapter.name: qlora leaves the experts' {names} in 16 bits, {size:,.1f} GiB: no kernel here serves them in 4"
    )


def check_parameters(model: PreTrainedModel, settings: AdapterSection, config: "LoraConfig") -> None:
    """Check the layers that peft adapts as parameters, in training or when it reads the file.

    Raises:
        RecipeError: every setting that peft does not support for them.
    """
    experts = stacked_experts(model)
    targets = config.target_parameters or ()
    targeted = list(dict.fromkeys(name for target in targets for name in _matching(experts, target)))
    what = last_parts(targeted, 2) or _renamed_layers(model, config.target_modules)
    mistakes = []
    if others := last_parts((name for name in targeted if not _is_multiplied(model, name)), 2):
        mistakes.append(
            f"adapter.targets: {', '.join(others)} of {type(model).__name__} are not multiplied by transformers' own"
            " implementations of experts, the only ones that are served; write all-linear"
        )
    for is_wrong, key, way in (
        (settings.dropout > 0, f"adapter.dropout {settings.dropout:g}", "adapter.dropout: 0"),
        (settings.name == "dora", "adapter.name dora", "adapter.name: lora"),
    ):
        if what and is_wrong:
            mistakes.append(
                f"{key}: peft adapts {', '.join(what)} of {type(model).__name__} as parameters, which it serves without"
                f" dropout and DoRA only; write {way}, or adapter.targets without these"
            )
    if mistakes:
        raise RecipeError(mistakes)
