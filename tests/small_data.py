"""Rows, a tokenizer and token sets that are small enough to be checked by hand."""

import itertools
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cookbook.config.objectives import Objective
from cookbook.training.data.encode import DEFAULT_KEYS
from cookbook.training.data.rows import BadRows, Rows
from cookbook.training.data.tokens import TokenSet, tokenize

ROOT = Path(__file__).parents[1]
CHATML = ROOT / "recipes" / "chat_templates" / "chatml.jinja"
PAD = 0


def chat(*contents):
    """Messages of user and assistant in turn."""
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]}


def rows_of(kind, rows):
    return Rows(kind=kind, rows=rows)


def make_tokenizer(template=None, bos=None, merges=(), specials=()):
    """Byte-level; without texts to learn `merges` from, one token per ASCII character: masks can be written by hand."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", *specials, *([bos] if bos else [])]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(merges or ["a"], trainer)
    if bos:
        ids = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        bos_token=bos,
        additional_special_tokens=["<|im_start|>", *specials],
    )
    tokenizer.chat_template = CHATML.read_text() if template is None else template
    return tokenizer


def run_tokenize(
    rows,
    tokenizer,
    *,
    on_bad_row="error",
    max_length=1000,
    too_long=None,
    num_processes=None,
    keys=DEFAULT_KEYS,
    **objective,
):
    """The token set of one source, and what was dropped; more settings go to the objective."""
    bad_rows = BadRows()
    tokens = tokenize(
        [rows],
        tokenizer,
        max_length=max_length,
        too_long=too_long,
        keys=keys,
        objective=Objective.of(**objective),
        bad_rows=bad_rows,
        num_processes=num_processes,
    )
    bad_rows.stop_if(on_bad_row)
    return tokens, dict(bad_rows.num_by_reason)


def marked(tokens, sample, tokenizer):
    """The sample as text, with [ ] around each stretch of labels."""
    start, end = tokens.offsets[sample], tokens.offsets[sample + 1]
    text = ""
    for is_label, run in itertools.groupby(range(start, end), key=lambda i: bool(tokens.is_label[i])):
        piece = tokenizer.decode(tokens.ids[list(run)].tolist())
        text += f"[{piece}]" if is_label else piece
    return text


def token_set(lengths, is_label=None):
    """Samples whose every token has an id of its own, counting from 1; labels everywhere but at each first token."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    labels = np.ones(offsets[-1], dtype=bool)
    labels[offsets[:-1]] = False
    ids = np.arange(1, offsets[-1] + 1, dtype=np.int32)
    return TokenSet(ids=ids, is_label=labels if is_label is None else np.array(is_label, dtype=bool), offsets=offsets)


def write_lines(path, *lines):
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return str(path)


def messages(*pairs):
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in pairs]})
