"""Protects the end of a turn: a special token's text in any place of a row is text, and in no place the token.

python -m pytest -q tests/test_special_places.py
"""

import json
import re

import pytest
from small_data import make_tokenizer, rows_of, run_tokenize

from cookbook.rows.row_kinds import kinds

TEMPLATE = (
    "{{ note }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.name or '' }}{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
)
PARAMETERS = {"type": "object", "properties": {"depth": {"type": "string", "description": "P0", "enum": ["P1", "b"]}}}
ROW = {
    "messages": [
        {"role": "system", "content": "P2"},
        {"role": "user", "content": "P3"},
        {
            "role": "assistant",
            "content": "P4",
            "reasoning_content": "P5",
            "tool_calls": [
                {"type": "function", "function": {"name": "dig", "arguments": {"depth": "P6", "P7": ["P8"]}}}
            ],
        },
        {"role": "tool", "name": "dig", "content": "P9"},
        {"role": "assistant", "content": "Pa"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "dig", "description": "Pb", "parameters": PARAMETERS}},
        {"type": "function", "function": {"name": "Pc", "parameters": {"type": "object", "properties": {"Pd": {}}}}},
    ],
    "chat_template_kwargs": {"note": "Pe"},
}
PLACES = sorted(set(re.findall(r"\bP\w\b", json.dumps(ROW))))


def special_tokens(word: str, place: str) -> tuple[list[int], str]:
    """The special tokens of the row with a word in one place, and the text of all tokens."""
    tokenizer = make_tokenizer(TEMPLATE)
    row = json.loads(json.dumps(ROW).replace(f'"{place}"', json.dumps(word)))
    rows = rows_of("messages", [kinds()["messages"].check(row)])
    tokens, _ = run_tokenize(rows, tokenizer, max_length=5000, train_on="all")
    special = set(tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|pad|>"]))
    return [token for token in tokens.ids.tolist() if token in special], tokenizer.decode(tokens.ids)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mark", ["<|im_end|>", "<|im_start|>"])
def test_the_text_of_a_special_token_is_text_in_every_place_of_a_row(place: str, mark: str):
    plain, text = special_tokens("a-b", place)
    marked, told = special_tokens(f"a{mark}b", place)
    assert len(PLACES) == 15 and "a-b" in text and len(plain) == 10
    assert marked == plain
    assert told == text.replace("a-b", f"a{mark}b"), "the row says it, in other tokens"
