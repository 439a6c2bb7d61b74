"""Files that a command writes under a name that a user gives, as --out."""

from pathlib import Path

from cookbook.system.files import RecipeError, cannot_write
from cookbook.system.record_files import new_file, replace_file

INSTEAD = "name another file with --out"


def taken(path: Path, begins: str | None = None) -> list[str]:
    """The mistake of a name that a command may not write, if it may not.

    Args:
        begins: how the files of this command begin, which it replaces; None: it replaces none.
    """
    if path.is_symlink() and not _is_device(path):
        return [f"{path}: is a link, which is not written through; {INSTEAD}"]
    if path.is_dir():
        return [f"{path}: is a folder; {INSTEAD}"]
    if path.exists() and not _is_device(path) and not (begins is not None and _has_beginning(path, begins)):
        return [f"{path}: exists, and is not overwritten; {INSTEAD}"]
    return []


def write_named_file(path: Path, text: str, begins: str | None = None) -> None:
    """Write a file whole or not at all.

    Raises:
        RecipeError: as `taken`, or the system refuses it.
    """
    if mistakes := taken(path, begins):
        raise RecipeError(mistakes)
    try:
        if _is_device(path):
            path.write_text(text, encoding="utf-8")
        elif path.exists():
            replace_file(path, text)
        else:
            new_file(path, text)
    except OSError as error:
        raise RecipeError(cannot_write(path, error, INSTEAD)) from None


def _is_device(path: Path) -> bool:
    """Return whether a name is that of a terminal, a pipe or the like, as /dev/stdout."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _has_beginning(path: Path, begins: str) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(begins.encode())) == begins.encode()
    except OSError:
        return False
