"""The built-in source `python-stdlib`: chats made from the functions of this machine's Python standard library.

It needs no network and no licence but Python's, and a small model visibly learns from it. The files are parsed, never
imported or run. The rows depend on the Python version.
"""

import ast
import gc
import hashlib
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from cookbook.system.files import RecipeError

MIN_CHARACTERS, MAX_CHARACTERS = 40, 800  # of the function, without its docstring
MAX_REQUEST_CHARACTERS = 300
SKIPPED = {
    *("test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "site-packages", "dist-packages"),
    *("__pycache__", "lib-dynload", "encodings", "pydoc_data", "distutils", "msilib", "__phello__"),
}
TEST_BUCKETS_OF_256 = 13  # about 5 %


def load_stdlib(split: str) -> list[dict[str, Any]]:
    """The chats of split "train" or "test", ordered by file and line. A hash of the function decides its split."""
    if split not in ("train", "test"):
        raise RecipeError(f"python-stdlib: split is {split!r}; it has train and test")
    rows = []
    for request, answer in _pairs(Path(sysconfig.get_path("stdlib"))):
        is_test = hashlib.sha256(answer.encode()).digest()[0] < TEST_BUCKETS_OF_256
        if is_test == (split == "test"):
            messages = [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
            rows.append({"messages": messages})
    return rows


@lru_cache(maxsize=1)  # a run reads both splits, and parsing takes seconds
def _pairs(root: Path) -> list[tuple[str, str]]:
    requests, answers, pairs = set(), set(), []
    was_enabled = gc.isenabled()
    gc.disable()  # a syntax tree is a million objects and no cycles: collecting doubles the time
    try:
        for request, answer in _functions(root):
            if request not in requests and answer not in answers:
                requests.add(request)
                answers.add(answer)
                pairs.append((request, answer))
    finally:
        if was_enabled:
            gc.enable()
    return pairs


def _functions(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(python_files(root)):
        try:
            source = path.read_text(encoding="utf-8")  # also turns \r\n into \n
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old files with invalid escapes
                tree = ast.parse(source)
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
            continue
        lines = source.split("\n")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (pair := _request_and_answer(node, lines)):
                yield pair


def python_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)


def _request_and_answer(node: ast.FunctionDef, lines: list[str]) -> tuple[str, str] | None:
    docstring = ast.get_docstring(node, clean=False)
    if not docstring or _is_stub(node):
        return None
    answer = _without_docstring(node, lines)
    if answer is None or not MIN_CHARACTERS <= len(answer) <= MAX_CHARACTERS:
        return None
    purpose = " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    request = f"Write `def {node.name}({ast.unparse(node.args)}){returns}`: {purpose}"
    if not purpose.isprintable() or len(purpose) < 10 or ">>>" in purpose or len(request) > MAX_REQUEST_CHARACTERS:
        return None
    return request, answer


def _is_stub(node: ast.FunctionDef) -> bool:
    """Return whether a function has nothing to learn from: only a docstring, `pass`, `...` or a bare raise."""
    body = node.body[1:]
    return all(
        isinstance(part, ast.Pass | ast.Raise) or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        for part in body
    )


def _without_docstring(node: ast.FunctionDef, lines: list[str]) -> str | None:
    docstring, first = node.body[0], min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    before = lines[first - 1 : docstring.lineno - 1]
    after = lines[docstring.end_lineno : node.end_lineno]
    shares_a_line = docstring.lineno == node.lineno or node.body[1].lineno == docstring.end_lineno
    while after and not after[0].strip():
        del after[0]
    indent = " " * node.col_offset
    kept = [line.rstrip() for line in before + after]
    if shares_a_line or any(line and not line.startswith(indent) for line in kept):
        return None
    answer = "\n".join(line[len(indent) :] for line in kept).rstrip()
    # Removing the indent would change a string of several lines.
    has_long_string = '"""' in answer or "'''" in answer
    return None if has_long_string or "\t" in answer or not answer.isascii() else answer
