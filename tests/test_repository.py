"""Protects what contributors expect: workflows, issue forms, hooks and citation, each against its published schema.

Run alone: pytest -q tests/test_repository.py
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import PARTS, ROOT

SCHEMAS = {
    "github-workflows": sorted(ROOT.glob(".github/workflows/*.yml")),
    "github-issue-forms": sorted(
        set(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")) - {ROOT / ".github/ISSUE_TEMPLATE/config.yml"}
    ),
    "github-issue-config": [ROOT / ".github/ISSUE_TEMPLATE/config.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}
WORKFLOW = ROOT / ".github/workflows/ci.yml"


def check(schema: str, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_for_github_follow_their_schema(schema: str) -> None:
    assert SCHEMAS[schema]
    done = check(schema, *SCHEMAS[schema])
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_workflow_with_a_misspelt_key_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "ci.yml"
    wrong.write_text(WORKFLOW.read_text().replace("runs-on:", "run-on:"))
    assert check("github-workflows", wrong).returncode == 1


def actions_of(text: str) -> dict[str, bool]:
    """The actions of a workflow, each with whether a digest names it, with its version beside."""
    uses = re.findall(r"(?m)^ +- uses: (\S+)(.*)$", text)
    pinned = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v[\d.]+")
    return {name: pinned.fullmatch(name + comment) is not None for name, comment in uses}


def test_actions_of_others_are_named_by_digest() -> None:
    """A tag can be moved to other code, which the trusted publisher would run."""
    texts = [path.read_text() for path in SCHEMAS["github-workflows"]]
    actions = {name: good for text in texts for name, good in actions_of(text).items()}
    assert len(actions) >= 5 and all(actions.values()), actions
    assert actions_of("    - uses: actions/checkout@v4\n") == {"actions/checkout@v4": False}


def test_images_that_others_build_are_named_by_digest() -> None:
    by_digest = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")
    workflows = [yaml.safe_load(path.read_text()) for path in SCHEMAS["github-workflows"]]
    jobs = [job for workflow in workflows for job in workflow["jobs"].values()]
    images = [job["container"]["image"] for job in jobs if "container" in job]
    images += re.findall(r"(?m)^ARG BASE=(.+)$", DOCKERFILE.read_text())
    assert len(images) == 3 and all(map(by_digest.fullmatch, images)), images
    assert not by_digest.fullmatch("debian:bookworm")


def test_in_six_nights_every_slow_test_has_had_its_turn() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/slow.yml").read_text())["jobs"]["turns"]
    turn, _, command = job["steps"][-1]["run"].rpartition(" .ci/run ")
    assert command == "test-long"

    def turns(nights: range) -> set[int]:
        parts = [turn.replace("${{ matrix.part }}", str(part)) for part in job["strategy"]["matrix"]["part"]]
        lines = [f"GITHUB_RUN_NUMBER={night}; {part}; echo $TURN" for night in nights for part in parts]
        printed = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout
        return {int(word) % PARTS for word in printed.split()}

    assert turns(range(70, 76)) == set(range(PARTS)) > turns(range(70, 75))


def test_only_the_last_job_of_a_release_has_a_right_and_it_runs_nothing_of_ours() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    assert {name for name, job in jobs.items() if "permissions" in job} == {"publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["needs"] == "try"
    assert [step for step in jobs["publish"]["steps"] if "run" in step] == []
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """The files that a release compares with its tag, and the program."""
    (tmp_path / ".ci").mkdir()
    for name in (".ci/release", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def released(folder: Path, *tag: str) -> tuple[int, list[str]]:
    """Exit code and complaints; an interpreter that does nothing builds the packages."""
    command = [".ci/release", *tag]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHON": "true"}, capture_output=True, text=True)
    return done.returncode, done.stderr.splitlines()


def test_a_tag_that_is_not_the_version_of_the_files_is_refused(release: Path) -> None:
    citation, changes = release / "CITATION.cff", release / "CHANGELOG.md"
    written, listed = citation.read_text(), changes.read_text()
    undated = re.sub("(?m)^date-released: .*\n", "", written)
    version = yaml.safe_load(written)["version"]
    assert listed.count(f"\n## {version}, ") == 1
    citation.write_text(undated)
    code, complaints = released(release, "v9.9.9")
    assert code == 2 and [line.split(":")[0] for line in complaints] == ["CITATION.cff", "CITATION.cff", "CHANGELOG.md"]
    assert complaints[0] == (
        f"CITATION.cff: version is {version}, and the tag is v9.9.9; write v{version}, or the tag's version there"
    )
    citation.write_text(f"{undated}date-released: 2027-01-31\n")
    code, complaints = released(release, f"v{version}")
    assert code == 2 and complaints[0].endswith(f"write ## {version}, 2027-01-31")
    changes.write_text(re.sub(r"(?m)^## .*$", f"## {version}, 2027-01-31", listed, count=1))
    assert released(release, f"v{version}") == (0, [])
    assert check("citation-file-format", citation).returncode == 0


def test_the_workflow_runs_ci_and_a_quick_lane_for_each_python() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    assert ".ci/run" in steps
    assert "make test" in steps
    assert jobs["quick"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


def test_a_lane_has_the_oldest_libraries_that_the_page_on_installing_names() -> None:
    steps = [step.get("run", "") for step in yaml.safe_load(WORKFLOW.read_text())["jobs"]["oldest"]["steps"]]
    assert any("--group oldest" in step for step in steps)
    page = (ROOT / "docs/install.md").read_text()
    pins = dict(re.findall(r"(?m)^(\w+)==(\S+)", (ROOT / "requirements.txt").read_text()))
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    oldest = dict(package.split("==") for package in groups["oldest"])
    for library in ("transformers", "accelerate", "peft", "datasets", "deepspeed"):
        assert f"| {library} | {pins[library]} | {oldest.get(library, pins[library])} |" in page


def test_the_hooks_are_valid_and_run_what_make_lint_runs() -> None:
    path = ROOT / ".pre-commit-config.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    hooks = [hook["entry"] for hook in yaml.safe_load(path.read_text())["repos"][0]["hooks"]]
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    for words in (["ruff", "check"], ["ruff", "format"], ["mypy"]):
        command = f".venv/bin/{' '.join(words)}"
        assert command in lint and any(entry.startswith(command) for entry in hooks)


DOCKERFILE = ROOT / "Dockerfile"


def copied() -> set[str]:
    """Paths that the Dockerfile copies."""
    lines = re.findall(r"(?m)^COPY (.+)$", DOCKERFILE.read_text())
    return {path for line in lines for path in line.split()[:-1]}


def test_the_image_holds_what_the_wheel_ships_and_nothing_that_is_not_here() -> None:
    assert len(copied()) > 12 and all((ROOT / path).exists() for path in copied())
    assert {
        "cookbook",
        "simulated_gpus",
        "recipes",
        "accelerate_configs",
        "ds_configs",
        "train.py",
        "Makefile",
        "slurm",
    } <= copied()
    ignored, *kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignored == "*" and {line.removeprefix("!") for line in kept if line.startswith("!")} == copied()


def test_the_image_is_made_as_the_readme_says_and_its_user_has_no_privileges() -> None:
    text, install = DOCKERFILE.read_text(), (ROOT / "docs/install.md").read_text()
    page = (ROOT / "README.md").read_text() + install
    targets = set(re.findall(r"make ([a-z][a-z-]+)", text.replace("install -y --no-install-recommends make", "")))
    assert targets == {"setup", "quickstart"} and all(f"make {target}" in page for target in targets)
    assert "venv --system-site-packages" in text, "a torch of the base image stays"
    assert int(re.search(r"(?m)^USER (\d+)$", text)[1]) > 999
    assert not re.search(r"(?i)(token|secret|password|api_key)", text)
    commands = [re.split(r"  +|\\", line)[0].strip() for line in re.findall(r"(?m)^#   (docker .+)$", text)]
    assert len(commands) == 4 and all(command in install for command in commands)


def test_the_dev_container_runs_what_the_readme_says() -> None:
    settings = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    # Keys of the published schema, devcontainers/spec at 08c3f97, which check-jsonschema does not have.
    known = {"name", "image", "onCreateCommand", "postCreateCommand", "containerEnv", "customizations"}
    assert settings.keys() == known
    assert settings["postCreateCommand"] == "make setup" and "sh system.sh" in settings["onCreateCommand"]
    python = settings["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert python == "${containerWorkspaceFolder}/.venv/bin/python"


FOLDERS = ("cookbook", "simulated_gpus", "tests", "benchmarks")


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands alone: docstrings, and what follows an assignment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


MAY_BEGIN_SO = re.compile(r"[\"']{3}\\?\s*Of\s")
"""Files without it need not be parsed, which takes seconds for all of them."""


def test_no_docstring_begins_with_of() -> None:
    """Such a one does not name its thing: who reads it must read the code around it too."""
    written = {"module": '"""Of it."""', "class": 'class A:\n    """Of it."""', "value": 'A = 1\n"""\nOf it."""'}
    for source in written.values():
        assert [text.split() for _, text in texts_of(source)] == [["Of", "it."]] and MAY_BEGIN_SO.search(source)
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 300
    places = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        if MAY_BEGIN_SO.search(source := path.read_text(encoding="utf-8"))
        for line, text in texts_of(source)
        if text.split()[:1] == ["Of"]
    ]
    assert not places, f'docstrings that begin with "Of"; name the thing first: {" ".join(places)}'
