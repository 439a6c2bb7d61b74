"""Protects docs/architectures.md and what it found: buffers of a model's files, stacked experts, whole matrices.

python -m pytest -q -m "slow or not slow" tests/test_architectures.py
"""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks import architectures, architectures_page, model_facts
from benchmarks.tiny_models import tiny_config, tiny_model
from cookbook.commands.export import merge_adapter
from cookbook.facts.meshes import num_experts, pipeline_problem, sequence_problem, tensor_problem
from cookbook.facts.model_types import TYPES
from cookbook.facts.packing import packing_problem
from cookbook.system.files import RecipeError
from cookbook.training.checkpoint.write_model import saved_buffers
from cookbook.training.models.language_model import load_config
from cookbook.training.models.structure import (
    comparison_notes,
    logit_transform,
    not_served,
)
from tests.curves import Lab
from tests.needs import lacked_types
from tests.test_equivalence import SGD_LOSS
from tests.turns import FAMILIES, others_by_turn

RECORD = json.loads(architectures.RESULTS.read_text())
REFUSED = [name for name, facts in TYPES.items() if facts.refused]


def folder_of(lab: Lab, model_type: str) -> str:
    """A tiny model, with a tokenizer of the lab's rows."""
    folder = lab.folder / f"tiny_{model_type}"
    if not folder.exists():
        AutoTokenizer.from_pretrained(lab.run("single").folder / "export").save_pretrained(folder)
        tiny_model(tiny_config(model_type)).save_pretrained(folder)
    return str(folder)


def test_page_and_package_say_what_the_record_says():
    assert architectures.PAGE.read_text() == architectures_page.page(RECORD)
    assert architectures.TABLE.read_text() == f"{model_facts.table(model_facts.read_lines())}\n"


def test_the_record_has_every_causal_type_and_no_error():
    assert architectures_page.LIMIT == SGD_LOSS
    rows = RECORD["rows"]
    assert rows.keys() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | {name for name in rows if name in lacked_types()}
    assert {name: wrong for name, row in rows.items() if (wrong := architectures_page.faults(row))} == {}
    served = {name: row for name, row in rows.items() if "plain" in row}
    assert len(served) > 100 and all(row.keys() <= architectures_page.HEADINGS.keys() for row in served.values())
    assert {name for name in REFUSED if "refused" not in rows[name]} == set()
    for column in ("packed", "tp", "sp", "pp", "ep"):
        compared = {name for name, row in served.items() if "loss" in row.get(column, {})}
        assert compared == {name for name, facts in TYPES.items() if getattr(facts, column) is True}, column


def test_a_type_that_was_not_compared_is_noted_at_the_start_of_a_run():
    assert comparison_notes(tiny_config("qwen3")) == []
    (note,) = comparison_notes(SimpleNamespace(model_type="of_next_year"))
    assert "of_next_year is not among the model types of docs/architectures.md" in note


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=pytest.mark.thorough(turn=(i % 80, 80)))
        for i, name in enumerate(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)))
    ],
)
def test_a_type_trains_as_the_record_says(lab: Lab, model_type: str):
    """An eightieth of them by turn."""
    row, expected = architectures.try_type(lab, model_type, ("fsdp2", "zero3", "plan")), RECORD["rows"][model_type]
    assert_as_recorded(row, expected)


NOISE = 2 * 2**-21
"""By how much an error may exceed that on record: two last bits of a loss between 4 and 8 in float32, in which each is
summed in the order of a machine. Of 80 types tried again on another machine 79 had another error, by 3.8e-7 at most."""


def assert_as_recorded(row: dict[str, Any], expected: dict[str, Any]) -> None:
    """All that is no error of a sum, to equality: what is served, refused with which words, traced, and adapted."""
    assert architectures_page.faults(row) == []
    assert said(row) == said({name: expected.get(name, cell) for name, cell in row.items()})
    errors = {name: cell["loss"] for name, cell in row.items() if isinstance(cell, dict) and "loss" in cell}
    assert {name: error for name, error in errors.items() if error > expected[name]["loss"] + NOISE} == {}


def said(row: dict[str, Any]) -> dict[str, Any]:
    """A row without its figures."""
    return {
        name: cell
        if isinstance(cell, str)
        else {key: of for key, of in cell.items() if key not in ("loss", "gradient")}
        for name, cell in row.items()
    }


