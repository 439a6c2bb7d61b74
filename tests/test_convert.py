"""Protects `convert`: each project's file becomes exact values, and nothing in it is dropped in silence.

python -m pytest -q tests/test_convert.py
"""

import contextlib
import copy
import functools
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from cookbook.commands.cli import main
from cookbook.commands.convert.keys import Conversion
from cookbook.config.chat_templates import known_templates
from cookbook.config.foreign import answers, is_vague, tables
from cookbook.config.recipe import Recipe, answer_to, leaves, load_recipe
from cookbook.config.strategy import load_strategy, missing_strategy
from cookbook.system.files import Document, RecipeError, closest
from cookbook.system.validation import validate

TRL = """\
model_name_or_path: some/model
dataset_name: some/chats
dataset_test_split: test
learning_rate: 2.0e-4
lr_scheduler_type: cosine
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
max_steps: 200
warmup_ratio: 0.05
use_peft: true
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
assistant_only_loss: true
packing: true
eval_strategy: steps
eval_steps: 100
logging_steps: 5
surprise: 7
"""
HANDBOOK = """\
model_name_or_path: some/model
dataset_mixer: {some/pairs: 1.0, other/pairs: 0.5}
dataset_splits: [train_prefs, test_prefs]
beta: 0.01
bf16: true
gradient_accumulation_steps: 2
gradient_checkpointing: true
learning_rate: 5.0e-7
lr_scheduler_type: cosine
max_length: 512
num_train_epochs: 1
per_device_train_batch_size: 8
warmup_ratio: 0.1
"""
LLAMA_FACTORY = """\
model_name_or_path: some/model
stage: sft
finetuning_type: lora
lora_rank: 4
lora_target: all
dataset: first,second
template: llama3
cutoff_len: 1000
output_dir: outputs/saved
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_steps: 20
bf16: true
fsdp: full_shard auto_wrap offload
"""
AXOLOTL = """\
base_model: some/model
datasets:
  - path: some/chats
    type: chat_template
    field_messages: talk
    shards: 3
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
wandb_project:
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
evals_per_epoch: 4
gradient_checkpointing: offload
"""
TORCHTUNE = """\
output_dir: outputs/tuned
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /tmp/m/tokenizer.model, max_seq_len: 900}
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 8
  lora_alpha: 16
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: some/model}
dataset: {_component_: torchtune.datasets.chat_dataset, source: some/chats, split: "train[:10%]"}
batch_size: 2
epochs: 1
gradient_accumulation_steps: 4
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4, fused: true}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
dtype: bf16
enable_activation_checkpointing: true
fsdp_cpu_offload: true
"""
AUTOMODEL = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 8, ckpt_every_steps: 500, val_every_steps: 50, num_epochs: 2}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: some/model
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, target_modules: "*_proj", dim: 16, use_triton: true}
distributed: {strategy: fsdp2, tp_size: 1, cp_size: 2, surprise: 3}
dataset:
  _target_: nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset
  path_or_dataset_id: some/chats
  seq_length: 2000
validation_dataset:
  _target_: nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset
  path_or_dataset_id: some/chats
  split: test
  limit_dataset_samples: 64
packed_sequence: {packed_sequence_size: 0}
optimizer: {_target_: torch.optim.Adam, lr: 1.0e-5, weight_decay: 0}
lr_scheduler: {lr_decay_style: cosine, min_lr: 1.0e-6}
"""
TRAINER = json.dumps(
    {"per_device_train_batch_size": 16, "learning_rate": 1e-5, "max_steps": 90, "seed": 7, "fp16": True}
)
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, offload_optimizer_device: none, zero3_init_flag: true}
mixed_precision: bf16
num_processes: 8
"""

RECIPES = {
    "trl": {
        "strategy": "single",
        "mixed_precision": "bf16",
        "model": {"name_or_path": "some/model", "gradient_checkpointing": True},
        "data": {
            "train": "some/chats",
            "eval": {"path": "some/chats", "split": "test"},
            "max_length": 1024,
            "packing": True,
        },
        "objective": {"train_on": "assistant"},
        "adapter": {"name": "qlora", "rank": 32, "alpha": 16.0, "dropout": 0.05, "targets": ["q_proj", "v_proj"]},
        "batch": {"global_batch_size": 32, "micro_batch_size": 4},
        "optim": {"learning_rate": 2e-4},
        "schedule": {"name": "cosine", "warmup_steps": 0.05},
        "run": {"max_steps": 200, "eval_every_steps": 100},
    },
    "alignment-handbook": {
        "strategy": "single",
        "mixed_precision": "bf16",
        "model": {"name_or_path": "some/model", "gradient_checkpointing": True},
        "data": {
            "train": [
                {"path": "some/pairs", "split": "train_prefs"},
                {"path": "other/pairs", "split": "train_prefs", "weight": 0.5},
            ],
            "eval": {
                "some-pairs-test_prefs": {"path": "some/pairs", "split": "test_prefs"},
                "other-pairs-test_prefs": {"path": "other/pairs", "split": "test_prefs"},
            },
            "max_length": 512,
        },
        "objective": {"name": "dpo", "beta": 0.01},
        "batch": {"global_batch_size": 16, "micro_batch_size": 8},
        "optim": {"learning_rate": 5e-7},
        "schedule": {"name": "cosine", "warmup_steps": 0.1},
        "run": {"num_epochs": 1, "save_every_steps": 500},
    },
    "llama-factory": {
        "strategy": "fsdp2_offload",
        "mixed_precision": "bf16",
        "model": {"name_or_path": "some/model", "gradient_checkpointing": True},
        "data": {
            "train": [{"path": "path/to/first.jsonl"}, {"path": "path/to/second.jsonl"}],
            "max_length": 1000,
            "chat_template": "llama3",
        },
        "objective": {"name": "sft"},
        "adapter": {"name": "lora", "rank": 4, "alpha": 8.0, "targets": ["all-linear"]},
        "batch": {"global_batch_size": 8, "micro_batch_size": 1},
        "optim": {"learning_rate": 1e-4},
        "schedule": {"name": "cosine", "warmup_steps": 20},
        "run": {"num_epochs": 3, "output_dir": "outputs/saved", "save_every_steps": 500},
    },
    "axolotl": {
        "strategy": "single",
        "mixed_precision": "bf16",
        "model": {"name_or_path": "some/model", "gradient_checkpointing": "offload"},
        "data": {
            "train": {"path": "some/chats", "columns": {"messages": "talk"}},
            "holdout": 0.05,
            "max_length": 4096,
            "too_long": "drop",
            "packing": True,
        },
        "adapter": {"name": "qlora", "rank": 32, "alpha": 16.0, "targets": ["all-linear"]},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "optim": {"name": "adamw_8bit", "learning_rate": 2e-4},
        "schedule": {"name": "cosine", "warmup_steps": 0.03},
        "run": {"num_epochs": 4, "evals_per_epoch": 4, "saves_per_epoch": 1},
    },
    "torchtune": {
        "strategy": "fsdp2_offload",
        "mixed_precision": "bf16",
        "model": {"name_or_path": "some/model", "gradient_checkpointing": True},
        "data": {"train": {"path": "some/chats", "split": "train[:10%]"}, "max_length": 900},
        "adapter": {
            "name": "lora",
            "rank": 8,
            "alpha": 16.0,
            "targets": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        },
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "optim": {"name": "adamw", "learning_rate": 3e-4, "weight_decay": 0.01, "max_grad_norm": 0.0},
        "schedule": {"name": "constant"},
        "run": {"num_epochs": 1, "output_dir": "outputs/tuned", "saves_per_epoch": 1},
    },
    "automodel": {
        "strategy": "fsdp2_sp",
        "mixed_precision": "bf16",
        "model": {"name_or_path": "some/model"},
        "data": {
            "train": "some/chats",
            "eval": {"eval": {"path": "some/chats", "split": "test", "max_rows": 64}},
            "max_length": 2000,
        },
        "objective": {"name": "sft"},
        "adapter": {"name": "lora", "rank": 16, "targets": ["all-linear"]},
        "batch": {"global_batch_size": 64, "micro_batch_size": 8},
        "optim": {"name": "adamw", "learning_rate": 1e-5, "weight_decay": 0.0},
        "schedule": {"name": "cosine", "warmup_steps": 0.1, "min_learning_rate": 1e-6},
        "run": {"num_epochs": 2, "eval_every_steps": 50, "save_every_steps": 500},
    },
    "trainer": {
        "strategy": "single",
        "mixed_precision": "fp16",
        "seed": 7,
        "batch": {"global_batch_size": 16, "micro_batch_size": 16},
        "optim": {"learning_rate": 1e-5},
        "schedule": {"name": "linear"},
        "run": {"max_steps": 90},
    },
}
FILES = {
    "trl": TRL,
    "alignment-handbook": HANDBOOK,
    "llama-factory": LLAMA_FACTORY,
    "axolotl": AXOLOTL,
    "torchtune": TORCHTUNE,
    "automodel": AUTOMODEL,
    "trainer": TRAINER,
}
LISTED = {
    "trl": ["needs nothing: logging_steps\n", "file.yaml:20: surprise is 7: no key of TRL"],
    "alignment-handbook": [":2: dataset_mixer is"],
    "llama-factory": ["file.yaml:6: dataset is 'first,second': names in dataset_info.json"],
    "axolotl": ["file.yaml:2: datasets is a list of 1 item: shards 3"],
    "torchtune": [
        "needs nothing: tokenizer._component_, tokenizer.path, checkpointer._component_, optimizer",
    ],
    "automodel": ["file.yaml:7: distributed.surprise is 3: no key of NeMo Automodel", "peft.use_triton"],
    "trainer": ["to correct before it runs:", "model: is missing"],
}


@pytest.fixture
def folder(tmp_path: Path, shared_book: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped strategies, and room for what is written."""
    for name in ("accelerate_configs", "ds_configs"):
        (tmp_path / name).symlink_to(shared_book / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.fixture
def own_folder(folder: Path, shared_book: Path) -> Path:
    """A folder whose strategies may be changed."""
    for name in ("accelerate_configs", "ds_configs"):
        (folder / name).unlink()
        shutil.copytree(shared_book / name, folder / name)
    return folder


def convert(text: str, *arguments: str, name: str = "file.yaml") -> int:
    Path(name).write_text(text)
    return main(["convert", name, *arguments])


@pytest.mark.parametrize("project", FILES)
def test_a_file_becomes_exactly_this_recipe_and_the_rest_is_listed(folder, capsys, project):
    assert convert(FILES[project]) == 0
    printed = capsys.readouterr().out
    assert tables().projects[project].name in printed
    assert yaml.safe_load(Path("recipes/file.yaml").read_text()) == _as_yaml(RECIPES[project])
    for line in LISTED[project]:
        assert line in printed, printed
    if project not in ("trainer", "llama-factory"):  # the one has no model, the other no path
        assert "recipes/file.yaml: fine under" in printed or "batch.global_batch_size is" in printed


def _as_yaml(values):
    """As PyYAML, whose YAML 1.1 reads 2e-05 as text, reads what `convert` wrote."""
    return yaml.safe_load(yaml.safe_dump(values))


@pytest.mark.parametrize("project", FILES)
def test_every_key_is_in_the_recipe_or_listed(folder, capsys, project):
    """Negative control of the tables: a key that they do not know, at each depth, is listed with its line."""
    values = yaml.safe_load(FILES[project])
    values["not_known"] = 1
    known = tables().projects[project].keys
    sections = [
        key for key in values if isinstance(values[key], dict) and any(name.startswith(f"{key}.") for name in known)
    ]
    sections = [key for key in sections if key not in tables().projects[project].open_sections]
    for key in sections:
        values[key]["not_known"] = 1
    assert convert(json.dumps(values, indent=1), name="file.json") == 0
    printed = capsys.readouterr().out
    (line,) = re.findall(f"(.+): no key of {tables().projects[project].name_with_version};", printed)
    listed = re.findall(r"\d+: ([\w.]+)(?: is 1)?(?:;|$)", line)
    assert {*listed} >= {"not_known", *[f"{section}.not_known" for section in sections]}


def test_keys_with_one_reason_are_one_line_and_many_are_named_without_their_values(folder, capsys):
    """Such as a template of a service, whose values are variables of its environment."""
    assert convert("base_model: m\nmicro_batch_size: 1\nlearning_rate: 1e-4\nwandb_watch: a\nwandb_run_id: b\n") == 0
    printed = capsys.readouterr().out
    assert "file.yaml:4: wandb_watch is 'a'; 5: wandb_run_id is 'b': a run decides it" in printed
    keys = [
        "base_model",
        "micro_batch_size",
        "learning_rate",
        "num_epochs",
        "lora_r",
        "lora_alpha",
        "adapter",
        "rl",
        "seed",
    ]
    text = "\n".join(f"{key}: ${{{key.upper()}}}" for key in keys)
    Path("recipes/file.yaml").unlink()
    assert convert(text) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "refers to what" in line]
    assert re.findall(r"(\d+): (\w+)", line) == [(str(i + 1), key) for i, key in enumerate(keys)]
    Path("recipes/file.yaml").unlink()
    assert convert(text, "--json") == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert sum("refers to what is not in this file" in change for change in changes) == len(keys)


@pytest.mark.parametrize(
    ("peft", "said"),
    [
        ("dim: 16", ["lora_A_init"]),
        ("dim: 16, dropout: 0.1", ["dropout_position", "lora_A_init"]),
        ("dim: 16, dropout: 0.1, lora_A_init: uniform, dropout_position: pre", []),
        ("dim: 16, lora_A_init: xavier", ["lora_A_init"]),
    ],
)
def test_a_default_of_an_adapter_that_is_not_ours_is_listed_also_where_the_file_is_silent(folder, capsys, peft, said):
    assert convert(AUTOMODEL.replace("dim: 16", peft)) == 0
    changes = capsys.readouterr().out.partition("to know")[0]
    assert sorted(re.findall(r"peft\.(lora_A_init|dropout_position)", changes)) == said


def test_a_default_of_another_method_is_none_of_this_one(folder, capsys):
    """512 is that of a class of TRL which is not here; DPO of TRL 0.x cut prompts at it."""
    assert (
        convert("model_name_or_path: m\nbeta: 0.1\nlearning_rate: 1e-6\nmax_prompt_length: 512\n", "--from", "trl") == 0
    )
    changes = capsys.readouterr().out.partition("to know")[0]
    assert "max_prompt_length is 512: only whole samples are limited" in changes


def test_texts_that_are_packed_before_batches_are_drawn_are_counted_in_tokens_too(folder, capsys):
    text = "base_model: m\nsequence_len: 1024\nsample_packing: true\nmicro_batch_size: 2\nlearning_rate: 1e-4\n"
    assert convert(f"{text}max_steps: 9\npretraining_dataset: [{{path: some/texts, type: pretrain}}]\n") == 0
    assert "a batch of axolotl counts packed rows of up to 1024 tokens, 2048 a step" in capsys.readouterr().out


def test_a_plugin_of_axolotl_is_what_its_arguments_are(folder, capsys):
    listed = "plugins: [axolotl.integrations.liger.LigerPlugin, my.own.TimerPlugin]\n"
    assert convert(f"{AXOLOTL}{listed}") == 0
    printed = capsys.readouterr().out
    assert "plugins has TimerPlugin: our plugins are other files" in printed
    assert "LigerPlugin" in printed.partition("needs nothing: ")[2]
    Path("recipes/file.yaml").unlink()
    assert convert(AXOLOTL + listed.replace("liger.Liger", "grokfast.Grokfast")) == 2
    told = capsys.readouterr().err
    assert "plugins has GrokfastPlugin: not the same training: another optimizer, or several rates" in told


def test_a_short_list_is_shown_as_it_is_and_a_long_one_by_its_kind(folder, capsys):
    assert convert(f"{AXOLOTL}eot_tokens: [<|end|>]\neval_causal_lm_metrics: [a, b, c, d]\n") == 0
    printed = capsys.readouterr().out
    assert "eot_tokens is ['<|end|>']: " in printed and "eval_causal_lm_metrics is a list of 4 items: " in printed


@pytest.mark.parametrize("value", [True, False, None, 0, "", "fast", []])
@pytest.mark.parametrize(
    ("project", "key"),
    [
        *((name, "chat_template_kwargs") for name in ("trl", "alignment-handbook", "axolotl")),
        ("axolotl", "trl.chat_template_kwargs"),
        ("trl", "generation_kwargs"),
        ("trl", "model_init_kwargs"),
        ("axolotl", "model_config"),
    ],
)
def test_a_key_whose_default_only_the_template_or_the_model_knows_is_never_nothing(project, key, value):
    """Qwen3's enable_thinking is true where nothing is said, so false is the wish."""

    def read(section: dict[str, Any]) -> Conversion:
        conversion = Conversion(None)
        values = functools.reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), section)
        conversion.read(Document("file.json", values), tables().projects[project])
        return conversion

    conversion = read({"own": value})
    (line,) = [*conversion.changes, *conversion.others]
    assert line.startswith(f"file.json: {key}: ") and conversion.idle == []
    assert bool(conversion.others) == (key == "model_config" and value in (True, "fast"))
    if key.endswith("chat_template_kwargs"):
        assert 'write it into each row, as in "chat_template_kwargs": {"enable_thinking": false}' in line
    empty = read({})
    assert empty.idle == [key] and not empty.changes and not empty.others


def test_an_unknown_key_that_another_project_has_is_answered_by_its_meaning(folder, capsys):
    assert convert(f"{AXOLOTL}eta_min: 0\nnosuch_key: 1\n") == 0
    printed = capsys.readouterr().out
    assert re.search(r"eta_min is 0: no key of axolotl of [\d-]+; write schedule\.min_learning_rate", printed)
    assert re.search(r"nosuch_key is 1: no key of axolotl of [\d-]+; docs/recipes\.md has all of ours", printed)


