"""Protects what agents read: AGENTS.md, the skills and llms.txt are true, and their commands run as they stand.

python -m pytest -q -m "slow or not slow" tests/test_agents.py
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, clean_environment
from documented import documented
from test_docs import TARGETS, broken_links, fences, missing_paths, text_of, workplace

from cookbook.commands.shared.answer_forms import ANSWERS

SKILLS = sorted((ROOT / ".agents/skills").glob("*/SKILL.md"))
FILES = ["AGENTS.md", *(str(path.relative_to(ROOT)) for path in SKILLS)]
MOST_LINES = {"AGENTS.md": 65} | {str(path.relative_to(ROOT)): 80 for path in SKILLS}


def body(file: str) -> str:
    """A file's text without its front matter."""
    return re.sub(r"\A---\n.*?^---\n", "", text_of(file), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.parent.name)
def test_a_skill_has_the_front_matter_by_which_tools_choose_it(path: Path) -> None:
    """By https://agentskills.io/specification: the name is that of the folder, the description says when to use it."""
    front = yaml.safe_load(path.read_text().split("---\n")[1])
    assert front.keys() == {"name", "description"} and front["name"] == path.parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", front["name"]) and len(front["name"]) <= 64
    assert "Use when" in front["description"] and len(front["description"]) <= 1024


def test_agents_md_names_each_skill() -> None:
    linked = re.findall(r"\]\((\.agents/[^)]+)\)", text_of("AGENTS.md"))
    assert len(SKILLS) == 3 and set(linked) == set(FILES[1:])


@pytest.mark.parametrize("file", FILES)
def test_what_a_file_for_agents_names_is_there(file: str) -> None:
    text = body(file)
    assert len(text_of(file).splitlines()) <= MOST_LINES[file], "short, or it is not read"
    assert not re.search(r"(?m)^[ \t]+```", text), "a fence that is indented is none for many tools"
    assert broken_links(file, text)[1] == []
    of_others_or_a_run = ("theirs", "export", "hang", "nonfinite", ".claude")
    assert [path for path in missing_paths(text)[1] if not path.startswith(of_others_or_a_run)] == []
    assert fences(text, "bash")


def test_llms_txt_has_the_pages_of_the_index_with_their_words() -> None:
    index = text_of("docs/README.md")
    expected = [
        line.replace("](../", "](").replace("](", "](docs/", 1) if "](../" not in line else line.replace("](../", "](")
        for line in index.splitlines()
        if line.startswith(("- [", "## "))
    ]
    title, _, summary, *lines = text_of("llms.txt").splitlines()
    assert title.startswith("# ") and summary.startswith("> ")
    assert [line for line in lines if line.startswith(("- [", "## "))][: len(expected)] == expected
    linked = re.findall(r"\]\(([^)]+)\)", text_of("llms.txt"))
    assert len(linked) > 35 and [name for name in linked if not (ROOT / name).exists()] == []


def run_blocks(file: str, folder: Path) -> list[tuple[str, subprocess.CompletedProcess[str]]]:
    """The outcome of each line, or block with a file in it, of a file's fences, one after another in a folder."""
    programs = folder.parent / "bin"
    programs.mkdir()
    (programs / "cookbook").write_text(f'#!/bin/sh\nexec {sys.executable} -m cookbook "$@"\n')
    (programs / "cookbook").chmod(0o755)
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = clean_environment(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PATH=path)
    outcomes = []
    for block in fences(body(file), "bash"):
        for line in [block] if "<<" in block else block.splitlines():
            if line.startswith("make "):  # what CI runs
                assert line.split()[1] in TARGETS
                continue
            done = subprocess.run(
                ["bash", "-ec", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
            )
            outcomes.append((line, done))
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_each_command_runs_as_it_stands(file: str, tmp_path: Path) -> None:
    outcomes = run_blocks(file, workplace(tmp_path / "work"))
    assert len(outcomes) >= 5
    for line, done in outcomes:
        expected = (0, 1, 2) if "cookbook doctor" in line else (0,)  # which judges the machine
        assert done.returncode in expected, f"{line}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        if "--json" in line:
            (command,) = re.findall(rf"cookbook ({'|'.join(ANSWERS)}) ", line)
            answer = documented(command, done.stdout)
            assert command != "next" or answer["verdict"] == "finished"
