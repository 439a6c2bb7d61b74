"""Tokenizers: read from a model's folder, trained for a new model, and the token that ends a turn."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from cookbook.config.chat_templates import is_marked
from cookbook.facts.model_files import read_tokenizer, why_not
from cookbook.system.files import RecipeError, first_line
from cookbook.system.shipped import HOME
from cookbook.training.models.new_tokens import add_tokens

PROCESSOR_TEMPLATE = "chat_template.json"
"""Where older models with a tower have their chat template, which transformers gives to their processor alone."""
CHATML = HOME / "recipes" / "chat_templates" / "chatml.jinja"


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
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=specials[0], eos_token=specials[-1])
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
    file = Path(chat_template) if chat_template is not None else Path(name) / PROCESSOR_TEMPLATE
    try:
        if chat_template is not None:
            tokenizer.chat_template = file.read_text(encoding="utf-8")
        elif tokenizer.chat_template is None and file.is_file():
            tokenizer.chat_template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecipeError(f"{file}: no chat template can be read ({first_line(error)})") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # any token will do: padding is never attended to and carries no loss
    return tokenizer


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The added token that ends an assistant's turn in the chat template, or None."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        has_marks = is_marked(tokenizer.get_chat_template())
        encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=has_marks)
    except Exception:  # the template requires other messages, or it breaks: it is a program; there is none
        return None
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special or token.content.strip()}
    # After the turn Phi-3's template ends the chat with another token.
    marks = encoded["assistant_masks"] if has_marks else [1] * len(encoded["input_ids"])
    turn = [i for i, mark in zip(encoded["input_ids"], marks, strict=True) if mark]
    return next((i for i in reversed(turn) if i in added), None)