def test_a_key_of_another_class_of_its_owner_is_no_unknown_key(folder, capsys):
    text = AUTOMODEL.replace("dataset:", "dataset:\n  trim_incomplete_last_turn: true\n  nosuch: 1", 1)
    assert convert(text) == 0
    printed = capsys.readouterr().out
    assert re.search(r"dataset\.trim_incomplete_last_turn is true: of make_agent_chat_dataset", printed)
    assert re.search(r"dataset\.nosuch is 1: no key of NeMo Automodel", printed)


def test_a_training_that_the_file_itself_names_is_the_reason_before_its_unknown_keys(folder, capsys):
    """As in Automodel's examples/speculative, where most keys are those of a method that is not here."""
    values = {
        "recipe": "TrainEagle3Recipe",
        "recipe_args": {f"key_{i}": 1 for i in range(20)},
        "seed": 1,
        "step_scheduler": {"num_epochs": 1, "max_steps": 2},
        "optimizer": {"lr": 1e-4, "weight_decay": 0.1},
    }
    assert convert(json.dumps(values), name="file.json") == 2
    (reason, *_) = capsys.readouterr().err.splitlines()
    assert "recipe is 'TrainEagle3Recipe': not the same training: another training than fine-tuning" in reason


@pytest.mark.parametrize(("theirs", "ours"), [("paged_adamw_8bit", "adamw_8bit"), ("paged_adamw_32bit", "adamw")])
def test_what_is_lost_of_an_optimizer_is_listed(folder, capsys, theirs, ours):
    assert convert(AXOLOTL.replace("adamw_bnb_8bit", theirs)) == 0
    assert yaml.safe_load(Path("recipes/file.yaml").read_text())["optim"].get("name", "adamw") == ours
    assert f":18: optimizer is '{theirs}': paged is left out" in capsys.readouterr().out


def test_accelerate_and_training_file_give_one_pair(folder, capsys):
    Path("acc.yaml").write_text(ACCELERATE)
    assert convert(TRL, "acc.yaml") == 0
    recipe = yaml.safe_load(Path("recipes/file.yaml").read_text())
    assert recipe["strategy"] == "zero3" and recipe["batch"]["global_batch_size"] == 4 * 8 * 8
    printed = capsys.readouterr().out
    assert "fine under accelerate_configs/zero3.yaml; 256 sequences" in printed
    assert "needs nothing: " in printed and "deepspeed_config.zero3_init_flag" in printed


@pytest.mark.parametrize(("arguments", "copies"), [((), 8 // 2), (("--processes", "16"), 16 // 2)])
def test_processes_that_share_a_sample_count_once_and_the_command_line_comes_first(folder, arguments, copies):
    mesh = "{parallelism_config_tp_size: 2}"
    Path("acc.yaml").write_text(f"distributed_type: MULTI_GPU\nnum_processes: 8\nparallelism_config: {mesh}\n")
    assert convert(TRL.replace("load_in_4bit: true\n", ""), "acc.yaml", *arguments) == 0
    assert yaml.safe_load(Path("recipes/file.yaml").read_text())["batch"]["global_batch_size"] == 4 * 8 * copies


@pytest.mark.parametrize(("written", "ours"), [("0.05", 0.05), ("12.0", 12)])
def test_a_warm_up_below_one_is_a_share_of_the_steps(folder, written, ours):
    """As transformers 5 reads warmup_steps."""
    recipe = recipe_of(TRL.replace("warmup_ratio: 0.05", f"warmup_steps: {written}"))
    assert recipe["schedule"]["warmup_steps"] == ours


@pytest.mark.parametrize(
    ("more", "saves", "instead"),
    [
        ("", 10, "write run.num_epochs: 3 and saves_per_epoch: 1 in their place"),
        ("save_every_n_steps: 4\n", 4, "write run.num_epochs: 3 in their place"),
    ],
)
def test_a_limit_of_each_epoch_counts_for_all_and_is_named(folder, capsys, more, saves, instead):
    """recipes/full_finetune_single_device.py of torchtune: save_every_n_steps is `_steps_per_epoch` where it is silent,
    and that is the limit, or the steps of the rows if they are fewer."""
    text = TORCHTUNE.replace("epochs: 1\n", "epochs: 3\n")
    recipe = recipe_of(f"{text}{more}max_steps_per_epoch: 10\n")
    assert recipe["run"]["max_steps"] == 30 and "num_epochs" not in recipe["run"]
    assert recipe["run"]["save_every_steps"] == saves and "saves_per_epoch" not in recipe["run"]
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "max_steps_per_epoch is 10" in line]
    assert instead in line and "if it has more, a new one begins there" in line
    assert recipe_of(text)["run"] == {"num_epochs": 3, "output_dir": "outputs/tuned", "saves_per_epoch": 1}
    assert "the most steps of an epoch" not in capsys.readouterr().out


def _as_json(text: str) -> str:
    return "{" + ",".join(f'"{key}": {value}' for key, value in (line.split(": ") for line in text.splitlines())) + "}"


@pytest.mark.parametrize(("suffix", "written"), [(".yaml", str), (".json", _as_json)])
def test_of_a_key_given_twice_the_last_holds_as_for_the_reader_of_the_project(folder, capsys, suffix, written):
    """PyYAML's and Python's own readers are asked which one that is."""
    lines = 'model_name_or_path: "some/model"\ndataset_name: "some/chats"\nlearning_rate: 0.5\nmax_steps: 7\n'
    text = written(lines + "learning_rate: 0.25\n")
    theirs = json.loads(text) if suffix == ".json" else yaml.safe_load(text)
    assert convert(text, "--from", "trl", name=f"file{suffix}") == 0
    recipe = yaml.safe_load(Path("recipes/file.yaml").read_text())
    assert recipe["optim"]["learning_rate"] == theirs["learning_rate"] == 0.25
    said = capsys.readouterr().out
    assert re.search(r":\d: learning_rate: given twice \(first in line \d\); the last holds there", said), said
    assert convert(lines, "--from", "trl", "--out", "recipes/once.yaml") == 0
    assert "given twice" not in capsys.readouterr().out


@pytest.mark.parametrize(("saves", "is_best"), [(200, True), (150, False)])
def test_the_best_checkpoint_is_one_that_was_evaluated(folder, saves, is_best):
    recipe = recipe_of(TRL + f"load_best_model_at_end: true\nsave_strategy: steps\nsave_steps: {saves}\n")
    assert recipe["run"]["save_every_steps"] == saves and recipe["run"]["eval_every_steps"] == 100
    assert (recipe["run"].get("export") == "best") == is_best == (recipe["run"].get("keep_best") == 1)


DISTRIBUTIONS = {
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero2_offload": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": "auto"},
    },
    "zero3_nvme": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
    },
    "ddp": {"distributed_type": "MULTI_GPU", "num_processes": 2},
    "single": {"distributed_type": "NO", "num_processes": 1},
    "fsdp1": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}},
    "fsdp2_grad_op": {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
    },
    "fsdp2_sp": {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {"parallelism_config_sp_size": 2},
    },
    "tp": {"distributed_type": "MULTI_GPU", "parallelism_config": {"parallelism_config_tp_size": 2}},
}


@pytest.mark.parametrize("strategy", DISTRIBUTIONS)
def test_a_distribution_alone_names_its_strategy_and_writes_nothing(folder, capsys, strategy):
    before = sorted(folder.rglob("*"))
    assert convert(json.dumps(DISTRIBUTIONS[strategy]), name="dist.json") == 0
    printed = capsys.readouterr().out
    assert f"strategy: {strategy}\n" in printed and "no recipe" in printed
    assert sorted(folder.rglob("*")) == sorted([*before, folder / "dist.json"])


def with_warmup(**params: Any) -> str:
    scheduler = {"type": "WarmupLR", "params": params}
    return json.dumps({"zero_optimization": {"stage": 2}, "scheduler": scheduler})


def test_a_scheduler_of_deepspeed_warms_up_by_a_logarithm_unless_it_says_otherwise(folder, capsys):
    assert convert(with_warmup(warmup_num_steps=30), name="dist.json") == 0
    printed = capsys.readouterr().out
    assert "name: constant\n  warmup_steps: 30\n  warmup: log\n" in printed
    assert "the defaults of DeepSpeed hold: schedule.warmup 'log'" in printed
    assert convert(with_warmup(warmup_num_steps=30, warmup_type="linear"), name="dist.json") == 0
    printed = capsys.readouterr().out
    assert "warmup: linear" in printed and "defaults of DeepSpeed" not in printed


def test_what_a_json_leaves_to_the_training_is_named_where_no_file_has_it(folder, capsys):
    (folder / "dist.json").write_text(with_warmup(warmup_num_steps="auto", warmup_max_lr="auto"))
    assert main(["convert", "dist.json"]) == 0
    printed = capsys.readouterr().out
    assert "dist.json:1: scheduler.params.warmup_num_steps is 'auto', and no file has a number" in printed
    assert "write it as schedule.warmup_steps, and schedule.warmup: log" in printed
    assert "scheduler.params.warmup_max_lr is 'auto', and no file has a value" in printed
    (folder / "trl.yaml").write_text(TRL + "warmup_steps: 7\n")
    assert main(["convert", "trl.yaml", "dist.json", "--out", "recipes/mine.yaml"]) == 0
    assert "'auto', and no file" not in capsys.readouterr().out
    schedule = load_recipe(Path("recipes/mine.yaml")).schedule
    assert (schedule.warmup_steps, schedule.warmup) == (7, "log")


def test_each_key_that_a_json_leaves_open_is_named_also_where_two_are_one_of_ours(folder, capsys):
    values = json.loads(with_warmup(warmup_num_steps=3, warmup_max_lr="auto")) | {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}
    }
    (folder / "dist.json").write_text(json.dumps(values))
    assert main(["convert", "dist.json"]) == 0
    printed = capsys.readouterr().out
    assert "optimizer.params.lr is 'auto', and no file" in printed
    assert "scheduler.params.warmup_max_lr is 'auto', and no file" in printed


PRUNED = {"sparse_pruning": {"shared_parameters": {"enabled": True}, "different_groups": {"sp1": {"params": {"r": 2}}}}}
OFF = json.loads(json.dumps(PRUNED).replace("true", "false"))


def test_a_section_that_is_switched_off_needs_nothing_and_one_that_is_on_has_one_line(folder, capsys):
    """DeepSpeed's switch of a method is in a section beside what it switches."""
    zero = {"zero_optimization": {"stage": 2}, "_comment": "from a page"}
    (folder / "dist.json").write_text(json.dumps(zero | {"compression_training": OFF}))
    assert main(["convert", "dist.json"]) == 0
    printed = capsys.readouterr().out
    assert "trains otherwise" not in printed and "to know" not in printed
    needs_nothing = printed.partition("needs nothing: ")[2].partition("\n")[0].split(", ")
    assert {"_comment", "compression_training.sparse_pruning.different_groups.sp1.params.r"} < {*needs_nothing}
    (folder / "dist.json").write_text(json.dumps(zero | {"compression_training": PRUNED}, indent=1))
    assert main(["convert", "dist.json"]) == 2
    error = capsys.readouterr().err
    assert error.count("compression_training") == 1, error
    assert "dist.json:6: compression_training: not the same training: another training" in error


NEEDS_NOTHING = {
    "a default beside another strategy": (TRL + "save_strategy: epoch\nsave_steps: 500\n", "save_steps"),
    "a least rate of a constant one": (
        AUTOMODEL.replace("lr_decay_style: cosine", "lr_decay_style: constant"), "lr_scheduler.min_lr"),
    "scales that are quantized in any case": (
        f"{AXOLOTL}bnb_config_kwargs: {{bnb_4bit_use_double_quant: true}}\n",
        "bnb_config_kwargs.bnb_4bit_use_double_quant"),
}  # fmt: skip


@pytest.mark.parametrize("case", NEEDS_NOTHING)
def test_what_has_no_effect_beside_another_key_needs_nothing(case, folder, capsys):
    text, key = NEEDS_NOTHING[case]
    assert convert(text) == 0
    printed = capsys.readouterr().out
    assert key in printed.partition("needs nothing: ")[2].partition("\n")[0].split(", ")
    assert printed.count(f"{key} is") == 0 and "would be ignored" not in printed


def test_a_length_of_samples_below_that_of_packed_rows_is_shown(folder, capsys):
    packed = AUTOMODEL.replace("packed_sequence_size: 0", "packed_sequence_size: 4096")
    assert convert(packed) == 0
    said = "dataset.seq_length is 2000: samples are cut there before they are packed"
    assert said in capsys.readouterr().out
    assert load_recipe(Path("recipes/file.yaml")).data.max_length == 4096


OF_FP8 = {
    "llama-factory": "model_name_or_path: a/b\ndataset: rows\nlearning_rate: 1.0e-5\nbf16: true\nfp8: true\n",
    "axolotl": "base_model: a/b\nlearning_rate: 1.0e-5\nmicro_batch_size: 1\nbf16: true\nfp8: true\n",
    "automodel": "step_scheduler: {global_batch_size: 2}\noptimizer: {lr: 1.0e-5}\nfp8: {enabled: true}\n",
}


@pytest.mark.parametrize("project", OF_FP8)
def test_fp8_beside_bf16_is_fp8_without_a_word(folder, capsys, project):
    (folder / "file.yaml").write_text(OF_FP8[project])
    assert main(["convert", "file.yaml", "--from", project]) == 0
    assert "mixed_precision: fp8" in Path("recipes/file.yaml").read_text()
    assert "fp8" not in capsys.readouterr().out.partition("to correct")[0]


def test_a_file_that_is_named_from_the_root_of_a_repository_is_found(folder, capsys):
    (folder / "configs").mkdir()
    (folder / "configs/zero.json").write_text('{"zero_optimization": {"stage": 3}}')
    (folder / "examples/llama").mkdir(parents=True)
    path = folder / "examples/llama/train.yaml"
    path.write_text("base_model: a/b\nlearning_rate: 1.0e-5\nmicro_batch_size: 1\ndeepspeed: configs/zero.json\n")
    (folder / "elsewhere").mkdir()
    with contextlib.chdir(folder / "elsewhere"):
        assert main(["convert", "../examples/llama/train.yaml", "--from", "axolotl"]) == 0
        assert "strategy: zero3" in Path("recipes/train.yaml").read_text()
    assert "no such file" not in capsys.readouterr().out.partition("to correct")[0]


FP16 = "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp16\n"
STEPS = json.dumps({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 9, "total_num_steps": 77}}})
TWO_FILES = {
    "precision of accelerate": ("bf16: true\n", FP16, "mixed_precision", "bf16", ("'fp16'", "bf16 is true")),
    "precision of a JSON": (
        "bf16: true\n",
        '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}',
        "mixed_precision",
        "bf16",
        ("fp16.enabled", "bf16"),
    ),
    "length": ("num_train_epochs: 3\n", STEPS, "run.num_epochs", 3, ("total_num_steps is 77", "run.num_epochs 3")),
    "warm-up": ("warmup_steps: 7\n", STEPS, "schedule.warmup_steps", 7, ("warmup_num_steps is 9", "warmup_steps is 7")),
    "no warm-up": ("warmup_steps: 0\n", STEPS, "schedule.warmup_steps", 0, ("warmup_num_steps is 9", "is 0 already")),
    "betas": (
        "adam_beta1: 0.8\n",
        '{"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}, "zero_optimization": {"stage": 2}}',
        "optim.betas",
        (0.8, 0.999),
        ("betas is", "adam_beta1 is 0.8"),
    ),
    "batch": (
        "per_device_train_batch_size: 4\n",
        '{"train_batch_size": 64}',
        "batch.global_batch_size",
        8,
        ("train_batch_size is 64", "4 x accumulation 1 x 2"),
    ),
}


def test_a_json_without_accumulation_has_that_of_its_two_batches(folder, capsys):
    """As DeepSpeed derives it: 128 / (4 x 8); of 130 nobody can."""
    for size, is_named in ((128, False), (130, True)):
        text = json.dumps({"train_batch_size": size, "train_micro_batch_size_per_gpu": 4})
        (folder / "ds.json").write_text(text)
        assert main(["convert", str(folder / "ds.json"), "--processes", "8"]) == 0
        said = capsys.readouterr().out
        assert f"global_batch_size: {size}" in said
        assert ("4 x accumulation 1 x 8" in said) == is_named, said


SCRIPT = """\
model_name_or_path: some/model
dataset_name: some/data
max_length: 512
output_dir: out
learning_rate: 1.0e-5
lr_scheduler_type: linear
"""


@pytest.mark.parametrize("case", TWO_FILES)
def test_two_files_that_contradict_each_other_are_shown_with_both_values(folder, capsys, case):
    more, other, key, value, said = TWO_FILES[case]
    lines = {line.partition(":")[0]: line for line in more.splitlines()}
    kept = {"per_device_train_batch_size": "per_device_train_batch_size: 2", "num_train_epochs": "num_train_epochs: 1"}
    (folder / "trl.yaml").write_text(SCRIPT + "".join(f"{line}\n" for line in (kept | lines).values()))
    name = "other.json" if other.startswith("{") else "other.yaml"
    (folder / name).write_text(other)
    main(["convert", "trl.yaml", name, "--from", "trl", "--processes", "2", "--out", "recipes/mine.yaml"])
    written: Any = yaml.safe_load(Path("recipes/mine.yaml").read_text())
    for name in key.split("."):
        written = written[name]
    assert (tuple(written) if isinstance(written, list) else written) == value
    printed = capsys.readouterr().out
    assert any(all(text in line for text in said) for line in printed.splitlines()), printed


@pytest.mark.parametrize("key", ["packing", "padding_free"])
def test_a_batch_that_is_flattened_counts_samples_as_here(folder, capsys, key):
    (folder / "trl.yaml").write_text(f"{SCRIPT}per_device_train_batch_size: 2\n{key}: true\n")
    main(["convert", "trl.yaml", "--from", "trl", "--out", "recipes/mine.yaml"])
    assert ("counts packed rows" in capsys.readouterr().out) == (key == "packing")
    assert yaml.safe_load(Path("recipes/mine.yaml").read_text())["data"]["packing"] is True


