"""Variables are named for what they hold, and docstrings begin with a noun or a verb.

python -m pytest -q tests/test_words.py
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = {"one", "found", "those", "theirs", "them", "these"}
BEGINNINGS = ("What ", "Whether ", "Those ", "The same ")


def words_of(code: str) -> list[str]:
    """The names of variables and the beginnings of docstrings that say nothing to a reader."""
    words = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            words.append(node.id)
        elif isinstance(node, ast.arg) and node.arg in NAMES:
            words.append(node.arg)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words += [start for start in BEGINNINGS if (ast.get_docstring(node) or "").startswith(start)]
    return words


@pytest.mark.core
def test_no_word_says_nothing():
    empty = {
        str(path.relative_to(ROOT)): words
        for path in sorted((ROOT / "cookbook").rglob("*.py"))
        if (words := words_of(path.read_text(encoding="utf-8")))
    }
    assert not empty, f"files with words that say nothing to a reader: {empty}"


def test_each_kind_of_empty_word_is_noticed():
    code = '"""What it is."""\nfor one in ():\n    found = lambda them: them\ndef f(these):\n    """Whether."""\n'
    assert sorted(words_of(code)) == ["What ", "found", "one", "them", "these"]
    assert words_of('"""Return whether a row is whole."""\nrow = {"one": 1}\n') == []
