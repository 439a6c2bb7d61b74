"""A start under versions that were not tested says so, or is refused. python -m pytest -q tests/test_versions.py"""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from cookbook.commands.check.recipe_checks import check
from cookbook.start.run_plan import read_pair
from cookbook.system import versions

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "recipes/quickstart.yaml"
PINS = dict(re.findall(r"(?m)^(\w+)==(\S+)$", (ROOT / "requirements.txt").read_text()))
OLDEST = PINS | dict(
    line.split("==") for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["oldest"]
)


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    yield
    versions.installed_version.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    """Have the libraries report these versions, or none. Packages that they import are as they are."""
    of_package = metadata.version

    def version(name: str) -> str:
        if name not in versions.LIBRARIES:
            return of_package(name)
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions.metadata, "version", version)
    versions.installed_version.cache_clear()


@pytest.mark.parametrize("installed", [PINS, PINS | {"torch": PINS["torch"] + "+cu130"}, OLDEST])
def test_what_was_tested_is_said_nothing_of(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, installed)
    assert versions.untested_libraries() == versions.notes() == versions.mistakes() == []


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        (PINS | {"transformers": "99.1"}, ["transformers 99.1"]),
        (PINS | {"torch": "99.0", "peft": "98.0"}, ["torch 99.0", "peft 98.0"]),
        (PINS | {"transformers": OLDEST["transformers"]}, [f"transformers {OLDEST['transformers']}"]),
        ({name: pin for name, pin in PINS.items() if name != "datasets"}, ["datasets None"]),
    ],
)
def test_what_was_not_tested_is_named_with_what_was(installed, named, monkeypatch: pytest.MonkeyPatch):
    """Also half of the oldest set in the newest."""
    install(monkeypatch, installed)
    tested = [f"{name} (tested: {PINS[name.split()[0]]})" for name in named]
    assert versions.notes() == [f"versions: untested: {', '.join(tested)} (docs/upgrade.md)"]


def test_check_says_it_once_and_a_key_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    install(monkeypatch, PINS | {"transformers": "99.1"})
    assert check([QUICKSTART, QUICKSTART], assignments=[]) == 0
    assert capsys.readouterr().out.count("warning: versions: untested: transformers 99.1") == 1
    assert read_pair(QUICKSTART).mistakes == []
    strict = ["run.strict_versions=true"]
    assert [mistake.partition(",")[0] for mistake in read_pair(QUICKSTART, strict).mistakes] == [
        "run.strict_versions is true"
    ]
    install(monkeypatch, PINS)
    assert read_pair(QUICKSTART, strict).mistakes == []
    assert check([QUICKSTART], assignments=[]) == 0
    assert "versions" not in capsys.readouterr().out
