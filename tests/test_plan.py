"""Protects the plan: batch arithmetic, process counts, and every clash of recipe, strategy and machine.

python -m pytest -q tests/test_plan.py
"""

from pathlib import Path

import pytest
from conftest import RECIPE

from cookbook.config.strategy import load_strategy
from cookbook.start import run_plan as plan_module
from cookbook.start.run_plan import (
    Pair,
    default_num_processes,
    launch_command,
    load_pair,
    make_plan,
    show_command,
    try_plan,
)
from cookbook.system.files import RecipeError


def plan(*, strategy="ddp", processes=1, gpus=0, global_batch=16, micro_batch=8, precision="'no'"):
    recipe, loaded = load_pair(
        Path(RECIPE),
        [
            f"strategy=accelerate_configs/{strategy}.yaml",
            f"batch.global_batch_size={global_batch}",
            f"batch.micro_batch_size={micro_batch}",
            f"mixed_precision={precision}",
        ],
    )
    return make_plan(recipe, loaded, num_processes=processes, num_gpus=gpus, recipe_name=RECIPE)


def clash(**arguments):
    with pytest.raises(RecipeError) as caught:
        plan(**arguments)
    return caught.value.mistakes


# strategy, processes, global batch, micro batch -> data-parallel size, accumulation; worked out by hand
@pytest.mark.parametrize(
    ("strategy", "processes", "global_batch", "micro_batch", "data_parallel_size", "accumulation"),
    [
        ("single", 1, 16, 8, 1, 2),
        ("single", 1, 1, 1, 1, 1),
        ("ddp", 2, 16, 8, 2, 1),
        ("ddp", 8, 256, 4, 8, 8),
        ("fsdp2", 3, 30, 5, 3, 2),
        ("hsdp", 4, 64, 4, 4, 4),
        ("zero3", 6, 96, 8, 6, 2),
        ("tp", 2, 16, 8, 1, 2),
        ("tp", 8, 32, 4, 4, 2),
        ("fsdp2_tp", 8, 32, 4, 4, 2),
        ("pp_tp", 8, 32, 4, 2, 4),
        ("hsdp_tp", 8, 32, 4, 4, 2),
        ("pp_tp_fsdp2", 8, 32, 4, 2, 4),
    ],
)
def test_accumulation_is_global_over_micro_times_data_parallel(
    book, strategy, processes, global_batch, micro_batch, data_parallel_size, accumulation
):
    result = plan(strategy=strategy, processes=processes, global_batch=global_batch, micro_batch=micro_batch)
    assert (result.num_processes, result.data_parallel_size) == (processes, data_parallel_size)
    assert result.gradient_accumulation_steps == accumulation


# processes, global batch, micro batch -> what to use instead
@pytest.mark.parametrize(
    ("processes", "global_batch", "micro_batch", "advice"),
    [
        (8, 100, 4, "Use global_batch_size 96 or 128, or 5 processes."),
        (2, 50, 8, "Use global_batch_size 48 or 64, or micro_batch_size 5."),
        (2, 4, 8, "Use global_batch_size 16, or micro_batch_size 2."),
        (2, 4, 10**14, f"Use global_batch_size {2 * 10**14}, or micro_batch_size 2."),
        (10**11, 16, 2, f"Use global_batch_size {2 * 10**11}, or 8 processes."),
        (3, 16, 8, "Use global_batch_size 24, or 2 processes."),
        (2, 17, 8, "Use global_batch_size 16 or 32."),
        (4, 12, 2, "Use global_batch_size 8 or 16, or micro_batch_size 1, or 3 processes."),
        (3, 16, 2, "Use global_batch_size 12 or 18, or 2 processes."),
    ],
)
def test_an_impossible_split_names_the_nearest_ones(book, processes, global_batch, micro_batch, advice):
    (mistake,) = clash(processes=processes, global_batch=global_batch, micro_batch=micro_batch)
    product = processes * micro_batch
    assert (
        f"batch.global_batch_size is {global_batch}, but {processes} processes x micro_batch_size {micro_batch}"
        in mistake
    )
    assert mistake.endswith(f"= {product} sequences per forward. {advice}")


def test_the_advice_of_an_impossible_split_is_possible(book):
    for processes in (1, 2, 3, 8):
        for global_batch in (1, 5, 7, 12, 33, 100):
            for micro_batch in (1, 3, 4, 16):
                if global_batch % (processes * micro_batch) == 0:
                    continue
                (mistake,) = clash(processes=processes, global_batch=global_batch, micro_batch=micro_batch)
                batches, *others = mistake.split("Use global_batch_size ")[1].rstrip(".").split(", or ")
                for size in batches.split(" or "):
                    plan(processes=processes, global_batch=int(size), micro_batch=micro_batch)
                for other in others:
                    first, second = other.split()
                    if first == "micro_batch_size":
                        plan(processes=processes, global_batch=global_batch, micro_batch=int(second))
                    else:
                        plan(processes=int(first), global_batch=global_batch, micro_batch=micro_batch)


