"""Each fault of `make mutants` has its place in the code, and the test that notices it is there and notices it.

python -m pytest -q tests/test_mutants.py
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted import FAULTS, ROOT, Fault


@pytest.mark.core
def test_each_fault_can_be_planted_and_the_test_that_notices_it_is_there():
    for fault in FAULTS:
        planted = fault.planted_in((ROOT / fault.file).read_text(encoding="utf-8"))
        if fault.file.endswith(".py"):
            compile(planted, fault.file, "exec")
        file, name = fault.test.split("::")
        assert f"\ndef {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), fault.test


@pytest.mark.core
def test_a_planted_program_knows_its_names(tmp_path: Path):
    """Else any test would notice the NameError."""
    for number, fault in enumerate(FAULTS):
        if fault.file.endswith(".py"):
            planted = fault.planted_in((ROOT / fault.file).read_text(encoding="utf-8"))
            (tmp_path / f"{number}.py").write_text(planted, encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F823", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_fault_is_there_twice():
    assert len({(fault.file, fault.text) for fault in FAULTS}) == len({fault.harm for fault in FAULTS}) == len(FAULTS)


def test_a_place_that_has_moved_is_named():
    gone = Fault("train.py", "no such line", "", "nothing", "tests/test_mutants.py::gone")
    with pytest.raises(ValueError, match=r"train\.py has 0 times: no such line"):
        gone.planted_in("import sys\n")


PARTS = 48


@pytest.mark.parametrize("part", [pytest.param(i, marks=pytest.mark.thorough(turn=(i, PARTS))) for i in range(PARTS)])
def test_the_tests_notice_a_part_of_the_faults(part: int):
    command = [sys.executable, "tests/mutants.py", "--part", f"{part}/{PARTS}", "--checked"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
