"""Compiled layers are whole graphs, compiled a few times, under each strategy that is served with model.compile.

python -m pytest -q -m "slow or not slow" tests/test_compiled.py
"""

import pytest

from cookbook.planning.run_plan import load_pair, make_plan
from cookbook.system.files import RecipeError
from tests.conftest import ROOT
from tests.curves import Lab, distance, processes_of
from tests.gpu_runs import GpuLab
from tests.needs import need_compiler
from tests.test_equivalence import DISTRIBUTED, SGD_LOSS, SGD_NORM, settings_for
from tests.test_gpu_matrix import PACKED

COMPILED = {"model.compile": "true", "model.from_scratch.num_hidden_layers": "3"}
"""More layers than graphs: one compilation serves all."""
PLAIN = {"model.from_scratch.num_hidden_layers": "3"}
CHECKPOINTED = {"model.gradient_checkpointing": "true"}
SELECTIVE = {"model.gradient_checkpointing": "selective"}
LORA = {"adapter.name": "lora"}
MOST_GRAPHS = 6
"""Two of lengths, each of training, of evaluation and of what a backward recomputes."""


def is_served(strategy: str) -> bool:
    path = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    recipe, found = load_pair(ROOT / "recipes/qwen3_0_6b/sft.yaml", ["model.compile=true"], path)
    try:
        make_plan(recipe, found, num_processes=found.written_mesh.num_processes, num_gpus=0, recipe_name="sft")
    except RecipeError:
        return False
    return True


SERVED = [name for name in DISTRIBUTED if is_served(name)]


def compiled(lab: Lab, strategy: str, settings: dict[str, str]) -> dict:
    """The event of a run whose curve is that of uncompiled layers in one process."""
    need_compiler()
    asked = settings_for(strategy, COMPILED | settings)
    curve = lab.run(strategy, asked, processes=processes_of(strategy), sabotage="compile_without_inductor")
    found = distance(curve, lab.run("single", settings_for(strategy, PLAIN | settings)))
    assert found.loss < SGD_LOSS and found.norm < SGD_NORM, found
    (event,) = [line for line in curve.events if line["event"] == "compiled"]
    return event


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        pytest.param("fsdp2", CHECKPOINTED, id="fsdp2-checkpointed", marks=pytest.mark.slow),
        *(pytest.param(name, {}, id=name, marks=pytest.mark.slow) for name in SERVED),
        *(pytest.param(name, CHECKPOINTED, id=f"{name}-checkpointed", marks=pytest.mark.thorough) for name in SERVED),
        *(pytest.param(name, SELECTIVE, id=f"{name}-selective", marks=pytest.mark.thorough) for name in SERVED),
        *(pytest.param(name, LORA, id=f"{name}-lora", marks=pytest.mark.thorough) for name in SERVED),
    ],
)
def test_layers_are_whole_graphs_and_compiled_a_few_times(lab: Lab, strategy: str, settings: dict[str, str]):
    event = compiled(lab, strategy, settings)
    assert 0 < event["graphs"] <= MOST_GRAPHS and event["graph_breaks"] == event["given_up"] == 0, event


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        pytest.param("fsdp2", CHECKPOINTED, id="fsdp2-checkpointed"),
        *(
            pytest.param(name, settings, id=f"{name}-{kind}", marks=pytest.mark.thorough)
            for name in ("ddp", "fsdp2", "zero2")
            for kind, settings in (("kept", {}), ("selective", SELECTIVE), ("lora", LORA))
        ),
    ],
)
def test_packed_layers_are_whole_graphs_on_simulated_gpus(gpu_lab: GpuLab, strategy: str, settings: dict[str, str]):
    """On a CPU the attention of packed rows, sample by sample, breaks the graph; a GPU's is one operation."""
    need_compiler()
    asked = COMPILED | PACKED | settings | {"mixed_precision": "bf16", "run.max_steps": "6"}
    run = gpu_lab.run(strategy, asked, processes=2, sabotage="compile_without_inductor")
    (event,) = [line for line in run.curve.events if line["event"] == "compiled"]
    assert 0 < event["graphs"] <= MOST_GRAPHS and event["graph_breaks"] == event["given_up"] == 0, event


def test_the_strategies_are_those_that_are_served():
    assert {"ddp", "fsdp1", "fsdp2", "fsdp2_offload", "hsdp", "pp", "zero1", "zero2"} <= set(SERVED)
    assert not {"zero3", "tp", "fsdp2_sp"} & set(SERVED)


@pytest.mark.slow
def test_sizes_that_are_traced_as_symbols_break_the_graph_under_fsdp2(lab: Lab):
    """The negative control, which the run itself reports."""
    asked = COMPILED | {"run.max_steps": "6"}
    curve = lab.run("fsdp2", asked, processes=2, sabotage="compile_with_symbols")
    (event,) = [line for line in curve.events if line["event"] == "compiled"]
    assert event["graph_breaks"] > 5
    output = (curve.folder / "output.txt").read_text()
    assert "graph breaks" in output and "TORCH_LOGS=graph_breaks,recompiles" in output
