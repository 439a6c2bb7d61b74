"""Compares a loaded tokenizer with the tokenizer.json that it was loaded from, by the tokens of texts.

transformers 5 builds some tokenizers from the name of a class, with the class's rules in the place of the file's
(tokenization_utils_tokenizers.py, convert_to_native_format). The text that they decode to is the same, the tokens are
not those that the model was trained with.
"""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cookbook.system.files import RecipeError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

FILE = "tokenizer.json"
PROBES = (
    *("0 12 345 6789 10000 3.14 1,234,567", "it's I'VE you'll WE'D don't", "a  b   c    d\te\t\tf", " a", "a ", "\n"),
    *(
        "if x:\n    return {}\n\n\n\treturn\r\n",
        "<tag>\n1234 />\n\n;\n",
        "a.\n\nb! ?\n c",
        "CamelCase snake_case ALLCAPS",
    ),
    *(
        "ＡＢ１２ﬁ ① ½",
        "naïve cafe\u0301 ÄÖÜ ß",
        "你好\uff0c世界。天地玄黃 こんにちは 한국어",
        "مرحبا नमस्ते สวัสดี",
        "🙂👍🏽👩‍👩‍👧 🇩🇪",
        "\u200b\u00a0\ufeffa",
    ),
    *("http://a.b/c?d=1&e=%20", "x=-1+2*3//4**5", "\\frac{1}{2} $a_b^c$", "▁a ▁▁b", "Ġa", "##a @@"),
)
"""Texts in which tokenizers differ: digits, contractions, spaces, lines after signs, other scripts, emoji."""


def read_alike(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> "PreTrainedTokenizerBase":
    """A tokenizer loaded from a folder, with the rules of the folder's tokenizer.json where its class has others.

    Raises:
        RecipeError: it makes other tokens than the file all the same.
    """
    from transformers import PreTrainedTokenizerFast

    if not tokenizer.is_fast or not (folder / FILE).is_file():
        return tokenizer
    rules = rules_of_file(folder)
    if other_tokens(tokenizer, rules, PROBES) is None:
        return tokenizer
    # Its special tokens may be the class's defaults.
    kept: dict[str, Any] = {
        key: token
        for key, token in tokenizer.special_tokens_map.items()
        if key.endswith("_token") and rules.token_to_id(str(token)) is not None
    }
    kept["model_input_names"] = tokenizer.model_input_names
    plain = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False, **kept)
    around = tokenizer("")["input_ids"]  # what stands around a text is for tokenizer_config.json
    if plain("")["input_ids"] != around and None not in plain.convert_ids_to_tokens(around):
        plain.backend_tokenizer.post_processor = tokenizer.backend_tokenizer.post_processor
    if (text := other_tokens(plain, rules, PROBES)) is not None:
        raise RecipeError(_mistake(plain, folder, text))
    return plain


def check_rows(tokenizer: "PreTrainedTokenizerBase", texts: Iterable[str]) -> None:
    """Compare the tokens of texts with those by the tokenizer.json of the folder that the tokenizer was loaded from.

    Raises:
        RecipeError: they are others.
    """
    folder = Path(tokenizer.name_or_path)
    if not tokenizer.name_or_path or not tokenizer.is_fast or not (folder / FILE).is_file():
        return
    if (text := other_tokens(tokenizer, rules_of_file(folder), texts)) is not None:
        raise RecipeError(_mistake(tokenizer, folder, text))


def rules_of_file(folder: Path) -> "Tokenizer":
    """The tokenizer of a folder's tokenizer.json alone."""
    return _read_rules(folder / FILE, (folder / FILE).stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _read_rules(path: Path, _changed_at: int) -> "Tokenizer":
    from tokenizers import Tokenizer

    rules = Tokenizer.from_file(str(path))
    rules.no_truncation()
    rules.no_padding()
    return rules


def other_tokens(tokenizer: "PreTrainedTokenizerBase", rules: "Tokenizer", texts: Iterable[str]) -> str | None:
    """The first of the texts of which a tokenizer makes other tokens. Texts with added tokens are left out, which other
    files of the folder may add.
    """
    added = tuple(filter(None, tokenizer.added_tokens_encoder))
    compared = [text for text in texts if not any(token in text for token in added)]
    ids_of_texts = tokenizer(compared, add_special_tokens=False, verbose=False)["input_ids"] if compared else []
    encodings = rules.encode_batch(compared, add_special_tokens=False)
    for text, ids, encoding in zip(compared, ids_of_texts, encodings, strict=True):
        if ids != encoding.ids:
            return text
    return None


def _mistake(tokenizer: "PreTrainedTokenizerBase", folder: Path, text: str) -> str:
    return (
        f"{folder / FILE}: transformers' {type(tokenizer).__name__} makes other tokens than this file of {text[:40]!a};"
        " write tokenizer_class: PreTrainedTokenizerFast in tokenizer_config.json, which follows the file"
    )
