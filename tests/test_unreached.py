"""Protects the first step's look for trained parameters that get no gradient: they are named, under every strategy.

python -m pytest -q tests/test_unreached.py -m "slow or not slow"
"""

import pytest

from tests.curves import Lab

SLOW = pytest.mark.slow
THREE = {"run.stop_after_steps": "3"}
SAID = "2 trained parameters got no gradient in the first step"
NAMES = "planted.bias, planted.weight"


@pytest.mark.parametrize(
    "strategy", ["fsdp2", "zero2", *(pytest.param(one, marks=SLOW) for one in ("single", "zero1", "zero3", "tp", "pp"))]
)
def test_parameters_without_a_gradient_are_named_once(lab: Lab, strategy: str):
    folder, printed = lab.attempt(strategy, THREE, sabotage="unused_module")
    assert (folder / "exit_code").read_text() == "75", printed
    assert printed.count(f"{SAID}: {NAMES}") == 1


def test_ddp_which_would_wait_for_them_ends_with_their_names(lab: Lab):
    folder, printed = lab.attempt("ddp", THREE, sabotage="unused_module")
    assert (folder / "exit_code").read_text() == "2" and "Traceback" not in printed, printed
    assert f"{SAID}, and DDP waits for them: {NAMES}; take fsdp2 or zero2" in printed


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_a_whole_model_is_not_complained_of(lab: Lab, strategy: str):
    printed = (lab.run(strategy).folder / "output.txt").read_text()
    assert "step 20/20" in printed and "no gradient" not in printed
