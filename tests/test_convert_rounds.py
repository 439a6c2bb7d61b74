"""Protects `convert` of files that sample while they train: GRPO of TRL and axolotl becomes rounds, nothing in silence.

python -m pytest -q tests/test_convert_rounds.py -m "slow or not slow"
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from cookbook.commands.cli import main
from cookbook.commands.convert.converted_rounds import MADE
from tests.needs import need_trl

TRL = """\
model_name_or_path: some/model
dataset_name: some/prompts
dataset_config: main
reward_model_name_or_path: judge
reward_funcs: [my_lib.is_right, think_format_reward]
reward_weights: [0.5, 1.0, 0.25]
learning_rate: 2.0e-5
num_generations: 16
max_completion_length: 256
max_prompt_length: 128
temperature: 0.9
top_k: -1
beta: 0.04
epsilon_high: 0.28
loss_type: dr_grpo
scale_rewards: false
num_iterations: 2
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
steps_per_generation: 16
max_steps: 200
use_vllm: true
vllm_mode: server
vllm_server_host: 0.0.0.0
vllm_server_port: 8001
eval_strategy: steps
eval_steps: 10
save_steps: 50
generation_kwargs: {stop: "."}
log_completions: true
mask_truncated_completions: true
"""
FROM_TRL = {
    "strategy": "single",
    "mixed_precision": "bf16",
    "plugins": ["reward_functions.py"],
    "model": {"name_or_path": "some/model", "gradient_checkpointing": True},
    "data": {"train": {"path": "some/prompts", "name": "main"}, "max_length": 384},
    "objective": {
        "name": "grpo",
        "beta": 0.04,
        "loss_type": "dr_grpo",
        "max_completion_length": 256,
        "scale_rewards": "none",
        "epsilon_high": 0.28,
        "mask_truncated_completions": True,
    },
    "batch": {"global_batch_size": 32, "micro_batch_size": 8},
    "optim": {"learning_rate": 2e-5},
    "schedule": {"name": "linear"},
    "run": {"num_epochs": 2},
    # 8 x 16 answers are sampled at a time, to 8 prompts, and two passes over them are 8 steps of 32 answers
    "rounds": {
        "num_rounds": 25,
        "prompts_per_round": 8,
        "reward_funcs": ["./judge", "is_right", "think_format_reward"],
        "reward_weights": [0.5, 1.0, 0.25],
        "num_generations": 16,
        "max_completion_length": 256,
        "temperature": 0.9,
        "top_k": 0,
        "sampler": "http://localhost:8001",
    },
}
OF_TRL = (
    "file.yaml:11: temperature is 0.9: TRL's loss has the probabilities of this temperature",
    "file.yaml:29: generation_kwargs: rounds.temperature, top_p, top_k and min_p say how",
    "with vLLM a ratio begins from the probability by which vLLM sampled",
    "(sequence_mask, at most 3.0)",
    "the optimizer's moments begin at zero in each round, after 8 steps",
    "file.yaml:10: max_prompt_length is 128: a longer prompt is cut there, and here a mistake",
    "file.yaml:28: save_steps is 50: left out: each round ends with an export",
    "needs nothing: log_completions",
)
AXOLOTL = """\
base_model: some/model
rl: grpo
trl:
  beta: 0.001
  use_vllm: true
  num_generations: 4
  reward_funcs: [rewards.is_right]
  mask_truncated_completions: true
