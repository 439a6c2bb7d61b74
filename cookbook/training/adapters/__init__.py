"""Adapters through peft: a few trained float32 weights beside frozen ones, saved as a peft folder.

peft is imported inside functions: with bitsandbytes it takes two seconds, which a run without an adapter saves.
"""

import contextlib
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Embedding
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from cookbook.config.sections import ALL_LINEAR, AdapterSection, ModelSection
from cookbook.facts.language_part import has_tower, language_config
from cookbook.facts.model_files import values_of
from cookbook.facts.score_head import HEAD, ScoreHead, backbone_name, empty_model, head_of, is_scored
from cookbook.system.digests import sha256_of
from cookbook.system.files import RecipeError, first_line
from cookbook.training.adapters.four_bit_experts import is_in_4_bits, pack
from cookbook.training.adapters.peft_folder import (
    ADAPTER_NAME,
    ADAPTER_WEIGHTS,
    in_language_names,
    name_in_file,
    shapes_in,
)

if TYPE_CHECKING:
    from peft import LoraConfig

LINEAR = (torch.nn.Linear, Conv1D)
"""What peft takes for a linear layer: GPT-2's have their weight the other way round."""
READ_APART = {
    "bamba": ("out_proj",),
    "falcon_h1": ("out_proj",),
    "falcon_mamba": ("x_proj", "dt_proj", "out_proj"),
    "gemma3n_text": ("correction_coefs", "prediction_coefs"),
    "granitemoehybrid": ("out_proj",),
    "jamba": ("dt_proj",),
    "longcat_flash": ("classifier",),
    "mamba": ("x_proj", "dt_proj", "out_proj"),
    "mamba2": ("out_proj",),
    "nemotron_h": ("out_proj",),
    "rwkv": ("output", "value"),
    "zamba2": ("out_proj",),
}
"""Linear layers whose weights a model's code reads or changes by itself, past an adapter: for a kernel on a GPU, as a
router, to clamp or to scale them (transformers 5.23, modeling_*.py); peft 0.21.2 refuses out_proj of some of these
types (tuners_utils.py, _check_lora_target_modules_mamba)."""
CALLED_IN_4_BITS = ("jamba",)
"""Those of them whose code calls the layer where the model is quantized."""
BASE_RECORD = "base_model.json"
NO_ROWS = range(0)


