"""Strategy files as other projects write them: they train as they are, with the common curve, or say why not.

python -m pytest -q tests/test_foreign_strategies.py
"""

import dataclasses
import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.constants import DEEPSPEED_MULTINODE_LAUNCHERS
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import ADAM_W_MODE_DEFAULT
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from pydantic import BaseModel, ValidationError

from benchmarks import deepspeed_facts
from cookbook.commands.cli import main
from cookbook.commands.convert.keys import Conversion
from cookbook.config.accelerate_yaml import AccelerateFile, DeepspeedBlock, FsdpBlock, ParallelismBlock
from cookbook.config.deepspeed_json import DeepspeedFile, OffloadOptimizerBlock, OffloadParamBlock, ZeroBlock
from cookbook.config.foreign import tables
from cookbook.config.recipe import Recipe, answer_to, leaves, load_recipe
from cookbook.config.schedule import Schedule, learning_rate
from cookbook.config.strategy import load_strategy
from cookbook.config.strategy_keys import Sorting
from cookbook.forecast.ranking import forecast_all
from cookbook.start.hosts import Hosts
from cookbook.start.run_plan import launch_command, machine_problems
from cookbook.system import status
from cookbook.system.child import run_child
from cookbook.system.files import Document, RecipeError
from cookbook.system.hardware import parse_machines
from cookbook.system.validation import validate
from tests.curves import ROOT, SGD, Lab, distance
from tests.gpu_runs import GpuLab
from tests.test_owner_schemas import lists_of

LOSS, NORM = 2e-6, 1e-6
"""As in tests/test_equivalence.py."""

# What `accelerate config` 1.15 asks for and writes (commands/config/cluster.py), with its default answers.
ANSWERS: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "num_processes": 2,
    "mixed_precision": "no",
    "use_cpu": False,
    "debug": False,
    "same_network": True,
    "downcast_bf16": "no",
    "tpu_env": [],
}
FSDP = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_offload_params": False,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_activation_checkpointing": False,
}
FSDP1 = FSDP | {
    "fsdp_version": 1,
    "fsdp_reshard_after_forward": "FULL_SHARD",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True,
    "fsdp_sync_module_states": True,
}
FSDP2 = FSDP | {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
ZERO = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "zero3_init_flag": True}
NOWHERE = {"offload_optimizer_device": "none", "offload_param_device": "none"}
ON_CPU = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
WRITTEN_BY_ACCELERATE: dict[str, dict[str, Any]] = {
    "single": {"distributed_type": "NO", "num_processes": 1},
    "ddp": {"distributed_type": "MULTI_GPU", "gpu_ids": "all"},
    "fsdp1": {"distributed_type": "FSDP", "fsdp_config": FSDP1},
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config": FSDP2},
    "fsdp2_offload": {"distributed_type": "FSDP", "fsdp_config": FSDP2 | {"fsdp_offload_params": True}},
    "zero1": {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO | {"zero_stage": 1}},
    "zero2": {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO | NOWHERE | {"zero_stage": 2}},
    "zero2_offload": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": ZERO | NOWHERE | {"zero_stage": 2, "offload_optimizer_device": "cpu"},
    },
    "zero3": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": ZERO | NOWHERE | {"zero_stage": 3, "zero3_save_16bit_model": True},
    },
    "zero3_offload": {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO | ON_CPU | {"zero_stage": 3}},
}
LAUNCHED = ("ddp", "fsdp1", "zero3_offload")
"""By accelerate, which reads the file itself and hands it on in variables."""
RUN_BY_TURN = ("single", "fsdp2", "fsdp2_offload", "zero1", "zero2_offload", "zero3")

LINEAR = {"warmup_type": "linear", "cos_min_ratio": 0}
"""Where a scheduler's defaults are not the recipe's."""

# As the pages of DeepSpeed and transformers write them: 5e8, "auto", switched-off profilers.
PAGES: dict[str, dict[str, Any]] = {
    "zero2": {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "SGD", "params": {"lr": "auto", "weight_decay": "auto", "momentum": 0.9}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"} | LINEAR,
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "contiguous_gradients": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1},
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
    },
    "zero3": {
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "none"},
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    },
    "zero3 by the names of fields": {
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 0,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "max_live_parameters": 0,
            "max_reuse_distance": 0,
            "gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
    },
}


def yaml_of_accelerate(folder: Path, name: str, **more: Any) -> Path:
    path = folder / f"{name}.yaml"
    ClusterConfig(**json.loads(json.dumps(ANSWERS | WRITTEN_BY_ACCELERATE[name] | more))).to_yaml_file(path)
    return path


def with_json(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "page.json").write_text(json.dumps(values))
    path = folder / "page.yaml"
    block = {"deepspeed_config_file": str(folder / "page.json"), "zero3_init_flag": True}
    path.write_text(yaml.dump(ANSWERS | {"distributed_type": "DEEPSPEED", "deepspeed_config": block}))
    return path


def mistakes_of(path: Path) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_strategy(path)
    return caught.value.mistakes


def check(lab: Lab, path: Path, *more: str) -> int:
    return main(["check", str(lab.folder / "recipe.yaml"), "--strategy", str(path), "--processes", "2", *more])


def mark_of(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow, pytest.mark.thorough] if name in RUN_BY_TURN else [pytest.mark.slow]


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark_of(name)) for name in WRITTEN_BY_ACCELERATE])
def test_what_accelerate_config_writes_trains_with_the_common_curve(name: str, lab: Lab, tmp_path: Path):
    path, processes = yaml_of_accelerate(tmp_path, name), 1 if name == "single" else 2
    curve = lab.run(str(path), SGD, processes=processes, launched=name in LAUNCHED)
    apart = distance(curve, lab.run("single", SGD))
    assert apart.loss < LOSS and apart.norm < NORM, apart
    wanted, got = load_strategy(ROOT / f"accelerate_configs/{name}.yaml"), load_strategy(path)
    assert (got.kind, got.zero_stage, got.offloads) == (wanted.kind, wanted.zero_stage, wanted.offloads)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_json_as_the_pages_of_deepspeed_have_it_trains_with_the_common_curve(name: str, lab: Lab, tmp_path: Path):
    curve = lab.run(str(with_json(tmp_path, PAGES[name])), SGD, processes=2)
    apart = distance(curve, lab.run("single", SGD))
    assert apart.loss < LOSS and apart.norm < NORM, apart
    assert "ask for nothing" in (curve.folder / "output.txt").read_text()


@pytest.mark.parametrize("name", WRITTEN_BY_ACCELERATE)
def test_what_accelerate_config_writes_passes_the_check_with_one_note(name: str, lab: Lab, tmp_path: Path, capsys):
    processes = ["--processes", "1"] if name == "single" else []
    assert check(lab, yaml_of_accelerate(tmp_path, name), *processes) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1 and "; tpu_env: []" in notes[0]


@pytest.fixture
def written_without_a_gpu(tmp_path: Path) -> Path:
    """File that `accelerate config default` writes on a machine without a GPU: it asks for the CPU."""
    path = tmp_path / "default.yaml"
    assert write_basic_config(save_location=str(path))
    assert yaml.safe_load(path.read_text())["use_cpu"] is True
    return path


