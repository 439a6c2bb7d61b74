"""Protects the first step's look for trained parameters that get no gradient: they are named, under every strategy.

python -m pytest -q tests/test_unreached.py -m "slow or not slow"
"""

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.curves import Curve, Lab
from tests.turns import others_by_turn

SLOW = pytest.mark.slow
THREE = {"run.stop_after_steps": "3"}
DECAY = 0.01
"""The recipe's."""
SAID = "2 trained parameters got no gradient in the first step"
NAMES = "planted.bias, planted.weight"


@pytest.mark.parametrize(
    "strategy",
    ["fsdp2", "zero2", *(pytest.param(name, marks=SLOW) for name in ("single", "zero1", "zero3", "tp", "pp"))],
)
def test_parameters_without_a_gradient_are_named_once(lab: Lab, strategy: str):
    folder, printed = lab.attempt(strategy, THREE, sabotage="unused_module")
    assert (folder / "exit_code").read_text() == "75", printed
    assert printed.count(f"{SAID}: {NAMES}") == 1


@pytest.mark.parametrize(
    "strategy", ["single", "fsdp2", *others_by_turn(["fsdp1", "pp", "zero1", "zero2", "zero3"], ["zero3"])]
)
def test_their_gradient_is_zero_and_their_decay_that_of_all_weights(lab: Lab, strategy: str):
    """Matrices of ones, after three steps of SGD by hand; torch's own would leave them as they are."""
    folder, printed = lab.attempt(strategy, THREE, sabotage="unused_matrix")
    assert (folder / "exit_code").read_text() == "75", printed
    rates = [line["learning_rate"] for line in Curve(folder).steps]
    (saved,) = (folder / "checkpoints").glob("step-*")
    held = {name: of for path in saved.glob("*.safetensors") for name, of in load_file(path).items()}
    planted = np.concatenate([of.flatten() for name, of in held.items() if name.startswith("planted.weight|weight|")])
    weight, momentum = 1.0, 0.0
    for rate in rates:
        momentum = 0.9 * momentum + DECAY * weight
        weight -= rate * momentum
    assert planted.size == 64 and len(rates) == 3
    assert np.abs(planted - weight).max() < 1e-7 < 1 - weight


def test_ddp_which_would_wait_for_them_ends_with_their_names(lab: Lab):
    folder, printed = lab.attempt("ddp", THREE, sabotage="unused_module")
    assert (folder / "exit_code").read_text() == "2" and "Traceback" not in printed, printed
    assert f"{SAID}, and DDP waits for them: {NAMES}; take fsdp2 or zero2" in printed


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_a_whole_model_is_not_complained_of(lab: Lab, strategy: str):
    printed = (lab.run(strategy).folder / "output.txt").read_text()
    assert "step 20/20" in printed and "no gradient" not in printed