@dataclass(frozen=True)
class Base:
    """The model that a run has trained, or that an adapter belongs to."""

    name_or_path: str
    revision: str | None
    sha256: str
    """SHA-256 of its weights; see `models.weights_digest`."""
    is_new: bool = False
    """Created for the run."""
    new_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that the run added, with their ids, which are consecutive."""
    head: ScoreHead | None = None
    """The head for sequences that the run trained in the place of the model's own."""

    @property
    def new_rows(self) -> range:
        """Their rows of embedding and head."""
        ids = self.new_tokens.values()
        return range(min(ids), max(ids) + 1) if ids else NO_ROWS

    @classmethod
    def read(cls, folder: Path) -> "Base":
        """The record in a folder.

        Raises:
            FileNotFoundError: there is none.
            RecipeError: it is damaged.
        """
        path = folder / BASE_RECORD
        path.lstat()
        try:
            found = cls(**values_of(path))
            found = found if found.head is None else replace(found, head=ScoreHead(**vars(found)["head"]))
        except TypeError as error:
            raise RecipeError(f"{path}: is no record of a base model ({first_line(error)}); put it back") from None
        if not all(isinstance(number, int) for number in found.new_tokens.values()):
            raise RecipeError(f"{path}: new_tokens has ids that are no numbers; put it back")
        return found

    def write(self, folder: Path) -> None:
        (folder / BASE_RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


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
        for_file: as peft itself must read it; see `_renamed`.
    """
    from peft import LoraConfig

    modules, parameters = _modules_and_parameters(model, settings.targets)
    if for_file and (renamed := _renamed(model, modules)):
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
    """Modules that are trained whole: a head for sequences too, which is new (as peft 0.21.2 has it, peft_model.py,
    PeftModelForSequenceClassification)."""
    return list(dict.fromkeys([*settings.modules_to_save, *([HEAD] if is_scored(config) else [])]))


def _modules_and_parameters(model: PreTrainedModel, targets: list[str]) -> tuple[str | list[str], list[str]]:
    """What peft calls `target_modules` and `target_parameters`."""
    stacked = stacked_experts(model)
    outside = READ_APART.get(model.config.model_type, ())
    if targets == [ALL_LINEAR] and not stacked and not outside and not _other_products(model):
        return ALL_LINEAR, []
    linear = _linear_names(model)
    last = [name for name in _last_parts(linear) if name not in outside]
    modules = [
        name
        for target in targets
        for name in (last if target == ALL_LINEAR else [target] if _matching(linear, target) else [])
    ]
    found = [name for target in targets for name in _matching(stacked, target)]
    # With the name of the module: a linear layer of a shared expert may have the parameter's.
    return list(dict.fromkeys(modules)), _last_parts(found, 2)


def _matching(names: Iterable[str], target: str) -> list[str]:
    """The names that a target means, as peft matches them: all of a name, or its last parts."""
    return [name for name in names if f".{name}".endswith(f".{target}")]


def _last_parts(names: Iterable[str], count: int = 1) -> list[str]:
    return list(dict.fromkeys(".".join(name.split(".")[-count:]) for name in names))


def _of_experts(stacked: Iterable[str]) -> str:
    names = ", ".join(_last_parts(stacked, 2))
    return f", and the experts' {names}" if names else ""


def _linear_names(model: PreTrainedModel) -> list[str]:
    """Linear layers but the head; not those that share the last part of their name with something else."""
    head = head_of(model)
    named = [(name, module) for name, module in model.named_modules() if module is not head]
    others = {name.rpartition(".")[2] for name, module in named if not _is_linear(module)}
    return [name for name, module in named if _is_linear(module) and name.rpartition(".")[2] not in others]


def _is_linear(module: torch.nn.Module) -> bool:
    """Whether it multiplies by its weight and no more. Routers and layers in groups of transformers' models may be
    linear layers by their class alone.
    """
    kind = type(module)
    is_own = kind.__module__.startswith("transformers.models.") and kind.forward is not torch.nn.Linear.forward
    return isinstance(module, LINEAR) and (not is_own or kind.__name__ == "FalconLinear")


def _other_products(model: PreTrainedModel) -> list[str]:
    """Classes of linear layers that compute something else."""
    found = (module for module in model.modules() if isinstance(module, LINEAR) and not _is_linear(module))
    return sorted({type(module).__name__ for module in found})


def stacked_experts(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Parameters that stack a layer's experts along dimension 0, by name."""
    return {
        f"{name}.{key}": parameter
        for name, module in model.named_modules()
        if "expert" in type(module).__name__.lower()
        for key, parameter in module.named_parameters(recurse=False)
        if len(_whole_shape(parameter)) == 3
    }


def _whole_shape(parameter: torch.nn.Parameter) -> torch.Size:
    """The shape of a parameter, also where it is a placeholder (ZeRO-3) or in 4 bits."""
    packed = getattr(parameter, "quant_state", None)
    found: torch.Size = getattr(parameter, "ds_shape", parameter.shape) if packed is None else packed.shape
    return found


def experts_in_4_bits(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The parameters of a model, as transformers creates it, that `is_in_4_bits` means."""
    found = ((one, parameter) for one in model.modules() for parameter in one.parameters(recurse=False))
    return [parameter for module, parameter in found if is_in_4_bits(module, parameter)]


def _renamed(model: PreTrainedModel, names: str | Collection[str] | None) -> list[str]:
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


def check_names(config: PreTrainedConfig, settings: AdapterSection) -> list[str]:
    """Check an adapter against the structure of a model, without data.

    Returns:
        notes for the user, see `examine`.

    Raises:
        RecipeError: as `examine` and `inject`, or an `adapter.path` that does not fit.
    """
    model = _empty_model(config)
    notes = examine(model, settings)
    with torch.device("meta"):
        inject(model, settings)
    if settings.path is not None:
        from cookbook.training.adapters import continued

        continued.check(model, settings)
    return notes


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
    whole = [
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
        elif target != ALL_LINEAR and (passed := _passed_by(model, target)):
            mistakes.append(
                f"adapter.targets has {target!r}, but the code of {model.config.model_type} reads"
                f" {', '.join(passed)} by itself, past an adapter; leave it out"
            )
        elif target != ALL_LINEAR and not _matching([*linear, *stacked], target):
            mistakes.append(
                f"adapter.targets has {target!r}, which is no linear layer of {type(model).__name__}; it has"
                f" {', '.join(_last_parts(linear))}{_of_experts(stacked)}"
            )
    for name in settings.modules_to_save:
        if name not in whole:
            mistakes.append(
                f"adapter.modules_to_save has {name!r}; of {type(model).__name__} these can be trained whole:"
                f" {', '.join(whole)}"
            )
        elif getattr(model.config, "tie_word_embeddings", False):
            mistakes.append(
                f"adapter.modules_to_save has {name!r}, but embedding and head of this model are one matrix: trained"
                " apart they would no longer be. Remove it, or train all weights without an adapter"
            )
    if mistakes:
        raise RecipeError(mistakes)
    return _note_on_experts(model, settings, stacked)


def _passed_by(model: PreTrainedModel, target: str) -> list[str]:
    outside = READ_APART.get(model.config.model_type, ())
    return [name for name in _last_parts(_matching(_linear_names(model), target)) if name in outside]


def _no_4_bits(model: PreTrainedModel) -> str | None:
    kind = model.config.model_type
    if kind not in CALLED_IN_4_BITS and (outside := READ_APART.get(kind)):
        return f"the code of {kind} reads {', '.join(outside)} by itself, as 16 bits"
    others = ", ".join(_other_products(model))
    return f"{others} of this model would no longer compute its own product" if others else None


def _note_on_experts(
    model: PreTrainedModel, settings: AdapterSection, stacked: dict[str, torch.nn.Parameter]
) -> list[str]:
    packed = {id(one) for one in experts_in_4_bits(model)} if settings.is_quantized else set()
    left = {name: one for name, one in stacked.items() if id(one) not in packed}
    notes = [_note_on_4_bits(left)] if settings.is_quantized and left else []
    if ALL_LINEAR in settings.targets and (others := _other_products(model)):
        notes.append(f"adapter.targets: {ALL_LINEAR} leaves out {', '.join(others)}, which compute more than a product")
    if ALL_LINEAR in settings.targets and (outside := READ_APART.get(model.config.model_type)):
        what = f"{', '.join(outside)}, whose weights the model's code reads by itself"
        notes.append(f"adapter.targets: {ALL_LINEAR} leaves out {what}")
    frozen = {name: one for name, one in stacked.items() if not any(_matching([name], t) for t in settings.targets)}
    if not frozen:
        return notes
    share = sum(one.numel() for one in frozen.values()) / sum(one.numel() for one in model.parameters())
    what = f"the experts' {', '.join(_last_parts(frozen, 2))}, {share:.0%} of the weights, stay frozen"
    served = _last_parts((name for name in frozen if _is_multiplied(model, name)), 2)
    if not served:
        return [*notes, f"adapter.targets: {what}: no implementation of experts that is served multiplies them"]
    some = "them" if len(served) == len(_last_parts(frozen, 2)) else ", ".join(served)
    way = f"to adapt {some} write adapter.targets: [{', '.join([*settings.targets, *served])}]"
    return [*notes, f"adapter.targets: {what}; {way}"]


def _is_multiplied(model: torch.nn.Module, name: str) -> bool:
    """Whether transformers' own implementations of experts multiply a parameter of stacked experts."""
    return hasattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed")


def _note_on_4_bits(stacked: dict[str, torch.nn.Parameter]) -> str:
    size = 2 * sum(one.numel() for one in stacked.values()) / 2**30
    names = ", ".join(_last_parts(stacked, 2))
    return (
        f"adapter.name: qlora leaves the experts' {names} in 16 bits, {size:,.1f} GiB: no kernel here serves them in 4"
    )


def inject(model: PreTrainedModel, settings: AdapterSection, new_rows: range = NO_ROWS) -> None:
    """Freeze a model and insert peft's layers, in place.

    Args:
        new_rows: rows of embedding and head that are trained too; here they are zeros.

    Raises:
        RecipeError: peft does not support the combination, for example dropout for experts.
    """
    from peft import inject_adapter_in_model

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    config = lora_config(settings, model, new_rows=new_rows)
    _check_parameters(model, settings, config)
    try:
        with _sizes_of_modules(), _names_as_written(), _rows_without_values(config):
            inject_adapter_in_model(config, model, adapter_name=ADAPTER_NAME)
    except ValueError as error:
        ways = {"lora_dropout": "adapter.dropout: 0", "use_dora": "adapter.name: lora"}
        way = next((f"; write {way}" for word, way in ways.items() if word in str(error)), "")
        name = f"adapter.name {settings.name} with dropout {settings.dropout:g}"
        raise RecipeError(f"{name}: peft cannot put it into {type(model).__name__}: {error}{way}") from None
    _multiply_experts(model, config)
    _compute_rows_apart(model, config)


def _check_parameters(model: PreTrainedModel, settings: AdapterSection, config: "LoraConfig") -> None:
    """Check what peft adapts as parameters, in training or when it reads the file.

    Raises:
        RecipeError: everything that it does not serve for these.
    """
    experts = stacked_experts(model)
    targeted = list(dict.fromkeys(name for one in config.target_parameters or () for name in _matching(experts, one)))
    what = _last_parts(targeted, 2) or _renamed(model, config.target_modules)
    mistakes = []
    if others := _last_parts((name for name in targeted if not _is_multiplied(model, name)), 2):
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


def _multiply_experts(model: torch.nn.Module, config: Any) -> None:
    """See `stacked`, which is imported for such models only."""
    if config.target_parameters:
        from cookbook.training.adapters.stacked import multiply_low_rank

        multiply_low_rank(model, ADAPTER_NAME)


def _rows_without_values(config: Any) -> contextlib.AbstractContextManager[None]:
    if not config.trainable_token_indices:
        return contextlib.nullcontext()
    from cookbook.training.adapters.token_rows import without_values

    return without_values()


def _compute_rows_apart(model: PreTrainedModel, config: Any) -> None:
    if config.trainable_token_indices:
        from cookbook.training.adapters.token_rows import compute_apart

        compute_apart(model)


@contextlib.contextmanager
def _names_as_written() -> Iterator[None]:
    """Have peft adapt the layers that are named; see `_renamed`."""
    from peft.utils import transformers_weight_conversion as conversion

    theirs = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = theirs


@contextlib.contextmanager
def _sizes_of_modules() -> Iterator[None]:
    """Have peft size an adapter by what a linear layer computes, and shard it as tensor parallel did the layer.

    peft 0.21.2 takes the size of the weight's local shard (tuners/tuners_utils.py, _get_in_out_features), which is what
    a process computes with under tensor parallel alone, and less than that where FSDP2 shards it further.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    theirs, parameter = LoraLayer._get_in_out_features, ParamWrapper.get_param

    def sizes(self: LoraLayer, module: torch.nn.Module) -> Any:
        is_sharded = isinstance(module, torch.nn.Linear) and isinstance(module.weight, DTensor)
        return (module.in_features, module.out_features) if is_sharded else theirs(self, module)

    def in_whole_shape(self: ParamWrapper) -> Any:
        found = parameter(self)
        is_packed = getattr(found, "quant_state", None) is not None
        return found.data.new_empty(()).expand(_whole_shape(found)) if is_packed else found

    LoraLayer._get_in_out_features = sizes  # type: ignore[method-assign]
    ParamWrapper.get_param = in_whole_shape  # type: ignore[method-assign]
    try:
        yield
    finally:
        LoraLayer._get_in_out_features = theirs  # type: ignore[method-assign]
        ParamWrapper.get_param = parameter  # type: ignore[method-assign]


def add_adapter(
    model: PreTrainedModel,
    settings: AdapterSection,
    *,
    seed: int,
    new_rows: range = NO_ROWS,
    first: dict[str, torch.Tensor] | None = None,
) -> None:
    """Freeze a model and add trainable float32 weights to its linear layers and experts, in place.

    They are drawn from `seed` alone, so that they are equal however the model is sharded, or those in `adapter.path`.

    Args:
        new_rows: rows of embedding and head that are trained too.
        first: what these rows begin as, by the names of the matrices; default: zeros.
    """
    inject(model, settings, new_rows)
    _draw_first_weights(model, seed)
    _set_dtypes(model)
    if first:
        from cookbook.training.adapters.token_rows import fill

        fill(model, first)
    if settings.path is not None:
        from cookbook.training.adapters import continued

        continued.fill(model, Path(settings.path))


def weights_digest(settings: AdapterSection, *, cache: Path) -> str:
    """SHA-256 of what an adapter with a `path` begins with."""
    path = Path(settings.path or "") / ADAPTER_WEIGHTS
    return sha256_of([path], cache=cache)[path]


def check_base(settings: AdapterSection, digest: str) -> None:
    """Compare the base that the adapter in `path` was trained on with the model; those of other projects have no record
    of it.

    Args:
        digest: `models.weights_digest` of the model.

    Raises:
        RecipeError: another base, or a damaged record of it.
    """
    if settings.path is None:
        return
    try:
        base = Base.read(Path(settings.path))
    except FileNotFoundError:
        return
    if base.sha256 != digest:
        raise RecipeError(
            f"adapter.path is {settings.path!r}, which was trained on {base.name_or_path} with other weights than those"
            " of model.name_or_path (another SHA-256); name its base there"
        )


def base_notes(settings: AdapterSection, model: ModelSection) -> list[str]:
    """For the user: the adapter in `path` names another base than the recipe, and has no digest to tell whether it is.

    Names are compared by their last part, since a model of the Hub may lie in a folder.
    """
    if settings.path is None or (Path(settings.path) / BASE_RECORD).exists():
        return []
    saved = values_of(Path(settings.path) / "adapter_config.json")
    name, revision = saved.get("base_model_name_or_path") or "", saved.get("revision")
    here = model.name_or_path or "a new one (model.from_scratch)"
    revisions = {revision, model.revision} - {None}
    if Path(name).name == Path(here).name and len(revisions) < 2:
        return []
    its, ours = (f"{one} at {other}" if other else one for one, other in ((name, revision), (here, model.revision)))
    return [
        f"adapter.path is {settings.path!r}, an adapter of {its or 'a base without a name'} by its adapter_config.json,"
        f" and the model here is {ours}: only their shapes were compared"
    ]


def open_adapter(model: PreTrainedModel, folder: Path) -> None:
    """As `add_adapter`, with settings and weights of a peft folder."""
    from peft import PeftConfig, PeftModel

    with in_language_names(folder) as named, _sizes_of_modules():
        settings = PeftConfig.from_pretrained(str(named))
        settings.inference_mode = False
        wrapped = PeftModel(model, settings, ADAPTER_NAME)
        _set_dtypes(model)  # before weights are read, which would be rounded to the model's dtype
        wrapped.load_adapter(str(named), ADAPTER_NAME, is_trainable=True)
    _multiply_experts(model, settings)
    _compute_rows_apart(model, settings)


def _set_dtypes(model: PreTrainedModel) -> None:
    """Make trainable weights float32, and keep frozen ones in 4 bits as they are."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                # Assigning to .data would not change a DTensor's local shard.
                setattr(module, name, torch.nn.Parameter(parameter.detach().float()))
            elif parameter.requires_grad:
                parameter.data = parameter.data.float()
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # On such a CPU the first forward in eval mode would repack the weights in place for kernels without a
            # backward: training after an evaluation would lose their gradients (bitsandbytes 0.50, nn/modules.py,
            # Linear4bit.forward).
            module.support_avx512bf16_for_cpu = False


@torch.no_grad()
def _draw_first_weights(model: PreTrainedModel, seed: int) -> None:
    """Draw every A as peft does, uniform within 1 / sqrt(its inputs), but whole: peft would draw the same shard on each
    rank of a tensor-parallel group. Each by its layer's name, since a stage of a pipeline has only some of the layers.
    B is zero, so that the adapter does not change the model yet.
    """
    from peft.tuners.lora import LoraLayer

    for layer_name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        # From one stream over all layers each stage of a pipeline would draw others, and only the curve would show it.
        generator = torch.Generator().manual_seed(seed + zlib.crc32(layer_name.encode()))
        base: Any = layer.get_base_layer()
        sized: Any = base if isinstance(base, torch.nn.Linear) else layer  # GPT-2 has Conv1D
        num_inputs: int = sized.in_features
        matrices: list[Any] = list(layer.lora_A.values())
        for a in matrices:
            # For a matrix sharded along its inputs, peft 0.21.2 records the size of a shard, and later relies on it.
            a.in_features = num_inputs
            first = torch.empty(a.out_features, num_inputs)
            first.uniform_(-(num_inputs**-0.5), num_inputs**-0.5, generator=generator)
            old = a.weight
            if isinstance(old, DTensor):
                first = distribute_tensor(first, old.device_mesh, old.placements, src_data_rank=None)
            a.weight = torch.nn.Parameter(first.to(old.device, old.dtype))


def quantization_options(settings: AdapterSection | None, mixed_precision: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` for frozen weights in 4 bits: NF4 with double quantization (Dettmers et al. 2023,
    arXiv 2305.14314); empty for other adapters.
    """
    if settings is None or not settings.is_quantized:
        return {}
    from transformers import BitsAndBytesConfig

    compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision, torch.float32)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        # FSDP2 does not shard weights stored as bytes (accelerate/utils/fsdp_utils.py:797).
        bnb_4bit_quant_storage=compute,
    )
    return {"quantization_config": config}


def packing(options: dict[str, Any]) -> Callable[[torch.nn.Module, str, torch.nn.Parameter], torch.nn.Parameter]:
    """What becomes of each weight that is read with `quantization_options`, before an engine takes its part."""
    return partial(pack, options["quantization_config"])


def write_adapter(
    weights: dict[str, torch.Tensor],
    folder: Path,
    *,
    config: PreTrainedConfig,
    settings: AdapterSection,
    base: Base,
    whole: PreTrainedConfig | None = None,
) -> None:
    """Write a peft folder: `adapter_model.safetensors`, `adapter_config.json`, and a record of the base model.

    Args:
        weights: the whole trained parameters by their names in the model.
        whole: of the model whose language part was trained; the adapter is then one of the whole.
    """
    from peft.utils import get_peft_model_state_dict

    # A model without data, since peft derives the names in the file from a model.
    empty = _empty_model(config)
    peft_config = lora_config(settings, empty, base, new_rows=base.new_rows, for_file=True)
    inject(empty, settings, base.new_rows)
    named = get_peft_model_state_dict(empty, state_dict=weights, adapter_name=ADAPTER_NAME, save_embedding_layers=False)
    if len(named) != len(weights):
        raise RuntimeError(f"{len(weights)} tensors were trained, peft would save {len(named)}: nothing was written")
    if whole is not None:
        roots = module_roots(whole)
        named = {in_whole(name, roots): tensor for name, tensor in named.items()}
        peft_config.target_modules = _in_language_part(peft_config, weights, roots[backbone_name(empty)])
        rows: Any = peft_config.trainable_token_indices or {}
        peft_config.trainable_token_indices = {in_whole(name, roots): of for name, of in rows.items()} or None
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in named.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    peft_config.inference_mode = True
    peft_config.save_pretrained(str(folder))
    # With its digest: peft records name and revision, which can come to mean other weights before a merge.
    base.write(folder)


def module_roots(whole: PreTrainedConfig) -> dict[str, str]:
    """By the first part of a name in the language part of a model with a tower, what stands for it in the whole."""
    part, model = _empty_model(language_config(whole)), _empty_model(whole)
    inside, paths = ({module: name for name, module in one.named_modules()} for one in (part, model))
    roots = {}
    for one, other in (
        (part.get_input_embeddings(), model.get_input_embeddings()),
        (part.get_output_embeddings(), model.get_output_embeddings()),
    ):
        root, _, rest = inside[one].partition(".")
        roots[root] = paths[other].removesuffix(f".{rest}") if rest else paths[other]
    return roots


def in_whole(name: str, roots: dict[str, str]) -> str:
    """A name in the language part as the whole model has it."""
    root, dot, rest = name.partition(".")
    return f"{roots.get(root, root)}{dot}{rest}"


def _in_language_part(settings: "LoraConfig", weights: Iterable[str], root: str) -> str:
    """The modules as a pattern for peft, which else would adapt layers of these names in the tower too."""
    names = settings.target_modules
    if names == ALL_LINEAR:
        names = _last_parts(name.partition(".lora_")[0] for name in weights if ".lora_" in name)
    return rf"{re.escape(root)}\.(.*\.)?({'|'.join(map(re.escape, sorted(names or ())))})"


def check_fits(folder: Path, config: PreTrainedConfig) -> None:
    """Compare the tensors of an adapter's file with what its settings make of the base model, without data.

    Raises:
        RecipeError: it is the adapter of another model.
    """
    from peft import PeftConfig

    values_of(folder / "adapter_config.json")
    try:
        settings = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # peft takes the keys as arguments of a class
        raise RecipeError(f"{folder / 'adapter_config.json'}: peft cannot read it ({first_line(error)})") from None
    shapes_in(folder, str(folder))
    if settings.is_prompt_learning:
        what = f"its peft_type is {settings.peft_type}, which adds to the prompt"
        raise RecipeError(f"{folder}: {what}; only adapters of layers are read here")
    try:
        with in_language_names(folder) as named:
            first = _first_difference(named, config)
    except RecipeError:
        raise
    except Exception as error:  # what peft, torch and safetensors raise over values that they did not expect
        first = f"{type(error).__name__}: {first_line(error)}"
    if first:
        base = settings.base_model_name_or_path
        raise RecipeError(
            f"{folder}: not an adapter of {base} ({first}); put the base there that it was trained on, or write that"
            " one's path into base_model_name_or_path of adapter_config.json"
        )


def _first_difference(folder: Path, config: PreTrainedConfig) -> str | None:
    from peft import PeftConfig, inject_adapter_in_model
    from peft.utils import get_peft_model_state_dict

    model = _empty_model(config)
    with torch.device("meta"):
        inject_adapter_in_model(PeftConfig.from_pretrained(str(folder)), model, ADAPTER_NAME)
    wanted = get_peft_model_state_dict(model, adapter_name=ADAPTER_NAME, save_embedding_layers=False)
    shapes = {f"base_model.model.{name}": [*tensor.shape] for name, tensor in wanted.items()}
    stored = shapes_in(folder, str(folder))
    # peft writes an embedding or a head that was resized beside them (utils/save_and_load.py, save_embedding_layers).
    resized = [id(one) for one in (model.get_input_embeddings(), model.get_output_embeddings())]
    beside = tuple(f"base_model.model.{name}." for name, one in model.named_modules() if id(one) in resized)
    others = {name for name in stored if not name.startswith(beside) or "lora_" in name} - shapes.keys()
    differ = sorted(others | {name for name, shape in shapes.items() if stored.get(name) != shape})
    if not differ:
        return None
    return f"{differ[0]} is {stored.get(differ[0])} in its file, and for the base {shapes.get(differ[0])}"


def open_beside(model: PreTrainedModel, folder: Path) -> None:
    """Insert the adapter of a peft folder, in float32 on the CPU, into a model without data, in place. peft itself
    would leave the adapter without data as well.

    Raises:
        RuntimeError: the file has other tensors than the adapter's settings ask for.
    """
    from peft import PeftConfig, inject_adapter_in_model

    with in_language_names(folder) as named:
        inject_adapter_in_model(PeftConfig.from_pretrained(str(named)), model, ADAPTER_NAME, low_cpu_mem_usage=True)
        saved = load_file(named / ADAPTER_WEIGHTS)
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            tensor = saved.pop(f"base_model.model.{name_in_file(f'{module_name}.{name}')}", None)
            if tensor is not None and tensor.shape == parameter.shape:
                module.register_parameter(name, torch.nn.Parameter(tensor.float(), requires_grad=False))
            elif "lora_" in module_name or ".modules_to_save." in module_name:
                raise RuntimeError(f"{folder}: {module_name}.{name} is not in its file as the settings describe it")
    if saved:
        raise RuntimeError(
            f"{folder}: its file has tensors without a place in the model: {', '.join(sorted(saved)[:5])}"
        )


def _empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](config) if has_tower(config) else empty_model(config)
