"""Comparison of a model's files with one another before its weights are read, equally in every process: a strategy must
not decide which model is trained. transformers draws a tensor that the files lack, and drops one too many.
"""

import contextlib
import copy
import dataclasses
import inspect
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import InvalidVersion, Version
from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    configuration_utils,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.models.auto import configuration_auto
from transformers.utils import logging

from cookbook.facts.language_part import KEY_MAPPING, has_tower, tower_tokens, whole_config
from cookbook.facts.model_files import GENERATION, read_generation_config
from cookbook.facts.score_head import class_of, is_scored
from cookbook.system.files import first_line, refuse
from cookbook.system.tensor_files import BadHeader, read_header, weight_files
from cookbook.training.models.logits import other_logits
from cookbook.training.models.new_tokens import grown_rows
from cookbook.training.models.structure import NOT_QUANTIZED, part_in_words, quantized_weights

NUM_NAMED = 5
"""Tensors that a mistake names."""
ROWS_AT_ONCE = 4096
"""Rows of a matrix that are compared at a time."""
PACKED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|absmax|quant_map|quant_state\S*|input_scale)$"
    r"|\.weight_(scale\w*|packed|shape|zero_point|g_idx)$|_(blocks|scales|scale_inv)$"
)
"""Names of tensors beside a quantized weight: of GPTQ, AWQ, bitsandbytes, compressed-tensors, ModelOpt, fp8, MXFP4."""
TINY_CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


class FolderFacts(NamedTuple):
    """Facts about a sound folder."""

    num_embeddings: int | None
    """Rows of the embedding: token ids are below. None if it is not a language model alone."""
    notes: list[str]
    """For the user: differences with which training is right all the same."""


class StoredTensor(NamedTuple):
    """A tensor in a model's files."""

    path: Path
    shape: list[int]
    dtype: str = "F32"


def check_folder(
    folder: Path,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    place: str | None = None,
    new_tokens: Collection[str] = (),
) -> FolderFacts:
    """Compare tensors, configuration and tokenizer of a model's folder, by headers and small files. Values are read
    only where the configuration ties two matrices and the files hold both.

    Args:
        place: where the folder is named, for messages; default: the recipe's key.
        new_tokens: of the tokenizer, for which the embedding will grow; see `grown_rows`.

    Raises:
        RecipeError: all differences that training cannot have.
    """
    if config.get_text_config() is not config or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return FolderFacts(None, [])  # training refuses such a model, and says why
    rows, mistakes = config.vocab_size, []
    if (quantized := quantized_weights(config)) is not None:
        mistakes.append(quantized)
    else:
        stored, mistakes = read_headers(folder)
        if not mistakes:
            with_tower = whole_config(folder)
            mistakes, rows = _compare_tensors(config if with_tower is None else with_tower, stored)
            if with_tower is not None and not mistakes:
                mistakes = _compare_language_part(config, stored)
    mistakes += _compare_versions(folder, config)
    notes = []
    if tokenizer is not None:
        if new_tokens:
            rows = grown_rows(rows, tokenizer)
            mistakes += _compare_new_tokens(folder, config, tokenizer, new_tokens)
        mistakes += _compare_tokens(tokenizer, rows)
        notes = _notes(folder, config, tokenizer, rows)
        if (with_tower := whole_config(folder)) is not None and not mistakes:
            notes.append(part_in_words(with_tower))
    place = place or f"model.name_or_path is {str(folder)!r}"
    refuse([f"{place}: {mistake}" for mistake in mistakes])
    return FolderFacts(rows, [f"{place}: {note}" for note in notes])