def test_a_file_that_asks_for_the_cpu_is_fine_where_there_is_no_gpu_and_refused_where_there_is(
    written_without_a_gpu: Path, lab: Lab, capsys
):
    path = written_without_a_gpu
    assert check(lab, path, "--processes", "1") == 0
    assert "use_cpu" not in capsys.readouterr().out
    counts = {"num_processes": 1, "num_local": 1}
    assert machine_problems(load_strategy(path), **counts, num_gpus=0) == []
    (problem,) = machine_problems(load_strategy(path), **counts, num_gpus=2)
    assert "use_cpu is true, but a run uses the 2 GPUs here; take it out, or hide them" in problem
    path.write_text(path.read_text().replace('"use_cpu": true', '"use_cpu": false'))
    assert machine_problems(load_strategy(path), **counts, num_gpus=2) == []


@pytest.mark.slow
@pytest.mark.thorough
def test_a_file_that_asks_for_the_cpu_trains_when_accelerate_launches_it(written_without_a_gpu: Path, lab: Lab):
    curve = lab.run(str(written_without_a_gpu), SGD, processes=1, launched=True)
    apart = distance(curve, lab.run("single", SGD))
    assert apart.loss < LOSS and apart.norm < NORM, apart


OWNED = {
    "mixed_precision": ("bf16", "mixed_precision is 'bf16', but the recipe's mixed_precision is 'no'"),
    "deepspeed_config.gradient_accumulation_steps": (4, "is 4, but the recipe's accumulation is 2"),
    "deepspeed_config.gradient_clipping": (0.5, "is 0.5, but the recipe's optim.max_grad_norm is 1.0"),
}


@pytest.mark.parametrize("key", OWNED)
def test_what_the_recipe_owns_is_refused_with_both_values_where_they_differ(key: str, lab, tmp_path, capsys):
    value, said = OWNED[key]
    path = yaml_of_accelerate(tmp_path, "zero2")
    values = yaml.safe_load(path.read_text())
    *section, last = key.split(".")
    (values[section[0]] if section else values)[last] = value
    path.write_text(yaml.dump(values))
    assert check(lab, path) == 2
    assert said in capsys.readouterr().err


JSON_OWNED = {
    "optimizer": ({"type": "AdamW"}, "optimizer.type is 'AdamW', but the recipe's optim.name is 'sgd'"),
    "scheduler": ({"type": "WarmupLR"}, "scheduler.type is 'WarmupLR', but the recipe's schedule.name is 'cosine'"),
    "train_batch_size": (32, "train_batch_size is 32, but the recipe's batch.global_batch_size is 16"),
    "bf16": ({"enabled": True}, "bf16.enabled is true, but the recipe's bf16 is false"),
}


@pytest.mark.parametrize("key", JSON_OWNED)
def test_a_json_that_contradicts_the_recipe_is_refused_with_both_values(key: str, lab, tmp_path, capsys):
    value, said = JSON_OWNED[key]
    assert check(lab, with_json(tmp_path, PAGES["zero2"] | {key: value})) == 2
    assert said in capsys.readouterr().err


def test_sgd_of_a_json_without_a_momentum_has_none(lab: Lab, tmp_path: Path, capsys):
    sgd = {"type": "SGD", "params": {"lr": "auto", "weight_decay": "auto"}}
    path = with_json(tmp_path, PAGES["zero2"] | {"optimizer": sgd})
    assert check(lab, path) == 2
    held = "optimizer.params.momentum is missing, so DeepSpeed's default 0 holds"
    assert f"{held}, but the recipe's optim.momentum is 0.9" in capsys.readouterr().err
    assert check(lab, path, "--set", "optim.momentum=0") == 0


def test_a_key_that_would_change_something_is_refused_and_convert_is_named(tmp_path: Path):
    values = PAGES["zero3"] | {"wall_clock_breakdown": True, "flops_profiler": {"enabled": True}}
    values["zero_optimization"] = values["zero_optimization"] | {"zero_quantized_gradients": True}
    path = with_json(tmp_path, values)
    mistakes = mistakes_of(path)
    assert (
        mistakes[-1] == f"{path}: `cookbook convert {path}` writes it in the terms of a strategy and a recipe of ours"
    )
    text = "\n".join(mistakes)
    for said in ("wall_clock_breakdown is true", "flops_profiler", "zero_quantized_gradients is true"):
        assert said in text


def test_a_guess_is_not_judged_as_if_it_were_written(tmp_path: Path):
    values = PAGES["zero2"] | {"zero_force_ds_optimizer": True, "train_batch_sizes": 3}
    text = "\n".join(mistakes_of(with_json(tmp_path, values)))
    assert "zero_force_ds_optimizer: unknown key" in text and "train_batch_sizes: unknown key" in text
    assert "use false" not in text and "zero_force_ds_cpu_optimizer is" not in text


def test_a_comment_at_the_top_of_a_json_is_passed_over(lab: Lab, tmp_path: Path, capsys):
    path = with_json(tmp_path, {"_comment": "of mine", "//": "theirs"} | PAGES["zero3"])
    assert check(lab, path) == 0
    assert "page.json" not in capsys.readouterr().err
    assert {"_comment", "//"} <= {*load_strategy(path).passed}
    within = PAGES["zero3"]["zero_optimization"] | {"_comment": "DeepSpeed would stop at this one"}
    (first, *_) = mistakes_of(with_json(tmp_path, PAGES["zero3"] | {"zero_optimization": within}))
    assert "zero_optimization._comment: unknown key" in first


def test_a_refusal_says_where_the_meaning_goes(tmp_path: Path):
    mesh = {"parallelism_config_cp_size": 2}
    path = yaml_of_accelerate(tmp_path, "zero3", parallelism_config=mesh, dynamo_config={"dynamo_backend": "INDUCTOR"})
    text = "\n".join(mistakes_of(path))
    assert "dynamo_backend is 'INDUCTOR': write model.compile: true, and take this out" in text
    assert "write parallelism_config_sp_size, and take this out" in text
    (mistake, _) = mistakes_of(with_json(tmp_path, PAGES["zero3"] | {"autotp_size": 2}))
    assert mistake.endswith("tensor parallel; take strategy tp, and take this out")
    mesh = {"parallelism_config_sp_size": 2, "parallelism_config_dp_replicate_size": 2}
    path = yaml_of_accelerate(tmp_path, "zero3", num_processes=4, parallelism_config=mesh)
    assert mistakes_of(path)[0].endswith("take parallelism_config_dp_replicate_size out")
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "fast_init": False}
    values = PAGES["zero3"]["zero_optimization"] | {"offload_param": nvme, "offload_optimizer": nvme}
    text = "\n".join(mistakes_of(with_json(tmp_path, PAGES["zero3"] | {"zero_optimization": values})))
    assert "zero_optimization.offload_param.fast_init: does not belong here; take it out" in text


OF_SEQUENCES = {"zero3": "shard", "fsdp2": "shard", "ddp": "replicate"}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_data_parallel_sizes_beside_sequence_parallel_are_the_processes_that_are_left(
    name: str, lab: Lab, tmp_path: Path
):
    """As TRL's file for sequence parallel over 4 GPUs has them."""
    sizes = {"parallelism_config_sp_size": 2, f"parallelism_config_dp_{OF_SEQUENCES[name]}_size": 2}
    path = yaml_of_accelerate(tmp_path, name, num_processes=4, parallelism_config=sizes)
    curve = lab.run(str(path), SGD, processes=4)
    apart = distance(curve, lab.run("single", SGD))
    assert apart.loss < LOSS and apart.norm < NORM, apart
    shipped = load_strategy(ROOT / f"accelerate_configs/{name}_sp.yaml")
    assert load_strategy(path).mesh(4) == shipped.mesh(4)


