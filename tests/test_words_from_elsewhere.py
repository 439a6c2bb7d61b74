"""Words that people bring from other projects and pages are answered by their meaning, at the key itself.

python -m pytest -q tests/test_words_from_elsewhere.py
"""

import re
import shutil
from pathlib import Path

import pytest

from benchmarks import owner_schemas
from cookbook.commands.cli import main
from cookbook.config.foreign import tables
from cookbook.config.recipe import load_recipe
from cookbook.system.files import MAX_CHOICES, RecipeError, closest
from tests.curves import ROOT
from train import refuse_words

RECIPE = ROOT / "recipes/quickstart.yaml"
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")

MEANINGS = {
    "run.save_every_epochs=5": "run.saves_per_epoch",
    "batch.effective_batch_size=64": "batch.global_batch_size",
    "data.sampler=DistributedSampler": "the order follows from seed and epoch",
    "run.wandb_project=x": "as in {wandb: {project: sums}}",
    "run.run_name=x": "run.output_dir names a run",
    "sweep=3": "one run for each value",
    "run.find_unused_parameters=true": "named in the first step",
    "run.bucket_cap_mb=50": "parallelism_config_ddp_bucket_cap_mb",
    "run.gradient_compression=x": "optim.gradient_dtype: bf16",
    "optim.comm_hook=powerSGD": "optim.gradient_dtype: bf16",
    "run.nccl_timeout=30": "run.hang_timeout_minutes",
    "run.timeout=30": "run.hang_timeout_minutes",
    "run.memory_snapshot=true": "docs/watching.md",
    "data.persistent_workers=true": "nothing to set",
    "data.drop_last=true": "every row is trained",
    "schedule.min_lr=1e-6": "schedule.min_learning_rate",
    "schedule.eta_min=0": "schedule.min_learning_rate",
    "schedule.start_factor=0.1": "schedule.warmup_steps",
    "schedule.T_max=100": "run.max_steps",
    "data.seq_len=512": "data.max_length",
    "data.num_proc=8": "nothing to set",
    "data.weights=[1]": "each with a weight",
    "model.freeze=x": "some layers alone are not trained",
    "model.quantization=4": "adapter.name: qlora",
    "run.eval_on_start=true": "before its first step",
    "run.tags=[a]": "run.trackers a tracker's",
    "extends=base.yaml": "write base, the path of another recipe",
    "optim.zero_stage=2": "it is part of a strategy",
    "deepspeed_config.zero_stage=2": "it is part of a strategy",
    "run.offload_param=cpu": "it is part of a strategy",
    "train.gradient_accumulation_steps=8": "it is derived",
    "model.load_in_4bit=true": "adapter.name: qlora",
    "data.max_seq_length=512": "data.max_length",
    "run.lora_alpha=16": "adapter.alpha",
    "peft_config.lora_alpha=16": "adapter.alpha",
    "training_args.learning_rate=1e-5": "optim.learning_rate",
    "run.fp16.enabled=true": "mixed_precision: fp16",
    "optimizer.params.lr=1e-5": "optim.learning_rate",
    "run.profile.wait=1": "which steps to trace",
    "run.profile.active=3": "which steps to trace",
}
SHAPES = {
    "objective=dpo": "--set objective.name=dpo",
    "adapter=lora": "--set adapter.name=lora",
    "optim=sgd": "--set optim.name=sgd",
    "schedule=linear": "--set schedule.name=linear",
    "run.profile=true": "profile: {steps: [10, 14]}",
}


