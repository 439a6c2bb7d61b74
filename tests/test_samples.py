"""Protects run.sample_every_steps: what a run writes is what its model generates, and the curve does not notice.

python -m pytest -q tests/test_samples.py -m "slow or not slow"
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cookbook.commands.cli import main
from cookbook.config.recipe import load_recipe
from cookbook.run.samples import continuations
from cookbook.training.data.batches import Layout
from cookbook.training.data.prompts import awaiting, beginnings
from cookbook.training.data.tokens import join
from cookbook.training.metrics import RunLog
from cookbook.training.models import tokenizer_files
from tests.curves import ROOT, Curve, Lab
from tests.gpu_runs import GpuLab
from tests.needs import need_compiler
from tests.small_data import make_tokenizer
from tests.test_equivalence_features import LORA, preferences

TOKENS = 9
SAMPLED = {"run.sample_every_steps": "8", "run.sample_tokens": str(TOKENS)}
SLOW = pytest.mark.slow
QUICK = ("ddp", "fsdp2", "zero3", "tp")
LONG = ("single", "pp")
REST = (
    "fsdp1",
    "hsdp",
    "zero1",
    "zero2",
    "zero2_offload",
    "zero3_offload",
    "zero3_hpz",
    "fsdp2_grad_op",
    "fsdp2_offload",
    "ddp_tp",
    "ddp_sp",
    "zero3_sp",
    "fsdp2_tp",
    "hsdp_tp",
    "fsdp2_sp",
    "pp_fsdp2",
    "pp_tp",
    "pp_tp_fsdp2",
)
MARKS = dict.fromkeys(LONG, (SLOW,)) | dict.fromkeys(REST, (SLOW, pytest.mark.thorough))
"""zero3_nvme is zero3 for a forward; its parameters come from disk."""


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def by_the_library(curve: Curve, prompts: list[str]) -> list[str]:
    """Texts that transformers' own generation gives with the exported weights, one prompt at a time."""
    tokenizer: Any = AutoTokenizer.from_pretrained(curve.folder / "export")
    model: Any = AutoModelForCausalLM.from_pretrained(curve.folder / "export", dtype=torch.float32)
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        most = min(TOKENS, 96 - ids.shape[1])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False)
        texts.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize(
    "strategy", [*QUICK, *(pytest.param(strategy, marks=marks) for strategy, marks in MARKS.items())]
)
def test_a_run_says_what_its_model_says_and_keeps_its_curve(lab: Lab, strategy: str):
    curve, plain = lab.run(strategy, SAMPLED), lab.run(strategy)
    numbers = ("step", "epoch", "loss", "grad_norm", "learning_rate", "num_tokens", "eval_loss")
    assert [[line.get(key) for key in numbers] for line in curve.lines] == [
        [line.get(key) for key in numbers] for line in plain.lines
    ], "to the bit"
    assert all(np.array_equal(plain.weights[name], weight) for name, weight in curve.weights.items())
    lines = read(curve.folder)
    assert [(line["step"], line["sample"]) for line in lines] == [(s, i) for s in (0, 8, 16, 20) for i in range(4)]
    last = lines[-4:]
    assert [line["completion"] for line in last] == by_the_library(curve, [line["prompt"] for line in last])
    assert any(line["completion"] != first["completion"] for line, first in zip(last, lines[:4], strict=True))


BF16 = {"mixed_precision": "bf16"}
HEAD = {
    "adapter": "{name: lora, rank: 4, modules_to_save: [lm_head]}",
    "model.from_scratch.tie_word_embeddings": "false",
    "data.packing": "true",
}
BUDGET = {"batch": "{global_batch_size: 16, micro_batch_tokens: 400}"}
FEATURES = {
    "packed rows and a trained head": ("zero3", HEAD | BF16),
    "preferences": ("fsdp2", BF16),
    "a token budget": ("pp", BUDGET | BF16),
    "compiled layers": ("ddp", {"model.compile": "true"}),
    "an adapter": ("tp", LORA),
}


ALIKE = ("a token budget", "compiled layers", "an adapter", "packed rows and a trained head")


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature", [pytest.param(name, marks=pytest.mark.thorough if name in ALIKE else ()) for name in FEATURES]
)
def test_whatever_the_recipe_chooses(lab: Lab, feature: str):
    if feature == "compiled layers":
        need_compiler()
    strategy, settings = FEATURES[feature]
    if feature == "preferences":
        settings = settings | preferences(lab)
    curve, plain = lab.run(strategy, settings | SAMPLED), lab.run(strategy, settings)
    assert curve.losses == plain.losses and curve.evaluations == plain.evaluations, "to the bit"
    lines = read(curve.folder)
    assert len(lines) == 16 and any(line["completion"] for line in lines)
    assert all(1 <= line["num_tokens"] <= TOKENS for line in lines)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=SLOW)])
