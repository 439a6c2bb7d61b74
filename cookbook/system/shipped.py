"""Lookup of relative paths: beside the file that names them, in the current folder, or among what is shipped with the
project: recipes, strategies and train.py, in the repository or in an installed package.
"""

import os
import re
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
IS_INSTALLED = (PACKAGE / "shipped").is_dir()
"""From a wheel, where pyproject.toml puts them into the package."""
HOME = PACKAGE / "shipped" if IS_INSTALLED else PACKAGE.parent
FOLDERS = ("recipes", "accelerate_configs")


def is_short(name: str) -> bool:
    """Return whether a strategy or a chat template is given by its name, and not as a path."""
    path = Path(name)
    return not path.suffix and len(path.parts) == 1 and name == path.name


def own_folder(file: Path) -> Path:
    """The folder where relative paths in a recipe or a strategy start: that of recipes/ or accelerate_configs/ if
    the file is in one of these, else the file's own.
    """
    parents = Path(os.path.abspath(file)).parents
    return next((folder.parent for folder in parents if folder.name in FOLDERS), parents[0])


def starts(file: Path | None = None) -> list[Path]:
    """The folders where a relative path may start, the first one first.

    Args:
        file: the recipe or strategy that names the path; None: the command line does.
    """
    return list(dict.fromkeys([*([own_folder(file)] if file is not None else []), Path.cwd(), HOME]))


def path_from_here(name: str, file: Path | None = None) -> str:
    """A path as it is reached from the current folder; as it is written if nothing is there."""
    here = Path.cwd()
    start = next((start for start in starts(file) if (start / name).exists()), here)
    return name if start == here else str(start / name)


def short(text: str) -> str:
    """A text for people, with what is shipped in an installed package under the path that leads there from here. Not
    for a command line of another program, nor for a file: these need the place itself.
    """
    if not IS_INSTALLED:
        return text
    return re.sub(rf"{re.escape(str(HOME))}/([\w./-]+)", lambda match: _short_name(match[0], match[1]), text)


def _short_name(path: str, name: str) -> str:
    """`name`, unless something else is there."""
    return name if path_from_here(name.rstrip(".")) == path.rstrip(".") else path


def pip_install(group: str) -> str:
    """The command that installs an optional package, such as a tracker, in the version that pyproject.toml has."""
    groups = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    return f"pip install {' '.join(groups[group])}"


def requirements() -> list[str]:
    """Lines of requirements.txt: a package with its version each."""
    lines = (HOME / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def in_repository() -> bool:
    """Return whether the current folder is the repository's, whose Makefile no package has."""
    ours, here = HOME / "Makefile", Path("Makefile")
    return not IS_INSTALLED and here.is_file() and here.samefile(ours)


def program() -> str:
    """train.py as it is reached from the current folder; never somebody else's file of that name."""
    ours, here = HOME / "train.py", Path("train.py")
    return str(here) if here.is_file() and here.samefile(ours) else str(ours)
