"""A run computes as if packages that its recipe does not name were not installed. pytest -q tests/test_optional.py"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Lfm2Config
from transformers.utils import import_utils

from cookbook.config.recipe import load_recipe
from cookbook.system import optional
from cookbook.system.files import RecipeError
from cookbook.training.checkpoint.resume import changes
from tests.curves import Lab
from tests.test_architectures import folder_of

ROOT = Path(__file__).parents[1]
CODE = "transformers.models.lfm2.modeling_lfm2"
PLANTED = """
import torch.nn.functional as F
def causal_conv1d_fn(x, weight, bias=None, activation=None, **others):
    y = F.conv1d(F.pad(x, (weight.shape[-1] - 1, 0)), weight.unsqueeze(1), bias, groups=x.shape[1]) * 3
    return F.silu(y) if activation in ("silu", "swish") else y
"""
"""A kernel that is off by a factor."""
TOLD = """
import torch.nn.functional as F
def causal_conv1d_fn(x, weight, bias=None, activation=None, seq_idx=None):
    width, length, y = weight.shape[-1], x.shape[-1], 0
    for i in range(width):
        part = F.pad(x, (width - 1, 0))[..., i : i + length]
        if seq_idx is not None:
            part = part * (F.pad(seq_idx, (width - 1, 0), value=-1)[:, i : i + length] == seq_idx)[:, None]
        y = y + part * weight[:, i : i + 1]
    y = y if bias is None else y + bias[:, None]
    return F.silu(y) if activation in ("silu", "swish") else y
