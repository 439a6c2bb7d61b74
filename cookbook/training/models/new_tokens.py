"""New tokens: what a tokenizer takes, and the rows that a model then needs."""

import math
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from cookbook.system.files import refuse

ROWS_MULTIPLE = 64
"""An embedding that grows gets a multiple of so many rows, whatever the strategy: kernels are slow for other sizes, and
tensor parallel gives each process equally many."""


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> dict[str, int]:
    """Add special tokens to a tokenizer, in place; returns their ids.

    Raises:
        RecipeError: all tokens that it has already, or does not read as one.
    """
    known = tokenizer.get_vocab()
    refuse(
        [
            f"model.new_tokens has {token!r}, which the tokenizer has already (id {known[token]}); take it out"
            for token in tokens
            if token in known
        ]
    )
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    ids: dict[str, int] = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    read = {token: tokenizer.encode(token, add_special_tokens=False) for token in tokens}
    assert [*ids.values()] == [*range(min(ids.values()), min(ids.values()) + len(ids))], f"not consecutive: {ids}"
    refuse(
        [
            f"model.new_tokens has {token!r}, which the tokenizer would still read as"
            f" {tokenizer.convert_ids_to_tokens(read[token])}; write another one"
            for token, number in ids.items()
            if number not in read[token]
        ]
    )
    return ids


def grown_rows(rows: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows of an embedding of `rows` rows for all tokens of a tokenizer."""
    needed = max(tokenizer.get_vocab().values()) + 1
    return rows if needed <= rows else pad_rows(needed)


def pad_rows(rows: int) -> int:
    """The next multiple of `ROWS_MULTIPLE`."""
    return math.ceil(rows / ROWS_MULTIPLE) * ROWS_MULTIPLE


def rows_note(new: Mapping[str, int], rows: int, grown: int) -> str:
    """Tell the user where the new tokens have their rows."""
    size = f"grow from {rows:,} to {grown:,} rows" if grown > rows else f"have rows left for them, of {rows:,}"
    ids = ", ".join(f"{token} {number}" for token, number in new.items())
    return f"model.new_tokens ({ids}): embedding and head {size}; theirs start at the mean of the others"