FSDP_NAMES = {
    "without the prefix": ("fsdp2", {key.removeprefix("fsdp_"): value for key, value in FSDP2.items()}),
    "by both names": ("fsdp1", FSDP1 | {"fsdp_sharding_strategy": "FULL_SHARD"}),
    "by its number": ("fsdp1", FSDP1 | {"fsdp_sharding_strategy": 1}),
}


@pytest.mark.parametrize("case", FSDP_NAMES)
def test_keys_of_fsdp_are_read_by_each_name_that_accelerate_reads(case: str, tmp_path: Path):
    name, block = FSDP_NAMES[case]
    if case == "without the prefix":  # the rest is foreign.yaml's, which has whole names
        block = {key: value for key, value in block.items() if f"fsdp_{key}" in FsdpBlock.model_fields}
    strategy = load_strategy(yaml_of_accelerate(tmp_path, name, fsdp_config=block))
    assert strategy.kind == name and strategy.fsdp == load_strategy(yaml_of_accelerate(tmp_path, name)).fsdp


def test_a_file_from_before_fsdp_had_versions_is_read_as_accelerate_reads_it(tmp_path: Path):
    block = {key: value for key, value in FSDP1.items() if key not in ("fsdp_version", "fsdp_use_orig_params")}
    path = yaml_of_accelerate(tmp_path, "fsdp1", fsdp_config=block)
    asked, *_ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "train.py"]))
    assert (asked.fsdp_version, asked.fsdp_use_orig_params) == ("1", "true")
    assert load_strategy(path).kind == "fsdp1"


def test_a_mesh_is_not_counted_without_the_size_that_is_refused(tmp_path: Path):
    mesh = {"parallelism_config_dp_shard_size": 2, "parallelism_config_cp_size": 2}
    text = "\n".join(mistakes_of(yaml_of_accelerate(tmp_path, "fsdp2", num_processes=4, parallelism_config=mesh)))
    assert "write parallelism_config_sp_size" in text and "num_processes" not in text


@pytest.mark.parametrize("written", [2e8, 200000000])
def test_a_whole_number_is_an_integer_however_it_is_written(written: float, tmp_path: Path):
    values = {"zero_optimization": {"stage": 2, "reduce_bucket_size": written}}
    config = load_strategy(with_json(tmp_path, values)).deepspeed
    assert config is not None and config["zero_optimization"]["reduce_bucket_size"] == 200_000_000
    values["zero_optimization"]["reduce_bucket_size"] = 2.5
    assert "reduce_bucket_size is 2.5; write a whole number" in mistakes_of(with_json(tmp_path, values))[0]


MEANINGS = {
    "ddp": {"fsdp_sharding_strategy": "NO_SHARD"},
    "hsdp": {"fsdp_sharding_strategy": "HYBRID_SHARD"},
}


@pytest.mark.parametrize("name", MEANINGS)
def test_where_the_meaning_is_known_it_is_told(name: str, tmp_path: Path):
    block = FSDP1 | {"fsdp_reshard_after_forward": None} | MEANINGS[name]
    path = yaml_of_accelerate(tmp_path, "fsdp1", fsdp_config={k: v for k, v in block.items() if v is not None})
    (mistake, *_) = mistakes_of(path)
    assert f"for that take strategy {name}" in mistake and "did you mean" not in mistake
    stage_0 = with_json(tmp_path, {"zero_optimization": {"stage": 0}})
    assert "is 0, which is DDP: take strategy ddp" in mistakes_of(stage_0)[0]


SAID_OF_JSON: dict[str, tuple[dict[str, Any], str]] = {
    "ZeRO-Offload as of 2020": ({"cpu_offload": True}, "write zero_optimization.offload_optimizer: {device: cpu}"),
    "auto that nobody fills in": ({"sub_group_size": "auto"}, "sub_group_size is 'auto', and accelerate fills in none"),
    "SuperOffload": ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, "an optimizer of its own"),
    "ZenFlow": ({"zenflow": {"topk_ratio": 0.1}}, "an update of another order"),
    "MiCS": ({"mics_shard_size": 4}, "take strategy hsdp"),
    "leaves": ({"leaf_module": {"classes": ["MixtralSparseMoeBlock"]}}, "layers of experts are found by themselves"),
    "an odd bucket": ({"stage": 2, "allgather_bucket_size": 2001}, "is 2001, which must be even; write 2002"),
}


@pytest.mark.parametrize("case", SAID_OF_JSON)
def test_a_key_of_deepspeed_that_is_not_served_is_answered_by_its_meaning(case: str, tmp_path: Path):
    block, said = SAID_OF_JSON[case]
    (mistake, *more) = mistakes_of(with_json(tmp_path, {"zero_optimization": {"stage": 3, **block}}))
    assert said in mistake and "known here" not in mistake and len(more) <= 1


IN_ONE_ROUND: dict[str, tuple[dict[str, Any], list[str]]] = {
    "an optimizer with keys of its own": (
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": "auto", "freeze_step": 400, "cuda_aware": False}}},
        ["optimizer.type is 'OneBitAdam': gradients in 1 bit"],
    ),
    "a key that nobody knows beside a known one": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 3, "decoupled": True}}},
        ["optimizer.params.decoupled: unknown key; the recipe owns it (optim)"],
    ),
    "weights in bf16": (
        {"bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True}},
        ["bf16.bf16_master_weights_and_grads is true: weights and moments are float32; take it out"],
    ),
    "a guess that would be ignored": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pipeline": True}}},
        ["offload_optimizer.pipeline: unknown key; did you mean pipeline_read?"],
    ),
}


@pytest.mark.parametrize("case", IN_ONE_ROUND)
def test_what_is_wrong_with_a_json_comes_in_one_round(case: str, tmp_path: Path):
    values, said = IN_ONE_ROUND[case]
    *mistakes, way = mistakes_of(with_json(tmp_path, PAGES["zero2"] | values))
    assert len(mistakes) == len(said) and all(text in line for text, line in zip(said, mistakes, strict=True))
    assert "cookbook convert" in way


def test_adam_of_deepspeed_is_adamw_unless_a_file_says_otherwise(tmp_path: Path):
    assert ADAM_W_MODE_DEFAULT is True
    adam = {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}
    claims = load_strategy(with_json(tmp_path, PAGES["zero3"] | adam)).claims
    assert [claim.value for claim in claims if claim.key == "optim.name"] == ["adamw"]
    adam["optimizer"]["params"] = {"adam_w_mode": False}
    assert "adam_w_mode is false: the decay is apart from" in mistakes_of(with_json(tmp_path, adam | PAGES["zero3"]))[0]


