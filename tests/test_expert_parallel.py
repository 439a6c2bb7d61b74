"""Expert parallel: tokens go to the processes that have their experts, and the curve is that of one process.

pytest -m "slow or not slow" tests/test_expert_parallel.py
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from benchmarks.tiny_models import tiny_config
from cookbook.config.mesh import Mesh
from cookbook.config.recipe import load_recipe
from cookbook.config.strategy import find_strategy, load_strategy
from cookbook.facts.meshes import mesh_problem
from cookbook.facts.model_types import TYPES
from cookbook.forecast.costs.flops import ModelSizes, Step, sizes_of
from cookbook.forecast.costs.traffic import transfers
from cookbook.forecast.ranking import forecast_all
from cookbook.forecast.skeleton import skeleton
from cookbook.system.hardware import parse_machines
from cookbook.training.models.structure import not_served
from tests.curves import ROOT, Curve, Lab, distance
from tests.experts import experts
from tests.test_equivalence import ADAMW_LOSS, ADAMW_NORM, SGD_LOSS, SGD_NORM, STEPS
from tests.test_equivalence_features import preferences
from tests.test_forecast_speed import messages_of_step_3

FOUR = {"batch.micro_batch_size": "2"}
ADAMW = {"optim.name": "adamw", "optim.learning_rate": "3e-3", "optim.max_grad_norm": "0"}
MUON = {"optim.name": "muon", "optim.learning_rate": "3e-3"}
SLOW, THOROUGH = pytest.mark.slow, [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.core
def test_with_clipping_and_a_tied_embedding_the_curve_is_that_of_one_process(lab: Lab):
    model = experts(lab) | STEPS
    curve = lab.run("fsdp2_ep", model | FOUR, processes=4, launched=True)
    apart = distance(curve, lab.run("single", model))
    assert curve.record["strategy"]["experts of this process"] == [True, 3]
    clipped = [line for line in curve.steps if line["grad_norm"] > 1.0]
    assert len(clipped) >= len(curve.steps) / 4, "this case is meant to clip"
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM and apart.weight < 1e-6, apart


@pytest.mark.slow
def test_adamw_in_its_band(lab: Lab):
    settings = experts(lab, tie_word_embeddings=False) | ADAMW
    apart = distance(lab.run("fsdp2_ep", settings | {"batch.micro_batch_size": "4"}), lab.run("single", settings))
    assert apart.loss < ADAMW_LOSS and apart.norm < ADAMW_NORM, apart


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"data.packing": "true"}, marks=SLOW, id="packed"),
        pytest.param({"model.gradient_checkpointing": "true"}, marks=SLOW, id="checkpointing"),
        pytest.param({"model.gradient_checkpointing": "selective"}, marks=THOROUGH, id="selective"),
        pytest.param({"batch": "{global_batch_size: 16, micro_batch_tokens: 300}"}, marks=THOROUGH, id="budget"),
        pytest.param({"run.sample_every_steps": "8"}, marks=THOROUGH, id="samples"),
    ],
)
def test_what_a_recipe_chooses_changes_no_curve(lab: Lab, settings: dict[str, str]):
    model = experts(lab)
    apart = distance(lab.run("fsdp2_ep", model | FOUR | settings), lab.run("single", model))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


@pytest.mark.thorough
@pytest.mark.slow
def test_mixtral(lab: Lab):
    model = experts(lab, "mixtral")
    apart = distance(lab.run("fsdp2_ep", model | FOUR), lab.run("single", model))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


@pytest.mark.slow
@pytest.mark.thorough
def test_muon_whose_matrices_experts_are_not(lab: Lab):
    settings = experts(lab) | MUON
    apart = distance(lab.run("fsdp2_ep", settings | FOUR), lab.run("single", settings))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


@pytest.mark.slow
@pytest.mark.thorough
def test_an_adapter_on_attention(lab: Lab):
    adapter = {"adapter": "{name: lora, rank: 4, targets: [q_proj, k_proj, v_proj, o_proj]}"}
    settings = experts(lab) | adapter | {"optim.learning_rate": "0.3"}
    apart = distance(lab.run("fsdp2_ep", settings | FOUR), lab.run("single", settings))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


def in_float64(lab: Lab, strategy: str, settings: dict[str, str]) -> list[dict]:
    """The steps of a run, which ends when it would save."""
    folder, output = lab.attempt(strategy, settings, sabotage="in_float64")
    steps = Curve(folder).steps
    assert len(steps) == 20, output[-4000:]
    return steps


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "turns"])
def test_answers_differ_by_rounding_alone(lab: Lab, objective: str):
    """In float32 the norms of DPO differ by 4e-6, and by 2e-6 on one process with other micro-batches."""
    settings = preferences(lab, objective) | experts(lab)
    ours, theirs = in_float64(lab, "fsdp2_ep", settings), in_float64(lab, "single", settings)
    for own, other in zip(ours, theirs, strict=True):
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-12)
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-11)


@pytest.mark.slow
def test_two_processes_may_have_half_of_the_experts_each(lab: Lab):
    path = lab.folder / "ep_alone.yaml"
    text = (ROOT / "accelerate_configs/fsdp2_ep.yaml").read_text()
    path.write_text(text.replace("dp_shard_size: 2", "dp_shard_size: 1"))
    model = experts(lab)
    apart = distance(lab.run(str(path), model, processes=2), lab.run("single", model))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


@pytest.mark.parametrize(
    "mistake",
    [
        "experts_of_other_processes_left_out",
        pytest.param("shards_of_experts_counted_along_one_dimension", marks=SLOW),
        pytest.param("experts_divided_by_their_own_group_unchecked", marks=THOROUGH),
    ],
)
def test_a_mistake_leaves_the_curve(lab: Lab, mistake: str):
    model = experts(lab) | STEPS
    apart = distance(lab.run("fsdp2_ep", model | FOUR, sabotage=mistake), lab.run("single", model))
    assert apart.loss > 100 * SGD_LOSS or apart.norm > 100 * SGD_NORM, apart


def test_another_divisor_of_the_gradients_of_experts_is_refused(lab: Lab):
    folder, output = lab.attempt("fsdp2_ep", experts(lab) | FOUR, sabotage="experts_divided_by_their_own_group")
    assert (folder / "exit_code").read_text() != "0"
    assert "divisor of the gradients of experts: asked for {4.0}, found {2.0}" in output


# Messages.

STEP = Step(num_tokens=0, num_labelled=0, length=96, precision="no")


def test_messages_by_hand():
    """1,000 parameters of which each process has a quarter, 800 of experts: half for each process of a group."""
    sizes = ModelSizes(
        num_parameters=1800, num_trained=1800, num_matrix=0, num_matrix_trained=0, num_of_experts=800, num_routed=4,
        num_layers=2, hidden=8,
    )  # fmt: skip
    messages = transfers(load_strategy(find_strategy("fsdp2_ep")), sizes, replace(STEP, num_tokens=40), 4)
    asked = {message.what: (message.num_bytes, message.ranks, message.stride) for message in messages}
    assert asked == {
        **dict.fromkeys(("weights, forward", "weights, backward", "gradients"), (4 * 1000, 4, 1)),
        **dict.fromkeys(("experts, forward", "experts, backward", "gradients of experts"), (4 * 400, 2, 2)),
        "tokens to experts": (2 * 2 * 4 * 8 * 4 * 40 / 4, 2, 1),  # there and back, twice, of 10 tokens and 4 experts
    }


def in_a_step(curve: Curve, what: str) -> float:
    """Over all processes, the mean of steps 2 to 6, which evaluate nothing, of what they count from the start on.
    Step 7 has the rest of an epoch.
    """
    sent: dict[int, int] = {}
    for number, _, total in re.findall(rf"{what} (\d+) (\d+) (\d+)", (curve.folder / "output.txt").read_text()):
        sent[int(number)] = sent.get(int(number), 0) + int(total)
    return (sent[7] - sent[2]) / 5


@pytest.mark.slow
def test_a_real_step_sends_what_the_ledger_says(lab: Lab):
    """The control is the formula of fsdp2, which gathers all experts on each process."""
    # Two shards can share these experts evenly.
    model = experts(lab, num_experts=4, moe_intermediate_size=128, tie_word_embeddings=False)
    settings = model | FOUR | {"run.max_steps": "7", "schedule.warmup_steps": "2"}
    curve = lab.run("fsdp2_ep", settings, sabotage="bytes_and_positions")
    recipe = load_recipe(lab.folder / "recipe.yaml", [f"{key}={value}" for key, value in settings.items()])
    config = AutoConfig.from_pretrained(model["model"].removeprefix("{name_or_path: ").removesuffix("}"))
    sizes = sizes_of(config, skeleton(config, recipe))
    assert (sizes.num_of_experts, sizes.num_routed) == (2 * 4 * 3 * 64 * 128, 2 * 2)
    strategy = load_strategy(find_strategy("fsdp2_ep"))
    step = replace(STEP, num_tokens=in_a_step(curve, "POSITIONS"), micro_batches=2)

    def by_ledger(strategy) -> float:
        # gloo reduces and scatters by an all-reduce.
        return sum(
            message.sent * (2 if message.kind == "reduce-scatter" else 1)
            for message in transfers(strategy, sizes, step, 4)
        )

    measured, expected = in_a_step(curve, "SENT") / 4, by_ledger(strategy)
    other = by_ledger(replace(strategy, ep_size=1, dp_shard_size=4))
    print(measured, expected, other)
    assert measured == pytest.approx(expected, rel=0.03)
    assert other > 1.2 * measured


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute", [pytest.param("false", id="kept"), pytest.param("true", id="recomputed", marks=pytest.mark.thorough)]
)
def test_a_real_step_has_the_messages_of_the_ledger(lab: Lab, recompute: str):
    """Their number, from torch's profiler. The control is the formula of fsdp2."""
    model = experts(lab, num_experts=4, tie_word_embeddings=False)
    settings = model | {"model.gradient_checkpointing": recompute} | FOUR
    curve = lab.run("fsdp2_ep", settings, sabotage="messages_of_a_step")
    recipe = load_recipe(lab.folder / "recipe.yaml", [f"{key}={value}" for key, value in settings.items()])
    config = AutoConfig.from_pretrained(model["model"].removeprefix("{name_or_path: ").removesuffix("}"))
    step = replace(STEP, num_tokens=1, micro_batches=2, recompute=recipe.model.recompute)
    strategy = load_strategy(find_strategy("fsdp2_ep"))

    def by_ledger(strategy) -> dict[str, int]:
        calls: dict[str, int] = {}
        for message in transfers(strategy, sizes_of(config, skeleton(config, recipe)), step, 4):
            calls[message.kind] = calls.get(message.kind, 0) + message.calls
        return calls

    for calls_of in messages_of_step_3(curve).values():
        number = {kind: calls for kind, (calls, _) in calls_of.items()}
        print(number, by_ledger(strategy))
        assert number == by_ledger(strategy)
        assert number != by_ledger(replace(strategy, ep_size=1, dp_shard_size=4))


