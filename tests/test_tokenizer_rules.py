"""Tokens are those of the tokenizer.json that lies in a model's folder. Run:

python -m pytest -q tests/test_tokenizer_rules.py
"""

import json
from pathlib import Path

import pytest
from read_back import read_back
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cookbook.facts.model_files import read_tokenizer
from cookbook.facts.tokenizer_rules import PROBES, check_rows, other_tokens, rules_of_file
from cookbook.system.files import RecipeError

TEXTS = ("<think>\n1234", "it's 12345\n\n x", "you'LL see;\r\n")
THREE_DIGITS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIALS = ["<|endoftext|>", "<|im_end|>"]


def write_folder(folder: Path, tokenizer_class: str) -> None:
    """A tokenizer of bytes with a few merges, whose file splits texts in a way of its own."""
    merges = [(">", "Ċ"), (";", "č"), ("1", "2"), ("12", "3"), ("123", "4"), ("'", "L"), ("l", "l")]
    pieces = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(THREE_DIGITS), "isolated"), by_bytes])
    core.add_special_tokens(SPECIALS)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIALS[1], pad_token=SPECIALS[0]).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": tokenizer_class}))


def ids(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return tokenizer([*TEXTS], add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer", "PreTrainedTokenizerFast"])
def test_a_class_does_not_replace_the_rules_of_the_file(tmp_path: Path, name: str):
    write_folder(tmp_path, name)
    whole = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    wanted = [whole.encode(text, add_special_tokens=False).ids for text in TEXTS]
    by_class = AutoTokenizer.from_pretrained(tmp_path)
    assert (ids(by_class) != wanted) == (name != "PreTrainedTokenizerFast"), "transformers' class has rules of its own"
    loaded = read_tokenizer(tmp_path)
    assert ids(loaded) == wanted
    assert (loaded.eos_token, loaded.pad_token, loaded("a")) == (SPECIALS[1], SPECIALS[0], by_class("a"))
    # The export: whoever opens it with transformers gets the same.
    loaded.save_pretrained(tmp_path / "export")
    assert ids(AutoTokenizer.from_pretrained(tmp_path / "export")) == wanted
    assert other_tokens(loaded, rules_of_file(tmp_path / "export"), PROBES) is None


def test_rows_are_compared_where_no_probe_shows_the_difference(tmp_path: Path):
    write_folder(tmp_path, "PreTrainedTokenizerFast")
    loaded = read_tokenizer(tmp_path)
    check_rows(loaded, ["qzzq <|im_end|> 123"])
    apart = pre_tokenizers.Split(Regex("qq|(?<=1)(?=23 zq)"), "isolated")
    loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, loaded.backend_tokenizer.pre_tokenizer])
    assert other_tokens(loaded, rules_of_file(tmp_path), PROBES) is None
    check_rows(loaded, ["qzzq", "123"])
    with pytest.raises(
        RecipeError, match=r"other tokens than this file of '123 zq'; write tokenizer_class: PreTrained"
    ):
        check_rows(loaded, ["a", "123 zq"])
    assert "other tokens than this file" in read_back([{"text": "123 zq"}], loaded, tmp_path).refused
