"""Protects the look at a gradient that leaves what was usual: the layer that holds it is named, under every strategy.

python -m pytest -q tests/test_unusual.py -m "slow or not slow"
"""

import json
import math
from pathlib import Path

import pytest

from cookbook.commands.cli import main
from cookbook.training.engine.unusual import LEAST, MOST, TIMES, UnusualGradient, UsualNorms, layer_of
from tests.curves import Lab

SLOW = pytest.mark.slow
ON = {"run.skip_nonfinite_steps": "9"}
LAYER, WEIGHT = "model.layers.1", "model.layers.1.mlp.up_proj.weight"


def gradients(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "gradient"]


SELDOM = ("ddp", "zero1", "hsdp", "pp_fsdp2", "zero2_offload", "zero3_offload", "fsdp2_offload")
SELDOM += ("zero3_hpz", "fsdp2_tp", "fsdp2_sp", "ddp_tp", "hsdp_tp", "pp_tp_fsdp2")


@pytest.mark.parametrize(
    "strategy",
    ["fsdp2", "zero3", "pp"]
    + [pytest.param(name, marks=SLOW) for name in ("fsdp1", "zero2", "tp")]
    + [pytest.param(name, marks=[SLOW, pytest.mark.thorough]) for name in SELDOM],
)
def test_the_layer_that_explodes_is_named_once_with_the_share_that_one_process_finds(lab: Lab, strategy: str):
    folder, reference = (lab.run(name, ON, sabotage="layer_1_explodes").folder for name in (strategy, "single"))
    large, broken = gradients(folder)
    assert (large["step"], broken["step"]) == (14, 17), "each once, though it lasts"
    assert large["norm"] > TIMES * large["usual"] and large["most_in"] == WEIGHT
    assert next(iter(large["layers"])) == LAYER and large["layers"][LAYER] > 0.5
    expected = gradients(reference)[0]["layers"]
    assert large["layers"] == pytest.approx(expected, abs=2e-4) and len(expected) > 1
    assert broken["norm"] is None and broken["not_finite"] == [WEIGHT] and broken["parameters"] == "1 of 20"
    printed = (folder / "output.txt").read_text()
    assert printed.count("step 14: gradient norm ") == printed.count("step 17: the gradient is not finite in 1 of") == 1
    assert "of its square" in printed


def test_a_weight_that_is_scaled_up_is_seen_in_the_layer_whose_gradient_follows(lab: Lab):
    (event,) = gradients(lab.run("single", sabotage="weight_scaled_up_in_step_14").folder)
    assert event["step"] == 14 and event["norm"] > TIMES * event["usual"]
    assert next(iter(event["layers"])) == "model.embed_tokens" and event["layers"]["model.embed_tokens"] > 0.9


def test_the_report_shows_the_layers(lab: Lab):
    folder = lab.run("single", ON, sabotage="layer_1_explodes").folder
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    share = gradients(folder)[0]["layers"][LAYER]
    assert f"layers {share:.0%} {LAYER}, " in page and f"most in {WEIGHT}" in page and f"not finite {WEIGHT}" in page
    assert "Red: a step was skipped, or its gradient was unusual" in page


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_of_a_usual_run_nothing_is_said(lab: Lab, strategy: str):
    assert gradients(lab.run(strategy).folder) == []


def begins(norms: list[float], *, overflows: bool = False) -> list[int]:
    usual = UsualNorms(overflows=overflows)
    return [i for i, norm in enumerate(norms) if usual.begins(norm)]


def test_the_rule():
    calm = [1.0, 1.2, 0.8] * 10
    large = 1.0 * TIMES + 0.1
    assert begins(calm) == [] and begins([100.0, *calm]) == [], "nothing is usual yet"
    assert begins([*calm, large, large, 1.0, large]) == [30, 33], "once, and again after it was usual"
    assert begins([*calm[: LEAST - 1], large]) == [] and begins([*calm[:LEAST], large]) == [LEAST]
    assert begins([math.nan, *calm, large, math.inf, math.nan, large]) == [0, 31, 32, 34]
    assert begins([math.inf, *calm, math.inf, large], overflows=True) == [32], "fp16's scaler looks for overflows"
    assert begins([*calm, *[50.0] * MOST, *[1.0] * 5, 50.0]) == [30], "what lasts becomes usual"


def test_layers_are_distinguished_and_modules_outside_of_them():
    names = {
        "model.layers.11.mlp.up_proj.weight": "model.layers.11",
        "base_model.model.model.layers.3.self_attn.q_proj.lora_A.default.weight": "base_model.model.model.layers.3",
        "transformer.h.0.ln_1.bias": "transformer.h.0",
        "model.embed_tokens.weight": "model.embed_tokens",
        "bias": "bias",
    }
    assert {name: layer_of(name) for name in names} == names
    squares = dict.fromkeys(names, 1.0) | {"model.layers.11.self_attn.q_proj.weight": 2.0, "model.norm.weight": 0.01}
    unusual = UnusualGradient(norm=30.0, usual=2.0, squares=squares)
    assert next(iter(unusual.shares)) == LAYER + "1" and unusual.shares[LAYER + "1"] == pytest.approx(3 / 7.01)
    assert sum(unusual.shares.values()) == pytest.approx(1) and "model.norm" not in unusual.details()["layers"]
    assert unusual.in_words().startswith(
        "gradient norm 30, 15 times the usual 2; of its square 43% in model.layers.11,"
    )
    everywhere = UnusualGradient(norm=math.nan, usual=2.0, squares=dict.fromkeys(squares, math.nan))
    assert everywhere.in_words() == "the gradient is not finite in 7 of 7 trained parameters"
    somewhere = UnusualGradient(norm=math.inf, usual=2.0, squares={"a": 1.0, "b": math.inf, "c": math.nan})
    assert somewhere.details() == {"norm": None, "not_finite": ["b", "c"], "parameters": "2 of 3"}


def test_what_is_recorded_of_a_gradient_by_hand():
    """Squares of 0.01, 3.24 and 0.75, of 4 in all, so that the norm is 2."""
    squares = {"model.layers.0.a": 0.01, "model.layers.1.a": 3.24, "model.layers.1.b": 0.0, "lm_head.weight": 0.75}
    details = json.loads(json.dumps(UnusualGradient(norm=2.0, usual=0.1, squares=squares).details()))
    shares = {"model.layers.1": 0.81, "lm_head": 0.1875}
    assert details == {"norm": 2.0, "usual": 0.1, "layers": shares, "most_in": "model.layers.1.a"}


def test_after_gradients_of_zero_none_is_unusual():
    usual = UsualNorms(overflows=False)
    assert not any(usual.begins(0.0) for _ in range(LEAST)) and not usual.begins(1.0)