# Refusals.


@pytest.mark.parametrize(
    ("model_type", "size", "reason"),
    [
        ("llama", 2, "llama has no experts; use fsdp2"),
        ("nemotron_h", 2, "nemotron_h is not among the architectures whose curve under expert parallel was compared"),
        ("mixtral", 3, "4 experts cannot be divided over ep_size 3; use a divisor"),
        ("mixtral", 2, None),
        ("llama", 1, None),
    ],
)
def test_a_model_whose_experts_cannot_be_divided_is_refused(model_type: str, size: int, reason: str | None):
    problem = mesh_problem(tiny_config(model_type), Mesh(expert=size))
    assert problem is None if reason is None else reason in str(problem)


def test_a_dense_model_is_refused_before_it_is_loaded(lab: Lab):
    folder, output = lab.attempt("fsdp2_ep", FOUR)
    assert (folder / "exit_code").read_text() == "2"
    assert "llama has no experts; use fsdp2" in output and "Traceback" not in output


@pytest.mark.parametrize("model_type", [name for name, facts in TYPES.items() if facts.ep is True])
def test_the_router_s_auxiliary_loss_is_refused(model_type: str):
    config = tiny_config(model_type)
    assert not_served(config) is None
    config.output_router_logits = True
    assert "output_router_logits" in str(not_served(config))


# Forecasts.


def test_expert_parallel_is_forecast_for_a_mixture_and_refused_for_a_dense_model(lab: Lab, monkeypatch):
    monkeypatch.chdir(ROOT)
    machines, forecasts = parse_machines("4xH100"), {}
    strategies = [load_strategy(find_strategy(name)) for name in ("fsdp2", "fsdp2_ep")]
    for name, settings in {"dense": {}, "mixture": experts(lab)}.items():
        bf16 = {"mixed_precision": "bf16", **FOUR, **settings}
        recipe = load_recipe(Path(lab.folder / "recipe.yaml"), [f"{key}={value}" for key, value in bf16.items()])
        forecasts[name] = {
            forecast.strategy.name: forecast
            for forecast in forecast_all(recipe, strategies, machines, "here").forecasts
        }
    assert forecasts["dense"]["fsdp2_ep"].verdict == "cannot run"
    assert "llama has no experts" in forecasts["dense"]["fsdp2_ep"].why[0]
    both = forecasts["mixture"]
    assert {forecast.verdict for forecast in both.values()} == {"fits"}
    # A process gathers half of the experts of a layer.
    assert both["fsdp2_ep"].memory.gathered < both["fsdp2"].memory.gathered