def test_what_is_switched_off_at_any_depth_or_left_open_is_passed_over(tmp_path: Path):
    off = {"weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}}}
    values = {"compression_training": off, "amp": {"enabled": "auto"}, "tensor_parallel": {"autotp_size": 1}}
    load_strategy(with_json(tmp_path, PAGES["zero2"] | values))
    on = {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}
    assert "another training" in mistakes_of(with_json(tmp_path, PAGES["zero2"] | on))[0]


def defaults_of(model: type[BaseModel]) -> dict[str, Any]:
    fields = {field.alias or name: field.get_default() for name, field in model.model_fields.items()}
    return json.loads(json.dumps({key: value for key, value in fields.items() if type(value) in (bool, int, float)}))


FIELDS = [
    (block, alias, field)
    for block, fields in deepspeed_facts.facts()["blocks"].items()
    for alias, field in fields.items()
]


def json_of(block: str, key: str, value: Any) -> dict[str, Any]:
    """A JSON with one key in one block; the blocks for offload lie in that of ZeRO."""
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    *_, last = block.split(".")
    if last == "zero_optimization":
        return {last: zero | {key: value}}
    if last == "fp16":
        return {last: {key: value}, "zero_optimization": zero}
    return {"zero_optimization": zero | {last: {"device": "nvme", "nvme_path": "swap"} | {key: value}}}


@pytest.mark.parametrize(("block", "alias", "field"), FIELDS, ids=[f"{block}.{alias}" for block, alias, _ in FIELDS])
def test_a_value_that_deepspeed_takes_is_no_unknown_key(block: str, alias: str, field: dict[str, Any], tmp_path: Path):
    """By each of its names, with its default, its least value, and null where that is the default."""
    values = [field[bound] + (bound == "gt") for bound in ("gt", "ge") if bound in field]
    values += [field[key] for key in ("default",) if key in field] + [None] * field.get("null", False)
    for name, value in itertools.product({alias, field.get("field", alias)}, values):
        deepspeed_facts.BLOCKS[block](**{name: value})  # DeepSpeed takes it
        try:
            load_strategy(with_json(tmp_path, json_of(block, name, value)))
        except RecipeError as error:
            said = "\n".join(error.mistakes)
            assert "unknown key" not in said and "is empty" not in said and "or more" not in said, said


BOUND = [
    (kind.block, alias)
    for kind in (ZeroBlock, OffloadOptimizerBlock, OffloadParamBlock)
    for alias in kind.model_fields
    if {"ge", "gt"} & deepspeed_facts.facts()["blocks"][kind.block].get(alias, {}).keys()
]


@pytest.mark.parametrize(("block", "key"), BOUND)
def test_a_value_below_deepspeed_s_bound_is_refused(block: str, key: str, tmp_path: Path):
    with pytest.raises(ValidationError):
        deepspeed_facts.BLOCKS[block](**{key: -1})
    assert any(f"{key} is -1" in mistake for mistake in mistakes_of(with_json(tmp_path, json_of(block, key, -1))))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_key_with_deepspeed_s_own_default_is_passed_over(stage: int, tmp_path: Path):
    on_cpu = defaults_of(DeepSpeedZeroOffloadOptimizerConfig) | {"device": "cpu"}
    values = defaults_of(DeepSpeedZeroConfig) | {"stage": stage, "offload_optimizer": on_cpu}
    if stage == 3:
        values["offload_param"] = defaults_of(DeepSpeedZeroOffloadParamConfig) | {"device": "cpu"}
    assert len(values) > 25
    load_strategy(with_json(tmp_path, {"zero_optimization": values}))
    asked = {"offload_optimizer": on_cpu | {"buffer_count": 5}, "stage3_max_reuse_distance": 3}
    *mistakes, _ = mistakes_of(with_json(tmp_path, {"zero_optimization": values | asked}))
    assert len(mistakes) == 2 - (stage == 3) and "buffer_count: would be ignored" in mistakes[-1]


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"zero_stage": 2, "offload_optimizer_device": "nvme"}, "add offload_optimizer_nvme_path: nvme_swap"),
        ({"zero_stage": 2, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"}, "needs stage 3"),
    ],
)
def test_a_block_in_place_of_a_json_is_answered_by_its_own_keys(block: dict[str, Any], said: str, tmp_path: Path):
    mistakes = mistakes_of(yaml_of_accelerate(tmp_path, "zero2", deepspeed_config=block))
    assert any(said in mistake for mistake in mistakes) and "zero_optimization" not in " ".join(mistakes)


# Of axolotl's deepspeed_configs/zero3_bf16_cpuoffload_params.json.
WEIGHTS_IN_HOST_MEMORY = {
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "sub_group_size": 0,
        "stage3_param_persistence_threshold": 0,
        "max_live_parameters": 0,
        "max_reuse_distance": 0,
    },
}