NEW = {
    "zero1 with offload": (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        {"kind": "zero", "zero_stage": 1, "offload_optimizer": "cpu"},
    ),
    "zero3, optimizer on disk": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "fast"}}},
        {"kind": "zero", "zero_stage": 3, "offload_optimizer": "nvme", "offload_param": None},
    ),
    "zero3 with a second copy": (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
        {"kind": "zero", "zero_stage": 3, "written_secondary_group_size": 8},
    ),
    "fsdp1 that keeps gathered weights": (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
        {"kind": "fsdp1", "gathers_weights": False},
    ),
    "tp of 4": (
        {"distributed_type": "MULTI_GPU", "parallelism_config": {"parallelism_config_tp_size": 4}},
        {"kind": "tp", "tp_size": 4},
    ),
    "hsdp of 4 groups": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 2},
            "parallelism_config": {"parallelism_config_dp_replicate_size": 4},
        },
        {"kind": "fsdp2", "dp_replicate_size": 4, "dp_shard_size": 2},
    ),
}


@pytest.mark.parametrize(("values", "wanted"), NEW.values(), ids=NEW)
def test_what_no_shipped_strategy_has_becomes_a_valid_one(own_folder, capsys, values, wanted):
    assert convert(json.dumps(values), "--out", "recipes/mine.yaml", name="dist.json") == 0
    assert "to correct" not in capsys.readouterr().out
    loaded = load_strategy(Path("accelerate_configs/mine.yaml"))
    assert {key: getattr(loaded, key) for key in wanted} == wanted


def test_a_deepspeed_file_named_in_the_training_file_is_read(folder, capsys):
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3, "reduce_bucket_size": 1}}')
    assert convert(f"{AXOLOTL}deepspeed: ds.json\n") == 0
    assert yaml.safe_load(Path("recipes/file.yaml").read_text())["strategy"] == "zero3"
    assert "speed and memory only: reduce_bucket_size 1 (here 200000000); to keep yours" in capsys.readouterr().out
    assert convert(f"{AXOLOTL}deepspeed: gone.json\n", "--out", "recipes/other.yaml") == 0
    assert "deepspeed is 'gone.json': no such file" in capsys.readouterr().out


SILENT = {
    "a data set beside a mixture": (f"{HANDBOOK}dataset_name: some/third\n", "dataset_name is 'some/third': left out"),
    "a test split of a mixture": (f"{HANDBOOK}dataset_test_split: held\n", "dataset_test_split is 'held': left out"),
    "a loss of another stage": (f"{LLAMA_FACTORY}pref_loss: ipo\n", "pref_loss is 'ipo': goes with stage dpo"),
    "an adapter's key without adapter": (
        TRL.replace("use_peft: true", ""),
        "lora_r is 32: without an adapter, left out",
    ),
    "4 bits without adapter": (TRL.replace("use_peft: true", ""), "load_in_4bit is true: without an adapter, left out"),
    "epochs beside steps": (f"{TRL}num_train_epochs: 2\n", "num_train_epochs is 2: max_steps has precedence"),
    "steps without evaluation": (TRL.replace("steps\n", "'no'\n"), "eval_steps is 100: eval_strategy is no; left out"),
    "steps beside epochs": (TRL.replace("steps\n", "epoch\n"), "eval_steps is 100: eval_strategy is epoch; left out"),
    "a key twice under two names": (f"{TRL}max_seq_length: 9\nmax_length: 8\n", "data.max_length is 9 already"),
}


@pytest.mark.parametrize(("text", "line"), SILENT.values(), ids=SILENT)
def test_a_key_that_another_makes_void_is_listed(folder, capsys, text, line):
    assert convert(text, "--from", "llama-factory" if "stage" in text else "alignment-handbook") == 0
    assert line in capsys.readouterr().out


def test_a_value_without_a_counterpart_does_not_become_a_default(folder, capsys):
    assert convert(TRL.replace("max_steps: 200", "num_train_epochs: 0.5")) == 0
    recipe, printed = yaml.safe_load(Path("recipes/file.yaml").read_text()), capsys.readouterr().out
    assert "num_epochs" not in recipe["run"]
    assert "num_train_epochs is 0.5: epochs are whole here" in printed
    assert "neither num_epochs nor max_steps is given" in printed


def recipe_of(text: str) -> dict:
    Path("recipes/file.yaml").unlink(missing_ok=True)
    assert convert(text) == 0
    return yaml.safe_load(Path("recipes/file.yaml").read_text())


def recipe_of_script(text: str, *arguments: str) -> dict:
    assert convert(text, *arguments, name="run.sh") == 0
    return yaml.safe_load(Path("recipes/run.yaml").read_text())


def test_one_beta_has_the_other_s_default_beside_it(folder):
    assert recipe_of_trl("{model_name_or_path: m, dataset_name: d, adam_beta2: 0.95}")["optim"]["betas"] == [0.9, 0.95]


def test_rows_in_alpacas_prompt_have_its_template(folder, capsys):
    """axolotl trains on the answers, torchtune on the prompt too where the file is silent."""
    axolotl = AXOLOTL.replace("type: chat_template", "type: alpaca")
    assert recipe_of(axolotl)["data"]["chat_template"] == "alpaca"
    assert "objective" not in yaml.safe_load(Path("recipes/file.yaml").read_text())
    Path("recipes/file.yaml").unlink()
    rows = "dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: false}"
    torchtune = re.sub("dataset: .*", rows, TORCHTUNE)
    capsys.readouterr()
    recipe = recipe_of(torchtune)
    assert recipe["data"]["chat_template"] == "alpaca" and recipe["objective"] == {"train_on": "all"}
    assert recipe["data"]["columns"] == {"user": "instruction", "context": "input", "assistant": "output"}
    assert "train_on_input is true where the file is silent" in capsys.readouterr().out
    Path("recipes/file.yaml").unlink()
    recipe = recipe_of(torchtune.replace("packed: false", "train_on_input: false"))
    assert recipe["data"]["chat_template"] == "alpaca" and "objective" not in recipe


def test_alpacas_prompt_for_a_part_of_the_rows_is_listed(folder, capsys):
    mixed = AXOLOTL.replace("datasets:\n", "datasets:\n  - {path: other/rows, type: alpaca}\n")
    assert "chat_template" not in recipe_of(mixed)["data"]
    assert (
        "type alpaca: a run has one prompt; for Alpaca's, write data.chat_template: alpaca" in capsys.readouterr().out
    )


def test_long_texts_that_axolotl_splits_are_split(folder):
    recipe = recipe_of(AXOLOTL.replace("type: chat_template", "type: completion"))
    assert recipe["data"]["too_long"] == "split"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (LLAMA_FACTORY.replace("template: llama3", "template: qwen3"), "qwen3"),
        (LLAMA_FACTORY.replace("template: llama3", "template: qwen"), "qwen2_5"),
        (AXOLOTL + "chat_template: qwen_25\n", "qwen2_5"),
        (AXOLOTL + "chat_template: tokenizer_default\n", None),
    ],
)
def test_a_named_template_is_the_shipped_one(folder, text, name):
    assert recipe_of(text)["data"].get("chat_template") == name


def test_a_named_template_that_is_not_shipped_is_listed(folder, capsys):
    assert "chat_template" not in recipe_of(AXOLOTL + "chat_template: jamba\n")["data"]
    assert "chat_template is 'jamba': the tokenizer's own template is used" in capsys.readouterr().out


def test_every_named_template_has_its_file():
    keys = [tables().projects["llama-factory"].keys["template"], tables().projects["axolotl"].keys["chat_template"]]
    names = {name for key in keys for name in (key.values or {}).values() if name}
    assert len(names) >= 9 and names <= set(known_templates())


def test_parameters_of_experts_are_targets_beside_the_layers(folder):
    assert convert(AXOLOTL + "lora_target_parameters: [mlp.experts.gate_up_proj]\n") == 0
    targets = yaml.safe_load(Path("recipes/file.yaml").read_text())["adapter"]["targets"]
    assert targets == ["all-linear", "mlp.experts.gate_up_proj"]


def test_one_module_to_save_is_a_list_of_one(folder):
    assert convert(TRL + "lora_modules_to_save: lm_head\n") == 0
    assert yaml.safe_load(Path("recipes/file.yaml").read_text())["adapter"]["modules_to_save"] == ["lm_head"]


@pytest.mark.parametrize(
    "text",
    [
        "base_model: a/b\nsequence_len: 64\nnum_epochs: 1\ntokens: ['<a>', '<b>']\n",
        "base_model: a/b\nnum_epochs: 1\nspecial_tokens: {additional_special_tokens: ['<a>', '<b>'], eos_token: <e>}\n",
        "model_name_or_path: a\nfinetuning_type: full\nmax_steps: 1\nadd_special_tokens: <a>,<b>\nresize_vocab: true\n",
    ],
)
def test_added_tokens_are_new_tokens(folder, capsys, text):
    Path("file.yaml").write_text(text)
    convert(text)
    assert yaml.safe_load(Path("recipes/file.yaml").read_text())["model"]["new_tokens"] == ["<a>", "<b>"]
    said = capsys.readouterr().out
    assert "data.special_tokens: tokens" in said
    for key, words in {"resize_vocab": ", resize_vocab\n", "eos_token": "tokenizer_config.json"}.items():
        assert (key in text) == (words in said)


def test_nothing_is_overwritten(folder, capsys):
    assert convert(TRL) == 0
    before = Path("recipes/file.yaml").read_bytes()
    assert convert(AXOLOTL) == 2
    assert "recipes/file.yaml: exists, and is not overwritten" in capsys.readouterr().err
    assert Path("recipes/file.yaml").read_bytes() == before


REFUSED = {
    "two projects fit": ("model_name_or_path: m\nlearning_rate: 1e-4\n", [], "may be a file of trl or llama-factory"),
    "nobody's": ("a: 1\nb: 2\nc: 3\n", [], "Hugging Face TrainingArguments has 0, and not a, b, c; files of"),
    "a recipe of ours": ("batch: {}\noptim: {}\nrun: {}\n", [], "is a recipe already"),
    "no YAML name": (TRL, ["--out", "mine.json"], "--out is 'mine.json'; name a .yaml file"),
    "two trainings": (TRL, ["file.yaml"], "give one of them"),
    "no such file": (TRL, ["gone.yaml"], "gone.yaml: no such file"),
}


def test_two_strategies_are_not_mixed(capsys):
    files = [str(ROOT / name) for name in ("accelerate_configs/zero3.yaml", "ds_configs/zero2.json")]
    assert main(["convert", *files]) == 2
    assert "zero_optimization.stage is 2: these are two strategies" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_ends_with_2_and_writes_nothing(folder, capsys, text, arguments, message):
    assert convert(text, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not Path("recipes").exists()


def test_from_decides_between_two_and_leaves_a_distribution_alone(folder):
    Path("ds.json").write_text(json.dumps({**DISTRIBUTIONS["zero2"], "gradient_accumulation_steps": 2}))
    assert convert("model_name_or_path: m\nlearning_rate: 1e-4\n", "ds.json", "--from", "trl") == 0
    recipe = yaml.safe_load(Path("recipes/file.yaml").read_text())
    assert recipe["strategy"] == "zero2" and recipe["data"]["max_length"] == 1024


def test_every_counterpart_is_a_key_of_ours_and_every_other_key_has_advice():
    known = set(leaves(Recipe))
    for name, project in tables().projects.items():
        for path, key in project.keys.items():
            if key.ours is None:
                assert key.why, (name, path)
            elif not key.ours.startswith(("~", "strategy.")):
                assert key.ours.partition(".wandb.")[0] in known, (name, path, key.ours)
        assert {key for key in project.defaults if key[0] != "~"} <= known, name


def test_each_key_of_another_project_is_answered_in_a_recipe():
    own = {path.rpartition(".")[2] for path in leaves(Recipe)}
    near = [key for key in answers() if is_vague(key) and closest(key, own) is not None]
    foreign = sorted(answers().keys() - own - set(near))
    assert len(foreign) > 2000 and len(near) < 100
    _, mistakes = validate(Document("mine.yaml", dict.fromkeys(foreign, 1)), Recipe, answer_to)
    for key in foreign:
        (answer,) = [line for line in mistakes if line.startswith(f"mine.yaml: {key}: ")]
        assert "does not belong here; " in answer and not answer.endswith("; "), answer


ANSWERS = {
    "lr": "write it as optim.learning_rate",
    "num_train_epochs": "write it as run.num_epochs",
    "per_device_train_batch_size": "write it as batch.micro_batch_size",
    "max_seq_length": "write it as data.max_length",
    "lora_r": "write it as adapter.rank",
    "r": "write it as adapter.rank",
    "load_in_4bit": "write adapter.name: qlora",
    "report_to": "write it as run.trackers",
    "warmup_ratio": "write schedule.warmup_steps, a number of steps or a share of the run, as 0.03",
    "gradient_accumulation_steps": "it is derived: global_batch_size / (micro_batch_size x data-parallel processes)",
}


@pytest.mark.parametrize("key", ANSWERS)
def test_the_answer_in_a_recipe_is_our_key(key):
    assert str(answer_to(key)).startswith(ANSWERS[key])


def test_a_misspelt_section_is_no_argument_of_a_logger():
    assert answer_to("mode") is None and "run.trackers" in str(answer_to("metric_logger.mode"))
    _, mistakes = validate(Document("mine.yaml", {"mode": {}}), Recipe, answer_to)
    assert any(mistake.startswith("mine.yaml: mode: ") and "did you mean model?" in mistake for mistake in mistakes)


def test_a_name_that_the_user_chose_is_no_foreign_key():
    values = {"data": {"train": "python-stdlib", "eval": {"dataset": {"split": "test"}}}}
    _, mistakes = validate(Document("mine.yaml", values), Recipe, answer_to)
    assert "mine.yaml: data.eval.dataset.path: is missing; this key has no default" in mistakes


@pytest.mark.parametrize(
    "value", [0, -1, 0.5, "x", "", True, [1], ["a"], {"a": 1}, [{"a": 1}], [{"path": 3}]], ids=repr
)
def test_no_value_of_any_key_is_a_traceback(folder, value):
    for name, project in tables().projects.items():
        values: dict = {}
        for path in project.keys:
            *sections, last = path.split(".")
            home = values
            for section in sections:
                home = home.setdefault(section, {})
                if not isinstance(home, dict):
                    break
            else:
                home.setdefault(last, copy.deepcopy(value))
        assert convert(json.dumps(values), "--from", name, "--out", f"recipes/{name}.yaml", name="file.json") in (0, 2)


OTHER_TRAININGS = {
    "axolotl": ("base_model: m\nsequence_len: 64\ndatasets: [{path: r.jsonl}]\n", {
        "rl: gdpo": "it samples and scores answers while it trains",
        "rl: ebft": "it samples and scores answers while it trains",
        "load_in_8bit: true": "weights in 8 bits",
        "process_reward_model: true": "a reward model of steps",
        "use_eaft: true": "another loss",
        "reinit_weights: true": "new weights",
        "use_onebitllms: true": "of one bit",
        "model_config: {output_router_logits: true}": "a model of another configuration",
        "peft_init_lora_weights: pissa": "first weights of an adapter",
        "peft_layers_to_transform: [0, 1]": "of some layers",
        "lr_groups: [{name: a, modules: [q_proj], lr: 1e-4}]": "several rates",
        "overrides_of_model_config: {rope_scaling: {type: linear}}": "a model of another configuration",
        "adapter: llama-adapter": "an adapter that is not here",
        "qat: {weight_dtype: int4}": "quantization-aware training",
        "unfrozen_parameters: [lm_head]": "training of some layers",
        "optimizer: lion_8bit": "an optimizer that is not here",
        "lr_scheduler: rex": "a shape that is not here",
    }),
    "llama-factory": ("model_name_or_path: m\ncutoff_len: 64\ndataset: a\nfinetuning_type: full\n", {
        "stage: ppo": "rewards while training, which is not here",
        "finetuning_type: freeze": "training of some layers",
        "quantization_bit: 8": "weights have 4 bits or 16",
        "use_galore: true": "another optimizer",
        "optim: galore_adamw": "an optimizer that is not here",
        "pref_ftx: 0.5": "another loss",
        "rope_scaling: linear": "positions that are scaled otherwise",
    }),
    "torchtune": ("tokenizer: {max_seq_len: 64}\ncheckpointer: {checkpoint_dir: m}\ndataset: {source: r}\n", {
        "loss: {_component_: torchtune.dev.grpo.loss.GRPOSimpleLoss}": "it samples and scores answers",
        "loss: {_component_: torchtune.rlhf.loss.PPOLoss}": "it samples and scores answers",
        "teacher_model: {_component_: torchtune.models.llama3_1.llama3_1_8b}": "a teacher",
        "fake_quant_after_n_steps: 100": "quantization-aware training",
        "transform: {image_size: 560}": "pictures",
        "early_exit_loss: {layers: all}": "another loss",
    }),
    "automodel": ("step_scheduler: {num_epochs: 1}\ndataset: {path_or_dataset_id: d}\n", {
        "recipe: KnowledgeDistillationRecipeForNextTokenPrediction": "another training",
        "model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config}": "a model with new weights",
        "optimizer: {_target_: torch.optim.Adam, lr: 0.1, weight_decay: 0.1}": "whose decay is in the gradient",
        "optimizer: {_target_: dion.Muon, lr: 0.1}": "an optimizer that is not here",
        "neftune: {noise_alpha: 5}": "noise on embeddings",
    }),
    "llama-factory-v1": ("model: m\ncutoff_len: 64\ntrain_dataset: d\nmicro_batch_size: 1\n", {
        "model_class: cls": "another head",
        "peft_config: {name: freeze}": "training of some layers",
        "quant_config: {quantization_bit: 8}": "weights have 4 bits or 16",
        "pref_ftx: 0.1": "another loss",
    }),
    "trl": ("model_name_or_path: m\ndataset_name: d\nmax_length: 64\n", {
        "normalize_advantages: true": "rewards while training",
        "loss_type: cispo": "a loss of GRPO that is not here; write dapo, grpo or dr_grpo",
        "delta: 4.0": "a loss of GRPO that is not here",
        "off_policy_mask_threshold: 0.5": "a loss of GRPO that is not here",
        "repetition_penalty: 1.1": "the policy that is trained has none",
        "multi_objective_aggregation: normalize_then_sum": "the sum is compared within its group",
        "loss_type: [sigmoid, sft]": "no such objective",
        "loss_type: hinge": "another loss, which is not here",
        "task_name: mrpc": "a classifier",
        "router_aux_loss_coef: 0.01": "a loss of the router",
        "model_init_kwargs: {output_router_logits: true}": "a loss of the router",
        "mlm_probability: 0.15": "masked words",
    }),
    "alignment-handbook": ("model_name_or_path: m\ndataset_mixer: {d: 1}\nmax_length: 64\n", {
        "entropy_coef: 0.1": "a loss of GRPO that is not here",
        "sync_ref_model: true": "a reference that moves",
    }),
}  # fmt: skip


@pytest.mark.parametrize(
    ("project", "line"), [(project, line) for project, (_, lines) in OTHER_TRAININGS.items() for line in lines]
)
def test_what_is_no_training_here_is_refused_and_nothing_is_written(project, line, folder, capsys):
    text, lines = OTHER_TRAININGS[project]
    key = line.partition(":")[0]
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(f"{key}:"))
    assert convert(text, "--from", project) == 0
    Path("recipes/theirs.yaml").unlink(missing_ok=True)
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    assert convert(f"{text}{line}\n", "--from", project) == 2
    said = capsys.readouterr().err
    assert re.match(r"file\.yaml:\d+: [^\n]*: not the same training: ", said) and lines[line] in said
    assert sorted(Path().rglob("*")) == before


