"""Protects the shipped strategies: each is what its name says, and they differ from one another in nothing else.

python -m pytest -q tests/test_strategy.py
"""

import itertools
import json
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from cookbook.config.accelerate_yaml import AccelerateFile, ParallelismBlock, _mesh_problem
from cookbook.config.mesh import Mesh
from cookbook.config.strategy import find_strategy, known_strategies, load_strategy
from cookbook.system.files import RecipeError

# kind, ZeRO stage, offload of optimizer and of parameters, (replicate, shard, sequence, tensor, pipeline) mesh
STRATEGIES = {
    "single": ("single", 0, None, None, (1, 1, 1, 1, 1)),
    "ddp": ("ddp", 0, None, None, (1, 1, 1, 1, 1)),
    "ddp_sp": ("ddp", 0, None, None, (1, 1, 2, 1, 1)),
    "fsdp1": ("fsdp1", 0, None, None, (1, 1, 1, 1, 1)),
    "fsdp2": ("fsdp2", 0, None, None, (1, 1, 1, 1, 1)),
    "fsdp2_grad_op": ("fsdp2", 0, None, None, (1, 1, 1, 1, 1)),
    "fsdp2_ep": ("fsdp2", 0, None, None, (1, 2, 1, 1, 1)),
    "fsdp2_offload": ("fsdp2", 0, None, None, (1, 1, 1, 1, 1)),
    "fsdp2_sp": ("fsdp2", 0, None, None, (1, 1, 2, 1, 1)),
    "hsdp": ("fsdp2", 0, None, None, (2, 2, 1, 1, 1)),
    "tp": ("tp", 0, None, None, (1, 1, 1, 2, 1)),
    "ddp_tp": ("tp", 0, None, None, (2, 1, 1, 2, 1)),
    "fsdp2_tp": ("fsdp2", 0, None, None, (1, 2, 1, 2, 1)),
    "hsdp_tp": ("fsdp2", 0, None, None, (2, 2, 1, 2, 1)),
    "pp": ("pp", 0, None, None, (1, 1, 1, 1, 2)),
    "pp_fsdp2": ("pp", 0, None, None, (1, 2, 1, 1, 2)),
    "pp_tp": ("pp", 0, None, None, (1, 1, 1, 2, 2)),
    "pp_tp_fsdp2": ("pp", 0, None, None, (1, 2, 1, 2, 2)),
    "zero1": ("zero", 1, None, None, (1, 1, 1, 1, 1)),
    "zero2": ("zero", 2, None, None, (1, 1, 1, 1, 1)),
    "zero2_offload": ("zero", 2, "cpu", None, (1, 1, 1, 1, 1)),
    "zero3": ("zero", 3, None, None, (1, 1, 1, 1, 1)),
    "zero3_hpz": ("zero", 3, None, None, (1, 1, 1, 1, 1)),
    "zero3_offload": ("zero", 3, "cpu", "cpu", (1, 1, 1, 1, 1)),
    "zero3_nvme": ("zero", 3, "nvme", "nvme", (1, 1, 1, 1, 1)),
    "zero3_sp": ("zero", 3, None, None, (1, 1, 2, 1, 1)),
}


def accelerate_yaml(name):
    return yaml.safe_load((ROOT / f"accelerate_configs/{name}.yaml").read_text())


def deepspeed_json(name, *, without=()):
    """A DeepSpeed JSON without some keys, whatever their depth."""

    def less(values):
        if not isinstance(values, dict):
            return values
        return {key: less(value) for key, value in values.items() if key not in without}

    return less(json.loads((ROOT / f"ds_configs/{name}.json").read_text()))


def test_the_table_above_has_every_shipped_strategy():
    shipped = sorted(path.stem for path in (ROOT / "accelerate_configs").iterdir())
    assert shipped == sorted(STRATEGIES)
    assert sorted(path.stem for path in (ROOT / "ds_configs").iterdir()) == [name for name in shipped if "zero" in name]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_what_its_name_says(book, name):
    strategy = load_strategy(Path(f"accelerate_configs/{name}.yaml"))
    mesh = (strategy.dp_replicate_size, strategy.dp_shard_size, strategy.sp_size, strategy.tp_size, strategy.pp_size)
    values = (strategy.kind, strategy.zero_stage, strategy.offload_optimizer, strategy.offload_param, mesh)
    assert values == STRATEGIES[name]
    assert strategy.name == name


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name.startswith("zero")])
def test_a_zero_yaml_names_the_json_of_its_own_name(name):
    values = accelerate_yaml(name)
    assert values["deepspeed_config"]["deepspeed_config_file"] == f"ds_configs/{name}.json"
    assert (ROOT / f"ds_configs/{name}.json").is_file()


