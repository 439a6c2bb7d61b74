"""Compiled layers are whole graphs, compiled a few times, under each strategy that is served with model.compile; and
the compiled loss is the loss.

python -m pytest -q -m "slow or not slow" tests/test_compiled.py
"""

import contextlib
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks import architectures, architectures_page, compiled_layers
from benchmarks.tiny_models import tiny_config, tiny_model
from cookbook.commands.cli import main as cookbook
from cookbook.config.sections import AdapterSection, ModelSection
from cookbook.facts.served_code import check_layers, served_code
from cookbook.start.run_plan import load_pair, make_plan
from cookbook.system.files import RecipeError
from cookbook.training.models import efficiency, loss
from cookbook.training.models.efficiency import compile_counts
from cookbook.training.models.structure import LogitTransform
from tests.conftest import ROOT
from tests.curves import Lab, distance, processes_of
from tests.gpu_runs import GpuLab
from tests.needs import need_compiler
from tests.test_architectures import assert_as_recorded
from tests.test_equivalence import DISTRIBUTED, SGD_LOSS, SGD_NORM, settings_for
from tests.test_gpu_matrix import PACKED

COMPILED = {"model.compile": "true", "model.from_scratch.num_hidden_layers": "3"}
"""More layers than graphs: one compilation serves all."""
PLAIN = {"model.from_scratch.num_hidden_layers": "3"}
CHECKPOINTED = {"model.gradient_checkpointing": "true"}
SELECTIVE = {"model.gradient_checkpointing": "selective"}
LORA = {"adapter.name": "lora"}
ROWS = json.loads(architectures.RESULTS.read_text(encoding="utf-8"))["rows"]
TYPES = [name for name, row in ROWS.items() if "plain" in row]
MODELS = json.loads((ROOT / "recipes/offline_facts.json").read_text(encoding="utf-8"))["models"]
SHIPPED = sorted({facts["config"]["model_type"] for facts in MODELS.values() if "of_no_recipe" not in facts})
"""Model types of the recipes."""
MOST_GRAPHS = 10
"""Two of lengths, each of a layer in training, in evaluation and in what a backward recomputes, and of the loss, in
forward and backward."""


def is_served(strategy: str) -> bool:
    path = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    recipe, loaded = load_pair(ROOT / "recipes/qwen3_0_6b/sft.yaml", ["model.compile=true"], path)
    try:
        make_plan(recipe, loaded, num_processes=loaded.written_mesh.num_processes, num_gpus=0, recipe_name="sft")
    except RecipeError:
        return False
    return True


SERVED = [name for name in DISTRIBUTED if is_served(name)]


def compiled(lab: Lab, strategy: str, settings: dict[str, str]) -> dict:
    """The event of a run whose curve is that of uncompiled layers in one process."""
    need_compiler()
    asked = settings_for(strategy, COMPILED | settings)
    curve = lab.run(strategy, asked, processes=processes_of(strategy), sabotage="compile_without_inductor")
    apart = distance(curve, lab.run("single", settings_for(strategy, PLAIN | settings)))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart
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
        pytest.param("ddp", {"data.packing": "false"}, id="ddp-padded", marks=pytest.mark.thorough),
        pytest.param("fsdp2", CHECKPOINTED | LORA | {"adapter.dropout": "0.1"}, id="fsdp2-dropout"),
        *(
            pytest.param(name, settings, id=f"{name}-{kind}", marks=pytest.mark.thorough)
            for name in ("ddp", "fsdp2", "zero2")
            for kind, settings in (("kept", {}), ("selective", SELECTIVE), ("lora", LORA))
        ),
    ],
)
def test_layers_are_whole_graphs_on_simulated_gpus(gpu_lab: GpuLab, strategy: str, settings: dict[str, str]):
    """On a CPU the attention of packed rows, sample by sample, breaks the graph; a GPU's is one operation. That of
    padded rows is chosen by their sizes, which are symbols then."""
    need_compiler()
    asked = COMPILED | PACKED | settings | {"mixed_precision": "bf16", "run.max_steps": "6"}
    run = gpu_lab.run(strategy, asked, processes=2)
    (event,) = [line for line in run.curve.events if line["event"] == "compiled"]
    assert 0 < event["graphs"] <= MOST_GRAPHS and event["graph_breaks"] == event["given_up"] == 0, event