ADAPTED = [name for name, row in RECORD["rows"].items() if "loss" in row.get("lora", {})]
SHARDED = {"ddp": "ddp", "fsdp2": "fsdp2", "zero3": "zero3", "ep": "fsdp2_ep"}
"""Columns of strategies, and their names."""
ADAPTER = {"adapter": "{name: lora, rank: 8}", "optim.learning_rate": "0.1"}
"""At ten times this rate rounding grows: in a plain loop of five steps over eight samples, their order alone changed
Qwen3-Next's losses by 2e-3 in float32, and by 1e-15 in float64."""

SAME_WEIGHT = 1e-6
ROUNDS_MORE = ".linear_attn.in_proj_qkv"
"""Adapters before a gated delta rule: 1.8e-6 under FSDP2, of weights that were moved by 8e-2. Of one process another
micro-batch alone made 0.9e-6 of Qwen3-Next and 0.6e-6 of Qwen3.5, thirty times what it made of all others."""
AT_A_TIE = ("dots3_note_text",)
"""Model types that select a token or an expert by scores within their rounding of one another: two adapters whose
weights agree within 2e-8, of one process and of ZeRO-3, have losses 6e-5 apart in transformers alone too."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.thorough(turn=(i % 80, 80))) for i, name in enumerate(ADAPTED)]
)
def test_an_adapter_has_one_curve_and_one_export(lab: Lab, model_type: str, monkeypatch: pytest.MonkeyPatch):
    """Also on experts, where a type has them: an eightieth of the types by turn. What one process exports is opened by
    peft and merged; under a strategy it has to be the same.
    """
    folder, row = lab.folder / "models" / model_type, RECORD["rows"][model_type]
    architectures.make_model(lab, model_type, folder)
    monkeypatch.setitem(architectures.COLUMNS, "adapted", ("single", ADAPTER))
    alone, targets = architectures.train(lab, folder, "adapted")
    assert targets == row["lora"].get("targets")
    (_, first, _), (_, last, _) = alone.evaluations
    if model_type in UNMERGED:
        with pytest.raises(RecipeError, match="is also another layer's weight"):
            merge_adapter(alone.folder, alone.folder / "merged", "fp32")
    else:
        merge_adapter(alone.folder, alone.folder / "merged", "fp32")
    for written in ("export", *(["merged"] if model_type not in UNMERGED else [])):
        assert abs(architectures.library_loss(lab, folder, alone.folder / written, False) - last) < SGD_LOSS, written
    expected, settings = exported(alone.folder)
    moved = max(float(weight.abs().max()) for name, weight in expected.items() if "lora_B" in name)
    assert first > last and moved > 100 * SAME_WEIGHT, "it learns"
    for column in (name for name in SHARDED if "loss" in row.get(name, {})):
        monkeypatch.setitem(architectures.COLUMNS, f"adapted_{column}", (SHARDED[column], ADAPTER))
        curve, _ = architectures.train(lab, folder, f"adapted_{column}")
        weights, others = exported(curve.folder)
        assert others == settings and weights.keys() == expected.keys(), column
        apart = {name: float((weights[name] - expected[name]).abs().max()) for name in expected}
        far = max(of / (5 if ROUNDS_MORE in name else 1) for name, of in apart.items())
        print(model_type, column, f"losses {architectures.distance(curve, alone):.0e}, weights {far:.0e}")
        assert far < SAME_WEIGHT, (column, sorted(apart.items(), key=lambda item: item[1])[-3:])
        if model_type in AT_A_TIE:
            last = architectures.library_loss(lab, folder, curve.folder / "export", False)
            assert abs(curve.evaluations[-1][1] - last) < SGD_LOSS, column
            assert curve.losses == pytest.approx(alone.losses, abs=SGD_LOSS), column
        else:
            assert architectures.distance(curve, alone) < SGD_LOSS, column


UNMERGED = ("zamba", "zamba2")
"""Their layers share weights, each with an adapter of its own, which one merged weight cannot have."""


def exported(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights of the adapter of a run, and its configuration without an order of names."""
    settings = json.loads((run / "export" / "adapter_config.json").read_text())
    settings = {name: sorted(of) if isinstance(of, list) else of for name, of in settings.items()}
    return load_file(run / "export" / "adapter_model.safetensors"), settings


