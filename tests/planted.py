"""The faults of faults.toml, which tests/mutants.py plants. No imports of the project."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """A change of one place, in which a program that runs is wrong."""

    file: str
    text: str
    """Occurs once in the file. Its blanks stand for any blanks and line ends."""
    change: str
    harm: str
    """Harm to a user."""
    test: str
    """Notices it: FILE::NAME, with all of its cases that are quick."""

    def planted_in(self, code: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: the place is not there, or there more than once.
        """
        pattern = r"\s+".join(map(re.escape, self.text.split()))
        planted, count = re.subn(pattern, lambda _: self.change, code)
        if count != 1 or planted == code:
            raise ValueError(f"{self.file} has {count} times: {self.text}")
        return planted


FAULTS = tuple(
    Fault(file, text, change, harm, test)
    for file, tests in tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8")).items()
    for test, faults in tests.items()
    for harm, (text, change) in faults.items()
)
