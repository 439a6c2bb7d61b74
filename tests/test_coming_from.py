"""Protects docs/coming_from.md: each file of another project becomes the recipe that the page shows.

python -m pytest -q tests/test_coming_from.py
"""

import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT

from cookbook.commands.cli import main

PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
BLOCK = r"```\w+\n(.*?)```"
SECTION = rf"(?ms)^## ([^\n]+)\n\n(\S+), run there by\n\n{BLOCK}\n\n{BLOCK}\n\n{BLOCK}\n\n{BLOCK}"
SECTIONS = {title: parts for title, *parts in re.findall(SECTION, PAGE)}


def converted(parts: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The recipe that the section's command writes, or prints where a file is half a run."""
    name, _, text, command, _ = parts
    (folder / name).write_text(text)
    program, *words = shlex.split(command)
    assert program == "cookbook" and main(words) == 0
    said, recipe = capsys.readouterr().out, folder / "recipes/mine.yaml"
    if recipe.exists():
        first, _, rest = recipe.read_text().partition("\n")
        assert first.startswith("# Converted by")
        return rest
    (printed,) = re.findall(r"for a recipe:\n(.*?)^to know", said, re.DOTALL | re.MULTILINE)
    return printed


def test_every_project_of_the_page_has_a_file_a_command_and_a_recipe():
    titles = re.findall(r"(?m)^## (.+)", PAGE)
    assert titles == [*SECTIONS, "Then"] and len(SECTIONS) == 7


@pytest.mark.parametrize("project", SECTIONS)
def test_a_file_of_the_project_becomes_the_recipe_shown(project, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    assert converted(SECTIONS[project], tmp_path, capsys) == SECTIONS[project][-1]


def test_another_value_in_a_file_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    name, there, text, command, recipe = SECTIONS["TRL"]
    assert "max_steps: 500" in text
    text = text.replace("max_steps: 500", "max_steps: 501")
    assert converted([name, there, text, command, recipe], tmp_path, capsys) != recipe
