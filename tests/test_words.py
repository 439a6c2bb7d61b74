"""Variables are named for what they hold; docstrings, and texts below an attribute, begin with a noun or a verb; and no
function or type is named by a participle alone.

python -m pytest -q tests/test_words.py
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("cookbook", "simulated_gpus", "website", "examples")
NAMES = {"one", "found", "those", "theirs", "them", "these"}
PARTICIPLE = re.compile(
    r"(?!.*(seed|speed|feed|need|embed)$)[a-z]+ed|begun|held|kept|known|made|meant|seen|shown|taken|chosen|drawn|written|sent"
)
LEFT = {"coloured", "fitted", "installed", "known", "located", "masked", "replaced", "shown", "tested"}
"""Functions that most rooms call, so that nine names are left of the rule. Add none."""
BEGINNINGS = ("What ", "Whether ", "Those ", "The same ")


def words_of(code: str) -> list[str]:
    """The names of variables and the beginnings of docstrings that say nothing to a reader."""
    words = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            words.append(node.id)
        elif isinstance(node, ast.arg) and node.arg in NAMES:
            words.append(node.arg)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words += [start for start in BEGINNINGS if node.value.value.lstrip("\\\n ").startswith(start)]
    return words


def participles_in(code: str) -> list[str]:
    """The functions and types whose whole name is a participle. Properties may be, as `sent` bytes."""
    return [
        node.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and PARTICIPLE.fullmatch(node.name.strip("_").lower())
        and node.name not in LEFT
        and not any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)
    ]


@pytest.mark.core
def test_no_word_says_nothing():
    paths = [ROOT / "train.py", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
    assert len(paths) > 300
    empty = {
        str(path.relative_to(ROOT)): words for path in paths if (words := words_of(path.read_text(encoding="utf-8")))
    }
    assert not empty, f"files with words that say nothing to a reader: {empty}"


@pytest.mark.core
def test_no_function_or_type_is_a_participle():
    paths = sorted((ROOT / "cookbook").rglob("*.py"))
    assert len(paths) > 250
    names = {str(path.relative_to(ROOT)): kept for path in paths if (kept := participles_in(path.read_text("utf-8")))}
    assert not names, f"functions that are no verbs, and types that are no nouns: {names}"


def test_each_participle_is_noticed():
    code = "class Kept:\n    def _asked(self): ...\n    @property\n    def sent(self): ...\ndef _drawn(): ...\n"
    assert sorted(participles_in(code)) == ["Kept", "_asked", "_drawn"]
    assert participles_in("class KeptTrace: ...\ndef seed(): ...\ndef ask(): ...\ndef known_rows(): ...\n") == []


def test_each_kind_of_empty_word_is_noticed():
    code = '"""What it is."""\nfor one in ():\n    found = lambda them: them\ndef f(these):\n    """Whether."""\n'
    assert sorted(words_of(code)) == ["What ", "found", "one", "them", "these"]
    below = 'class A:\n    b = 1\n    """Whether it is."""\nC = 2\n"""Those of b."""\n'
    assert sorted(words_of(below)) == ["Those ", "Whether "]
    assert words_of('"""Return whether a row is whole."""\nrow = {"one": 1}\n') == []
