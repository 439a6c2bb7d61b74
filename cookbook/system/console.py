"""Columns and colours on the terminal, by rich, plain text of a fixed width where there is none; and sizes in words."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, TextIO, TypeAlias

from cookbook.system.masking import mask_secrets

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Row: TypeAlias = "str | Sequence[str | Text]"
"""A row of a page: a line, or cells."""
WIDTH = 120
"""Columns without a terminal, and at most on one."""
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Control characters (C0 but tabs and line ends, DEL, C1), and those that turn or break lines."""
BEYOND = 10_000
"""More columns than any page has."""


def console(file: TextIO | None = None) -> "Console":
    """A console on stdout or `file` that takes nothing for markup; coloured on a terminal, unless NO_COLOR is set."""
    from rich.console import Console  # takes 0.1 s

    terminal = Console(file=file, markup=False, highlight=False, emoji=False)
    terminal.width = min(terminal.width, WIDTH) if terminal.is_terminal else WIDTH
    return terminal


def width() -> int:
    """Columns of a page on stdout."""
    return console().width


def printable(text: str) -> str:
    """A text of others, as of a row, an answer or a file's name, for a terminal: what would move its cursor, write its
    clipboard or turn its lines around stands in Python's notation, and secrets of the environment are masked.
    """
    return _HIDDEN.sub(lambda match: ascii(match[0])[1:-1], mask_secrets(text))


def say(
    *texts: object,
    sep: str = " ",
    end: str = "\n",
    file: TextIO | None = None,
    flush: bool = False,
    is_coloured: bool = False,
) -> None:
    """`print` of what `printable` leaves, for all that the package prints.

    Args:
        is_coloured: the texts are of `page` or of a style, which had all texts of others shown: its colours remain.
    """
    text = sep.join(map(str, texts))
    if _listener is not None:
        _listener(printable(text), file is sys.stderr)
        return
    parts = re.split(r"(\x1b\[[\d;]*m)", text) if is_coloured else [text]
    print("".join(part if i % 2 else printable(part) for i, part in enumerate(parts)), end=end, file=file, flush=flush)


_listener: Callable[[str, bool], None] | None = None


@contextmanager
def heard_by(listener: Callable[[str, bool], None]) -> Iterator[None]:
    """Give the texts of `say` to a function, with whether they were for stderr, and print none."""
    global _listener
    _listener = listener
    try:
        yield
    finally:
        _listener = None


def show_all_letters() -> None:
    """Make stdout and stderr write letters that their encoding lacks, as of a path, in Python's notation."""
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="backslashreplace")


def can_show(text: str, encoding: str | None) -> bool:
    """Return whether a terminal of this encoding has all letters of a text."""
    try:
        text.encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def colour(text: str, style: str) -> "Text":
    """A cell of `page` in a style of rich, such as "green"."""
    from rich.text import Text

    return Text(printable(text), style)


def page(*rows: Row, indent: int = 2, file: TextIO | None = None) -> str:
    """Text for `print`, to stdout or `file`: a line stays as it is, cells stand in columns that all rows share.

    Where the rows are wider than the terminal, the widest columns wrap. A word is broken on a terminal alone, where it
    is longer than half of it. A row of fewer cells gives its last one the columns that it lacks.
    """
    from rich.table import Table

    to = console(file)
    room, longest = to.width - indent, to.width // 2 if to.is_terminal else BEYOND
    to.width = BEYOND  # rich narrows a column below its longest word, though another one could wrap
    cells: list[Sequence[str | Text]] = [
        () if isinstance(row, str) else [printable(cell) if isinstance(cell, str) else cell for cell in row]
        for row in rows
    ]
    count = max(map(len, cells), default=0)
    spans = [[to.measure(row[i]) for row in cells if i < len(row) - 1 or len(row) == count] for i in range(count)]
    widths = [max(span.maximum for span in column) for column in spans]
    least = [min(longest, max(span.minimum for span in column)) for column in spans]
    gap = 2 if count < 5 or sum(widths) + 2 * (count - 1) <= room else 1
    while sum(widths) + gap * (count - 1) > room and widths != least:
        _, widest = max((width, i) for i, width in enumerate(widths) if width > least[i])
        widths[widest] -= 1
    lines: list[str] = []
    for length, group in groupby(zip(rows, cells, strict=True), key=lambda pair: len(pair[1])):
        if not length:
            lines += [printable(str(row)) for row, _ in group]
            continue
        table = Table.grid(padding=(0, gap, 0, 0))
        *before, last = widths[:length]
        if length < count:
            last = room - sum(before) - gap * len(before)
        for width in (*before, last):
            table.add_column(width=width, overflow="fold")
        for _, row in group:
            table.add_row(*row)
        with to.capture() as capture:
            to.print(table)
        lines += [(" " * indent + line).rstrip() for line in capture.get().removesuffix("\n").split("\n")]
    return "\n".join(lines)


def several(count: int, what: str) -> str:
    """1 GPU, 2 GPUs; 1 process, 2 processes."""
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('ss') else 's'}"


def in_bytes(count: float) -> str:
    """A size in its unit: 3.2 GiB, 64 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 10 or count == int(count) else f"{count:.1f} {unit}"
