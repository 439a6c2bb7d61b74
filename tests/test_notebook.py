"""The notebook runs from its top to its bottom, on two CPU processes. python -m pytest -m slow tests/test_notebook.py

Its code cells run one after another in one process of their own, as a kernel does; Jupyter itself has no part in it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from tests.curves import environment

NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"
RUN = '"outputs/notebook"'


def cells() -> list[dict]:
    return json.loads(NOTEBOOK.read_text())["cells"]


def code() -> str:
    return "\n\n".join("".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code")


def test_outputs_are_not_committed():
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert len(code) > 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.thorough
@pytest.mark.slow
def test_all_cells_run_and_the_run_is_resumed_under_another_strategy(tmp_path: Path):
    assert code().count(RUN) == 1
    program = tmp_path / "cells.py"
    program.write_text(code().replace(RUN, repr(str(tmp_path / "run"))))
    done = subprocess.run(
        [sys.executable, program],
        cwd=NOTEBOOK.parent,
        env=environment(MPLBACKEND="agg", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for printed in ("PLAN of recipes/quickstart.yaml", "stopped after step 12", "resumes after step 12", "--- answer"):
        assert printed in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
    assert json.loads((tmp_path / "run/run.json").read_text())["strategy"]["file"].endswith("fsdp2.yaml")