def test_data_parallel_processes_are_counted_apart_from_tensor_parallel_ones(book):
    (mistake,) = clash(strategy="tp", processes=2, global_batch=20)
    assert "1 data-parallel process x micro_batch_size 8 = 8" in mistake


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"strategy": "hsdp", "processes": 2},
            ["mesh of 4 processes, but 2 were requested; change its sizes, or run 4 or a multiple"],
        ),
        (
            {"strategy": "tp", "processes": 3},
            ["mesh of 2 processes, but 3 were requested; change its sizes, or run 2 or a multiple"],
        ),
        ({"strategy": "single", "processes": 2}, ["runs one process, but 2 were requested; use ddp"]),
        ({"processes": 2, "gpus": 1}, ["2 processes on this machine, which has 1 GPU; ask for at most 1"]),
        ({"processes": 4, "gpus": 2, "global_batch": 32}, ["4 processes on this machine, which has 2 GPUs"]),
        ({"precision": "fp16"}, ["mixed_precision: fp16 without a GPU: the loss scaling"]),
        (
            {"processes": 3, "gpus": 2, "precision": "fp16"},
            ["3 processes on this machine, which has 2 GPUs", "= 24 sequences per forward"],
        ),
    ],
    ids=["hsdp on 2", "tp on 3", "single on 2", "2 on 1 GPU", "4 on 2 GPUs", "fp16 on CPU", "two clashes at once"],
)
def test_a_clash_is_named(book, arguments, expected):
    mistakes = clash(**arguments)
    assert len(mistakes) == len(expected)
    for mistake, words in zip(mistakes, expected, strict=True):
        assert words in mistake


def test_each_machine_needs_gpus_for_its_own_processes(book):
    recipe, ddp = load_pair(Path(RECIPE), ["batch.global_batch_size=16", "batch.micro_batch_size=1"])
    of_two = {"num_processes": 16, "num_local": 8, "recipe_name": RECIPE}
    assert make_plan(recipe, ddp, num_gpus=8, **of_two).num_processes == 16
    with pytest.raises(RecipeError, match=r"8 processes on this machine, which has 4 GPUs; ask for at most 4"):
        make_plan(recipe, ddp, num_gpus=4, **of_two)


def test_only_a_process_that_there_is_can_be_profiled(book):
    for rank, problem in ((1, None), (2, "but there are 2 processes; the last is 1")):
        recipe, ddp = load_pair(Path(RECIPE), [f"run.profile={{steps: [2, 3], ranks: [{rank}]}}"])
        pair = Pair(RECIPE, recipe=recipe, strategy=ddp)
        _, mistakes = try_plan(pair, num_processes=2, num_local=2, num_gpus=0)
        assert mistakes == [] if problem is None else problem in mistakes[0]


def test_fp16_with_a_gpu_and_fewer_processes_than_gpus_are_fine(book):
    assert plan(processes=2, gpus=8, precision="fp16").gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    ("strategy", "gpus", "cores", "expected"),
    [
        ("ddp", 8, 64, 8),
        ("ddp", 1, 64, 1),
        ("ddp", 0, 64, 2),
        ("ddp", 0, 1, 1),
        ("hsdp", 8, 64, 8),
        ("hsdp", 0, 64, 4),
        ("single", 8, 64, 1),
    ],
    ids=["all GPUs", "one GPU", "CPU", "one core", "mesh on GPUs", "mesh on CPU", "single"],
)
def test_auto_is_one_process_per_gpu_and_two_on_cpu(book, monkeypatch, strategy, gpus, cores, expected):
    monkeypatch.setattr(plan_module, "num_cores", lambda: cores)
    assert default_num_processes(load_strategy(Path(f"accelerate_configs/{strategy}.yaml")), gpus) == expected


def test_the_launch_line_is_exactly_this(book):
    strategy = load_strategy(Path("accelerate_configs/zero3.yaml"))
    command = launch_command(RECIPE, strategy, num_processes=2, assignments=["seed=7", "data.train={path: a b.jsonl}"])
    assert command == [
        "accelerate", "launch", "--config_file", "accelerate_configs/zero3.yaml", "--num_processes", "2",
        "--main_process_port", "0", "train.py", RECIPE, "--set", "seed=7", "--set", "data.train={path: a b.jsonl}",
    ]  # fmt: skip
    assert show_command(command).endswith("--set seed=7 --set 'data.train={path: a b.jsonl}'")


def test_one_process_needs_no_port(book):
    strategy = load_strategy(Path("accelerate_configs/single.yaml"))
    command = launch_command(RECIPE, strategy, num_processes=1, assignments=[])
    expected = "accelerate launch --config_file accelerate_configs/single.yaml --num_processes 1 train.py"
    assert show_command(command) == f"{expected} {RECIPE}"


def test_a_strategy_of_the_command_line_wins_over_the_recipes(book):
    recipe, strategy = load_pair(Path(RECIPE), [], Path("accelerate_configs/zero2.yaml"))
    assert (recipe.strategy, strategy.name) == ("accelerate_configs/ddp.yaml", "zero2")
