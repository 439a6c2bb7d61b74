"""Protects what recipes add to a strategy, and state that crosses devices and strategies, on simulated GPUs.

python -m pytest -q -m "slow or not slow" tests/test_gpu_features.py
"""

import json

import pytest

from tests.gpu_runs import GpuLab
from tests.needs import need_torchao
from tests.test_equivalence import DISTRIBUTED, NVME_MODEL
from tests.test_gpu_matrix import BANDS, PACKED, assert_same_curve

LORA = {"adapter.name": "lora", "adapter.rank": "4"}
DROPOUT = {"adapter.dropout": "0.3"}

# By name: recipe, settings, the strategies of make test-long, and those that only make test-all adds.
FEATURES = {
    "lora": (
        "sft",
        LORA | PACKED,
        ["fsdp2", "zero3", "tp"],
        ["ddp", "fsdp1", "fsdp2_offload", "fsdp2_tp", "hsdp", "zero2"],
    ),
    "dora": ("sft", LORA | {"adapter.name": "dora"}, ["fsdp2"], ["zero3"]),
    "qlora": ("sft", LORA | {"adapter.name": "qlora"}, ["zero3"], ["ddp", "fsdp2", "zero2"]),
    "adamw_8bit": ("sft", {"optim.name": "adamw_8bit"}, ["fsdp2"], ["ddp", "fsdp2_offload"]),
    "dropout": ("sft", LORA | PACKED | DROPOUT, ["zero3"], ["ddp", "fsdp2", "tp", "pp"]),
    "dropout-fp16": ("sft", LORA | DROPOUT | {"mixed_precision": "fp16"}, ["fsdp2"], ["ddp", "zero2"]),
    "dropout-float32": ("sft", LORA | DROPOUT | {"mixed_precision": "'no'"}, ["ddp"], ["fsdp2", "zero3", "tp", "pp"]),
    "noise": ("sft", PACKED | {"model.neftune_alpha": "10"}, ["zero2"], ["fsdp2", "tp", "pp"]),
    "muon": (
        "sft",
        {"optim.name": "muon"},
        ["fsdp2_offload"],
        ["ddp", "fsdp2", "hsdp", "tp", "zero2_offload", "zero3"],
    ),
    "checkpointing": ("sft", PACKED | {"model.gradient_checkpointing": "true"}, ["zero3"], ["ddp", "fsdp2"]),
    "selective": ("sft", PACKED | {"model.gradient_checkpointing": "selective"}, ["ddp"], ["fsdp2"]),
    "offload": (
        "sft",
        PACKED | {"model.gradient_checkpointing": "offload"},
        ["pp", "zero3"],
        [name for name in DISTRIBUTED if name not in ("pp", "zero3")],
    ),
    "fp8": (
        "sft",
        PACKED | {"mixed_precision": "fp8"},
        ["ddp"],
        ["fsdp2", "ddp_sp", "fsdp1", "fsdp2_offload", "hsdp", "pp", "zero2"],
    ),
    "micro_batch_tokens": (
        "sft",
        PACKED | {"batch.micro_batch_tokens": "128", "batch.micro_batch_size": "null"},
        ["ddp"],
        ["zero3"],
    ),
    "background": (
        "sft",
        PACKED | {"run.save_in_background": "true", "run.save_every_steps": "1"},
        ["fsdp2"],
        ["zero3"],
    ),
    "dpo": ("dpo", PACKED, ["zero3"], ["ddp", "tp"]),
    "dpo-padded": ("dpo", {}, ["fsdp2"], []),
    "grpo": ("grpo", PACKED, ["zero2"], ["fsdp2", "tp", "zero3"]),
    "kto": ("kto", PACKED, [], ["zero3"]),
    "orpo": ("dpo", PACKED | {"objective.name": "orpo"}, ["zero2"], ["fsdp2_tp"]),
    "reward": ("dpo", PACKED | {"objective.name": "reward", "mixed_precision": "'no'"}, ["fsdp2"], ["ddp"]),
}


def feature_cases() -> list:
    cases = []
    for name, (recipe, settings, long, thorough) in FEATURES.items():
        for strategy in (*long, *thorough):
            marks = [pytest.mark.slow] + ([pytest.mark.thorough] if strategy in thorough else [])
            cases.append(pytest.param(recipe, settings, strategy, marks=marks, id=f"{name}-{strategy}"))
    return cases