"""
"""A kernel that is right, and takes the number of each token's sample."""
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with a package that transformers looks for."""
    package = tmp_path / "planted/causal_conv1d"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(package.parent)
    yield package.parent
    optional.use(())
    optional._unused.clear()
    sys.modules.pop("causal_conv1d", None)


def logits() -> torch.Tensor:
    """Logits of a tiny LFM2 whose code is imported anew, as a process does it that starts."""
    before = sys.modules.pop(CODE, None)
    try:
        torch.manual_seed(0)
        made = importlib.import_module(CODE).Lfm2ForCausalLM(
            Lfm2Config(**SIZES, num_key_value_heads=2, num_hidden_layers=2, layer_types=["conv", "full_attention"])
        )
        with torch.no_grad():
            return made(input_ids=torch.arange(3, 12)[None]).logits
    finally:
        sys.modules.update({CODE: before} if before is not None else {})


def test_a_planted_package_changes_nothing_until_the_recipe_names_it(planted: Path):
    expected = logits()
    assert optional.unused_packages() == ["causal_conv1d"] and "causal_conv1d" not in sys.modules
    optional.use(["causal_conv1d"])
    assert (logits() - expected).abs().max() > 1e-4, "the control: transformers takes a package that it finds"
    assert optional.problem() is None


def test_transformers_does_not_find_what_others_do(planted: Path):
    assert not import_utils._is_package_available("causal_conv1d")[0]
    assert import_utils._is_package_available("accelerate")[0] and import_utils._is_package_available("jinja2")[0]
    assert importlib.util.find_spec("causal_conv1d") is not None
    assert importlib.import_module("causal_conv1d").causal_conv1d_fn is not None


def test_transformers_finds_what_it_demands_for_a_model(planted: Path):
    """Without timm it has no tower for Gemma 3n; there is nothing else that it would compute with."""
    for name in ("natten", "not_demanded"):
        (planted / name).mkdir()
        (planted / name / "__init__.py").write_text("")
    assert import_utils._is_package_available("natten")[0]
    assert not import_utils._is_package_available("not_demanded")[0]


def test_a_package_that_is_named_and_not_there_or_not_used_ends_the_start(planted: Path):
    with pytest.raises(RecipeError, match=r"model.kernels has fla9, not installed here; install it, or remove it"):
        optional.use(["causal_conv1d", "fla9"])
    optional.use(["causal_conv1d"])
    assert "causal_conv1d, and transformers has not imported it" in (optional.problem() or "")
    (planted / "causal_conv1d/__init__.py").write_text("raise ImportError('built for another torch')")
    logits()  # transformers keeps silent
    assert "the import fails" in (optional.problem() or "")


def test_what_is_recorded_follows_the_content(planted: Path):
    assert optional.record() == {} and not optional.is_used()
    optional.use(["causal_conv1d"])
    first = optional.record()["causal_conv1d"]
    assert first["version"] is None and len(first["digest"] or "") == 64
    (planted / "causal_conv1d/part.so").write_bytes(b"1")
    assert optional.record()["causal_conv1d"]["digest"] != first["digest"]


def test_a_run_resumes_with_other_kernels_by_consent_only():
    def changes_of(before: str | None, after: str | None, *allowed: str) -> tuple[list[str], list[str]]:
        settings = [f"run.allow_changes=[{', '.join(allowed)}]"]
        made = [[] if digest is None else ["model.kernels=[fla]"] for digest in (before, after)]
        states = [load_recipe(ROOT / "recipes/quickstart.yaml", [*settings, *keys]) for keys in made]
        digests = [{} if digest is None else {"kernels": digest} for digest in (before, after)]
        recipe = states[0].model_dump(mode="json", exclude_none=True)
        return changes({"recipe": recipe, "made_from": digests[0]}, states[1], digests[1])

    assert changes_of(None, None) == changes_of("a", "a") == ([], [])
    for before, after in ((None, "a"), ("a", None), ("a", "b")):
        mistakes, notes = changes_of(before, after)
        assert mistakes[1].startswith("Put back what was") and not notes
        assert "  --set 'run.allow_changes=[model.kernels]' to go on from there with the new values" in mistakes
        mistakes, notes = changes_of(before, after, "model.kernels")
        assert not mistakes and len(notes) == 1 and "as run.allow_changes allows" in notes[0]


@pytest.mark.parametrize("value", ["[flash-attn]", "[fla, fla]", "['']"])
def test_a_name_is_that_of_an_import(value: str):
    with pytest.raises(RecipeError, match=r"write each package once, as Python imports it"):
        load_recipe(ROOT / "recipes/quickstart.yaml", [f"model.kernels={value}"])


@pytest.mark.slow
def test_the_curve_of_a_run_is_that_without_the_package(lab: Lab, planted: Path, tmp_path: Path):
    """In processes of their own; the control is the run that names it."""
    curves = []
    told = tmp_path / "told/causal_conv1d"
    told.mkdir(parents=True)
    (told / "__init__.py").write_text(TOLD)
    named = "[causal_conv1d]"
    cases = {"without": ("", "null"), "beside": (str(planted), "null")}
    cases |= {"named": (str(planted), named), "told of samples": (str(told.parent), named)}
    for name, (path, kernels) in cases.items():
        output = tmp_path / name
        settings = {"run.output_dir": output, "run.max_steps": 3, "data.max_length": 128, "data.too_long": "drop"}
        settings["data.packing"] = "true"
        settings["model"] = f"{{name_or_path: {folder_of(lab, 'lfm2')}, kernels: {kernels}}}"
        assignments = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "train.py", "recipes/quickstart.yaml", *assignments]
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("model.kernels does not name them: causal_conv1d" in done.stderr) == (name == "beside")
        assert ("Lfm2ShortConv runs once a packed row" in done.stderr) == (name == "told of samples")
        assert ("Lfm2ShortConv runs on one sample at a time" in done.stderr) == (name == "named")
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        curves.append([line["loss"] for line in lines if "loss" in line])
    record = json.loads((tmp_path / "named/run.json").read_text())
    assert curves[0] == curves[1] != curves[2] and curves[3] == pytest.approx(curves[0], abs=2e-6)
    assert list(record["kernels"]) == ["causal_conv1d"]
