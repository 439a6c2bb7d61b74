"""Models and tokenizers: from the Hub, from a folder, or new ones.

A model has its loss inside (`loss`), and for packed rows attention of ours (`attention`); `speed` makes it faster or
smaller with equal results.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from cookbook.config.chat_templates import is_marked
from cookbook.config.sections import ModelSection, ScratchModel
from cookbook.facts.language_part import open_config, open_options
from cookbook.facts.meshes import num_experts
from cookbook.facts.model_files import read_tokenizer, why_not
from cookbook.facts.packing import packing_problem, short_window
from cookbook.facts.score_head import auto_class, head_of, is_scored
from cookbook.system import lock
from cookbook.system.digests import sha256_of
from cookbook.system.files import RecipeError, first_line, make_folder, refuse
from cookbook.system.shipped import HOME
from cookbook.system.tensor_files import weight_files, why_no_file
from cookbook.training.models.attention import PACKED
from cookbook.training.models.efficiency import compile_layers, patch_kernels, save_activations
from cookbook.training.models.experts import autocast_products
from cookbook.training.models.fp8 import convert_layers
from cookbook.training.models.loss import add_loss, compile_loss
from cookbook.training.models.mixers import keep_apart
from cookbook.training.models.new_tokens import add_tokens
from cookbook.training.models.structure import not_served, scratch_config

SCRATCH_FORMAT = 2
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""Files of a model, without weights in formats that can contain code."""
ADAPTER_FILE = "adapter_config.json"
"""A file by which transformers recognizes an adapter in a model's folder."""
PROCESSOR_TEMPLATE = "chat_template.json"
"""Where older models with a tower have their chat template, which transformers 5.23 gives to their processor alone."""
CHATML = HOME / "recipes" / "chat_templates" / "chatml.jinja"


def resolve_model(model: ModelSection, *, seed: int, texts: Iterable[str], fingerprint: str, cache: Path) -> str:
    """The folder to load from. A `from_scratch` model is built into the cache, once per machine; one from the Hub is
    downloaded here, before a process group could time out over it, so that all ranks load the same commit.

    Args:
        texts: training data of a new tokenizer; read only if the model must be built.
        fingerprint: SHA-256 of the rows behind `texts`.
    """
    if model.from_scratch is None:
        assert model.name_or_path is not None
        folder, place = fetch_model(model.name_or_path, model.revision), f"model.name_or_path is {model.name_or_path!r}"
        _refuse_adapter(folder)
        if (why := weight_files(Path(folder))[1]) is not None:
            raise RecipeError(f"{place}: {why}")
        if (Path(folder) / ADAPTER_FILE).exists():
            why = f"{ADAPTER_FILE} lies beside the weights, and transformers would load that adapter unasked"
            raise RecipeError(f"{place}: {why}; move its files to another folder, or merge it into the weights")
        return folder
    sizes = model.from_scratch
    description = [SCRATCH_FORMAT, sizes.model_dump(mode="json"), seed, fingerprint, CHATML.read_text()]
    key = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]
    built = cache / f"model-{key}"
    make_folder(cache)
    with lock.making(cache / f"model-{key}.lock"):
        if not built.is_dir():
            with tempfile.TemporaryDirectory(prefix=f"model-{key}.", dir=cache) as build:
                tokenizer = train_tokenizer(texts, sizes.vocab_size)
                tokenizer.save_pretrained(build)
                # Saved, then loaded like any other: ZeRO-3 and tensor parallel, which cut a model while it is read,
                # meet nothing special.
                new_model(sizes, tokenizer, seed).save_pretrained(build)
                Path(build).rename(built)
    return str(built)


def _refuse_adapter(name: str, key: str = "model.name_or_path") -> None:
    """Refuse an adapter's own folder, as a run exports it, in the place of a model. It may have a config.json."""
    folder = Path(name)
    if (folder / ADAPTER_FILE).is_file() and not ((folder / "config.json").is_file() and weight_files(folder)[0]):
        problem = "an adapter without its base; write both as one with `cookbook merge`, and name that"
        raise RecipeError(f"{key} is {name!r}: {problem}")