def test_without_a_number_of_processes_and_a_distribution_one_process_trains(folder):
    assert convert(OTHER_TRAININGS["trl"][0], "--from", "trl", "--out", "recipes/one.yaml") == 0
    assert yaml.safe_load(Path("recipes/one.yaml").read_text())["strategy"] == "single"


WSD = "lr_scheduler_kwargs: {num_decay_steps: 7, min_lr_ratio: 0.2, decay_type: linear}\n"


@pytest.mark.parametrize(
    ("text", "least"),
    [
        (TRL.replace("cosine", "cosine_with_min_lr") + "lr_scheduler_kwargs: {min_lr_rate: 0.1}\n", 0.1),
        (TRL.replace("cosine", "cosine_with_min_lr") + "lr_scheduler_kwargs: {min_lr: 1.0e-6}\n", None),
        (AXOLOTL + "cosine_min_lr_ratio: 0.25\n", 0.25),
        (TRL.replace("cosine", "warmup_stable_decay") + WSD, 0.2),
    ],
    ids=["share", "rate", "axolotl", "wsd"],
)
def test_the_rate_at_the_end_is_a_rate_or_its_share_of_the_peak(folder, text, least):
    recipe = recipe_of(text)
    is_wsd = "warmup_stable_decay" in text
    assert recipe["schedule"]["name"] == ("wsd" if is_wsd else "cosine")
    assert recipe["schedule"].get("decay_steps") == (7 if is_wsd else None)
    wanted = 1e-6 if least is None else least * recipe["optim"]["learning_rate"]
    assert recipe["schedule"]["min_learning_rate"] == pytest.approx(wanted)


def test_a_wsd_that_falls_as_a_cosine_is_listed(folder, capsys):
    recipe_of(TRL.replace("cosine", "warmup_stable_decay") + "lr_scheduler_kwargs: {num_decay_steps: 7}\n")
    assert "not in the file: its decay is half a cosine" in capsys.readouterr().out


def test_deepspeed_s_share_at_the_end_of_a_cosine_is_a_rate(folder, capsys):
    params = {"warmup_num_steps": 3, "total_num_steps": 20, "cos_min_ratio": 0.3}
    zero = {"scheduler": {"type": "WarmupCosineLR", "params": params}, "zero_optimization": {"stage": 2}}
    assert convert(json.dumps(zero | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}), name="file.json") == 0
    assert "min_learning_rate: 0.0003" in capsys.readouterr().out


@pytest.mark.parametrize(("epochs", "saves"), [(1, 1), (0.25, 4), (2, "1/2"), (0.3, None), (2.5, None)])
def test_saves_every_so_many_epochs_are_saves_per_epoch(folder, capsys, epochs, saves):
    text = "".join(line for line in V1.splitlines(True) if not line.startswith("save_"))
    assert recipe_of(text + f"save_epochs: {epochs}\n")["run"].get("saves_per_epoch") == saves
    assert ("save_epochs is" in capsys.readouterr().out) == (saves is None)


@pytest.mark.parametrize(
    ("more", "is_said"), [("", True), ("stage: pt\n", False), ("stage: dpo\n", True)], ids=["sft", "pt", "dpo"]
)
def test_that_llama_factory_cuts_prompt_and_answer_in_proportion_is_said(folder, capsys, more, is_said):
    text = "model_name_or_path: m\ndataset: d\ntemplate: qwen\nfinetuning_type: lora\ncutoff_len: 64\n"
    assert convert(text + (more or "stage: sft\n"), "--from", "llama-factory") == 0
    assert ("cuts prompt and answer in proportion" in capsys.readouterr().out) == is_said


ALL_COSTS = """\
model_name_or_path: m
dataset_name: d
logging_steps: 5
report_to: none
label_smoothing_factor: 0.1
tf32: true
push_to_hub: false
truncation_mode: keep_start
group_by_length: true
"""


def test_lines_come_by_what_they_cost_and_one_has_all_that_needs_nothing(folder, capsys):
    assert convert(ALL_COSTS, "--from", "trl") == 0
    said = capsys.readouterr().out
    changes, _, rest = said.partition("to know, or to decide:")
    assert "label_smoothing_factor is 0.1" in changes and "group_by_length is true" in changes
    assert "tf32 is true" in rest and "tf32" not in changes
    (line,) = [line for line in said.splitlines() if line.startswith("needs nothing: ")]
    named = set(line.removeprefix("needs nothing: ").split(", "))
    assert named == {"truncation_mode", "logging_steps", "push_to_hub"}


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3_offload"])
def test_of_a_shipped_strategy_nothing_is_to_decide(folder, capsys, name):
    assert main(["convert", f"ds_configs/{name}.json"]) == 0
    said = capsys.readouterr().out
    assert f"strategy: {name}\n" in said and "to decide" not in said and "trains otherwise" not in said
    assert said.count(f"strategy: {name}\n") == 1


def test_the_loss_scale_of_a_deepspeed_file_is_the_recipes_with_fp16_only(folder, capsys):
    block = {"initial_scale_power": 12, "hysteresis": 3, "min_loss_scale": 1}
    values = {"zero_optimization": {"stage": 2}, "train_batch_size": 8, "fp16": {"enabled": True, **block}}
    assert convert(json.dumps(values), name="ds.json") == 0
    text = re.split(r"for a recipe:\n|\n(?=needs nothing|to know)", capsys.readouterr().out)[1]
    recipe = yaml.safe_load(text)
    assert recipe["loss_scale"] == {"initial": 4096.0, "window": 1000, "hysteresis": 3, "minimum": 1.0}
    values["fp16"]["enabled"] = False
    assert convert(json.dumps(values | {"bf16": {"enabled": True}}), name="ds.json") == 0
    said = capsys.readouterr().out
    assert "loss_scale:" not in said and "fp16.hysteresis" in said


def test_fsdp1_is_said_to_be_for_earlier_runs(folder, capsys):
    assert convert(json.dumps(DISTRIBUTIONS["fsdp1"]), name="dist.json") == 0
    assert "for new ones write fsdp2" in capsys.readouterr().out


SILENT_FILES = {
    "trainer": ("{output_dir: out, weight_decay: 0.0}\n", {
        "batch.micro_batch_size": 8,
        "mixed_precision": "no", "optim.learning_rate": 5e-5, "optim.weight_decay": 0.0, "schedule.name": "linear",
        "run.num_epochs": 3,
        "run.save_every_steps": 500,
    }),
    "run-clm": ("{model_name_or_path: m, dataset_name: d, do_train: true}\n", {
        "mixed_precision": "no", "objective.name": "cpt", "data.max_length": 1024, "data.holdout": 0.05,
        "batch.micro_batch_size": 8, "optim.learning_rate": 5e-5, "schedule.name": "linear", "run.num_epochs": 3,
        "run.save_every_steps": 500,
    }),
    "trl": ("{model_name_or_path: m, dataset_name: d, use_peft: true}\n", {
        "mixed_precision": "bf16", "model.gradient_checkpointing": True, "data.max_length": 1024,
        "objective.train_on": "all", "adapter.name": "lora", "adapter.dropout": 0.05,
        "adapter.targets": ["q_proj", "v_proj"], "batch.micro_batch_size": 8, "optim.learning_rate": 2e-5,
        "schedule.name": "linear", "run.num_epochs": 3, "run.save_every_steps": 500,
    }),
    "trl, preferences": ("{model_name_or_path: m, dataset_name: d, beta: 0.1, use_peft: true}\n", {
        "mixed_precision": "bf16", "model.gradient_checkpointing": True, "data.max_length": 1024,
        "objective.name": "dpo", "objective.beta": 0.1, "adapter.name": "lora",
        "adapter.targets": ["q_proj", "v_proj"], "batch.micro_batch_size": 8, "optim.learning_rate": 1e-6,
        "schedule.name": "linear", "run.num_epochs": 3, "run.save_every_steps": 500,
    }),
    "alignment-handbook": ("{model_name_or_path: m, dataset_mixer: {d: 1.0}}\n", {
        "mixed_precision": "bf16", "model.gradient_checkpointing": True, "data.max_length": 1024,
        "data.packing": True,
        "objective.train_on": "all", "batch.micro_batch_size": 8, "optim.learning_rate": 2e-5,
        "schedule.name": "linear", "run.num_epochs": 3, "run.save_every_steps": 500,
    }),
    "llama-factory": ("{model_name_or_path: m, dataset: d}\n", {
        "mixed_precision": "bf16", "model.gradient_checkpointing": True,
        "adapter.name": "lora", "adapter.rank": 8, "adapter.alpha": 16.0,
        "batch.micro_batch_size": 8, "optim.learning_rate": 5e-5, "schedule.name": "linear", "run.num_epochs": 3,
        "run.save_every_steps": 500,
    }),
    "llama-factory, all weights": ("{model_name_or_path: m, dataset: d, finetuning_type: full, stage: pt}\n", {
        "mixed_precision": "no", "model.gradient_checkpointing": True,
        "objective.name": "cpt", "batch.micro_batch_size": 8,
        "optim.learning_rate": 5e-5, "schedule.name": "linear", "run.num_epochs": 3, "run.save_every_steps": 500,
    }),
    "llama-factory-v1": ("{model: m, train_dataset: d, peft_config: {name: lora}}\n", {
        "mixed_precision": "bf16", "model.gradient_checkpointing": True, "adapter.name": "lora", "adapter.rank": 8,
        "adapter.alpha": 16.0, "adapter.dropout": 0.05, "batch.micro_batch_size": 1,
        "optim.learning_rate": 1e-4, "optim.weight_decay": 0.01, "schedule.name": "constant", "run.num_epochs": 3,
    }),
    "axolotl": ("{base_model: m, datasets: [{path: d, type: chat_template}], learning_rate: 0.0001, adapter: lora}\n", {
        "mixed_precision": "bf16", "data.max_length": 512, "data.too_long": "drop", "adapter.name": "lora",
        "batch.micro_batch_size": 1, "optim.learning_rate": 1e-4, "schedule.warmup_steps": 0.03,
        "run.num_epochs": 1, "run.saves_per_epoch": 1,
    }),
    "torchtune": (
        "{model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, v_proj]},"
        " checkpointer: {checkpoint_dir: m}, dataset: {_component_: torchtune.datasets.chat_dataset, source: d},"
        " optimizer: {_component_: torch.optim.AdamW, lr: 0.0003}, batch_size: 2, epochs: 1, dtype: bf16}\n", {
        "mixed_precision": "bf16", "data.too_long": "error", "adapter.name": "lora", "adapter.rank": 8,
        "adapter.alpha": 16.0, "adapter.targets": ["q_proj", "v_proj"], "batch.micro_batch_size": 2,
        "optim.name": "adamw", "optim.learning_rate": 3e-4, "optim.weight_decay": 0.01, "optim.max_grad_norm": 0.0,
        "schedule.name": "constant", "run.num_epochs": 1, "run.saves_per_epoch": 1,
    }),
}  # fmt: skip
"""The least that each project trains with, and its own defaults: transformers 5.23's TrainingArguments, TRL 1.16's
SFTConfig, DPOConfig and ModelConfig (`disable_dropout` of preferences) and peft's layers of a Llama; LLaMA-Factory's
hparams/ and model/adapter.py, in its v1 config/ and core/base_trainer.py; axolotl's utils/schemas/ and
core/builders/base.py; torchtune's recipes, builders of models, and torch.optim.AdamW."""


@pytest.mark.parametrize("case", SILENT_FILES)
def test_where_a_file_is_silent_the_projects_own_defaults_are_written(folder, case):
    text, wanted = SILENT_FILES[case]
    assert convert(text, "--from", case.partition(",")[0]) == 0
    recipe = yaml.safe_load(Path("recipes/file.yaml").read_text())
    values = {f"{section}.{key}": value for section in recipe if isinstance(recipe[section], dict)
             for key, value in recipe[section].items()}  # fmt: skip
    values |= {key: value for key, value in recipe.items() if not isinstance(value, dict)}
    places = ("strategy", "model.name_or_path", "data.train", "batch.global_batch_size", "run.output_dir")
    assert {key: value for key, value in values.items() if key not in places} == _as_yaml(wanted)


RUN_CLM = "model_name_or_path: m\ntrain_file: r.txt\nblock_size: 512\nvalidation_split_percentage: 10\n"


def test_a_file_of_run_clm_is_known_by_its_keys_and_continues_pretraining(folder, capsys):
    recipe = recipe_of(RUN_CLM + "max_train_samples: 7\nbf16: true\n")
    assert recipe["objective"] == {"name": "cpt"} and recipe["optim"]["learning_rate"] == 5e-5
    assert recipe["data"] == {"train": {"path": "r.txt", "max_rows": 7}, "holdout": 0.1, "max_length": 512}
    assert "from file.yaml (transformers' run_clm.py)" in capsys.readouterr().out
    Path("recipes/file.yaml").unlink()
    recipe = recipe_of(RUN_CLM + "validation_file: v.txt\n")
    assert recipe["data"]["eval"] == {"eval": {"path": "v.txt"}} and "holdout" not in recipe["data"]


IN_ANY_CASE = {
    "run-clm": (RUN_CLM, "joins all texts and cuts them into blocks", None),
    "llama-factory": (
        "{model_name_or_path: m, dataset: d, stage: pt, finetuning_type: full}\n",
        "joins all texts and cuts them into blocks",
        "packing: false",
    ),
    "llama-factory-v1": (
        "{model: m, train_dataset: d, micro_batch_size: 1, cutoff_len: 64}\n",
        "the last batch of an epoch may be smaller, where LLaMA-Factory v1 leaves its rows out",
        "max_steps: 3",
    ),
    "torchtune": (OTHER_TRAININGS["torchtune"][0], "norms and biases have weight decay there", None),
}


@pytest.mark.parametrize("project", IN_ANY_CASE)
def test_what_a_project_does_otherwise_in_any_case_is_said_first(project, folder, capsys):
    text, said, without = IN_ANY_CASE[project]
    values = yaml.safe_load(text)
    assert convert(json.dumps(values), "--from", project, name="file.json") == 0
    first, _, rest = capsys.readouterr().out.partition("to know, or to decide:")
    assert said in first.partition("trains otherwise, or may:")[2] and said not in rest
    if without is not None:
        key, value = without.split(": ")
        values[key] = yaml.safe_load(value)
        out = ["--out", "recipes/other.yaml"]
        assert convert(json.dumps(values), "--from", project, *out, name="other.json") == 0
        assert said not in capsys.readouterr().out


def test_adapters_of_preferences_have_no_dropout_where_the_project_turns_it_off(folder, capsys):
    text = "{model_name_or_path: m, dataset_name: d, beta: 0.1, use_peft: true, lora_dropout: 0.2"
    assert "dropout" not in recipe_of_trl(f"{text}}}")["adapter"]
    assert "preferences are trained without dropout" in capsys.readouterr().out
    Path("recipes/file.yaml").unlink()
    assert recipe_of_trl(f"{text}, disable_dropout: false}}")["adapter"]["dropout"] == 0.2


def recipe_of_trl(text: str) -> dict:
    assert convert(text, "--from", "trl") == 0
    return yaml.safe_load(Path("recipes/file.yaml").read_text())


@pytest.mark.parametrize(("steps", "warmup"), [(1000, 30), (20_000, 100), (40, 2), (20, 0)])
def test_axolotls_own_warm_up_is_three_percent_of_the_steps_and_at_most_100(folder, steps, warmup):
    recipe = recipe_of(AXOLOTL + f"max_steps: {steps}\n")
    assert recipe["schedule"]["warmup_steps"] == warmup


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"])
@pytest.mark.parametrize("project", ["trl", "llama-factory"])
def test_the_rates_of_a_schedule_are_those_of_transformers(kind, project, folder):
    """After the warm-up step by step; in it each is that of transformers' next step. `constant` has none there."""
    import torch
    from transformers import get_scheduler

    own = {"lr_scheduler_type": kind, "warmup_steps": 4, "max_steps": 20, "learning_rate": 1.0, "warmup_ratio": 0}
    values = yaml.safe_load({"trl": TRL, "llama-factory": LLAMA_FACTORY}[project]) | own
    recipe = recipe_of(yaml.dump(values))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=4, num_training_steps=20)
    rates = []
    for _ in range(20):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    checked, mistakes = validate(Document("r.yaml", recipe), Recipe)
    assert checked is not None and mistakes == []
    schedule = checked.schedule
    steps = schedule.for_length(20).warmup_steps
    assert steps == (0 if kind == "constant" else 4)
    for step in range(19):
        ours = schedule.warmup_factor(step) if step < steps else schedule.factor(step, 20)
        is_ahead = step < steps or kind == "inverse_sqrt"  # which goes on with the steps of its warm-up
        assert ours == pytest.approx(rates[step + is_ahead])