def test_a_run_on_simulated_gpus_keeps_its_curve(gpu_lab: GpuLab, strategy: str):
    run = gpu_lab.run(strategy, {"run.sample_every_steps": "2", "run.sample_tokens": "5"})
    assert run.losses == gpu_lab.run(strategy).losses, "to the bit"
    assert [line["step"] for line in read(run.output)] == [step for step in (0, 2, 3) for _ in range(4)]
    assert "sample 3: ..." in run.log(0) and "sample 3: ..." not in run.log(1)


def test_a_resumed_run_writes_each_sample_once(lab: Lab, tmp_path: Path):
    whole = read(lab.run("single", SAMPLED).folder)
    settings = SAMPLED | {"run.output_dir": str(tmp_path / "run"), "run.resume": "auto"}
    first = lab.start("single", settings | {"run.stop_after_steps": "8"})
    assert first.returncode == 75 and [line["step"] for line in read(tmp_path / "run")] == [0] * 4 + [8] * 4
    with (tmp_path / "run/samples.jsonl").open("a") as file:  # of steps after the checkpoint, and one cut off
        file.write('{"step": 16, "sample": 0, "prompt": "x", "completion": "y", "num_tokens": 1}\n{"step": 16')
    assert lab.start("single", settings).returncode == 0
    assert read(tmp_path / "run") == whole


@pytest.mark.parametrize(("is_sampled", "left"), [(True, [0, 2]), (False, [0])])
def test_samples_that_are_made_again_stand_once(tmp_path: Path, is_sampled: bool, left: list[int]):
    text = "".join(json.dumps({"step": step, "sample": 0}) + "\n" for step in (0, 2, 4))
    (tmp_path / "samples.jsonl").write_text(text)
    RunLog(tmp_path, is_main=True, max_steps=5, resumed_step=2, is_sampled=is_sampled).close()
    assert [line["step"] for line in read(tmp_path)] == left


def test_prompts_by_hand():
    """A chat up to its first answer, the chosen answer's of a pair, and the first half of a text."""
    chat, answer = (np.array([1, 2, 3, 4]), np.array([0, 0, 1, 0], bool)), (np.array([9]), np.array([1], bool))
    text, chunk = (np.arange(5), np.ones(5, bool)), (np.arange(6), np.array([0, 1, 1, 1, 1, 1], bool))
    assert beginnings(join([chat, text, chunk, answer])) == [[1, 2], [0, 1], [0, 1, 2], [9]]
    assert beginnings(join([chat, answer], group_size=2)) == [[1, 2]]
    assert len(beginnings(join([chat] * 9))) == 4
    rows = awaiting([[5, 6], [7, 8, 9]], [4, 3], pad_id=0)
    assert rows.ids.tolist() == [5, 6, 0, 0, 7, 8, 9] and np.flatnonzero(rows.is_label).tolist() == [2, 6]


def test_a_sample_ends_with_a_text_a_turn_or_the_longest_sample():
    """By a model that always says the same: a letter, then the end of a text, of a turn, or more letters."""
    tokenizer = make_tokenizer(specials=["<|endoftext|>"])
    tokenizer.eos_token = "<|endoftext|>"
    of_text, of_turn, letter = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>", "b"])
    assert len({of_text, of_turn, letter}) == 3 and tokenizer_files.end_of_turn(tokenizer) == of_turn
    says = iter([[letter] * 3, [of_text, of_turn, letter], *[[letter] * 3] * 9])
    chat = np.array([letter] * 5), np.array([0, 0, 0, 1, 1], bool)
    settings = ["run.sample_every_steps=1", "run.sample_tokens=20", "data.max_length=8"]
    run: Any = SimpleNamespace(
        inputs=SimpleNamespace(tokenizer=tokenizer, data=SimpleNamespace(eval={"": join([chat] * 3)})),
        recipe=load_recipe(ROOT / "recipes/quickstart.yaml", settings),
        layout=Layout(num_ranks=1, rank=0, pad_id=0, micro_batch_size=4),
        engine=SimpleNamespace(collect=lambda *_, **__: np.array(next(says))),
        progress=SimpleNamespace(step=1),
    )
    lines = continuations(run, lambda: None)
    assert not isinstance(lines, str)
    assert [line["num_tokens"] for line in lines] == [2, 2, 8 - 3]
    assert [line["completion"] for line in lines] == ["b", "b", "bbbbb"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["run.sample_tokens=5"], "run: sample_tokens 5 would be ignored without sample_every_steps"),
        (["run.sample_every_steps=5", "data.eval=null"], "sample_every_steps is 5, but there is no data.eval; add it"),
        (["run.sample_every_steps=0"], "run.sample_every_steps"),
    ],
)
def test_what_cannot_be_sampled_is_refused(lab: Lab, settings: list[str], said: str, capsys):
    assignments = [word for setting in settings for word in ("--set", setting)]
    assert main(["check", str(lab.folder / "recipe.yaml"), *assignments]) == 2
    assert said in capsys.readouterr().err