def test_sparse_attention_differs_where_its_scores_tie_and_nowhere_else(monkeypatch: pytest.MonkeyPatch):
    """The scores by which DeepSeek-V3.2's indexer selects tokens are sums over heads, after a ReLU, which two heads
    often leave at exactly zero: what `topk` takes of equals depends on the length of a row, and so on its padding.
    """
    two_heads, many_heads = (padding_error("deepseek_v32", heads, monkeypatch) for heads in (2, 16))
    assert two_heads[0] > 0.1 and two_heads[1] > 0
    assert many_heads[0] < 1e-5 and many_heads[1] == 0
    assert padding_error("deepseek_v32", 2, monkeypatch, selected=96)[0] < 1e-5


@torch.no_grad()
def padding_error(
    model_type: str, num_heads: int, monkeypatch: pytest.MonkeyPatch, selected: int = 32
) -> tuple[float, int]:
    """The largest difference of a log-probability between a sample alone and padded to 96 tokens, and how many tokens
    of the sample had scores that tie where the selection ends.
    """
    config = tiny_config(model_type)
    config.index_n_heads, config.index_topk = num_heads, selected
    model, ties = tiny_model(config).eval(), 0
    tokens = torch.randint(3, 512, (1, 50), generator=torch.Generator().manual_seed(3))
    topk = torch.Tensor.topk

    def counted(scores: torch.Tensor, k: int, **options: Any) -> Any:
        nonlocal ties
        if k == selected < scores.shape[-1]:
            at_the_end, after = scores.sort(dim=-1, descending=True).values[..., k - 1 : k + 1].unbind(-1)
            ties += int((at_the_end.isfinite() & (at_the_end == after)).sum())
        return topk(scores, k, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", counted)
        alone = model(input_ids=tokens).logits.log_softmax(-1)
    padded = model(input_ids=torch.nn.functional.pad(tokens, (0, 46))).logits[:, :50].log_softmax(-1)
    return float((padded - alone).abs().max()), ties


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_a_configuration_does_not_reveal_is_refused(model_type: str, tmp_path):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"model\.name_or_path"):
        load_config(str(tmp_path), 64)


def test_a_type_that_trains_otherwise_than_transformers_would_be_found(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    """XLM's attention looks ahead, and so into the padding."""
    monkeypatch.setattr(architectures, "without_run", lambda model_type: None)
    row = architectures.try_type(lab, "xlm", (), ("tests/sabotage.py", "every_model_is_served"))
    assert row["plain"]["loss"] > 0.1
    assert len(architectures_page.faults(row)) == 2


def test_a_transformation_of_the_logits_that_is_not_known_would_be_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cookbook.training.models.structure.changes_of_logits", lambda text: {})  # as of an unknown key
    assert model_facts.error_of_padded_samples(tiny_config("granite")) > 1


TRANSFORMED = [
    (key, how, name)
    for name, facts in TYPES.items()
    for key, how in facts.logits.items()
    if not isinstance(facts.language_part, bool)  # a tower's own class, whose part is another type
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "how", "model_type"), [pytest.param(*case, marks=pytest.mark.thorough) for case in TRANSFORMED]
)
def test_a_model_type_does_to_its_logits_what_the_table_says(key, how, model_type, monkeypatch: pytest.MonkeyPatch):
    config = tiny_config(model_type)
    if model_type != "minicpm3":  # whose scale is its width over dim_model_base
        setattr(config, key, model_facts.ODD[how])
    assert logit_transform(config) is not None
    assert model_facts.error_of_padded_samples(config) < 1e-4
    monkeypatch.setattr("cookbook.training.models.loss.logit_transform", lambda _: None)
    assert model_facts.error_of_padded_samples(config) > 0.1