def test_axolotls_least_share_of_the_peak_is_that_of_a_cosine(folder, capsys):
    text = AXOLOTL + "cosine_min_lr_ratio: 0.1\n"
    assert recipe_of(text)["schedule"]["min_learning_rate"] == pytest.approx(2e-5)
    assert "needs nothing" in (said := capsys.readouterr().out) and "cosine_min_lr_ratio" not in said
    assert recipe_of(text.replace("lr_scheduler: cosine", "lr_scheduler: constant"))["schedule"] == {"name": "constant"}
    assert recipe_of(text.replace("lr_scheduler: cosine", "lr_scheduler: linear"))["schedule"].keys() == {
        "name",
        "warmup_steps",
    }
    assert "cosine_min_lr_ratio" in capsys.readouterr().out.rpartition("needs nothing")[2]


V1 = """\
model: some/model
model_class: llm
template: qwen3_nothink
peft_config:
  name: lora
  r: 32
  target_modules: all
kernel_config:
  name: auto
  include_kernels: auto
quant_config: null
dist_config:
  name: fsdp2
  dcp_path: null
train_dataset: sets.yaml
output_dir: outputs/v1
micro_batch_size: 2
global_batch_size: 16
cutoff_len: 512
learning_rate: 5.0e-5
max_steps: 90
"""


def test_a_file_of_llama_factorys_v1_format_is_read_with_its_sources(folder, capsys):
    Path("sets.yaml").write_text(
        "a: {path: some/rows, size: 20}\nb: {file_name: b.jsonl, dataset_dir: data, weight: 2}\n"
    )
    recipe = recipe_of(V1)
    assert "from file.yaml (LLaMA-Factory v1)" in capsys.readouterr().out
    assert recipe == _as_yaml({
        "strategy": "fsdp2",
        "mixed_precision": "bf16",
        "model": {"name_or_path": "some/model", "gradient_checkpointing": True},
        "data": {
            "train": [{"path": "some/rows", "max_rows": 20}, {"path": "data/b.jsonl", "weight": 2}],
            "max_length": 512, "chat_template": "qwen3_2507",
        },
        "adapter": {"name": "lora", "rank": 32, "alpha": 16.0, "dropout": 0.05, "targets": ["all-linear"]},
        "batch": {"global_batch_size": 16, "micro_batch_size": 2},
        "optim": {"learning_rate": 5e-5, "weight_decay": 0.01},
        "schedule": {"name": "constant"},
        "run": {"max_steps": 90, "output_dir": "outputs/v1"},
    })  # fmt: skip


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    "text",
    [
        f"{HANDBOOK}chat_template: '{TEMPLATE}'\n",
        f"{AXOLOTL}chat_template_jinja: '{TEMPLATE}'\n",
        f"{AXOLOTL}chat_template: jinja\nchat_template_jinja: '{TEMPLATE}'\n",
    ],
)
def test_a_template_in_a_file_is_written_beside_the_recipe(folder, text):
    assert recipe_of(text)["data"]["chat_template"] == "recipes/file.jinja"
    assert Path("recipes/file.jinja").read_text() == TEMPLATE
    Path("recipes/file.yaml").unlink()
    assert convert(text) == 2, "the template that is there is not overwritten"


def test_references_stand_for_other_keys_also_in_longer_texts(folder, capsys):
    text = TORCHTUNE.replace("output_dir: outputs/tuned", "base: outs\nrun: ${base}/a\noutput_dir: ${run}/tuned")
    text = text.replace("gradient_accumulation_steps: 4", "gradient_accumulation_steps: ${optimizer.steps}")
    recipe = recipe_of(text.replace("fused: true", "steps: 8").replace("epochs: 1", "epochs: ${nowhere}"))
    assert recipe["run"]["output_dir"] == "outs/a/tuned" and recipe["batch"]["global_batch_size"] == 16
    assert "epochs is '${nowhere}': refers to what is not in this file" in capsys.readouterr().out


def test_a_reference_in_a_circle_is_listed(folder, capsys):
    recipe_of(TORCHTUNE.replace("epochs: 1", "epochs: ${other}\nother: ${epochs}"))
    assert re.search(r"epochs is '\$\{other\}'; \d+: other is '\$\{epochs\}': refers to what", capsys.readouterr().out)


def test_torchtunes_validation_set_is_evaluated(folder, capsys):
    text = f"{TORCHTUNE}dataset_val: {{_component_: torchtune.datasets.chat_dataset, source: o/rows, split: test}}\n"
    recipe = recipe_of(f"{text}run_val_every_n_steps: 50\nbatch_size_val: ${{batch_size}}\n")
    assert recipe["data"]["eval"] == {"eval": {"path": "o/rows", "split": "test"}}
    assert recipe["run"]["eval_every_steps"] == 50 and "batch_size_val" in capsys.readouterr().out.splitlines()[-2]


def test_two_slices_of_one_split_hold_out_the_rest(folder, capsys):
    text = f"{TORCHTUNE}dataset_val: {{source: some/chats, split: 'train[95%:]'}}\n".replace(":10%]", ":95%]")
    recipe = recipe_of(text)
    assert recipe["data"]["holdout"] == 0.05 and "eval" not in recipe["data"]
    assert recipe["data"]["train"] == "some/chats" and "max_rows" not in capsys.readouterr().out


def test_several_data_sets_of_torchtune_and_their_columns(folder):
    renamed = "{source: a/b, column_map: {input: q, output: a}}"
    recipe = recipe_of(re.sub("dataset: .*", f"dataset: [{renamed}, {{source: json, data_files: r.jsonl}}]", TORCHTUNE))
    columns = {"user": "q", "assistant": "a"}
    assert recipe["data"]["train"] == [{"path": "a/b", "columns": columns}, {"path": "r.jsonl"}]


def test_a_number_of_held_out_rows_is_no_share(folder, capsys):
    assert "holdout" not in recipe_of(AXOLOTL.replace("val_set_size: 0.05", "val_set_size: 100"))["data"]
    assert "val_set_size is 100: so many rows; data.holdout is a share" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--from", "llama-factory"], ["--from", "trl"]])
def test_a_file_of_no_training_is_refused_whosever_it_is_said_to_be(folder, capsys, arguments):
    compose = "services: {web: {image: x}}\nvolumes: {a: {}}\nnetworks: {b: {}}\n"
    assert convert(compose, *arguments) == 2
    assert "of its 3 keys" in capsys.readouterr().err and not Path("recipes").exists()


def test_times_an_epoch_stay_times_an_epoch(folder, capsys):
    run = recipe_of(AXOLOTL.replace("evals_per_epoch: 4", "evals_per_epoch: 2\nsaves_per_epoch: 1"))["run"]
    assert (run["evals_per_epoch"], run["saves_per_epoch"]) == (2, 1)
    Path("recipes/file.yaml").unlink()
    run = recipe_of(AXOLOTL.replace("val_set_size: 0.05", "val_set_size: 0"))["run"]
    assert "evals_per_epoch" not in run and "left out, as there are no held-out rows" in capsys.readouterr().out
    Path("recipes/file.yaml").unlink()
    text = TRL.replace("eval_strategy: steps", "eval_strategy: epoch").replace("eval_steps: 100\n", "")
    run = recipe_of(text + "save_strategy: epoch\n")["run"]
    assert (run["evals_per_epoch"], run["saves_per_epoch"]) == (1, 1) and "eval_every_steps" not in run


MEANT = {
    "objective.name=ppo": "rewards while training, which is not here; grpo, dpo and kto_zero",
    "objective.name=gspo": "write name: grpo, importance_sampling_level: sequence",
    "objective.name=kto": "write kto_zero, which has its reference point at 0",
    "objective.name=pretrain": "write cpt",
    "adapter={name: pissa}": "write lora",
    "optim.name=paged_adamw_8bit": "write adamw_8bit",
    "optim.name=Lion": "an optimizer that is not here",
    "schedule.name=warmup_stable_decay": "write wsd, and decay_steps",
    "run.trackers=[swanlab]": "a tracker that is not here; metrics.jsonl",
    "data.too_long=truncate": "write cut",
    "mixed_precision=fp32": "write 'no'",
    "mixed_precision=bfloat16": "write bf16",
    "model.gradient_checkpointing=unsloth": "write offload",
    "strategy=deepspeed": "write zero1, zero2 or zero3",
    "strategy=ds_z3_offload_config": "write zero3_offload",
    "strategy=no_shard": "write ddp",
}


@pytest.mark.parametrize("assignment", MEANT)
def test_a_value_of_another_project_is_told_what_it_means(assignment):
    with pytest.raises(RecipeError) as caught:
        check_strategy(load_recipe(ROOT / "recipes/quickstart.yaml", [assignment]))
    (mistake,) = caught.value.mistakes
    assert MEANT[assignment] in mistake and "did you mean" not in mistake and "use '" not in mistake


def check_strategy(recipe: Recipe) -> None:
    if mistakes := missing_strategy(Path(recipe.strategy).stem, lambda: "strategy"):
        raise RecipeError(mistakes)


def test_what_a_value_means_is_never_said_of_one_that_is_here():
    for key, values in tables().meanings.items():
        for value in values:
            text = f"[{value!r}]" if key == "run.trackers" else repr(value)
            section = f"adapter={{name: {text}}}" if key == "adapter.name" else f"{key}={text}"
            with pytest.raises(RecipeError) as caught:
                check_strategy(load_recipe(ROOT / "recipes/quickstart.yaml", [section]))
            assert len(caught.value.mistakes) == 1, section


def test_what_a_file_calls_a_run_in_wandb_goes_along(folder, capsys):
    def trackers_of(text: str) -> Any:
        Path("recipes/file.yaml").unlink(missing_ok=True)
        return recipe_of(AXOLOTL.replace("wandb_project:\n", text))["run"].get("trackers")

    named = "wandb_project: sums\nwandb_entity: us\nwandb_name: first\nwandb_mode: offline\n"
    wandb = {"project": "sums", "entity": "us", "name": "first", "mode": "offline"}
    assert trackers_of(named) == {"wandb": wandb}
    assert trackers_of(f"{named}use_tensorboard: true\n") == {"wandb": wandb, "tensorboard": {}}
    capsys.readouterr()
    assert trackers_of("wandb_name: first\n") is None  # as in axolotl, which asks for a project
    assert "wandb_name is 'first': the file does not turn wandb on" in capsys.readouterr().out


TORCHTUNE_ROWS = """\
tokenizer: {{_component_: torchtune.models.llama3.llama3_tokenizer, path: /tmp/m/tokenizer.model, max_seq_len: 512}}
dataset:
  _component_: torchtune.datasets.{kind}_dataset
  source: a/b
  {packed}
model: {{_component_: torchtune.models.llama3_2.llama3_2_1b}}
checkpointer: {{_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/m}}
optimizer: {{_component_: torch.optim.AdamW, lr: 2e-5}}
batch_size: 2
epochs: 1
"""


@pytest.mark.parametrize(
    ("kind", "packed", "is_cut"),
    [
        ("text_completion", "packed: true", True),
        ("text_completion", "packed: true\n  split_across_pack: false", False),
        ("text_completion", "packed: false", False),
        ("alpaca", "packed: true", False),
    ],
)
def test_torchtune_cuts_packed_texts_where_the_file_is_silent(folder, capsys, kind, packed, is_cut):
    assert convert(TORCHTUNE_ROWS.format(kind=kind, packed=packed)) == 0
    said = "a text is cut where its packed row is full" in capsys.readouterr().out
    assert said == is_cut


def test_axolotls_rows_of_texts_are_a_stream_of_continued_pretraining(folder, capsys):
    rows = "pretraining_dataset: [{path: allenai/c4, name: en, type: pretrain, text_column: body}]\nmax_steps: 99\n"
    recipe = recipe_of(re.sub(r"(?s)datasets:.*?shards: 3\n", rows, AXOLOTL).replace("val_set_size: 0.05\n", ""))
    assert recipe["objective"] == {"name": "cpt"} and recipe["data"]["streaming"] is True
    assert recipe["data"]["train"] == {"path": "allenai/c4", "name": "en", "columns": {"text": "body"}}


@pytest.mark.parametrize(
    ("more", "too_long", "said"),
    [
        ("", "split", "the last min(256, (sequence_len - 1) // 2) tokens of the one before"),
        ("excess_length_strategy: drop\n", "split", "of no effect on pretraining_dataset; data.too_long is split"),
        ("sample_packing: false\n", "cut", "without sample_packing a text is cut at its end: data.too_long cut"),
    ],
)
def test_no_long_text_of_axolotls_pretraining_is_left_out(folder, capsys, more, too_long, said):
    """axolotl 067b021c: `PretrainTokenizationStrategy._tokenize` returns overflowing tokens with a stride, and
    `encode_streaming` truncates; neither drops a text."""
    rows = "pretraining_dataset: [{path: allenai/c4, name: en, type: pretrain}]\nmax_steps: 99\n"
    text = re.sub(r"(?s)datasets:.*?shards: 3\n", rows, AXOLOTL).replace("val_set_size: 0.05\n", "")
    text = text.replace("sample_packing: true\n", "") if "sample_packing" in more else text
    assert recipe_of(f"{text}{more}")["data"]["too_long"] == too_long
    printed = capsys.readouterr().out
    assert said in printed and "data.too_long 'drop'" not in printed
    assert recipe_of(AXOLOTL)["data"]["too_long"] == "drop", "that of fine-tuning stays"


HANDBOOK_SFT = """\
model_name_or_path: some/model
dataset_mixer: {some/chats: 1.0}
dataset_splits: [train_sft, test_sft]
learning_rate: 2.0e-5
max_seq_length: 2048
max_steps: 9
per_device_train_batch_size: 16
"""


@pytest.mark.parametrize("packing", ["", "packing: true\n", "packing: false\n"])
def test_the_handbooks_scripts_that_mix_pack_whatever_the_file_says(folder, capsys, packing):
    """`packing=True` in the call of SFTTrainer (alignment-handbook v0.3.0, scripts/run_sft.py, line 174): the argument
    decides, and not the file."""
    assert recipe_of(f"{HANDBOOK_SFT}{packing}")["data"]["packing"] is True
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "packing=True in run_sft.py" in line]
    assert "dataset_mixer is" in line and "joined and cut" in line
    assert f"of up to 2048 tokens, {16 * 2048} a step" in printed
    assert ("packing is false: left out" in printed) == ("false" in packing)
    assert "packing" not in recipe_of(HANDBOOK)["data"], "run_dpo.py does not pack"
    of_today = HANDBOOK_SFT.replace("dataset_mixer: {some/chats: 1.0}", "dataset_name: some/chats")
    assert "packing" not in recipe_of(of_today.replace("dataset_splits: [train_sft, test_sft]\n", ""))["data"]


MIXTURE = """\
model_name_or_path: some/model
dataset_mixture:
  datasets:
    - {id: a/b, config: SFT, split: s, columns: [messages, chat_template_kwargs], weight: 0.5}
    - {id: a/c, columns: [prompt, messages]}
  seed: SEED
  test_split_size: null
learning_rate: 2.0e-5
per_device_train_batch_size: 4
max_steps: 9
"""


@pytest.mark.parametrize(("seed", "is_named"), [(0, False), (5, True)])
def test_a_mixture_has_each_of_its_keys_in_the_recipe_or_in_a_list(folder, capsys, seed, is_named):
    """alignment-handbook 925acdf, src/alignment/data.py: `select_columns`, and `shuffle(seed=seed)` before a part is
    taken, with 0 where the file has no seed."""
    text = MIXTURE.replace("SEED", str(seed))
    assert convert(text, "--from", "alignment-handbook", "--json") == 0
    answered = json.loads(capsys.readouterr().out)
    columns = {"messages": "messages", "chat_template_kwargs": "chat_template_kwargs"}
    source = {"path": "a/b", "name": "SFT", "split": "s", "weight": 0.5, "columns": columns}
    assert answered["settings"]["data"]["train"] == [source, {"path": "a/c"}]
    (line,) = [line for line in answered["changes"] if "dataset_mixture is" in line]
    assert "a fraction became weight" in line and "columns ['prompt', 'messages']: no other is read there" in line
    assert (f"seed {seed}: the rows that are held out" in line) == is_named
    assert ("dataset_mixture.seed" in answered["idle"]) != is_named
    assert "dataset_mixture.test_split_size" in answered["idle"]


def test_a_mixture_that_streams_is_a_stream(folder, capsys):
    text = MIXTURE.replace("seed: SEED", "streaming: true").replace(", weight: 0.5", "")
    data = recipe_of(text)["data"]
    assert data["streaming"] is True and "weight" not in data["train"][0]
    assert "fraction" not in capsys.readouterr().out


def test_a_renamed_part_of_a_message_without_a_counterpart_is_named(folder, capsys):
    mappings = "message_property_mappings: {role: from, content: value, weight: keep}"
    columns = recipe_of(AXOLOTL.replace("shards: 3", mappings))["data"]["train"]["columns"]
    assert columns == {"messages": "talk", "role": "from", "content": "value"}
    assert "message_property_mappings of weight: no counterpart" in capsys.readouterr().out