def fetch_model(
    name: str, revision: str | None, patterns: list[str] = HUB_FILES, *, key: str = "model.name_or_path"
) -> str:
    """The folder of a local model, or of a model downloaded from the Hub.

    Args:
        key: the recipe's, for mistakes.
    """
    if Path(name).is_dir():
        return name
    try:
        return snapshot_download(name, revision=revision, allow_patterns=patterns)
    except (OSError, ValueError) as error:  # the Hub's errors are OSErrors, a malformed name is a ValueError
        mistake = f"{key} is {name!r}: not a folder, and not fetched ({first_line(error)})"
        raise RecipeError(f"{mistake}; a folder with the model's files serves as well") from None


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens, with ChatML's special tokens and template."""
    specials = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.chat_template = CHATML.read_text()
    return fast


def stand_in_tokenizer(facts: dict[str, Any], some_texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A small tokenizer with a model's special tokens.

    Args:
        facts: of `known_model`.
    """
    tokenizer = train_tokenizer(some_texts, 1024)
    tokenizer.add_tokens([*facts["special_tokens"]], special_tokens=True)
    named = {"bos_token": facts["bos_token"], "eos_token": facts["eos_token"]}
    tokenizer.add_special_tokens({key: token for key, token in named.items() if token})
    return tokenizer


def new_model(sizes: ScratchModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A new model of the given sizes, its weights drawn from `seed`."""
    config = scratch_config(sizes, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)


def load_tokenizer(
    name: str, chat_template: str | None, new_tokens: Sequence[str] | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model with `model.new_tokens`; `chat_template` is a Jinja file that replaces its own.

    Raises:
        RecipeError: there is none, or it cannot have these tokens.
    """
    try:
        tokenizer = read_tokenizer(name)
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.name_or_path is {name!r}: {why_not('tokenizer', error)}") from None
    if new_tokens:
        add_tokens(tokenizer, new_tokens)
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    elif tokenizer.chat_template is None and (Path(name) / PROCESSOR_TEMPLATE).is_file():
        values = json.loads((Path(name) / PROCESSOR_TEMPLATE).read_text(encoding="utf-8"))
        tokenizer.chat_template = values["chat_template"]
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # any token will do: padding is never attended to and carries no loss
    return tokenizer


def load_config(name: str, max_length: int, *, key: str = "model.name_or_path") -> PreTrainedConfig:
    """The configuration of what is trained of a model, see `language_config`.

    Args:
        key: the recipe's, for mistakes.

    Raises:
        RecipeError: no such model, or one for which loss or attention would be wrong.
    """
    _refuse_adapter(name, key)
    try:
        config = open_config(name)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{key} is {name!r}: {why_not('model', error)}") from None
    problem = not_served(config)
    if problem is not None:
        raise RecipeError(f"{key} is {name!r}: {problem}")
    refuse([*_check_positions(config, max_length), *_check_router(config, f"{key} is {name!r}")])
    return config


def _check_positions(config: PreTrainedConfig, max_length: int) -> list[str]:
    positions = getattr(config, "max_position_embeddings", None) or max_length
    if max_length > positions:
        return [f"data.max_length is {max_length}, but the model has {positions} positions; use at most those"]
    rope = getattr(config, "rope_parameters", None) or {}
    kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings") or positions
    if kind in ("dynamic", "longrope") and max_length > original:
        return [
            f"data.max_length is {max_length}, but above {original} tokens this model's rotary embedding ({kind})"
            f" depends on the longest sample of a micro-batch; use at most {original}"
        ]
    return []


def _check_router(config: PreTrainedConfig, place: str) -> list[str]:
    count, taken = num_experts(config), getattr(config, "num_experts_per_tok", None)
    if count > 1 and isinstance(taken, int) and taken > count:
        return [f"{place}: config.json has num_experts_per_tok {taken}, of {count} experts; correct it"]
    return []


def load_model(
    name: str,
    settings: ModelSection,
    *,
    packing: bool,
    dtype: torch.dtype = torch.float32,
    sequence_mesh: DeviceMesh | None = None,
    fp8: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Load a model with its loss inside (see `add_loss`), in training mode.

    Under ZeRO-3 and tensor parallel every rank must call. The engine sets the dtype of the forward.

    Args:
        dtype: float32 if an optimizer updates the weights; frozen weights may be smaller.
        sequence_mesh: the ranks that share the tokens of each row, if any.
        fp8: multiply in 8 bits in the layers, see `convert_layers`.
        options: further arguments of `from_pretrained`, from engine and adapter.
    """
    if packing or sequence_mesh is not None:
        options["attn_implementation"] = PACKED
    autocast_products()
    model = open_language_model(name, dtype=dtype, **options)
    _allocate_meta_weights(model)
    model.config.use_cache = False
    if packing:
        keep_apart(model)
    is_ours = packing_problem(model.config) is None and short_window(model.config) is None
    if model.config._attn_implementation == "sdpa" and is_ours:
        # Our attention for padded rows too: transformers would synchronize with the device to look for packed rows
        # (masking_utils.py, find_packed_sequence_indices), and in float32 use a kernel with T x T scores.
        model.set_attn_implementation(PACKED)
    if settings.liger_kernels:
        patch_kernels(model)
    if fp8:
        convert_layers(model)
    if settings.gradient_checkpointing:
        offload = settings.gradient_checkpointing == "offload" and torch.cuda.is_available()
        save_activations(model, selective=settings.recompute == "selective", offload=offload)
    if settings.compile:
        compile_layers(model)
    add_loss(model, sequence_mesh)
    if settings.compile:
        compile_loss(head_of(model))
    model.train()
    return model


def check_finite(model: torch.nn.Module, place: object) -> None:
    """Check the values of a model that one process has whole, which no header tells: a model with NaN answers all the
    same, and a loss of it is NaN.

    Raises:
        RecipeError: a weight is NaN or infinite.
    """
    for name, weight in model.named_parameters():
        in_4_bits = getattr(weight, "quant_state", None) is not None  # of which pairs lie in a tensor of another dtype
        if in_4_bits or not weight.is_floating_point() or not weight.numel():
            continue
        if not torch.stack(weight.detach().aminmax()).isfinite().all():
            raise RecipeError(f"{place}: {name} has values that are not finite; fetch it again, or take an earlier one")


def open_language_model(name: str | Path, **options: Any) -> Any:
    """`from_pretrained` of a folder's class, for causal language models or for scores; of a model with a tower, the
    language part alone.

    Args:
        options: of `from_pretrained`; a `config` decides in the place of the folder's.
    """
    options = open_options(name) | options
    config = options.get("config") or open_config(name)
    verbosity = logging.get_verbosity()
    if "key_mapping" in options or is_scored(config):
        # For its list of a tower's tensors, or of the head that is not loaded; `check_folder` has compared all.
        logging.set_verbosity_error()
    try:
        return auto_class(config).from_pretrained(name, trust_remote_code=False, use_safetensors=True, **options)
    finally:
        logging.set_verbosity(verbosity)


def _allocate_meta_weights(model: PreTrainedModel) -> None:
    """Allocate weights and buffers whose values another rank will send, since accelerate identifies parameters by their
    addresses (accelerator.py, _prepare_fsdp2). The kernel provides no memory until they are written.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        # transformers compares two tied weights that the files both hold, and leaves those apart that have no values
        # (modeling_utils.py, tie_weights); `check_folder` has found them equal.
        model.tie_weights()
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device="cpu")
                setattr(module, name, made.setdefault(parameter, torch.nn.Parameter(empty, parameter.requires_grad)))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))


def revision_of(folder: str) -> str | None:
    """The commit of a folder in the Hub's cache."""
    found = re.search(r"/snapshots/([0-9a-f]{40})/?$", folder)
    return found.group(1) if found else None


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that ends an assistant's turn in the chat template, or None."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        has_marks = is_marked(tokenizer.get_chat_template())
        found = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=has_marks)
    except Exception:  # the template requires other messages, or it breaks: it is a program; there is none
        return None
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    # After the turn Phi-3's template ends the chat with another token.
    marks = found["assistant_masks"] if has_marks else [1] * len(found["input_ids"])
    turn = [i for i, mark in zip(found["input_ids"], marks, strict=True) if mark]
    return next((i for i in reversed(turn) if i in special), None)


def weights_digest(folder: Path, *, cache: Path | None = None) -> str:
    """SHA-256 over names and digests of a model's configuration and safetensors files; for `cache` see `sha256_of`."""
    paths = sorted((*folder.glob("*.safetensors"), folder / "config.json"))
    refuse([f"{path}: {why}" for path in paths if (why := why_no_file(path)) is not None])
    digests = sha256_of(paths, cache=cache)
    lines = "".join(f"{path.name} {digests[path]}\n" for path in paths)
    return hashlib.sha256(lines.encode()).hexdigest()
