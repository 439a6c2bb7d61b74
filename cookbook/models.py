"""Models and tokenizers: from the Hub, from a folder, or new ones; and the loss inside the model."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from filelock import FileLock
from huggingface_hub import snapshot_download
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from cookbook.files import RecipeError
from cookbook.recipe import ModelSection, ScratchModel

IGNORE_INDEX = -100
SCRATCH_FORMAT = 2
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""What a model is made of, less weights in formats that can carry code."""
CHATML = Path(__file__).parent.parent / "recipes" / "chat_templates" / "chatml.jinja"

# Configuration keys of models that change the logits after the head: the loss below would not see it.
LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "logits_soft_cap",
    "output_logit_soft_cap",
)


def resolve_model(model: ModelSection, *, seed: int, texts: Iterable[str], fingerprint: str, cache: Path) -> str:
    """The folder to load from. A `from_scratch` model is built into the cache, once per machine; one of the Hub is
    fetched here, before a process group could time out over it, and is then the same commit for all.

    Args:
        texts: what the new tokenizer is trained on; read only if it must be built.
        fingerprint: of the rows behind `texts`.
    """
    if model.from_scratch is None:
        assert model.name_or_path is not None
        return _fetch(model.name_or_path, model.revision)
    sizes = model.from_scratch
    description = [SCRATCH_FORMAT, sizes.model_dump(mode="json"), seed, fingerprint, CHATML.read_text()]
    key = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache / f"model-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"model-{key}.lock"):
        if not folder.is_dir():
            build = Path(tempfile.mkdtemp(prefix=f"model-{key}.", dir=cache))
            try:
                tokenizer = train_tokenizer(texts, sizes.vocab_size)
                tokenizer.save_pretrained(build)
                new_model(sizes, tokenizer, seed).save_pretrained(build)
                build.rename(folder)
            except BaseException:
                shutil.rmtree(build, ignore_errors=True)
                raise
    return str(folder)


def _fetch(name: str, revision: str | None) -> str:
    if Path(name).is_dir():
        return name
    try:
        return snapshot_download(name, revision=revision, allow_patterns=HUB_FILES)
    except (OSError, ValueError) as error:  # the Hub's errors are OSErrors, a malformed name is a ValueError
        raise RecipeError(
            [f"model.name_or_path is {name!r}: not a folder, and not fetched ({_first_line(error)})"]
        ) from None


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, with the ChatML special tokens and template."""
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


def new_model(sizes: ScratchModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A model of the given sizes with weights from `seed`."""
    config = AutoConfig.for_model(
        **sizes.model_dump(),
        head_dim=sizes.hidden_size // sizes.num_attention_heads,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)


def load_tokenizer(name: str, chat_template: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; `chat_template` is a Jinja file that replaces the tokenizer's own."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RecipeError([f"model.name_or_path is {name!r}: no tokenizer there ({_first_line(error)})"]) from None
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # a filler: padding is never attended to and carries no loss
    return tokenizer


def load_config(name: str, max_length: int) -> Any:
    """The model's configuration, refused where our loss would be wrong.

    Raises:
        RecipeError: no such model, one that transforms its logits after the head, or with too few positions.
    """
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RecipeError([f"model.name_or_path is {name!r}: no model there ({_first_line(error)})"]) from None
    for key in LOGIT_TRANSFORMS:
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise RecipeError(
                [f"model.name_or_path is {name!r}: its {key} changes the logits after the head, not served yet"]
            )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or max_length
    if max_length > positions:
        raise RecipeError(
            [f"data.max_length is {max_length}, but the model has {positions} positions; use at most those"]
        )
    return config


def load_model(name: str, *, gradient_checkpointing: bool, **options: Any) -> PreTrainedModel:
    """The model in float32 with its loss inside (see `add_loss`).

    Collective under ZeRO-3 and tensor parallel. Optimizers need float32 weights; what the forward computes in is the
    engine's part.

    Args:
        options: the engine's, for `from_pretrained`.
    """
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
    model.config.use_cache = False
    if gradient_checkpointing:
        # The name since transformers 5.23; the older one until 5.22.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    add_loss(model)
    model.train()
    return model


def add_loss(model: PreTrainedModel) -> None:
    """Makes `model(input_ids=, position_ids=, targets=)` return the sum of the negative log-likelihoods.

    Only labelled positions go through the head, and its logits exist in float32 for those alone. A micro-batch without
    labels still calls the head, on zero rows: the collectives of a sharded head must happen on every rank.
    `position_ids` and `targets` (already shifted) are (B, T) int64; there is no attention mask, since causal attention
    never sees the padding on the right.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        raise RecipeError([f"model {type(model).__name__}: not a backbone with a linear head, which is not served yet"])
    model.forward = MethodType(_summed_loss, model)


def _summed_loss(self: PreTrainedModel, *, targets: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    hidden = self.base_model(**inputs, use_cache=False).last_hidden_state
    labelled = targets != IGNORE_INDEX
    logits = self.get_output_embeddings()(hidden[labelled])
    return F.cross_entropy(logits.float(), targets[labelled], reduction="sum")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