BUILDERS = {
    "samsum": ({"path": "Samsung/samsum"}, {"user": "dialogue", "assistant": "summary"}),
    "alpaca": ({"path": "tatsu-lab/alpaca"}, {"user": "instruction", "context": "input", "assistant": "output"}),
    "cnn_dailymail_articles": ({"path": "ccdv/cnn_dailymail", "name": "3.0.0"}, {"text": "article"}),
    "wikitext": ({"path": "EleutherAI/wikitext_document_level", "name": "wikitext-103-v1"}, {"text": "page"}),
    "stack_exchange_paired": (
        {"path": "lvwerra/stack-exchange-paired"},
        {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
    ),
}
"""The defaults of torchtune's builders at bd2a0fc7 (torchtune/datasets/), by hand."""


@pytest.mark.parametrize("name", BUILDERS)
def test_a_builder_of_torchtunes_reads_its_own_columns_unless_the_file_maps_others(folder, capsys, name):
    source, columns = BUILDERS[name]
    rows = f"_component_: torchtune.datasets.{name}_dataset"
    data = recipe_of(re.sub("dataset: .*", f"dataset: {{{rows}}}", TORCHTUNE))["data"]
    assert data["columns"] == columns
    assert data["train"] == (source if len(source) > 1 else source["path"])
    said = "the folder data/rl of the data set" in capsys.readouterr().out
    assert said == (name == "stack_exchange_paired")
    of_list = recipe_of(re.sub("dataset: .*", f"dataset: [{{{rows}}}, {{source: o/rows}}]", TORCHTUNE))["data"]
    assert of_list["train"][0] == {**source, "columns": columns} and "columns" not in of_list
    printed = capsys.readouterr().out
    assert ("the folder data/rl of the data set" in printed) == said
    is_alpaca = name == "alpaca"
    assert ("write data.chat_template: alpaca" in printed) == ("write objective.train_on: all" in printed) == is_alpaca


def test_a_map_of_columns_is_read_as_its_builder_has_them(folder):
    """`input` is the context of Alpaca's rows, and the question of others."""
    mapped = "column_map: {instruction: q, input: c, output: a}"
    rows = f"{{_component_: torchtune.datasets.alpaca_dataset, source: a/b, {mapped}}}"
    columns = {"user": "q", "context": "c", "assistant": "a"}
    assert recipe_of(re.sub("dataset: .*", f"dataset: {rows}", TORCHTUNE))["data"]["columns"] == columns
    of_list = recipe_of(re.sub("dataset: .*", f"dataset: [{rows}, {{source: o/rows}}]", TORCHTUNE))
    assert of_list["data"]["train"][0] == {"path": "a/b", "columns": columns}


def test_axolotls_preferences_name_their_columns(folder, capsys):
    text = (
        "  - {path: a/b, type: chat_template.default, field_messages: talk, field_chosen: good, field_rejected: bad}\n"
    )
    recipe = recipe_of(re.sub(r"(?s)  - path: some.*?shards: 3\n", text, AXOLOTL) + "rl: dpo\n")
    assert recipe["data"]["train"]["columns"] == {"prompt": "talk", "chosen": "good", "rejected": "bad"}
    assert "no counterpart" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("named", "advice"),
    [("deepspeed_configs/zero2.json", "write strategy: zero2"), ("ds_z3_config.json", "write strategy: zero3")],
)
def test_a_deepspeed_file_that_is_not_there_is_known_by_its_name(folder, capsys, named, advice):
    recipe_of(f"{AXOLOTL}deepspeed: {named}\n")
    assert f"no such file; give it to `convert` beside this one; or, by its name, {advice}" in capsys.readouterr().out


def test_a_strategy_of_several_processes_is_checked_with_as_many(folder, capsys):
    assert convert(f"{TORCHTUNE}tensor_parallel_dim: 2\n".replace("fsdp_cpu_offload: true", "")) == 0
    assert "fine under accelerate_configs/tp.yaml" in capsys.readouterr().out


def test_one_loss_in_a_list_is_that_loss(folder, capsys):
    recipe = recipe_of_trl("{model_name_or_path: m, dataset_name: d, loss_type: [sigmoid]}")
    assert recipe["objective"] == {"name": "dpo"}


def test_the_best_model_and_early_stopping_stay_where_each_checkpoint_is_evaluated(folder, capsys):
    text = TRL.replace("eval_strategy: steps", "eval_strategy: epoch").replace("eval_steps: 100\n", "")
    best = text + "load_best_model_at_end: true\nsave_strategy: epoch\n"
    run = recipe_of(best)["run"]
    assert (run["export"], run["keep_best"], run["evals_per_epoch"], run["saves_per_epoch"]) == ("best", 1, 1, 1)
    Path("recipes/file.yaml").unlink()
    assert "export" not in recipe_of(best.replace("save_strategy: epoch", "save_strategy: 'no'"))["run"]
    assert "load_best_model_at_end is true: only where each checkpoint is evaluated" in capsys.readouterr().out
    Path("recipes/file.yaml").unlink()
    assert recipe_of(f"{AXOLOTL}early_stopping_patience: 3\n")["run"]["early_stopping_patience"] == 3


def test_trl_evaluates_the_split_test_where_a_file_asks_for_evaluations_only(folder):
    text = "{model_name_or_path: m, dataset_name: d, dataset_config: c"
    recipe = recipe_of_trl(f"{text}, eval_strategy: steps, eval_steps: 9}}")
    assert recipe["data"]["eval"] == {"path": "d", "name": "c", "split": "test"}
    Path("recipes/file.yaml").unlink()
    assert "eval" not in recipe_of_trl(f"{text}}}")["data"]


@pytest.mark.parametrize(
    ("text", "project", "objective"),
    [
        (f"{HANDBOOK}loss_type: simpo\nsimpo_gamma: 1.4\ncpo_alpha: 0\n", "trl",
         {"name": "simpo", "beta": 0.01, "gamma": 1.4, "nll_weight": 0}),
        (f"{AXOLOTL}rl: simpo\nrl_beta: 2.0\n", "axolotl",
         {"name": "simpo", "beta": 2.0, "gamma": 0.5, "nll_weight": 1.0}),
        (LLAMA_FACTORY.replace("stage: sft", "stage: dpo") + "pref_loss: simpo\nsimpo_gamma: 0.7\n", "llama-factory",
         {"name": "simpo", "beta": 0.1, "gamma": 0.7, "nll_weight": 0.0}),
        (f"{HANDBOOK}loss_type: sigmoid\ncpo_alpha: 0.5\n", "trl", {"name": "cpo", "beta": 0.01, "nll_weight": 0.5}),
    ],
    ids=["trl", "axolotl", "llama-factory", "cpo"],
)  # fmt: skip
def test_simpo_and_cpo_have_the_settings_of_their_project(folder, text, project, objective):
    assert convert(text, "--from", project) == 0
    assert yaml.safe_load(Path("recipes/file.yaml").read_text())["objective"] == objective


DPO_OF_AXOLOTL = (
    "base_model: m\ndatasets: [{path: d, type: chat_template}]\nsequence_len: 64\nmicro_batch_size: 2\n"
    "learning_rate: 2e-5\nrl: dpo\nrl_beta: 0.1\n"
)
SFT_OF_LLAMA_FACTORY = "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ndataset: d\ncutoff_len: 64\n"
TT = (
    "tokenizer: {max_seq_len: 64}\ncheckpointer: {checkpoint_dir: m}\nbatch_size: 2\nepochs: 1\n"
    "dataset: {_component_: torchtune.datasets.chat_dataset, source: r}\n"
)
COUNTERPARTS = {
    "LLaMA-Factory's Muon": ("llama-factory", f"{SFT_OF_LLAMA_FACTORY}use_muon: true\n", "optim.name", "muon"),
    "LLaMA-Factory's reward model": (
        "llama-factory", SFT_OF_LLAMA_FACTORY.replace("stage: sft", "stage: rm"), "objective.name", "reward"),
    "axolotl's smoothing": (
        "axolotl", f"{DPO_OF_AXOLOTL}dpo_label_smoothing: 0.1\n", "objective.label_smoothing", 0.1),
    "axolotl's reward model": (
        "axolotl", f"{AXOLOTL}reward_model: true\n", "objective.name", "reward"),
    "axolotl's streaming": ("axolotl", f"{AXOLOTL}streaming: true\n", "data.streaming", True),
    "axolotl's trackers": (
        "axolotl", f"{AXOLOTL}use_tensorboard: true\nuse_mlflow: true\n", "run.trackers", ["tensorboard", "mlflow"]),
    "axolotl's offloading": (
        "axolotl", f"{AXOLOTL}activation_offloading: true\n", "model.gradient_checkpointing", "offload"),
    "torchtune's paged AdamW": (
        "torchtune", f"{TT}optimizer: {{_component_: bitsandbytes.optim.PagedAdamW, lr: 2e-5}}\n",
        "optim.name", "adamw"),
    "torchtune's context parallel": ("torchtune", f"{TT}context_parallel_dim: 2\n", "strategy", "ddp_sp"),
    "TRL's reward model": (
        "trl", "{model_name_or_path: m, dataset_name: d, center_rewards_coefficient: 0.01}",
        "objective.center_rewards_coefficient", 0.01),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTERPARTS)
def test_what_is_here_is_taken_whatever_its_name_there(case, folder):
    project, text, key, value = COUNTERPARTS[case]
    assert convert(text, "--from", project) == 0
    section: dict = yaml.safe_load(Path("recipes/file.yaml").read_text())
    for name in key.split("."):
        section = section[name]
    assert section == value


TRAINS_OTHERWISE = {
    "reasoning that is taken out": (f"{SFT_OF_LLAMA_FACTORY}enable_thinking: false\n", "enable_thinking is false"),
    "scales that are not quantized": (
        SFT_OF_LLAMA_FACTORY.replace("full", "lora") + "quantization_bit: 4\ndouble_quantization: false\n",
        "double_quantization is false"),
    "tokens in a mapping": (f'{AXOLOTL}tokens: {{pad_token: "<pad>"}}\n', "tokens is an object"),
    "roles that are trained": (
        AXOLOTL.replace("    shards: 3", "    roles_to_train: [user, assistant]"),
        "roles_to_train ['user', 'assistant']"),
    "packed rows in a batch": (
        AXOLOTL, "a batch of axolotl counts packed rows of up to 4096 tokens, 32768 a step, and here samples."
        " In the place of batch.micro_batch_size write batch.micro_batch_tokens: 8192"),
    "rows in their order": (f"{AUTOMODEL}dataloader: {{shuffle: false}}\n", "dataloader.shuffle is false"),
    "the rows of KTO in their order": (
        "{model_name_or_path: m, dataset_name: d, loss_type: kto}",
        "not in the file, where TRL has train_sampling_strategy 'sequential'"),
}  # fmt: skip


@pytest.mark.parametrize("case", TRAINS_OTHERWISE)
def test_what_trains_otherwise_is_said_first(case, folder, capsys):
    text, said = TRAINS_OTHERWISE[case]
    arguments = ["--from", "trl"] if "kto" in text else []
    assert convert(text, *arguments) == 0
    printed = capsys.readouterr().out
    first, _, _ = printed.partition("to know, or to decide:")
    assert said in first.partition("trains otherwise, or may:")[2], printed
    assert "pad_token" not in Path("recipes/file.yaml").read_text()


def test_kto_without_a_reference_point_of_the_batch_is_the_same_loss(folder, capsys):
    assert convert("{model_name_or_path: m, dataset_name: d, loss_type: apo_zero_unpaired}", "--from", "trl") == 0
    assert yaml.safe_load(Path("recipes/file.yaml").read_text())["objective"]["name"] == "kto_zero"
    assert "its reference point" not in capsys.readouterr().out


NO_TRAININGS = {
    "an inference of LLaMA-Factory": "{model_name_or_path: m, template: qwen3, infer_backend: huggingface}",
    "a merge of LLaMA-Factory": "{model_name_or_path: m, adapter_name_or_path: a, template: qwen3, export_dir: out}",
    "a generation of torchtune": (
        "{model: {_component_: torchtune.models.llama2.llama2_7b}, checkpointer: {checkpoint_dir: m}, device: cuda,"
        " tokenizer: {path: t}, dtype: bf16, seed: 1, prompt: {user: hello}, max_new_tokens: 300, temperature: 0.6,"
        " quantizer: null}"),
    "an evaluation of torchtune": (
        "{model: {_component_: torchtune.models.llama2.llama2_7b}, checkpointer: {checkpoint_dir: m}, device: cuda,"
        " tokenizer: {path: t}, dtype: bf16, seed: 1, batch_size: 8, enable_kv_cache: true, quantizer: null}"),
    "ms-swift": (
        "{model: m, tuner_type: lora, target_modules: [q_proj], torch_dtype: bfloat16, num_train_epochs: 5,"
        " learning_rate: 1e-4, dataset: d, per_device_train_batch_size: 1, logging_steps: 5}"),
    "a draft of another trainer": (
        "{recipe: TrainEagle3Recipe, dist_env: {backend: nccl}, recipe_args: {target_model_name_or_path: m},"
        " fp8: {enabled: true}, optimizer: {lr: 1.0e-4}, checkpoint: {enabled: true}}"),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_TRAININGS)
def test_what_trains_nothing_is_refused(case, folder, capsys):
    assert convert(NO_TRAININGS[case]) == 2
    assert not Path("recipes").exists()
    assert re.search("no settings of a training|does not read|another training than", capsys.readouterr().err)


def test_precision_and_length_of_a_training_come_before_those_of_its_distribution(folder, capsys):
    Path("a.yaml").write_text("{distributed_type: DEEPSPEED, num_processes: 2, mixed_precision: fp16,"
                              " deepspeed_config: {deepspeed_config_file: ds.json}}\n")  # fmt: skip
    params = {"warmup_num_steps": 10, "total_num_steps": 100}
    scheduler = {"type": "WarmupDecayLR", "params": params}
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "scheduler": scheduler}))
    text = "{model_name_or_path: m, dataset_name: d, bf16: true, num_train_epochs: 2, lr_scheduler_type: linear}"
    assert convert(text, "a.yaml", "--from", "trl") == 0
    recipe = yaml.safe_load(Path("recipes/file.yaml").read_text())
    assert recipe["mixed_precision"] == "bf16" and recipe["run"]["num_epochs"] == 2
    assert "max_steps" not in recipe["run"]
    printed = capsys.readouterr().out
    assert "mixed_precision is 'fp16': mixed_precision is 'bf16' already, from file.yaml:1: bf16 is true" in printed
    assert "the rate ends at step 100 there" in printed


def test_an_accumulation_of_a_distribution_alone_is_named(folder, capsys):
    text = "{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 4}}"
    assert convert(text) == 0
    assert "deepspeed_config.gradient_accumulation_steps is 4: " in capsys.readouterr().out


SHELL = """#!/bin/bash
LR=2e-4
accelerate launch --config_file acc.yaml --num_processes 2 \\
  $(which trl) sft \\
  --model_name_or_path some/model --dataset_name some/chats --learning_rate $LR \\
  --use_peft --lora_target_modules q_proj v_proj --bf16 True --max_steps=9
"""


