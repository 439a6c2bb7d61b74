"""Protects what contributors expect: workflows, issue forms, hooks and citation, each against its published schema.

Run alone: pytest -q tests/test_repository.py
"""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

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


def test_the_workflow_runs_ci_and_a_quick_lane_for_each_python() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    assert ".ci/run" in steps
    assert "make test-quick" in steps
    assert jobs["quick"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


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
