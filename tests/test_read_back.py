"""Settings that an engine reads back of itself are those that run: each that it compares, changed, is refused.

python -m pytest -q tests/test_read_back.py
"""

import json
from pathlib import Path

import pytest

from tests.curves import Lab
from tests.experts import experts, needs_experts

QUICK = ("single", "ddp", "fsdp1", "fsdp2", "zero2", "zero3", "fsdp2_tp", "pp_tp")
SLOW = ("fsdp2_ep", "zero3_hpz", "zero3_nvme")


def marked(mark: pytest.MarkDecorator, *strategies: str) -> list:
    return [pytest.param(name, marks=mark) for name in strategies]


@pytest.mark.parametrize("strategy", [*marked(pytest.mark.core, *QUICK), *marked(pytest.mark.slow, *SLOW)])
def test_every_setting_that_is_compared_is_refused_when_another_runs(lab: Lab, tmp_path: Path, strategy: str):
    settings = {"run.output_dir": str(tmp_path / "run")}
    if needs_experts(strategy):
        settings |= experts(lab)
    done = lab.start(strategy, settings, program=("tests/changed_settings.py",))
    said = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("CHANGED ")]
    assert len(said) == 1, done.stdout[-3000:]
    counts = json.loads(said[0])
    assert counts["number"] > 5 and not counts["unknown"] and not counts["unnoticed"], counts