def _compare_new_tokens(
    folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, new: Collection[str]
) -> list[str]:
    """Mistakes for new tokens with ids by which the model knows the places of images and sound, or without a row in the
    embedding that layers have of their own (Gemma 3n, Gemma 4).
    """
    with_tower, ids = whole_config(folder), {token: tokenizer.convert_tokens_to_ids(token) for token in new}
    taken = {} if with_tower is None else {number: key for key, number in tower_tokens(with_tower).items()}
    mistakes = [
        f"model.new_tokens: {token} would have the id {number}, {taken[number]} of its config.json; give its tokenizer"
        " the token that it lacks"
        for token, number in ids.items()
        if number in taken
    ]
    of_layers = getattr(config, "hidden_size_per_layer_input", None) and config.vocab_size_per_layer_input
    if of_layers and (last := max(ids.values())) >= of_layers:
        mistakes.append(
            f"model.new_tokens: the embedding of its layers has {of_layers:,} rows, none for id {last}, and does not"
            " grow; take out of the key what is beyond, and write unused tokens of its tokenizer in the template"
        )
    return mistakes


def read_headers(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of the files that transformers reads, and mistakes in these files."""
    paths, why = weight_files(folder)
    if why is not None:
        return {}, [why]
    stored: dict[str, StoredTensor] = {}
    mistakes = []
    for path in paths:
        try:
            tensors, _ = read_header(path)
            in_file = {key: StoredTensor(path, entry["shape"], entry["dtype"]) for key, entry in tensors.items()}
            mistakes += [
                f"{path.name} and {stored[key].path.name} hold {key} with other values; fetch both again"
                for key in sorted(in_file.keys() & stored.keys())
                if not _are_equal([(key, stored[key]), (key, in_file[key])])
            ]
            stored |= in_file
        except OSError as error:
            mistakes.append(f"{path.name} cannot be read ({error.strerror}); fetch it again")
        except BadHeader as error:
            mistakes.append(f"{path.name} {error}; fetch it again")
    return stored, mistakes


def _compare_tensors(config: PreTrainedConfig, stored: dict[str, StoredTensor]) -> tuple[list[str], int]:
    """Mistakes where the files differ from the model of the configuration, by transformers' own loading, without data;
    and the rows of the embedding.
    """
    kind = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)] if has_tower(config) else class_of(config)
    try:
        model, report = _load_empty(kind, config, stored)
    except Exception as error:  # any, of transformers' code for the model: it would end a run under every strategy
        return [_why_not_loaded(kind, config, stored, error)], config.get_text_config().vocab_size
    mistakes = []
    if missing := sorted(report["missing_keys"]):
        way = "take a folder that has them, or the config.json that belongs to it"
        if not getattr(config, "tie_word_embeddings", False) and {*missing} <= {*(kind._tied_weights_keys or ())}:
            way = "if the head is the embedding, write tie_word_embeddings: true into its config.json"
        mistakes.append(f"its files lack {_names(missing)}, which would be random; {way}")
    # Old versions of GPT-J and others saved their causal mask, [1, 1, T, T], and what it masks with, a number.
    masks = {key for key, tensor in stored.items() if tensor.shape in ([], [1, 1, *tensor.shape[-1:] * 2])}
    left = sorted(report["unexpected_keys"] - masks)
    if packed := sorted(filter(PACKED.search, report["unexpected_keys"])):
        why = f"its files hold {_names(packed)}, as quantized weights do, whatever config.json says; {NOT_QUANTIZED}"
        return [why], model.get_input_embeddings().weight.shape[0]
    if left:
        # With tensors missing, what is saved so would have random ones.
        way = f", or leave them out: {kind.__name__}.from_pretrained(OLD).save_pretrained(NEW)" if not missing else ""
        mistakes.append(
            f"its files hold {_names(left)}, for which {kind.__name__} of its config.json has no place; correct"
            f" config.json{way}"
        )
    shapes = [f"{name} {[*shape]} and {[*wanted]}" for name, shape, wanted in sorted(report["mismatched_keys"])]
    if shapes:
        mistakes.append(f"shapes differ, in its files and by its config.json: {_names(shapes)}; correct config.json")
    if odd := _no_fractions(model, stored):
        mistakes.append(f"its files hold {_names(odd)} in {stored[odd[0]].dtype}, which no weight is; fetch it again")
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        # transformers ties them if only one is in the files; if both are, differently under each strategy.
        if model.get_parameter(target) is not model.get_parameter(source):
            mistakes += _compare_tied(model, stored, {target, source})
    if not mistakes and not has_tower(config) and not is_scored(config) and (odd_logits := other_logits(model)):
        mistakes.append(odd_logits)
    return mistakes, model.get_input_embeddings().weight.shape[0]


def _load_empty(
    kind: Any, config: PreTrainedConfig, stored: dict[str, StoredTensor], **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model without data, and transformers' report on the tensors."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # for its report of what is reported here
    logging.disable_progress_bar()
    try:
        return kind.from_pretrained(
            None,
            config=config,
            state_dict={key: torch.empty(tensor.shape, device="meta") for key, tensor in stored.items()},
            device_map={"": "meta"},
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    finally:
        logging.set_verbosity(verbosity)


def _compare_language_part(config: PreTrainedConfig, stored: dict[str, StoredTensor]) -> list[str]:
    """Mistakes where tensors of a sound model with a tower have names that `KEY_MAPPING` does not know."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, report = _load_empty(kind, config, stored, key_mapping=KEY_MAPPING)
    missing = sorted(report["missing_keys"])
    if not missing and (odd_logits := other_logits(model)):
        return [odd_logits]
    way = "AutoModelForImageTextToText.from_pretrained(OLD).save_pretrained(NEW) writes those that are"
    return missing and [f"{_names(missing)} of its language part have names in its files that are not known; {way}"]


def _why_not_loaded(kind: Any, config: PreTrainedConfig, stored: dict[str, StoredTensor], error: Exception) -> str:
    pad, rows = getattr(config, "pad_token_id", None), config.get_text_config().vocab_size
    if isinstance(pad, int) and pad >= rows:
        return f"config.json: pad_token_id {pad} is not below vocab_size {rows}; write null there"
    try:
        with torch.device("meta"):
            model = kind(copy.deepcopy(config))
        wanted = revert_weight_conversion(model, dict(model.state_dict()))
    except Exception:
        wanted = {}
    missing = sorted(wanted.keys() - stored.keys())
    shapes = [
        f"{key} {stored[key].shape} and {[*tensor.shape]}"
        for key, tensor in sorted(wanted.items())
        if key in stored and stored[key].shape != [*tensor.shape]
    ]
    if missing:  # one of the tensors of which a larger one is made
        return f"its files lack {_names(missing)}; fetch it again, or take the config.json that belongs to it"
    if shapes:
        return f"shapes differ, in its files and by its config.json: {_names(shapes)}; correct config.json"
    return f"transformers cannot load it by its config.json ({type(error).__name__}: {first_line(error)})"


def _no_fractions(model: PreTrainedModel, stored: dict[str, StoredTensor]) -> list[str]:
    """Names of tensors that are integers, complex or booleans in the files, and fractions in the model."""
    # transformers would convert them without a word.
    keys, state = [key for key, tensor in stored.items() if "F" not in tensor.dtype], model.state_dict()
    names = renamed_keys(model, keys) if keys else {}
    return sorted(key for key, name in names.items() if name in state and state[name].is_floating_point())


def _compare_tied(model: PreTrainedModel, stored: dict[str, StoredTensor], tied: set[str]) -> list[str]:
    keys = [key for key, name in renamed_keys(model, stored).items() if name in tied]
    if _are_equal([(key, stored[key]) for key in keys]):
        return []
    return [
        f"config.json says tie_word_embeddings: true, but its files hold {_names(keys)} with other values; write false"
        " there, or take out of the files what is not the model's"
    ]


def _are_equal(tensors: list[tuple[str, StoredTensor]]) -> bool:
    """Return whether tensors, by their names in the files, have the same values."""
    shapes = [tensor.shape for _, tensor in tensors]
    if any(shape != shapes[0] for shape in shapes):
        return False
    # Some rows at a time: an embedding may have gigabytes.
    first, *others = [safe_open(tensor.path, framework="pt").get_slice(key) for key, tensor in tensors]
    rows = range(0, shapes[0][0], ROWS_AT_ONCE) if shapes[0] else ()
    spans: list[Any] = [slice(start, start + ROWS_AT_ONCE) for start in rows] or [...]
    return all(torch.equal(first[span].float(), other[span].float()) for other in others for span in spans)


def renamed_keys(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """The name in a model of each tensor of its files, as transformers renames them."""
    rules, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix = model.base_model_prefix
    return {key: rename_source_key(key, renamings, converters, prefix, state)[0] for key in keys}


def _names(names: list[str]) -> str:
    more = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _compare_tokens(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str]:
    """Mistakes for tokens beyond the embedding that every training has. The tokens of a data set are compared with its
    rows."""
    named: dict[str, Any] = {"its pad_token": tokenizer.pad_token_id, "its eos_token": tokenizer.eos_token_id}
    if tokenizer.chat_template:
        try:
            ids = tokenizer.apply_chat_template(TINY_CHAT, return_dict=True)["input_ids"]
            named["a token of its chat template"] = max(ids)
        except Exception:  # noqa: S110  it wants other messages, or breaks as a program does, which the rows will tell
            pass
    return [
        f"{name} is {number} ({tokenizer.convert_ids_to_tokens(number)}), but its embedding has"
        f" {rows:,} rows; take the tokenizer of this model, or name another token there"
        for name, number in named.items()
        if number is not None and number >= rows
    ]


def _compare_versions(folder: Path, config: PreTrainedConfig) -> list[str]:
    """The mistake of a configuration that a newer transformers wrote and that asks for what the installed one does not
    have: it saves what differs from its defaults, and an unknown key becomes an attribute that no code reads.
    """
    written = (whole_config(folder) or config).transformers_version
    with contextlib.suppress(InvalidVersion):  # then it may be a newer one
        if written is None or Version(str(written)) <= Version(transformers.__version__):
            return []
    known = {field.name for field in dataclasses.fields(config)}
    with contextlib.suppress(Exception):  # any of a type's own checks, where it has no defaults
        known |= vars(type(config)()).keys()
    of_all = inspect.getsource(configuration_utils) + inspect.getsource(configuration_auto)  # of any type, as auto_map
    asked = {key: value for key, value in vars(config).items() if value}
    keys = [f"{key}: {value!r}" for key, value in asked.items() if key not in known and f'"{key}"' not in of_all]
    if not keys:
        return []
    return [
        f"its config.json was written by transformers {written}, and {transformers.__version__} here has no"
        f" {', '.join(keys)}: the model would be another; install that version, or take out of config.json what asks"
        " for nothing"
    ]


def _notes(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str]:
    notes, ends, written = [], set(), {"config.json": config}
    if len(tokenizer) > rows:
        notes.append(f"its tokenizer has more tokens than its embedding has rows ({len(tokenizer):,}, {rows:,})")
    if os.path.lexists(folder / GENERATION):
        written[GENERATION] = read_generation_config(folder)
    for name, settings in written.items():
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(settings, key, None)
            numbers = value if isinstance(value, list) else [] if value is None else [value]
            if key == "eos_token_id":
                ends |= {*numbers}
            if any(not 0 <= number < rows for number in numbers):
                notes.append(f"{key} {value} of {name} is none of the {rows:,} rows of its embedding")
    if ends and not tokenizer.chat_template and tokenizer.eos_token_id not in (None, *ends):
        own = f"{tokenizer.eos_token_id} ({tokenizer.eos_token})"
        notes.append(f"texts end with {own} of its tokenizer, and its generation at {sorted(ends)}; add the one there")
    return notes