@pytest.mark.slow
def test_attention_without_a_kernel_for_packed_rows_stays_padded_and_compiled(gpu_lab: GpuLab, lab: Lab):
    """Packed, whose samples are computed one by one, its checkpointed layers are left uncompiled."""
    need_compiler()
    folder = lab.folder / "models" / "gpt_oss"
    architectures.make_model(lab, "gpt_oss", folder)
    asked = {**architectures.COMMON, "model": f"{{name_or_path: {folder}}}", "model.compile": "true", **CHECKPOINTED}
    for packing, is_whole in (("auto", True), ("true", False)):
        settings = {**asked, "mixed_precision": "bf16", "data.packing": packing}
        run = gpu_lab.run("single", settings)
        (event,) = [line for line in run.curve.events if line["event"] == "compiled"]
        assert (event["graph_breaks"] == event["given_up"] == 0) == is_whole, event


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
    assert event["reasons"] and all(why in output and why in why_slow(curve.folder) for why in event["reasons"])


def why_slow(folder: Path) -> str:
    """Output of the command on a run, in lines as wide as its tables."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "300")
        assert cookbook(["why-slow", str(folder)]) == 0
    return said.getvalue()


class Scaled(GradientCheckpointingLayer):
    """A layer of a kind of its own: torch compiles it for this number."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.times


@pytest.mark.parametrize("most", [efficiency.MOST_COMPILATIONS, 8])
def test_more_kinds_of_layers_are_compiled_than_torch_takes_of_one_function(most: int, monkeypatch: pytest.MonkeyPatch):
    """8 is torch's own limit. Nemotron-H's four kinds reach it with the second length, before the first evaluation."""
    right = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: right(self, backend="eager", **options))
    monkeypatch.setattr(efficiency, "MOST_COMPILATIONS", most)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.nn.Sequential(*map(Scaled, range(2, 12)))
    efficiency.compile_layers(model)
    assert float(model(torch.ones(3))[0]) == math.factorial(11)
    counts = efficiency.compile_counts()
    assert counts["graphs"] == min(most, 10) and (counts["given_up"] > 0) == (most < 10)
    assert counts["reasons"] == ["Dynamo recompile limit exceeded"] * (most < 10)


@pytest.mark.parametrize("model_type", ["ctrl", "openai-gpt", "jetmoe"])
def test_a_model_whose_layers_cannot_be_compiled_or_recomputed_is_refused_before_it_is_loaded(model_type: str):
    settings = ModelSection(name_or_path="a", compile=True, gradient_checkpointing=True)
    config = tiny_config(model_type)
    with pytest.raises(RecipeError) as refused:
        check_layers(settings, config, served_code(config))
    assert "model.gradient_checkpointing is true" in str(refused.value)
    assert ("model.compile is true" in str(refused.value)) == (model_type != "jetmoe")


def test_what_a_compiled_backward_would_find_changed_is_refused():
    config = tiny_config("gemma3n_text")
    check_layers(ModelSection(name_or_path="a", compile=True), config, served_code(config))
    check_layers(ModelSection(name_or_path="a", gradient_checkpointing=True), config, served_code(config))
    both = ModelSection(name_or_path="a", compile=True, gradient_checkpointing="selective")
    with pytest.raises(RecipeError, match="clips a weight"):
        check_layers(both, config, served_code(config))


def folder_of(model_type: str, folder: Path) -> Path:
    tiny_model(tiny_config(model_type)).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.thorough(turn=(i % 80, 80))) for i, name in enumerate(TYPES)]
)
def test_compiled_layers_of_a_type_do_what_the_record_says(model_type: str, tmp_path: Path):
    """An eightieth of the types by turn."""
    cell = architectures.compiled(folder_of(model_type, tmp_path))
    assert_as_recorded({"plain": {}, "compiled": cell}, ROWS[model_type])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        pytest.param(name, options, id=f"{name}-{kind}", marks=pytest.mark.thorough)
        for name in SHIPPED
        for kind, options in (
            ("kept", {}),
            ("selective", {"recomputed": "selective"}),
            ("lora", {"adapter": AdapterSection(name="lora", rank=4)}),
            ("lora_recomputed", {"recomputed": True, "adapter": AdapterSection(name="lora", rank=4)}),
        )
    ],
)
def test_layers_of_the_shipped_recipes_are_whole_graphs(model_type: str, options: dict[str, Any], tmp_path: Path):
    change = compiled_layers.compare(folder_of(model_type, tmp_path), **options)
    assert change["graphs"] > 0 and change["graph_breaks"] == change["given_up"] == 0, change
    assert change["loss"] < SGD_LOSS and change["gradient"] < architectures_page.GRADIENT_LIMIT, change


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [pytest.param(name, marks=pytest.mark.thorough) for name in SHIPPED])
def test_recomputed_layers_of_the_shipped_recipes_are_whole_graphs_under_fsdp2(lab: Lab, model_type: str):
    need_compiler()
    folder = lab.folder / "models" / model_type
    architectures.make_model(lab, model_type, folder)
    plain = {**architectures.COMMON, "model": f"{{name_or_path: {folder}}}", "data.packing": "false"}
    asked = {**plain, "model.compile": "true", **CHECKPOINTED}
    curve = lab.run("fsdp2", asked, processes=2, sabotage="compile_without_inductor")
    assert architectures.distance(curve, lab.run("single", plain)) < SGD_LOSS
    (event,) = [line for line in curve.events if line["event"] == "compiled"]
    assert event["graphs"] > 0 and event["graph_breaks"] == event["given_up"] == 0, event