@pytest.mark.parametrize(("recipe", "settings", "strategy"), feature_cases())
def test_what_a_recipe_adds_has_the_curve_of_one_gpu(gpu_lab: GpuLab, recipe: str, settings: dict, strategy: str):
    if settings.get("mixed_precision") == "fp8":
        need_torchao()
    settings = settings | (NVME_MODEL if strategy == "zero3_nvme" else {})
    run = gpu_lab.run(strategy, settings, recipe=recipe)
    band = BANDS.get(settings.get("mixed_precision", ""), BANDS["bf16"])
    assert_same_curve(run, gpu_lab.run("single", settings, recipe=recipe), band)


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["dropout", "dropout-fp16", "dropout-float32", "noise"])
def test_draws_of_another_sample_leave_the_bands(gpu_lab: GpuLab, feature: str):
    """The negative control: each process draws for the places in its micro-batch."""
    settings = FEATURES[feature][1]
    wrong = gpu_lab.run("ddp", settings, sabotage="draws_of_the_micro_batch")
    assert len(wrong.losses) == 3
    with pytest.raises(AssertionError):
        assert_same_curve(wrong, gpu_lab.run("single", settings), BANDS[settings.get("mixed_precision", "bf16")])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("fsdp2", marks=pytest.mark.thorough)])
def test_a_teacher_is_asked_and_has_the_curve_of_one_gpu(gpu_lab: GpuLab, strategy: str):
    teacher = gpu_lab.run("single", {}).output / "export"
    settings = PACKED | {"objective": f"{{name: distill, teacher: {teacher}, loss_top_k: 8, beta: 0.5}}"}
    run = gpu_lab.run(strategy, settings)
    assert run.losses != gpu_lab.run(strategy, PACKED).losses
    assert_same_curve(run, gpu_lab.run("single", settings), BANDS["bf16"])


@pytest.mark.slow
@pytest.mark.simulated
def test_selective_checkpointing_does_not_compute_attention_again(gpu_lab: GpuLab):
    calls = {}
    for kind in ("false", "selective", "true"):
        run = gpu_lab.run("ddp", PACKED | {"model.gradient_checkpointing": kind})
        calls[kind] = run.report()["attention"]["flash attention forward"]
    assert calls["selective"] == calls["false"] < calls["true"]


SIGTERM_IN_STEP_1 = {"COOKBOOK_FAULTS": json.dumps([{"rank": 1, "at": "data.next", "step": 1, "do": "SIGTERM"}])}
"""For one process, of which all then stop after that step."""
CHAINS = {
    "cpu to gpu": (("zero3", "cpu", "'no'"), ("fsdp2", "gpu", "'no'")),
    "gpu to cpu": (("tp", "gpu", "'no'"), ("zero2", "cpu", "'no'")),
    "offload to offload": (("fsdp2_offload", "gpu", "bf16"), ("zero3_offload", "gpu", "bf16")),
    "fp16, its loss scale": (("zero2", "gpu", "fp16"), ("fsdp2", "gpu", "fp16")),
    "fp16, and back": (("fsdp2", "gpu", "fp16"), ("zero2", "gpu", "fp16")),
}


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_state_crosses_devices_and_strategies(gpu_lab: GpuLab, chain: str):
    (first, on_first, precision), (second, on_second, _) = CHAINS[chain]
    settings = {"mixed_precision": precision, "run.resume": "auto"}
    stopped = gpu_lab.run(first, settings, on=on_first, variables=SIGTERM_IN_STEP_1, ends=(75,))
    assert len(stopped.steps) == 1
    resumed = gpu_lab.run(second, settings, on=on_second, after=stopped)
    reference = gpu_lab.run("single", {"mixed_precision": precision})
    assert resumed.record["resumed_from"]
    assert_same_curve(resumed, reference, BANDS[precision])


@pytest.mark.slow
def test_a_resume_that_forgets_the_moments_leaves_the_bands(gpu_lab: GpuLab):
    """The negative control: the same chain with a state of no moments."""
    settings = {"mixed_precision": "'no'", "run.resume": "auto"}
    stopped = gpu_lab.run("fsdp2", settings | {"run.stop_after_steps": "1"}, ends=(75,))
    resumed = gpu_lab.run("fsdp2", settings, after=stopped, sabotage="moments_of_zero")
    assert len(resumed.losses) == 3
    with pytest.raises(AssertionError):
        assert_same_curve(resumed, gpu_lab.run("single", {"mixed_precision": "'no'"}), BANDS["'no'"])


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_processes_that_share_a_gpu_have_the_same_curve(gpu_lab: GpuLab, strategy: str):
    """As `make test-gpu` runs them where there is one card: each a machine of its own, gloo in NCCL's place."""
    run = gpu_lab.run(strategy, PACKED, shared=True)
    assert [run.report(rank)["device"] for rank in range(2)] == [0, 0]
    assert_same_curve(run, gpu_lab.run(strategy, PACKED), (1e-9, 1e-9))
