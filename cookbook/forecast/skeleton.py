"""The skeleton of a model: its real code and the recipe's adapter on the meta device, without reading weights."""

import re
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from cookbook.config.optim.groups import kinds
from cookbook.config.recipe import Recipe
from cookbook.facts.pipeline_stages import head_in_layers
from cookbook.facts.score_head import backbone_of, empty_model, head_of
from cookbook.facts.served_code import served_code
from cookbook.forecast.costs.inputs import Part, Skeleton, Weight
from cookbook.system.files import RecipeError, first_line
from cookbook.training.adapters.adapted_layers import examine, experts_in_4_bits
from cookbook.training.adapters.insertion import inject


def skeleton(config: PreTrainedConfig, recipe: Recipe) -> Skeleton:
    """The skeleton of a recipe's model; about a second for 70 billion parameters.

    Raises:
        RecipeError: as `adapted_layers.examine` and `insertion.inject`; a model that cannot be built, or has no named
            layers.
    """
    with torch.device("meta"):
        model = _on_meta(config)
    first, last = model.get_input_embeddings(), head_of(model)
    quantized = set()
    if recipe.adapter is not None and recipe.adapter.is_quantized:  # all linear layers but the head, in 4 bits
        linear = (module for module in model.modules() if type(module) is torch.nn.Linear and module is not last)
        quantized = {id(weight) for weight in (*(module.weight for module in linear), *experts_in_4_bits(model))}
    buffers = tuple(buffer.numel() for buffer in model.buffers())
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    cuts = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), how) for name, how in plan.items()]
    head = head_in_layers(model)
    notes: list[str] = []
    if recipe.adapter is not None:
        notes = examine(model, recipe.adapter)
        with torch.device("meta"):
            inject(model, recipe.adapter, new_rows(config, recipe))
    first, last = model.get_input_embeddings(), head_of(model)
    units: Any = model._no_split_modules or []
    layers: list[str] = []
    for name, module in model.named_modules():  # a layer may hold another, as a hybrid's of Zamba2 does
        if type(module).__name__ in units and not name.startswith(tuple(layers)):
            layers.append(f"{name}.")
    if not layers:
        why = "transformers does not name its layers, by which memory is forecast and weights are sharded"
        raise RecipeError(f"model {config.model_type}: {why}")
    parts = _parts(model, first, last)
    weights, kind_of = [], kinds(model)
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            shape = " x ".join(map(str, parameter.shape))
            raise RecipeError(f"model {config.model_type}: by its configuration {name} is {shape}; correct its sizes")
        owner = name.rpartition(".")[0]
        layer = next((number for number, prefix in enumerate(layers) if name.startswith(prefix)), None)
        weights.append(
            Weight(
                name=name,
                shape=tuple(parameter.shape),
                layer=layer,
                part="layer" if layer is not None else parts.get(id(parameter), "rest"),
                is_trained=parameter.requires_grad,
                is_quantized=id(parameter) in quantized,
                shard_dim=_sharded_dim(owner, cuts, parameter.ndim),
                **kind_of[parameter]._asdict(),
            )
        )
    is_tied = last is not None and first is not None and last.weight is first.weight
    return Skeleton(
        weights=tuple(weights),
        num_layers=len(layers),
        is_tied=is_tied,
        buffers=buffers,
        head_layers=head,
        notes=(*notes, *_of_bits(weights)),
        code=served_code(config),
    )


def _of_bits(weights: list[Weight]) -> list[str]:
    """A note where a mixture's experts are stored in 4 bits; `examine` names those that are not."""
    frozen = [weight for weight in weights if not weight.is_trained]
    experts = [weight for weight in frozen if ".experts." in weight.name]
    if not experts or not all(weight.is_quantized for weight in experts):
        return []
    share = sum(weight.num_elements for weight in frozen if weight.is_quantized) / sum(
        weight.num_elements for weight in frozen
    )
    return [f"adapter.name: qlora: {share:.0%} of the weights are in 4 bits, the experts' among them"]


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    try:
        return empty_model(config)
    except Exception as error:  # a configuration with missing or unfit values may fail anywhere in a model's code
        reason = f"{type(error).__name__}: {first_line(error)}"
        why = f"transformers cannot build a model from its configuration ({reason})"
        raise RecipeError(f"model {config.model_type}: {why}") from error


def new_rows(config: PreTrainedConfig, recipe: Recipe) -> range:
    """As many rows as an adapter trains for new tokens; which ones, the tokenizer would tell."""
    return range(config.vocab_size - len(recipe.model.new_tokens or ()), config.vocab_size)


_WRAPPED = re.compile(r"\.(base_layer|original_module|token_adapter\.base_layer)$")
"""Names that peft gives to a module inside of its wrappers."""


def _parts(model: PreTrainedModel, first: Any, last: Any) -> dict[int, Part]:
    """The part of each parameter outside the layers, by id; missing ones are `rest`."""
    part_of: dict[int, Part] = {}
    # The final norm is the last norm among the direct children (accelerate 1.15, fsdp_utils.py, _find_final_norm).
    norms = [module for module in backbone_of(model).children() if "Norm" in type(module).__name__]
    of_parts: list[tuple[Part, Any]] = [("norm", norms[-1] if norms else None), ("head", last), ("embedding", first)]
    for part, module in of_parts:
        if module is not None:
            part_of |= {id(parameter): part for parameter in module.parameters()}
    return part_of


def _sharded_dim(module: str, cuts: list[tuple[re.Pattern[str], str]], num_dimensions: int) -> int | None:
    """The dimension along which a weight is sharded. Of an adapter's matrices, only the one on the sharded side is.

    Args:
        cuts: the model's tensor-parallel plan: patterns of module names, and how they are sharded.
    """
    base, _, rest = module.partition(".lora_")
    base = _WRAPPED.sub("", base)
    how = next((how for pattern, how in cuts if pattern.fullmatch(base)), "")
    if (how.startswith("colwise") and rest[:1] in ("", "B")) or how == "embedding_rowwise":
        return 0
    if how.startswith("rowwise") and rest[:1] in ("", "A") and num_dimensions > 1:
        return 1
    return None