def test_weights_alone_may_be_offloaded(tmp_path: Path):
    """DeepSpeed's own model of it asks for no offload_optimizer beside it."""
    DeepSpeedZeroConfig(**WEIGHTS_IN_HOST_MEMORY["zero_optimization"])
    for device in ({"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path)}):
        zero = {"stage": 3, "offload_param": device, "stage3_prefetch_bucket_size": 0}
        strategy = load_strategy(with_json(tmp_path, {"zero_optimization": zero}))
        assert (strategy.offload_param, strategy.offload_optimizer) == (device["device"], None)
    block = {"zero_stage": 3, "offload_param_device": "cpu"}
    strategy = load_strategy(yaml_of_accelerate(tmp_path, "zero3", deepspeed_config=block))
    assert (strategy.offload_param, strategy.offload_optimizer) == ("cpu", None)


@pytest.mark.slow
def test_weights_alone_in_host_memory_have_the_common_curve(gpu_lab: GpuLab, lab: Lab, tmp_path: Path):
    path = with_json(tmp_path, WEIGHTS_IN_HOST_MEMORY)
    apart = distance(lab.run(str(path), SGD), lab.run("single", SGD))
    assert apart.loss < LOSS and apart.norm < NORM, apart
    on_gpus = {"strategy": str(path), "data.packing": "true", "mixed_precision": "'no'"}
    whole = {name: value for name, value in on_gpus.items() if name != "strategy"}
    assert gpu_lab.run("zero3", on_gpus, recipe="memory").losses == gpu_lab.run("zero3", whole, recipe="memory").losses


def test_a_block_without_a_stage_is_judged_at_that_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All that is wrong comes at once: what stage 3 alone does, too."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    stage = DeepSpeedPlugin().zero_stage
    block = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    text = "\n".join(mistakes_of(yaml_of_accelerate(tmp_path, "zero2", deepspeed_config=block)))
    assert f"deepspeed_config: names no JSON; add zero_stage: {stage}" in text
    assert f"offload_param_device: needs stage 3, the stage is {stage}" in text


def test_a_block_in_place_of_a_json_may_offload_to_a_disk(tmp_path: Path):
    """With DeepSpeed's own prefetching a run on a disk ends at the second step, so the block means none."""
    block: dict[str, Any] = {"zero_stage": 3}
    for name in ("offload_optimizer", "offload_param"):
        block |= {f"{name}_device": "nvme", f"{name}_nvme_path": str(tmp_path)}
    zero = load_strategy(yaml_of_accelerate(tmp_path, "zero3", deepspeed_config=block)).zero
    on_disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    assert zero["offload_optimizer"].items() >= on_disk.items() <= zero["offload_param"].items()
    assert zero["stage"] == 3 and zero["stage3_prefetch_bucket_size"] == 0


@pytest.mark.parametrize(
    ("vocabulary", "buffer", "share"), [(8192, 786431, 786432), (8192, 786432, 0), (4096, 9, 393216), (2048, 9, 0)]
)
def test_buffers_on_a_disk_must_hold_a_process_s_share_of_the_largest_weight(
    vocabulary, buffer, share, tmp_path, capsys
):
    """8192 or 4096 x 192 in float32, over two processes; a share of 2048 x 192 has less than 1 MiB, and is kept."""
    on_disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    block = {"stage": 3, "stage3_prefetch_bucket_size": 0, "offload_optimizer": on_disk}
    path = with_json(tmp_path, {"zero_optimization": block | {"offload_param": on_disk | {"buffer_size": buffer}}})
    size = f"model.from_scratch.vocab_size={vocabulary}"
    words = ["check", str(ROOT / "recipes/quickstart.yaml"), "--strategy", str(path), "--processes", "2"]
    assert main([*words, "--set", size]) == (2 if share else 0)
    said = f"buffer_size is {buffer}, and a process's share of the embedding {share}; write {share}"
    assert (said in capsys.readouterr().err) == bool(share)


@pytest.mark.parametrize(
    "text",
    [
        "model_name_or_path: m\nfsdp: full_shard\nfsdp_config: {version: 2}\n",
        "base_model: m\nfsdp_version: 2\n",
        "tokenizer: {_component_: torchtune.models.qwen3.qwen3_tokenizer, path: m}\n",
        "step_scheduler: {global_batch_size: 4}\n",
        "model: m\ntrain_dataset: d\n",
    ],
    ids=["transformers", "axolotl", "torchtune", "NeMo Automodel", "LLaMA-Factory v1"],
)
def test_a_training_file_of_another_project_is_no_strategy(text: str, tmp_path: Path):
    path = tmp_path / "train.yaml"
    path.write_text(text)
    (mistake,) = mistakes_of(path)
    assert f"is a file of a training, not a strategy; `cookbook convert {path}` makes a recipe of it" in mistake


@pytest.mark.parametrize(
    "text",
    ["mixed_precision: bf16\nfsdp_config: {}\n", "zero3: true\n", "tuner_type: lora\n", "optimizer: {type: AdamW}\n"],
)
def test_a_file_without_a_key_of_a_training_is_not_taken_for_one(text: str, tmp_path: Path):
    path = tmp_path / "some.yaml"
    path.write_text(text)
    assert not any("is a file of a training" in mistake for mistake in mistakes_of(path))


def test_the_name_that_accelerate_had_for_prefetching_is_read(tmp_path: Path):
    block = {key: value for key, value in FSDP1.items() if key != "fsdp_backward_prefetch"}
    path = yaml_of_accelerate(tmp_path, "fsdp1", fsdp_config=block | {"fsdp_backward_prefetch_policy": "NO_PREFETCH"})
    fsdp = load_strategy(path).fsdp
    assert fsdp is not None and fsdp.fsdp_backward_prefetch == "NO_PREFETCH"


def test_a_share_at_the_end_of_the_cosine_is_compared_with_the_recipe_s(lab, tmp_path, capsys):
    params = LINEAR | {"warmup_num_steps": "auto", "cos_min_ratio": 0.3}
    schedule = {"scheduler": {"type": "WarmupCosineLR", "params": params}}
    assert check(lab, with_json(tmp_path, PAGES["zero2"] | schedule)) == 2
    assert "cos_min_ratio is 0.3, but the recipe's min_share is 0.0" in capsys.readouterr().err


SCHEDULERS = {
    "constant": (lr_schedules.WarmupLR, {"warmup_max_lr": 0.8}),
    "linear": (lr_schedules.WarmupDecayLR, {"warmup_max_lr": 0.8, "total_num_steps": 20}),
    "cosine": (lr_schedules.WarmupCosineLR, {"cos_min_ratio": 0.0, "total_num_steps": 20}),
}


@pytest.mark.parametrize(("name", "num_steps"), [(name, steps) for name in SCHEDULERS for steps in (2, 6)])
def test_a_logarithmic_warm_up_is_the_one_of_deepspeed_s_schedulers(name: str, num_steps: int):
    kind, settings = SCHEDULERS[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
    scheduler = kind(optimizer, warmup_num_steps=num_steps, **settings)
    ours = Schedule.of(name=name, warmup_steps=num_steps, warmup="log")
    for step in range(20):
        scheduler.step()
        rate = scheduler.get_last_lr()[0]
        if step < num_steps or name != "cosine":  # its cosine is a step ahead
            assert learning_rate(step, 20, 0.8, ours) == pytest.approx(rate, rel=1e-12)
    linear = ours.model_copy(update={"warmup": "linear"})
    assert learning_rate(0, 20, 0.8, ours) == 0 < learning_rate(0, 20, 0.8, linear)


def test_names_bounds_and_defaults_are_those_of_the_installed_deepspeed():
    assert json.loads(deepspeed_facts.FACTS.read_text()) == deepspeed_facts.facts()
    on_host = deepspeed_facts.plain_defaults(DeepSpeedCPUAdam)
    assert deepspeed_facts.facts()["optimizers"]["adamw"].items() <= on_host.items()


def scheduler_of(**params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3} | params}}


SILENT: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "the warm-up": (scheduler_of(), [], "warmup_type is missing, so DeepSpeed's default 'log' holds"),
    "a word that nobody fills in": (scheduler_of(warmup_type="auto"), [], "DeepSpeed's default 'log' holds"),
    "a warm-up that is written": (scheduler_of(warmup_type="log"), [], "warmup_type is 'log', but the recipe's"),
    "the steps": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}},
        [],
        "default 1000 holds, but the recipe's schedule.warmup_steps is 3",
    ),
    "the peak": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}},
        ["schedule.name=linear"],
        "warmup_max_lr is missing, so DeepSpeed's default 0.001 holds",
    ),
    "the end": (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}},
        ["schedule.name=cosine"],
        "cos_min_ratio is missing, so DeepSpeed's default 0.0001 holds",
    ),
    "an optimizer": (
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        ["optim.name=adamw", "optim.weight_decay=0.1"],
        "weight_decay is missing, so DeepSpeed's default 0.0 holds",
    ),
    "an optimizer of torch": (
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}},
        ["optim.name=adamw", "optim.weight_decay=0.1"],
        "weight_decay is missing, so DeepSpeed's default 0.01 holds",
    ),
}


@pytest.mark.parametrize("case", SILENT)
def test_a_default_of_deepspeed_counts_as_if_it_were_written(case: str, lab: Lab, tmp_path: Path, capsys):
    values, more, said = SILENT[case]
    path = with_json(tmp_path, {"zero_optimization": {"stage": 2}} | values)
    keys = ["schedule.name=constant", "schedule.warmup_steps=3", *more]
    assert check(lab, path, *(word for key in keys for word in ("--set", key))) == 2
    printed = capsys.readouterr().err
    assert said in printed and len(printed.splitlines()) == 2, printed


@pytest.mark.parametrize("words", [["schedule.warmup=log"], []])
def test_a_recipe_that_warms_up_as_the_json_does_is_fine(words: list[str], lab: Lab, tmp_path: Path, capsys):
    path = with_json(tmp_path, {"zero_optimization": {"stage": 2}} | scheduler_of())
    keys = ["schedule.name=constant", "schedule.warmup_steps=3", *words]
    assert check(lab, path, *(word for key in keys for word in ("--set", key))) == (0 if words else 2)


@pytest.mark.parametrize(("text", "hint"), [("{// a\n}", "no comments"), ('{"a": 1,}', "no comma before")])
def test_what_json_has_not_is_said(text: str, hint: str, tmp_path: Path):
    path = with_json(tmp_path, PAGES["zero2"])
    (tmp_path / "page.json").write_text(text)
    assert hint in mistakes_of(path)[0]


LOST = """distributed_type: DEEPSPEED
deepspeed_config:
zero_stage: 3
gradient_accumulation_steps: 2
offload_optimizer_device: cpu
num_processes: 2
"""
"""As a page shows a file that has lost its indentation."""