def test_a_shell_line_is_read_behind_the_name_of_its_script(folder, capsys):
    Path("acc.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    recipe = recipe_of_script(SHELL)
    assert recipe["strategy"] == "fsdp2" and recipe["batch"]["global_batch_size"] == 8 * 2
    assert recipe["optim"]["learning_rate"] == 2e-4 and recipe["run"]["max_steps"] == 9
    assert recipe["adapter"]["targets"] == ["q_proj", "v_proj"] and recipe["data"]["train"] == "some/chats"
    assert "from run.sh (TRL) and acc.yaml (accelerate)" in capsys.readouterr().out


def test_flags_of_a_launcher_that_are_not_carried_are_named(folder, capsys):
    Path("acc.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    convert(SHELL.replace("launch", "launch --use_deepspeed --zero_stage 3"), name="run.sh")
    assert "--use_deepspeed, --zero_stage of the launcher: not read" in capsys.readouterr().out
    convert(SHELL, name="run.sh")
    assert "of the launcher: not read" not in capsys.readouterr().out


def test_flags_behind_a_file_come_before_it(folder):
    Path("lf.yaml").write_text("{model_name_or_path: m, dataset: d, learning_rate: 1e-5, stage: sft, lora_rank: 4}")
    assert convert("FORCE_TORCHRUN=1 llamafactory-cli train lf.yaml --learning_rate 3e-5\n", name="go.sh") == 0
    recipe = yaml.safe_load(Path("recipes/go.yaml").read_text())
    assert recipe["optim"]["learning_rate"] == 3e-5 and recipe["adapter"]["rank"] == 4


LF = (
    "model_name_or_path: m\ndataset: d\nlearning_rate: 1e-5\nstage: sft\nlora_rank: 4\nper_device_train_batch_size: 1\n"
)


@pytest.mark.parametrize(
    ("command", "batch"),
    [
        ("llamafactory-cli train lf.yaml learning_rate=3e-5 logging_steps=1", 1),
        ("llamafactory-cli train lf.yaml ++learning_rate=3e-5 --seed 5", 1),
        ("tune run full_finetune_single_device --config tt.yaml batch_size=3 optimizer.lr=3e-5", 3 * 4),
        ("tune run --nproc_per_node 2 full_finetune --config tt.yaml optimizer.lr=3e-5 batch_size=3", 3 * 4 * 2),
    ],
)
def test_words_that_set_a_key_behind_a_file_come_before_it(folder, capsys, command, batch):
    """As torchtune's and LLaMA-Factory's pages write their commands."""
    Path("lf.yaml").write_text(LF)
    Path("tt.yaml").write_text(TORCHTUNE)
    assert convert(f"{command}\n", name="go.sh") == 0
    recipe = yaml.safe_load(Path("recipes/go.yaml").read_text())
    assert recipe["optim"]["learning_rate"] == 3e-5 and recipe["batch"]["global_batch_size"] == batch
    assert convert(f"{command.replace('3e-5', 'fast')}\n", name="bad.sh") == 0
    assert re.search(r"bad\.sh:1: (optimizer\.lr|learning_rate) is 'fast'", capsys.readouterr().out)


@pytest.mark.parametrize(
    "flags", ["--nnodes 3 --nproc_per_node 4", "--nnodes=2:2 --nproc-per-node=4", "--nproc_per_node 4", "--nnodes 3"]
)
def test_processes_of_torchrun_are_those_of_all_machines(folder, capsys, flags):
    """By torchrun's own reading of its flags; two numbers of machines, or none of processes, leave the number open."""
    from torch.distributed.run import config_from_args, parse_args

    launched, _, _ = config_from_args(parse_args([*flags.split(), "sft.py"]))
    recipe = recipe_of_script(f"torchrun {flags} sft.py --model_name_or_path m --dataset_name d --max_steps 3\n")
    is_open = ":" in flags or "nproc" not in flags
    count = 1 if is_open else launched.nproc_per_node * launched.max_nodes
    assert recipe["batch"]["global_batch_size"] == count * recipe["batch"]["micro_batch_size"]
    said = capsys.readouterr().out
    assert ("the file has no number of GPUs" in said) == is_open
    assert ("--nnodes of the launcher: not read" in said) == (is_open and "nnodes" in flags)


@pytest.mark.parametrize("include", ["h:0,1,2", "a:1,0@b:0,3", "a@b:0,3", "a:2"])
def test_so_are_those_that_deepspeed_includes(folder, capsys, include):
    """By DeepSpeed's own reading; a machine without places has as many as a file elsewhere says."""
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    pool = dict.fromkeys("hab", 5)
    count = sum(map(len, parse_inclusion_exclusion(pool, include, "").values()))
    flags = "--model_name_or_path m --dataset_name d --max_steps 3"
    recipe = recipe_of_script(f"deepspeed --include {include} sft.py {flags}\n")
    is_open = include == "a@b:0,3"
    assert recipe["batch"]["global_batch_size"] == (1 if is_open else count) * recipe["batch"]["micro_batch_size"]
    assert ("--include of the launcher: not read" in capsys.readouterr().out) == is_open


@pytest.mark.parametrize("word", ["a #1 b", "key: value", "- a", "2026-01-31", "1:30", "010", "&a", "!x", "[a", "0x1f"])
def test_a_word_of_a_command_is_the_text_that_argparse_reads(folder, word):
    """YAML reads a comment, an object, a list, a day, 90, 8, an anchor and a tag."""
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=str)
    flags = (
        f"--model_name_or_path m --dataset_name d --max_steps 3 --learning_rate 2e-5 --output_dir {shlex.quote(word)}"
    )
    recipe = recipe_of_script(f"python sft.py {flags}\n")
    assert recipe["run"]["output_dir"] == parser.parse_args(["--run", word]).run
    assert recipe["optim"]["learning_rate"] == 2e-5 and recipe["run"]["max_steps"] == 3


def test_saving_by_steps_without_their_number_is_as_often_as_transformers_does(folder, capsys):
    """`save_steps` is 500 there; an evaluation's number follows from that of the log, so it is left to the user."""
    from transformers import TrainingArguments

    theirs = TrainingArguments.__dataclass_fields__["save_steps"].default
    assert recipe_of(TRL + "save_strategy: steps\n")["run"]["save_every_steps"] == theirs
    assert recipe_of(TRL + "save_strategy: steps\nsave_steps: 70\n")["run"]["save_every_steps"] == 70
    capsys.readouterr()
    assert "eval_every_steps" not in recipe_of(TRL.replace("eval_steps: 100\n", ""))["run"]
    assert "eval_strategy is 'steps': write " in capsys.readouterr().out


def test_the_precision_of_accelerates_launcher_holds_where_the_flags_are_silent(folder, capsys):
    """As `--mixed_precision` sets the variable that an Accelerator without one reads, before its configuration file."""
    flags = "--model_name_or_path m --train_file d.json --learning_rate 1e-5 --max_steps 3"
    Path("a.yaml").write_text(FP16)
    for options, own, precision in (
        ("--mixed_precision bf16 --num_processes 2", "", "bf16"),
        ("--mixed_precision=bf16 --config_file a.yaml", "", "bf16"),
        ("--config_file a.yaml", "", "fp16"),
        ("--mixed_precision fp16", "--bf16", "bf16"),
    ):
        recipe = recipe_of_script(f"accelerate launch {options} own.py {flags} {own}\n")
        Path("recipes/run.yaml").unlink()
        assert recipe["mixed_precision"] == precision, options
        said = capsys.readouterr().out
        assert "--mixed_precision" not in said and "mixed_precision 'no'" not in said
        if own:
            assert "run.sh (launcher):1: mixed_precision is 'fp16': mixed_precision is 'bf16' already" in said


def test_a_command_with_a_file_alone_is_that_file(folder, capsys):
    Path("lf.yaml").write_text(LF)
    assert convert("cp lf.yaml old.yaml\nllamafactory-cli train lf.yaml\n", name="go.sh") == 0
    assert yaml.safe_load(Path("recipes/go.yaml").read_text())["optim"]["learning_rate"] == 1e-5
    assert convert("cp lf.yaml old.yaml\n", name="copy.sh") == 2
    assert "no command that gives a program flags" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["python3 -m other.main_ppo", "torchrun --nnodes 1 -m other.main_ppo --path=c"])
def test_a_program_that_takes_words_without_a_file_is_named(folder, capsys, program):
    """Also where another command has more flags."""
    words = "data.train_files=a.parquet actor.optim.lr=1e-6 b=1 c=2 d=3 e=4 f=5"
    lines = f"ray start --head --port 1 --num-gpus 2 --block\n{program} {words}\n"
    assert convert(lines, name="run.sh") == 2
    assert "run.sh:2: other.main_ppo takes settings as data.train_files=a.parquet" in capsys.readouterr().err


OWN = "--model_name_or_path m --bf16 true --data_file rows.json --num_train_epochs 2"


def test_a_program_whose_keys_fit_two_projects_is_one_with_training_arguments(folder, capsys):
    """Its rate where it is silent is that of transformers' own class, and not TRL's."""
    from transformers import TrainingArguments

    assert convert(f"python finetune.py {OWN}\n", name="own.sh") == 0
    recipe, said = yaml.safe_load(Path("recipes/own.yaml").read_text()), capsys.readouterr().out
    theirs = TrainingArguments.__dataclass_fields__["learning_rate"].default
    assert float(recipe["optim"]["learning_rate"]) == theirs
    assert recipe["model"] == {"name_or_path": "m"} and recipe["run"]["num_epochs"] == 2
    assert "finetune.py: its keys are equally those of TRL and of LLaMA-Factory" in said
    assert "own.sh:1: data_file is 'rows.json': no key of Hugging Face TrainingArguments" in said
    assert convert(f"python dpo.py {OWN}\n", name="dpo.sh") == 0  # whose name is a method of TRL
    assert yaml.safe_load(Path("recipes/dpo.yaml").read_text())["objective"]["name"] == "dpo"


def test_a_file_that_fits_two_projects_may_be_that_of_a_program(folder, capsys):
    text = "model_name_or_path: m\nlearning_rate: 1e-4\n"
    assert convert(text) == 2
    assert "write --from trl, for example, or --from trainer for a program of your own" in capsys.readouterr().err
    assert convert(text, "--from", "trainer") == 0
    assert yaml.safe_load(Path("recipes/file.yaml").read_text())["model"] == {"name_or_path": "m"}


def test_a_program_with_llama_factorys_keys_that_is_not_its_own_is_named(folder, capsys):
    flags = "--model_name_or_path m --dataset d --max_steps 3 --quantization_bit 4 --finetuning_type lora"
    for program, is_named in {"src/train.py": False, "qlora.py": True}.items():
        assert convert(f"python {program} {flags}\n", name=f"{Path(program).stem}.sh") == 0
        said = capsys.readouterr().out
        assert (
            "qlora.py: its keys are those of LLaMA-Factory, so it is taken for a program of your" in said
        ) == is_named


@pytest.mark.parametrize("name", ["sft.py", "training_args.bin", "notebook.ipynb"])
def test_a_program_or_a_pickle_is_not_opened_and_the_way_is_told(name, folder, capsys):
    Path(name).write_bytes(b"\x80\x02}" if name.endswith("bin") else b"import trl\n")
    assert main(["convert", name]) == 2
    assert "put `print(args.to_json_string())` before `trainer.train()`" in capsys.readouterr().err


def test_of_a_folder_the_files_that_can_be_converted_are_named(folder, capsys):
    Path("repo/sub").mkdir(parents=True)
    Path("repo/sub/train.yaml").write_text(AXOLOTL)
    Path("repo/other.yaml").write_text("{services: {web: {image: nginx}}}")
    assert main(["convert", "repo"]) == 2
    said = capsys.readouterr().err
    assert "one of its files at a time: repo/sub/train.yaml\n" in said and "other.yaml" not in said


COMMANDS = {
    "trl dpo": "dpo",
    "accelerate launch $(which trl) kto": "kto_zero",
    "python -m trl orpo": "orpo",
    "accelerate launch scripts/run_orpo.py": "orpo",
    "torchrun --nproc_per_node 2 examples/reward_modeling.py": "reward",
    "python src/grpo.py": "grpo",
    "python cpo.py": "cpo",
    "trl sft": "sft",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_program_of_a_command_decides_the_method(command, folder, capsys):
    """TRL has it nowhere else: the flags are those of all its methods."""
    recipe = recipe_of_script(f"{command} --model_name_or_path m --dataset_name d --num_train_epochs 1\n")
    assert recipe.get("objective", {}).get("name", "sft") == COMMANDS[command]
    assert "fit several" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["trl rloo", "accelerate launch online_dpo.py", "python async_grpo.py"])
def test_a_command_of_a_method_that_is_not_here_is_refused(command, folder, capsys):
    assert convert(f"{command} --model_name_or_path m --dataset_name d --num_train_epochs 1\n", name="run.sh") == 2
    assert f"{command.split()[-1]} is " in (said := capsys.readouterr().err) and "rewards while training" in said


def test_where_no_method_is_named_that_is_said_unless_the_keys_fit_one(folder, capsys):
    text = "model_name_or_path: m\ndataset_name: d\nmax_length: 64\n"
    recipe_of(text)
    assert "taken for supervised fine-tuning; for another write objective.name: dpo," in capsys.readouterr().out
    recipe_of(f"{text}completion_only_loss: true\n")
    assert "taken for supervised" not in capsys.readouterr().out
    convert("python train.py --model_name_or_path m --dataset_name d --max_length 64\n", name="run.sh")
    assert "train.py names no method, and the keys fit several" in capsys.readouterr().out


def test_a_folder_of_a_methods_name_names_it_where_the_keys_are_that_methods(folder, capsys):
    for method in ("orpo", "sft"):
        Path(f"mine/{method}").mkdir(parents=True)
        lines = "model_name_or_path: m\ndataset_name: d\nbeta: 0.2\nlogging_steps: 7\nlr_scheduler_type: cosine\n"
        Path(f"mine/{method}/config.yaml").write_text(lines)  # the last two are of all, and have defaults of some
        assert main(["convert", f"mine/{method}/config.yaml", "--out", f"recipes/{method}.yaml"]) == 0
    assert "taken for ORPO by its path, mine/orpo/config.yaml" in capsys.readouterr().out
    objectives = [yaml.safe_load(Path(f"recipes/{name}.yaml").read_text())["objective"] for name in ("orpo", "sft")]
    assert objectives == [{"name": "orpo", "beta": 0.2}, {"name": "dpo", "beta": 0.2}]  # SFT has no beta


def test_a_key_of_another_method_asks_for_it_only_where_the_rest_could_be_its_too(folder, capsys):
    """Distillation has log_completions_steps, and GRPO has not."""
    grpo = "model_name_or_path: m\ndataset_name: d\nnum_generations: 4\nreward_funcs: [a]\nepsilon_high: 0.3\n"
    key = "log_completions_steps: 50\n"
    assert recipe_of(grpo + key)["objective"]["name"] == "grpo"
    assert "file.yaml:6: log_completions_steps is 50: of AsyncDistillationConfig" in capsys.readouterr().out
    assert convert(f"model_name_or_path: m\ndataset_name: d\nnum_generations: 4\n{key}") == 2
    assert "log_completions_steps is 50: not the same training: a teacher" in capsys.readouterr().err


def test_a_value_of_a_flag_is_no_file_of_settings(folder, capsys):
    """Only what stands before the flags, or behind --config, is one."""
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    flags = "--model_name_or_path m --dataset_name d --deepspeed {} --learning_rate 1e-5 --train_file=rows.json"
    recipe = recipe_of_script(f"deepspeed sft.py {flags.format('ds.json')}\n")
    assert (recipe["strategy"], recipe["mixed_precision"]) == ("zero3", "bf16")
    assert recipe["optim"]["learning_rate"] == 1e-5
    assert convert(f"deepspeed sft.py {flags.format('gone.json')}\n", name="go.sh") == 0
    assert "deepspeed is 'gone.json': no such file; give it to `convert`" in capsys.readouterr().out


def test_what_of_a_script_is_not_read_is_named(folder, capsys):
    lines = (
        "LR=${LR:-2e-4}  # of the environment\nNAME=run-$1\n"
        "python prepare.py --rows 5\n"
        "accelerate launch --config_file gone.yaml sft.py --model_name_or_path $MODEL --dataset_name d \\\n"
        "  --learning_rate $LR --max_steps 3 --seed ${SEED}\n"
        "python sft.py --dataset_name other --max_steps 5\n"
    )
    recipe = recipe_of_script(lines, "--from", "trl")
    assert recipe["optim"]["learning_rate"] == 2e-4 and "name_or_path" not in recipe["model"] and "seed" not in recipe
    said = capsys.readouterr().out
    assert "run.sh:3: python prepare.py: another command, not read" in said
    assert "run.sh:6: python sft.py: another command, not read" in said
    assert "--config_file gone.yaml of the launcher: no such file" in said
    assert "model_name_or_path is '${MODEL}'" in said and "seed is '${SEED}': refers to what is not in" in said


def test_a_command_in_a_folder_of_a_repository_finds_its_files_from_the_root(folder):
    Path("repo/scripts").mkdir(parents=True)
    Path("repo/acc.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    Path("repo/scripts/run.sh").write_text(SHELL)
    assert main(["convert", "repo/scripts/run.sh"]) == 0
    assert yaml.safe_load(Path("recipes/run.yaml").read_text())["strategy"] == "fsdp2"


def test_a_script_without_such_a_command_is_refused_by_name(folder, capsys):
    assert convert("#!/bin/bash\nsource env.sh\naccelerate launch --num_processes 2 train.py\n", name="run.sh") == 2
    assert "run.sh: no command that gives a program flags" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        'A="--learning_rate 2e-5 --max_steps 7"\nD="\n    --nproc_per_node $N \\\n    --nnodes 1\n"\n',
        "A=(\n  --learning_rate 2e-5  # don't\n  # --seed 3\n  --max_steps 7\n)\nD=(--nproc_per_node $N)\n",
        'export A="--learning_rate 2e-5"\nA+=" --max_steps 7"\nlocal D="--nproc_per_node 4"\nX="it\'s"\n',
        "declare -a A=(--learning_rate 2e-5)\nA+=(--max_steps 7)\nD=--nproc_per_node=$N\n",
    ],
)
def test_flags_that_a_script_keeps_in_variables_are_those_that_a_shell_passes(folder, capsys, given):
    """bash itself is asked for the words."""
    import subprocess

    is_array = "(" in given
    name = '"${A[@]}"' if is_array else "$A"
    dist = '"${D[@]}"' if "D=(" in given else "$D"
    command = f"torchrun {dist} sft.py --model_name_or_path m --dataset_name d {name} $MORE\n"
    setup = f"N=4\n{given}"
    shell = f"set -f\nf() {{ local() {{ export \"$@\"; }}; {setup} printf '%s\\n' {dist} {name}; }}; f"
    words = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.split()
    assert {"2e-5", "7"} <= {*words} and "4" in " ".join(words) and "3" not in words
    assert convert(f"{setup}{command}", name="run.sh") == 0
    recipe, said = yaml.safe_load(Path("recipes/run.yaml").read_text()), capsys.readouterr().out
    assert float(recipe["optim"]["learning_rate"]) == 2e-5 and recipe["run"]["max_steps"] == 7
    assert "seed" not in recipe and recipe["batch"]["global_batch_size"] == 4 * recipe["batch"]["micro_batch_size"]
    assert "run.sh: ${MORE}: what it has is not in the script" in said and "another command" not in said


def test_a_variable_without_a_value_is_what_the_script_says_then(folder):
    lines = 'L=${1}\nL=${L:-"2e-5"}\nO=${O:-"out-$L/${S:-x}"}\n'
    flags = "--model_name_or_path m --dataset_name d --max_steps 3 --learning_rate $L --output_dir $O"
    recipe = recipe_of_script(f"{lines}python sft.py {flags}\n")
    assert float(recipe["optim"]["learning_rate"]) == 2e-5 and recipe["run"]["output_dir"] == "out-2e-5/x"


@pytest.mark.parametrize("keys", ["padding_free: true\npacking: true", "packing: true\npadding_free: true"])
def test_packed_rows_are_counted_otherwise_also_where_batches_are_flattened(folder, capsys, keys):
    """In whichever order the two keys stand."""
    assert recipe_of(TRL.replace("packing: true", keys))["data"]["packing"] is True
    assert "a batch of TRL counts packed rows" in capsys.readouterr().out


def test_batches_that_are_flattened_without_packing_are_packed_here_without_a_word(folder, capsys):
    assert recipe_of(TRL.replace("packing: true", "packing: false\npadding_free: true"))["data"]["packing"] is True
    assert recipe_of(AXOLOTL.replace("sample_packing: true", "batch_flattening: auto"))["data"]["packing"] is True
    said = capsys.readouterr().out
    assert "packed rows" not in said and "data.packing is false already" not in said


