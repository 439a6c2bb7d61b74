"""Tokenizers of a few hundred tokens, one of each kind that treats spaces in a way of its own.

Each has a token a character, so that borders can be checked by hand, and the marks that a template writes as special
tokens.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[1] / "recipes" / "chat_templates"
CHATML = (TEMPLATES / "chatml.jinja").read_text(encoding="utf-8")
SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<unk>", "<s>", "</s>"]
MARK = re.compile(r"<[|\uFF5C][^<>\s'\"]+[|\uFF5C]>|</?(?:bos|eos|start_of_turn|end_of_turn|turn\|)>|\[/?[A-Z_]{4,}\]")
"""A special token of a family, as its template writes it."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CHARACTERS = LETTERS + LETTERS.upper() + "0123456789.,:;!?'\"<>|_/{}[]()+-=*&#@%$^~`\\\n"


def _sentencepiece_bpe(*, bytes_too: bool = True) -> Tokenizer:
    """A piece for each character, for a space before each letter, and for each byte of what has none."""
    spaced = ["▁" + letter for letter in LETTERS]
    pieces = [*SPECIALS, "▁", *spaced, *CHARACTERS, *(f"<0x{i:02X}>" for i in range(256) if bytes_too)]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", letter) for letter in LETTERS]
    return Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=bytes_too))


def _spaces_of_llama2(*, dummy: bool) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        core = _sentencepiece_bpe()
        begin = [normalizers.Prepend("▁")] if dummy else []
        core.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", "▁")])
        end = [decoders.Strip(" ", 1, 0)] if dummy else []
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end])
        return core

    return make


def _metaspace(scheme: str, *, bytes_too: bool = True, collapses: bool = False) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        core = _sentencepiece_bpe(bytes_too=bytes_too)
        if collapses:
            core.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        core.decoder = decoders.Sequence(
            [decoders.Metaspace(prepend_scheme=scheme)]
            if not bytes_too
            else [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme), decoders.Fuse()]
        )
        return core

    return make


def _byte_level(*, prefix_space: bool = False, merges: Sequence[tuple[str, str]] = ()) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        pieces = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
        core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=not merges)
        core.decoder = decoders.ByteLevel()
        return core

    return make


def _words() -> Tokenizer:
    """A token a word, as far as it knows it, or a character, and none for white space."""
    vocab = {word: i for i, word in enumerate([*SPECIALS, *CHARACTERS, "user", "assistant", "system", "tool"])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    apart = pre_tokenizers.Split(Regex(r"user|assistant|system|tool|\S"), "removed", invert=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), apart])
    return core


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": _byte_level(),
    "newlines": _byte_level(merges=[("Ċ", "Ċ")]),
    "prefix_space": _byte_level(prefix_space=True),
    "metaspace_always": _metaspace("always"),
    "metaspace_first": _metaspace("first"),
    "llama2": _spaces_of_llama2(dummy=True),
    "gemma": _spaces_of_llama2(dummy=False),
    "t5": _metaspace("always", collapses=True),
    "unknown_letters": _metaspace("never", bytes_too=False),
    "words": _words,
}
LOSSLESS = ("bytes", "newlines", "gemma")
"""Decode to the text that was encoded, to the letter."""


def tiny_tokenizer(
    kind: str = "bytes",
    template: str | dict[str, str] = CHATML,
    *,
    eos: str = "<|im_end|>",
    pad: str | None = "<|pad|>",
    bos: str | None = None,
    adds_bos: bool = False,
    more: Sequence[str | AddedToken] = (),
) -> PreTrainedTokenizerFast:
    """A tokenizer of one of `KINDS` with this template, whose marks are special tokens, and `more` beside them."""
    core = KINDS[kind]()
    text = template if isinstance(template, str) else " ".join(template.values())
    special = [AddedToken(name, special=True, normalized=False) for name in (*SPECIALS, *MARK.findall(text))]
    core.add_special_tokens([*{str(text): text for text in special}.values(), *more])
    if adds_bos:
        assert bos is not None
        ids = [(bos, core.token_to_id(bos))]
        core.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, pad_token=pad or eos, bos_token=bos, unk_token="<unk>"
    )
    made.chat_template = template
    return made