@pytest.mark.slow
def test_a_run_names_where_a_layer_leaves_its_graph(lab: Lab):
    """JetMoE's router takes the numbers of its experts' tokens to the host."""
    folder = lab.folder / "models" / "jetmoe"
    architectures.make_model(lab, "jetmoe", folder)
    asked = {**architectures.COMMON, "model": f"{{name_or_path: {folder}}}", "model.compile": "true"}
    curve = lab.run("single", {**asked, "data.packing": "false"}, sabotage="compile_without_inductor")
    (event,) = [line for line in curve.events if line["event"] == "compiled"]
    assert event["reasons"] == ["Data dependent operator"]
    output = (curve.folder / "output.txt").read_text()
    assert all(why in output and why in why_slow(curve.folder) for why in event["reasons"])


VOCAB = 512
CAPPED = LogitTransform(scale=3.0, cap=1.5)


@pytest.fixture
def compiler() -> Iterator[None]:
    need_compiler()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "transform"),
    [
        pytest.param(torch.bfloat16, None, id="bf16"),
        pytest.param(torch.bfloat16, CAPPED, id="bf16-capped", marks=pytest.mark.thorough),
        pytest.param(torch.float16, CAPPED, id="fp16-capped", marks=pytest.mark.thorough),
        pytest.param(torch.float32, CAPPED, id="fp32-capped", marks=pytest.mark.thorough),
        pytest.param(torch.float32, None, id="fp32", marks=pytest.mark.thorough),
    ],
)
def test_the_compiled_loss_is_torch_s(
    dtype: torch.dtype, transform: LogitTransform | None, compiler: None, monkeypatch: pytest.MonkeyPatch
):
    """With many rows in chunks, one, and none, which a micro-batch without targets has."""
    monkeypatch.setattr(loss, "LOGITS_BUDGET", 16 * VOCAB)
    torch.manual_seed(1)
    exact = torch.nn.Linear(32, VOCAB, dtype=torch.float64)
    head = torch.nn.Linear(32, VOCAB, dtype=dtype)
    head.load_state_dict(exact.state_dict())
    exact.load_state_dict(head.state_dict())  # as rounded
    head.__class__ = loss.LossHead
    before = compile_counts()
    loss.compile_loss(head)
    for rows in (12, 37, 23, 1, 0):
        hidden, targets = torch.randn(rows, 32).mul(3).to(dtype), torch.randint(VOCAB, (rows,))
        ours, wide = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
        losses, logits = head(ours, targets, transform), exact(wide)
        logits = logits if transform is None else 1.5 * torch.tanh(3.0 * logits / 1.5)
        expected = F.cross_entropy(logits, targets, reduction="none")
        (losses * torch.linspace(0.5, 1.5, rows)).sum().backward()
        (expected * torch.linspace(0.5, 1.5, rows)).sum().backward()
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(losses, expected.float(), rtol=2 * rounding, atol=4 * rounding)
        torch.testing.assert_close(ours.grad, wide.grad.to(dtype), rtol=8 * rounding, atol=8 * rounding)
    counts = {name: compile_counts()[name] - before[name] for name in ("graphs", "graph_breaks", "given_up")}
    assert counts["graphs"] == 8 and counts["graph_breaks"] == counts["given_up"] == 0, counts


@pytest.mark.slow
def test_the_compiled_loss_writes_no_logits_in_float32(compiler: None):
    """The plain one writes two: a copy, and its log-softmax."""
    logits, targets = torch.randn(24, VOCAB).bfloat16(), torch.randint(VOCAB, (24,))
    _, (nll,) = run_and_get_code(torch.compile(loss.PLAIN.nll), logits, targets, None)
    nlls = loss.PLAIN.nll(logits, targets, None)
    _, (gradient,) = run_and_get_code(torch.compile(loss.PLAIN.gradient), logits, targets, nlls, None, None, None)
    written = [re.findall(rf"empty_strided_cpu\(\(24, {VOCAB}\).*(torch\.\w+)\)", code) for code in (nll, gradient)]
    assert written == [[], ["torch.bfloat16"]], written