vllm: {host: 10.0.0.1, port: 9000, gpu_memory_utilization: 0.85}
datasets: [{path: some/prompts, type: rewards.transform}]
sequence_len: 1024
val_set_size: 0.0
adapter: lora
lora_r: 32
lora_alpha: 64
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 4
max_steps: 400
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 1.0e-5
weight_decay: 0.0
warmup_steps: 10
saves_per_epoch: 1
"""
FROM_AXOLOTL = {
    "strategy": "single",
    "mixed_precision": "bf16",
    "plugins": ["reward_functions.py"],
    "model": {"name_or_path": "some/model"},
    "data": {"train": "some/prompts", "max_length": 1024},
    "objective": {"name": "grpo", "beta": 0.001, "mask_truncated_completions": True},
    "adapter": {"name": "lora", "rank": 32, "alpha": 64.0, "dropout": 0.05, "targets": ["all-linear"]},
    "batch": {"global_batch_size": 16, "micro_batch_size": 4},
    "optim": {"name": "adamw", "learning_rate": 1e-5, "weight_decay": 0.0},
    "schedule": {"name": "cosine", "warmup_steps": 10},
    "run": {"num_epochs": 1},
    "rounds": {
        "num_rounds": 400,
        "prompts_per_round": 4,
        "reward_funcs": ["is_right"],
        "num_generations": 4,
        "max_completion_length": 512,  # TRL's, where axolotl has none
        "sampler": "http://10.0.0.1:9000",
    },
}
OF_AXOLOTL = (
    "not in the file, so TRL's defaults hold: rounds.max_completion_length 512",
    "type 'rewards.transform': no counterpart",
    "vllm.gpu_memory_utilization is 0.85: an option of the server",
    "after 1 step;",
    "saves_per_epoch is 1: left out: each round ends with an export",
    "needs nothing: val_set_size",
)


@pytest.fixture
def folder(tmp_path: Path, shared_book: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("accelerate_configs", "ds_configs"):
        (tmp_path / name).symlink_to(shared_book / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def convert(text: str, *arguments: str) -> int:
    Path("file.yaml").write_text(text)
    return main(["convert", "file.yaml", *arguments])


def recipe() -> dict[str, Any]:
    return yaml.safe_load(Path("recipes/file.yaml").read_text())


@pytest.mark.parametrize(
    ("text", "wanted", "lines"),
    [(TRL, FROM_TRL, OF_TRL), (AXOLOTL, FROM_AXOLOTL, OF_AXOLOTL)],
    ids=["trl", "axolotl"],
)
def test_a_file_of_grpo_becomes_rounds_and_the_rest_is_listed(folder, capsys, text, wanted, lines):
    assert convert(text) == 0
    printed = capsys.readouterr().out
    assert recipe() == yaml.safe_load(yaml.safe_dump(wanted))
    for line in lines:
        assert line in printed, printed


def prompts(count: int) -> None:
    rows = (json.dumps({"prompt": f"{i} + 1 =", "answer": i + 1}) for i in range(count))
    Path("prompts.jsonl").write_text("".join(f"{row}\n" for row in rows))


SUMS = """\
model_name_or_path: MODEL
dataset_name: prompts.jsonl
reward_funcs: [my_lib.is_sum]
num_generations: 4
max_completion_length: 6
max_prompt_length: 20
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
bf16: false
output_dir: out
learning_rate: 1.0e-3
""".replace("MODEL", str(ROOT / "recipes/sums/model"))
IS_SUM = """\
def is_sum(completions, answer, **others):
    return [float(text.strip() == str(right)) for text, right in zip(completions, answer, strict=True)]
"""


def write_what_it_says(said: str) -> None:
    """The plugin that `convert` tells to write, and the user's own module."""
    (block,) = re.findall(r"write reward_functions.py beside the recipe.*:\n((?:    .+\n)+)", said)
    Path("recipes/reward_functions.py").write_text(re.sub(r"^    ", "", block, flags=re.MULTILINE))
    Path("my_lib.py").write_text(IS_SUM)


