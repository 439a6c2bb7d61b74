"""Versions of the libraries that compute, against those that the project's tests and figures are from. No torch."""

import functools
import re
import tomllib
from importlib import metadata

from cookbook.system.shipped import HOME, requirements

LIBRARIES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "peft")


def untested_libraries() -> list[str]:
    """The libraries whose installed version is none that was tested, each with both. A set of versions was tested as a
    whole: that of requirements.txt, and that with the group `oldest` of pyproject.toml in it."""
    here, sets = {name: installed_version(name) for name in LIBRARIES}, tested_versions()
    if here in sets:
        return []
    pins = sets[0]
    return [f"{name} {here[name]} (tested: {pins[name]})" for name in LIBRARIES if here[name] != pins[name]]


def notes() -> list[str]:
    """The line for whoever starts something."""
    if names := untested_libraries():
        return [f"versions: untested: {', '.join(names)} (docs/upgrade.md)"]
    return []


def mistakes() -> list[str]:
    """Mistakes of a recipe with run.strict_versions on this machine."""
    if names := untested_libraries():
        return [f"run.strict_versions is true, and not tested is {', '.join(names)}; install those, or write false"]
    return []


@functools.cache
def tested_versions() -> list[dict[str, str | None]]:
    """Sets of versions that were tested, the pins first."""
    pins = dict(re.findall(r"(?m)^([\w.-]+)==([^\s;#]+)", "\n".join(requirements())))
    groups = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    oldest = dict(package.split("==") for package in groups["oldest"])
    return [{name: versions.get(name) for name in LIBRARIES} for versions in (pins, pins | oldest)]


@functools.cache
def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None