@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_an_export_has_the_buffers_of_the_model_s_files(lab: Lab, strategy: str):
    """DeepSeek-V3's router has biases that no optimizer changes: without them other experts answer."""
    folder = folder_of(lab, "deepseek_v3")
    run = lab.run(strategy, {"model": f"{{name_or_path: {folder}}}", "run.check_export": "true"})
    expected = saved_buffers(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert len(expected) == 1 and all(buffer.any() for buffer in expected.values())
    written = load_file(run.folder / "export" / "model.safetensors")
    assert all(torch.equal(written[name], buffer) for name, buffer in expected.items())
    model = AutoModelForCausalLM.from_pretrained(run.folder / "export", dtype=torch.float32).eval()
    loss, _ = lab.held_out_loss(model, AutoTokenizer.from_pretrained(folder))
    assert loss == pytest.approx(run.evaluations[-1][1], abs=SGD_LOSS)


@pytest.mark.parametrize("model_type", ["apertus", "gpt2"])
def test_tensor_parallel_is_refused_where_no_curve_was_compared(lab: Lab, model_type: str):
    """Apertus's activations have trained weights between sharded matrices, of whose gradient each rank has a part."""
    result, output = lab.attempt("tp", {"model": f"{{name_or_path: {folder_of(lab, model_type)}}}"})
    assert (result / "exit_code").read_text() == "2"
    assert f"{model_type} is not among" in output and "use fsdp2 or zero3" in output and "Traceback" not in output


MEASURED = (
    "has_state",
    "loops_over_tokens",
    "has_sinks",
    "shares_layers",
    "logits",
    "reads_weights",
    "calls_in_4_bits",
)
TRAINED = [name for name, row in RECORD["rows"].items() if architectures_page.is_served(row)]


@pytest.mark.parametrize("model_type", others_by_turn(TRAINED, FAMILIES))
def test_a_line_has_the_facts_that_a_tiny_model_shows(model_type: str):
    line = model_facts.read_lines()[model_type]
    others = {key: value for key, value in line.items() if key not in MEASURED}
    assert model_facts.line_of(others, model_facts.of_causal(model_type), line["transformers"]) == line


@pytest.mark.parametrize("model_type", ["gemma3", "hyperclovax_vision_v2"])
def test_a_line_of_a_tower_has_the_facts_that_a_tiny_model_shows(model_type: str):
    line = model_facts.read_lines()[model_type]
    assert model_facts.of_tower(model_type) == {"logits": {}} | {
        key: of for key, of in line.items() if key != "transformers"
    }


def test_a_tower_that_does_something_else_to_its_logits_would_be_found():
    """Aya's own class leaves out the scale of its language part."""
    assert model_facts.of_tower("aya_vision")["language_part"] is not True


@pytest.mark.slow
def test_a_new_type_gets_the_line_that_runs_earn_it(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    """As if Apertus had no line: packed rows and a pipeline have its curve, tensor parallel has another."""
    monkeypatch.delitem(TYPES, "apertus")
    lines = model_facts.read_lines()
    monkeypatch.setattr(
        model_facts, "read_lines", lambda: {name: of for name, of in lines.items() if name != "apertus"}
    )
    row, line = architectures.measure(lab, "apertus", ("packed", "tp", "sp"))
    assert architectures_page.faults(row) == [] and row["tp"] == {"refused": line["tp"]}
    assert "its losses under tp lay" in line.pop("tp") and line == lines["apertus"]


def test_a_type_without_a_line_is_refused_with_the_command_that_measures_it():
    config = tiny_config("llama")
    config.model_type = "of_next_year"
    problems = [
        packing_problem(config),
        tensor_problem(config),
        sequence_problem(config, 2),
        pipeline_problem(config, 2),
    ]
    assert all(f"`{architectures.COMMAND} --types of_next_year` measures it" in str(problem) for problem in problems)
    assert "measures it" not in str(tensor_problem(tiny_config("gpt2")))


@pytest.mark.slow
def test_no_architecture_that_is_served_has_frozen_weights():
    """transformers forgets requires_grad when it reads them."""
    frozen = set()
    for name in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with contextlib.suppress(Exception), torch.device("meta"):  # sizes that do not suit it
            model = AutoModelForCausalLM.from_config(tiny_config(name))
            frozen |= {name} if any(not parameter.requires_grad for parameter in model.parameters()) else set()
    assert {name for name in REFUSED if "keeps frozen" in str(TYPES[name].refused)} <= frozen
    assert all(not_served(tiny_config(name)) for name in frozen), frozen


TRIED = [
    ("qwen3_moe", "tp"),
    ("qwen3_moe", "lora"),  # whose experts are one tensor each
    ("gpt2", "lora"),  # whose layers are no torch.nn.Linear
    ("gemma4_text", "fsdp2"),  # whose class names layers of images too
    ("gemma2", "zero3"),  # which caps its logits
]


@pytest.mark.parametrize(("model_type", "column"), TRIED)
def test_an_architecture_does_what_the_record_says(lab: Lab, model_type: str, column: str):
    assert_as_recorded(architectures.try_type(lab, model_type, (column,)), RECORD["rows"][model_type])


SHARDED_IN_BF16 = [name for name, row in RECORD["rows"].items() if "loss" in row.get("fsdp2", {})]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", others_by_turn(SHARDED_IN_BF16, ["gemma4_text", "opt"]))
def test_in_bf16_fsdp2_has_the_curve_of_autocast(lab: Lab, model_type: str):
    """Also where a product or norm lies between the embedding and the layers, as in these two. A mixture may route some
    tokens otherwise where hidden states have 16 bits; then its first loss is that of ZeRO, which has them so too.
    """
    asked = {"model": f"{{name_or_path: {folder_of(lab, model_type)}}}", "mixed_precision": "bf16"}
    asked |= {"run.max_steps": "2", "schedule.warmup_steps": "0", "optim.learning_rate": "0.02"}
    curve, expected = (lab.run(strategy, asked) for strategy in ("fsdp2", "single"))
    (first, *rest), is_mixture = curve.losses, num_experts(AutoConfig.from_pretrained(folder_of(lab, model_type))) > 1
    if first != pytest.approx(expected.losses[0], abs=0.03):
        assert is_mixture and first == pytest.approx(lab.run("zero2", asked).losses[0], abs=1e-6)
    assert rest == pytest.approx(expected.losses[1:], abs=0.03)
    assert curve.evaluations[-1][1] == pytest.approx(expected.evaluations[-1][1], abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", others_by_turn(SHARDED_IN_BF16, ["gemma4_text", "mamba"]))
def test_fsdp1_shards_the_layers_that_a_model_has(lab: Lab, model_type: str):
    """Gemma 4's language part names layers of images, and Mamba the mixers inside of its layers."""
    asked = {"model": f"{{name_or_path: {folder_of(lab, model_type)}}}", "run.max_steps": "1"}
    assert lab.run("fsdp1", asked).losses == pytest.approx(lab.run("single", asked).losses, abs=SGD_LOSS)


@pytest.mark.parametrize("columns", [(), ("--columns", "plain")])
@pytest.mark.parametrize("is_same", [False, True])
def test_what_other_versions_gave_is_a_whole_row_that_says_so(is_same, columns, tmp_path, monkeypatch, capsys):
    """Cells of one row are of one machine with one set of versions."""
    for name in ("RESULTS", "PAGE", "TABLE"):
        (tmp_path / name).write_text(getattr(architectures, name).read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(architectures, name, tmp_path / name)
    monkeypatch.setattr(architectures, "version", lambda name: RECORD["versions"][name] if is_same else "1.0")
    monkeypatch.setattr("cookbook.facts.packing.installed_version", architectures.version)
    monkeypatch.setattr(architectures, "machine", lambda: RECORD["machine"])
    row = RECORD["rows"]["llama"] | {"plain": {"loss": 0.125}}
    line = model_facts.read_lines()["llama"]
    monkeypatch.setattr(architectures, "measure_all", lambda folder, types, *_: [(name, (row, line)) for name in types])
    monkeypatch.setattr("sys.argv", ["architectures.py", "--types", "llama", *columns])
    architectures.main()
    said, written = capsys.readouterr().out, json.loads(architectures.RESULTS.read_text(encoding="utf-8"))
    refused = not is_same and bool(columns)
    assert '"loss": 0.125' in said and ("torch is 1.0, in the record" in said) == refused
    assert written["rows"] == RECORD["rows"] | ({} if refused else {"llama": row})
    apart = {name: own["versions"]["torch"] for name, own in written.get("apart", {}).items()}
    assert (apart.pop("llama", None) == "1.0") == (not is_same and not columns)
    assert apart == {name: own["versions"]["torch"] for name, own in RECORD.get("apart", {}).items()}
    said = "The rows of `llama`: torch 1.0, " in architectures.PAGE.read_text(encoding="utf-8")
    assert said == (not is_same and not columns)