@pytest.mark.parametrize("text", [LOST, LOST.replace("deepspeed_config:\n", "")], ids=["empty section", "no section"])
def test_keys_that_have_lost_their_section_are_read_as_its_keys(text: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("lost.yaml")
    path.write_text(text)
    keys = ["zero_stage", "offload_optimizer_device"]
    (mistake, *more) = [line for line in mistakes_of(path) if "convert" not in line]
    assert all(key in mistake for key in keys) and "indent them below it" in mistake
    assert not any("zero_stage" in line for line in more)
    assert main(["convert", "lost.yaml", "--out", "mine.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "zero_stage is" not in printed and "no counterpart" not in printed
    whole = yaml.safe_load(text.replace("deepspeed_config:\n", ""))
    block = {key: whole.pop(key) for key in (*keys, "gradient_accumulation_steps")}
    Path("whole.yaml").write_text(yaml.dump(whole | {"deepspeed_config": block}))
    assert main(["convert", "whole.yaml", "--out", "same.yaml"]) == 0
    assert "strategy: mine\n" in capsys.readouterr().out  # the one that was written for the first file
    written = load_strategy(Path("accelerate_configs/mine.yaml"))
    assert (written.zero_stage, written.offload_optimizer) == (3, "cpu")


@pytest.mark.parametrize("block", ["", "deepspeed_config: {deepspeed_config_file: nosuch.json}\n"])
def test_deepspeed_without_a_stage_is_never_ddp(block: str, tmp_path: Path, capsys):
    path = tmp_path / "bare.yaml"
    path.write_text(f"distributed_type: DEEPSPEED\nnum_processes: 2\n{block}")
    assert main(["convert", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"strategy: zero{DeepSpeedPlugin().zero_stage}\n" in printed
    assert "which is accelerate's default" in printed


MACHINES = {"num_machines": 2, "machine_rank": 0, "main_process_ip": "127.0.0.1", "num_processes": 4}
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "port": ("ddp", {"main_process_port": 66660}, "write 1 to 65535"),
    "a free port for each machine": ("ddp", MACHINES | {"main_process_port": 0}, "each machine would choose another"),
    "gpu_ids": ("ddp", {"gpu_ids": "0"}, "names 1 GPU, and num_processes is 2; name as many"),
    "gpu_ids of machines": ("ddp", MACHINES | {"gpu_ids": "0"}, "num_processes is 4 over 2 machines; name as many"),
    "gpu_ids twice": ("ddp", {"gpu_ids": "0,0"}, "with a GPU twice"),
    "gpu_ids no number": ("ddp", {"gpu_ids": "a,b"}, "'a' is no GPU"),
    "no address of a store": ("ddp", {"rdzv_backend": "c10d", "same_network": True}, "write static"),
    "pdsh": ("zero2", MACHINES, "deepspeed_multinode_launcher is missing; write standard"),
    "gpu_ids as a number": ("single", {"gpu_ids": 0}, "gpu_ids is 0; write '0' in quotes"),
    "address with a port": ("ddp", MACHINES | {"main_process_ip": "a:1"}, "write a, and main_process_port: 1"),
    "copies of no shards": (
        "fsdp2",
        {"parallelism_config": {"parallelism_config_dp_replicate_size": 2}},
        "needs a dp_shard_size from 2 on, or auto",
    ),
    "machines of one process": ("single", {"num_machines": 2}, "num_machines is 2; distributed_type NO runs one"),
}
"""Files that end in a traceback of accelerate's, or wait."""


@pytest.mark.parametrize("key", ["ipex_config: {ipex: false}", "gradient_accumulation_steps: 2"])
def test_a_key_that_accelerate_no_longer_has_is_refused_whatever_it_asks_for(key: str, tmp_path: Path):
    path = tmp_path / "old.yaml"
    path.write_text(f"distributed_type: MULTI_GPU\nnum_processes: 2\n{key}\n")
    (mistake, *_) = mistakes_of(path)
    assert "accelerate starts nothing from a file with this key; take it out" in mistake
    with pytest.raises(ValueError, match="unknown keys"):
        ClusterConfig.from_yaml_file(str(path))


@pytest.mark.parametrize("case", WRONG)
def test_what_accelerate_itself_refuses_at_the_launch_is_said_by_check(case: str, tmp_path: Path):
    name, more, said = WRONG[case]
    assert any(said in mistake for mistake in mistakes_of(yaml_of_accelerate(tmp_path, name, **more)))


def test_machines_without_an_address_are_refused_unless_whoever_starts_them_gives_it(lab, tmp_path, capsys):
    """torchrun would wait for a machine of the name None."""
    path = yaml_of_accelerate(
        tmp_path,
        "zero2",
        **{key: value for key, value in MACHINES.items() if key != "main_process_ip"}
        | {"deepspeed_config": {"zero_stage": 2, "deepspeed_multinode_launcher": "standard"}},
    )
    said = f"{path}: num_machines is 2; add main_process_ip: 10.0.0.1, as machine 0 has it; or leave num_machines out"
    launched = ["launch", str(lab.folder / "recipe.yaml"), "--strategy", str(path), "--dry-run"]
    for words in (["check", *launched[1:-1]], launched, [*launched, "--set", "data.max_length=-4"]):
        assert main(words) == 2
        assert said in capsys.readouterr().err
    main([*launched, "--machines", "2", "--machine", "1", "--first", "no-such-host.invalid"])
    printed = capsys.readouterr().err
    assert "main_process_ip" not in printed and "no-such-host.invalid" in printed


def test_machines_of_deepspeed_are_started_by_torchrun_whatever_the_file_leaves_out(tmp_path: Path):
    strategy = load_strategy(yaml_of_accelerate(tmp_path, "zero2"))
    hosts = Hosts(count=2, index=1, first="10.0.0.1")
    command = launch_command("r.yaml", strategy, num_processes=4, assignments=[], hosts=hosts)
    asked, *_ = _validate_launch_command(launch_command_parser().parse_args(command[2:]))
    assert asked.deepspeed_multinode_launcher == DEEPSPEED_MULTINODE_LAUNCHERS[1] == "standard"  # else [0], pdsh


def test_two_runs_on_a_machine_never_share_the_port_of_the_other_rendezvous(tmp_path: Path):
    """torchrun's c10d store is at 29400 unless another address is set, which `accelerate launch` does not."""
    strategy = load_strategy(yaml_of_accelerate(tmp_path, "ddp", rdzv_backend="c10d", same_network=False))
    command = launch_command("r.yaml", strategy, num_processes=2, assignments=[])
    asked, *_ = _validate_launch_command(launch_command_parser().parse_args(command[2:]))
    assert (asked.rdzv_backend, asked.main_process_port) == ("static", 0)


def test_fsdp_without_synchronized_weights_needs_each_process_to_read_them(tmp_path: Path):
    block = FSDP1 | {"fsdp_sync_module_states": False}
    path = yaml_of_accelerate(tmp_path, "fsdp1", fsdp_config=block)
    assert "fsdp_cpu_ram_efficient_loading, on unless it is false, needs it" in mistakes_of(path)[0]
    load_strategy(yaml_of_accelerate(tmp_path, "fsdp1", fsdp_config=block | {"fsdp_cpu_ram_efficient_loading": False}))


@pytest.mark.parametrize("key", ["fsdp_use_orig_params", "fsdp_sync_module_states"])
def test_a_key_of_fsdp1_in_a_file_of_fsdp2_is_told_once(key: str, tmp_path: Path):
    mistakes = mistakes_of(yaml_of_accelerate(tmp_path, "fsdp2", fsdp_config=FSDP2 | {key: False}))
    assert len(mistakes) == 2 and "convert" in mistakes[1]
    assert mistakes[0].endswith(f"fsdp_config.{key}: would be ignored with fsdp_version 2; take it out")


@pytest.mark.parametrize(
    ("reshards", "same", "other"), [(True, "FULL_SHARD", "SHARD_GRAD_OP"), (False, "SHARD_GRAD_OP", "FULL_SHARD")]
)
def test_fsdp1_s_word_for_what_fsdp2_does_may_stand_beside_it(reshards: bool, same: str, other: str, tmp_path: Path):
    block = FSDP2 | {"fsdp_reshard_after_forward": reshards}
    load_strategy(yaml_of_accelerate(tmp_path, "fsdp2", fsdp_config=block | {"fsdp_sharding_strategy": same}))
    mistakes = mistakes_of(yaml_of_accelerate(tmp_path, "fsdp2", fsdp_config=block | {"fsdp_sharding_strategy": other}))
    assert "fsdp_config.fsdp_sharding_strategy: would be ignored with fsdp_version 2" in mistakes[0]


def test_the_layer_that_is_named_must_be_the_model_s(lab: Lab, tmp_path: Path):
    block = FSDP2 | {"fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"}
    path = yaml_of_accelerate(tmp_path, "fsdp2", fsdp_config=block)
    folder, output = lab.attempt(str(path), SGD, processes=2)
    assert (folder / "exit_code").read_text() == "2"
    assert "is 'Qwen3DecoderLayer', but the layers of llama are LlamaDecoderLayer" in output


def test_the_wrong_kind_of_file_is_recognized(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(PAGES["zero2"]))
    assert check(lab, bare) == 2
    assert f"deepspeed_config: {{deepspeed_config_file: {bare}}}" in capsys.readouterr().err
    assert check(lab, lab.folder / "recipe.yaml") == 2
    assert "is a recipe, not a strategy" in capsys.readouterr().err
    for path in (bare, ROOT / "accelerate_configs/zero2.yaml"):
        assert main(["check", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{path}: is of a strategy, not a recipe; ") and line.endswith(f"--strategy {path}")


def test_all_mistakes_of_a_file_come_at_once(tmp_path: Path):
    block = {key: value for key, value in FSDP2.items() if key not in ("fsdp_version", "fsdp_reshard_after_forward")}
    path = yaml_of_accelerate(tmp_path, "fsdp2", fsdp_config=block | {"fsdp_forward_prefetch": True})
    text = "\n".join(mistakes_of(path))
    assert "fsdp_version: is missing; this key has no default, for example fsdp_version: 2" in text
    assert "fsdp_reshard_after_forward is missing; write true (as FULL_SHARD), or false (as SHARD_GRAD_OP)" in text
    assert "fsdp_forward_prefetch: would be ignored with fsdp_version 2" in text


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("GLOO_SOCKET_IFNAME", "nosuch0", "GLOO_SOCKET_IFNAME=nosuch0: no such network interface; here are "),
        ("NCCL_SOCKET_IFNAME", "=nosuch0", "NCCL_SOCKET_IFNAME==nosuch0: no such network interface; here are "),
    ],
)
def test_an_interface_that_is_not_here_ends_the_launch(name, value, said, lab, capsys, monkeypatch):
    monkeypatch.setenv(name, value)
    words = ["launch", str(lab.folder / "recipe.yaml"), "--strategy", "ddp", "--processes", "2", "--dry-run"]
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_machine_that_no_name_server_knows_ends_the_launch(lab: Lab, tmp_path: Path, capsys):
    more = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "no-such-host.invalid", "main_process_port": 29511}
    path = yaml_of_accelerate(tmp_path, "ddp", **more)
    assert main(["launch", str(lab.folder / "recipe.yaml"), "--strategy", str(path), "--dry-run"]) == 2
    assert "machine 0 at no-such-host.invalid: " in capsys.readouterr().err


def test_a_refused_second_run_is_no_stopped_one(tmp_path: Path):
    """Another run of the folder marks itself as stopped while this launch refuses to start in it."""
    status_file = tmp_path / "status.json"
    status_file.write_text(json.dumps({"state": "running", "step": 3}))
    code = f"""import json, os, sys
open(os.environ["{status.EXIT_FILE}"], "w").write("2")
open({str(status_file)!r}, "w").write(json.dumps({{"state": "stopped", "step": 3}}))
sys.exit(2)"""
    assert run_child([sys.executable, "-c", code], dict(os.environ), tmp_path) == 2


def test_auto_sizes_are_forecast_and_explained_as_accelerate_fills_them_in(tmp_path: Path, capsys):
    source = inspect.getsource(Accelerator._prepare_deepspeed)
    for filled in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        (expression,) = re.findall(rf'"zero_optimization\.{filled}": (.+),', source)
        (size,) = re.findall(r"[\d.]+", expression) or [1]
        hidden = 192
        expected = int(float(size) * hidden ** expression.count("hidden_size"))
        strategy = load_strategy(with_json(tmp_path, PAGES["zero3"])).of_width(hidden)
        assert strategy.zero[filled] == expected
    recipe, machines = load_recipe(ROOT / "recipes/quickstart.yaml"), parse_machines("2x24GB")
    sizes = {"reduce_bucket_size": 36864, "stage3_prefetch_bucket_size": 33177}
    sizes |= {"stage3_param_persistence_threshold": 1920}  # of the quickstart's 192
    page = ["explain", str(ROOT / "recipes/quickstart.yaml"), "--strategy", str(with_json(tmp_path, PAGES["zero3"]))]
    assert main(page) == 0
    text = capsys.readouterr().out
    assert re.search('reduce_bucket_size +"auto" -> 36864', text) and "prefetch_bucket_size" in text
    memory = []
    for more in ({}, sizes, dict.fromkeys(sizes, 10**9)):
        block = {"zero_optimization": PAGES["zero3"]["zero_optimization"] | more}
        strategy = load_strategy(with_json(tmp_path, PAGES["zero3"] | block))
        peak = forecast_all(recipe, [strategy], machines, "recipe", limits=False).forecasts[0].memory
        assert peak is not None
        memory.append(peak.allocated)
    assert memory[0] == memory[1] != memory[2]


SECTIONS = {
    "FSDP Arguments": "fsdp_config",
    "DeepSpeed Arguments": "deepspeed_config",
    "ParallelismConfig Arguments": "parallelism_config",
}
"""Where a file has the flags of a group of accelerate's launcher."""
OF_LAUNCHER = [
    (SECTIONS.get(group.title or "", "dynamo_config"), flag)
    for group in launch_command_parser()._action_groups
    for flag in group._group_actions
    if group.title in SECTIONS or flag.dest.startswith("dynamo_")
]
OWN_KEYS = {
    *(f"{section}.{flag.dest}" for section, flag in OF_LAUNCHER),
    *(item.name for item in dataclasses.fields(ClusterConfig) if not item.name.endswith("_config")),
}
ANOTHER = {
    **{
        f"{section}.{flag.dest}": next(iter(set(flag.choices or ()) - {flag.default}), None)
        for section, flag in OF_LAUNCHER
    },
    "mixed_precision": "bf16",
    "distributed_type": "MULTI_XPU",
    "compute_environment": "AMAZON_SAGEMAKER",
}
"""Values that an owner has beside its default, where neither a number nor a text is one."""


def fields_of_file() -> set[str]:
    blocks = {"fsdp_config": FsdpBlock, "deepspeed_config": DeepspeedBlock, "parallelism_config": ParallelismBlock}
    return {
        *AccelerateFile.model_fields,
        *(f"{name}.{key}" for name, block in blocks.items() for key in block.model_fields),
    }


def outcome_of(file: Path, path: str) -> str:
    """Fate of a key in a file: "refused", "passed over", "compared", "read", or "silent"."""
    section, _, key = path.rpartition(".")
    strategy, mistakes = None, []
    try:
        strategy = load_strategy(file)
    except RecipeError as error:
        mistakes = error.mistakes
    if strategy is None:
        names = (key.removeprefix(f"{section}_"), f"the mesh of {section} is")
        named = [mistake for mistake in mistakes if any(name in mistake for name in names)]
        return "refused" if named else "silent"
    if any(key in text for text in strategy.passed):
        return "passed over"
    if any(key in claim.place for claim in strategy.claims):
        return "compared"
    return "read" if path in fields_of_file() else "silent"


def test_each_key_of_accelerate_is_read_passed_over_compared_or_refused_by_its_name(tmp_path: Path):
    """By its own classes and flags: a key that a new version adds is refused as unknown, or fails here."""
    outcomes = {}
    for path in sorted(OWN_KEYS):
        section, _, key = path.rpartition(".")
        family = {"fsdp_config": "fsdp2", "deepspeed_config": "zero3"}.get(section, "ddp")
        written = yaml_of_accelerate(tmp_path, family).read_text()
        for value in (ANOTHER.get(path) or "text", 7, True):
            values = yaml.safe_load(written)
            (values.setdefault(section, {}) if section else values)[key] = value
            (tmp_path / "edited.yaml").write_text(yaml.dump(values))
            outcomes[path, value] = outcome_of(tmp_path / "edited.yaml", path)
    assert [case for case, outcome in outcomes.items() if outcome == "silent"] == []
    assert {*outcomes.values()} == {"refused", "passed over", "compared", "read"}
    assert len(OWN_KEYS) > 60


def test_each_key_of_accelerate_with_its_own_default_is_taken(tmp_path: Path):
    """Whatever the recipe has: false and 1 are what a file has that asks for nothing."""
    refused: dict[str, list[Any]] = {}
    for path, own in tables().projects["accelerate"].fields.items():
        section, _, key = path.rpartition(".")
        if not own.default or own.default[0] in (None, -1) or section in ("fp8_config", "megatron_lm_config"):
            continue
        values = yaml.safe_load(yaml_of_accelerate(tmp_path, "fsdp1" if "fsdp" in section else "ddp").read_text())
        (values.setdefault(section, {}) if section else values).setdefault(key, own.default[0])
        (tmp_path / "edited.yaml").write_text(yaml.dump(values))
        try:
            claims = load_strategy(tmp_path / "edited.yaml").claims
            refused[path] = [claim for claim in claims if key in claim.place and claim.key != "~layer"]
        except RecipeError as error:
            refused[path] = [mistake for mistake in error.mistakes if key in mistake]
    assert len(refused) > 30 and {path: reasons for path, reasons in refused.items() if reasons} == {}


def cases_of_owners() -> Iterator[tuple[str, str, Any]]:
    """Owner, dotted key, value: each key of accelerate and DeepSpeed, with values of three types and its default."""
    for path in sorted(OWN_KEYS):
        yield from (("accelerate", path, value) for value in (ANOTHER.get(path) or "text", 7, True))
    facts = json.loads(deepspeed_facts.FACTS.read_text())
    for block, keys in facts["blocks"].items():
        for key, fact in keys.items():
            yield from (("deepspeed", f"{block}.{key}", value) for value in ("text", 7, True, fact.get("default")))


def test_convert_has_each_key_of_accelerate_and_deepspeed_in_exactly_one_list():
    lists = {}
    for owner, path, value in cases_of_owners():
        if value is None:
            continue
        values: Any = value
        for name in reversed(path.split(".")):
            values = {name: values}
        conversion = Conversion(None)
        conversion.read(Document("file.json", values), tables().projects[owner])
        lists[owner, path, str(value)] = lists_of(conversion, path)
    assert {case: names for case, names in lists.items() if len(names) != 1} == {}
    assert {name for names in lists.values() for name in names} >= {"recipe", "idle", "notes", "changes", "sizes"}


def test_an_empty_section_asks_for_nothing():
    conversion = Conversion(None)
    values = {"zero_optimization": {"stage": 3, "offload_param": {"nvme_path": None}, "offload_optimizer": {}}}
    conversion.read(Document("file.json", values), tables().projects["deepspeed"])
    assert conversion.changes == [] and "zero_optimization.offload_optimizer" in conversion.idle
    conversion.read(Document("file.json", {"zero_optimisation": {}}), tables().projects["deepspeed"])
    assert any("no key of DeepSpeed" in line for line in conversion.changes)


def advice_of(lines: list[str], path: str) -> str:
    """Words on a key, behind its place and value."""
    named = [line for line in lines if re.match(rf"file\.json: {re.escape(path)}( is |: )", line)]
    return named[0].partition(f"file.json: {path}")[2].partition(": ")[2] if named else ""


@pytest.mark.core
def test_convert_check_and_a_recipe_say_the_same_of_each_key_of_accelerate_and_deepspeed():
    """By what they print: the key that convert carries one to is the one that check compares and that a recipe names;
    advice of convert on another is that of check, where it refuses it, and of a recipe."""
    different, counts = [], {"carried": 0, "compared": 0, "refused": 0, "advised": 0}
    models, hints = {"accelerate": AccelerateFile, "deepspeed": DeepspeedFile}, {}
    for owner, path, value in cases_of_owners():
        if value is None or path in leaves(Recipe):
            continue
        values: Any = value
        for name in reversed(path.split(".")):
            values = {name: values}
        document = Document("file.json", values)
        conversion, sorting = Conversion(None), Sorting(document, owner)
        conversion.read(document, tables().projects[owner])
        sorting.strip(models[owner])
        if path not in hints:
            hints[path] = advice_of(validate(document, Recipe, answer_to)[1], path)
        hint = hints[path]
        said = advice_of([*conversion.changes, *conversion.notes, *conversion.others], path)
        refusal = advice_of(sorting.mistakes, path)
        ours, compared = conversion.carried.get(path), {claim.key for claim in sorting.claims}
        is_of_recipe = ours is not None and ours[0] != "~" and not ours.startswith("strategy.")
        entry = tables().projects[owner].entry(path)
        is_on_key = said and entry is not None and entry.ours is None  # and not on its value
        wrong = [
            is_of_recipe and ours not in hint,
            is_of_recipe and compared and not compared <= {ours, f"~{path.rpartition('.')[2]}"},
            said and refusal and said not in refusal and "strategy." not in str(entry),
            is_on_key and said not in hint,
        ]
        if any(wrong):
            different.append((owner, path, value, ours, compared, said, refusal, hint))
        counts["carried"] += is_of_recipe
        counts["compared"] += bool(is_of_recipe and compared)
        counts["refused"] += bool(said and refusal)
        counts["advised"] += bool(is_on_key)
    assert different == []
    assert min(counts.values()) >= 10, counts
