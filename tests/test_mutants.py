"""Each fault of `make mutants` has its place in the code, and the test that notices it is there.

python -m pytest -q tests/test_mutants.py
"""

import pytest

from tests.mutants import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.harm)
def test_a_fault_can_be_planted_and_the_test_that_notices_it_is_there(fault: Fault):
    right = (ROOT / fault.file).read_text(encoding="utf-8")
    compile(fault.planted_in(right), fault.file, "exec")
    file, name = fault.test.split("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_a_place_that_has_moved_is_named():
    gone = Fault("loss", "train.py", "no such line", "", "nothing", "tests/test_mutants.py::gone")
    with pytest.raises(ValueError, match=r"train\.py has 0 times: no such line"):
        gone.planted_in("import sys\n")