def mistakes_of(*assignments: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(RECIPE, list(assignments))
    return caught.value.mistakes


@pytest.mark.parametrize("assignment", MEANINGS)
def test_a_word_of_another_project_is_answered_by_its_meaning(assignment: str):
    mistakes = mistakes_of(assignment)
    assert MEANINGS[assignment] in mistakes[0] and "did you mean" not in mistakes[0], mistakes
    assert assignment.startswith("run.profile.") or len(mistakes) == 1, mistakes


def test_a_word_that_is_vague_without_its_section_hides_no_misspelt_key():
    (mistake,) = mistakes_of("run.timeout_minutes=1")  # of the process group in Automodel's configuration
    assert mistake.endswith("unknown key; did you mean hang_timeout_minutes?")
    (mistake, *_) = mistakes_of("run.enabled=true")  # of more sections than a message has room for
    assert "unknown key; known here" in mistake


@pytest.mark.parametrize("assignment", SHAPES)
def test_a_section_or_a_list_given_as_a_word_is_answered_by_what_to_type(assignment: str):
    (mistake,) = mistakes_of(assignment)
    assert SHAPES[assignment] in mistake


def test_advice_for_a_word_works_as_it_is_typed():
    for said in SHAPES.values():
        if said.startswith("--set "):
            load_recipe(RECIPE, [said.removeprefix("--set "), "objective.train_on=null"])


WORDS = sorted(
    {
        word
        for row in re.findall(r"(?m)^\| (.+?) \|", PAGE.partition("## Words from elsewhere")[2])
        for word in re.findall(r"`([A-Za-z][\w.-]*)(?::[^`]*|\([^`]*\)|=[^`]*)?`", row)
        if not word.endswith(".yaml")
    }
)


@pytest.mark.parametrize("word", WORDS)
def test_each_word_of_the_page_is_answered_as_a_key_too(word: str):
    assert len(WORDS) > 70
    mistakes = mistakes_of(f"{word}=1" if "." in word else f"run.{word}=1")
    assert "does not belong here" in mistakes[0], mistakes


def test_the_page_has_the_words_that_are_answered_and_their_answers():
    """After a change of foreign.yaml: python -m benchmarks.owner_schemas --words"""
    assert owner_schemas.with_words(PAGE) == PAGE
    table = PAGE.partition("<!-- words:begin -->")[2].partition("<!-- words:end -->")[0]
    assert set(re.findall(r"`([\w.-]+)`", "".join(re.findall(r"(?m)^\| (.+?) \|", table)))) == {*tables().elsewhere}


def test_a_guess_is_never_judged_as_if_it_were_written(tmp_path: Path):
    """saves_per_epoch is in the file, and save_every_steps goes without it; nobody wrote that."""
    text = RECIPE.read_text(encoding="utf-8").replace("run:\n", "run:\n  saves_per_epoch: 1\n", 1)
    text = re.sub(r"(?m)^  save_every_steps: .+\n", "", text)
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes", dirs_exist_ok=True)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, ["run.save_every_step=5"])
    (mistake,) = caught.value.mistakes
    assert mistake == "--set run.save_every_step: unknown key; did you mean save_every_steps?"


def test_no_hint_is_given_below_the_stated_nearness_and_a_list_has_eight_names():
    assert closest("learnig_rate", ["learning_rate", "decay"]) == "learning_rate"
    assert closest("epochs", ["hooks"]) is None and closest("sweep", ["seed"]) is None
    (mistake,) = mistakes_of("run.zzz=1")
    known = mistake.partition("known here: ")[2].partition(" and ")[0].split(", ")
    assert len(known) == MAX_CHOICES and "did you mean" not in mistake
    (mistake,) = mistakes_of("objective.name=zzz")
    assert len(re.findall("'[a-z_]+'", mistake.partition("use ")[2])) == MAX_CHOICES and "more" in mistake


def test_a_flag_of_launch_is_answered_where_torchrun_starts_the_run():
    with pytest.raises(RecipeError) as caught:
        refuse_words(["recipes/quickstart.yaml", "--strategy", "ddp"])
    assert caught.value.mistakes == ["--strategy: write --set strategy=ddp"]


def test_run_is_launch(capsys: pytest.CaptureFixture[str]):
    assert main(["run", "recipes/quickstart.yaml"]) == 2
    assert "write cookbook launch recipes/quickstart.yaml" in capsys.readouterr().err


def test_check_knows_what_a_start_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["check", str(RECIPE), "--strategy", "ddp", "--processes", "2"]
    adapter = ["--set", "adapter={name: lora, rank: 4, modules_to_save: [lm_head]}"]
    assert main([*words, *adapter]) == 2
    assert "embedding and head of this model are one matrix" in capsys.readouterr().err
    block = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True}
    path = tmp_path / "fsdp.yaml"
    for layer, code in (("BertLayer", 2), ("LlamaDecoderLayer", 0)):
        lines = [f"  {key}: {value}" for key, value in (block | {"fsdp_transformer_layer_cls_to_wrap": layer}).items()]
        path.write_text("\n".join(["distributed_type: FSDP", "num_processes: 2", "fsdp_config:", *lines]) + "\n")
        assert main(["check", str(RECIPE), "--strategy", str(path)]) == code
    assert "is 'BertLayer', but the layers of llama are LlamaDecoderLayer" in capsys.readouterr().err


@pytest.mark.parametrize(("stage", "shipped"), [(1, "zero1"), (3, "zero3"), (0, "ddp")])
def test_a_bare_json_is_answered_by_its_own_stage(stage: int, shipped: str, tmp_path: Path, capsys):
    path = tmp_path / "bare.json"
    path.write_text(f'{{"zero_optimization": {{"stage": {stage}}}}}')
    assert main(["check", str(RECIPE), "--strategy", str(path)]) == 2
    assert f"or take the shipped {shipped} as a copy" in capsys.readouterr().err


def test_the_path_of_a_json_is_shown_as_short_as_it_can_be_typed(tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "other.json").write_text('{"zero_optimization": {"stage": 2, "nosuch": 1}}')
    block = "deepspeed_config: {deepspeed_config_file: ../other.json}"
    (tmp_path / "here" / "s.yaml").write_text(f"distributed_type: DEEPSPEED\nnum_processes: 2\n{block}\n")
    monkeypatch.chdir(tmp_path / "here")
    assert main(["check", str(RECIPE), "--strategy", "s.yaml"]) == 2
    assert capsys.readouterr().err.startswith("../other.json:1: zero_optimization.nosuch")
