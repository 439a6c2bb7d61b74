"""What pyproject.toml cannot say: recipes, strategies and train.py lie at the top of the repository, and in a wheel
inside the package, as cookbook/shipped (cookbook/system/shipped.py); the version is that of CITATION.cff.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

PACKAGES = ["cookbook", "cookbook.*", "simulated_gpus", "simulated_gpus.*"]

setup(
    version=re.search(r"(?m)^version: (.+)$", Path("CITATION.cff").read_text(encoding="utf-8"))[1],
    packages=[*find_namespace_packages(include=PACKAGES, exclude=["simulated_gpus.tests"]), "cookbook.shipped"],
    package_dir={"cookbook.shipped": "."},
)
