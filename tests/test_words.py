"""Variables are named for what they hold, and docstrings begin with a noun or a verb.

python -m pytest -q tests/test_words.py
"""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = {"one", "found", "those", "theirs", "them", "these"}
BEGINNINGS = ("What ", "Whether ", "Those ", "The same ")
NOT_DONE = {
    "forecast": 100,
}
"""Rooms with such words, and at most how many. A room without any leaves the table."""


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


def counts_by_room() -> Counter[str]:
    counts: Counter[str] = Counter()
    for path in (ROOT / "cookbook").rglob("*.py"):
        *folders, file = path.relative_to(ROOT / "cookbook").parts
        counts["/".join(folders[:2]) or file] += len(words_of(path.read_text(encoding="utf-8")))
    return +counts


def test_no_room_has_more_empty_words_than_the_table_allows():
    counts = counts_by_room()
    more = {room: count for room, count in counts.items() if count > NOT_DONE.get(room, 0)}
    assert not more, f"rooms with words that say nothing to a reader: {more}"
    assert NOT_DONE.keys() <= counts.keys(), f"rooms to take out of the table: {NOT_DONE.keys() - counts.keys()}"


def test_each_kind_of_empty_word_is_noticed():
    code = '"""What it is."""\nfor one in ():\n    found = lambda them: them\ndef f(these):\n    """Whether."""\n'
    assert sorted(words_of(code)) == ["What ", "found", "one", "them", "these"]
    assert words_of('"""Return whether a row is whole."""\nrow = {"one": 1}\n') == []
