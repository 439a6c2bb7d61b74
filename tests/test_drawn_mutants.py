"""`tests/drawn_mutants.py` draws changes of the program, and the tests that it asks are those that run them.

python -m pytest -q tests/test_drawn_mutants.py
"""

import ast
import itertools
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests import drawn_mutants
from tests.code_sites import AT_IMPORT, OPERATORS, blocks_of, sites_of
from tests.drawn_mutants import (
    drawn,
    equivalent_changes,
    find_change,
    name_of,
    page,
    read_record,
    run_tests,
    what_became,
)

CHANGES = {
    "negate": {"x = 1 if a else b": {"x = 1 if (not a) else b"}, "while f.a < 2: pass": {"while (not f.a < 2): pass"}},
    "drop_call": {
        "f(a)": {"pass"},
        "x = f(a, b)": {"x = (a)"},
        "x = a.f()": {"x = (a)"},
        "import os\nx = os.getpid()": set(),
    },
    "swap_arguments": {"f(a, b, k=c)": {"(f(b, a, k=c))"}, "f(a, a)": set(), "f(a, *b)": {"(f(*b, a))"}},
    "off_by_one": {"x = 4": {"x = (5)"}, "x = True": set(), "x = a <= b": {"x = (a < b)"}, "x = 'a'": set()},
    "drop_item": {"x = a, b": {"x = ((b,))", "x = ((a,))"}, "a, b = x": set(), "x = [a]": set()},
    "drop_keyword": {"f(a, b=1, c=x)": {"(f(a, c=x))", "(f(a, b=1))"}},
    "other_operation": {"x = a and b": {"x = (a or b)"}, "x = a - b": {"x = (a + b)"}},
}
"""Code and what each operator makes of it, by hand."""


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_makes_other_programs_of_a_line(operator: str):
    for code, expected in CHANGES[operator].items():
        changes = {
            whole for site in sites_of("a.py", code) if site.operator == operator for _, _, whole in site.changes(code)
        }
        assert changes == expected, code


def test_no_text_for_people_and_no_type_is_changed():
    code = '''
"""A text: 1 < 2."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import a
@cached(1, 2)
def f(x: tuple[1, 2]) -> dict[1, 2]:
    """Another: f(1, 2)."""
    raise ValueError(f"{len(x)} of", 2)
'''
    assert sites_of("a.py", code) == []


PROGRAM = '''
def steps(count):
    """A text."""
    done = []
    for i in range(count):
        if i % 2:
            continue
        try:
            done.append(1 // (i - 2))
        except ZeroDivisionError:
            done.append(None)
        else:
            done.append(i)
    with open("/dev/null") as file:
        pass
    if count > 3:
        return done
    while done:
        done.pop()
    class Inner:
        def late(self):
            return 1
    return lambda: done
'''


@pytest.mark.parametrize("count", [0, 2, 5])
def test_a_block_is_noted_just_when_python_runs_its_lines(count: int):
    lines: set[int] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename == "program":
            lines.add(frame.f_lineno)
            return trace
        return None

    plain: dict[str, Any] = {}
    exec(compile(PROGRAM, "program", "exec"), plain)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        plain["steps"](count)
    finally:
        sys.settrace(before)
    noted: set[str] = set()
    tree = ast.parse(PROGRAM)
    blocks_of(tree, recorder="note", file="a.py")
    program: dict[str, Any] = {"note": noted.add}
    exec(compile(tree, "noting", "exec"), program)
    program["steps"](count)
    blocks = {
        block: {node.lineno for node, other in blocks_of(ast.parse(PROGRAM)).items() if other == block}
        for block in blocks_of(ast.parse(PROGRAM)).values()
        if block != AT_IMPORT
    }
    assert noted == {f"a.py:{block}" for block, its_lines in blocks.items() if lines & its_lines}
    assert "a.py:22" not in noted, "nobody called it"


def test_a_seed_draws_the_same_changes_and_each_operator_as_often():
    first, again, other = (
        [change.facts() for change in itertools.islice(drawn(seed, ["forecast/costs"]), 21)] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert Counter(facts["operator"] for facts in first) == dict.fromkeys(OPERATORS, 3)


def test_a_change_is_found_again_unless_it_could_be_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drawn_mutants, "ROOT", tmp_path)
    facts = {"file": "a.py", "function": "", "at": 4, "operator": "off_by_one", "before": "1", "after": "(2)"}
    codes = {"x = 1\n": "x = (2)\n", "y = x = 1\n": "y = x = (2)\n", "x = 1, 1\n": "x = (2), 1\n"}
    for code, expected in codes.items():
        (tmp_path / "a.py").write_text(code)
        change = find_change(facts)
        assert change is not None and change.whole == expected
    for code in ("x = 3\n", "y = x = 1, 1\n"):
        (tmp_path / "a.py").write_text(code)
        assert find_change(facts) is None


def test_the_first_test_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("test_a.py").write_text("def test_x(): pass\ndef test_y(): assert False\ndef test_z(): assert False\n")
    Path("pytest.ini").write_text("[pytest]\n")
    assert run_tests(["test_a.py::test_x", "test_a.py::test_z"], 60) == ("test_a.py::test_z", 1)
    assert run_tests(["test_a.py::test_x"], 60) == (None, 1)
    assert run_tests(["test_a.py"], 60) == ("test_a.py::test_y", 1)
    Path("test_a.py").write_text("import nothing_of_this_name\n")
    assert run_tests(["test_a.py::test_x"], 60) == ("test_a.py", 0)


def test_what_was_judged_equivalent_was_drawn_and_the_page_has_the_record():
    survivors = {
        name_of(facts)
        for draw in read_record().values()
        for facts in draw["changes"]
        if what_became(facts) in ("equivalent", "not noticed")
    }
    assert equivalent_changes().keys() <= survivors
    assert page() in Path("CONTRIBUTING.md").read_text(encoding="utf-8"), "python tests/drawn_mutants.py page"


def test_a_file_of_tests_that_is_gone_is_left_out_of_each_batch():
    """With it pytest would not start, and that passes for a notice."""
    tests = {f"tests/test_{name}.py::test": seconds for name, seconds in (("gone", 1), ("words", 1), ("lost", 99))}
    file = "cookbook/run/spending.py"
    site = drawn_mutants.Site(file, 1, "", 0, drawn_mutants.AT_IMPORT, "negate", (0, 1), ())
    reached = drawn_mutants.Reached({"tests": tests, "files": {}, "blocks": {f"{file}:1": [0, 1, 2]}})
    batches = reached.batches(site, "", {})
    assert batches[:2] == [["tests/test_words.py::test"]] * 2 and len(batches) == 3
    assert "tests/test_spending.py" in batches[2]


def test_of_long_tests_those_stay_without_which_less_is_reached():
    """By hand: `c` is reached by a short test and `d` by one that stays anyway; `a` takes y or z, and z has `b` too."""
    tests = dict.fromkeys(("short", "core", "y", "z", "twice"), 9.0)  # as measured under a load
    blocks = {"a": [2, 3], "b": [3], "c": [0, 4], "d": [1, 4]}
    facts = {"tests": tests, "core": ["core"], "blocks": blocks}
    seconds = {"core": 5.0, "y": 0.6, "z": 1.0, "twice": 0.7}
    assert drawn_mutants.alone(facts, seconds) == ["z"]
    assert drawn_mutants.alone(facts | {"blocks": blocks | {"e": [2]}}, seconds) == ["y", "z"]
    assert drawn_mutants.alone(facts, {"core": 5.0, "y": 0.6, "twice": 0.7}) == []  # now z is short
