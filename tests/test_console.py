"""Protects what a terminal shows: whole words, shared columns, and nothing taken for markup.

python -m pytest -q tests/test_console.py
"""

import os
import pty
import subprocess
import sys
import termios

import pytest
from conftest import ROOT, clean_environment

from cookbook.system.console import in_bytes, page

ROWS = [("a [x]", "word " * 40, "place:1"), ("b", "/" + "p" * 60, "[/red]")]


def test_rows_share_their_columns_and_nothing_is_lost():
    lines = page("TITLE [bold]", *ROWS, ("c", "long " * 40)).splitlines()
    assert lines[0] == "TITLE [bold]" and lines[1].startswith("  a [x]  word word")
    assert lines[1].index("place:1") == next(line for line in lines if "ppp" in line).index("[/red]")
    assert sum(line.count("word") for line in lines) == sum(line.count("long") for line in lines) == 40
    assert max(map(len, lines)) <= 120 and not any(line != line.rstrip() for line in lines)
    assert len(next(line for line in lines if "long" in line)) > 110, (
        "a row of fewer cells has the room of those it lacks"
    )


def test_a_word_longer_than_a_page_stays_whole_where_no_terminal_is():
    assert f"  a  {'p' * 300}\n" in page(("a", "p" * 300), ("b", "short")) + "\n"


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("extra", [{}, {"NO_COLOR": "1"}], ids=["colour", "no colour"])
def test_a_page_is_as_wide_as_its_terminal(columns, extra):
    code = "from cookbook.system.console import colour, page; import sys"
    code += f"; print(page(*{ROWS!r}, ('c', colour('fits', 'green'), '')))"
    ours_too = ("NO_COLOR", "COLUMNS")  # pytest-xdist sets the second
    settings = {name: value for name, value in clean_environment().items() if name not in ours_too} | extra
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=settings | {"TERM": "xterm"}, stdout=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert ("\x1b[32mfits" in shown) == (not extra)
    plain = shown.replace("\x1b[32m", "").replace("\x1b[0m", "")
    assert "\x1b" not in plain and max(map(len, plain.splitlines())) <= columns
    assert plain.count("word") == 40 and plain.count("p") == 61


def test_a_size_has_the_unit_that_shows_it():
    assert [in_bytes(count) for count in (0, 900, 3 << 20, 3.25 * 2**30)] == ["0 B", "900 B", "3 MiB", "3.2 GiB"]
