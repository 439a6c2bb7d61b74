"""Files that a command writes under a name that a user gives, as --out."""

from pathlib import Path

from cookbook.system.files import RecipeError, cannot_write
from cookbook.system.record_files import new_file, replace_file


def problem_of_name(path: Path, begins: str | None = None, option: str = "--out") -> list[str]:
    """The mistake of a name that a command may not write, if it may not.

    Args:
        begins: how the files of this command begin, which it replaces; None: it replaces none.
        option: of the command, which names the file.
    """
    instead = _instead(option)
    if path.is_symlink() and not _is_device(path):
        return [f"{path}: is a link, which is not written through; {instead}"]
    if path.is_dir():
        return [f"{path}: is a folder; {instead}"]
    if path.exists() and not _is_device(path) and not (begins is not None and _has_beginning(path, begins)):
        return [f"{path}: exists, and is not overwritten; {instead}"]
    return []


def write_named_file(path: Path, text: str, begins: str | None = None, option: str = "--out") -> None:
    """Write a file whole or not at all; arguments as of `taken`.

    Raises:
        RecipeError: as `taken`, or the system refuses it.
    """
    if mistakes := problem_of_name(path, begins, option):
        raise RecipeError(mistakes)
    try:
        if _is_device(path):
            path.write_text(text, encoding="utf-8")
        elif path.exists():
            replace_file(path, text)
        else:
            new_file(path, text)
    except OSError as error:
        raise RecipeError(cannot_write(path, error, _instead(option))) from None


def _instead(option: str) -> str:
    return f"name another file with {option}"


def _is_device(path: Path) -> bool:
    """Return whether a name is that of a terminal, a pipe or the like, as /dev/stdout."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _has_beginning(path: Path, begins: str) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(begins.encode())) == begins.encode()
    except OSError:
        return False
