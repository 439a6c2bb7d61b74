"""The lane of the newest libraries installs what the pins name, and says what broke, and where.

python -m pytest -q tests/test_newest.py
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import newest

ROOT = Path(__file__).parents[1]
TESTS = """\
import pytest

@pytest.fixture
def broken():
    raise ImportError("no name")

def test_right(): pass

@pytest.mark.skip(reason="no card")
def test_skipped(): pass

@pytest.mark.parametrize("strategy", ["zero3", "tp"])
def test_curves(strategy): assert strategy == "tp", "apart by 1e-3"

def test_loads(broken): pass
"""
PAGE = """\
| place | guard |
|---|---|
| argument names of layers | test_curves |
| loaders | test_broken.py |
"""


def test_the_lane_installs_each_pinned_package_of_the_tests_in_any_version():
    pins = newest.read_pins(["dev", "trackers"])
    written = re.findall(r"(?m)^([\w-]+)==(\S+)$", (ROOT / "requirements.txt").read_text(encoding="utf-8"))
    assert dict(written).items() <= pins.items() and len(written) >= 15
    assert {"pytest", "wandb", "sqlalchemy"} <= pins.keys(), "a group, and groups of a group"
    assert "huggingface_hub" not in pins, "which is of the group oldest"


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[newest.Failure]:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "test_broken.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=results.xml"]
    subprocess.run(command, cwd=folder, capture_output=True)
    return list(newest.read_failures(folder / "results.xml"))


def test_failures_and_errors_are_read_from_what_pytest_writes(failures: list[newest.Failure]):
    assert {failure.test: failure.reason for failure in failures} == {
        "test_broken.py::test_curves[zero3]": "AssertionError: apart by 1e-3",
        "test_broken.py::test_loads": 'failed on setup with "ImportError: no name"',
    }


def test_a_pytest_that_ran_nothing_is_a_failure(tmp_path: Path):
    assert [failure.reason for failure in newest.read_failures(tmp_path / "quick.xml")] == ["pytest ran no test"]


def test_the_report_has_the_versions_that_moved_and_failures_by_place(failures, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(newest, "PLACES", tmp_path / "upgrade.md")
    pins = {"torch": "2.13.0", "PyYAML": "6.0.3"}
    here = {"torch": "2.14.1+cpu", "pyyaml": "6.0.3"}
    assert newest.write_report(here, pins, []).endswith("| torch | 2.13.0 | 2.14.1+cpu |\n\nAll tests passed.\n")
    assert "## no place named" in newest.write_report(here, pins, failures)
    newest.PLACES.write_text(PAGE)
    report = newest.write_report(here, pins, failures)
    assert [line for line in report.splitlines() if line.startswith(("##", "- "))] == [
        "## argument names of layers",
        "- `test_broken.py::test_curves[zero3]`: AssertionError: apart by 1e-3",
        "## loaders",
        '- `test_broken.py::test_loads`: failed on setup with "ImportError: no name"',
    ]


def test_a_workflow_runs_the_lane_each_week():
    workflow = yaml.safe_load((ROOT / ".github/workflows/newest.yml").read_text(encoding="utf-8"))
    assert re.fullmatch(r"\d+ \d+ \* \* \d", workflow[True]["schedule"][0]["cron"])  # YAML 1.1 reads `on` as true
    steps = " ".join(step.get("run", "") for step in workflow["jobs"]["newest"]["steps"])
    assert "make test-newest" in steps and str(newest.REPORT.relative_to(ROOT)) in steps