def test_a_converted_file_is_fine_once_the_plugin_that_it_asks_for_is_there(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_lib", raising=False)
    prompts(25)
    text = re.sub("model_name_or_path: .*", "model_name_or_path: some/model", SUMS)  # not on disk, so no torch
    assert convert(text + "num_train_epochs: 3\n") == 0
    said = capsys.readouterr().out
    assert recipe()["rounds"]["num_rounds"] == 3 * (25 // 4)  # TRL leaves out the prompts of a generation in part
    assert main(["check", "recipes/file.yaml"]) == 2
    assert "plugins.0 is 'reward_functions.py': no such file" in capsys.readouterr().err
    write_what_it_says(said)
    assert main(["check", "recipes/file.yaml"]) == 0
    assert "fine under accelerate_configs/single.yaml; 16 answers a step" in capsys.readouterr().out


def test_rounds_of_rows_that_nobody_counted_are_asked_for(folder, capsys):
    assert convert(SUMS.replace("prompts.jsonl", "some/prompts")) == 0
    printed = capsys.readouterr().out
    assert "write rounds.num_rounds, 3 x the rows of data.train / 4, the prompts of a round" in printed
    assert "num_rounds" not in recipe()["rounds"]
    write_what_it_says(printed)
    assert main(["check", "recipes/file.yaml"]) == 2
    assert "rounds.num_rounds: is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_a_converted_file_trains_its_rounds(folder, capsys):
    prompts(8)
    assert convert(SUMS + "steps_per_generation: 4\nnum_iterations: 2\nmax_steps: 4\n") == 0
    write_what_it_says(capsys.readouterr().out)
    assert main(["rounds", "recipes/file.yaml", "--set", "run.check_export=false"]) == 0
    (samples,) = Path("out/rounds").glob("*/samples.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == 8 and {len(row["completions"]) for row in rows} == {4}
    steps = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in steps) == 4
    for row in rows:
        answer = int(row["prompt"].partition(" ")[0]) + 1
        assert row["rewards"] == [float(text.strip() == str(answer)) for text in row["completions"]]


GENERATIONS = (
    {},
    {"steps_per_generation": 8},
    {"steps_per_generation": 1, "gradient_accumulation_steps": 4},
    {"generation_batch_size": 96},
    {"generation_batch_size": 48, "num_iterations": 3, "num_generations": 6},
    {"per_device_train_batch_size": 2, "steps_per_generation": 12, "num_generations": 2},
)


@pytest.mark.slow
@pytest.mark.parametrize("keys", GENERATIONS, ids=str)
def test_a_round_is_what_trl_samples_and_trains_on_with_one_policy(folder, keys):
    """TRL's own configuration and its sampler say which prompts a step has, and when it samples."""
    need_trl()
    from trl import GRPOConfig
    from trl.trainer.utils import RepeatSampler

    values = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4} | keys
    config = GRPOConfig(output_dir="there", report_to="none", use_cpu=True, bf16=False, max_steps=72, **values)
    text = SUMS.replace("prompts.jsonl", "some/prompts")
    text = "".join(line for line in text.splitlines(True) if line.partition(":")[0] not in values)
    assert convert(text + yaml.safe_dump(values) + "max_steps: 72\n") == 0
    rounds, batch = recipe()["rounds"], recipe()["batch"]["global_batch_size"]
    per_generation = config.generation_batch_size // config.num_generations
    order = [*RepeatSampler(range(1000), config.num_generations, per_generation, 1, shuffle=False)]
    accumulation = config.gradient_accumulation_steps
    assert batch == config.per_device_train_batch_size * accumulation
    # TRL samples anew after so many micro-batches; a policy lasts till the next step.
    every = config.steps_per_generation * config.num_iterations
    steps = max(1, every // accumulation)
    of_one_policy = order[: config.generation_batch_size * max(1, accumulation // every)]
    assert rounds["prompts_per_round"] == len({*of_one_policy})
    assert rounds["num_rounds"] * steps == 72
    assert recipe()["run"]["num_epochs"] == config.num_iterations
    answers = rounds["prompts_per_round"] * config.num_generations
    assert answers * config.num_iterations == steps * batch


def test_what_makes_a_function_is_called_as_trl_calls_it(folder, capsys):
    need_trl()
    import importlib.util

    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    tree = ast.parse((package / "scripts/grpo.py").read_text())
    (registry,) = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reward_funcs_registry"
    ]
    assert isinstance(registry, ast.Dict)
    made = {
        ast.literal_eval(key): ast.unparse(value)
        for key, value in zip(registry.keys, registry.values, strict=True)
        if key
    }
    assert {name: call for name, call in made.items() if call != name} == {
        name: name + arguments for name, (_, arguments) in MADE.items()
    }
    named = {
        node.value.value
        for node in ast.walk(ast.parse((package / "rewards/other_rewards.py").read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__name__"
        if isinstance(node.value, ast.Constant)
    }
    assert {name for name, _ in MADE.values()} <= named


def test_a_name_that_is_no_function_s_is_not_shown_as_code(folder, capsys):
    assert convert(SUMS.replace("my_lib.is_sum", "'os import system; system(1)'")) == 0
    printed = capsys.readouterr().out
    assert "is no name of a function" in printed
    assert re.findall(r"^    .*import .*", printed, flags=re.MULTILINE) == []
    assert convert(SUMS, "--out", "recipes/control.yaml") == 0
    assert re.findall(r"^    from my_lib import is_sum$", capsys.readouterr().out, flags=re.MULTILINE) != []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            AXOLOTL.replace("rl: grpo", "rl: dpo"),
            "file.yaml:6: trl.num_generations is 4: goes with GRPO only; left out",
        ),
        (
            AXOLOTL.replace("rl: grpo\n", ""),
            "file.yaml:6: trl.reward_funcs is ['rewards.is_right']: goes with GRPO only",
        ),
        (SUMS + "loss_type: bnpo\n", "loss_type is 'bnpo': a mean over the tokens of a micro-batch"),
        (
            SUMS + "generation_batch_size: 18\n",
            "18 answers are sampled at a time there, no multiple of num_generations 4",
        ),
        (SUMS + "max_steps: 3\nnum_iterations: 2\n", "the last round is trained to its end: 4 steps, not 3"),
        (SUMS + "desirable_weight: 2.0\n", "desirable_weight is 2.0: goes with another objective; left out"),
        (SUMS + "use_vllm: true\nvllm_gpu_memory_utilization: 0.5\n", "rounds.sampler takes --gpu-memory-utilization"),
        (SUMS + "vllm_gpu_memory_utilization: 0.5\n", "needs nothing: vllm_gpu_memory_utilization"),
        (SUMS + "reward_funcs: []\n", "no reward functions in the file: write rounds.reward_funcs"),
    ],
    ids=range(9),
)
def test_what_is_left_out_or_otherwise_is_said(folder, capsys, text, line):
    if text.count("reward_funcs") > 1:
        text = text.replace("reward_funcs: [my_lib.is_sum]\n", "")
    assert convert(text, "--from", "axolotl" if "base_model" in text else "trl") == 0
    assert line in capsys.readouterr().out


def test_vllm_beside_the_trainer_is_started_for_each_round(folder):
    assert convert(SUMS + "use_vllm: true\nvllm_tensor_parallel_size: 2\nvllm_max_model_length: 512\n") == 0
    assert recipe()["rounds"]["sampler"] == "vllm --tensor-parallel-size 2"
    assert recipe()["data"]["max_length"] == 512


OPEN_R1 = """\
model_name_or_path: m
dataset_name: some/problems
dataset_prompt_column: problem
per_device_train_batch_size: 8
max_steps: 4
num_generations: 4
wandb_project: mine
report_to: [wandb]
callbacks: [push_to_hub_revision]
"""


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def test_a_file_of_open_r1_has_its_column_its_functions_and_its_chat(folder, capsys):
    assert main(["convert", write("r1.yaml", OPEN_R1 + "cosine_max_len: 500\n"), "--processes", "1"]) == 0
    recipe = yaml.safe_load(Path("recipes/r1.yaml").read_text())
    assert recipe["data"]["columns"] == {"prompt": "problem"}
    assert recipe["rounds"]["user_message"] == "{prompt}"
    assert recipe["rounds"]["reward_funcs"] == ["accuracy", "format", "tag_count"]  # its own, where a file has none
    assert recipe["run"]["trackers"] == {"wandb": {"project": "mine"}}
    said = capsys.readouterr().out
    assert "from r1.yaml (open-r1)" in said and "a teacher" not in said
    made = (
        "GRPOScriptArguments(dataset_name=\"\", reward_funcs=['accuracy', 'format', 'tag_count'], cosine_max_len=500)"
    )
    assert made in said and "for name, function in zip(script.reward_funcs, get_reward_funcs(script)):" in said


def test_a_system_prompt_of_open_r1_makes_prompts_messages(folder, capsys):
    main(["convert", write("r1.yaml", OPEN_R1 + "system_prompt: Think.\n"), "--processes", "1"])
    assert "user_message" not in yaml.safe_load(Path("recipes/r1.yaml").read_text())["rounds"]
    assert "write each as messages, of the system_prompt and of the user" in capsys.readouterr().out


def test_supervised_files_of_open_r1_are_its_own_too(folder, capsys):
    text = "model_name_or_path: m\ndataset_name: d\nmax_length: 64\npacking: true\ncallbacks: [push_to_hub_revision]\n"
    assert main(["convert", write("sft.yaml", text)]) == 0
    assert "from sft.yaml (open-r1)" in capsys.readouterr().out


def test_a_batch_that_trl_refuses_tells_the_number_of_processes(folder, capsys):
    text = OPEN_R1.replace("num_generations: 4", "num_generations: 6")
    main(["convert", write("r1.yaml", text)])
    assert "it ran on a multiple of 3 processes, so give --processes" in capsys.readouterr().out
    Path("recipes/r1.yaml").unlink()
    main(["convert", "r1.yaml", "--processes", "3"])
    assert "ran on a multiple" not in capsys.readouterr().out


def test_defaults_that_another_release_may_not_have_are_named(folder, capsys):
    """TRL 1.16.0 has no vllm_device; releases that had it took beta 0.04 where a file is silent."""
    main(["convert", write("r1.yaml", OPEN_R1)])
    assert "another release" not in capsys.readouterr().out
    Path("recipes/r1.yaml").unlink()
    main(["convert", write("r1.yaml", OPEN_R1 + "vllm_device: auto\n")])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "another release" in line)
    assert line.lstrip().startswith("vllm_device: no key of") and "beta 0.0" in line and "loss_type 'dapo'" in line
    Path("recipes/r1.yaml").unlink()
    main(["convert", write("r1.yaml", OPEN_R1 + "vllm_device: auto\nbeta: 0.04\n")])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "another release" in line)
    assert "beta" not in line