def test_a_section_in_a_file_of_its_own_is_read(folder, capsys):
    """As `fsdp_config` of TrainingArguments, which may be a path."""
    text = TRL + "fsdp: full_shard auto_wrap\nfsdp_config: {}\n"
    inline = {"fsdp_version": 2, "reshard_after_forward": False}
    Path("fsdp.json").write_text(json.dumps(inline))
    assert recipe_of(text.format("fsdp.json"))["strategy"] == "fsdp2_grad_op"
    assert recipe_of(text.format(json.dumps(inline)))["strategy"] == "fsdp2_grad_op"
    capsys.readouterr()
    recipe_of(text.format("gone.json"))
    assert "fsdp_config is 'gone.json': no such file" in capsys.readouterr().out


ACCELERATE_OF_TRL = {
    "zero2": ("zero2", 8),
    "fsdp2": ("fsdp2", 8),
    "fsdp1": ("fsdp1", 8),
    "multi_gpu": ("ddp", 8),
    "single_gpu": ("single", 1),
    "acc.yaml": ("zero3", 4),
}


@pytest.mark.parametrize("name", ACCELERATE_OF_TRL)
def test_a_file_of_accelerates_that_trl_names_is_the_strategy(folder, name):
    """TRL's own have 8 processes (trl/accelerate_configs)."""
    Path("acc.yaml").write_text(ACCELERATE.replace("num_processes: 8", "num_processes: 4"))
    strategy, processes = ACCELERATE_OF_TRL[name]
    recipe = recipe_of(f"{TRL}accelerate_config: {name}\n")
    assert (recipe["strategy"], recipe["batch"]["global_batch_size"]) == (strategy, 4 * 8 * processes)
    recipe = recipe_of(f"{TRL}accelerate_config: {name}\nnum_processes: 2\n")
    assert recipe["batch"]["global_batch_size"] == 4 * 8 * 2


def test_a_flag_that_turns_off_a_default_is_that_default_turned_off(folder, capsys):
    """transformers' own parser is asked which flag that is."""
    from transformers import HfArgumentParser, TrainingArguments

    flag = "--no_average_tokens_across_devices"
    (theirs,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([flag, "--output_dir", "o"])
    assert theirs.average_tokens_across_devices is False
    flags = "--model_name_or_path m --dataset_name d --max_steps 3 --no_remove_unused_columns"
    assert convert(f"trl sft {flags} {flag}\n", name="run.sh") == 0
    said = capsys.readouterr().out
    assert "average_tokens_across_devices is false: the loss is the mean over the tokens" in said
    assert "no key of" not in said and re.search("needs nothing: .*remove_unused_columns", said)


SEVERAL = "path: json\n    data_files: "
FILES_OF_ROWS = {
    "axolotl": (AXOLOTL.replace("path: some/chats", f"{SEVERAL}[a.jsonl, b.jsonl]"), ["a.jsonl", "b.jsonl"]),
    "a split": (AXOLOTL.replace("path: some/chats", f"{SEVERAL}{{train: c.jsonl, test: d.jsonl}}"), ["c.jsonl"]),
    "a folder": (AXOLOTL.replace("path: some/chats", "path: ./here\n    data_files: a.jsonl"), ["here/a.jsonl"]),
    "torchtune": (
        TORCHTUNE.replace("source: some/chats", "source: json, data_files: [a.jsonl, b.jsonl]"),
        ["a.jsonl", "b.jsonl"],
    ),
}


@pytest.mark.parametrize("case", FILES_OF_ROWS)
def test_several_files_of_a_data_set_are_as_many_sources(folder, case):
    Path("here").mkdir()
    text, paths = FILES_OF_ROWS[case]
    train = recipe_of(text)["data"]["train"]
    assert [part if isinstance(part, str) else part["path"] for part in _as_list(train)] == paths
    if "axolotl" in case:
        assert [part["columns"] for part in train] == [{"messages": "talk"}] * 2  # each with all that is said of them


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def test_files_in_a_data_set_of_the_hub_are_named(folder, capsys):
    recipe = recipe_of(AXOLOTL.replace("path: some/chats", "path: some/chats\n    data_files: part.jsonl"))
    assert recipe["data"]["train"]["path"] == "some/chats"
    assert "data_files 'part.jsonl' of some/chats: all of its files are read" in capsys.readouterr().out


def test_several_configurations_are_as_many_sources(folder):
    """As axolotl reads a list of names."""
    train = recipe_of(AXOLOTL.replace("path: some/chats", "path: some/chats\n    name: [first, second]"))["data"][
        "train"
    ]
    assert [(part["path"], part["name"]) for part in train] == [("some/chats", "first"), ("some/chats", "second")]


@pytest.mark.parametrize("text", [TRL.replace("test_split: test", "train_split: train[:10%]"), TORCHTUNE])
def test_a_part_of_a_split_stays_one_and_a_stream_has_none(folder, capsys, text):
    assert recipe_of(text)["data"]["train"] == {"path": "some/chats", "split": "train[:10%]"}
    assert "max_rows" not in capsys.readouterr().out
    if text is not TORCHTUNE:
        assert recipe_of(f"{text}dataset_streaming: true\n")["data"]["train"] == "some/chats"
        assert "a stream has no part of a split; write data.train.max_rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    "kwargs", ["", "lr_scheduler_kwargs: {num_cycles: 1}\n", "lr_scheduler_kwargs: {num_cycles: 2}\n"]
)
def test_a_cosine_with_one_cycle_has_no_restart(folder, capsys, kwargs):
    """transformers' own schedules are asked for each step's rate."""
    import torch
    from transformers import get_scheduler

    cycles = 2 if "2" in kwargs else 1
    rates = {}
    for name, own in {"cosine": {}, "cosine_with_restarts": {"num_cycles": cycles} if kwargs else {}}.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = get_scheduler(name, optimizer, 2, 10, scheduler_specific_kwargs=own)
        rates[name] = [(schedule.get_last_lr()[0], optimizer.step(), schedule.step())[0] for _ in range(10)]
    text = TRL.replace("type: cosine", "type: cosine_with_restarts") + kwargs
    if rates["cosine"] == rates["cosine_with_restarts"]:
        assert recipe_of(text)["schedule"]["name"] == "cosine"
    else:
        assert convert(text) == 2
        assert "restarts, which are not here" in capsys.readouterr().err


HALF = {
    "axolotl, all weights": (AXOLOTL.replace("adapter: qlora\n", ""), True),
    "axolotl, an adapter": (AXOLOTL, False),
    "axolotl, an adapter in bf16 too": (AXOLOTL.replace("bf16: auto", "bf16: full"), True),
    "axolotl, float32": (AXOLOTL.replace("adapter: qlora\n", "").replace("bf16: auto", "bf16: false"), False),
    "axolotl under FSDP": (f"{AXOLOTL}fsdp: [full_shard, auto_wrap]\n".replace("adapter: qlora\n", ""), False),
    "LLaMA-Factory": (LLAMA_FACTORY, False),
    "LLaMA-Factory's pure_bf16": (LLAMA_FACTORY.replace("bf16:", "pure_bf16:"), True),
}


@pytest.mark.parametrize("case", HALF)
def test_weights_that_are_trained_in_half_precision_are_named(folder, capsys, case):
    """As far as the sources of the projects keep them so: axolotl's loaders/model.py, LLaMA-Factory's adapter.py."""
    text, is_named = HALF[case]
    recipe_of(text)
    changes = capsys.readouterr().out.partition("to know, or to decide:")[0]
    assert ("trained weights are in half precision there" in changes) == is_named


def test_configurations_beside_a_mixer_are_those_of_its_data_sets(folder, capsys):
    recipe = recipe_of(f"{HANDBOOK}dataset_configs: [first, null]\n")
    assert [source.get("name") for source in recipe["data"]["train"]] == ["first", None]
    assert [source.get("name") for source in recipe["data"]["eval"].values()] == ["first", None]
    assert "dataset_configs" not in capsys.readouterr().out
    recipe_of(f"{HANDBOOK}dataset_configs: [first]\n")
    assert "dataset_configs is ['first']: not one for each of 2 data sets" in capsys.readouterr().out


def test_a_reference_that_is_open_changes_no_training_where_its_key_does_not(folder, capsys):
    assert convert(f"{TRL}hub_model_id: mine-${{VERSION}}\nchat_template_path: a-${{VERSION}}\n", "--from", "trl") == 0
    changes, _, notes = capsys.readouterr().out.partition("to know, or to decide:")
    assert "hub_model_id is" not in changes and "hub_model_id is 'mine-${VERSION}': refers to" in notes
    assert "chat_template_path is 'a-${VERSION}': refers to" in changes


def test_sizes_of_pictures_are_named_and_a_training_on_texts_is_converted(folder, capsys):
    assert convert(f"{LLAMA_FACTORY}image_max_pixels: 262144\nvideo_fps: 2.0\n") == 0
    said = capsys.readouterr().out
    assert "image_max_pixels is 262144: of pictures, films and sound, which no row may have here" in said
    assert re.search(r"needs nothing: .*video_fps", said)  # its default there


def test_a_program_that_is_not_the_one_of_its_keys_is_named(folder, capsys):
    flags = "--model_name_or_path m --train_file r.jsonl --block_size 64 --num_train_epochs 1 --learning_rate 1e-4"
    lines = {
        "run_clm.py": "",
        "run_reward_modeling.py": "run_reward_modeling.py is Reward by its name: write objective.name: reward",
        "finetune.py": "finetune.py has keys of another program, for which it is taken: run_clm.py",
    }
    for program, line in lines.items():
        assert convert(f"python {program} {flags}\n", "--from", "run-clm", name=f"{program[:7]}.sh") == 0
        said = capsys.readouterr().out
        assert line in said and ("by its name" in said or "has keys of" in said) == bool(line)
    flags = "--learning_rate 1e-4 --num_train_epochs 1 --per_device_train_batch_size 2"
    assert convert(f"python run_dpo.py {flags}\n", "--from", "trainer", name="d.sh") == 0
    assert "run_dpo.py is DPO by its name: write objective.name: dpo" in capsys.readouterr().out
    assert convert(f"python train.py {flags}\n", "--from", "trainer", name="t.sh") == 0
    assert "train.py has keys" not in capsys.readouterr().out


def test_a_data_set_may_have_a_long_path_as_a_key(folder):
    path = "/scratch/project/" + "posttraining_data/" * 8 + "mix"
    text = f"model_name_or_path: m\ndataset_mixer:\n  {path}: 1.0\nmax_length: 64\n"
    assert recipe_of(text)["data"]["train"] == path


def test_simpo_by_its_authors_has_their_margin_and_no_likelihood(folder, capsys):
    """princeton-nlp/SimPO: the margin is gamma_beta_ratio x beta; TRL's own SimPO has a likelihood beside it."""
    text = "model_name_or_path: m\ndataset_mixer: {d: 1.0}\nbeta: 10\n"
    objective = recipe_of(f"{text}gamma_beta_ratio: 0.3\n")["objective"]
    assert objective == {"name": "simpo", "beta": 10, "gamma": 3.0, "nll_weight": 0.0}
    Path("simpo.yaml").write_text(text.replace("dataset_mixer: {d: 1.0}", "dataset_name: d"))
    assert main(["convert", "simpo.yaml"]) == 0
    objective = yaml.safe_load(Path("recipes/simpo.yaml").read_text())["objective"]
    assert objective == {"name": "simpo", "beta": 10, "gamma": 0.5, "nll_weight": 1.0}


def test_a_component_that_torchtune_has_in_several_modules_is_the_same(folder):
    text = TORCHTUNE + "lr_scheduler: {_component_: torchtune.PLACE.get_cosine_schedule_with_warmup}\n"
    values = [
        yaml.safe_load(text.replace("PLACE", place)) for place in ("training.lr_schedulers", "training", "modules")
    ]
    schedules = [recipe_of(yaml.dump(value))["schedule"] for value in values]
    assert schedules == [{"name": "cosine"}] * 3
    assert convert(text.replace("torchtune.PLACE", "mine"), name="other.yaml") == 2


def test_a_module_of_the_files_own_is_named(folder, capsys):
    text = TORCHTUNE.replace("torchtune.models.llama3.llama3_tokenizer", "mine.Tokenizer")
    recipe_of(text.replace("torchtune.models.llama3_1.lora_llama3_1_8b", "mine.lora_llama"))
    said = capsys.readouterr().out.partition("to know")[0]
    assert "tokenizer._component_ is 'mine.Tokenizer'" in said and "model._component_ is 'mine.lora_llama'" in said
    recipe_of(TORCHTUNE)
    assert "a module of the file's own" not in capsys.readouterr().out


@pytest.mark.parametrize(("cycles", "is_told"), [("0", True), ("0.0", True), ("2", True), ("null", False)])
def test_a_zero_without_a_default_that_is_known_is_told(cycles, is_told, folder, capsys):
    """A cosine of 0 cycles is a constant rate."""
    kwargs = f"lr_scheduler_type: cosine\nlr_scheduler_kwargs: {{num_cycles: {cycles}}}\n"
    recipe_of(f"model_name_or_path: m\ndataset_name: d\nlearning_rate: 1e-4\n{kwargs}")
    said = capsys.readouterr().out.partition("to know")[0]
    assert (f"lr_scheduler_kwargs.num_cycles is {cycles}" in said) == is_told


def test_the_arguments_of_torchtunes_logger_are_wandbs(folder, capsys):
    logger = "metric_logger: {_component_: torchtune.training.metric_logging.WandBLogger, project: p, mode: offline}\n"
    values = yaml.safe_load(TORCHTUNE) | yaml.safe_load(logger)
    assert recipe_of(yaml.dump(values))["run"]["trackers"] == {"wandb": {"project": "p", "mode": "offline"}}
    values |= yaml.safe_load(logger.replace("WandBLogger", "StdoutLogger"))
    assert "trackers" not in recipe_of(yaml.dump(values))["run"]
    assert "metric_logger.project is 'p': of a tracker that the recipe has not" in capsys.readouterr().out


def test_a_comment_between_the_lines_of_a_command_loses_no_flag(folder, capsys):
    lines = (
        "GPUS=2\nSIZE=64\nSTEPS=$(( SIZE / $GPUS / 4 ))\n"
        "accelerate launch --num_processes $GPUS sft.py --model_name_or_path m --dataset_name d \\\n"
        "  `# of the adapter` \\\n"
        "  --use_peft --lora_r 4 --gradient_accumulation_steps $STEPS --per_device_train_batch_size 4 \\\n"
        "  --seed $(date +%s) --max_steps 5\n"
    )
    recipe = recipe_of_script(lines)
    assert recipe["adapter"]["rank"] == 4 and recipe["batch"]["global_batch_size"] == 64
    assert "seed is '${command}': refers to what is not in this file" in capsys.readouterr().out
    lines = "python sft.py --model_name_or_path m --dataset_name d \\\n  # --seed 1 \\\n  --max_steps 5\n"
    assert convert(lines, name="cut.sh") == 0  # a shell ends the command at the comment
    assert "max_steps" not in yaml.safe_load(Path("recipes/cut.yaml").read_text())["run"]
    assert "cut.sh:3: --max_steps 5: another command, not read" in capsys.readouterr().out


def test_the_scheduler_and_optimizer_of_a_json_are_those_of_the_trainer(folder, capsys):
    """transformers' deepspeed_optim_sched: where the JSON has one, the Trainer makes none."""
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "scheduler": scheduler}))
    assert recipe_of(TRL + "deepspeed: ds.json\n")["schedule"] == {
        "name": "linear",
        "warmup_steps": 0.05,
        "warmup": "log",
    }
    said = capsys.readouterr().out
    assert (
        "lr_scheduler_type is 'cosine': left out; the Trainer takes the JSON's own, so schedule.name is 'linear'"
        in said
    )
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert recipe_of(TRL + "deepspeed: ds.json\n")["schedule"] == {"name": "cosine", "warmup_steps": 0.05}


def test_seed_comes_before_data_seed(folder, capsys):
    assert recipe_of(TRL + "data_seed: 7\nseed: 3\n")["seed"] == 3
    assert "data_seed is 7: seed is 3, which is that of the order of rows too" in capsys.readouterr().out
    assert recipe_of(TRL + "data_seed: 7\n")["seed"] == 7


def test_where_a_command_writes_is_no_value_of_its_last_flag(folder, capsys):
    """Nor is what follows in the same line."""
    flags = "--model_name_or_path m --dataset_name d --max_steps 5 --seed 3"
    line = f"python sft.py {flags} 2>&1 | tee > log.txt && python dpo.py --dataset_name e\n"
    assert convert(line, name="run.sh") == 0
    assert yaml.safe_load(Path("recipes/run.yaml").read_text())["seed"] == 3
    assert "run.sh:1: python dpo.py: another command, not read" in capsys.readouterr().out
    assert convert("trl sft --model_name_or_path <model> --dataset_name d --max_steps 5\n", name="a.sh") == 0
    assert yaml.safe_load(Path("recipes/a.yaml").read_text())["model"]["name_or_path"] == "<model>"


def test_a_mixer_of_rows_has_numbers_of_rows(folder):
    text = "model_name_or_path: m\ndataset_mixer: {a: 5000, b: 0.5, c: 1.0}\nmax_length: 64\n"
    assert recipe_of(text)["data"]["train"] == [
        {"path": "a", "max_rows": 5000},
        {"path": "b", "weight": 0.5},
        {"path": "c"},
    ]
    config = "model_name_or_path: m\ndataset_name: d\ndataset_configs: [main]\nmax_length: 64\n"
    assert recipe_of(config)["data"]["train"] == {"path": "d", "name": "main"}


def test_a_program_that_is_named_after_what_is_not_here_says_so(folder, capsys):
    flags = "--model_name_or_path m --dataset_name d --completion_only_loss true --max_steps 5"
    of_steps = "prm.py has prm in its name: a reward model of steps"
    for program, line in {"prm.py": of_steps, "prm/prm.py": f"prm/{of_steps}", "finetune.py": ""}.items():
        assert convert(f"python {program} {flags}\n", name=f"{program.replace('/', '-')}.sh") == 0
        said = capsys.readouterr().out
        assert line in said and said.count("in its name") == bool(line)
