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
CHECKS = ("tests", "benchmarks")
"""Folders where `theirs` may stand beside `ours`, and a text may begin with How, By or Its."""
NAMES = {"one", "found", "those", "them", "these"}
PARTICIPLE = re.compile(
    r"(?!.*(seed|speed|feed|need|embed)$)[a-z]+ed|begun|held|kept|known|made|meant|seen|shown|taken|chosen|drawn|written|sent"
)
BEGINNINGS = ("What ", "Whether ", "Those ", "The same ")
OF_CODE = ("How ", "By ", "Its ")
MAY_BE_EMPTY = re.compile(
    rf"\b({'|'.join(NAMES)}|theirs)(?=\s*(\W?=|[:,)]|in\b))|[\"']\\?\s*({'|'.join(BEGINNINGS + OF_CODE)})"
)
"""Files without it need not be parsed, which takes seconds for all of them."""


def words_of(code: str, *, is_check: bool = False) -> list[str]:
    """The names of variables and the beginnings of docstrings that say nothing to a reader."""
    names, beginnings = (NAMES, BEGINNINGS) if is_check else (NAMES | {"theirs"}, BEGINNINGS + OF_CODE)
    words = []
    for node in ast.walk(ast.parse(code)) if MAY_BE_EMPTY.search(code) else ():
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names:
            words.append(node.id)
        elif isinstance(node, ast.arg) and node.arg in names:
            words.append(node.arg)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words += [start for start in beginnings if node.value.value.lstrip("\\\n ").startswith(start)]
    return words


def is_participle(name: str) -> bool:
    return PARTICIPLE.fullmatch(name.strip("_").lower()) is not None


def participles_in(code: str) -> list[str]:
    """The functions and types whose whole name is a participle. Properties may be, as `sent` bytes."""
    return [
        node.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and is_participle(node.name)
        and not any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)
    ]


@pytest.mark.core
def test_no_word_says_nothing():
    paths = [path for folder in (*FOLDERS, *CHECKS) for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 600
    empty = {}
    for path in (ROOT / "train.py", *paths):
        name = path.relative_to(ROOT)
        words = words_of(path.read_text(encoding="utf-8"), is_check=name.parts[0] in CHECKS)
        if words:
            empty[str(name)] = words
    assert not empty, f"files with words that say nothing to a reader: {empty}"


@pytest.mark.core
def test_no_function_or_type_is_a_participle():
    paths = sorted((ROOT / "cookbook").rglob("*.py"))
    assert len(paths) > 250
    codes = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    defined = re.compile(r"(?:def|class) _*(\w+)", re.ASCII)
    may_be = {name: code for name, code in codes.items() if any(map(is_participle, defined.findall(code)))}
    names = {name: words for name, code in may_be.items() if (words := participles_in(code))}
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
    checks = 'theirs = 1\n"""Its value."""\nfound = 2\n"""Those of it."""\n'
    assert sorted(words_of(checks)) == ["Its ", "Those ", "found", "theirs"]
    assert sorted(words_of(checks, is_check=True)) == ["Those ", "found"]
    assert words_of('"""Return whether a row is whole."""\nrow = {"one": 1}\n') == []
