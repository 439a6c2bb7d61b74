"""What pyproject.toml cannot say: recipes, strategies and train.py lie at the top of the repository, and in a wheel
inside the package, as cookbook/shipped (cookbook/system/shipped.py); the version is that of CITATION.cff; extras are
groups of pyproject.toml, but for those that only the repository can use.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_namespace_packages, setup

PACKAGES = ["cookbook", "cookbook.*", "simulated_gpus", "simulated_gpus.*"]
OF_THE_REPOSITORY = {"dev", "peers", "site", "timm", "oldest"}
GROUPS = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]


def packages_of(group: str) -> list[str]:
    """The packages of a group and of those that it includes."""
    lists = (packages_of(item["include-group"]) if isinstance(item, dict) else [item] for item in GROUPS[group])
    return [package for packages in lists for package in packages]


setup(
    version=re.search(r"(?m)^version: (.+)$", Path("CITATION.cff").read_text(encoding="utf-8"))[1],
    packages=[*find_namespace_packages(include=PACKAGES, exclude=["simulated_gpus.tests"]), "cookbook.shipped"],
    extras_require={group: packages_of(group) for group in GROUPS if group not in OF_THE_REPOSITORY},
    package_dir={"cookbook.shipped": "."},
)
