"""Runs the tests with the newest libraries that the package index has, and writes what broke.

    python tests/newest.py --group dev [--group NAME ...] [--turn 3] [--workers 3]      (make test-newest)

An environment in .cache/newest gets the packages of requirements.txt and of the groups of pyproject.toml, without their
pins; then the tests of `make test` run in it, and the part of the slow and the thorough ones whose turn it is.
outputs/newest.md has the versions, and each test that failed with the place of docs/upgrade.md that names it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".cache/newest"
PYTHON = ENVIRONMENT / "bin/python"
PLACES = ROOT / "docs/upgrade.md"
REPORT = ROOT / "outputs/newest.md"
NO_TESTS = 5
"""pytest's exit code: a turn may have none."""


@dataclass(frozen=True)
class Failure:
    """A test that failed, and the last line of its error."""

    test: str
    reason: str


def read_pins(groups: list[str]) -> dict[str, str]:
    """Name and version of each package of requirements.txt and of these groups."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    packages = [line for line in lines if line and not line.startswith("#")]
    for group in groups:
        packages += packages_of(known, group)
    return dict(package.split("==") for package in packages)


def packages_of(groups: dict[str, list], name: str) -> Iterator[str]:
    for entry in groups[name]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from packages_of(groups, entry["include-group"])


def install(packages: Iterable[str]) -> None:
    """Make the environment, or bring it up to date."""
    if not PYTHON.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    pip("install", "--quiet", "--upgrade", "--upgrade-strategy", "eager", "pip", *packages)


def pip(*words: str) -> str:
    command = [PYTHON, "-m", "pip", *words, "--disable-pip-version-check"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def run_tests(words: list[str], results: Path) -> int:
    """The exit code of pytest in the environment, which writes its results in JUnit's XML."""
    results.unlink(missing_ok=True)
    return subprocess.run([PYTHON, "-m", "pytest", "-q", f"--junitxml={results}", *words], cwd=ROOT).returncode


def read_failures(results: Path) -> Iterator[Failure]:
    """Tests that failed or had an error, by a file of JUnit's XML.

    A file without a test is pytest that did not start, which is a failure too.
    """
    cases = list(ET.parse(results).iter("testcase")) if results.exists() else []
    if not cases:
        yield Failure(results.name, "pytest ran no test")
    for case in cases:
        for problem in (*case.iter("failure"), *case.iter("error")):
            module, name = case.get("classname", ""), case.get("name", "")
            test = f"{module.replace('.', '/')}.py::{name}" if module else name
            lines = (problem.get("message") or problem.text or "").strip().splitlines() or [""]
            yield Failure(test, lines[0][:200])


def place_of(test: str, page: str) -> str:
    """The first cell of the page's row that names a test, its function, or else its file."""
    function = test.partition("::")[2].partition("[")[0]
    for words in (test, function, test.partition("::")[0]):
        for line in page.splitlines():
            if words and words in line and line.startswith("|"):
                return line.strip("| ").split("|")[0].strip()
    return "no place named"


def write_report(versions: dict[str, str], pins: dict[str, str], failures: list[Failure]) -> str:
    """The page of a run: versions that are not the pins, and failures by place."""
    page = PLACES.read_text(encoding="utf-8") if PLACES.exists() else ""
    lines = ["# The newest libraries", "", "| package | pinned | here |", "|---|---|---|"]
    for name, pin in pins.items():
        if (here := versions.get(normal(name), "not installed")).split("+")[0] != pin:
            lines.append(f"| {name} | {pin} | {here} |")
    lines += ["", f"{len(failures)} tests failed." if failures else "All tests passed."]
    places: dict[str, list[Failure]] = {}
    for failure in failures:
        places.setdefault(place_of(failure.test, page), []).append(failure)
    for place, of_place in sorted(places.items()):
        lines += ["", f"## {place}", "", *(f"- `{failure.test}`: {failure.reason}" for failure in of_place)]
    return "\n".join(lines) + "\n"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    parser = argparse.ArgumentParser(description="The tests with the newest libraries.")
    parser.add_argument("--group", action="append", default=[], help="of pyproject.toml, to install")
    parser.add_argument("--turn", type=int, help="of the slow and thorough tests; else the number of commits")
    parser.add_argument("--workers", type=int, default=3)
    arguments = parser.parse_args()
    pins = read_pins(arguments.group)
    install(pins)
    count = ["git", "rev-list", "--count", "HEAD"]
    turn = arguments.turn or int(subprocess.run(count, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    os.environ["TURN"] = str(turn)
    failures, workers = [], ["-n", str(arguments.workers), "--dist", "worksteal"]
    for name, words in {"quick": [], f"turn_{turn}": ["-m", "due"]}.items():
        results = ENVIRONMENT / f"{name}.xml"
        if run_tests([*workers, *words], results) != NO_TESTS:
            failures += read_failures(results)
    versions = {normal(row["name"]): row["version"] for row in json.loads(pip("list", "--format=json"))}
    report = write_report(versions, pins, failures)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(report, encoding="utf-8")
    print(report)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