# Prefetching is off with parameters on NVMe: see strategy.py.
NVME_KEYS = {"offload_optimizer", "offload_param", "zero_force_ds_cpu_optimizer", "aio", "stage3_prefetch_bucket_size"}


@pytest.mark.parametrize(
    ("name", "base", "without"),
    [
        ("zero3_offload", "zero3", {"offload_optimizer", "offload_param", "zero_force_ds_cpu_optimizer"}),
        ("zero3_nvme", "zero3", NVME_KEYS),
        ("zero2_offload", "zero2", {"offload_optimizer", "zero_force_ds_cpu_optimizer"}),
        ("zero1", "zero2", {"stage"}),
        ("zero3_sp", "zero3", set()),
        ("zero3_hpz", "zero3", {"zero_hpz_partition_size"}),
    ],
)
def test_deepspeed_files_differ_only_in_what_their_names_say(name, base, without):
    assert (deepspeed_json(name) != deepspeed_json(base)) == bool(without)
    shared = {"stage", "stage3_prefetch_bucket_size"} & without
    assert deepspeed_json(name, without=without) == deepspeed_json(base, without=shared)


def test_every_deepspeed_file_leaves_the_recipes_values_to_the_recipe():
    for name in (name for name in STRATEGIES if name.startswith("zero")):
        values = deepspeed_json(name)
        owned = (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
        )
        assert [values[key] for key in owned] == ["auto"] * 4
        assert values["bf16"] == values["fp16"] == {"enabled": "auto"}
        assert not {"optimizer", "scheduler"} & set(values)


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        ("fsdp2_grad_op", {"fsdp_reshard_after_forward": False}),
        ("fsdp2_offload", {"fsdp_offload_params": True}),
        ("hsdp", {}),
        ("fsdp2_sp", {}),
        ("fsdp2_tp", {}),
        ("hsdp_tp", {}),
        ("fsdp2_ep", {}),
        ("pp_fsdp2", {}),
        ("pp_tp_fsdp2", {}),
    ],
)
def test_fsdp2_files_differ_only_in_what_their_names_say(name, difference):
    base, values = accelerate_yaml("fsdp2"), accelerate_yaml(name)
    assert values["fsdp_config"] == base["fsdp_config"] | difference
    mesh_keys = values.keys() - base.keys()
    assert mesh_keys == ({"parallelism_config"} if difference == {} else set())
    rest = {key: value for key, value in values.items() if key not in mesh_keys | {"fsdp_config"}}
    assert rest == {key: base[key] for key in base if key not in mesh_keys | {"fsdp_config"}}


@pytest.mark.parametrize(("tp_size", "num_processes", "expected"), [(1, 4, 4), (2, 4, 2), (2, 2, 1)])
def test_a_tensor_parallel_group_shares_its_samples(book, tp_size, num_processes, expected):
    name = "tp" if tp_size == 2 else "ddp"
    assert load_strategy(find_strategy(name)).data_parallel_size(num_processes) == expected


