"""Published data sets, from `init` to the trained text: right, or a question whose answers, obeyed, are right.

Run alone: python -m pytest -q tests/test_published_shapes.py
"""

import json
import re
from pathlib import Path

import pytest
import yaml
from published_shapes import PUBLISHED, RECENT, Shape
from read_back import read_back
from tiny_tokenizers import tiny_tokenizer

from cookbook.commands.init import _read
from cookbook.config.sections import Source
from cookbook.system.files import RecipeError

TEMPLATE = (Path(__file__).parents[1] / "recipes/chat_templates/chatml_tools.jinja").read_text()
ASKED = ("question", "problem", "inputs", "query")
"""Columns of the questions."""


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(template=TEMPLATE)


def trained(path, task, tokenizer, folder, **names):
    """The trained stretches of the first sequence, and the notes."""
    outcome = read_back(path, tokenizer, folder, objective={"name": task}, **names)
    assert not outcome.refused, outcome.refused
    return re.findall(r"\[\[(.*?)\]\]", outcome.texts[0], re.DOTALL), outcome.notes


def offers(words):
    """The columns, and the columns to ignore, that a refusal offers."""
    flows = re.findall(r"columns(?::|, as in)? '?(\{.*?\})", words)
    blocks = re.findall(r"^  data:\n    columns:\n((?:      .*\n?)+)", words, re.MULTILINE)
    ignored = re.findall(r"data.ignore: (\[.*?\])", words)
    columns = [{"columns": yaml.safe_load(text)} for text in (*flows, *blocks)]
    return columns + [{"ignore": yaml.safe_load(text)} for text in ignored]


@pytest.mark.parametrize("shape", [pytest.param(shape, id=name) for name, shape in (PUBLISHED | RECENT).items()])
def test_a_published_shape_is_trained_as_it_is_meant_or_asked_about(shape: Shape, tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in shape.rows))
    if shape.trains is not None:
        task, source, _ = _read(Source(path=str(path)), None)
        stretches, notes = trained(path, task, tokenizer, tmp_path, columns=source.columns)
        assert (task, stretches) == (shape.task or "sft", shape.trains)
        assert re.search(shape.note, notes)
        return
    with pytest.raises(RecipeError) as error:
        _read(Source(path=str(path)), None)
    words = str(error.value)
    assert re.search(shape.asks, words, re.DOTALL), words
    assert offers(words) or not shape.may, words
    for offered in offers(words):
        try:
            task, source, _ = _read(Source(path=str(path), **offered), None)
        except RecipeError:
            continue  # asks for more
        assert offered.get("columns", {}).get("user", "question").lower() in ASKED
        stretches, _ = trained(path, task, tokenizer, tmp_path, **offered)
        assert {*stretches} <= {*shape.may}, (offered, stretches)
