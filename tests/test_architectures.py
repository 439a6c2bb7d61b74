"""Protects docs/architectures.md and what it found: buffers of a model's files, stacked experts, whole matrices.

python -m pytest -q -m "slow or not slow" tests/test_architectures.py
"""

import contextlib
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks import architectures
from cookbook.planning.meshes import EXPERT_PARALLEL, PIPELINED, TENSOR_PARALLEL
from cookbook.planning.packing import PACKABLE
from cookbook.system.files import RecipeError
from cookbook.training.checkpoint.write_model import saved_buffers
from cookbook.training.models import load_config
from cookbook.training.models.structure import (
    FROZEN_IN_PART,
    LOGIT_TRANSFORMS,
    NOT_SERVED,
    logit_transform,
    not_served,
)
from tests.curves import Lab
from tests.test_equivalence import SGD_LOSS

RECORD = json.loads(architectures.RESULTS.read_text())


def folder_of(lab: Lab, model_type: str) -> str:
    """A tiny model, with a tokenizer of the lab's rows."""
    folder = lab.folder / f"tiny_{model_type}"
    if not folder.exists():
        AutoTokenizer.from_pretrained(lab.run("single").folder / "export").save_pretrained(folder)
        architectures.tiny_model(architectures.tiny_config(model_type)).save_pretrained(folder)
    return str(folder)


def test_the_page_is_what_the_record_says():
    assert architectures.PAGE.read_text() == architectures.page(RECORD)


def test_the_record_has_every_architecture_that_the_code_names_and_no_error():
    assert architectures.LIMIT == SGD_LOSS
    assert RECORD["rows"].keys() == set(architectures.TYPES)
    assert set(TENSOR_PARALLEL) | set(PIPELINED) <= {name for name, row in RECORD["rows"].items() if "plain" in row}
    refused = {name for kind in ("rows", "others") for name, row in RECORD[kind].items() if "refused" in row}
    assert set(NOT_SERVED) <= refused
    assert set(RECORD["rows"]) | set(RECORD["others"]) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    cells = [cell for row in RECORD["rows"].values() if "plain" in row for cell in row.values()]
    assert len(cells) > 150
    assert [cell for cell in cells if "failed" in cell or cell.get("loss", 0) > SGD_LOSS] == []
    packed = {name for name, row in RECORD["rows"].items() if "loss" in row.get("packed", {})}
    assert packed <= set(PACKABLE)
    for column, names in (("tp", TENSOR_PARALLEL), ("ep", EXPERT_PARALLEL)):
        assert {name for name, row in RECORD["rows"].items() if "loss" in row.get(column, {})} == set(names)


def test_all_others_have_transformers_loss_or_are_refused():
    losses = [found["loss"] for found in RECORD["others"].values() if "loss" in found]
    assert len(losses) > 30 and max(losses) < architectures.WITHIN_PROCESS


@pytest.mark.parametrize("model_type", sorted(NOT_SERVED))
def test_what_a_configuration_does_not_reveal_is_refused(model_type: str, tmp_path):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"model\.name_or_path"):
        load_config(str(tmp_path), 64)


def test_a_transformation_of_the_logits_that_is_not_known_would_be_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cookbook.training.models.structure.LOGIT_TRANSFORMS", ())  # as of an unknown key
    assert architectures.compare_within_process("granite")["loss"] > 1


ODD = {"cap": 2.0, "times": 0.3, "over": 1.7}
TRANSFORMED = [(key, how, name) for key, how, names in LOGIT_TRANSFORMS for name in names.split()]
TRANSFORMED = [one for one in TRANSFORMED if f"{one[-1]}_text" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
SIZES_OF_ITS_OWN = {
    "recurrent_gemma": {"num_hidden_layers": 3},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "minicpm3": {"dim_model_base": 32},  # its logits_scaling is the width over this
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "how", "model_type"), [pytest.param(*one, marks=pytest.mark.thorough) for one in TRANSFORMED]
)
def test_a_model_type_does_to_its_logits_what_the_table_says(key, how, model_type, monkeypatch: pytest.MonkeyPatch):
    config = architectures.tiny_config(model_type)
    if model_type in SIZES_OF_ITS_OWN:
        sizes = {**architectures.SIZES, "num_hidden_layers": 2, **SIZES_OF_ITS_OWN[model_type]}
        config = AutoConfig.for_model(model_type, **sizes, pad_token_id=0)
    if model_type != "minicpm3":
        setattr(config, key, ODD[how])
    assert logit_transform(config) is not None
    monkeypatch.setattr(architectures, "tiny_config", lambda _: config)
    assert architectures.compare_within_process(model_type)["loss"] < architectures.WITHIN_PROCESS
    monkeypatch.setattr("cookbook.training.models.loss.logit_transform", lambda _: None)
    assert architectures.compare_within_process(model_type)["loss"] > 0.1


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


@pytest.mark.slow
def test_no_architecture_that_is_served_has_frozen_weights():
    """transformers forgets requires_grad when it reads them."""
    found = set()
    for name in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with contextlib.suppress(Exception), torch.device("meta"):  # sizes that do not suit it
            model = AutoModelForCausalLM.from_config(architectures.tiny_config(name))
            found |= {name} if any(not parameter.requires_grad for parameter in model.parameters()) else set()
    assert {name for name, why in NOT_SERVED.items() if why == FROZEN_IN_PART} <= found
    assert all(not_served(architectures.tiny_config(name)) for name in found), found


TRIED = [
    ("qwen3_moe", "tp"),
    ("qwen3_moe", "lora"),  # whose experts are one tensor each
    ("gpt2", "lora"),  # whose layers are no torch.nn.Linear
    ("gemma4_text", "fsdp2"),  # whose class names layers of images too
    ("gemma2", "zero3"),  # which caps its logits
]


@pytest.mark.parametrize(("model_type", "column"), TRIED)
def test_an_architecture_does_what_the_record_says(lab: Lab, model_type: str, column: str):
    found, expected = architectures.try_type(lab, model_type, (column,)), RECORD["rows"][model_type]
    assert found["plain"]["loss"] < SGD_LOSS
    assert found[column].get("loss", 0) < SGD_LOSS and found[column].keys() == expected[column].keys()
    assert all(found[column][key] == expected[column][key] for key in found[column].keys() - {"loss"})


@pytest.mark.parametrize("is_same", [False, True])
def test_a_row_joins_those_of_the_same_versions_only(is_same, tmp_path, monkeypatch, capsys):
    for name in ("RESULTS", "PAGE"):
        (tmp_path / name).write_text(getattr(architectures, name).read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(architectures, name, tmp_path / name)
    monkeypatch.setattr(architectures, "version", lambda name: RECORD["versions"][name] if is_same else "1.0")
    monkeypatch.setattr(architectures.platform, "machine", lambda: RECORD["machine"].partition(",")[0])
    row = RECORD["rows"]["llama"] | {"plain": {"loss": 0.125}}
    monkeypatch.setattr(architectures, "try_type", lambda lab, name: row)
    monkeypatch.setattr("sys.argv", ["architectures.py", "--types", "llama", "--folder", str(tmp_path)])
    architectures.main()
    said, written = capsys.readouterr().out, json.loads(architectures.RESULTS.read_text(encoding="utf-8"))
    assert '"loss": 0.125' in said and ("torch is 1.0, in the record" in said) == (not is_same)
    assert written == (RECORD | {"rows": RECORD["rows"] | {"llama": row}} if is_same else RECORD)