MESHES = {
    ("single", 1): (Mesh(), [0]),
    ("ddp", 4): (Mesh(replicate=4), [0, 1, 2, 3]),
    ("fsdp1", 4): (Mesh(shard=4), [0, 1, 2, 3]),
    ("fsdp2", 4): (Mesh(shard=4), [0, 1, 2, 3]),
    ("hsdp", 4): (Mesh(replicate=2, shard=2), [0, 1, 2, 3]),
    ("zero1", 2): (Mesh(shard=2), [0, 1]),
    ("tp", 2): (Mesh(tensor=2), [0, 0]),
    ("tp", 4): (Mesh(replicate=2, tensor=2), [0, 0, 1, 1]),
    ("hsdp", 8): (Mesh(replicate=2, shard=4), list(range(8))),
    ("fsdp2_ep", 4): (Mesh(shard=2, expert=2), [0, 1, 2, 3]),
    ("fsdp2_ep", 8): (Mesh(shard=4, expert=2), list(range(8))),
    ("fsdp2_tp", 8): (Mesh(shard=4, tensor=2), [0, 0, 1, 1, 2, 2, 3, 3]),
    ("ddp_tp", 8): (Mesh(replicate=4, tensor=2), [0, 0, 1, 1, 2, 2, 3, 3]),
    ("pp", 8): (Mesh(replicate=4, pipeline=2), [0, 1, 2, 3, 0, 1, 2, 3]),
    ("pp_fsdp2", 8): (Mesh(shard=4, pipeline=2), [0, 1, 2, 3, 0, 1, 2, 3]),
    ("pp_tp", 8): (Mesh(replicate=2, tensor=2, pipeline=2), [0, 0, 1, 1, 0, 0, 1, 1]),
    ("hsdp_tp", 16): (Mesh(replicate=2, shard=4, tensor=2), [rank // 2 for rank in range(16)]),
    ("pp_tp_fsdp2", 16): (Mesh(shard=4, tensor=2, pipeline=2), [rank % 8 // 2 for rank in range(16)]),
}


@pytest.mark.parametrize(("name", "num_processes"), MESHES)
def test_from_a_mesh_follows_who_sees_which_samples(name, num_processes):
    mesh = load_strategy(find_strategy(name)).mesh(num_processes)
    expected, samples = MESHES[name, num_processes]
    assert mesh == expected and mesh.num_processes == num_processes
    assert [mesh.data_parallel_rank(rank) for rank in range(num_processes)] == samples
    assert mesh.data_parallel_size == mesh.token_parallel_size == len(set(samples))


# file, its open size, (processes, of a machine) -> replicate, shard, tensor, pipeline; worked out by hand
OPEN = [
    ("hsdp", None, (4, 4), (2, 2, 1, 1)),
    ("hsdp", None, (8, 8), (2, 4, 1, 1)),
    ("hsdp", None, (16, 8), (2, 8, 1, 1)),
    ("hsdp", None, (32, 8), (4, 8, 1, 1)),
    ("hsdp_tp", None, (8, 8), (2, 2, 2, 1)),
    ("hsdp_tp", None, (16, 8), (2, 4, 2, 1)),
    ("hsdp_tp", None, (32, 8), (4, 4, 2, 1)),
    ("tp", "tp_size", (8, 8), (1, 1, 8, 1)),
    ("tp", "tp_size", (16, 8), (2, 1, 8, 1)),
    ("ddp_tp", "tp_size", (16, 8), (2, 1, 8, 1)),
    ("ddp_tp", "tp_size", (8, 8), (2, 1, 4, 1)),
    ("fsdp2_tp", "tp_size", (16, 8), (1, 2, 8, 1)),
    ("fsdp2_ep", "ep_size", (16, 8), (1, 2, 1, 1)),  # groups of 8
    ("pp_fsdp2", "pp_size", (16, 8), (1, 2, 1, 8)),
    ("pp", "pp_size", (4, 4), (1, 1, 1, 4)),
    ("ddp_tp", "dp_replicate_size", (8, 8), (4, 1, 2, 1)),
]


@pytest.mark.parametrize(("name", "size", "machines", "expected"), OPEN)
def test_an_open_size_takes_the_processes_that_there_are(book, name, size, machines, expected):
    key = f"parallelism_config_{size}: "
    if size is not None:
        book.edit(f"accelerate_configs/{name}.yaml", (f"{key}2", f"{key}auto"))
    loaded = load_strategy(find_strategy(name))
    fitted = loaded.for_processes(*machines)
    mesh = fitted.mesh(machines[0])
    assert (mesh.replicate, mesh.shard, mesh.tensor, mesh.pipeline) == expected
    assert mesh.num_processes == machines[0] and fitted.for_processes(2) == fitted
    assert loaded.open_sizes and not fitted.open_sizes


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp1", "fsdp2", "zero3"])
def test_whether_a_mesh_is_refused_does_not_depend_on_how_large_a_size_is(name: str):
    """A size of 2 is refused as one of 3 is, in whatever company."""
    parsed = AccelerateFile.model_validate(yaml.safe_load((ROOT / f"accelerate_configs/{name}.yaml").read_text()))
    answers = {}
    for sizes in itertools.product((1, 2, 3), repeat=len(ParallelismBlock().sizes)):
        written = {f"parallelism_config_{key}": size for key, size in zip(ParallelismBlock().sizes, sizes, strict=True)}
        answers[sizes] = _mesh_problem(parsed, ParallelismBlock(**written))
    assert all(answer == answers[tuple(min(size, 2) for size in sizes)] for sizes, answer in answers.items())
    assert len({*answers.values()}) > 3 or name == "single"


def test_a_strategy_is_found_by_name_or_path(book):
    assert (
        find_strategy("zero3")
        == find_strategy("accelerate_configs/zero3.yaml")
        == Path("accelerate_configs/zero3.yaml")
    )
    assert known_strategies() == sorted(STRATEGIES)


def test_an_unknown_strategy_is_answered_with_the_nearest_name(book):
    with pytest.raises(RecipeError) as caught:
        find_strategy("zerro3")
    assert "did you mean zero3?" in str(caught.value)


def test_what_a_backward_gathers_again_is_known_of_each_file():
    """fsdp1's FULL_SHARD is fsdp2's resharding after the forward by another name."""
    files = {path.stem: load_strategy(path) for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    sharded = {
        name for name, file in files.items() if file.kind in ("fsdp1", "fsdp2") or file.zero_stage == 3 or file.fsdp
    }
    assert {name for name, file in files.items() if file.gathers_weights} == sharded - {"fsdp2_grad_op"}
